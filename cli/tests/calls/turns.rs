//! One client: its threads do not block each other, a panic in the library ends calls and nothing else, a repeated call
//! is applied once, and servers that move are found.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::time::{Duration, Instant};

use crate::cluster::job::{DEADLINE, Job, Local, client, client_with, folder, reader};
use crate::cluster::process::Processes;
use crate::cluster::training::{Tensor, begin, given, places, pull, push, push_pull, wanted};
use paddle_pserver::api::shared::{paddle_new_pserver_client_with, paddle_pserver_client_release};
use paddle_pserver::api::started::{paddle_push_pull_start, paddle_wait};
use paddle_pserver::api::sys::Parameter;
use pserver_client::{Client, ClientOptions};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::port::{Capabilities, Doorbell, Event, Submit, Transport};
use pserver_core::wire::{Address, Kind};
use pserver_transport::network::{Network, NetworkOptions};
use pserver_transport::trace::Trace;

const SGD: &str = "const_lr { learning_rate: 1.0 }";
const SHM: &str = "shm://127.0.0.1:0";
/// The deadline of calls that fail if a thread waits for the call of another thread.
const SOON: Duration = Duration::from_secs(20);
const BUG: &str = "a bug in libpaddle_pserver, please report it: on purpose";

fn counted(name: &str) -> Tensor {
    Tensor::new(name, Float32, 20_000, SGD).zeroed()
}

fn servers(mode: &'static str, trainers: u32) -> Local {
    Local::start(&Job { mode, ..Job::new(1, trainers) })
}

fn options(coordinator: &Address, trainer: u32) -> ClientOptions {
    ClientOptions { trainer: Some(trainer), deadline: SOON, ..ClientOptions::new(coordinator.clone()) }
}

fn push_ones(client: &Client, tensors: &[Tensor]) -> Result<(), Failure> {
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    client.push(&given(tensors, &ones), None)
}

/// Checks that every element has received this number of gradients of one.
fn check_count(client: &Client, tensors: &[Tensor], count: u8) {
    let expected: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(count.into())).collect();
    let found = pull(client, tensors).expect("the tensors are there");
    let first = |values: &[Vec<u8>]| values[0][..4].to_vec();
    assert!(found == expected, "{:?} instead of {:?}, which is {count}", first(&found), first(&expected));
}

fn words(failure: &Failure, expected: &str) {
    assert!(failure.to_string().contains(expected), "{failure}; expected {expected}");
}

#[test]
fn a_second_begin_init_loses_no_gradient() {
    for mode in ["sync", "async"] {
        let servers = servers(mode, 1);
        let client = client(&servers.coordinator(), 0);
        let tensors = [counted("w")];
        assert!(begin(&client, &tensors).expect("it is chosen"));
        for count in 1..=3 {
            push_ones(&client, &tensors).expect("the gradient is taken");
            assert!(!client.begin_init(&OptimizerSettings::default()).expect("the tensors are there"));
            check_count(&client, &tensors, count);
        }
        drop(client);
        servers.stop();
    }
}

#[test]
fn a_second_begin_init_applies_no_gradient_twice() {
    let servers = servers("async", 1);
    let spoiler = Arc::new(AtomicU8::new(0));
    let client = spoilt(&servers.coordinator(), &spoiler);
    let tensors = [counted("w")];
    assert!(begin(&client, &tensors).expect("it is chosen"));
    // The gradient is on its way when the call fails, and perhaps applied.
    spoiler.store(AFTER_SUBMIT, SeqCst);
    words(&push_ones(&client, &tensors).expect_err("the transport panics"), BUG);
    assert!(!client.begin_init(&OptimizerSettings::default()).expect("the tensors are there"));
    push_ones(&client, &tensors).expect("the gradient is taken");
    check_count(&client, &tensors, 1);
    drop(client);
    servers.stop();
}

