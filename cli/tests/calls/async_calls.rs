//! Calls that are started and waited for later do what blocking calls do, in the order in which they were started.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::cluster::job::{Job, Local, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::training::{Tensor, begin, given, places, pull, push, push_pull, wanted};
use pserver_client::{Client, Pending};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::error::Failure;

const TRAINERS: u32 = 2;
const ROUNDS: u64 = 4;
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// The deadline of a call that is meant to fail.
const SHORT: Duration = Duration::from_secs(2);
/// A rule whose result depends on the order of the rounds.
const MOMENTUM: &str = "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";

/// Values of every tensor.
type Values = Vec<Vec<u8>>;
/// All rounds of one trainer; returns the values after the last round.
type Training = fn(&Client, &[Tensor], u32) -> Values;

fn tensors(optimizer: &str) -> Vec<Tensor> {
    vec![
        Tensor::new("tiny", Float32, 3, optimizer),
        Tensor::new("several chunks", Float32, 5 * 8192 + 77, optimizer),
        Tensor::new("wide", Float64, 9001, optimizer),
        Tensor::new("small", Float32, 700, optimizer),
    ]
}

fn two_servers(mode: &'static str, trainers: u32) -> Job {
    Job { mode, shards: 2, ..Job::new(2, trainers) }
}

fn gradients(tensors: &[Tensor], trainer: u32, round: u64) -> Values {
    tensors.iter().map(|tensor| tensor.gradient(trainer, round)).collect()
}

/// Trains with servers of its own. Returns the last values that each trainer pulled, and the final values.
fn train(mode: &'static str, tensors: &[Tensor], training: Training) -> (Vec<Values>, Values) {
    let servers = Local::start(&two_servers(mode, TRAINERS));
    let clients: Vec<Client> = (0..TRAINERS).map(|trainer| client(&servers.coordinator(), trainer)).collect();
    for client in &clients {
        begin(client, tensors).expect("the tensors are initialised");
    }
    let seen = std::thread::scope(|scope| {
        let run = |(trainer, client)| scope.spawn(move || training(client, tensors, trainer));
        let running: Vec<_> = (0..).zip(&clients).map(run).collect();
        running.into_iter().map(|one| one.join().expect("training goes well")).collect()
    });
    let last = pull(&reader(&servers.coordinator()), tensors).expect("the tensors are there");
    drop(clients);
    servers.stop();
    (seen, last)
}

fn one_after_the_other(client: &Client, tensors: &[Tensor], trainer: u32) -> Values {
    for round in 1..=ROUNDS {
        push_pull(client, tensors, trainer, round).expect("a round is closed");
    }
    pull(client, tensors).expect("the tensors are there")
}

/// A call for each tensor, the last one first, as a backward pass has them.
fn overlapping(client: &Client, tensors: &[Tensor], trainer: u32) -> Values {
    let mut values = places(tensors);
    for round in 1..=ROUNDS {
        let gradients = gradients(tensors, trainer, round);
        let step = client.scope(|calls| {
            let both = given(tensors, &gradients).into_iter().zip(wanted(tensors, &mut values)).rev();
            let started: Result<Vec<_>, _> =
                both.map(|(given, wanted)| calls.push_pull(&[given], None, vec![wanted])).collect();
            started?.into_iter().try_for_each(Pending::wait)
        });
        step.expect("a round is closed");
    }
    values
}

/// All rounds are started before the first is waited for.
fn queued(client: &Client, tensors: &[Tensor], trainer: u32) -> Values {
    let rounds: Vec<Values> = (1..=ROUNDS).map(|round| gradients(tensors, trainer, round)).collect();
    let mut values = places(tensors);
    let training = client.scope(|calls| {
        let mut started = Vec::new();
        for gradients in &rounds {
            for given in given(tensors, gradients) {
                started.push(calls.push(&[given], None)?);
            }
        }
        started.push(calls.pull(wanted(tensors, &mut values))?);
        started.into_iter().rev().try_for_each(Pending::wait)
    });
    training.expect("every round is closed");
    values
}

fn check_alike(mode: &'static str, tensors: &[Tensor], trainings: &[Training]) {
    let (_, expected) = train(mode, tensors, one_after_the_other);
    assert_ne!(expected, tensors.iter().map(Tensor::initial).collect::<Values>(), "training changes values");
    for training in trainings {
        let (seen, last) = train(mode, tensors, *training);
        assert!(last == expected, "{mode}: the values at the end");
        if mode == "sync" {
            assert!(seen.iter().all(|seen| *seen == expected), "{mode}: what each trainer sees after the last round");
        }
    }
}

