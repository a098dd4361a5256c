//! Placement of parameters on servers.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::transpile::cost::Exchanges;
use crate::transpile::division::Portion;
use crate::transpile::step_loads::{GroupLoad, StepLoads};
use crate::transpile::step_time::{ProcessGroup, ProcessSeconds, StepPace};
use crate::transpile::{Cluster, CostModel, ParameterServer, Placement, Transpiler, estimate};
use pserver_core::dtype::ElementType;
use pserver_core::ids::ServerIndex;
use pserver_core::partition::{Catalogue, Declaration, Name, Topology};
use pserver_core::prng::Prng;

use super::networks::unbalanced;

pub(super) fn load(seconds: f64, rows: u64, unit: u64) -> GroupLoad {
    let rows_seconds = ProcessSeconds { own: seconds, wire: 0.0 };
    GroupLoad { rows_seconds, rows, unit, exchanges: DENSE, ..GroupLoad::default() }
}

const DENSE: Exchanges = Exchanges { has_dense: true, tables: 0 };

/// The loads of a job with one trainer, which has no work of its own.
pub(super) fn loads(groups: &[GroupLoad]) -> StepLoads {
    StepLoads {
        groups: groups.to_vec(),
        trainer: ProcessSeconds::default(),
        trainers: 1,
        trainer_message: 0.0,
        server_message: 0.0,
        pace: StepPace { is_waiting: true, shared_cores: 0, crowding_seconds: 0.0 },
        bytes_max: 0.0,
    }
}

fn seconds(groups: &[GroupLoad], portions: &[Vec<Portion>], servers: u32) -> Vec<f64> {
    let mut seconds = vec![0.0; servers as usize];
    for (load, portions) in groups.iter().zip(portions) {
        for Portion { server, rows } in portions {
            let share = (rows.end - rows.start) as f64 / load.rows as f64;
            seconds[*server as usize] += load.fixed + load.rows_seconds.own * share;
        }
    }
    seconds
}

fn slowest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(0.0, f64::max)
}

fn check(groups: &[GroupLoad], servers: u32, expected: f64) {
    let placed = Placement::Balanced.place(&loads(groups), servers);
    let found = seconds(groups, &placed, servers);
    assert!((slowest(&found) - expected).abs() < 1e-9, "{found:?}; expected {expected} at most: {placed:?}");
}

#[test]
fn servers_finish_together() {
    let whole = |seconds| load(seconds, 1, 1);
    check(&[whole(3.0), whole(3.0), whole(2.0), whole(2.0), whole(2.0)], 2, 6.0);
    check(&[load(8.0, 100, 1)], 4, 2.0);
    check(&[whole(1.0), load(7.0, 70, 1)], 2, 4.0);
    check(&[whole(5.0), load(1.0, 10, 1), load(2.0, 10, 1)], 2, 5.0);
    // Nothing can be cut finer than its unit.
    check(&[load(4.0, 4, 3)], 2, 3.0);
}

#[test]
fn a_cut_that_costs_more_than_it_brings_is_not_made() {
    let costly = GroupLoad { fixed: 10.0, ..load(1.0, 100, 1) };
    let placed = Placement::Balanced.place(&loads(&[costly, load(10.6, 1, 1)]), 2);
    assert!(placed.iter().all(|portions| portions.len() == 1), "{placed:?}");
    assert!(placed[0][0].server != placed[1][0].server, "{placed:?}");
    // A trainer's cost of pieces counts like a server's.
    let cut_by = |cut| Placement::Balanced.place(&loads(&[GroupLoad { cut, ..load(2.0, 100, 1) }]), 2)[0].len();
    assert_eq!([cut_by(0.9), cut_by(1.1)], [2, 1]);
    let third = GroupLoad { cut: 0.1, piece: 0.9, ..load(3.0, 100, 1) };
    assert_eq!(Placement::Balanced.place(&loads(&[third]), 3)[0].len(), 2);
}

#[test]
fn a_server_that_costs_more_messages_than_it_saves_has_nothing() {
    let groups = [load(1.0, 1, 1), load(1.0, 1, 1), load(1.0, 1, 1)];
    let used = |message| {
        let costly = StepLoads { trainer_message: message, ..loads(&groups) };
        let placed = Placement::Balanced.place(&costly, 3);
        placed.iter().flatten().map(|portion| portion.server).collect::<BTreeSet<_>>().len()
    };
    // One message more each way for a further server, which saves a second.
    assert_eq!([used(0.1), used(0.6)], [3, 1]);
}

#[test]
fn the_terms_of_a_step_follow_one_another() {
    let process = |own, wire| ProcessSeconds { own, wire };
    let trainers: ProcessGroup = [process(3.0, 1.0), process(2.0, 2.0)].into_iter().collect();
    let servers: ProcessGroup = [process(1.0, 4.0), process(5.0, 0.5)].into_iter().collect();
    let step = |is_waiting, shared_cores| {
        StepPace { is_waiting, shared_cores, crowding_seconds: 0.0 }.step_seconds(&trainers, &servers)
    };
    assert!((step(true, 0) - (3.0 + 4.0 + 5.0)).abs() < 1e-12);
    // On one core no work is concurrent.
    assert!((step(true, 1) - (5.0 + 7.5 + 6.0)).abs() < 1e-12);
    // Without waiting: a trainer's own 4, and half of the updates of 5.
    assert!((step(false, 0) - 6.5).abs() < 1e-12);
    assert!((step(false, 1) - 18.5).abs() < 1e-12);
    // Five processes that exchange messages on two cores; on cores of their own they do not hinder each other.
    let crowding = |shared_cores| StepPace { is_waiting: true, shared_cores, crowding_seconds: 0.5 }.crowding(5, 2);
    assert_eq!([crowding(2), crowding(0), crowding(8)].map(f64::to_bits), [3.0, 0.0, 0.0].map(f64::to_bits));
}