#[test]
fn a_trainer_with_refused_settings_is_not_chosen_to_initialise() {
    let servers = servers("sync", 2);
    let clients = [0, 1].map(|trainer| client_with(&servers.coordinator(), trainer, Duration::from_secs(10)));
    for text in ["sparse { height: 3 width: 1 }", "home: 0", "sender: 0"] {
        let settings = OptimizerSettings::from_text(text).expect("it can be said of a parameter");
        words(&clients[0].begin_init(&settings).expect_err("it is not for all"), "is a setting of one parameter");
    }
    assert!(clients[1].begin_init(&OptimizerSettings::default()).expect("nobody else was chosen"));
    drop(clients);
    servers.stop();
}

/// Faults that a [`Spoilt`] transport injects once.
const PANIC_IN_POLL: u8 = 1;
const PANIC_IN_WAIT: u8 = 2;
const PANIC_IN_SUBMIT: u8 = 3;
const AFTER_SUBMIT: u8 = 4;
/// A lasting fault: a connection ends as soon as it has delivered a value.
const CUT_AFTER_VALUES: u8 = 5;

/// A transport that injects faults.
struct Spoilt {
    inner: Network,
    order: Arc<AtomicU8>,
}

impl Spoilt {
    fn obey(&self, order: u8) {
        let is_meant = self.order.compare_exchange(order, 0, SeqCst, SeqCst).is_ok();
        assert!(!is_meant, "on purpose");
    }

    /// Closes the connections that have just delivered values, and waits until they are closed.
    fn cut(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        let landed = |event: &Event| match event {
            Event::Received { peer, frame, .. } if frame.head.kind == Kind::Value => Some(*peer),
            _ => None,
        };
        let peers: Vec<PeerId> = events.iter().filter_map(landed).collect();
        peers.iter().for_each(|peer| self.inner.close(*peer));
        let is_gone = |event: &Event, one: &PeerId| matches!(event, Event::Gone { peer, .. } if peer == one);
        while peers.iter().any(|peer| !events.iter().any(|event| is_gone(event, peer))) {
            self.inner.wait(Duration::from_millis(10));
            self.inner.poll(events)?;
        }
        Ok(())
    }
}

impl Transport for Spoilt {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        self.inner.connect(address)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let brings = |submit: &Submit| matches!(submit, Submit::Send { body, .. } if !body.is_empty());
        if queue.iter().any(brings) {
            self.obey(PANIC_IN_SUBMIT);
        }
        let is_push = queue.iter().any(brings);
        let submitted = self.inner.submit(queue);
        if is_push && self.order.load(SeqCst) == AFTER_SUBMIT {
            self.inner.poll(&mut Vec::new())?;
            self.obey(AFTER_SUBMIT);
        }
        submitted
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        self.inner.poll(events)?;
        self.obey(PANIC_IN_POLL);
        if self.order.load(SeqCst) == CUT_AFTER_VALUES { self.cut(events) } else { Ok(()) }
    }

    fn close(&mut self, peer: PeerId) {
        self.inner.close(peer);
    }

    fn wait(&mut self, limit: Duration) {
        self.obey(PANIC_IN_WAIT);
        self.inner.wait(limit);
    }

    fn doorbell(&self) -> Doorbell {
        self.inner.doorbell()
    }
}

fn spoilt(coordinator: &Address, order: &Arc<AtomicU8>) -> Client {
    let order = Arc::clone(order);
    let make = move || -> Result<Box<dyn Transport>, Failure> {
        Ok(Box::new(Spoilt { inner: Network::new(NetworkOptions::default())?, order: Arc::clone(&order) }))
    };
    Client::over(options(coordinator, 0), make).expect("this process can have another transport")
}

#[test]
fn a_panic_ends_a_blocking_call_and_nothing_else() {
    let servers = servers("async", 1);
    let order = Arc::new(AtomicU8::new(0));
    let client = spoilt(&servers.coordinator(), &order);
    let tensors = [counted("w"), counted("x")];
    assert!(begin(&client, &tensors).expect("it is chosen"));
    let mut count = 0;
    for spoils in [PANIC_IN_POLL, PANIC_IN_WAIT, PANIC_IN_SUBMIT, AFTER_SUBMIT] {
        order.store(spoils, SeqCst);
        match push_ones(&client, &tensors) {
            Err(failure) => {
                words(&failure, BUG);
                push_ones(&client, &tensors).expect("the client goes on");
            }
            // The call had ended before a thread had to wait.
            Ok(()) => assert_eq!(spoils, PANIC_IN_WAIT),
        }
        order.store(0, SeqCst);
        count += 1;
        check_count(&client, &tensors, count);
    }
    drop(client);
    servers.stop();
}

