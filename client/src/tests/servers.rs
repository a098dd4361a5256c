//! Servers of a job within the test process: the sessions of a server process, each on a thread, without files.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pserver_core::config::{Merge, Mode, OptimizerSettings, ParameterConfig};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::{Epoch, ServerIndex, ShardId, ShardIndex, Term};
use pserver_core::optim::Rule;
use pserver_core::port::{Event, Submit, Transport};
use pserver_core::server::{
    Coordinator, CoordinatorOptions, CoordinatorOutput, NonFinite, OperatorSettings, ServerOutput, Shard, ShardOptions,
};
use pserver_core::time::Now;
use pserver_core::wire::{Address, Frame, JobMessage, Kind, Scheme, ServerEntry};
use pserver_kernels::cpu::Cpu;
use pserver_transport::loopback::{Hub, LoopbackTransport};

use crate::{Client, ClientOptions};

pub(super) const CHUNK_BYTES: u32 = 4096;
/// A wait of a server's thread.
const WAIT: Duration = Duration::from_millis(5);

/// A frame that a shard has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenFrame {
    pub(super) shard: ShardId,
    pub(super) kind: Kind,
    /// Parameter and chunk of each entry.
    pub(super) chunks: Vec<(u32, u64)>,
    pub(super) bytes: u64,
}

/// A job with its servers.
pub(super) struct TestJob {
    hub: Hub,
    threads: Vec<JoinHandle<()>>,
    seen: Arc<Mutex<Vec<SeenFrame>>>,
    switches: Arc<ServerSwitches>,
}

/// Switches that control the threads of the servers.
#[derive(Default)]
struct ServerSwitches {
    is_over: AtomicBool,
    /// Whether shards handle no messages.
    are_shards_paused: AtomicBool,
    /// Whether the next shard that receives a push closes its connections.
    is_to_hang_up: AtomicBool,
}

impl TestJob {
    /// A job in mode sync of so many servers with so many shards each. Gradients are added up.
    pub(super) fn start(servers: u16, shards: u16, trainers: u32) -> Self {
        let mut job = Self { hub: Hub::default(), threads: Vec::new(), seen: Arc::default(), switches: Arc::default() };
        let (mode, staleness) = Mode::Sync.numbers();
        let job_message =
            JobMessage { mode, staleness, merge: Merge::Sum.number(), trainers, chunk_bytes: CHUNK_BYTES };
        let mut coordinator = Coordinator::new(
            CoordinatorOptions {
                epoch: Epoch(7),
                servers,
                job: job_message,
                default_config: ParameterConfig::of(Rule::default()).encode(),
                given: OperatorSettings::default(),
                lease: Duration::from_secs(10),
                grace: Duration::from_secs(2),
                watches: false,
                takes_nonfinite: false,
                model_dir: String::new(),
            },
            None,
        )
        .expect("its options are right");
        for server in 0..servers {
            let entry =
                ServerEntry { address: address(server).to_string(), shards: shards.into(), keeps_journal: false };
            coordinator.register(server.into(), entry).expect("the server belongs to the job");
        }
        job.run_coordinator(coordinator);
        let all = (0..servers).flat_map(|server| (0..shards).map(move |shard| (server, shard)));
        for (server, shard) in all {
            job.run_shard(ShardId { server: ServerIndex(server), shard: ShardIndex(shard) });
        }
        job
    }

    fn run_coordinator(&mut self, mut coordinator: Coordinator) {
        let transport = self.hub.listen(&address(0).of_lane(0)).expect("nobody else listens there");
        let switches = Arc::clone(&self.switches);
        let session = move |now: Now, events: &mut Vec<Event>, out: &mut Vec<ServerOutput>| {
            let mut outputs = Vec::new();
            events.drain(..).for_each(|event| coordinator.handle(now, event, &mut outputs));
            if coordinator.deadline().is_some_and(|deadline| deadline <= now) {
                coordinator.expire(now, &mut outputs);
            }
            out.extend(outputs.into_iter().filter_map(|output| match output {
                CoordinatorOutput::Session(output) => Some(output),
                _ => None,
            }));
        };
        self.threads.push(std::thread::spawn(move || serve(transport, &switches.is_over, session)));
    }

