//! Backup trainers against server processes: rounds go on without a trainer that stands still, and through kills.

use std::sync::Barrier;
use std::thread;

use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;

use crate::cluster::job::{Job, TCP, client, folder, reader};
use crate::cluster::process::Processes;

const TRAINERS: usize = 4;
/// Elements of which one trainer's gradient has ones, and those of the others zeros.
const OWN: usize = 32_768;
/// Steps of three trainers while the fourth stands still, and of all four after that.
const STEPS: [usize; 2] = [60, 40];
/// Steps of the fourth before it stands still.
const FEW: usize = 5;

fn step(client: &Client, trainer: usize) {
    let mut gradient = vec![0.0_f32; TRAINERS * OWN];
    gradient[trainer * OWN..][..OWN].fill(1.0);
    let mut value = vec![0.0_f32; gradient.len()];
    let gradients = [GradientSlice { name: "w", element_type: Float32, content: bytemuck::cast_slice(&gradient) }];
    let mut places = [DestinationSlice::new("w", bytemuck::cast_slice_mut(&mut value))];
    client.push_pull(&gradients, None, &mut places).expect("a step");
}

/// How often each trainer's gradients were counted, by element.
fn counts(client: &Client) -> Vec<f32> {
    let mut value = vec![0.0_f32; TRAINERS * OWN];
    client.pull(&mut [DestinationSlice::new("w", bytemuck::cast_slice_mut(&mut value))]).expect("a value");
    value.iter().map(|one| -one).collect()
}

#[test]
fn rounds_go_on_without_a_trainer_that_stands_still_and_count_no_gradient_twice() {
    let kept = folder();
    let job = Job { bind: TCP, ..Job::new(2, 4) }.with("--merge", "sum").with_checkpoints(kept.path());
    let mut processes = Processes::start(job);
    let coordinator = processes.coordinator();
    let clients: Vec<Client> = (0..4).map(|trainer| client(&coordinator, trainer)).collect();
    let text = "optimizer: SGD const_lr { learning_rate: 1.0 } backup_trainers: 1";
    let settings = OptimizerSettings::from_text(text).expect("it is right");
    assert!(clients[0].begin_init(&OptimizerSettings::default()).expect("servers answer"));
    let zeros = vec![0_u8; TRAINERS * OWN * 4];
    clients[0].init_param("w", Float32, &[(TRAINERS * OWN) as u64], &zeros, &settings).expect("it is right");
    clients[0].finish_init().expect("servers take it");
    let (fast, slow) = clients.split_at(3);
    (0..FEW).for_each(|_| {
        thread::scope(|scope| {
            clients.iter().enumerate().for_each(|(trainer, client)| drop(scope.spawn(move || step(client, trainer))));
        })
    });
    let together = &Barrier::new(2);
    let version = || reader(&coordinator).parameters().expect("servers answer")[0].version.0;
    thread::scope(|scope| {
        for (trainer, client) in fast.iter().enumerate() {
            scope.spawn(move || (0..STEPS[0]).for_each(|_| step(client, trainer)));
        }
    });
    // Each step of three trainers is a round, whatever the fourth does.
    assert_eq!(version(), (FEW + STEPS[0]) as u64);
    thread::scope(|scope| {
        for (trainer, client) in fast.iter().chain(slow).enumerate() {
            scope.spawn(move || {
                for at in 0..STEPS[1] {
                    step(client, trainer);
                    if trainer == 0 && at == STEPS[1] / 2 {
                        together.wait();
                    }
                }
                // The last rounds of the others need this one's gradient, or that of another that goes on.
                client.leave().expect("servers answer");
            });
        }
        together.wait();
        processes.kill(1);
        processes.start_again(1);
    });
    let live = counts(&reader(&coordinator));
    let pushed = |trainer: usize| FEW + STEPS[1] + if trainer < 3 { STEPS[0] } else { 0 };
    for (trainer, counted) in live.chunks(OWN).enumerate() {
        let most = pushed(trainer) as f32;
        assert!(counted.iter().all(|count| count.fract() == 0.0 && (0.0..=most).contains(count)), "{trainer}");
    }
    // The fourth trainer goes on with the open round, so that it is among the first three again.
    let slow = live[3 * OWN..].iter().copied().fold(f32::MAX, f32::min);
    println!("of {} gradients of the trainer that stood still at least {slow} were counted", pushed(3));
    assert!(slow > FEW as f32 / 2.0, "{slow}");
    for server in [0, 1] {
        processes.kill(server);
        processes.start_again(server);
    }
    assert!(counts(&reader(&coordinator)) == live, "the records have the trainers that each round counted");
    processes.terminate();
}
