//! A real Prometheus scrapes a job, and its rates are those that the trainer counts.

#[path = "../../cli/tests/cluster/ports.rs"]
mod ports;
mod watching;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ports::free_port;
use pserver_kernels::conformance::skips::skip;
use serde_json::Value;
use watching::program::TestProgram;
use watching::{LIMIT, WatchedJob, body, get};

/// Seconds over which rounds a second are computed.
const WINDOW: f64 = 6.0;
/// Scrapes before the question: more than the window has, as a rate is lower where a series begins in its window.
const SCRAPES: f64 = 15.0;
/// Time between the beginnings of two rounds.
const PACE: Duration = Duration::from_millis(20);

#[test]
fn prometheus_computes_the_rounds_a_second_that_the_trainer_counts() {
    let job = WatchedJob::start(1, 1, &[]);
    let folder = tempfile::tempdir().expect("there is room");
    let config = folder.path().join("prometheus.yml");
    let target = job.http(0);
    let text = format!(
        "global: {{ scrape_interval: 500ms }}\nscrape_configs:\n  - job_name: pserver\n    static_configs:\n      \
         - targets: ['{target}']\n"
    );
    std::fs::write(&config, text).expect("there is room");
    let at = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let arguments = [
        format!("--config.file={}", config.display()),
        format!("--storage.tsdb.path={}", folder.path().join("data").display()),
        format!("--web.listen-address={at}"),
    ];
    let _prometheus = match TestProgram::start("prometheus", &arguments.each_ref().map(String::as_str)) {
        Ok(prometheus) => prometheus,
        Err(error) => return skip("prometheus", &format!("Debian's package prometheus has it: {error}")),
    };
    let ended = AtomicBool::new(false);
    let (found, from, to, steps) = std::thread::scope(|scope| {
        let steps = scope.spawn(|| paced_steps(&job, &ended));
        wait_until_scraped(at);
        let to = unix(SystemTime::now());
        let rate = query(at, &format!("rate(pserver_rounds_total%5B{WINDOW}s%5D)&time={to}"));
        ended.store(true, Ordering::Release);
        let steps = steps.join().expect("the trainer ends well");
        (rate.expect("it was scraped"), to - WINDOW, to, steps)
    });
    let counted = steps.iter().filter(|time| from < **time && **time <= to).count();
    #[expect(clippy::cast_precision_loss, reason = "it is small")]
    let counted = counted as f64 / WINDOW;
    println!("rounds a second: Prometheus {found:.2}, the trainer {counted:.2}");
    assert!((found / counted - 1.0).abs() <= 0.05, "Prometheus has {found}, the trainer counts {counted}");
    job.stop();
}

/// Steps of the trainer at an even pace until `ended`; the time of each end.
fn paced_steps(job: &WatchedJob, ended: &AtomicBool) -> Vec<f64> {
    let (begun, mut steps) = (Instant::now(), Vec::new());
    for number in 0_u32.. {
        assert!(begun.elapsed() < LIMIT, "Prometheus has not scraped in time");
        let next = PACE * number;
        std::thread::sleep(next.saturating_sub(begun.elapsed())); // tidy: allow sleep: the pace of the trainer
        job.step();
        steps.push(unix(SystemTime::now()));
        if ended.load(Ordering::Acquire) {
            break;
        }
    }
    steps
}

fn wait_until_scraped(at: SocketAddr) {
    let begun = Instant::now();
    while !query(at, "count_over_time(pserver_rounds_total%5B60s%5D)").is_some_and(|n| n >= SCRAPES) {
        assert!(begun.elapsed() < LIMIT, "Prometheus has not scraped in time");
        std::thread::sleep(Duration::from_millis(100)); // tidy: allow sleep: Prometheus scrapes by itself
    }
}

/// The value of a query's only series; none while there is none, or nobody listens.
fn query(at: SocketAddr, text: &str) -> Option<f64> {
    std::net::TcpStream::connect(at).ok()?;
    let answer = get(at, &format!("/api/v1/query?query={text}"));
    if !answer.starts_with("HTTP/1.1 200 ") {
        return None;
    }
    let answer: Value = serde_json::from_str(&body(&answer)).expect("it is JSON");
    answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
}

fn unix(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs_f64()
}