proptest! {
    #[test]
    fn every_row_is_somewhere_and_servers_are_balanced(seed: u64, servers in 1_u32..7, count in 1_u64..30) {
        let prng = &mut Prng(seed);
        let mut groups = Vec::new();
        for _ in 0..count {
            let rows = prng.choose(&[1, 5, 64, 1000]);
            groups.push(load(1.0 + prng.below(100) as f64, rows, 1 + prng.below(rows)));
        }
        let placed = Placement::Balanced.place(&loads(&groups), servers);
        for (load, portions) in groups.iter().zip(&placed) {
            let mut next = 0;
            for portion in portions {
                prop_assert_eq!(portion.rows.start, next);
                prop_assert!(portion.rows.start % load.unit == 0 && portion.rows.start < portion.rows.end);
                next = portion.rows.end;
            }
            prop_assert_eq!(next, load.rows);
            prop_assert!(portions.windows(2).all(|pair| pair[0].server < pair[1].server));
        }
        let found = slowest(&seconds(&groups, &placed, servers));
        let in_turn = Placement::RoundRobin.place(&loads(&groups), servers);
        prop_assert!(found <= slowest(&seconds(&groups, &in_turn, servers)) + 1e-9);
        // No server is above the mean by more than the largest thing that could not be cut.
        let mean = groups.iter().map(|load| load.rows_seconds.own).sum::<f64>() / f64::from(servers);
        let uncut = groups.iter().map(|load| load.rows_seconds.own * load.unit as f64 / load.rows as f64);
        let largest = uncut.fold(0.0, f64::max);
        prop_assert!(found <= mean + largest + 1e-9, "{} with a mean of {} and units up to {}", found, mean, largest);
    }
}

/// The program of the comparison in `docs/TRANSPILER.md`: an embedding of 400 MB and fifty layers of 256 KiB.
fn compare(servers: u32) -> [f64; 3] {
    let graph = unbalanced(1_562_500, 50, 1024);
    let (costs, cluster) = (CostModel::default(), Cluster { trainers: 4, servers });
    let [balanced, in_turn] = [Placement::Balanced, Placement::RoundRobin].map(|placement| {
        let transpiler = ParameterServer { placement: placement.clone(), ..ParameterServer::default() };
        let parts = transpiler.transpile(&graph, cluster, &costs).expect("it can be divided");
        let found = estimate(&parts, &costs);
        println!(
            "{servers} servers, {placement:?}: step {:.1} ms, slowest server {:.1} ms",
            found.step_seconds * 1e3,
            found.server_seconds() * 1e3
        );
        found
    });
    let total = [&balanced, &in_turn].map(|found| {
        let servers = found.nodes.iter().skip(4);
        servers.map(|node| node.seconds).sum::<f64>()
    });
    [
        in_turn.server_seconds() / balanced.server_seconds(),
        in_turn.step_seconds / balanced.step_seconds,
        balanced.server_seconds() / (total[1] / f64::from(servers)),
    ]
}

#[test]
fn an_unbalanced_program_is_faster_than_in_turn() {
    // The slowest server against that of round robin, the step against its step.
    for (servers, by_server, by_step) in [(2, 1.8, 1.1), (3, 2.6, 1.3), (4, 3.4, 1.4)] {
        let [server, step, above_mean] = compare(servers);
        println!("{servers} servers: {server:.2} times faster servers, {step:.2} times faster steps");
        assert!(server > by_server, "{servers} servers: {server}");
        assert!(step > by_step, "{servers} servers: {step}");
        assert!(above_mean < 1.02, "{servers} servers: {above_mean}");
    }
}

#[test]
fn a_placement_by_bytes_balances_bytes_as_the_chunk_partition_does() {
    for servers in [2_u16, 4] {
        let mut catalogue = Catalogue::new(Topology::new(vec![1; servers.into()]).unwrap(), 1 << 20).unwrap();
        let sizes = std::iter::once(400_000_000).chain([262_144; 50]);
        for (number, bytes) in sizes.enumerate() {
            let name = Name::new(format!("p{number}").as_bytes()).unwrap();
            let element_type = ElementType::Float32;
            let declared = Declaration {
                name,
                element_type,
                bytes,
                shape: vec![],
                whole: false,
                config: vec![],
                buckets: None,
                owner: None,
                sender: None,
                total_part: None,
                hosted: None,
            };
            catalogue.declare(declared).unwrap();
        }
        let most = (0..servers).map(|server| catalogue.bytes_on(ServerIndex(server))).max().unwrap();
        let mean = catalogue.bytes() / u64::from(servers);
        assert!(most <= mean + (1 << 20), "{most} bytes on the fullest of {servers}, {mean} in the mean");
    }
}