    fn run_shard(&mut self, id: ShardId) {
        let at = address(id.server.0).of_lane(id.lane());
        let transport = self.hub.listen(&at).expect("nobody else listens there");
        let options = ShardOptions {
            epoch: Epoch(7),
            term: Term::FIRST,
            round_timeout: Duration::from_secs(20),
            grace: Duration::from_secs(2),
            shares_memory: false,
            receives: transport.capabilities().receives,
            memory_limit: None,
            nonfinite: NonFinite::Refuse,
            compile: pserver_program::server_flow::compile,
            load: pserver_core::port::no_programs,
        };
        let (switches, seen) = (Arc::clone(&self.switches), Arc::clone(&self.seen));
        let thread = move || {
            let mut shard = Shard::new(options, Box::new(Cpu::new()));
            let (mut held, mut peers) = (Vec::new(), Vec::new());
            let over = Arc::clone(&switches);
            serve(transport, &over.is_over, move |now, events, out| {
                held.append(events);
                if switches.are_shards_paused.load(SeqCst) {
                    return;
                }
                shard.begin_turn(1 + now.0 * 1_000_000);
                let mut has_push = false;
                for event in held.drain(..) {
                    match &event {
                        Event::Accepted { peer, .. } => peers.push(*peer),
                        Event::Received { frame, .. } => {
                            has_push |= frame.head.kind == Kind::Push;
                            seen.lock().expect("nobody panics with it").push(SeenFrame::of(id, frame));
                        }
                        _ => {}
                    }
                    shard.handle(now, event, out);
                }
                if shard.deadline().is_some_and(|deadline| deadline <= now) {
                    shard.expire(now, out);
                }
                shard.attend(now, out).expect("it has no files and no device");
                shard.commit().expect("it has no files");
                if has_push && switches.is_to_hang_up.swap(false, SeqCst) {
                    // The answers of the shard are lost, but the shard has the gradients.
                    out.clear();
                    out.extend(peers.drain(..).map(ServerOutput::Close));
                }
            });
        };
        self.threads.push(std::thread::spawn(thread));
    }

    /// A client with this rank.
    pub(super) fn client(&self, trainer: u32) -> Client {
        self.client_with(|options| ClientOptions { trainer: Some(trainer), ..options })
    }

    pub(super) fn client_with(&self, change: impl FnOnce(ClientOptions) -> ClientOptions) -> Client {
        Client::within(change(ClientOptions::new(address(0))), &self.hub).expect("it needs nothing of the system")
    }

    /// A client that has initialised these parameters of float32, all with SGD with a learning rate of 1.
    pub(super) fn begin(&self, parameters: &[(&str, Vec<f32>)]) -> Client {
        self.begin_with(parameters, "sgd { } const_lr { learning_rate: 1.0 }")
    }

    /// The same with this configuration.
    pub(super) fn begin_with(&self, parameters: &[(&str, Vec<f32>)], config: &str) -> Client {
        let client = self.client(0);
        let settings = OptimizerSettings::from_text(config).expect("it is right");
        let of_all = OptimizerSettings { backup_trainers: 0, ..settings.clone() };
        assert!(client.begin_init(&of_all).expect("it joins"), "the first trainer is chosen");
        for (name, values) in parameters {
            let shape = [values.len() as u64];
            client.init_param(name, Float32, &shape, bytemuck::cast_slice(values), &settings).expect("it is right");
        }
        client.finish_init().expect("every shard takes it");
        client
    }

    /// Pauses the shards, which then handle no message, or resumes them with the messages that arrived meanwhile.
    pub(super) fn pause_shards(&self, is_paused: bool) {
        self.switches.are_shards_paused.store(is_paused, SeqCst);
    }

    /// Makes the next shard that receives a push accept the gradients, drop its answers and close its connections.
    pub(super) fn hang_up(&self) {
        self.switches.is_to_hang_up.store(true, SeqCst);
    }

    /// Frames of a kind that shards have received since the last call, in their order.
    pub(super) fn take_seen(&self, kind: Kind) -> Vec<SeenFrame> {
        let all = std::mem::take(&mut *self.seen.lock().expect("nobody panics with it"));
        all.into_iter().filter(|frame| frame.kind == kind).collect()
    }
}

impl Drop for TestJob {
    fn drop(&mut self) {
        self.switches.is_over.store(true, SeqCst);
        let ended = self.threads.drain(..).map(JoinHandle::join);
        let panicked = ended.filter(Result::is_err).count();
        assert!(panicked == 0 || std::thread::panicking(), "{panicked} threads of the servers panicked");
    }
}

impl SeenFrame {
    fn of(shard: ShardId, frame: &Frame) -> Self {
        let chunks = frame.entries.iter().map(|entry| (entry.id.parameter.0, entry.id.chunk.0)).collect();
        Self { shard, kind: frame.head.kind, chunks, bytes: frame.payload_bytes() }
    }
}

fn address(server: u16) -> Address {
    Address { scheme: Scheme::Loopback, host: format!("server-{server}"), port: 0 }
}

/// Runs a session until the job is over.
fn serve(
    mut transport: LoopbackTransport,
    is_over: &AtomicBool,
    mut session: impl FnMut(Now, &mut Vec<Event>, &mut Vec<ServerOutput>),
) {
    let (begun, mut events, mut out, mut queue) = (Instant::now(), Vec::new(), Vec::new(), VecDeque::<Submit>::new());
    while !is_over.load(SeqCst) {
        transport.poll(&mut events).expect("loopback does not fail");
        let now = Now(u64::try_from(begun.elapsed().as_millis()).expect("a test is short"));
        session(now, &mut events, &mut out);
        for output in out.drain(..) {
            match output {
                ServerOutput::Submit(submit) => queue.push_back(submit),
                ServerOutput::Close(peer) => {
                    transport.submit(&mut queue).expect("loopback does not fail");
                    transport.close(peer);
                }
            }
        }
        transport.submit(&mut queue).expect("loopback does not fail");
        transport.wait(WAIT);
    }
}