#[test]
fn overlapping_and_queued_calls_equal_blocking_calls_in_sync_mode() {
    check_alike("sync", &tensors(MOMENTUM), &[overlapping, queued]);
}

/// Every gradient is one, so that the sum does not depend on the order of the trainers.
fn ones(client: &Client, tensors: &[Tensor], _trainer: u32) -> Values {
    let ones: Values = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    let training = client.scope(|calls| {
        for _ in 0..ROUNDS {
            for given in given(tensors, &ones) {
                // The scope waits for the call.
                let _ = calls.push(&[given], None)?;
            }
        }
        Ok(())
    });
    training.expect("every gradient is taken");
    pull(client, tensors).expect("the tensors are there")
}

fn blocking_ones(client: &Client, tensors: &[Tensor], _trainer: u32) -> Values {
    let ones: Values = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    for _ in 0..ROUNDS {
        client.push(&given(tensors, &ones), None).expect("every gradient is taken");
    }
    pull(client, tensors).expect("the tensors are there")
}

#[test]
fn overlapping_calls_equal_blocking_calls_in_async_mode() {
    let tensors: Vec<Tensor> = tensors("const_lr { learning_rate: 1.0 }").into_iter().map(Tensor::zeroed).collect();
    let (_, expected) = train("async", &tensors, blocking_ones);
    let (_, found) = train("async", &tensors, ones);
    assert!(found == expected, "the values at the end");
}

#[test]
fn calls_on_one_parameter_are_applied_in_the_order_of_their_starts_and_once() {
    for mode in ["sync", "async"] {
        let run = |training: Training| {
            let servers = Local::start(&two_servers(mode, 1));
            let client = client(&servers.coordinator(), 0);
            let tensors = tensors(MOMENTUM);
            begin(&client, &tensors).expect("the tensors are initialised");
            let values = training(&client, &tensors, 0);
            drop(client);
            servers.stop();
            values
        };
        let expected = run(one_after_the_other);
        assert!(run(queued) == expected, "{mode}: queued");
        assert!(run(overlapping) == expected, "{mode}: overlapping");
    }
}

#[test]
fn a_call_goes_on_while_nobody_waits() {
    let servers = Local::start(&two_servers("sync", 1));
    let client = client(&servers.coordinator(), 0);
    let tensors = tensors(MOMENTUM);
    begin(&client, &tensors).expect("the tensors are initialised");
    let gradients = gradients(&tensors, 0, 1);
    let begun = Instant::now();
    let step = client.scope(|calls| {
        let call = calls.push(&given(&tensors, &gradients), None)?;
        while !call.is_done() {
            assert!(begun.elapsed() < PATIENCE, "not done within {PATIENCE:?}");
            std::thread::yield_now();
        }
        call.wait()
    });
    step.expect("the gradient is taken");
    drop(client);
    servers.stop();
}

fn words(failure: &Failure, expected: &[&str]) {
    let text = failure.to_string();
    assert!(expected.iter().any(|words| text.contains(words)), "{text}; expected one of {expected:?}");
}

#[test]
fn a_failed_call_fails_its_waiter_and_later_calls_on_the_parameter() {
    let servers = Local::start(&two_servers("sync", TRAINERS));
    let first = client_with(&servers.coordinator(), 0, SHORT);
    let second = client(&servers.coordinator(), 1);
    let tensors = tensors(MOMENTUM);
    begin(&first, &tensors).expect("the tensors are initialised");
    begin(&second, &tensors).expect("the tensors are initialised");
    let gradients = [1, 2].map(|round| gradients(&tensors, 0, round));
    let (mut one, mut other) = (places(&tensors), places(&tensors));
    // The second trainer pushes nothing, so no round is closed.
    let outcome = first.scope(|calls| {
        let both = given(&tensors, &gradients[0]).into_iter().zip(wanted(&tensors, &mut one));
        let (given_one, wanted_one) = both.into_iter().next().expect("there are tensors");
        let closes = calls.push_pull(&[given_one], None, vec![wanted_one])?;
        let follows = calls.push(&given(&tensors, &gradients[1])[..1], None)?;
        let follows_too = calls.push(&given(&tensors, &gradients[1])[..2], None)?;
        let last = tensors.len() - 1;
        let apart = calls.pull(wanted(&tensors[last..], &mut other[last..]))?;
        assert_eq!(apart.wait(), Ok(()), "it is about another parameter");
        let behind = ["an earlier call about"];
        words(&follows_too.wait().expect_err("it follows one that fails"), &behind);
        words(&follows.wait().expect_err("it follows one that fails"), &behind);
        words(&closes.wait().expect_err("nobody closes the round"), &["no answer within 2.0 s"]);
        Ok(())
    });
    assert_eq!(outcome, Ok(()), "every failure was heard");
    assert!(other.last() == tensors.last().map(Tensor::initial).as_ref());
    // The gradient that failed is sent again, and is in the sum once.
    check_sound([first, second], &tensors);
    servers.stop();
}

