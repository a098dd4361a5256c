//! Outcomes of calls that programs distinguish, interrupts of waiting calls, and the list of parameters.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use crate::cluster::job::{Job, Local, client, client_with};
use crate::cluster::training::{Tensor, begin, given, initialise, places, push, push_pull, wanted};
use pserver_client::{Client, ListedParameter};
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::error::{CallEnd, Failure};
use pserver_core::ids::Version;

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 0.1 }";

fn check<T>(result: Result<T, Failure>, expected: &CallEnd, text: &str) {
    let failure = result.err().expect(text);
    assert_eq!(failure.end(), *expected, "{failure}");
    assert!(failure.to_string().contains(text), "{failure}; expected {text}");
}

#[test]
fn programs_distinguish_the_outcomes_of_calls() {
    let local = Local::start(&Job::new(1, 2).with("--round-timeout-seconds", 1));
    let (one, tensors) = (client(&local.coordinator(), 0), [Tensor::new("w", Float32, 5, SGD).zeroed()]);
    assert!(one.begin_init(&Default::default()).expect("it is the first"));
    check(push(&one, &tensors, 0, 0), &CallEnd::NotInitialised, "this trainer was elected and has not finished");
    initialise(&one, &tensors).expect("it was elected");
    check(push(&one, &[Tensor::new("v", Float32, 5, SGD)], 0, 0), &CallEnd::Refused, "\"v\"");
    let missing = CallEnd::MissingTrainers(vec![1]);
    check(push_pull(&one, &tensors, 0, 0), &missing, "waits for trainer 1");
    let impatient = client_with(&local.coordinator(), 1, Duration::from_millis(200));
    push(&impatient, &tensors, 1, 0).expect("its gradient is acknowledged");
    push(&impatient, &tensors, 1, 1).expect("so is the next round's");
    check(push_pull(&impatient, &tensors, 1, 2), &CallEnd::Timeout, "no answer within 0.2 s");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| one.pull_version(&mut wanted(&tensors, &mut places(&tensors)), Version(1 << 40)));
        while !waiting.is_finished() {
            one.cancel();
            thread::yield_now();
        }
        check(waiting.join().expect("it does not panic"), &CallEnd::Cancelled, "cancelled by the program");
    });
    local.stop();
}

static ENDS: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicU32 = AtomicU32::new(0);

#[test]
fn a_waiting_call_polls_its_programs_cancellation_check() {
    // The function is global to the process: calls of other tests poll it too, and go on.
    thread_local!(static IS_MINE: AtomicBool = const { AtomicBool::new(false) });
    pserver_client::ask_while_waiting(|| {
        let is_mine = IS_MINE.with(|mine| mine.load(Ordering::Relaxed));
        is_mine && ASKED.fetch_add(1, Ordering::Relaxed) > 2 && ENDS.load(Ordering::Relaxed)
    });
    let local = Local::start(&Job::new(1, 2));
    let tensors = [Tensor::new("w", Float32, 5, SGD).zeroed()];
    let clients = [client(&local.coordinator(), 0), client(&local.coordinator(), 1)];
    begin(&clients[0], &tensors).expect("it is the first");
    IS_MINE.with(|mine| mine.store(true, Ordering::Relaxed));
    ENDS.store(true, Ordering::Relaxed);
    check(push_pull(&clients[0], &tensors, 0, 0), &CallEnd::Cancelled, "cancelled by the program");
    assert!(ASKED.load(Ordering::Relaxed) > 2);
    // The call goes on while the function returns false.
    ENDS.store(false, Ordering::Relaxed);
    ASKED.store(0, Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            while ASKED.load(Ordering::Relaxed) < 5 {
                thread::yield_now();
            }
            push(&clients[1], &tensors, 1, 0).expect("the first trainer is there");
        });
        push_pull(&clients[0], &tensors, 0, 0).expect("the same gradient again");
    });
    local.stop();
}

fn listed(client: &Client) -> Vec<(String, Vec<u64>, bool, u64)> {
    let row = |one: ListedParameter| (one.name, one.facts.shape, one.facts.is_sparse, one.version.0);
    client.parameters().expect("the parameters are initialised").into_iter().map(row).collect()
}

#[test]
fn parameters_are_listed_with_their_versions_and_started_calls_have_rates() {
    let local = Local::start(&Job::new(2, 1));
    let one = client(&local.coordinator(), 0);
    let tensors = [Tensor::new("w", Float32, 70_000, SGD).zeroed(), Tensor::new("n", Float64, 3, SGD)];
    begin(&one, &tensors).expect("it is the first");
    let row = |name: &str, elements, version| (name.to_owned(), vec![elements], false, version);
    assert_eq!(listed(&one), [row("w", 70_000, 0), row("n", 3, 0)]);
    // Memory of a started call lasts as long as the process.
    let tensors: &'static [Tensor] = Vec::leak(vec![Tensor::new("w", Float32, 70_000, SGD)]);
    let ones: &'static [Vec<u8>] = Vec::leak(vec![tensors[0].constant(1.0)]);
    let pushed = one.start_push(&given(tensors, ones), Some(0.5)).expect("it is started");
    one.wait(pushed).expect("it is acknowledged");
    let into = wanted(tensors, Vec::leak(places(tensors)));
    let both = one.start_push_pull(&given(tensors, ones), Some(2.0), into).expect("it is started");
    one.wait(both).expect("it is answered");
    let pulled = one.start_pull(wanted(tensors, Vec::leak(places(tensors)))).expect("it is started");
    one.wait(pulled).expect("it is answered");
    let mut last = places(tensors);
    one.pull(&mut wanted(tensors, &mut last)).expect("it is there");
    assert_eq!(last[0], tensors[0].constant(-2.5));
    assert_eq!(listed(&one), [row("w", 70_000, 2), row("n", 3, 0)]);
    local.stop();
}
