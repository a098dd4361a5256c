//! Connections by way of libibverbs' C interface, over the false library's devices: payloads in pieces of random order,
//! memory that holds poison until its completion, and events of devices.

use std::fs;
use std::time::{Duration, Instant};

use pserver_core::limits::RECEIVES_MAX;
use pserver_core::port::Outgoing;

use super::answers::answer_in_every_way;
use super::failures::outstanding;
use super::fixtures::ends;
use super::hosts::{Host, asked, library, run_again};
use crate::conformance;
use crate::conformance::rig::{ConformanceRig, bytes, push};
use crate::network::{ChecksumPolicy, NetworkOptions, PollPolicy};
use crate::verbs::sys::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
    ibv_event_type,
};

/// A card with an address of this host.
const CARD: &str = "device mlx5_0 ib /sys/class/infiniband/mlx5_0\n\
                    port active ethernet 128x2 lid=0 flags=0\ngid 3 roce2 127.0.0.1";
/// The variable with the frames that a test sends each way.
const FRAMES: &str = "PSERVER_TEST_FRAMES";

/// Runs a test again over this card, unless this is that run; whether it is.
fn is_over_the_library(test: &str) -> bool {
    if asked().is_some() {
        return true;
    }
    if let Some(library) = library(test) {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        run_again(test, (&library, folder.path()), &Host::new("one card", &[CARD], ""));
    }
    false
}

fn options(poll: PollPolicy, checks: ChecksumPolicy) -> NetworkOptions {
    NetworkOptions { poll, checks, ..NetworkOptions::default() }
}

fn rig() -> ConformanceRig {
    ConformanceRig::new(ends("verbs://127.0.0.1:0", &options(PollPolicy::Block, ChecksumPolicy::BetweenHosts)))
}

#[test]
fn the_library_keeps_every_promise() {
    if !is_over_the_library("verbs::tests::false_library::the_library_keeps_every_promise") {
        return;
    }
    for (poll, checks) in
        [(PollPolicy::Adaptive, ChecksumPolicy::BetweenHosts), (PollPolicy::Block, ChecksumPolicy::Always)]
    {
        let options = options(poll, checks);
        conformance::check(|| ends("verbs://127.0.0.1:0", &options).landing(RECEIVES_MAX.min(2)));
    }
}

#[test]
fn values_are_written_into_the_buffers_that_requests_have_named() {
    if !is_over_the_library("verbs::tests::false_library::values_are_written_into_the_buffers_that_requests_have_named")
    {
        return;
    }
    for seed in 0..16 {
        answer_in_every_way(&mut rig(), seed);
    }
}

/// Every byte of frames of many lengths is compared, each way.
#[test]
fn no_memory_is_read_before_its_completion_or_used_again_before_it() {
    if !is_over_the_library(
        "verbs::tests::false_library::no_memory_is_read_before_its_completion_or_used_again_before_it",
    ) {
        return;
    }
    let frames: u64 = std::env::var(FRAMES).ok().and_then(|text| text.parse().ok()).unwrap_or(10_000);
    let lengths = [40, 4096, 100, 9000, 30, 20_000, 8192, 500, 70_000, 3000];
    let mut payloads: Vec<Vec<u8>> = (0..64).map(|number| bytes(lengths[number % 10], number as u64)).collect();
    // It takes two requests.
    payloads[63] = bytes(3 << 19, 63);
    let payload = |number: u64| &payloads[usize::try_from(number % 64).expect("it is small")];
    let mut rig = rig();
    let (near, far) = rig.connect();
    rig.settle();
    rig.near.seen.clear();
    rig.far.seen.clear();
    let (mut sent, mut arrived) = (0, [0, 0]);
    while arrived.iter().any(|count| *count < frames) {
        while sent < frames && arrived.iter().all(|count| sent < count + 16) {
            for (side, peer) in [(&mut rig.near, near), (&mut rig.far, far)] {
                let chunk = side.lease(payload(sent));
                side.send(peer, &push(sent, &[payload(sent)]), vec![Outgoing::Value(chunk)].into());
            }
            sent += 1;
        }
        let before = arrived;
        rig.until("a frame arrives", |rig| rig.near.landed().next().is_some() || rig.far.landed().next().is_some());
        for (side, count) in [&mut rig.near, &mut rig.far].into_iter().zip(&mut arrived) {
            for (_, frame, body) in side.landed() {
                assert_eq!(frame.head.sequence.0, *count, "in order");
                assert!(body.concat() == *payload(*count), "frame {count} is what was sent");
                *count += 1;
            }
            side.seen.clear();
        }
        assert_ne!(arrived, before);
    }
    rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    println!("{frames} frames each way are what was sent");
}

