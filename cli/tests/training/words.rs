//! The quickstart with words: real processes, a program that is divided, and tables of which rows travel.

use std::f64::consts::LN_2;
use std::process::Command;

use serde_json::Value;

/// Runs the program, which says what it achieved in one line of JSON.
fn achieved(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    let output = command.args(["quickstart", "words", "--json"]).args(arguments).output().expect("the program starts");
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaints}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {complaints}"))
}

fn check(mode: &str) {
    let summary = achieved(&["--mode", mode, "--steps", "250"]);
    let losses: Vec<f64> = summary["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    // Before anything is learned every answer is as likely as the other. Without rounds the other trainer may have
    // learned much when this one begins.
    assert!(first < LN_2 + 0.03, "{mode}: {losses:?}");
    assert!(last < first - 0.03 && last < LN_2 - 0.08, "{mode}: the loss falls: {losses:?}");
    let (bytes, dense) = (summary["bytes"].as_u64().unwrap(), summary["dense_bytes"].as_u64().unwrap());
    assert!(0 < bytes && bytes < dense / 10, "{mode}: {bytes} bytes moved; whole tables would be {dense}");
    let shown = summary["neighbours"].as_array().unwrap();
    assert!(shown.iter().any(|one| one[0] == "king" && one[1].as_array().unwrap().len() == 8), "{mode}: {shown:?}");
}

#[test]
fn words_are_learned_in_rounds() {
    check("sync");
}

#[test]
fn words_are_learned_without_rounds() {
    check("async");
}

#[test]
fn a_mode_in_which_servers_only_add_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    let output = command.args(["quickstart", "words", "--mode", "delta"]).output().expect("the program starts");
    assert!(!output.status.success());
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(complaints.contains("expected sync or async"), "{complaints}");
}
