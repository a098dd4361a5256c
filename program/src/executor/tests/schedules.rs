//! Random schedules of received values, units and room: no value is lost or duplicated, and the order stays.

use std::sync::Arc;

use super::stage::{
    Post, accumulate, as_number, dequeue, enqueue, executor, loops, number, one, queue, recv, send, variable,
};
use crate::executor::{Executor, RunStatus};
use crate::{Graph, Op, ProgramPeer, Purpose};
use pserver_core::config::Merge;
use pserver_core::prng::Prng;

const SINK: ProgramPeer = ProgramPeer::Server(0);
const SENDER: ProgramPeer = ProgramPeer::Trainer(0);

/// Received values go through a queue, are dequeued `taken` at a time, go through a second queue, and are added up
/// `count` pieces at a time.
struct Shape {
    graph: Arc<Graph>,
    taken: usize,
    count: usize,
}

impl Shape {
    fn new(prng: &mut Prng) -> Self {
        let (taken, count) = (1 + prng.index(3), 1 + prng.index(4));
        let (first, second) = (taken + prng.index(3), 1 + prng.index(3));
        let sizes = [first, second].map(|size| queue(size as u64));
        let [first, second] = sizes;
        let outer = vec![variable("p", first, Purpose::State), variable("q", second, Purpose::State)];
        let names: Vec<String> = (0..taken).map(|place| format!("a{place}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut middle = vec![dequeue("p", &names)];
        middle.extend(names.iter().map(|name| enqueue("q", name)));
        let pieces = u32::try_from(count).expect("few");
        let last: Vec<Op> =
            vec![dequeue("q", &["b"]), accumulate(pieces, Merge::Sum, None, &["b"], "sum"), send("out", SINK, "sum")];
        let arrives = vec![variable("x", number(), Purpose::Temporary)];
        let bodies = vec![(arrives, vec![recv("in", &["x"]), enqueue("p", "x")]), (vec![], middle), (vec![], last)];
        Self { graph: Arc::new(loops(outer, bodies)), taken, count }
    }

    /// The expected output for these items: the sums of complete groups, in order.
    fn expected(&self, items: &[f64]) -> Vec<f64> {
        let through = items.len() / self.taken * self.taken;
        let sum = |group: &[f64]| group.iter().sum::<f64>();
        items[..through].chunks_exact(self.count).map(sum).collect()
    }
}

/// Delivers items, runs units and removes sent messages in a random order, and then runs to completion.
fn schedule(shape: &Shape, prng: &mut Prng) {
    let mut executor = executor(&shape.graph, &[], 1 + prng.index(2));
    let mut post = Post::new(1 + prng.index(2));
    let (mut items, mut found) = (Vec::new(), Vec::new());
    for _ in 0..4 + prng.index(24) {
        match prng.index(4) {
            0 | 1 => {
                // Sums of such numbers are exact: a loss or a double changes some of them.
                let item = f64::from(prng.number());
                let back = executor.arrive("in", SENDER, one(item)).expect("it fits");
                items.extend(back.is_none().then_some(item));
            }
            2 => run(&mut executor, &mut post, prng.next() % 9),
            _ => found.extend(post.sent.pop_front().map(|(_, _, value)| as_number(&value))),
        }
    }
    loop {
        run(&mut executor, &mut post, u64::MAX);
        match post.sent.pop_front() {
            Some((_, _, value)) => found.push(as_number(&value)),
            None => break,
        }
    }
    assert_eq!(found, shape.expected(&items), "{} taken, {} added up", shape.taken, shape.count);
}

fn run(executor: &mut Executor, post: &mut Post, units: u64) {
    let status = executor.run(post, units).expect("something is always awaited from outside");
    assert_ne!(status, RunStatus::Ended, "a loop has no end");
}

/// 3,000 schedules; 1,000,000 with `PSERVER_FULL=1`. `PSERVER_SEED` replays.
#[test]
fn nothing_is_lost_and_nothing_is_there_twice() {
    let given = std::env::var("PSERVER_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 = given.unwrap_or(0x5eed_0004);
    println!("nothing_is_lost_and_nothing_is_there_twice: PSERVER_SEED={seed}");
    let schedules = if std::env::var_os("PSERVER_FULL").is_some() { 1_000_000 } else { 3_000 };
    let mut prng = Prng(seed);
    let shapes: Vec<Shape> = (0..40).map(|_| Shape::new(&mut prng)).collect();
    for _ in 0..schedules {
        schedule(&shapes[prng.index(40)], &mut prng);
    }
}
