//! Calls that another thread cancels: each ends at once with an error that names the cancellation, and may be repeated.
//! The times are printed; `PSERVER_FULL=1` measures fifty.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, Local, TCP, client};
use crate::cluster::training::{Tensor, begin, given, places, pull, push_pull, wanted};
use pserver_client::{Client, DestinationSlice};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;

/// The delay before a call is cancelled: longer than a thread takes to begin the call, also on a busy machine.
const UNDER_WAY: Duration = Duration::from_millis(200);
/// The bound of the fastest of several cancellations, also on a busy machine. Without a cancellation each call waits
/// 60 s.
const FASTEST: Duration = Duration::from_millis(500);
const SLOWEST: Duration = Duration::from_secs(10);

fn tensors() -> [Tensor; 2] {
    [
        Tensor::new("w", Float32, 300_000, "optimizer: SGD const_lr { learning_rate: 0.5 }"),
        Tensor::new("b", Float32, 3, ""),
    ]
}

/// The time from the cancellation of a call to its end, and its error text.
fn cancelled(client: &Client, call: impl FnOnce() -> Result<(), Failure> + Send) -> (Duration, String) {
    std::thread::scope(|threads| {
        let (begins, began) = mpsc::channel();
        let running = threads.spawn(move || {
            begins.send(()).expect("the test listens");
            (call().expect_err("it was cancelled").to_string(), Instant::now())
        });
        began.recv().expect("the thread begins");
        // tidy: allow sleep: no event says that a call waits for what does not come
        std::thread::sleep(UNDER_WAY);
        let asked = Instant::now();
        client.cancel();
        let (text, ended) = running.join().expect("it does not panic");
        (ended.saturating_duration_since(asked), text)
    })
}

fn check(times: &mut [Duration], what: &str) {
    times.sort_unstable();
    let below = times.iter().filter(|time| **time < Duration::from_millis(100)).count();
    let (fastest, slowest) = (times[0], times[times.len() - 1]);
    println!("{what}: {below} of {} below 100 ms, {fastest:?} to {slowest:?}", times.len());
    assert!(fastest < FASTEST && slowest < SLOWEST, "{what}: {times:?}");
}

/// Initialises a job as two trainers at once.
fn begin_both(one: &Client, other: &Client, tensors: &[Tensor]) {
    std::thread::scope(|threads| {
        let first = threads.spawn(|| begin(one, tensors));
        begin(other, tensors).expect("it is initialised");
        first.join().expect("no panic").expect("it is initialised");
    });
}

#[test]
fn a_cancelled_call_ends_at_once_and_is_made_again() {
    let count = if is_full() { 50 } else { 5 };
    for bind in [TCP, "shm://127.0.0.1:0"] {
        let servers = Local::start(&Job { bind, ..Job::new(2, 2) });
        let (one, other) = (client(&servers.coordinator(), 0), client(&servers.coordinator(), 1));
        let tensors = tensors();
        begin_both(&one, &other, &tensors);
        // A cancellation before the begin of a call does not apply to the call.
        let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(0, 1)).collect();
        let mut values = places(&tensors);
        let (given, mut wanted) = (given(&tensors, &gradients), wanted(&tensors, &mut values));
        let mut times: Vec<Duration> = (0..count)
            .map(|_| {
                // The other trainer has not sent its gradient.
                let (time, text) = cancelled(&one, || one.push_pull(&given, None, &mut wanted));
                assert!(text.contains("\"w\"") && text.contains("cancelled by the program"), "{text}");
                time
            })
            .collect();
        check(&mut times, &format!("{bind}, a round that waits for another trainer"));
        // An earlier cancellation changes nothing, and no gradient is applied twice.
        one.cancel();
        other.cancel();
        std::thread::scope(|threads| {
            let first = threads.spawn(|| push_pull(&one, &tensors, 0, 1));
            push_pull(&other, &tensors, 1, 1).expect("the round is complete");
            first.join().expect("no panic").expect("the round is complete");
        });
        let (after, expected) = (pull(&one, &tensors), after_one_round(&tensors));
        assert!(after.expect("it can be fetched") == expected, "{bind}: each gradient is applied once");
        servers.stop();
    }
}

/// The tensors after a round of both trainers: SGD with the rates of `tensors`, in binary32 as the servers.
fn after_one_round(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    let reference = Local::start(&Job::new(1, 2));
    let (one, other) = (client(&reference.coordinator(), 0), client(&reference.coordinator(), 1));
    let round = |client: &Client, trainer| begin(client, tensors).and_then(|_| push_pull(client, tensors, trainer, 1));
    std::thread::scope(|threads| {
        let first = threads.spawn(|| round(&one, 0));
        round(&other, 1).expect("a round without cancellations");
        first.join().expect("no panic").expect("a round without cancellations");
    });
    let values = pull(&one, tensors).expect("it can be fetched");
    reference.stop();
    values
}

#[test]
fn calls_that_were_started_and_threads_that_wait_end_too() {
    let servers = Local::start(&Job::new(1, 2));
    let (one, other) = (client(&servers.coordinator(), 0), client(&servers.coordinator(), 1));
    let tensors = tensors();
    begin_both(&one, &other, &tensors);
    let gradients: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.gradient(0, 1)).collect();
    let given = given(&tensors, &gradients);
    let mut values: Vec<Vec<u8>> = tensors.iter().map(|tensor| vec![0; tensor.bytes()]).collect();
    let [big, small] = values.as_mut_slice() else { panic!("there are two tensors") };
    let mut times = Vec::new();
    one.scope(|calls| {
        let first = calls.push_pull(&given[..1], None, vec![DestinationSlice::new("w", big)])?;
        let second = calls.push_pull(&given[1..], None, vec![DestinationSlice::new("b", small)])?;
        for _ in 0..2 {
            assert!(!first.is_done() && !second.is_done(), "the other trainer has sent nothing");
        }
        let asked = Instant::now();
        one.cancel();
        for call in [first, second] {
            let text = call.wait().expect_err("it was cancelled").to_string();
            assert!(text.contains("cancelled by the program"), "{text}");
            times.push(asked.elapsed());
        }
        Ok(())
    })
    .expect("each was waited for");
    check(&mut times, "started calls");
    // Several threads call on one client; one of them holds the client lock, the others are parked.
    let texts: Vec<String> = std::thread::scope(|threads| {
        let call = |at: usize| {
            let (given, tensor, one) = (&given[at..=at], &tensors[at], &one);
            let mut value = vec![0; tensor.bytes()];
            threads.spawn(move || one.push_pull(given, None, &mut [DestinationSlice::new(&tensor.name, &mut value)]))
        };
        let all = [call(0), call(1)];
        // tidy: allow sleep: no event says that a call waits for what does not come
        std::thread::sleep(UNDER_WAY);
        one.cancel();
        all.into_iter().map(|one| one.join().expect("no panic").expect_err("it was cancelled").to_string()).collect()
    });
    assert!(texts.iter().all(|text| text.contains("cancelled by the program")), "{texts:?}");
    servers.stop();
}

#[test]
fn a_call_that_finds_no_server_is_cancelled() {
    // The listener accepts connections, and sends nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("there is a port");
    let address = format!("tcp://{}", silent.local_addr().expect("it is bound"));
    let client = client(&pserver_core::wire::Address::parse(&address).expect("it is an address"), 0);
    let mut times: Vec<Duration> = (0..3)
        .map(|_| {
            let (time, text) = cancelled(&client, || client.trainer().map(drop));
            assert!(text.contains("joining the job: cancelled by the program"), "{text}");
            time
        })
        .collect();
    check(&mut times, "joining");
}