#[test]
fn a_panic_ends_a_started_call_and_the_next_one_goes_on() {
    let servers = servers("async", 1);
    let order = Arc::new(AtomicU8::new(0));
    let client = spoilt(&servers.coordinator(), &order);
    let tensors = [counted("w")];
    assert!(begin(&client, &tensors).expect("it is chosen"));
    let ones = [tensors[0].constant(-1.0)];
    let begun = Instant::now();
    let start = |spoils| {
        client.scope(|calls| {
            order.store(spoils, SeqCst);
            let call = calls.push(&given(&tensors, &ones), None)?;
            // No thread holds the client lock, so the client's own thread panics.
            while !call.is_done() {
                assert!(begun.elapsed() < DEADLINE, "it is never over");
                std::thread::yield_now();
            }
            call.wait()
        })
    };
    words(&start(PANIC_IN_POLL).expect_err("the transport panics"), BUG);
    start(0).expect("the client goes on");
    check_count(&client, &tensors, 1);
    drop(client);
    servers.stop();
}

#[test]
fn a_view_that_could_not_be_fetched_leaves_its_gradient_applied_once() {
    let servers = Local::start(&Job { mode: "async", bind: SHM, ..Job::new(1, 1) });
    let order = Arc::new(AtomicU8::new(0));
    let client = spoilt(&servers.coordinator(), &order);
    let tensors = [counted("w")];
    assert!(begin(&client, &tensors).expect("it is chosen"));
    check_count(&client, &tensors, 0);
    let ones = [tensors[0].constant(-1.0)];
    order.store(CUT_AFTER_VALUES, SeqCst);
    let refusal = client.push_pull_view(&given(&tensors, &ones), None).map(drop).expect_err("every view is torn");
    words(&refusal, "connections ended repeatedly");
    order.store(0, SeqCst);
    let view = client.push_pull_view(&given(&tensors, &ones), None).expect("the call may be made again");
    let found: Vec<u8> = view.pieces(0).flatten().copied().collect();
    assert!(found == tensors[0].constant(1.0), "the gradient is applied once");
    view.release().expect("the connection is well");
    push_ones(&client, &tensors).expect("the next one is another");
    check_count(&client, &tensors, 2);
    drop(client);
    servers.stop();
}

/// Each of two trainers has two threads, and each thread a parameter: a thread waits for the other trainer's.
#[test]
fn threads_of_two_trainers_do_not_wait_for_each_other_crosswise() {
    let servers = servers("sync", 2);
    let tensors = [[counted("w")], [counted("x")]];
    let clients = [0, 1].map(|trainer| client_with(&servers.coordinator(), trainer, SOON));
    let all = [tensors[0][0].clone(), tensors[1][0].clone()];
    for client in &clients {
        begin(client, &all).expect("the tensors are initialised");
    }
    std::thread::scope(|scope| {
        for (trainer, client) in (0..).zip(&clients) {
            for tensor in &tensors {
                scope.spawn(move || {
                    for round in 1..=20 {
                        push_pull(client, tensor, trainer, round).expect("a round is closed");
                    }
                });
            }
        }
    });
    drop(clients);
    servers.stop();
}

