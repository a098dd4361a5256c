//! A weight whose columns are on several trainers.

use crate::transpile::{Cluster, Columns, CostModel, ProgramPart, Transpiler, estimate};
use crate::{Graph, ProgramPeer};
use pserver_core::prng::Prng;

use super::networks::{ADAM, SGD, batch, two_layers};
use super::wire::{Feeds, Job, plainly};

fn divide(graph: &Graph, trainers: u32, servers: u32) -> Vec<ProgramPart> {
    let cluster = Cluster { trainers, servers };
    Columns.transpile(graph, cluster, &CostModel::default()).expect("a weight can be cut")
}

/// The columns of `a`, 8 of 6 rows, put together.
fn joined(job: &Job, trainers: u32) -> Vec<u8> {
    let shares: Vec<Vec<u8>> = (0..trainers)
        .map(|number| {
            let value = job.value(ProgramPeer::Trainer(number), &format!("a@columns{number}"));
            value.expect("every trainer has a share").tensor().bytes().to_vec()
        })
        .collect();
    let rows = (0..6).flat_map(|row| {
        shares.iter().flat_map(move |share| {
            let width = share.len() / 6;
            share[row * width..(row + 1) * width].to_vec()
        })
    });
    rows.collect()
}

// The first layer needs no `dx`, so nothing is rounded otherwise.
#[test]
fn the_columns_of_all_trainers_are_the_whole_weight_bit_for_bit() {
    for (config, trainers, servers) in [(SGD, 2, 1), (ADAM, 2, 1), (SGD, 3, 2), (ADAM, 8, 3), (SGD, 2, 9)] {
        let prng = &mut Prng(3);
        let graph = two_layers(config);
        let mut feeds: Feeds = vec![(0..4).map(|_| batch(&graph, prng)).collect()];
        let alone = plainly(&graph, &feeds[0]);
        // The other trainers run as many steps, without data.
        feeds.resize(trainers as usize, vec![Vec::new(); 4]);
        let job = Job::run(&divide(&graph, trainers, servers), &feeds, prng);
        assert_eq!(joined(&job, trainers), alone["a"], "{trainers} trainers, {config}");
        let rest = job.value(ProgramPeer::Trainer(0), "c").expect("trainer 0 has the rest").tensor().bytes();
        assert_eq!(rest, alone["c"], "{trainers} trainers, {config}");
    }
}

#[test]
fn an_inner_layer_cut_by_columns_returns_the_gradient_of_its_input() {
    let prng = &mut Prng(4);
    let graph = deep();
    let mut feeds: Feeds = vec![(0..4).map(|_| batch(&graph, prng)).collect()];
    let alone = plainly(&graph, &feeds[0]);
    feeds.resize(2, vec![Vec::new(); 4]);
    let parts = divide(&graph, 2, 1);
    let job = Job::run(&parts, &feeds, prng);
    assert!(job.value(ProgramPeer::Trainer(1), "wide@columns1").is_some(), "the largest weight is cut");
    let found = job.value(ProgramPeer::Trainer(0), "first").expect("trainer 0 has the rest").tensor().bytes();
    for (found, expected) in floats(found).zip(floats(&alone["first"])) {
        assert!((found - expected).abs() < 1e-5, "{found}; expected {expected}");
    }
    let nodes = estimate(&parts, &CostModel::default()).nodes;
    let [first, other, server] = [0, 1, 2].map(|node| &nodes[node].work);
    assert_eq!((first.sent_bytes, other.sent_bytes), (other.received_bytes, first.received_bytes));
    // With one reader each, every item passes through once.
    assert_eq!(server.received_bytes, first.sent_bytes + other.sent_bytes);
    assert_eq!(server.sent_bytes, server.received_bytes);
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")))
}

fn deep() -> Graph {
    use crate::{Builder, Dim};
    use pserver_core::dtype::ElementType::{Float32, Int64};
    let p = Builder::new();
    let uniform = pserver_core::rows::Initializer::Uniform { low: -0.5, high: 0.5 };
    let x = p.data("x", Float32, [Dim::Batch, Dim::Fixed(3)]);
    let label = p.data("label", Int64, [Dim::Batch]);
    let first = p.parameter("first", Float32, &[3, 5], uniform, 1);
    let wide = p.parameter("wide", Float32, &[5, 9], uniform, 2);
    let scores = p.matmul(p.tanh(p.matmul(x, first)), wide);
    let (losses, _) = p.softmax_with_cross_entropy(scores, label);
    p.named("loss", p.mean(losses));
    super::networks::trained(p, SGD)
}
