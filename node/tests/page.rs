//! The page of a job in a real browser: it shows trainers, names a stopped one, and works everywhere.

mod watching;

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pserver_core::wire::Address;
use pserver_kernels::conformance::skips::skip;
use serde_json::Value;
use watching::LIMIT;
use watching::browser::Browser;
use watching::program::TestProgram;

/// Makes a process of this test program a trainer: its rank and server 0's address.
const TRAINER: &str = "PSERVER_TEST_TRAINER";
/// The time within which the page names a stopped trainer.
const NAMED_WITHIN: Duration = Duration::from_secs(3);

#[test]
fn the_page_shows_a_job_and_names_a_stopped_trainer() {
    if let Ok(trainer) = std::env::var(TRAINER) {
        return train(&trainer);
    }
    let folder = tempfile::tempdir().expect("there is room");
    let browser = match Browser::start(folder.path().join("profile").to_str().expect("it is text")) {
        Ok(browser) => browser,
        Err(error) => return skip("chromium", &format!("Debian's package chromium-driver has chromedriver: {error}")),
    };
    let checkpoints = folder.path().join("checkpoints");
    let servers = watching::start_servers(2, 2, &[("--checkpoint-dir", checkpoints.to_str().expect("it is text"))]);
    let trainers = [0, 1].map(|rank| trainer(rank, servers[0].address()));
    browser.open(&format!("http://{}/", servers[0].http_address().expect("it serves HTTP")));
    until(
        &browser,
        "two trainers train",
        "return (document.querySelector('#trainers')?.innerText.match(/connected/g) || []).length === 2",
    );
    until(
        &browser,
        "rounds are counted",
        "return /[1-9][\\d,.]* *\\n? *rounds a second/.test(document.querySelector('#tiles').innerText)",
    );
    until(
        &browser,
        "the other server's shard serves",
        "return (document.querySelector('#servers').innerText.match(/serving/g) || []).length === 2",
    );
    names_a_stopped_trainer(&browser, &trainers[1]);
    for (id, expected) in [
        ("#memory", "optimizer state"),
        ("#memory", "gradients that are received"),
        ("#transports", "shm: the peer is on this machine"),
        ("#disk", "0.0"),
        ("#rounds", "mean"),
    ] {
        let text = browser.text(id);
        assert!(text.contains(expected), "{id}: {text}; expected {expected}");
    }
    is_whole_at_every_width_and_in_both_colours(&browser);
    keyboard_alone_opens_what_is_closed(&browser);
    assert_eq!(browser.complaints(), Vec::<Value>::new(), "the console is empty");
    drop(trainers);
    for server in servers {
        drop(server);
    }
}

#[test]
fn the_page_asks_for_the_token_and_shows_the_job_to_its_holder() {
    const ENTER: &str = "\u{e007}";
    let folder = tempfile::tempdir().expect("there is room");
    let browser = match Browser::start(folder.path().join("profile").to_str().expect("it is text")) {
        Ok(browser) => browser,
        Err(error) => return skip("chromium", &format!("Debian's package chromium-driver has chromedriver: {error}")),
    };
    let token = folder.path().join("token");
    std::fs::write(&token, "correct horse battery staple\n").expect("there is room");
    let servers = watching::start_servers(1, 1, &[("--http-token-file", token.to_str().expect("it is text"))]);
    browser.open(&format!("http://{}/", servers[0].http_address().expect("it serves HTTP")));
    let is_asked = "return !document.querySelector('#login').hidden && document.querySelector('#main').hidden \
                    && document.activeElement.id === 'token'";
    until(&browser, "the page asks", is_asked);
    let enter = |text: &str| {
        text.chars().for_each(|letter| browser.press(&letter.to_string()));
        browser.press(ENTER);
    };
    enter("wrong horse battery staple");
    until(&browser, "it refuses", "return document.querySelector('#wrong').innerText === 'This token is wrong.'");
    until(&browser, "the page asks again", is_asked);
    enter("correct horse battery staple");
    until(&browser, "the job is shown", "return document.querySelector('#servers').innerText.includes('server 0')");
    assert_eq!(browser.run("return document.querySelector('#login').hidden"), Value::Bool(true));
    // The browser itself writes that two requests were refused.
    let others = |line: &Value| !line["message"].as_str().is_some_and(|text| text.contains("401 (Unauthorized)"));
    assert_eq!(browser.complaints().into_iter().filter(others).collect::<Vec<_>>(), Vec::<Value>::new());
}

