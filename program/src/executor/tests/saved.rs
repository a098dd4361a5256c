//! A state that is encoded and decoded goes on as one that never was.

use std::sync::Arc;

use proptest::prelude::*;

use super::stage::{
    Post, accumulate, answer, dequeue, enqueue, executor, loops, number, op, queue, recv, strings, variable,
};
use crate::executor::Executor;
use crate::{Graph, OpKind, ProgramPeer, Purpose};
use pserver_core::config::Merge;
use pserver_core::prng::Prng;

/// Pieces pass a queue in pairs; and an accumulator in rounds, whose sum a state keeps.
fn program() -> Graph {
    let outer = vec![variable("q", queue(3), Purpose::State), variable("total", number(), Purpose::State)];
    let temporary = |name: &str| variable(name, number(), Purpose::Temporary);
    loops(
        outer,
        vec![
            (vec![temporary("x")], vec![recv("x", &["x"]), enqueue("q", "x")]),
            (
                vec![],
                vec![
                    dequeue("q", &["one", "other"]),
                    op(OpKind::Sum, &["one", "other"], &["pair"]),
                    op(OpKind::Add, &["total", "pair"], &["total"]),
                ],
            ),
            (
                vec![temporary("g")],
                vec![
                    recv("g", &["g", "sender"]),
                    accumulate(2, Merge::Sum, Some(0), &["g", "sender"], "merged"),
                    strings(2, "sender", "senders"),
                    op(OpKind::Add, &["total", "merged"], &["total"]),
                    answer("total", "total", "senders"),
                ],
            ),
        ],
    )
}

fn begun(graph: &Arc<Graph>) -> Executor {
    let senders = [ProgramPeer::Trainer(0), ProgramPeer::Trainer(1)];
    let mut new = executor(graph, &senders, 2);
    new.set("total", super::stage::one(0.0)).expect("the variable is there");
    new
}

proptest! {
    #[test]
    fn a_decoded_executor_goes_on_as_the_encoded_one(seed: u64, steps in 1usize..80) {
        let graph = Arc::new(program());
        let (mut whole, mut broken) = (begun(&graph), begun(&graph));
        let mut posts = [Post::new(1), Post::new(1)];
        let mut prng = Prng(seed);
        for step in 0..steps {
            let from = ProgramPeer::Trainer(u32::try_from(prng.below(2)).expect("it is small"));
            let channel = if prng.below(2) == 0 { "x" } else { "g" };
            let value = super::stage::one(f64::from(u32::try_from(step).expect("few")));
            let units = prng.below(4);
            // The receivers take what was sent, or do not.
            let takes = prng.below(3) == 0;
            let mut outcomes = Vec::new();
            for (executor, post) in [&mut whole, &mut broken].into_iter().zip(&mut posts) {
                let kept = executor.arrive(channel, from, value.clone()).expect("it is a channel");
                executor.run(post, units).expect("it is never stuck");
                let sent: Vec<_> = post.sent.iter().cloned().collect();
                outcomes.push((kept, sent, executor.value("total").cloned()));
                if takes {
                    post.sent.clear();
                }
            }
            prop_assert_eq!(&outcomes[0], &outcomes[1]);
            if prng.below(3) == 0 {
                let is_total = |variable| Some(variable) == graph.find("total");
                let (bytes, total) = (broken.encode(is_total), broken.value("total").cloned().expect("it is set"));
                broken = begun(&graph);
                broken.set("total", total).expect("it fits");
                broken.decode(&bytes).expect("it is whole");
                prop_assert_eq!(broken.encode(is_total), bytes);
            }
        }
    }
}

#[test]
fn a_state_of_another_program_is_refused() {
    let bytes = begun(&Arc::new(program())).encode(|_| false);
    let other = loops(vec![], vec![(vec![variable("x", number(), Purpose::Temporary)], vec![recv("x", &["x"])])]);
    let mut other = executor(&Arc::new(other), &[], 1);
    let text = "the state of the executor is damaged, or of another program";
    assert_eq!(other.decode(&bytes).expect_err("it is of another").to_string(), text);
    assert_eq!(other.decode(&bytes[..bytes.len() - 1]).expect_err("it is damaged").to_string(), text);
}
