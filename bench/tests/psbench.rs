//! Every subcommand at a small size: what it writes is what the schema says, and every value was right.

mod schema;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use clap::Parser;
use paddle_pserver::node::Server;
use paddle_pserver::settings::{ServeArgs, Settings};
use pserver_kernels::conformance::skips::skip;
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;
use serde_json::{Value, json};

const SCHEMA: &str = include_str!("../psbench.schema.json");

fn psbench(arguments: &[&str]) -> Output {
    psbench_told(arguments, &[])
}

fn psbench_told(arguments: &[&str], told: &[(&'static str, String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_psbench"));
    command.args(arguments).envs(told.iter().cloned()).output().expect("the program can be run")
}

/// Runs a subcommand that must end well; its report.
fn report(arguments: &[&str]) -> Value {
    report_told(arguments, &[])
}

/// The same where the environment says more.
fn report_told(arguments: &[&str], told: &[(&'static str, String)]) -> Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let output = psbench_told(&all, told);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{words}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON and nothing else");
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let refused = schema::refusals(&schema, &report, "");
    assert!(refused.is_empty(), "{arguments:?}: {refused:#?}");
    assert_eq!(report["end"]["wrong"], json!(0), "{arguments:?}");
    report
}

/// Runs a subcommand that measures; every result must have a ratio to its ceiling.
fn check(arguments: &[&str], results: usize) -> Value {
    let report = report(arguments);
    let all = report["end"]["results"].as_array().expect("the schema says so");
    assert_eq!(all.len(), results, "{arguments:?}");
    for result in all {
        assert!(result["ratio_to_ceiling"].as_f64().is_some_and(|ratio| ratio > 0.0), "{arguments:?}: {result}");
    }
    report
}

/// The only result of a subcommand that must end well.
fn report_of_one(arguments: &[&str]) -> Value {
    let report = report(arguments);
    let all = report["end"]["results"].as_array().expect("the schema says so");
    assert_eq!(all.len(), 1, "{arguments:?}");
    all[0].clone()
}

#[test]
fn pushpull_measures_every_rule_mode_and_type() {
    check(&["pushpull", "-s", "4k,1MiB", "-n", "18"], 2);
    check(&["pushpull", "-s", "64k", "-n", "18", "--rule", "sgd", "--trainers", "3"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--rule", "adam", "--params", "3"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--rule", "none"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--buffers", "registered", "--trainers", "2"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--mode", "async", "--rule", "sgd", "--trainers", "2"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--mode", "bounded", "--rule", "sgd", "--trainers", "2"], 1);
    check(&["pushpull", "-s", "64k", "-n", "18", "--mode", "delta", "--trainers", "2"], 1);
    check(&["pushpull", "-s", "64k", "-n", "9", "--mode", "delta", "--checks", "always"], 1);
    check(&["pushpull", "-s", "96k", "-n", "18", "--dtype", "f16", "--trainers", "2", "--chunk", "16k"], 1);
    check(&["pushpull", "-s", "96k", "-n", "18", "--dtype", "bf16"], 1);
    check(&["pushpull", "-s", "96k", "-n", "18", "--dtype", "f64", "--servers", "2", "--shards", "2"], 1);
}

#[test]
fn pushpull_has_values_as_halves_and_checks_them() {
    let halves = |more: &[&'static str]| [&["pushpull", "-s", "96k", "-n", "18", "--alone", "--values"], more].concat();
    let result = report_of_one(&halves(&["bf16", "--dtype", "bf16", "--rule", "adam"]));
    assert_eq!((&result["values"], &result["dtype"]), (&json!("bf16"), &json!("bf16")), "{result}");
    report_of_one(&halves(&["f16", "--params", "3", "--transport", "shm", "--buffers", "registered"]));
    report_of_one(&halves(&["f16", "--rule", "sgd", "--mode", "async", "--trainers", "2"]));
    let output = psbench(&halves(&["f16", "--spoil"]));
    assert_eq!(output.status.code(), Some(1), "a wrong value ends the program with 1");
    let refused = psbench(&halves(&["f16", "--dtype", "f64"]));
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(words.contains("only values of float32 come as halves; found --dtype f64"), "{words}");
}

#[test]
fn pushpull_measures_shared_memory_and_every_way_to_wait() {
    let shm = ["pushpull", "-s", "4k,1MiB", "-n", "18", "--transport", "shm"];
    let report = check(&[&shm[..], &["--trainers", "2"]].concat(), 2);
    assert_eq!(report["end"]["results"][0]["ceiling_name"], json!("straight shm, a copy each way"));
    check(&[&shm[..], &["--poll", "adaptive"]].concat(), 2);
    check(&["pushpull", "-s", "4k", "-n", "18", "--poll", "busy"], 1);
}

#[test]
fn servers_and_trainers_of_one_process_are_measured_beside_shared_memory() {
    let within = |more: &[&'static str]| [more, &["-n", "18", "--transport", "loopback"]].concat();
    let report =
        check(&within(&["pushpull", "-s", "4k,1MiB", "--trainers", "2", "--servers", "2", "--shards", "2"]), 2);
    let result = &report["end"]["results"][1];
    assert_eq!((&result["transport"], &result["trainers"]), (&json!("loopback"), &json!(2)), "{result}");
    assert_eq!(result["ceiling_name"], json!("straight shm, a copy each way"));
    assert_eq!(result["server_cpu_seconds_per_gigabyte"], Value::Null, "they have no process of their own");
    check(&within(&["pushpull", "-s", "64k", "--rule", "adam", "--params", "3", "--buffers", "registered"]), 1);
    check(&within(&["pushpull", "-s", "64k", "--rule", "none", "--params", "3", "--buffers", "own"]), 1);
    check(&within(&["pushpull", "-s", "64k", "--mode", "async", "--rule", "sgd", "--trainers", "2"]), 1);
    check(&within(&["latency", "-s", "4k", "--poll", "busy"]), 1);
    let output = psbench(&within(&["pushpull", "-s", "4k", "--spoil"]));
    assert_eq!(output.status.code(), Some(1), "a wrong value ends the program with 1");
}

#[test]
fn pushpull_says_what_the_servers_used() {
    let report = check(&["pushpull", "-s", "1MiB", "-n", "18"], 1);
    let result = &report["end"]["results"][0];
    assert!(result["server_cpu_seconds_per_gigabyte"].as_f64().is_some_and(|seconds| seconds >= 0.0), "{result}");
    assert!(result["server_peak_rss_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{result}");
    for counter in ["copies", "registrations", "connections"] {
        assert_eq!(result[counter], json!(0), "{counter}: nothing goes over verbs here");
    }
    assert_eq!(report["intervals"].as_array().map(Vec::len), Some(9));
}

#[test]
fn a_wrong_value_ends_the_program_with_1() {
    let output = psbench(&["pushpull", "-s", "4k", "-n", "9", "--spoil", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).expect("the report is written all the same");
    assert!(report["end"]["wrong"].as_u64().is_some_and(|wrong| wrong > 0), "{report}");
}

#[test]
fn latency_measures_in_a_closed_and_in_an_open_loop() {
    check(&["latency", "-n", "45"], 1);
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let (page, distribution) = (folder.path().join("a.html"), folder.path().join("a.hgrm"));
    let (page, distribution) = (page.to_str().expect("UTF-8"), distribution.to_str().expect("UTF-8"));
    let report =
        check(&["latency", "-s", "4k,8k", "-n", "45", "--rate", "500", "--html", page, "--hgrm", distribution], 2);
    assert_eq!(report["start"]["parameters"]["loop"], json!("open"));
    let page = std::fs::read_to_string(page).expect("the page was written");
    assert!(page.contains("<svg") && !page.contains("http-equiv") && !page.contains("src="), "{page}");
    let distribution = std::fs::read_to_string(distribution).expect("the distributions were written");
    assert_eq!(distribution.matches("#[Max").count(), 4, "{distribution}");
}

#[test]
fn kernels_are_measured_beside_memory() {
    let report = check(&["kernels", "--elements", "10007", "-n", "3"], 12);
    let results = report["end"]["results"].as_array().expect("a list");
    let by_hand = results.iter().filter(|result| result["ratio_to_fused"].is_number());
    assert_eq!(by_hand.count(), 4, "each loop that was written by hand is measured");
}

#[test]
fn a_device_that_is_not_there_is_named_with_the_reason() {
    let output = psbench(&["kernels", "--device", "cuda", "--ordinal", "4000000000"]);
    let found = String::from_utf8_lossy(&output.stderr);
    let reasons = ["libcuda.so.1 not found", "no CUDA device", "CUDA device 4000000000 does not exist: there are"];
    assert_eq!(output.status.code(), Some(1), "{found}");
    assert!(reasons.iter().any(|reason| found.contains(reason)), "{found}");
}

/// What stands in for torch: one line that it would write.
const TORCH: &str = r#"#!/bin/sh
echo '{"rule": "adam", "gradients": 8, "gradient_type": "bfloat16", "elements": 10007, "elements_per_second": 1.0}'
"#;

#[test]
fn kernels_and_server_steps_of_a_device_are_measured_beside_its_copies() {
    let mut told = match standin::everything(&shipped::module()) {
        Ok(told) => told,
        Err(why) => return skip("g++", &why),
    };
    told.push(("PSERVER_STANDIN_MEMORY", (1_u64 << 30).to_string()));
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let torch = folder.path().join("torch");
    std::fs::write(&torch, TORCH).expect("it can be written");
    std::fs::set_permissions(&torch, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
    let page = folder.path().join("page.md");
    let (torch, page) = (torch.to_str().expect("UTF-8"), page.to_str().expect("UTF-8"));
    let small = ["kernels", "--device", "cuda", "--elements", "10007", "--step-elements", "5003", "-n", "2"];
    let more = ["--rule", "sum,adam,adam-text", "--gradients", "1,8", "--goals", "--torch", torch, "--markdown", page];
    let report = report_told(&[&small[..], &more].concat(), &told);
    let results = report["end"]["results"].as_array().expect("a list");
    let field = |name: &str, field: &str| {
        let found = results.iter().find(|result| result["name"].as_str().is_some_and(|has| has.starts_with(name)));
        found.unwrap_or_else(|| panic!("no line {name}"))[field].clone()
    };
    // Copies; two lines for each rule, number and type; torch's; goals.
    assert_eq!(results.len(), 4 + 2 * 3 * 2 * 2 + 1 + 10);
    let is_ratio = |value: Value| value.as_f64().is_some_and(|ratio| ratio > 0.0);
    assert!(is_ratio(field("copy both ways at once", "bytes_per_second")));
    assert!(is_ratio(field("adam, 8 bfloat16, kernel", "ratio_to_torch")));
    assert!(field("adam, 1 bfloat16, kernel", "ratio_to_torch").is_null(), "torch said nothing of one gradient");
    assert!(is_ratio(field("adam-text, 8 float32, kernel", "ratio_to_built_in")));
    assert!(is_ratio(field("sum, 8 float32, server step", "ratio_to_link_apart")));
    assert_eq!(field("sum, 8 float32, server step", "elements"), json!(5003));
    let verdict = field("goal: adam, 8 bfloat16, kernel: times torch", "verdict");
    assert_eq!(verdict, json!("met, at 10007 elements"), "a stand-in's figures are no figures");
    let page = std::fs::read_to_string(page).expect("the page was written");
    assert!(page.contains("| goal: adam, 8 bfloat16, kernel: times torch |"), "{page}");
}

#[test]
fn rows_are_measured_beside_an_array() {
    let small = ["rows", "--local", "--rows", "3001", "-n", "5"];
    check(
        &[&small[..], &["--rule", "sgd,momentum,adagrad,adam", "--width", "7", "--batch", "500"]].concat(),
        4 * 2 * 3,
    );
    check(&[&small[..], &["--distribution", "uniform", "--batch", "5000"]].concat(), 3);
    check(&[&small[..], &["--distribution", "zipf", "--missed", "lazy", "--batch", "500"]].concat(), 3);
}

#[test]
fn rows_are_measured_over_the_network() {
    let small = ["rows", "--rows", "3001", "--batch", "500", "-n", "5"];
    check(&[&small[..], &["--trainers", "2", "--servers", "2", "--shards", "2", "--width", "7"]].concat(), 4);
    let report = check(&[&small[..], &["--transport", "shm", "--distribution", "uniform"]].concat(), 2);
    let (push, pull) = (&report["end"]["results"][0], &report["end"]["results"][1]);
    assert!(push["dense_bytes_ratio"].as_f64().is_some_and(|ratio| ratio > 2.0), "{push}");
    assert!(pull["bytes_moved"].as_f64().is_some_and(|bytes| bytes < 500.0 * (64.0 * 4.0 + 8.0)), "{pull}");
    let output = psbench(&[&small[..], &["--spoil"]].concat());
    assert_eq!(output.status.code(), Some(1), "a wrong value ends the program with 1");
}

#[test]
fn the_ceiling_is_measured_on_every_path() {
    let ceiling = ["ceiling", "-s", "4k,300k", "-D", "0.01", "--poll", "block,adaptive", "--arrays", "64k"];
    // Memory, links, pings; then paths, trainers, ways to wait, sizes.
    check(&[&ceiling[..], &["--link-bytes", "1MiB"]].concat(), 4 + 4 + 4 + 3 * 2 * 2 * 2);
}

#[test]
fn scale_grows_along_every_axis() {
    let scale = ["scale", "-s", "4k,64k", "--cuts", "1,10", "--teams", "1,2", "--fixed", "64k", "-n", "9"];
    let report = check(&scale, 6);
    assert!(report["end"]["results"][1]["growth"].is_number());
    let alone = report_of_one(&["scale", "-s", "4k", "--axis", "bytes", "-n", "9", "--alone"]);
    assert_eq!(alone["ratio_to_ceiling"], Value::Null, "{alone}");
    let output = psbench(&["scale", "-s", "1MiB,64TiB", "--axis", "bytes"]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("64 TiB, 1 trainer needs about 512 TiB, and this machine has"), "{words}");
}

/// A peer that is a shell script; the report, and how the program ended.
fn with_fake_peer(script: &str, more: &[&str]) -> (Value, Option<i32>) {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("peer.sh");
    std::fs::write(&path, script).expect("it can be written");
    let (program, folder) = (path.to_str().expect("UTF-8"), folder.path().to_str().expect("UTF-8"));
    let peers = ["peers", "--trainers", "1", "-s", "4k", "-D", "0.1", "--json"];
    let output = psbench(&[&peers[..], &["--program", program, "--folder", folder], more].concat());
    let words = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"));
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    assert_eq!(schema::refusals(&schema, &report, ""), [""; 0], "{words}");
    (report, output.status.code())
}

/// A script that answers rounds: each took a millisecond, and so many elements were wrong.
fn fake_peer(wrong: u32) -> String {
    let answer = "echo \"{\\\"bytes\\\":$1,\\\"trainers\\\":1,\\\"seconds\\\":[$all],\\\"wrong\\\":";
    format!(
        "echo '{{\"peer\":\"fake\",\"version\":\"1\"}}'\nwhile read word rounds; do\n  \
         all=$(yes 0.001 | head -n $rounds | paste -sd,)\n  {answer}{wrong}}}\"\ndone\n"
    )
}

#[test]
fn a_peer_takes_turns_with_this_server() {
    let (report, code) = with_fake_peer(&fake_peer(0), &[]);
    assert_eq!(code, Some(0), "{report}");
    let results = report["end"]["results"].as_array().expect("the schema says so");
    let transports: Vec<_> = results.iter().map(|one| &one["transport"]).collect();
    assert_eq!(transports, [&json!("tcp"), &json!("shm")]);
    for result in results {
        assert_eq!(result["peer_latency_us_p50"], json!(1000.0), "{result}");
        let ratio = result["latency_us_p50"].as_f64().map(|ours| 1000.0 / ours);
        assert_eq!(result["peer_over_ours"].as_f64(), ratio, "{result}");
    }
    // Nine blocks of ours and nine of theirs, for each result.
    assert_eq!(report["intervals"].as_array().map(Vec::len), Some(2 * 18));
}

#[test]
fn a_wrong_sum_of_a_peer_ends_the_program_with_1() {
    let (report, code) = with_fake_peer(&fake_peer(3), &["--transport", "tcp"]);
    assert_eq!(code, Some(1), "{report}");
    let wrong = report["end"]["results"][0]["peer_wrong"].as_u64();
    // Three in each of nine blocks.
    assert_eq!(wrong, Some(27), "{report}");
    assert_eq!(report["end"]["results"][0]["wrong"].as_u64(), wrong, "{report}");
}

#[test]
fn a_peer_that_gives_no_figure_is_listed_with_its_reason() {
    let check = |script: &str, more: &[&str], words: &str| {
        let (report, code) = with_fake_peer(script, more);
        assert_eq!(code, Some(0), "{report}");
        let reason = report["end"]["results"][0]["reason"].as_str().expect("it has a reason");
        assert!(reason.contains(words), "{reason}");
    };
    check("echo no such library >&2; exit 3", &[], "no such library");
    check("echo '{\"version\":\"1\"}'; read word; echo '{}'", &[], "it said \"{}\"");
    check("exec sleep 60", &["--run-limit", "0"], "was not done within 0 s");
    check(&fake_peer(0).replace(":$1", ":7"), &[], "it ran rounds of 7 bytes");
    check(&fake_peer(0).replace("[$all]", "[0.001]"), &[], "it ran 1 rounds; expected 2");
}

#[test]
fn memory_is_measured_beside_what_must_be_kept() {
    let report = check(&["memory", "-s", "4MiB", "--params", "1000", "--rule", "adam"], 1);
    let result = &report["end"]["results"][0];
    assert_eq!((&result["kept_bytes"], &result["gradient_bytes"]), (&json!(12 << 20), &json!(4 << 20)), "{result}");
    let of = |field: &str| result[field].as_u64().expect("it is a whole number");
    assert!(of("initialised_bytes") > of("empty_bytes") + (12 << 20), "{result}");
    assert!(of("resident_bytes") >= of("initialised_bytes"), "{result}");
    let output = psbench(&["memory", "-s", "4k", "--spoil"]);
    assert_eq!(output.status.code(), Some(1), "a wrong value ends the program with 1");
}

#[test]
fn what_has_no_time_is_left_out_of_a_comparison() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("doctor.json");
    std::fs::write(&path, report(&["doctor"]).to_string()).expect("it can be written");
    let path = path.to_str().expect("UTF-8");
    let output = psbench(&["compare", path, path]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("the reports have no result with a time in common"), "{words}");
}

#[test]
fn servers_of_another_job_are_measured_by_who_has_its_token() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let token = folder.path().join("token");
    std::fs::write(&token, "nobody can guess this").expect("it can be written");
    let token = token.to_str().expect("UTF-8");
    let line = ["serve", "--bind", "tcp://127.0.0.1:0", "--merge", "sum", "--token-file", token];
    let settings = Settings::load(&Line::parse_from(line).args, &[]).expect("they are right");
    let server = Server::start(settings).expect("a free port");
    let address = server.address().to_string();
    let theirs = ["pushpull", "-s", "4k", "-n", "9", "--connect", &address];
    let stranger = psbench(&theirs);
    let words = String::from_utf8_lossy(&stranger.stderr);
    assert!(!stranger.status.success() && words.contains("this job has a token"), "{words}");
    report(&[&theirs[..], &["--token-file", token]].concat());
    server.stop().expect("nothing happened to it");
}

#[test]
fn two_reports_are_compared() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("old.json");
    let old = report(&["pushpull", "-s", "4k", "-n", "18"]);
    std::fs::write(&path, old.to_string()).expect("it can be written");
    let path = path.to_str().expect("UTF-8");
    let compared = report(&["compare", path, path]);
    let result = &compared["end"]["results"][0];
    assert_eq!((&result["change"], &result["verdict"]), (&json!(1.0), &json!("no difference seen")));
    let rows = |trainers: &str| {
        let small = ["rows", "--rows", "1000", "--width", "4", "--batch", "64", "-n", "9", "--distribution", "zipf"];
        let path = folder.path().join(trainers);
        std::fs::write(&path, report(&[&small[..], &["--trainers", trainers]].concat()).to_string()).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let (one, two) = (rows("1"), rows("2"));
    report(&["compare", &one, &one]);
    refused(&["compare", &one, &two], "\"push, zipf\" has trainers 1, and then 2");
}

#[test]
fn the_doctor_says_which_peer_is_out_of_reach() {
    let report = report(&["doctor", "--peers", "127.0.0.1:1", "--patience", "1"]);
    let results = report["end"]["results"].as_array().expect("the schema says so");
    let peer = results.iter().find(|one| one["name"] == "peer 127.0.0.1:1").expect("it was asked for");
    assert_eq!(peer["verdict"], json!("bad"));
    assert!(peer["fix"].as_str().is_some_and(|fix| !fix.is_empty()), "{peer}");
}

#[test]
fn people_get_a_table_and_programs_get_columns() {
    let output = psbench(&["kernels", "--elements", "2000", "-n", "1", "--rule", "sgd"]);
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(
        table.starts_with("# ") && table.contains("#wrong") && table.ends_with("# wrong elements: 0 OK\n"),
        "{table}"
    );
    let output = psbench(&["kernels", "--elements", "2000", "-n", "1", "--rule", "sgd", "--csv"]);
    let csv = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(csv.starts_with("name,ratio_to_ceiling,wrong,"), "{csv}");
    assert_eq!(csv.lines().count(), 3, "{csv}");
}

fn refused(arguments: &[&str], words: &str) {
    let output = psbench(arguments);
    let found = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && found.contains(words), "{arguments:?}: {found}");
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    refused(&["pushpull", "--transport", "verbs"], "verbs");
    let loopback = ["--transport", "loopback"];
    refused(&[&["pushpull", "--poll", "adaptive"][..], &loopback].concat(), "--poll adaptive");
    refused(&[&["pushpull", "-s", "4k", "--connect", "tcp://127.0.0.1:7164"][..], &loopback].concat(), "--connect");
    refused(&[&["memory"][..], &loopback].concat(), "expected tcp or shm");
    refused(&[&["peers"][..], &loopback].concat(), "expected tcp or shm");
    refused(&["pushpull", "-s", "10"], "multiple of 4");
    refused(&["pushpull", "-s", "ten"], "not a size");
    refused(&["pushpull", "--rule", "none", "--trainers", "2"], "--trainers 2");
    refused(&["latency", "--rate", "0"], "--rate 0");
    refused(&["rows", "--local", "--rule", "sum"], "--rule sum");
    refused(&["compare", "/nowhere.json"], "/nowhere.json");
    assert!(!Path::new("/nowhere.json").exists());
}

#[test]
fn the_schema_refuses_a_report_without_its_count_of_wrong_elements() {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let mut report = report(&["doctor"]);
    report["end"]["results"][0].as_object_mut().expect("a result").remove("wrong");
    assert_eq!(schema::refusals(&schema, &report, ""), [".end.results[0]: no wrong"]);
}
