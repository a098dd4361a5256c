//! Bytes of servers: limits, and bytes spread over servers.

use super::networks::{ADAM, SGD, trained};
use super::placing::{load, loads};
use crate::transpile::step_loads::{GroupLoad, StepLoads};
use crate::transpile::{Cluster, CostModel, Estimate, ParameterServer, Placement, Transpiler, estimate};
use crate::{Builder, Dim, Graph, ProgramPeer};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;

const UNIFORM: Initializer = Initializer::Uniform { low: -0.5, high: 0.5 };
const PLACEMENTS: [Placement; 2] = [Placement::Balanced, Placement::EqualBytes];

/// Whether whole groups can be placed so that no server exceeds the limit and those that may be cut fit beside them,
/// whichever units they are cut into.
fn exists(groups: &[GroupLoad], servers: usize, limit: f64) -> bool {
    let (cut, whole): (Vec<&GroupLoad>, Vec<&GroupLoad>) = groups.iter().partition(|load| load.units() > 1);
    let unit = |load: &GroupLoad| load.rows_bytes * load.unit as f64 / load.rows as f64;
    let needed = cut.iter().map(|load| load.rows_bytes + unit(load) * servers as f64).sum::<f64>();
    let ways = servers.pow(u32::try_from(whole.len()).expect("they are few"));
    (0..ways).any(|mut way| {
        let mut held = vec![0.0; servers];
        for load in &whole {
            held[way % servers] += load.rows_bytes;
            way /= servers;
        }
        held.iter().all(|bytes| *bytes <= limit) && needed <= held.iter().map(|bytes| limit - bytes).sum()
    })
}

#[test]
fn no_server_exceeds_the_limit_where_a_placement_is_within_it() {
    let prng = &mut Prng(7);
    let (mut within, mut refused) = (0, 0);
    for _ in 0..300 {
        let servers = 2 + prng.below(3);
        let mut groups = Vec::new();
        for _ in 0..1 + prng.below(7) {
            groups.push(GroupLoad { rows_bytes: (1 + prng.below(100)) as f64, ..load(prng.below(9) as f64, 1, 1) });
        }
        for _ in 0..prng.below(3) {
            let rows = 50 + prng.below(100);
            groups.push(GroupLoad { rows_bytes: (1 + prng.below(200)) as f64, ..load(prng.below(9) as f64, rows, 1) });
        }
        let all: f64 = groups.iter().map(|load| load.rows_bytes).sum();
        let bytes_max = (all / servers as f64 * (1.0 + prng.below(60) as f64 / 100.0)).ceil();
        let loads = StepLoads { bytes_max, ..loads(&groups) };
        let is_possible = exists(&groups, usize::try_from(servers).expect("it is small"), bytes_max);
        for placement in PLACEMENTS {
            let placed = placement.place(&loads, u32::try_from(servers).expect("it is small"));
            let mut held = vec![0.0; usize::try_from(servers).expect("it is small")];
            for (load, portions) in groups.iter().zip(&placed) {
                for portion in portions {
                    let share = (portion.rows.end - portion.rows.start) as f64 / load.rows as f64;
                    held[portion.server as usize] += load.rows_bytes * share;
                }
            }
            let is_within = held.iter().all(|bytes| *bytes <= bytes_max + 0.5);
            assert!(is_within || !is_possible, "{placement:?}: {held:?} of {bytes_max}: {groups:?}");
            (within, refused) = (within + u32::from(is_within), refused + u32::from(!is_within));
        }
    }
    println!("{within} within their limits, {refused} where none is found");
    assert!(within > 300 && refused > 30, "{within} and {refused}");
}

