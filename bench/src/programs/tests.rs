//! Placements of random programs, by the estimate.

use pserver_program::transpile::{Cluster, CostModel, Placement};

use super::random::RandomProgram;
use super::step::{PlacedProgram, StepPlan};

const PROGRAMS: u64 = 300;

#[test]
fn no_step_of_300_random_programs_is_longer_than_with_round_robin() {
    let (mut shorter, mut logarithms) = (0_u64, 0.0);
    for seed in 0..PROGRAMS {
        let RandomProgram { graph, cluster, batch } = RandomProgram::new(seed, 8, 8).expect("it is a program");
        let shared_cores = if seed % 2 == 0 { 0 } else { 4 };
        let costs = CostModel { batch, shared_cores, ..CostModel::default() };
        let plan = StepPlan { cluster, costs, blocks: 0, block_seconds: 0.0 };
        let step = |placement| PlacedProgram::new(&graph, placement, &plan).expect("it can be divided").estimated;
        let (balanced, in_turn) = (step(Placement::Balanced), step(Placement::RoundRobin));
        let Cluster { trainers, servers } = cluster;
        let job = format!("seed {seed}, {trainers} trainers, {servers} servers");
        assert!(balanced <= in_turn, "{job}: {balanced} s, round robin {in_turn} s");
        shorter += u64::from(balanced < in_turn * 0.999);
        logarithms += (in_turn / balanced).ln();
    }
    let ratio = (logarithms / PROGRAMS as f64).exp();
    println!("{shorter} of {PROGRAMS} steps are shorter, by a factor of {ratio:.2} in the geometric mean of all");
    assert!(shorter > PROGRAMS / 2 && ratio > 1.03, "{shorter}, {ratio}");
}
