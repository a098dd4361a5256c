//! Log lines about stalled rounds.

use std::time::Duration;

use super::script::Script;
use super::stage::{Plan, Stage};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;

/// A shard of two trainers. The test takes its log lines, and no turn of the shard's loop does.
fn script() -> Script {
    let plan = Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD");
    let mut script = Script::new(Stage::serving(plan));
    script.run("late");
    script
}

/// Runs the script, lets the time pass, and compares the log lines; `*` stands for any text.
fn check(script: &mut Script, lines: &str, millis: u64, expected: &[&str]) {
    script.run(lines);
    script.stage.now = script.stage.now + Duration::from_millis(millis);
    let found = script.stage.shard.wait_report(script.stage.now);
    let is_like = |(text, expected): (&String, &&str)| {
        let (start, end) = expected.split_once('*').unwrap_or((expected, ""));
        text.starts_with(start) && text.ends_with(end)
    };
    let is_right = found.len() == expected.len() && found.iter().zip(expected).all(is_like);
    assert!(is_right, "{lines:?}, {millis} ms: {found:?}; expected {expected:?}");
}

#[test]
fn a_waiting_round_is_logged_once_with_its_trainer_and_again_when_it_goes_on() {
    let mut script = script();
    check(&mut script, "push+ 0 1 w=1", 9999, &[]);
    check(&mut script, "", 1, &["round 1 of \"w\" chunk 0 has waited 10 s for trainer 1 (*)"]);
    check(&mut script, "", 1000, &[]);
    check(&mut script, "push 1 1 w=1 -> *", 0, &["round 1 of \"w\" chunk 0 went on after 11.0 s"]);
    check(&mut script, "push+ 0 2 w=1", 20_000, &[]);
    check(&mut script, "", 39_000, &["round 2 of \"w\" chunk 0 has waited 59 s for trainer 1 (*)"]);
}

#[test]
fn the_shards_deadline_includes_its_next_log_line() {
    let mut script = script();
    assert_eq!(script.stage.shard.deadline(), None);
    script.run("push+ 0 1 w=1");
    let due = script.stage.shard.deadline().expect("a trainer waits");
    assert_eq!(script.stage.now.until(due), Duration::from_secs(10));
    script.stage.wait(Duration::from_secs(10));
    let due = script.stage.shard.deadline().expect("a trainer waits");
    assert_eq!(script.stage.now.until(due), Duration::from_secs(50), "the end of the round is next");
}
