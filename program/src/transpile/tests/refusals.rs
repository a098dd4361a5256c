//! Programs that cannot be divided, and the errors about them.

use crate::transpile::{Cluster, Columns, CostModel, ParameterServer, ProcessRates, Transpiler};
use crate::{Graph, Program};
use pserver_core::config::Mode;

use super::networks::{CLIPPED, SGD, cutting, graph, two_layers};

const PAIR: Cluster = Cluster { trainers: 2, servers: 2 };

fn said(transpiler: &dyn Transpiler, graph: &Graph, cluster: Cluster, costs: &CostModel) -> String {
    transpiler.transpile(graph, cluster, costs).expect_err("this cannot be divided").to_string()
}

fn check(text: &str, expected: &str) {
    let graph = graph(text.parse::<Program>().expect("the test's text is right"));
    let found = said(&ParameterServer::default(), &graph, PAIR, &CostModel::default());
    assert!(found.contains(expected), "{found}\nexpected: {expected}");
}

/// A parameter, its gradient, and its update.
fn updated(before: &str, after: &str) -> String {
    format!(
        "block 0 {{ data x: float32[4] parameter w: float32[4] state n: int64[] state s: float32[4]
            forward y = mul(x, w)
            backward g = scale(y, factor=2.0)
            {before}
            optimize w, n = update(w, g, n, config=\"const_lr {{ learning_rate: 0.1 }}\")
            {after} }}"
    )
}

#[test]
fn a_program_that_cannot_be_divided_is_refused_by_name() {
    check("block 0 { data x: float32[4] forward y = relu(x) }", "found no op of the role optimize");
    check(&updated("", "forward z = relu(w)"), "op 3 relu: found \"w\" read after its update");
    check(
        &updated("forward w = scale(x, factor=1.0)", ""),
        "op 2 scale: found the parameter \"w\" written by an op of the role forward; expected the role optimize",
    );
    check(
        &updated("", "backward h = scale(g, factor=1.0) backward w = add(w, h)"),
        "op 4 add: found the parameter \"w\" written by an op of the role backward; expected the role optimize",
    );
    check(
        &updated("", "optimize h = scale(g, factor=1.0) forward z = relu(h)"),
        "op 4 relu: found \"h\", which an op of the role optimize writes",
    );
    check(&updated("", "optimize s = scale(s, factor=0.5)"), "op 3 scale: found no gradient among its inputs");
    check(
        &updated("forward s = scale(x, factor=2.0)", "optimize h = add(g, s)"),
        "op 3 update: found \"s\", which trainers write and keep",
    );
    check(
        "block 0 { data x: float32[batch] state s: float32[] state n: float32[]
            forward y = relu(x) optimize s = mean(y) }",
        "found \"y\", which is float32[batch]; expected fixed dimensions",
    );
    check(
        "block 0 { state q: queue(float32[4], 2) data x: float32[4] communication enqueue(q, x) }",
        "block 0, op 0 enqueue: found the role communication; expected no flow yet",
    );
}

#[test]
fn a_part_is_not_divided_again() {
    let costs = cutting(1);
    let parts = ParameterServer::default().transpile(&two_layers(SGD), PAIR, &costs).expect("it can be divided");
    for part in parts {
        assert!(said(&ParameterServer::default(), &part.graph, PAIR, &costs).contains("expected no flow yet"));
    }
}

#[test]
fn a_cluster_that_cannot_be_is_refused() {
    let (graph, costs) = (two_layers(SGD), CostModel::default());
    let servers = |trainers, servers| said(&ParameterServer::default(), &graph, Cluster { trainers, servers }, &costs);
    assert_eq!(servers(0, 1), "0 trainers; expected 1 to 4096");
    assert_eq!(servers(1, 0), "0 servers; expected 1 to 4096");
    assert_eq!(servers(1, 5000), "5000 servers; expected 1 to 4096");
    let columns = |trainers, servers| said(&Columns, &graph, Cluster { trainers, servers }, &costs);
    assert_eq!(columns(1, 1), "1 trainers to cut columns over; expected 2 to 4096");
    assert_eq!(columns(2, 0), "0 servers for queues between trainers; expected 1 to 4096");
    assert!(columns(9, 1).starts_with("found no weight that can be cut into 9 shares of columns"));
    let clipped = said(&Columns, &two_layers(CLIPPED), PAIR, &costs);
    assert!(clipped.contains("element-wise"), "{clipped}");
}

#[test]
fn modes_and_costs_that_cannot_be_are_refused() {
    let (graph, costs) = (two_layers(SGD), CostModel::default());
    let mode = |mode| said(&ParameterServer { mode, ..ParameterServer::default() }, &graph, PAIR, &costs);
    assert!(mode(Mode::Delta).contains("found the mode Delta"));
    assert!(mode(Mode::Staleness { bound: 0 }).contains("found a staleness bound of 0"));
    let machine = ProcessRates { flops_per_second: 0.0, ..ProcessRates::default() };
    for (costs, expected) in [
        (CostModel { trainer: machine, ..costs }, "trainer.flops_per_second is 0; expected a rate above zero"),
        (CostModel { batch: 0, ..costs }, "batch is 0; expected 1 or more"),
        (
            CostModel { server: ProcessRates { message_seconds: f64::NAN, ..machine }, ..CostModel::default() },
            "server.flops_per_second is 0",
        ),
    ] {
        let found = said(&ParameterServer::default(), &graph, PAIR, &costs);
        assert!(found.contains(expected), "{found}");
    }
}