/// The pull of one thread waits for a trainer that pushes only after another thread has polled a started call.
#[test]
fn polling_a_call_does_not_wait_for_the_calls_of_other_threads() {
    let servers = servers("sync", 2);
    let tensors = [counted("w"), counted("x")];
    let network = Network::new(NetworkOptions::default()).expect("this process can have another transport");
    let trace = Trace::new(Box::new(network));
    let counters = trace.counters();
    let once = std::sync::Mutex::new(Some(trace));
    let make = move || -> Result<Box<dyn Transport>, Failure> {
        let trace = once.lock().expect("nobody panics").take();
        Ok(Box::new(trace.ok_or_else(|| Failure::call("there is only one"))?))
    };
    let first = Client::over(options(&servers.coordinator(), 0), make).expect("there is a transport");
    let second = client(&servers.coordinator(), 1);
    for client in [&first, &second] {
        begin(client, &tensors).expect("the tensors are initialised");
    }
    push(&first, &tensors[..1], 0, 1).expect("the gradient is taken");
    let (mut value, gradients) = (places(&tensors[1..]), [tensors[1].gradient(0, 1)]);
    let before = counters.out.frames_of(Kind::Pull);
    let (looked, is_done) = first
        .scope(|calls| {
            let both = (given(&tensors[1..], &gradients), wanted(&tensors[1..], &mut value));
            let call = calls.push_pull(&both.0, None, both.1)?;
            let outcome = std::thread::scope(|scope| {
                let pulling = scope.spawn(|| pull(&first, &tensors[..1]));
                while counters.out.frames_of(Kind::Pull) == before {
                    std::thread::yield_now();
                }
                let is_done = call.is_done();
                let looked = !pulling.is_finished();
                push(&second, &tensors, 1, 1).expect("the gradients are taken");
                pulling.join().expect("it does not panic").map(|_| (looked, is_done))
            });
            call.wait()?;
            outcome
        })
        .expect("both calls are answered once the other trainer has pushed");
    assert!(looked && !is_done, "it was looked while the pull waited");
    drop((first, second));
    servers.stop();
}

#[test]
fn a_server_that_comes_back_at_another_address_is_found() {
    let folder = folder();
    let job = Job { mode: "async", ..Job::new(2, 1) }.with_checkpoints(folder.path()).with("--journal", "on");
    let mut processes = Processes::start(job);
    let client = client(&processes.coordinator(), 0);
    let tensors = [Tensor::new("w", Float32, 100_000, SGD).zeroed()];
    begin(&client, &tensors).expect("the tensors are initialised");
    push_ones(&client, &tensors).expect("the gradient is taken");
    processes.kill(1);
    processes.start_elsewhere(1);
    push_ones(&client, &tensors).expect("the server is found");
    check_count(&client, &tensors, 2);
    check_count(&reader(&processes.coordinator()), &tensors, 2);
    drop(client);
    processes.terminate();
}

/// A client of the C program, one of two trainers.
fn c_client(servers: &Local) -> *mut paddle_pserver::api::sys::ClientHandle {
    let text = format!("coordinator={} trainer=0 deadline=60s\0", servers.coordinator());
    let text = std::ffi::CString::from_vec_with_nul(text.into_bytes()).expect("there is one zero, at the end");
    paddle_new_pserver_client_with(text.as_ptr())
}

fn parameter(name: &std::ffi::CStr, content: &mut [u8]) -> Parameter {
    let content_len = c_int::try_from(content.len()).expect("a short one");
    Parameter { name: name.as_ptr().cast_mut(), element_type: 4, content: content.as_mut_ptr().cast(), content_len }
}

#[test]
fn a_release_gives_up_calls_that_another_thread_waits_for() {
    let servers = servers("sync", 2);
    let other = client(&servers.coordinator(), 1);
    let tensors = [counted("w")];
    begin(&other, &tensors).expect("the tensors are initialised");
    let client = c_client(&servers);
    let (mut gradient, mut place) = (tensors[0].constant(1.0), tensors[0].constant(0.0));
    let (given, mut wanted) = (parameter(c"w", &mut gradient), parameter(c"w", &mut place));
    let mut call = ptr::null_mut();
    // The other trainer pushes nothing, so the round is never closed.
    assert_eq!(paddle_push_pull_start(client, &raw const given, &raw mut wanted, 1, &raw mut call), 0);
    let (address, is_waiting) = (call.addr(), AtomicBool::new(false));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            is_waiting.store(true, SeqCst);
            paddle_wait(ptr::without_provenance_mut(address))
        });
        while !is_waiting.load(SeqCst) {
            std::thread::yield_now();
        }
        (0..1000).for_each(|_| std::thread::yield_now());
        paddle_pserver_client_release(client);
        assert_eq!(waiting.join().expect("a call does not panic"), -1);
    });
    assert!(begun.elapsed() < DEADLINE / 2, "it was given up and not waited for");
    drop(other);
    servers.stop();
}
