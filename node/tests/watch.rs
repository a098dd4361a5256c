//! Watching a job over HTTP: series, status, readiness, the token, and readers that misbehave.

mod watching;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use pserver_kernels::conformance::skips::skip;
use pserver_node::{SERIES, SeriesKind};
use serde_json::Value;
use watching::{LIMIT, WatchedJob, body, get, request};

const SCHEMA: &str = include_str!("../status.schema.json");
const PAGE: &str = include_str!("../../docs/WATCH.md");

/// The sum of a series over its labels.
fn sum(metrics: &str, series: &str) -> f64 {
    let samples = metrics.lines().filter(|line| {
        let name = line.split([' ', '{']).next();
        name == Some(series)
    });
    samples.map(|line| line.rsplit(' ').next().and_then(|number| number.parse::<f64>().ok()).expect("a number")).sum()
}

fn status(at: SocketAddr) -> Value {
    let text = body(&get(at, "/status"));
    let status: Value = serde_json::from_str(&text).expect("the status is JSON");
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let refused = watching::schema::refusals(&schema, &status, "");
    assert!(refused.is_empty(), "{refused:#?}");
    status
}

#[test]
fn series_and_status_report_the_work_of_trainers() {
    let folder = tempfile::tempdir().expect("there is room");
    let job = WatchedJob::start(2, 2, &[("--checkpoint-dir", folder.path().to_str().expect("it is text"))]);
    let before = body(&get(job.http(0), "/metrics"));
    let types = before.lines().filter(|line| line.starts_with("# TYPE pserver_")).count();
    assert!(types >= 15, "{types} series before the first step");
    assert_eq!(sum(&before, "pserver_ready"), 1.0);
    assert_eq!(sum(&before, "pserver_rounds_total"), 0.0);
    status(job.http(0));
    job.train(30);
    let metrics: Vec<String> = (0..2).map(|server| body(&get(job.http(server), "/metrics"))).collect();
    let total = |series| metrics.iter().map(|text| sum(text, series)).sum::<f64>();
    // Two trainers, two chunks on each of two servers with one shard.
    assert_eq!(total("pserver_rounds_total"), 60.0);
    assert_eq!(total("pserver_updates_total"), 30.0 * 4.0);
    assert_eq!(total("pserver_gradients_total"), 30.0 * 4.0 * 2.0);
    assert_eq!(total("pserver_round_seconds_count"), 60.0);
    assert_eq!(total("pserver_refused_frames_total"), 0.0);
    assert_eq!(total("pserver_chunks"), 4.0);
    let bytes = 30.0 * 2.0 * f64::from(WatchedJob::BYTES);
    // The initial values came too.
    assert_eq!(total("pserver_received_bytes_total"), bytes + f64::from(WatchedJob::BYTES));
    assert!(total("pserver_sent_bytes_total") >= bytes);
    assert!(total("pserver_turn_seconds_count") > 0.0 && total("pserver_memory_bytes") > 0.0);
    let status = status(job.http(0));
    assert_eq!(status["servers"][1]["index"], 1);
    assert_eq!(status["trainers"].as_array().map(Vec::len), Some(2));
    assert_eq!(status["trainers"][1]["process"], std::process::id());
    let own = &status["servers"][0]["status"]["shards"][0];
    assert_eq!(own["counts"]["rounds"], 30);
    assert!(own["report"]["memory"].as_array().is_some_and(|lines| lines.len() >= 5), "{own}");
    let transport = own["report"]["trainers"][0]["transport"].as_str().expect("it is text");
    assert!(transport.starts_with("tcp: ") || transport.starts_with("shm: "), "{transport}");
    check_with_promtool(&metrics[0]);
    check_series(&metrics[0]);
    job.stop();
}

/// Every series is there, with its help and its type, and the page explains each.
fn check_series(metrics: &str) {
    for series in SERIES {
        let kind = format!("{:?}", series.kind).to_lowercase();
        let head = format!("# HELP {} {}\n# TYPE {} {kind}\n", series.name, series.help, series.name);
        assert!(metrics.contains(&head), "{}", series.name);
        let row = format!("| `{}` | {kind} | {} |", series.name, series.help.trim_end_matches('.'));
        assert!(PAGE.contains(&row), "docs/WATCH.md lacks the row\n{row}");
    }
    let rows = PAGE.lines().filter(|line| line.starts_with("| `pserver_")).count();
    assert_eq!(rows, SERIES.len(), "the page has a row for each series");
    assert!(SERIES.iter().any(|series| series.kind == SeriesKind::Histogram));
}

#[test]
fn the_dashboard_queries_only_existing_series() {
    let dashboard: Value = serde_json::from_str(include_str!("../../docs/grafana.json")).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("a panel has targets"));
    let mut queries: Vec<&str> = targets.map(|target| target["expr"].as_str().expect("it has a query")).collect();
    let variables = dashboard["templating"]["list"].as_array().expect("it has variables");
    queries.extend(variables.iter().map(|variable| variable["query"].as_str().expect("it has a query")));
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let words = queries.iter().flat_map(|query| query.split(|character| !is_part(character)));
    let asked: Vec<&str> = words.filter(|word| word.starts_with("pserver_")).collect();
    assert!(asked.len() >= 15, "{asked:?}");
    for name in asked {
        let is_there = |series: &&pserver_node::Series| match series.kind {
            SeriesKind::Histogram => {
                ["_bucket", "_sum", "_count"].iter().any(|end| name == format!("{}{end}", series.name))
            }
            SeriesKind::Counter | SeriesKind::Gauge => series.name == name,
        };
        assert!(SERIES.iter().find(is_there).is_some(), "the dashboard asks for {name}");
    }
}

