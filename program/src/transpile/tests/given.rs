//! Placements that are given.

use crate::transpile::{Cluster, CostModel, ParameterServer, Placement, Transpiler};
use crate::{Graph, ProgramPeer, Purpose};
use pserver_core::prng::Prng;

use super::networks::{CLIPPED, SGD, cutting, random, two_layers};

const CLUSTER: Cluster = Cluster { trainers: 2, servers: 3 };

fn given(text: &str) -> ParameterServer {
    let placement = Placement::Given(text.parse().expect("it is a placement"));
    ParameterServer { placement, ..ParameterServer::default() }
}

/// The parameters of each server.
fn placed(transpiler: &ParameterServer, graph: &Graph) -> Vec<(u32, Vec<String>)> {
    let parts = transpiler.transpile(graph, CLUSTER, &CostModel::default()).expect("it can be divided");
    let of_part = |part: &crate::transpile::ProgramPart| {
        let ProgramPeer::Server(server) = part.peers[0] else { return None };
        let variables = part.graph.program().blocks[0].variables.iter();
        let parameters = variables.filter(|one| one.purpose == Purpose::Parameter).map(|one| one.name.clone());
        Some((server, parameters.collect()))
    };
    parts.iter().filter_map(of_part).collect()
}

#[test]
fn a_placement_that_was_found_and_is_given_again_has_the_same_parts() {
    let prng = &mut Prng(5);
    let mut cut = 0;
    for case in 0..60 {
        let graph = random(prng, true);
        let costs = prng.choose(&[CostModel::default(), cutting(16)]);
        let found = ParameterServer::default().placement_of(&graph, CLUSTER, &costs).expect("it can be divided");
        let text = found.to_string();
        cut += u32::from(text.contains(".."));
        let texts = |transpiler: &ParameterServer| {
            let parts = transpiler.transpile(&graph, CLUSTER, &costs).expect("it can be divided");
            parts.iter().map(|part| part.graph.program().to_string()).collect::<Vec<_>>()
        };
        assert!(texts(&ParameterServer::default()) == texts(&given(&text)), "{case}: {text}");
        assert_eq!(given(&text).placement_of(&graph, CLUSTER, &costs).expect("it can").to_string(), text, "{case}");
    }
    assert!(cut > 10, "{cut} of 60 have pieces");
}

#[test]
fn parameters_go_where_they_are_given() {
    let graph = two_layers(SGD);
    let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let text = "# the first layer\n\n  a 2\nb 2\n c  0 \n";
    assert_eq!(placed(&given(text), &graph), [(0, names(&["c"])), (1, names(&[])), (2, names(&["a", "b"]))]);
    let pieces = placed(&given("a 1 2..6\nb 0\nc 0\na 2 0..2"), &graph);
    assert_eq!(pieces, [(0, names(&["b", "c"])), (1, names(&["a@piece1"])), (2, names(&["a@piece0"]))]);
}

#[test]
fn a_placement_that_does_not_fit_is_refused() {
    let check = |rule: &str, text: &str, expected: &str| {
        let found = given(text).transpile(&two_layers(rule), CLUSTER, &CostModel::default());
        let found = found.expect_err("it does not fit").to_string();
        assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
    };
    check(SGD, "a 0\nb 0", "the given placement: found no parameter \"c\"; expected its server");
    let unknown = "found the parameter \"d\"; expected one of the program's 3 that have a server of their own: a, b, c";
    check(SGD, "a 0\nb 0\nc 0\nd 0", unknown);
    check(SGD, "a 0\nb 3\nc 0", "found the server 3 of the parameter \"b\"; expected one below 3");
    check(SGD, "a 0\na 1\nb 0\nc 0", "found \"a\" twice without rows; expected the rows of each piece");
    check(SGD, "a 0 0..3\na 1 4..6\nb 0\nc 0", "found the rows 4..6 of \"a\"; expected a piece from row 3 on");
    check(SGD, "a 0 0..3\na 1 2..6\nb 0\nc 0", "found the rows 2..6 of \"a\"; expected a piece from row 3 on");
    check(SGD, "a 0 0..3\na 1 3..5\nb 0\nc 0", "found 5 rows of \"a\"; expected 6");
    check(SGD, "a 0 0..3\na 0 3..6\nb 0\nc 0", "found two pieces of \"a\" on server 0; expected one");
    let whole = "found pieces of \"a\", which stays whole: block 0, op 20 update is not element-wise";
    check(CLIPPED, "a 0 0..3\na 1 3..6\nb 0\nc 0", whole);
    let costs = CostModel { server_bytes_max: 64, ..CostModel::default() };
    let large = given("a 0\nb 0\nc 0").transpile(&two_layers(SGD), CLUSTER, &costs).expect_err("it is too much");
    assert!(large.to_string().contains("server:0 would hold"), "{large}");
}

#[test]
fn a_line_that_is_none_is_named() {
    for line in ["a", "a b", "a 0 1..", "a -1", "0 1..2"] {
        let found = format!("b 0\n{line}").parse::<crate::transpile::GivenPlacement>().expect_err("it is none");
        let expected = format!("line 2: found {line:?}; expected a parameter, its server and, of a piece, its rows");
        assert!(found.to_string().contains(&expected), "{found}");
    }
}

#[test]
fn a_parameter_that_stays_whole_has_a_reason() {
    let whole = |rule: &str| ParameterServer::whole_parameters(&two_layers(rule)).expect("it can be divided");
    assert_eq!(whole(SGD), []);
    let found = whole(CLIPPED);
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(|(_, why)| why.ends_with("update is not element-wise")), "{found:?}");
}
