//! Assignment of ops to trainers and servers.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::executor::ExecutionPlan;
use crate::transpile::{Cluster, CostModel, ParameterServer, Placement, ProgramPart, Transpiler, dot, svg};
use crate::{Dim, Graph, OpKind, OpRole, ProgramPeer, Purpose, VariableFacts};
use pserver_core::prng::Prng;

use super::networks::{CLIPPED, SGD, cutting, random, two_layers};

fn divide(graph: &Graph, servers: u32, chunk_bytes: u32) -> Vec<ProgramPart> {
    let cluster = Cluster { trainers: 3, servers };
    ParameterServer::default().transpile(graph, cluster, &cutting(chunk_bytes)).expect("the program can be divided")
}

fn rows(facts: &VariableFacts) -> u64 {
    let VariableFacts::Dense { shape, .. } = facts else { panic!("{facts} is not dense") };
    match shape.first() {
        Some(Dim::Fixed(rows)) => *rows,
        _ => 1,
    }
}

/// The pieces of each parameter on servers, by the whole one's name.
fn pieces(parts: &[ProgramPart]) -> BTreeMap<String, Vec<(ProgramPeer, u64)>> {
    let mut pieces: BTreeMap<String, Vec<(ProgramPeer, u64)>> = BTreeMap::new();
    for part in parts {
        for variable in part.graph.variables().iter().filter(|known| known.purpose == Purpose::Parameter) {
            let whole = variable.name.split("@piece").next().expect("there is a first").to_owned();
            pieces.entry(whole).or_default().push((part.peers[0], rows(&variable.facts)));
        }
    }
    pieces
}

fn kinds(graph: &Graph, role: OpRole) -> Vec<&OpKind> {
    let ops = graph.program().blocks.iter().flat_map(|block| &block.ops);
    ops.filter(|op| op.role == role).map(|op| &op.kind).collect()
}

proptest! {
    #[test]
    fn every_row_of_every_parameter_is_on_one_server(seed: u64, servers in 1_u32..6, bytes in 1_u32..200) {
        let graph = random(&mut Prng(seed), true);
        let parts = divide(&graph, servers, bytes);
        let found = pieces(&parts);
        for known in graph.variables().iter().filter(|known| known.purpose == Purpose::Parameter) {
            let held = &found[&known.name];
            prop_assert_eq!(held.iter().map(|(_, rows)| rows).sum::<u64>(), rows(&known.facts), "{}", known.name);
            prop_assert!(held.iter().all(|(peer, _)| matches!(peer, ProgramPeer::Server(_))), "{:?}", held);
            let servers: BTreeSet<ProgramPeer> = held.iter().map(|(peer, _)| *peer).collect();
            prop_assert_eq!(servers.len(), held.len(), "{} has two pieces on one server", known.name);
        }
    }

    #[test]
    fn no_op_is_lost_or_doubled(seed: u64, servers in 1_u32..6, bytes in 1_u32..200) {
        let graph = random(&mut Prng(seed), true);
        let parts = divide(&graph, servers, bytes);
        for role in [OpRole::Forward, OpRole::Backward] {
            prop_assert_eq!(kinds(&parts[0].graph, role), kinds(&graph, role));
            prop_assert!(parts[1..].iter().all(|part| kinds(&part.graph, role).is_empty()));
        }
        prop_assert!(kinds(&parts[0].graph, OpRole::Optimize).is_empty());
        prop_assert!(kinds(&parts[0].graph, OpRole::Initialise).is_empty(), "trainers keep nothing here");
        let pieces: usize = pieces(&parts).values().map(Vec::len).sum();
        let updates = parts.iter().map(|part| kinds(&part.graph, OpRole::Optimize).len()).sum::<usize>();
        prop_assert_eq!(updates, pieces);
    }

    #[test]
    fn parts_can_be_planned_and_are_the_same_every_time(seed: u64, servers in 1_u32..6, bytes in 1_u32..200) {
        let graph = random(&mut Prng(seed), true);
        let parts = divide(&graph, servers, bytes);
        for part in &parts {
            prop_assert!(ExecutionPlan::of(&part.graph).is_ok());
        }
        let again = divide(&graph, servers, bytes);
        prop_assert_eq!(dot(&parts), dot(&again));
        prop_assert_eq!(svg(&parts), svg(&again));
        prop_assert_eq!(parts, again);
    }

    #[test]
    fn every_value_that_is_sent_is_received(seed: u64, servers in 1_u32..6, bytes in 1_u32..200) {
        let parts = divide(&random(&mut Prng(seed), true), servers, bytes);
        let all = |wanted: fn(&OpKind) -> Option<&String>| -> BTreeSet<String> {
            let ops = parts.iter().flat_map(|part| part.graph.program().blocks.iter().flat_map(|block| &block.ops));
            ops.filter_map(|op| wanted(&op.kind)).cloned().collect()
        };
        let sent = all(|kind| if let OpKind::Send { channel, .. } = kind { Some(channel) } else { None });
        let received = all(|kind| if let OpKind::Recv { channel } = kind { Some(channel) } else { None });
        prop_assert_eq!(sent, received);
    }
}

#[test]
fn parameters_that_need_the_whole_gradient_are_never_cut() {
    let cut = divide(&two_layers(SGD), 4, 32);
    assert!(pieces(&cut)["a"].len() > 1);
    let whole = divide(&two_layers(CLIPPED), 4, 32);
    assert!(pieces(&whole).values().all(|pieces| pieces.len() == 1));
}

#[test]
fn a_server_without_parameters_runs_nothing() {
    let transpiler = ParameterServer { placement: Placement::RoundRobin, ..ParameterServer::default() };
    let cluster = Cluster { trainers: 1, servers: 5 };
    let parts = transpiler.transpile(&two_layers(SGD), cluster, &CostModel::default()).expect("it can be divided");
    let ops: Vec<usize> =
        parts[1..].iter().map(|part| part.graph.program().blocks.iter().map(|block| block.ops.len()).sum()).collect();
    assert_eq!(ops.iter().map(|ops| *ops > 0).collect::<Vec<_>>(), [true, true, true, false, false]);
}

#[test]
fn pieces_are_whole_chunks() {
    // A row of `a` has 32 bytes.
    let parts = divide(&two_layers(SGD), 4, 64);
    let pieces = &pieces(&parts)["a"];
    assert!(pieces.len() > 1 && pieces.iter().all(|(_, rows)| rows % 2 == 0), "{pieces:?}");
}