/// Trains from the first round on, and checks that the values are those of an undisturbed job.
fn check_sound(clients: [Client; 2], tensors: &[Tensor]) {
    for round in 1..=ROUNDS {
        for (trainer, client) in (0..).zip(&clients) {
            push(client, tensors, trainer, round).expect("the gradient is taken");
        }
    }
    let found = pull(&clients[0], tensors).expect("the rounds are closed");
    drop(clients);
    let (_, expected) = train("sync", tensors, one_after_the_other);
    assert!(found == expected, "after {ROUNDS} rounds");
}

#[test]
fn a_scope_waits_for_its_calls_and_returns_an_unreported_failure() {
    let servers = Local::start(&two_servers("sync", TRAINERS));
    let client = client_with(&servers.coordinator(), 0, SHORT);
    let tensors = tensors(MOMENTUM);
    begin(&client, &tensors).expect("the tensors are initialised");
    let mut values = places(&tensors);
    let unheard = client.scope(|calls| calls.pull(wanted(&tensors, &mut values)).map(drop));
    assert_eq!(unheard, Ok(()));
    assert!(values == tensors.iter().map(Tensor::initial).collect::<Values>(), "the scope ended with the call");
    let gradients = gradients(&tensors, 0, 1);
    let unheard = client.scope(|calls| {
        let _ = calls.push_pull(&given(&tensors, &gradients), None, wanted(&tensors, &mut values))?;
        Ok(())
    });
    words(&unheard.expect_err("nobody closes the round"), &["no answer within 2.0 s"]);
    drop(client);
    servers.stop();
}

#[test]
fn a_panic_in_a_scope_ends_its_calls_and_leaves_the_client_usable() {
    let servers = Local::start(&two_servers("sync", TRAINERS));
    let clients = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
    for client in &clients {
        begin(client, &tensors(MOMENTUM)).expect("the tensors are initialised");
    }
    let tensors = tensors(MOMENTUM);
    let mut values = places(&tensors);
    let gradients = gradients(&tensors, 0, 1);
    // The second trainer pushes nothing, so the call cannot be over before the panic.
    let panic = catch_unwind(AssertUnwindSafe(|| {
        clients[0].scope::<()>(|calls| {
            let _ = calls.push_pull(&given(&tensors, &gradients), None, wanted(&tensors, &mut values))?;
            panic!("the program's own bug")
        })
    }));
    assert!(panic.is_err(), "the panic goes on");
    check_sound(clients, &tensors);
    servers.stop();
}

#[test]
fn an_invalid_call_is_refused_when_it_is_started() {
    let servers = Local::start(&two_servers("sync", 1));
    let client = client(&servers.coordinator(), 0);
    let tensors = tensors(MOMENTUM);
    begin(&client, &tensors).expect("the tensors are initialised");
    let nobody = [Tensor::new("nobody", Float32, 3, "")];
    let mut values = places(&nobody);
    let refused = client.scope(|calls| calls.pull(wanted(&nobody, &mut values)).map(drop));
    words(&refused.expect_err("there is no such parameter"), &["unknown parameter \"nobody\""]);
    drop(client);
    servers.stop();
}

#[test]
fn started_calls_lose_nothing_when_servers_are_killed() {
    let folder = folder();
    let job = two_servers("async", 1).with_checkpoints(folder.path());
    let job = job.with("--journal", "on").with("--checkpoint-interval-seconds", 1);
    let mut processes = Processes::start(job);
    let client = client(&processes.coordinator(), 0);
    let tensors: Vec<Tensor> = tensors("const_lr { learning_rate: 1.0 }").into_iter().map(Tensor::zeroed).collect();
    begin(&client, &tensors).expect("the tensors are initialised");
    let ones: Values = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    let (kills, each) = (6_u8, 5_u8);
    for kill in 0..kills {
        let server = usize::from(kill % 2);
        let step = client.scope(|calls| {
            let mut started = Vec::new();
            for _ in 0..each {
                for given in given(&tensors, &ones) {
                    started.push(calls.push(&[given], None)?);
                }
            }
            processes.kill(server);
            processes.start_again(server);
            started.into_iter().try_for_each(Pending::wait)
        });
        step.expect("every gradient is taken");
    }
    let pushed: Values = tensors.iter().map(|tensor| tensor.constant(f32::from(kills * each))).collect();
    assert!(pull(&client, &tensors).expect("the tensors are there") == pushed, "each gradient once");
    drop(client);
    processes.terminate();
}
