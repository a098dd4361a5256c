//! All parts together compute the same as the whole program.

use proptest::prelude::*;

use crate::transpile::{Cluster, CostModel, ParameterServer, Placement, ProgramPart, Transpiler};
use crate::{Graph, ProgramPeer};
use pserver_core::config::{Merge, Mode};
use pserver_core::prng::Prng;

use super::networks::{ADAM, SGD, batch, convolutional, cutting, random, two_layers};
use super::wire::{Feeds, Job, plainly};

const STEPS: usize = 3;

fn parts(graph: &Graph, trainers: u32, servers: u32, mode: Mode, chunk_bytes: u32) -> Vec<ProgramPart> {
    let transpiler = ParameterServer { mode, ..ParameterServer::default() };
    transpiler
        .transpile(graph, Cluster { trainers, servers }, &cutting(chunk_bytes))
        .expect("the program can be divided")
}

fn feeds(graph: &Graph, trainers: u32, prng: &mut Prng) -> Feeds {
    (0..trainers).map(|_| (0..STEPS).map(|_| batch(graph, prng)).collect()).collect()
}

fn same(graph: &Graph, trainers: u32, prng: &mut Prng) -> Feeds {
    let one: Vec<_> = (0..STEPS).map(|_| batch(graph, prng)).collect();
    (0..trainers).map(|_| one.clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn one_trainer_keeps_what_one_process_keeps_bit_for_bit(seed: u64, servers in 1_u32..5, bytes in 1_u32..200) {
        let prng = &mut Prng(seed);
        let graph = random(prng, true);
        let mode = prng.choose(&[Mode::Sync, Mode::Async, Mode::Staleness { bound: 1 }]);
        let feeds = feeds(&graph, 1, prng);
        let job = Job::run(&parts(&graph, 1, servers, mode, bytes), &feeds, prng);
        prop_assert_eq!(job.kept(), plainly(&graph, &feeds[0]));
    }

    // The mean of two or four equal gradients is that gradient, to the last bit; repeated rows are added in another
    // order.
    #[test]
    fn trainers_with_equal_data_keep_what_one_process_keeps(seed: u64, servers in 1_u32..4, bytes in 1_u32..200) {
        let prng = &mut Prng(seed);
        let graph = random(prng, false);
        let trainers = prng.choose(&[2, 4]);
        let feeds = same(&graph, trainers, prng);
        let job = Job::run(&parts(&graph, trainers, servers, Mode::Sync, bytes), &feeds, prng);
        prop_assert_eq!(job.kept(), plainly(&graph, &feeds[0]));
    }

    #[test]
    fn four_trainers_keep_the_same_bits_for_any_servers(seed: u64, servers in 2_u32..5, bytes in 1_u32..200) {
        let prng = &mut Prng(seed);
        let graph = random(prng, true);
        let feeds = feeds(&graph, 4, prng);
        let one = Job::run(&parts(&graph, 4, 1, Mode::Sync, 1 << 20), &feeds, prng);
        let many = Job::run(&parts(&graph, 4, servers, Mode::Sync, bytes), &feeds, prng);
        prop_assert_eq!(one.kept(), many.kept());
    }
}

#[test]
fn networks_of_images_are_divided_to_the_last_bit() {
    let prng = &mut Prng(3);
    for config in [SGD, ADAM] {
        let graph = convolutional(config);
        let alone = feeds(&graph, 1, prng);
        let job = Job::run(&parts(&graph, 1, 3, Mode::Sync, 72), &alone, prng);
        assert_eq!(job.kept(), plainly(&graph, &alone[0]));
        let many = feeds(&graph, 4, prng);
        let one = Job::run(&parts(&graph, 4, 1, Mode::Sync, 1 << 20), &many, prng);
        assert_eq!(Job::run(&parts(&graph, 4, 3, Mode::Sync, 72), &many, prng).kept(), one.kept());
        // An update that does nothing would be equal as well.
        assert_ne!(one.kept()["filter"], plainly(&graph, &[])["filter"]);
    }
}

#[test]
fn a_step_of_four_trainers_is_a_step_with_the_mean_of_their_gradients() {
    let prng = &mut Prng(11);
    let graph = two_layers(SGD);
    let feeds = feeds(&graph, 4, prng).into_iter().map(|fed| fed[..1].to_vec()).collect();
    let kept = Job::run(&parts(&graph, 4, 2, Mode::Sync, 32), &feeds, prng).kept();
    let alone: Vec<_> = feeds.iter().map(|fed| plainly(&graph, fed)).collect();
    for name in ["a", "b", "c"] {
        // With SGD the step by the mean is the mean of the steps, but for rounding.
        let floats = |bytes: &[u8]| {
            let each = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")));
            each.collect::<Vec<f32>>()
        };
        let each: Vec<Vec<f32>> = alone.iter().map(|kept| floats(&kept[name])).collect();
        for (place, found) in floats(&kept[name]).into_iter().enumerate() {
            let mean = each.iter().map(|values| values[place]).sum::<f32>() / 4.0;
            assert!((found - mean).abs() < 1e-6, "{name}[{place}] is {found}; expected {mean}");
        }
    }
}

#[test]
fn in_async_mode_every_gradient_is_an_update() {
    let prng = &mut Prng(5);
    let graph = two_layers(ADAM);
    let feeds = feeds(&graph, 3, prng);
    for mode in [Mode::Async, Mode::Staleness { bound: 1 }] {
        let kept = Job::run(&parts(&graph, 3, 2, mode, 64), &feeds, prng).kept();
        let updates = i64::try_from(3 * STEPS).expect("few").to_le_bytes();
        assert_eq!(kept["a@count"], updates, "{mode:?}");
    }
}

#[test]
fn a_trainer_has_the_parameters_of_the_step_before() {
    let prng = &mut Prng(5);
    let graph = two_layers(SGD);
    let feeds = feeds(&graph, 1, prng);
    let job = Job::run(&parts(&graph, 1, 2, Mode::Sync, 64), &feeds, prng);
    let found = job.value(ProgramPeer::Trainer(0), "a").expect("it has one").tensor().bytes();
    assert_eq!(found, plainly(&graph, &feeds[0][..STEPS - 1])["a"]);
}

#[test]
fn gradients_are_added_when_the_merge_is_a_sum() {
    let prng = &mut Prng(7);
    let graph = two_layers(SGD);
    let feeds = same(&graph, 2, prng);
    let cluster = Cluster { trainers: 2, servers: 1 };
    let summed = ParameterServer { merge: Merge::Sum, placement: Placement::RoundRobin, ..ParameterServer::default() };
    let parts = summed.transpile(&graph, cluster, &CostModel::default()).expect("the program can be divided");
    // Twice the gradient at half the rate; powers of two round nothing.
    let doubled = two_layers("const_lr { learning_rate: 1.0 }");
    assert_eq!(Job::run(&parts, &feeds, prng).kept(), plainly(&doubled, &feeds[0]));
}
