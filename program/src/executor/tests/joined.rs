//! Trainers and a server, each a program of its own, joined by a wire that delivers at random times.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;

use super::stage::{Post, accumulate, answer, executor, loops, op, recv, send, strings, variable};
use crate::executor::{Executor, UnitIndex, UnitKind};
use crate::{Elements, Graph, OpKind, ProgramPeer, Purpose, Tensor, VariableFacts, VariableValue};
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;
use pserver_core::prng::Prng;

const SERVER: ProgramPeer = ProgramPeer::Server(0);
const ROUNDS: u64 = 8;
const RATE: f32 = 0.25;

fn facts() -> VariableFacts {
    VariableFacts::fixed(ElementType::Float32, &[2])
}

fn pair(values: [f32; 2]) -> VariableValue {
    Tensor::new([2], Elements::Float32(values.to_vec())).into()
}

/// Trains `w` towards its target: the gradient is `w - target`.
fn trainer_program() -> Graph {
    let outer = vec![variable("w", facts(), Purpose::Parameter), variable("target", facts(), Purpose::State)];
    let body = vec![
        op(OpKind::Scale { factor: -1.0 }, &["target"], &["minus"]),
        op(OpKind::Add, &["w", "minus"], &["gradient"]),
        send("w@gradient", SERVER, "gradient"),
        recv("w", &["w"]),
    ];
    loops(outer, vec![(vec![], body)])
}

fn server_program(count: u32, staleness: Option<u32>) -> Graph {
    let outer = vec![
        variable("w", facts(), Purpose::Parameter),
        variable("count", VariableFacts::fixed(ElementType::Int64, &[]), Purpose::State),
    ];
    let config = format!("const_lr {{ learning_rate: {RATE} }}");
    let body = vec![
        recv("w@gradient", &["gradient", "sender"]),
        accumulate(count, Merge::Mean, staleness, &["gradient", "sender"], "merged"),
        strings(count, "sender", "senders"),
        op(OpKind::Update { config }, &["w", "merged", "count"], &["w", "count"]),
        answer("w", "w", "senders"),
    ];
    loops(outer, vec![(vec![variable("gradient", facts(), Purpose::Temporary)], body)])
}

/// A program, and the values that it has sent and that are not delivered yet, oldest first.
struct Place {
    peer: ProgramPeer,
    executor: Executor,
    under_way: VecDeque<(ProgramPeer, String, VariableValue)>,
    receives: UnitIndex,
}

impl Place {
    fn new(peer: ProgramPeer, graph: Graph, senders: &[ProgramPeer], values: &[(&str, VariableValue)]) -> Self {
        let mut executor = executor(&Arc::new(graph), senders, 2);
        for (name, value) in values {
            executor.set(name, value.clone()).expect("the variable is there");
        }
        let at = executor.plan().units().iter().position(|unit| unit.act == UnitKind::Recv).expect("it receives");
        Self { peer, executor, under_way: VecDeque::new(), receives: UnitIndex(u32::try_from(at).expect("few")) }
    }

    fn turns(&self) -> u64 {
        self.executor.turns(self.receives)
    }

    /// Runs a few units, with room for one more message.
    fn run(&mut self, units: u64) {
        let mut post = Post { sent: std::mem::take(&mut self.under_way), room: 0 };
        post.room = post.sent.len() + 1;
        self.executor.run(&mut post, units).expect("no program is stuck");
        self.under_way = post.sent;
    }
}

/// A server and trainers, each with another target.
struct Job {
    places: Vec<Place>,
}

impl Job {
    fn new(trainers: u32, count: u32, staleness: Option<u32>) -> Self {
        let peers: Vec<ProgramPeer> = (0..trainers).map(ProgramPeer::Trainer).collect();
        let zero = VariableValue::from(Tensor::new([], Elements::Int64(vec![0])));
        let values = [("w", pair([0.0, 0.0])), ("count", zero)];
        let server = Place::new(SERVER, server_program(count, staleness), &peers, &values);
        let trainers = (0_u8..).zip(&peers).map(|(number, peer)| {
            let target = pair([f32::from(number) + 0.1, -3.7 * f32::from(number)]);
            Place::new(*peer, trainer_program(), &[], &[("w", pair([0.0, 0.0])), ("target", target)])
        });
        Self { places: std::iter::once(server).chain(trainers).collect() }
    }

    /// Runs programs and delivers messages in a random order until every trainer has run its rounds.
    fn run(&mut self, mut prng: Prng) {
        while !self.places[1..].iter().all(|trainer| trainer.turns() == ROUNDS) {
            let place = prng.index(self.places.len());
            if prng.below(2) == 0 {
                self.deliver(place);
            } else if place == 0 || self.places[place].turns() < ROUNDS {
                let most = if place == 0 { 7 } else { 1 };
                self.places[place].run(1 + prng.next() % most);
            }
        }
    }

    fn deliver(&mut self, from: usize) {
        let Some((to, channel, value)) = self.places[from].under_way.pop_front() else { return };
        let sender = self.places[from].peer;
        let receiver = self.places.iter_mut().find(|place| place.peer == to).expect("each peer has a place");
        let back = receiver.executor.arrive(&channel, sender, value).expect("the value fits");
        if let Some(value) = back {
            self.places[from].under_way.push_front((to, channel, value));
        }
    }

    fn parameter(&self, place: usize) -> Vec<u8> {
        self.places[place].executor.value("w").expect("it has a value").tensor().bytes().to_vec()
    }

    fn updates(&self) -> i64 {
        match self.places[0].executor.value("count").expect("it has a value").tensor().elements() {
            Elements::Int64(count) => count[0],
            other => panic!("{:?} counts nothing", other.element_type()),
        }
    }
}

/// The sum of all trainers' gradients, in their order.
fn expected(trainers: u8) -> Vec<u8> {
    let mut w = [0.0_f32; 2];
    for _ in 0..ROUNDS {
        let gradient = |number: u8, at: usize| {
            let target = [f32::from(number) + 0.1, -3.7 * f32::from(number)];
            w[at] + -target[at]
        };
        let sum = |at: usize| (1..trainers).fold(gradient(0, at), |sum, number| sum + gradient(number, at));
        let merged = [0, 1].map(|at| sum(at) * (1.0 / f32::from(trainers)));
        w = [w[0] - RATE * merged[0], w[1] - RATE * merged[1]];
    }
    w.iter().flat_map(|value| value.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn rounds_have_the_same_bits_for_any_order_of_arrival(seed: u64, trainers in 1_u8..5) {
        let mut job = Job::new(trainers.into(), trainers.into(), Some(0));
        job.run(Prng(seed));
        for place in 0..job.places.len() {
            prop_assert_eq!(job.parameter(place), expected(trainers), "place {}", place);
        }
        prop_assert_eq!(job.updates(), i64::try_from(ROUNDS).expect("few"));
    }

    #[test]
    fn every_gradient_is_an_update_in_async_mode(seed: u64, trainers in 1_u8..5, bound in 0_u32..3) {
        // A bound of 0 here stands for none.
        let mut job = Job::new(trainers.into(), 1, Some(bound).filter(|bound| *bound > 0));
        job.run(Prng(seed));
        prop_assert_eq!(job.updates(), i64::try_from(ROUNDS).expect("few") * i64::from(trainers));
    }
}
