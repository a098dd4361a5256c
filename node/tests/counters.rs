//! Cost of the counters: their instructions beside those of a round of 4 KiB over shared memory, counted by callgrind.
//!
//! The test runs itself under callgrind. Two numbers of repetitions leave out what starts and ends.

mod watching;

use std::hint::black_box;
use std::process::Command;

use pserver_core::ids::{PeerId, TrainerId, Version};
use pserver_core::port::{Event, Payloads, ReceiveBuffers, Submit};
use pserver_core::server::ShardCounters;
use pserver_core::wire::{Entry, Frame, Head, Kind};
use pserver_kernels::conformance::skips::skip;
use pserver_node::telemetry::{ReportRequests, SessionCounters, SessionReport};

/// Says to this test program what it repeats, and how often: `round 100`.
const TASK: &str = "PSERVER_TEST_COUNTED";

#[test]
fn counters_take_at_most_a_hundredth_of_a_rounds_instructions() {
    if let Ok(task) = std::env::var(TASK) {
        let (what, times) = task.split_once(' ').expect("two words");
        let times = times.parse().expect("a number");
        return if what == "round" { rounds(times) } else { counts(times) };
    }
    let Some(round) = each("round", 400) else {
        return skip("valgrind", "it is not installed, and the instructions of counters are not counted");
    };
    let counters = each("counters", 4000).expect("it is installed");
    let share = 100.0 * counters / round;
    println!("{counters:.0} of {round:.0} instructions of a round: {share:.2} %");
    assert!(counters > 10.0, "{counters} instructions: the compiler has left them out");
    assert!(share <= 1.0, "{counters:.0} of {round:.0} instructions: {share:.2} %");
}

/// Instructions of one repetition; none without callgrind.
fn each(what: &str, times: u32) -> Option<f64> {
    let few = counted(what, times / 4)?;
    Some((counted(what, times)? - few) / f64::from(times - times / 4))
}

fn counted(what: &str, times: u32) -> Option<f64> {
    let folder = tempfile::tempdir().expect("there is room");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=counted"]).arg(std::env::current_exe().expect("it runs"));
    command.args(["--exact", "counters_take_at_most_a_hundredth_of_a_rounds_instructions", "--nocapture"]);
    command.env(TASK, format!("{what} {times}")).current_dir(folder.path());
    let output = command.output().ok()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let line = said.lines().find_map(|line| line.split_once("Collected : ")).expect("callgrind says what it counted");
    Some(line.1.trim().parse().expect("a number"))
}

/// Rounds of one trainer and one parameter of 4 KiB. Nobody polls, so every instruction is the round's.
fn rounds(times: u32) {
    let servers = watching::start_servers(1, 1, &[("--poll", "block")]);
    watching::round_of_one(servers[0].address(), times);
}

/// Counts of the server's thread in such a round: a head and a frame come, a place and an answer go, in three turns.
fn counts(times: u32) {
    let (session, shard, requests) = (SessionCounters::default(), ShardCounters::default(), ReportRequests::default());
    shard.expect_trainers(1);
    let frame = Frame { entries: vec![entry()].into(), ..Frame::bare(Head::new(Kind::Push)) };
    let answer = Frame { entries: vec![entry()].into(), ..Frame::bare(Head::new(Kind::Value)) };
    let head = Event::Head { peer: PeerId(1), frame: frame.clone() };
    let received = Event::Received { peer: PeerId(1), frame, body: ReceiveBuffers::new() };
    let place = Submit::PostReceive { peer: PeerId(1), into: ReceiveBuffers::new() };
    let sent =
        Submit::Send { peer: PeerId(1), ticket: pserver_core::ids::Ticket(0), frame: answer, body: Payloads::new() };
    for time in 1..=u64::from(times) {
        for turn in 0..3 {
            session.turns.observe(black_box(time * 3000 + turn));
            requests.answer(|| SessionReport::Shard(Default::default(), None));
        }
        session.received(black_box(&head));
        session.sent(black_box(&place));
        session.received(black_box(&received));
        shard.gradients.add(black_box(1));
        let arrivals = std::iter::once((black_box(TrainerId(0)), black_box(time * 1000)));
        shard.updated(black_box(Version(time)), black_box(time * 1000 + 500), arrivals);
        session.sent(black_box(&sent));
    }
    assert_eq!(black_box(&shard).rounds.get(), u64::from(times));
}

fn entry() -> Entry {
    use pserver_core::dtype::ElementType::Float32;
    use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round};
    let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
    Entry { bytes: 4096, ..Entry::bare(id, Round(1), Float32) }
}