/// Layers and maybe a table, with parameters of 100 KB to 100 MB.
fn network(prng: &mut Prng, config: &str) -> Graph {
    let p = Builder::new();
    let mut width = 64 + prng.below(1000);
    let mut h = if prng.below(2) == 0 {
        let table = p.parameter("table", Float32, &[1000 + prng.below(300_000), width], UNIFORM, 1);
        p.lookup_table(table, p.data("ids", Int64, [Dim::Batch]))
    } else {
        p.data("x", Float32, [Dim::Batch, Dim::Fixed(width)])
    };
    for layer in 0..1 + prng.below(6) {
        let next = 64 + prng.below(4000);
        let weight = p.parameter(&format!("w{layer}"), Float32, &[width, next], UNIFORM, layer);
        let bias = p.parameter(&format!("b{layer}"), Float32, &[next], UNIFORM, layer);
        h = p.relu(p.add(p.matmul(h, weight), bias));
        width = next;
    }
    let (losses, _) = p.softmax_with_cross_entropy(h, p.data("label", Int64, [Dim::Batch]));
    p.named("loss", p.mean(losses));
    trained(p, config)
}

fn held(estimate: &Estimate) -> Vec<u64> {
    let servers = estimate.nodes.iter().filter(|node| matches!(node.peer, ProgramPeer::Server(_)));
    servers.map(|node| node.held_bytes).collect()
}

/// The fullest server's bytes over the mean of all.
fn imbalance(held: &[u64]) -> f64 {
    let mean = held.iter().sum::<u64>() as f64 / held.len() as f64;
    *held.iter().max().expect("there are servers") as f64 / mean
}

/// Mean bytes of a server from which on pieces of 64 KiB and their states are small beside them.
const LARGE: u64 = 4 << 20;

#[test]
fn bytes_are_equal_where_that_is_wanted_and_within_a_limit_where_one_is_set() {
    let prng = &mut Prng(11);
    let (mut unequal, mut refused) = ([0; 2], 0);
    for case in 0..300 {
        let graph = network(prng, prng.clone().choose(&[SGD, ADAM]));
        let trainers = 1 + u32::try_from(prng.below(4)).expect("it is small");
        let servers = 2 + u32::try_from(prng.below(4)).expect("it is small");
        let shared_cores = prng.choose(&[0, 0, 2]);
        let costs = CostModel { shared_cores, chunk_bytes: 64 * 1024, ..CostModel::default() };
        let of = |placement, server_bytes_max| {
            let transpiler = ParameterServer { placement, ..ParameterServer::default() };
            let costs = CostModel { server_bytes_max, ..costs };
            transpiler.transpile(&graph, Cluster { trainers, servers }, &costs).map(|parts| estimate(&parts, &costs))
        };
        let [in_turn, balanced, equal] =
            [Placement::RoundRobin, Placement::Balanced, Placement::EqualBytes].map(|one| of(one, 0).expect("it can"));
        assert!(balanced.step_seconds <= in_turn.step_seconds, "{case}");
        let all = held(&equal);
        let mean = all.iter().sum::<u64>() / u64::from(servers);
        assert!(mean < LARGE || imbalance(&all) <= 1.1, "{case}: {all:?}");
        for (count, found) in unequal.iter_mut().zip([&balanced, &equal]) {
            *count += u32::from(imbalance(&held(found)) > 1.1);
        }
        // The shortest step keeps the limit that equal bytes keep.
        let most = *all.iter().max().expect("there are servers");
        let limited = of(Placement::Balanced, most).expect("a placement is within the limit");
        assert!(held(&limited).iter().all(|bytes| *bytes <= most), "{case}: {:?} of {most}", held(&limited));
        let text = of(Placement::Balanced, mean / 2).expect_err("not all fits").to_string();
        assert!(text.contains("would hold") && text.contains(&format!("at most {} for each", mean / 2)), "{text}");
        refused += u32::from(of(Placement::RoundRobin, most).is_err());
    }
    println!(
        "above 1.1 of the mean: {} of 300 by time, {} by bytes; in turn {refused} exceed the limit",
        unequal[0], unequal[1]
    );
    assert!(unequal[0] > unequal[1] && refused > 100, "{unequal:?}, {refused}");
}
