//! Queues on servers: what one trainer sends to others in the middle of a step.
//!
//! ```text
//! trainer 0                server                                        trainer 1
//! send(x)      --------->  x = recv;  enqueue(queue, x)
//!                          item = dequeue(queue);  send(item)  ------->  x = recv
//! ```
//!
//! A queue holds one item. A job's server keeps it as a parameter with one sender, whose value is the item, so an item
//! may be sent only after all readers have taken the one before. The transpiler that writes queues sees to that.

use crate::block::Block;
use crate::op::{OpKind, OpRole, ProgramPeer};
use crate::update_loop::loop_forever;
use crate::variable::{Purpose, VariableFacts};

use super::write::{BlockWriter, UsedNames};

/// A queue, and the processes that read it.
pub(super) struct QueueRoute {
    /// The channel to the server, and on to the readers.
    pub(super) channel: String,
    /// The facts of an item.
    pub(super) facts: VariableFacts,
    /// The server that holds it.
    pub(super) server: u32,
    /// The trainers that receive each item.
    pub(super) readers: Vec<ProgramPeer>,
    /// The name of the queue.
    queue: String,
    /// The name of an item that leaves it.
    item: String,
}

/// Distributes queues over servers in turn. Each has its channel, the facts of its items, and its readers.
pub(super) fn routes(
    queues: impl IntoIterator<Item = (String, VariableFacts, Vec<ProgramPeer>)>,
    servers: u32,
    names: &mut UsedNames<'_>,
) -> Vec<QueueRoute> {
    let in_turn = (0..servers).cycle();
    let route = |((channel, facts, readers), server)| {
        let [queue, item] = ["queue", "item"].map(|what| names.fresh(format!("{channel}@{what}")));
        QueueRoute { channel, facts, server, readers, queue, item }
    };
    queues.into_iter().zip(in_turn).map(route).collect()
}

/// The blocks of one server.
pub(super) fn blocks(routes: &[QueueRoute], server: u32) -> Vec<Block> {
    let (mut outer, mut inner) = (BlockWriter::default(), BlockWriter::default());
    for route in routes.iter().filter(|route| route.server == server) {
        let QueueRoute { channel, facts, queue, item, .. } = route;
        let of = VariableFacts::Queue { of: Box::new(facts.clone()), capacity: 1 };
        outer.declare(queue, of, Purpose::State);
        inner.recv(channel, channel, facts.clone());
        inner.op(OpKind::Enqueue, &[queue, channel], &[], OpRole::Communication);
        inner.op(OpKind::Dequeue { min_count: 1 }, &[queue], &[item], OpRole::Communication);
        route.readers.iter().for_each(|reader| inner.send(item, channel, *reader));
    }
    if inner.block.ops.is_empty() {
        return vec![outer.block];
    }
    outer.block.ops.push(loop_forever(1));
    inner.block.parent = Some(0);
    vec![outer.block, inner.block]
}