/// Functions that a library of rdma-core has from this version on, of those that are called here. All have the others,
/// but `ibv_reg_dmabuf_mr` (34), which the false library never has: libibverbs.map.in.
const SINCE: [(u32, &str); 3] =
    [(28, "ibv_reg_mr_iova2"), (32, "_ibv_query_gid_table"), (35, "ibv_is_fork_initialized")];

/// A function that a library lacks is replaced: Ubuntu 20.04 has rdma-core 28, and older systems 22.
#[test]
fn libraries_of_many_versions_work() {
    if asked().is_some() {
        let mut rig = rig();
        let (near, far) = rig.connect();
        for number in 0..20 {
            let payload = bytes(30_000, number);
            for (side, peer) in [(&mut rig.near, near), (&mut rig.far, far)] {
                let chunk = side.lease(&payload);
                side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(chunk)].into());
            }
        }
        rig.until("all is there", |rig| rig.near.landed().count() == 20 && rig.far.landed().count() == 21);
        return;
    }
    let test = "verbs::tests::false_library::libraries_of_many_versions_work";
    let Some(library) = library(test) else { return };
    for version in [22, 28, 33, 44, 56] {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let types = folder.path().join("ports/1/gid_attrs/types");
        fs::create_dir_all(&types).expect("it is new");
        fs::write(types.join("3"), "RoCE v2\n").expect("it can be written");
        let card = CARD.replace("/sys/class/infiniband/mlx5_0", &folder.path().display().to_string());
        let lacks: Vec<_> = SINCE.iter().filter(|(since, _)| version < *since).map(|(_, name)| *name).collect();
        let host = Host::new("one card", &[&card], "").lacking(lacks.leak());
        run_again(test, (&library, folder.path()), &host);
    }
}

/// Reports an event of every device, whose table has this text from now on.
fn report(kind: ibv_event_type, table: &str) {
    let path = std::env::var("PSERVER_FALSE_IBVERBS").expect("this runs over the library");
    fs::write(path, table).expect("the table can be written");
    // SAFETY: the library is open already, so nothing of it runs.
    let library = unsafe { libloading::Library::new("libibverbs.so.1") }.expect("it is open");
    // SAFETY: the false library has this function, with these arguments.
    let function = unsafe { library.get::<unsafe extern "C" fn(ibv_event_type, i32)>(b"false_ibverbs_event\0") };
    let function = function.expect("it has the function");
    // SAFETY: any numbers are right.
    unsafe { function(kind, 1) };
}

#[test]
fn device_events_are_handled() {
    if !is_over_the_library("verbs::tests::false_library::device_events_are_handled") {
        return;
    }
    let mut rig = rig();
    let first = rig.connect();
    let mut number = 0;
    let mut works = |rig: &mut ConformanceRig, (near, far): (_, _)| {
        number += 1;
        let payload = bytes(50_000, number);
        let landed = rig.far.landed().count();
        let chunk = rig.near.lease(&payload);
        rig.near.send(near, &push(number, &[&payload]), vec![Outgoing::Value(chunk)].into());
        rig.until("it landed", |rig| rig.far.landed().count() > landed || rig.far.gone(far).is_some());
        assert_eq!((rig.near.gone(near), rig.far.gone(far)), (None, None));
    };
    works(&mut rig, first);
    // Every turn among equal cards has had a connection, so that a later one's card is remembered.
    for _ in 0..64 {
        let (near, far) = rig.connect();
        rig.near.transport().close(near);
        rig.until("it is over", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    }
    // A port that is down: connections go on, and there is no new one.
    report(IBV_EVENT_PORT_ERR, &CARD.replace("active", "down"));
    works(&mut rig, first);
    let address = rig.address.clone();
    let refused = rig.near.transport().connect(&address).expect("an address of this transport");
    rig.until("the port is down", |rig| rig.near.gone(refused).is_some());
    let reason = rig.near.gone(refused).unwrap_or_default().to_owned();
    assert!(reason.contains("mlx5_0:1 is not active"), "{reason}");
    // It is up again. A failure is remembered for two seconds, or until an event.
    report(IBV_EVENT_PORT_ACTIVE, CARD);
    let second = rig.connect();
    works(&mut rig, first);
    works(&mut rig, second);
    // Another address: the port of a new connection has it.
    report(IBV_EVENT_GID_CHANGE, &CARD.replace("gid 3 roce2 127.0.0.1", "gid 5 roce2 127.0.0.9"));
    let third = rig.connect();
    works(&mut rig, first);
    works(&mut rig, third);
    // A failed queue completes nothing, and neither does a failed device.
    for kind in [IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL] {
        let ends = rig.connect();
        works(&mut rig, ends);
        report(kind, CARD);
        let began = Instant::now();
        rig.until("an idle connection learns of it", |rig| {
            rig.near.gone(ends.0).is_some() && rig.far.gone(ends.1).is_some()
        });
        assert!(began.elapsed() < Duration::from_secs(5), "no other time is waited for");
        let next = rig.connect();
        works(&mut rig, next);
    }
}
