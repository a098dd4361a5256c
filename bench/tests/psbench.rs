//! Every subcommand of `psbench` at a small size: its report conforms to the schema, and no value is wrong.

mod schema;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use pserver_kernels::conformance::skips::skip;
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;
use pserver_node::Server;
use pserver_node::settings::Settings;
use serde_json::{Value, json};

const SCHEMA: &str = include_str!("../psbench.schema.json");

fn psbench(arguments: &[&str]) -> Output {
    psbench_with(arguments, &[])
}

fn psbench_with(arguments: &[&str], vars: &[(&'static str, String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_psbench"));
    command.args(arguments).envs(vars.iter().cloned()).output().expect("the program can be run")
}

/// Runs a subcommand that must succeed; returns its report.
fn report(arguments: &[&str]) -> Value {
    report_with(arguments, &[])
}

/// Runs a subcommand as `report` does, with further environment variables.
fn report_with(arguments: &[&str], vars: &[(&'static str, String)]) -> Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let output = psbench_with(&all, vars);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{words}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON and nothing else");
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let refused = schema::refusals(&schema, &report, "");
    assert!(refused.is_empty(), "{arguments:?}: {refused:#?}");
    assert_eq!(report["end"]["wrong"], json!(0), "{arguments:?}");
    ratios_are_explained(&report);
    report
}

/// Checks that every result has a ratio to its ceiling, or a reason for having none.
fn ratios_are_explained(report: &Value) {
    for result in report["end"]["results"].as_array().expect("the schema says so") {
        let is_explained = result["no_ratio_because"].as_str().is_some_and(|why| !why.is_empty());
        assert_eq!(result["ratio_to_ceiling"].is_null(), is_explained, "{result}");
    }
}

/// The heads of a table's columns, and its longest line without the environment.
fn heads(table: &str) -> (Vec<&str>, usize) {
    let mut lines = table.lines().skip_while(|line| !line.starts_with("#  "));
    let head = lines.next().expect("there is a table");
    let longest = lines.map(|line| line.chars().count()).max().unwrap_or(0).max(head.chars().count());
    (head.split_whitespace().skip(1).collect(), longest)
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

/// The only result of a subcommand that must succeed.
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
    assert_eq!(report["end"]["results"][0]["ceiling_name"], json!("baseline shm, a copy each way"));
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
    assert_eq!(result["ceiling_name"], json!("baseline shm, a copy each way"));
    assert_eq!(result["server_cpu_seconds_per_gigabyte"], Value::Null, "they have no process of their own");
    check(&within(&["pushpull", "-s", "64k", "--rule", "adam", "--params", "3", "--buffers", "registered"]), 1);
    check(&within(&["pushpull", "-s", "64k", "--rule", "none", "--params", "3", "--buffers", "own"]), 1);
    check(&within(&["pushpull", "-s", "64k", "--mode", "async", "--rule", "sgd", "--trainers", "2"]), 1);
    check(&within(&["latency", "-s", "4k", "--poll", "busy"]), 1);
    let output = psbench(&within(&["pushpull", "-s", "4k", "--spoil"]));
    assert_eq!(output.status.code(), Some(1), "a wrong value ends the program with 1");
}

#[test]
fn pushpull_reports_the_resources_of_the_servers() {
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
fn every_result_of_rounds_has_latencies_and_rates() {
    for subcommand in ["pushpull", "latency", "scale"] {
        let axis: &[&str] = if subcommand == "scale" { &["--axis", "bytes"] } else { &[] };
        let report = check(&[&[subcommand, "--size", "64k", "--iters", "45"][..], axis].concat(), 1);
        let result = &report["end"]["results"][0];
        let of = |field: &str| result[field].as_f64().unwrap_or_else(|| panic!("no {field}: {result}"));
        let order = ["min", "p50", "p99", "p999", "max"].map(|which| of(&format!("latency_us_{which}")));
        assert!(order.is_sorted() && order[0] > 0.0, "{result}");
        assert_eq!(of("rounds"), 45.0);
        // Bytes of the fastest block, and of all; no round is faster than the fastest.
        assert!(of("bytes_per_second_peak") >= of("bytes_per_second"), "{result}");
        let rate = of("rounds_per_second");
        assert!(0.0 < rate && rate <= 1e6 / of("latency_us_min"), "{result}");
        let average = of("bytes_per_second_average") / (rate * 2.0 * 65536.0);
        assert!((average - 1.0).abs() < 1e-9, "{result}");
        assert!(of("server_cpu_percent") > 0.0, "{result}");
        let seconds_per_gigabyte = of("server_cpu_percent") / 100.0 / of("bytes_per_second_average") * 1e9;
        let said = of("server_cpu_seconds_per_gigabyte");
        assert!((seconds_per_gigabyte / said - 1.0).abs() < 1e-9, "{result}");
    }
}

#[test]
fn a_table_has_the_columns_of_perftest_and_fits_a_screen() {
    let table = |arguments: &[&str]| String::from_utf8(psbench(arguments).stdout).expect("UTF-8");
    let small = ["pushpull", "-s", "4k,1MiB", "-n", "18"];
    let whole = table(&small);
    let (found, longest) = heads(&whole);
    let expected = [
        "#bytes",
        "#iters",
        "op",
        "peak[GB/s]",
        "avg",
        "rounds/s",
        "min[us]",
        "p50",
        "p99",
        "p99.9",
        "max",
        "baseline",
        "ratio",
        "low",
        "high",
        "cpu%",
        "s/GB",
        "#wrong",
    ];
    assert_eq!(found, expected, "{whole}");
    assert!(longest <= 160, "{longest} columns: {whole}");
    let bits = table(&[&small[..], &["--report-gbits"]].concat());
    assert!(heads(&bits).0.contains(&"peak[Gb/s]") && !bits.contains("GB/s"), "{bits}");
    // Within one process the usage of the servers cannot be separated; with --alone there is no baseline to compare.
    let within = table(&["pushpull", "-s", "4k", "-n", "9", "--transport", "loopback", "--alone"]);
    let (found, _) = heads(&within);
    let absent = ["cpu%", "s/GB", "baseline", "ratio", "low", "high"];
    assert!(absent.iter().all(|head| !found.contains(head)) && found.contains(&"p99.9"), "{within}");
}

#[test]
fn all_sizes_are_those_of_perftest() {
    let report = report(&["pushpull", "-a", "-n", "9", "--alone", "--transport", "loopback"]);
    let results = report["end"]["results"].as_array().expect("the schema says so");
    let sizes: Vec<_> = results.iter().filter_map(|one| one["bytes"].as_u64()).collect();
    assert_eq!(sizes, (2..=23).map(|power| 1 << power).collect::<Vec<_>>());
    refused(&["pushpull", "-a", "-s", "4k"], "cannot be used with");
}

#[test]
fn the_report_names_the_transport_and_the_reason_for_it() {
    let start = |more: &[&str]| report(&[&["pushpull", "-s", "4k", "-n", "9"], more].concat())["start"].clone();
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").expect("every machine has it");
    let tcp = start(&[]);
    assert_eq!((&tcp["transport"], &tcp["transport_reason"]), (&json!("tcp"), &json!("--transport tcp")));
    assert_eq!((&tcp["link"], tcp["link_mtu_bytes"].as_u64()), (&json!("lo"), mtu.trim().parse().ok()), "{tcp}");
    assert_eq!(tcp["gpu_direct"], json!(false));
    assert!(tcp["gpu_direct_reason"].as_str().is_some_and(|why| why.contains("over tcp")), "{tcp}");
    let auto = report(&["pushpull", "-s", "4k", "-n", "9", "--transport", "auto"]);
    let (why, result) = (auto["start"]["transport_reason"].as_str(), &auto["end"]["results"][0]);
    assert_eq!(why, Some("--transport auto; connected through shared memory"));
    assert_eq!((&result["carried_by"], &result["transport"]), (&json!("shm"), &json!("auto")), "{result}");
    assert_eq!(result["ceiling_name"], json!("baseline shm, a copy each way"), "it is compared with the same path");
    assert_eq!(auto["start"]["link"], json!("none, memory of this machine"));
    let rows = ["rows", "--rows", "1000", "--width", "4", "--batch", "64", "-n", "9", "--transport", "auto"];
    assert_eq!(report(&rows)["start"]["transport"], json!("shm"));
}

#[test]
fn the_report_names_the_commit_that_it_was_built_from() {
    let folder = env!("CARGO_MANIFEST_DIR");
    let git = Command::new("git").args(["-C", folder, "rev-parse", "HEAD"]).output();
    let head = match git {
        _ if std::env::var_os("PSERVER_GIT_REVISION").is_some() => {
            return skip("git", "somebody else names the commit");
        }
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).expect("a number"),
        _ => return skip("git", "these sources are no checkout"),
    };
    assert_eq!(report(&["doctor"])["start"]["git_revision"], json!(head.trim()));
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
    assert!(page.contains("psbench latency -s 4k,8k -n 45 --rate 500"), "the command repeats it: {page}");
    let distribution = std::fs::read_to_string(distribution).expect("the distributions were written");
    assert_eq!(distribution.matches("#[Max").count(), 4, "{distribution}");
}

#[test]
fn a_terminal_shows_progress_with_rate_and_time_left_and_a_file_gets_none() {
    // At a fixed rate, blocks take equally long on a busy machine.
    let measured = ["latency", "--bytes", "4KiB", "--rate", "500", "--duration", "4"];
    // `script` gives the program a terminal, whose width is set first.
    let line = format!("stty cols 120; exec {} {}", env!("CARGO_BIN_EXE_psbench"), measured.join(" "));
    let mut script = Command::new("script");
    let output = script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).output().expect("util-linux is there");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}");
    let parts = ["measuring ", " of 18 blocks, ", "/s, ", "s left"];
    let is_whole = |line: &str| parts.iter().all(|part| line.contains(part));
    assert!(shown.split(['\r', '\n']).any(is_whole), "{parts:?} in a line of {shown:?}");
    assert!(!shown.contains(" of 0 "), "{shown:?}");
    let output = psbench(&measured);
    assert!(output.status.success(), "{output:?}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.lines().all(|line| line.starts_with("psbench: ")) && words.lines().count() == 1, "{words}");
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

/// A stand-in for torch that prints one line of a measurement.
const TORCH: &str = r#"#!/bin/sh
echo '{"rule": "adam", "gradients": 8, "gradient_type": "bfloat16", "elements": 10007, "elements_per_second": 1.0}'
"#;

#[test]
fn kernels_and_server_steps_of_a_device_are_measured_beside_its_copies() {
    let mut vars = match standin::everything(&shipped::module()) {
        Ok(vars) => vars,
        Err(why) => return skip("g++", &why),
    };
    vars.push(("PSERVER_STANDIN_MEMORY", (1_u64 << 30).to_string()));
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let torch = folder.path().join("torch");
    std::fs::write(&torch, TORCH).expect("it can be written");
    std::fs::set_permissions(&torch, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
    let page = folder.path().join("page.md");
    let lines = folder.path().join("lines");
    let [torch, page, lines] = [&torch, &page, &lines].map(|path| path.to_str().expect("UTF-8"));
    let small = ["kernels", "--device", "cuda", "--elements", "10007", "--step-elements", "5003", "-n", "2"];
    let more = ["--rule", "sum,adam,adam-text", "--gradients", "1,8", "--goals", "--torch", torch, "--markdown", page];
    let more = [&more[..], &["--lines", lines]].concat();
    let report = report_with(&[&small[..], &more].concat(), &vars);
    let results = report["end"]["results"].as_array().expect("a list");
    let field = |name: &str, field: &str| {
        let found = results.iter().find(|result| result["name"].as_str().is_some_and(|has| has.starts_with(name)));
        found.unwrap_or_else(|| panic!("no line {name}"))[field].clone()
    };
    // Copies; two lines for each rule, number and type; torch's; goals.
    assert_eq!(results.len(), 4 + 2 * 3 * 2 * 2 + 1 + 15);
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
    // The file of JSON lines has the same results, preceded by those that were known before torch ran.
    let lines = std::fs::read_to_string(lines).expect("the lines were written");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let last = |name: &Value| lines.iter().rfind(|line| &line["name"] == name).cloned();
    assert!(results.iter().all(|result| last(&result["name"]).as_ref() == Some(result)), "{lines:?}");
    assert_eq!(lines.len(), results.len() + 1, "the kernel beside torch has two lines");
}

#[test]
fn kernels_of_a_device_are_measured_without_server_steps() {
    let vars = match standin::everything(&shipped::module()) {
        Ok(vars) => vars,
        Err(why) => return skip("g++", &why),
    };
    let small = ["kernels", "--device", "cuda", "--elements", "1000", "-n", "2", "--rule", "sgd", "--gradients", "1"];
    for (measured, lines) in [("kernel", "kernel"), ("server-step", "server step")] {
        let report = report_with(&[&small[..], &["--measure", measured]].concat(), &vars);
        let results = report["end"]["results"].as_array().expect("a list");
        let names: Vec<&str> = results.iter().skip(4).filter_map(|result| result["name"].as_str()).collect();
        assert_eq!(names, [format!("sgd, 1 float32, {lines}"), format!("sgd, 1 bfloat16, {lines}")]);
    }
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
fn steps_of_programs_are_measured_beside_their_estimates() {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs");
    let [mlp, pooled] = ["mlp", "pooled_embedding"].map(|name| programs.join(format!("{name}.program")));
    let small = ["programs", mlp.to_str().expect("UTF-8"), pooled.to_str().expect("UTF-8"), "--random", "1"];
    let report = report(&[&small[..], &["--servers", "2", "--batch", "4", "-D", "0.01", "--blocks", "1"]].concat());
    let results = report["end"]["results"].as_array().expect("the schema says so");
    assert_eq!(results.len(), 2 * 2 + 1);
    for result in results {
        let number = |name: &str| result[name].as_f64().expect("the schema says so");
        let ratio = number("latency_us_p50") / number("estimated_us") / number("estimated_ratio");
        assert!((ratio - 1.0).abs() < 1e-12, "{result}");
    }
    let random = &results[4];
    assert!(random["in_turn_estimated_us"].as_f64() > random["estimated_us"].as_f64(), "{random}");
    assert!(random["is_order_estimated"].is_boolean(), "{random}");
    refused(&["programs"], "found no program; expected files, or --random above zero");
    refused(&["programs", "nowhere.program"], "nowhere.program");
}

#[test]
fn the_ceiling_is_measured_on_every_path() {
    let ceiling = ["ceiling", "-s", "4k,300k", "-D", "0.01", "--poll", "block,adaptive", "--arrays", "64k"];
    let ceiling = [&ceiling[..], &["--link-bytes", "1MiB"]].concat();
    // Memory, links, pings; then paths, trainers, ways to wait, sizes.
    let report = check(&ceiling, 4 + 4 + 4 + 3 * 2 * 2 * 2);
    let results = report["end"]["results"].as_array().expect("the schema says so");
    for result in results.iter().filter(|one| one["trainers"].is_u64()) {
        // Results in place move no bytes, and pings do not load a link.
        let name = result["name"].as_str().expect("the schema says so");
        let moves = !name.contains("in place") && !name.contains("ping");
        assert_eq!(result["ratio_to_raw"].as_f64().is_some_and(|ratio| ratio > 0.0), moves, "{result}");
    }
}

#[test]
fn a_ceiling_has_the_chunks_and_the_streams_of_the_run_that_it_is_for() {
    let small = ["ceiling", "-s", "64k", "-D", "0.01", "--poll", "block", "--arrays", "64k", "--link-bytes", "1MiB"];
    let report = report(&[&small[..], &["--chunk", "8k", "--trainers", "1,3"]].concat());
    let results = report["end"]["results"].as_array().expect("the schema says so");
    let of = |start: &'static str, field: &'static str| {
        let named = results.iter().filter(move |one| one["name"].as_str().is_some_and(|name| name.starts_with(start)));
        named.map(move |one| one[field].as_u64().unwrap_or_else(|| panic!("no {field}: {one}"))).collect::<Vec<_>>()
    };
    assert_eq!(of("raw tcp", "streams"), [1, 1, 3, 3], "as many as trainers, one way and both");
    assert_eq!(of("raw tcp", "chunk_bytes"), [8192; 4]);
    assert_eq!(of("baseline tcp", "chunk_bytes"), [8192; 2]);
    let more = [&small[..], &["--trainers", "1", "--streams", "2"]].concat();
    let report = check(&more, 4 + 2 + 2 + 3);
    assert_eq!(report["end"]["results"][4]["streams"], json!(2));
    refused(&["ceiling", "--chunk", "0"], "--chunk 0");
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

/// A peer that is a shell script, with one trainer and rounds of 4 KiB. Returns the report and the exit status.
fn with_fake_peer(script: &str, more: &[&str]) -> (Value, Option<i32>) {
    with_fake_peer_of(script, &[&["--trainers", "1", "-s", "4k"], more].concat())
}

fn with_fake_peer_of(script: &str, work: &[&str]) -> (Value, Option<i32>) {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("peer.sh");
    std::fs::write(&path, script).expect("it can be written");
    let (program, folder) = (path.to_str().expect("UTF-8"), folder.path().to_str().expect("UTF-8"));
    let peers = ["peers", "-D", "0.1", "--json", "--program", program, "--folder", folder];
    let output = psbench(&[&peers[..], work].concat());
    let words = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"));
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    assert_eq!(schema::refusals(&schema, &report, ""), [""; 0], "{words}");
    ratios_are_explained(&report);
    (report, output.status.code())
}

/// A script that reports rounds of a millisecond each, with this number of wrong elements.
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
        // The baseline server of the same path is measured in alternation too.
        let of = |field: &str| result[field].as_f64().unwrap_or_else(|| panic!("no {field}: {result}"));
        assert_eq!(of("ratio_to_ceiling"), of("ceiling_latency_us_p50") / of("latency_us_p50"), "{result}");
        assert!(of("server_cpu_seconds_per_gigabyte") > 0.0, "{result}");
        assert!(result["peer_server_cpu_seconds_per_gigabyte"].is_null(), "it says nothing of a server: {result}");
    }
    let names: Vec<_> = results.iter().map(|one| &one["ceiling_name"]).collect();
    assert_eq!(names, [&json!("baseline tcp"), &json!("baseline shm, a copy each way")]);
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let page = folder.path().join("peers.html");
    with_fake_peer(&fake_peer(0), &["-s", "8k", "--html", page.to_str().expect("UTF-8")]);
    let page = std::fs::read_to_string(page).expect("the page was written");
    assert_eq!(page.matches("<svg").count(), 2, "rounds of one trainer by their bytes, wide and narrow");
    // Nine blocks of pserver, nine of the baseline server and nine of the peer, for each result.
    assert_eq!(report["intervals"].as_array().map(Vec::len), Some(2 * 27));
}

#[test]
fn cpu_time_of_a_peers_server_is_reported_beside_ours() {
    // A thousandth of a processor second for each round of 4 KiB there and 4 KiB back.
    let used = "\\\"server_cpu_seconds\\\":$(awk \"BEGIN{print $rounds / 1000}\"),\\\"wrong\\\":";
    let script = fake_peer(0).replace("\\\"wrong\\\":", used);
    let (report, code) = with_fake_peer(&script, &["--transport", "tcp"]);
    assert_eq!(code, Some(0), "{report}");
    let result = &report["end"]["results"][0];
    let of = |field: &str| result[field].as_f64().unwrap_or_else(|| panic!("no {field}: {result}"));
    let expected = 1e-3 / 8192.0 * 1e9;
    assert!((of("peer_server_cpu_seconds_per_gigabyte") / expected - 1.0).abs() < 1e-6, "{result}");
    let ratio = of("peer_server_cpu_seconds_per_gigabyte") / of("server_cpu_seconds_per_gigabyte");
    assert_eq!(of("peer_cpu_over_ours"), ratio, "{result}");
}

#[test]
fn between_hosts_servers_are_dedicated_or_beside_the_trainers() {
    let made = Command::new("unshare").args(["--net", "--", "true"]).output();
    if !made.is_ok_and(|ended| ended.status.success()) {
        return skip("network namespaces", "they need the rights of root");
    }
    // The script is no peer: it reports two trainers, and no value is compared.
    let script = fake_peer(0).replace("trainers\\\":1", "trainers\\\":2");
    let (report, code) = with_fake_peer_of(&script, &["--hosts", "2", "--link-rate", "1Gbit", "-s", "2MiB"]);
    assert_eq!(code, Some(0), "{report}");
    let results = report["end"]["results"].as_array().expect("the schema says so");
    // 2 MiB of two trainers there and back at 1 Gb/s, and half of that to the other one's host.
    // The peer is one whose servers may be in both places too.
    let places = [("dedicated", 33_554.432), ("colocated", 16_777.216)];
    for (result, (placement, link_us)) in results.iter().zip(places.into_iter().cycle()) {
        assert_eq!(result["placement"], json!(placement), "{result}");
        assert_eq!(result["link_latency_us"], json!(link_us), "{result}");
        // A bucket is not empty at first.
        assert!(result["ratio_to_link"].as_f64().is_some_and(|ratio| ratio < 1.2), "faster than the link: {result}");
    }
    assert_eq!(results.len(), 4, "{report}");
    for (words, expected) in [
        (["--hosts", "0"], "--hosts 0: expected 1 to 64"),
        (["--hosts", "2"], "--trainers [1]: expected multiples of --hosts"),
        (["--hosts", "65"], "--hosts 65: expected 1 to 64"),
    ] {
        refused(&[&["peers", "--trainers", "1"][..], &words].concat(), expected);
    }
}

/// A peer with one trainer, which gets its own gradient back when its server has counted once more in shared memory.
/// The server has therefore run in each round, also on a busy machine. The server yields because the system
/// counts a thread that runs without a pause only once in a tick, which is longer than all rounds here.
const PEER: &str = r#"
import mmap, os, sys
sys.path.insert(0, os.environ["PEERS"])
import numpy, rounds

COUNT = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "count")

def count():
    file = os.open(COUNT, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, mmap.PAGESIZE)
    return memoryview(mmap.mmap(file, mmap.PAGESIZE)).cast("Q")

class Trainer:
    def __init__(self, options):
        self.array = numpy.zeros(options.bytes // 4, numpy.float32)
        self.count = count()
    def gradient(self):
        return self.array
    def settle(self):
        pass
    def round(self):
        before = self.count[0]
        while self.count[0] == before:
            os.sched_yield()
    def value(self):
        return self.array

def serve(options):
    rounds.die_with_parent()
    words = count()
    while True:
        words[0] += 1
        os.sched_yield()

rounds.main("fake", "1", Trainer, {"server": serve})
"#;

#[test]
fn peers_in_python_report_the_cpu_time_of_their_servers() {
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("python").join("bin/python3");
    let has_numpy = |python: &Path| {
        let asked = Command::new(python).args(["-c", "import numpy"]).output();
        asked.is_ok_and(|output| output.status.success())
    };
    let Some(python) = [own.as_path(), Path::new("python3")].into_iter().find(|python| has_numpy(python)) else {
        return skip("numpy", "no Python has it; python3 -m venv target/python && target/python/bin/pip install numpy");
    };
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let script = folder.path().join("peer.py");
    std::fs::write(&script, PEER).expect("it can be written");
    let (python, script) = (python.display(), script.display());
    let peers = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
    let line = format!("PEERS={peers} exec {python} {script} --bytes $1 --trainers 1\n");
    let (report, code) = with_fake_peer(&line, &["--transport", "tcp"]);
    assert_eq!(code, Some(0), "{report}");
    let result = &report["end"]["results"][0];
    assert_eq!(result["peer_wrong"], json!(0), "{result}");
    assert!(result["peer_server_cpu_seconds_per_gigabyte"].as_f64().is_some_and(|used| used > 0.0), "{result}");
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
fn resident_memory_is_measured_beside_the_kept_bytes() {
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
fn results_without_a_time_are_left_out_of_a_comparison() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("doctor.json");
    std::fs::write(&path, report(&["doctor"]).to_string()).expect("it can be written");
    let path = path.to_str().expect("UTF-8");
    let output = psbench(&["compare", path, path]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("the reports have no result with a time in common"), "{words}");
}

#[test]
fn servers_of_another_job_are_measured_with_its_token() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let token = folder.path().join("token");
    std::fs::write(&token, "nobody can guess this").expect("it can be written");
    let token = token.to_str().expect("UTF-8");
    let line = ["--bind", "tcp://127.0.0.1:0", "--merge", "sum", "--token-file", token];
    let settings = Settings::of_words(line).expect("they are right");
    let server = Server::start(settings).expect("a free port");
    let address = server.address().to_string();
    let connected = ["pushpull", "-s", "4k", "-n", "9", "--connect", &address];
    let stranger = psbench(&connected);
    let words = String::from_utf8_lossy(&stranger.stderr);
    assert!(!stranger.status.success() && words.contains("this job has one"), "{words}");
    report(&[&connected[..], &["--token-file", token]].concat());
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
    refused(&["compare", &one, &two], "not compared: it has trainers 1, and then 2");
}

#[test]
fn reports_of_format_1_are_compared_and_incomparable_results_are_named() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let written = |name: &str, report: &Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, report.to_string()).expect("it can be written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let new = report(&["pushpull", "-s", "4k,8k", "-n", "9", "--alone"]);
    let mut old = new.clone();
    old["start"]["schema_version"] = json!(1);
    let results = old["end"]["results"].as_array_mut().expect("the schema says so");
    results.remove(1);
    for field in ["carried_by", "no_ratio_because", "rounds_per_second"] {
        results[0].as_object_mut().expect("a result").remove(field);
    }
    let compared = report(&["compare", &written("old", &old), &written("new", &new)]);
    let results = compared["end"]["results"].as_array().expect("the schema says so");
    let verdicts: Vec<_> = results.iter().map(|one| one["verdict"].as_str().unwrap_or_default()).collect();
    assert_eq!(verdicts, ["no difference seen", "not compared: it is in the later report only"]);
    let compared = report(&["compare", &written("new", &new), &written("old", &old)]);
    let last = &compared["end"]["results"][1];
    assert_eq!(last["verdict"], json!("not compared: it is in the earlier report only"));
    let mut other = new.clone();
    other["end"]["results"][0]["carried_by"] = json!("shm");
    let compared = report(&["compare", &written("new", &new), &written("other", &other)]);
    let last = &compared["end"]["results"][1];
    assert_eq!(last["verdict"], json!("not compared: it has carried_by \"tcp\", and then \"shm\""));
    other["start"]["schema_version"] = json!(9);
    refused(&["compare", &written("new", &new), &written("other", &other)], "schema_version 9; expected 1 to 2");
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
fn results_are_printed_as_a_table_or_as_csv() {
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
fn invalid_options_are_refused_by_name() {
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
