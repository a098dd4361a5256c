//! Queues in the parts of servers: what one trainer sends to others in the middle of a step.
//!
//! A queue of one item is a parameter with one sender on its server, and its item number `n` is version `n`: servers
//! recognise a repeated item, keep it in their journals, and let a reader wait for it.

use std::collections::BTreeMap;

use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ServerIndex, TrainerId, Version};
use pserver_program::transpile::ProgramPart;
use pserver_program::{Destination, Dim, Graph, Node, OpKind, ProgramPeer, Tensor, VariableFacts};

use super::server_parameters::nodes;

/// The form of a queue in a server's part.
const FORM: &str = "recv, enqueue, dequeue of one item, and send of one channel to trainers";

/// A queue that a server holds for one trainer and its readers.
#[derive(Clone, Debug)]
pub(super) struct ServerQueue {
    /// The channel, which is the name of the queue's parameter.
    pub(super) channel: String,
    /// Index of the server that holds it.
    pub(super) server: u32,
    /// The only trainer that sends to it.
    sender: u32,
    element_type: ElementType,
    /// The dimensions of an item.
    shape: Vec<Dim>,
}

impl ServerQueue {
    /// Room for a value of one trainer, which is sent under its name.
    pub(super) fn of_trainer(
        channel: String,
        server: u32,
        sender: u32,
        element_type: ElementType,
        shape: &[u64],
    ) -> Self {
        let shape = shape.iter().copied().map(Dim::Fixed).collect();
        Self { channel, server, sender, element_type, shape }
    }

    /// The settings with which a client declares it.
    fn settings(&self) -> Result<OptimizerSettings, Failure> {
        // The value after a round of one gradient is this gradient.
        let mut settings = OptimizerSettings::from_text("algorithm: 'sum'")?;
        let server = u16::try_from(self.server).map(ServerIndex);
        let server = server.map_err(|_| self.refused(format!("found server {}; expected below 65536", self.server)))?;
        (settings.owner, settings.sender) = (Some(server), Some(TrainerId(self.sender)));
        Ok(settings)
    }

    /// The dimensions of an item with this batch.
    fn dimensions(&self, batch: Option<u64>) -> Result<Vec<u64>, Failure> {
        let dimension = |dim: &Dim| match dim {
            Dim::Fixed(length) => Some(*length),
            Dim::Batch => batch,
        };
        let known: Option<Vec<u64>> = self.shape.iter().map(dimension).collect();
        known.ok_or_else(|| {
            let found = VariableFacts::Dense { element_type: self.element_type, shape: self.shape.clone() };
            self.refused(format!("found {found} of a batch not given; expected initialise_for_batch, which gives it"))
        })
    }

    /// The batch for which the queue was declared, if its items have one.
    fn batch(&self, client: &Client) -> Result<Option<u64>, Failure> {
        let found = client.describe(&self.channel)?;
        let lengths = self.shape.iter().zip(&found.shape);
        let batch = lengths.clone().find(|(dim, _)| **dim == Dim::Batch).map(|(_, length)| *length);
        let fits = found.element_type == self.element_type && self.dimensions(batch)? == found.shape;
        fits.then_some(batch).ok_or_else(|| {
            let (found, expected) = (VariableFacts::fixed(found.element_type, &found.shape), &self.shape);
            self.refused(format!("found {found} in the job; expected {} of {expected:?}", self.element_type))
        })
    }

    /// Declares the queue, empty.
    pub(super) fn declare(&self, client: &Client, batch: Option<u64>) -> Result<(), Failure> {
        let shape = self.dimensions(batch)?;
        let item = Tensor::try_zeros(self.element_type, &shape).map_err(|failure| self.refused(failure.to_string()))?;
        client.init_param(&self.channel, self.element_type, &shape, item.bytes(), &self.settings()?)
    }

    fn refused(&self, why: String) -> Failure {
        Failure::call(format!("queue {:?}: {why}", self.channel))
    }
}

