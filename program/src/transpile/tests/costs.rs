//! Estimated cost of a step.

use proptest::prelude::*;

use crate::ProgramPeer;
use crate::transpile::{
    Cluster, CostModel, Estimate, ParameterServer, Placement, ProcessRates, StepWork, Transpiler, estimate,
};
use pserver_core::prng::Prng;

use super::networks::{SGD, cutting, random, two_layers, unbalanced};

/// Bytes of `a`, `b` and `c`.
const TWO_LAYERS: u64 = 4 * (6 * 8 + 8 + 8 * 4);

proptest! {
    #[test]
    fn every_sent_byte_is_received(seed: u64, trainers in 1_u32..5, servers in 1_u32..5, bytes in 1_u32..200) {
        let graph = random(&mut Prng(seed), true);
        let costs = cutting(bytes);
        let mut steps = Vec::new();
        for placement in [Placement::Balanced, Placement::RoundRobin] {
            let transpiler = ParameterServer { placement, ..ParameterServer::default() };
            let parts = transpiler.transpile(&graph, Cluster { trainers, servers }, &costs).expect("it can be divided");
            let Estimate { nodes, step_seconds } = estimate(&parts, &costs);
            steps.push(step_seconds);
            let sum = |of: fn(&StepWork) -> u64| nodes.iter().map(|node| of(&node.work)).sum::<u64>();
            prop_assert_eq!(sum(|work| work.sent_bytes), sum(|work| work.received_bytes));
            prop_assert!(sum(|work| work.sent_bytes) > 0);
        }
        prop_assert!(steps[0] <= steps[1], "{:?}", steps);
    }
}

#[test]
fn cutting_moves_no_byte_more() {
    let graph = two_layers(SGD);
    for (servers, chunk_bytes) in [(1, 1 << 20), (2, 32), (4, 1)] {
        let costs = cutting(chunk_bytes);
        let cluster = Cluster { trainers: 3, servers };
        let parts = ParameterServer::default().transpile(&graph, cluster, &costs).expect("it can be divided");
        let nodes = estimate(&parts, &costs).nodes;
        let trainer = nodes[0].work;
        assert_eq!((trainer.sent_bytes, trainer.received_bytes), (TWO_LAYERS, TWO_LAYERS), "{servers} servers");
        let servers = nodes.iter().filter(|node| matches!(node.peer, ProgramPeer::Server(_)));
        assert_eq!(servers.map(|node| node.work.received_bytes).sum::<u64>(), 3 * TWO_LAYERS);
    }
}

#[test]
fn the_cost_of_a_server_follows_the_cost_model() {
    let costs = CostModel::default();
    let cluster = Cluster { trainers: 3, servers: 1 };
    let parts = ParameterServer::default().transpile(&two_layers(SGD), cluster, &costs).expect("it can be divided");
    let server = estimate(&parts, &costs).nodes[3];
    let elements = TWO_LAYERS / 4;
    let expected = StepWork {
        sent_bytes: 3 * TWO_LAYERS,
        received_bytes: 3 * TWO_LAYERS,
        // All gradients in and all parameters out, for three trainers.
        messages: 3 * 2,
        // For each parameter: three pieces and their senders are received and added, one update, one answer.
        ops: 3 * (3 + 3 + 1 + 1),
        // Three pieces added, one update.
        flops: (3 + 1) * elements,
        rows: 0,
        // Three pieces read; the update reads two and writes one, and a count of 8 bytes each way.
        memory_bytes: 3 * TWO_LAYERS + 3 * TWO_LAYERS + 3 * 2 * 8,
    };
    assert_eq!(server.work, expected);
    let machine = ProcessRates {
        link_bytes_per_second: 100.0,
        message_seconds: 0.5,
        op_seconds: 0.25,
        row_seconds: 0.125,
        flops_per_second: 10.0,
        memory_bytes_per_second: 1000.0,
    };
    let work =
        StepWork { sent_bytes: 300, received_bytes: 100, messages: 4, ops: 8, rows: 8, flops: 30, memory_bytes: 5000 };
    assert!((work.seconds(&machine) - (4.0 + 2.0 + 2.0 + 1.0 + 3.0 + 5.0)).abs() < 1e-12);
}

#[test]
fn in_async_mode_every_piece_costs_an_update_and_an_answer() {
    let costs = CostModel::default();
    let cluster = Cluster { trainers: 3, servers: 1 };
    let transpiler = ParameterServer { mode: pserver_core::config::Mode::Async, ..ParameterServer::default() };
    let parts = transpiler.transpile(&two_layers(SGD), cluster, &costs).expect("it can be divided");
    let server = estimate(&parts, &costs).nodes[3];
    assert_eq!(server.work.sent_bytes, 3 * TWO_LAYERS);
    assert_eq!(server.work.flops, (3 + 3) * (TWO_LAYERS / 4));
}

#[test]
fn rows_of_a_table_are_charged_and_not_the_table() {
    // Rows of 64 numbers, 4,096 of them for each example; the layers above have one parameter of 8 rows.
    let (rows, layer) = (1 << 20, 8 * 64 * 4);
    let costs = CostModel::default();
    let pulled = costs.batch * 4096;
    for servers in [1, 2] {
        let cluster = Cluster { trainers: 3, servers };
        let transpiler = ParameterServer::default();
        let parts = transpiler.transpile(&unbalanced(rows, 1, 8), cluster, &costs).expect("it can be divided");
        let nodes = estimate(&parts, &costs).nodes;
        let pieces = parts[0].graph.program().blocks[0].ops.iter().filter(|op| op.kind.name() == "pull_rows").count();
        assert_eq!(pieces, servers as usize);
        // The count of updates of each piece, the rows' values and the layer.
        let received = pieces as u64 * 8 + pulled * 64 * 4 + layer;
        // Ids, the gradient's ids and values, and the layer's gradient.
        let sent = pulled * 8 + pulled * (8 + 64 * 4) + layer;
        assert_eq!((nodes[0].work.sent_bytes, nodes[0].work.received_bytes), (sent, received));
        let servers = nodes.iter().filter(|node| matches!(node.peer, ProgramPeer::Server(_)));
        let all = servers
            .fold((0, 0), |(sent, received), node| (sent + node.work.sent_bytes, received + node.work.received_bytes));
        assert_eq!(all, (3 * received, 3 * sent));
    }
}
