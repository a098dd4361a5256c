//! Rounds within one process, for the microbenchmarks.

use std::collections::VecDeque;

use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, Submit, Transport};
use pserver_core::wire::{Frame, Head, Kind};
use pserver_node::Server;
use pserver_node::settings::Settings;
use pserver_transport::loopback::{LoopbackTransport, pair};

/// Bytes that a ping's frame brings.
const PING_BYTES: usize = 4096;

/// Two ends of a loopback connection, turned by one thread.
pub struct Ping {
    near: LoopbackTransport,
    far: LoopbackTransport,
    to_far: PeerId,
    to_near: Option<PeerId>,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    tickets: u64,
}

impl Ping {
    /// A connection.
    ///
    /// # Errors
    /// When the transport refuses its own address.
    pub fn new() -> Result<Self, Failure> {
        let (mut near, far, address) = pair();
        let to_far = near.connect(&address)?;
        let (queue, events) = (VecDeque::new(), Vec::new());
        Ok(Self { near, far, to_far, to_near: None, queue, events, tickets: 0 })
    }

    /// One frame there and one back.
    ///
    /// # Panics
    /// When a frame does not arrive.
    pub fn round(&mut self) {
        self.send(self.to_far, true);
        while !self.landed(false) {}
        let back = self.to_near.expect("the far end has seen the connection");
        self.send(back, false);
        while !self.landed(true) {}
    }

    fn send(&mut self, peer: PeerId, from_near: bool) {
        self.tickets += 1;
        let frame = Frame { control: vec![0; PING_BYTES], ..Frame::bare(Head::new(Kind::Control)) };
        self.queue.push_back(Submit::Send { peer, ticket: Ticket(self.tickets), frame, body: Payloads::new() });
        let end = if from_near { &mut self.near } else { &mut self.far };
        end.submit(&mut self.queue).expect("loopback does not fail");
    }

    /// Looks once; whether a frame has landed.
    fn landed(&mut self, at_near: bool) -> bool {
        let end = if at_near { &mut self.near } else { &mut self.far };
        end.poll(&mut self.events).expect("loopback does not fail");
        let mut landed = false;
        for event in self.events.drain(..) {
            match event {
                Event::Accepted { peer, .. } => self.to_near = Some(peer),
                Event::Received { .. } => landed = true,
                Event::Gone { reason, .. } => panic!("the connection is gone: {reason}"),
                _ => {}
            }
        }
        landed
    }
}

/// A server, and one trainer with some parameters.
pub struct LocalJob {
    client: Client,
    names: Vec<String>,
    gradients: Vec<Vec<u8>>,
    values: Vec<Vec<u8>>,
    // After the client, which needs it.
    _server: Server,
}

impl LocalJob {
    /// A server on a free port, and so many parameters of so many bytes of f32.
    ///
    /// # Errors
    /// When the server cannot start, or a parameter is refused.
    pub fn start(parameters: usize, bytes: usize) -> anyhow::Result<Self> {
        let line = ["--bind", "tcp://127.0.0.1:0", "--shards", "1", "--log-level", "off"];
        let server = Server::start(Settings::of_words(line)?)?;
        let client = Client::new(ClientOptions::new(server.address().clone()))?;
        let settings = OptimizerSettings::default();
        anyhow::ensure!(client.begin_init(&settings)?, "the only trainer initialises");
        let names: Vec<String> = (0..parameters).map(|index| format!("layer{index}/weight")).collect();
        let values = vec![vec![0; bytes]; parameters];
        for (name, value) in names.iter().zip(&values) {
            client.init_param(name, ElementType::Float32, &[], value, &settings)?;
        }
        client.finish_init()?;
        let gradients = vec![crate::gradient(0, bytes); parameters];
        Ok(Self { client, names, gradients, values, _server: server })
    }

    /// Pushes the gradients and pulls the values, in one call.
    ///
    /// # Panics
    /// When the server does not answer.
    #[inline(never)]
    pub fn round(&mut self) {
        let given = |(name, content)| GradientSlice { name, element_type: ElementType::Float32, content };
        let wanted = |(name, content)| DestinationSlice::new(name, content);
        let names = || self.names.iter().map(String::as_str);
        let given: Vec<_> = names().zip(self.gradients.iter().map(Vec::as_slice)).map(given).collect();
        let mut into: Vec<_> = names().zip(self.values.iter_mut().map(Vec::as_mut_slice)).map(wanted).collect();
        self.client.push_pull(&given, None, &mut into).expect("the server is in this process");
    }
}