/// The queues in a server's part, or in a component of one.
///
/// # Errors
/// When a queue has another form than the transpiler writes, or not one trainer that sends to it.
pub(super) fn queues_of(parts: &[ProgramPart], graph: &Graph, server: u32) -> Result<Vec<ServerQueue>, Failure> {
    let enqueues: Vec<&Node> = nodes(graph).filter(|node| node.kind == OpKind::Enqueue).collect();
    let dequeues = nodes(graph).filter(|node| matches!(node.kind, OpKind::Dequeue { .. })).count();
    if enqueues.len() != dequeues {
        let found = format!("found {} enqueue and {dequeues} dequeue", enqueues.len());
        return Err(Failure::call(format!("server {server}: {found}; expected {FORM} for each queue")));
    }
    let queue = |enqueue: &Node| {
        let name = &graph.variable(enqueue.inputs[0]).name;
        let one = of_enqueue(parts, graph, server, enqueue);
        one.map_err(|why| Failure::call(format!("server {server}, queue {name:?}: {why}")))
    };
    enqueues.into_iter().map(queue).collect()
}

fn of_enqueue(parts: &[ProgramPart], graph: &Graph, server: u32, enqueue: &Node) -> Result<ServerQueue, String> {
    let [queue, item] = enqueue.inputs[..] else { unreachable!("a checked enqueue has two inputs") };
    let VariableFacts::Queue { of, capacity } = &graph.variable(queue).facts else {
        unreachable!("a checked enqueue has a queue")
    };
    if *capacity != 1 {
        return Err(format!("found a capacity of {capacity}; expected 1"));
    }
    let VariableFacts::Dense { element_type, shape } = &**of else {
        return Err(format!("found items of {of}; expected a dense tensor"));
    };
    let received = nodes(graph).find_map(|node| match &node.kind {
        OpKind::Recv { channel } if node.outputs == [item] => Some(channel),
        _ => None,
    });
    let channel = received.ok_or_else(|| format!("found no recv of its items alone; expected {FORM}"))?;
    let taken = nodes(graph).find_map(|node| match node.kind {
        OpKind::Dequeue { min_count: 1 } if node.inputs == [queue] => Some(node.outputs[0]),
        _ => None,
    });
    let taken = taken.ok_or_else(|| format!("found no dequeue of one item; expected {FORM}"))?;
    for node in nodes(graph).filter(|node| node.inputs.contains(&taken)) {
        let is_sent = matches!(&node.kind, OpKind::Send { channel: on, to: Destination::Peer(ProgramPeer::Trainer(_)) }
            if on == channel);
        if !is_sent {
            return Err(format!("found {} of its item; expected {FORM}", node.kind.name()));
        }
    }
    let sender = sender(parts, channel, server)?;
    Ok(ServerQueue { channel: channel.clone(), server, sender, element_type: *element_type, shape: shape.clone() })
}

/// The only trainer that sends to a channel of a server.
fn sender(parts: &[ProgramPart], channel: &str, server: u32) -> Result<u32, String> {
    let sends = |part: &&ProgramPart| sent(&part.graph).any(|found| found == (channel, server));
    let peers = parts.iter().filter(sends).flat_map(|part| &part.peers);
    let senders: Vec<u32> = peers
        .filter_map(|peer| match peer {
            ProgramPeer::Trainer(number) => Some(*number),
            ProgramPeer::Server(_) => None,
        })
        .collect();
    match senders[..] {
        [one] => Ok(one),
        _ => Err(format!("found {} trainers that send to channel {channel:?}; expected one", senders.len())),
    }
}

/// The channels and servers of a part's sends.
fn sent(graph: &Graph) -> impl Iterator<Item = (&str, u32)> {
    nodes(graph).filter_map(|node| match &node.kind {
        OpKind::Send { channel, to: Destination::Peer(ProgramPeer::Server(server)) } => {
            Some((channel.as_str(), *server))
        }
        _ => None,
    })
}

/// A trainer's end of a queue.
struct QueueEnd {
    queue: ServerQueue,
    /// The dimensions of an item.
    shape: Vec<u64>,
    /// The items that this trainer has sent or received.
    items: u64,
}

/// A trainer's ends of all queues, by channel.
#[derive(Default)]
pub(super) struct QueueEnds {
    sent: BTreeMap<String, QueueEnd>,
    received: BTreeMap<String, QueueEnd>,
    batch: Option<u64>,
}