fn check_with_promtool(metrics: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = match promtool.spawn() {
        Ok(promtool) => promtool,
        Err(error) => return skip("promtool", &format!("Debian's package prometheus has it: {error}")),
    };
    promtool.stdin.take().expect("it is piped").write_all(metrics.as_bytes()).expect("it reads");
    let output = promtool.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.trim().is_empty(), "{said}");
}

#[test]
fn server_0_shows_the_other_servers() {
    let job = WatchedJob::start(2, 1, &[]);
    job.train(3);
    let shown = job.wait_for(|status| status["servers"][1]["status"]["shards"][0]["counts"]["rounds"] == 3);
    assert_eq!(shown["servers"][1]["status"]["state"], "ready");
    let alone = status(job.http(1));
    assert_eq!(alone["servers"].as_array().map(Vec::len), Some(1), "another server knows itself alone");
    assert_eq!(alone["servers"][0]["index"], 1);
    job.stop();
}

#[test]
fn a_trainer_that_others_wait_for_is_named() {
    let job = WatchedJob::start(1, 2, &[]);
    job.train(2);
    let waiting = job.push_of_one();
    let late = |status: &Value| status["trainers"][1]["late_seconds"].as_f64().is_some_and(|late| late > 0.0);
    let shown = job.wait_for(late);
    assert_eq!(shown["trainers"][0]["late_seconds"], 0.0);
    let text = shown["trainers"][1]["late_text"].as_str().expect("it is text");
    assert!(text.contains("round 3 waits for trainer 1"), "{text}");
    job.push_of_the_other(waiting);
    job.wait_for(|status| !late(status));
    job.stop();
}

#[test]
fn readers_show_the_token_and_probes_need_none() {
    let folder = tempfile::tempdir().expect("there is room");
    let token = folder.path().join("token");
    std::fs::write(&token, "correct horse battery staple\n").expect("there is room");
    let job = WatchedJob::start(1, 1, &[("--http-token-file", token.to_str().expect("it is text"))]);
    let at = job.http(0);
    let with = |path: &str, header: &str| {
        request(at, format!("GET {path} HTTP/1.1\r\nHost: far.example\r\n{header}\r\n").as_bytes())
    };
    for path in ["/metrics", "/status"] {
        let refused = with(path, "");
        assert!(refused.starts_with("HTTP/1.1 401 ") && refused.contains("www-authenticate: Bearer"), "{refused}");
        for wrong in ["Bearer ", "Bearer correct horse battery staplf", "Basic correct horse battery staple"] {
            let refused = with(path, &format!("Authorization: {wrong}\r\n"));
            assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
        }
        let admitted = with(path, "Authorization: Bearer correct horse battery staple\r\n");
        assert!(admitted.starts_with("HTTP/1.1 200 "), "{admitted}");
    }
    for path in ["/healthz", "/readyz", "/"] {
        assert!(with(path, "").starts_with("HTTP/1.1 200 "), "{path}");
    }
    job.stop();
}

#[test]
fn requests_under_a_foreign_host_name_are_refused() {
    let job = WatchedJob::start(1, 1, &[]);
    for path in ["/metrics", "/status", "/", "/nothing"] {
        let led = request(job.http(0), format!("GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n").as_bytes());
        assert!(led.starts_with("HTTP/1.1 421 "), "{led}");
    }
    assert!(get(job.http(0), "/nothing").starts_with("HTTP/1.1 404 "));
    assert!(request(job.http(0), b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").starts_with("HTTP/1.1 405 "));
    job.stop();
}

#[test]
fn misbehaving_readers_disturb_neither_trainers_nor_other_readers() {
    let job = WatchedJob::start(1, 1, &[]);
    let at = job.http(0);
    // More connections than are served at once, which send a byte of a request and nothing more.
    let slow: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = TcpStream::connect(at).expect("the system accepts");
            stream.write_all(b"G").expect("the system has room");
            stream
        })
        .collect();
    job.train(20);
    // The slow connections are dropped, and then others are served.
    assert!(get(at, "/healthz").starts_with("HTTP/1.1 200 "));
    drop(slow);
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: x\r\n".repeat(10_000));
    let body = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\nx".to_vec();
    let garbage: Vec<u8> =
        (0..200_000_u32).map(|number| u8::try_from(number * 7919 % 251).expect("it is below")).collect();
    for bad in [long.into_bytes(), many.into_bytes(), body, garbage, b"\0\0\0\0".to_vec(), b"\r\n\r\n".to_vec()] {
        let mut stream = TcpStream::connect(at).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("it is a time");
        // The listener may close while it is written to.
        let _ = stream.write_all(&bad);
        let mut answer = Vec::new();
        let _ = stream.take(1 << 20).read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1."), "{answer}");
    }
    job.train(20);
    assert_eq!(sum(&body_of_metrics(at), "pserver_rounds_total"), 40.0);
    job.stop();
}

fn body_of_metrics(at: SocketAddr) -> String {
    // An earlier answer may be served again from the cache.
    std::thread::sleep(Duration::from_millis(250)); // tidy: allow sleep: answers are kept for 200 ms
    body(&get(at, "/metrics"))
}