/// Stops a trainer and waits until the page names it. A machine with much else to do has three attempts.
fn names_a_stopped_trainer(browser: &Browser, trainer: &TestProgram) {
    let mut fastest = Duration::MAX;
    for _ in 0..3 {
        let stopped = Instant::now();
        trainer.signal(Signal::SIGSTOP);
        until(
            browser,
            "the trainer is named",
            "return /Trainer 1 .* is late by/.test(document.querySelector('#alert').innerText)",
        );
        fastest = fastest.min(stopped.elapsed());
        let row = browser.text("#trainers tbody tr:nth-child(2)");
        trainer.signal(Signal::SIGCONT);
        assert!(row.contains("late by"), "{row}");
        until(browser, "it is late no more", "return document.querySelector('#alert').innerText === ''");
        if fastest < NAMED_WITHIN {
            break;
        }
    }
    println!("the stopped trainer was named after {:.1} s", fastest.as_secs_f64());
    assert!(fastest < NAMED_WITHIN, "the stopped trainer was named after {fastest:?}");
}

/// No content is wider than the window, and text stands out from its ground, in light and in dark.
fn is_whole_at_every_width_and_in_both_colours(browser: &Browser) {
    let mut grounds = Vec::new();
    for (width, colours) in [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")] {
        grounds.push(browser.check_view(width, colours));
        if let Ok(folder) = std::env::var("PSERVER_TEST_PICTURES") {
            browser.picture(&format!("{folder}/watch-{width}-{colours}.png"));
        }
    }
    assert_ne!(grounds[0], grounds[1], "dark is another ground than light");
}

/// The tab key reaches every summary, with a visible mark, and the space bar opens the summary.
fn keyboard_alone_opens_what_is_closed(browser: &Browser) {
    const TABULATOR: &str = "\u{e004}";
    let summaries = browser.run("return document.querySelectorAll('summary').length").as_u64().expect("a number");
    let mut reached = 0;
    for _ in 0..20 {
        browser.press(TABULATOR);
        let at = "document.activeElement";
        if browser.run(&format!("return {at}.tagName")) != "SUMMARY" {
            continue;
        }
        reached += 1;
        let mark = browser.run(&format!("return getComputedStyle({at}).outlineStyle"));
        assert_eq!(mark, "solid", "the focus is visible");
        let is_open = format!("return {at}.parentElement.open");
        let before = browser.run(&is_open);
        browser.press(" ");
        assert_ne!(browser.run(&is_open), before, "the space bar opens and closes");
        if reached == summaries {
            return;
        }
    }
    panic!("{reached} of {summaries} summaries were reached");
}

/// Waits until a script returns true.
fn until(browser: &Browser, what: &str, script: &str) {
    let begun = Instant::now();
    while browser.run(script) != Value::Bool(true) {
        assert!(begun.elapsed() < LIMIT, "{what}: {}", browser.text("body"));
        std::thread::sleep(Duration::from_millis(50)); // tidy: allow sleep: the page updates by itself
    }
}

/// A trainer in a process of its own, which steps until it is killed.
fn trainer(rank: u32, coordinator: &Address) -> TestProgram {
    let own = std::env::current_exe().expect("it runs");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(own);
    command.args(["--exact", "the_page_shows_a_job_and_names_a_stopped_trainer"]);
    TestProgram::spawn(command.env(TRAINER, format!("{rank} {coordinator}"))).expect("it runs")
}

fn train(trainer: &str) {
    let (rank, coordinator) = trainer.split_once(' ').expect("a rank and an address");
    let coordinator = Address::parse(coordinator).expect("an address");
    let client = watching::client(&coordinator, rank.parse().expect("a number"));
    watching::initialise(&client);
    loop {
        watching::step(&client);
        std::thread::sleep(Duration::from_millis(10)); // tidy: allow sleep: a trainer computes between its steps
    }
}