impl QueueEnds {
    /// The ends of the queues that a trainer's part uses, all new.
    ///
    /// # Errors
    /// When the job's queues are others, or have had items: a trainer's parameters are lost with its process.
    pub(super) fn of(client: &Client, graph: &Graph, queues: &[ServerQueue]) -> Result<Self, Failure> {
        let mut ends = Self::default();
        let receives = |channel: &str| {
            nodes(graph).any(|node| matches!(&node.kind, OpKind::Recv { channel: found } if found == channel))
        };
        for queue in queues {
            let batch = queue.batch(client)?;
            ends.batch = ends.batch.or(batch);
            let shape = queue.dimensions(batch)?;
            let end = || QueueEnd { queue: queue.clone(), shape: shape.clone(), items: 0 };
            let is_sent = sent(graph).any(|found| found == (queue.channel.as_str(), queue.server));
            if is_sent {
                // The first item of another trainer may be there.
                end().check_new(client, 0)?;
                ends.sent.insert(queue.channel.clone(), end());
            } else if receives(&queue.channel) {
                end().check_new(client, 1)?;
                ends.received.insert(queue.channel.clone(), end());
            }
        }
        Ok(ends)
    }

    /// Whether the trainer has no queue.
    pub(super) fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.received.is_empty()
    }

    /// Refuses data of another batch than the queues were declared for.
    pub(super) fn check_batch(&self, facts: &VariableFacts, tensor: &Tensor) -> Result<(), Failure> {
        let (Some(expected), VariableFacts::Dense { shape, .. }) = (self.batch, facts) else { return Ok(()) };
        let mut lengths = shape.iter().zip(tensor.shape());
        match lengths.find(|(dim, found)| **dim == Dim::Batch && **found != expected) {
            Some((_, found)) => Err(Failure::call(format!(
                "found a batch of {found}; expected {expected}, for which the job's queues were initialised"
            ))),
            None => Ok(()),
        }
    }

    /// Whether a channel is a queue that this trainer sends to.
    pub(super) fn is_sent(&self, channel: &str) -> bool {
        self.sent.contains_key(channel)
    }

    /// Sends an item. A repetition after a failure counts once.
    pub(super) fn send(&mut self, client: &Client, channel: &str, item: &Tensor) -> Result<(), Failure> {
        let end = self.sent.get_mut(channel).expect("the channel is a queue");
        if item.shape() != end.shape {
            let (found, expected) = (item.shape(), &end.shape);
            return Err(end.queue.refused(format!("found an item of {found:?}; expected {expected:?}")));
        }
        let element_type = item.elements().element_type();
        client.push(&[GradientSlice { name: channel, element_type, content: item.bytes() }], None)?;
        end.items += 1;
        Ok(())
    }

    /// Waits for the next item of a queue, into `room` where that fits; none for another channel. Returns the server
    /// with the item.
    pub(super) fn receive(
        &mut self,
        client: &Client,
        channel: &str,
        room: Option<Tensor>,
    ) -> Result<Option<(ProgramPeer, Tensor)>, Failure> {
        let Some(end) = self.received.get_mut(channel) else { return Ok(None) };
        let fits =
            |room: &Tensor| room.shape() == end.shape && room.elements().element_type() == end.queue.element_type;
        let mut item = match room.filter(fits) {
            Some(room) => room,
            None => Tensor::try_zeros(end.queue.element_type, &end.shape)
                .map_err(|failure| end.queue.refused(failure.to_string()))?,
        };
        let next = Version(end.items + 1);
        let found = client.pull_version(&mut [DestinationSlice::new(channel, item.bytes_mut())], next)?;
        if found != next {
            return Err(end.queue.refused(format!("found item {found}; expected {next}, which it has overwritten")));
        }
        end.items = next.0;
        Ok(Some((ProgramPeer::Server(end.queue.server), item)))
    }
}

impl QueueEnd {
    /// Refuses a queue that has had more items than this.
    fn check_new(&self, client: &Client, items_max: u64) -> Result<(), Failure> {
        let Self { queue, shape, .. } = self;
        let mut item =
            Tensor::try_zeros(queue.element_type, shape).map_err(|failure| queue.refused(failure.to_string()))?;
        let place = DestinationSlice::new(&queue.channel, item.bytes_mut());
        let Version(found) = client.pull_version(&mut [place], Version(0))?;
        if found <= items_max {
            return Ok(());
        }
        Err(queue.refused(format!(
            "found {found} items sent; expected a new job, because the parameters of a trainer end with its process"
        )))
    }
}

#[cfg(test)]
mod tests;
