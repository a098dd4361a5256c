//! Settings of a server 1 that is started beside a running server 0.

use super::either::CASES;
use super::{ADAM, SERVE, Scene, Stage, secret, step};
use crate::cluster::job::folder;
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::settings_page::Outcome::{Refused, TakesEffect, Warned};
use crate::cluster::settings_page::{Case, check};

const OWN: [Case<Scene>; 6] = [
    (
        &[
            "--trainers",
            "--mode",
            "--staleness",
            "--merge",
            "--chunk-bytes",
            "--optimizer",
            "--lease-seconds",
            "--model-dir",
        ],
        Warned,
        warned,
    ),
    (&["--servers", "--shards"], Refused, other_job),
    (&["--index"], Refused, taken_index),
    (&["--token-file"], Refused, other_token),
    (&["--encrypt"], Refused, other_encryption),
    (&["--coordinator"], TakesEffect, coordinator),
];

#[test]
fn settings_beside_a_running_server_0_do_what_the_page_says() {
    check(SERVE, 1, &Scene::new(1), &[&OWN[..], &CASES[..]].concat());
}

/// The log has a line for each setting, with both values.
fn warned(scene: &Scene) {
    let stage = scene.stage(&["--lease-seconds=5", "--model-dir=first-models"]);
    let mut own = stage.start(&[
        "--trainers=3",
        "--mode=bounded",
        "--staleness=4",
        "--merge=sum",
        "--chunk-bytes=64KiB",
        &format!("--optimizer={ADAM}"),
        "--lease-seconds=7",
        "--model-dir=own-models",
    ]);
    let words = own.words();
    for (given, found) in [
        ("trainers = 3 (from --trainers)", "the job has 2 trainers"),
        ("mode = bounded (from --mode)", "the job's mode is sync"),
        ("staleness = 4 (from --staleness)", "the job's mode is sync"),
        ("merge = sum (from --merge)", "the job's merge is mean"),
        ("chunk_bytes = 64KiB (from --chunk-bytes)", "the job's chunks have 32768 bytes"),
        ("optimizer = optimizer: Adam", "the job's optimizer is `"),
        ("lease_seconds = 7 (from --lease-seconds)", "its lease has 5 s"),
        ("model_dir = own-models (from --model-dir)", "it saves models in first-models"),
    ] {
        let is_of_both = |line: &str| line.contains("WARN") && line.contains(given) && line.contains(found);
        assert!(words.lines().any(is_of_both), "expected {given:?} and {found:?} in: {words}");
    }
    assert!(words.contains("learning_rate: 1"), "the optimizer is named: {words}");
    stage.goes_on(&own);
    stage.stop(own);
}

/// Server 1 is refused with the changes. With its own settings the server joins, and the job goes on.
fn refused(stage: Stage<'_>, changes: &[(&[&str], &[&str])]) {
    changes.iter().for_each(|(changes, expected)| stage.refuse(changes, expected));
    let own = stage.start_quietly(&[]);
    stage.goes_on(&own);
    stage.stop(own);
}

fn other_job(scene: &Scene) {
    let servers = ["started with servers = 3", "server 0 with servers = 2", "expected --servers 2"];
    let shards = ["server 1 had 1 shards and comes back with 2", "expected --shards 1"];
    refused(scene.stage(&[]), &[(&["--servers=3"], &servers), (&["--shards=2"], &shards)]);
}

/// A third server, with the index of one that runs; and one with an index that the job does not have.
fn taken_index(scene: &Scene) {
    let stage = scene.stage(&[]);
    let own = stage.start_quietly(&[]);
    let other = folder();
    let start = |index: u16, servers: u16| {
        let bind = format!("--bind=tcp://127.0.0.1:{}", free_port());
        let (index, servers) = (format!("--index={index}"), format!("--servers={servers}"));
        let arguments = scene.arguments(1, other.path(), &[&bind, &index, &servers]);
        Process::start(&arguments).err().expect("it is refused").words
    };
    let text = start(1, 2);
    for word in ["server 1 of this job is at", "cannot take its place; give it an --index of its own"] {
        assert!(text.contains(word), "expected {word:?} in: {text}");
    }
    let text = start(2, 3);
    assert!(text.contains("started with servers = 3, and server 0 with servers = 2"), "{text}");
    stage.goes_on(&own);
    stage.stop(own);
}

fn other_token(scene: &Scene) {
    let secrets = folder();
    let token = |name: &str| format!("--token-file={}", secret(secrets.path(), name).display());
    let (own, other) = (token("own"), token("other"));
    let stage = scene.stage(&[&own]);
    stage.refuse(&[&other], &["the server has another token than this side", "expected"]);
    stage.refuse(&[], &["the client shows no token, and this job has one", "token_file"]);
    let started = stage.start_quietly(&[&own]);
    stage.stop(started);
}

fn other_encryption(scene: &Scene) {
    let secrets = folder();
    let token = format!("--token-file={}", secret(secrets.path(), "own").display());
    let stage = scene.stage(&[&token, "--encrypt=tcp"]);
    stage.refuse(&[&token], &["the client does not speak TLS, and this server has encrypt = tcp"]);
    let started = stage.start_quietly(&[&token, "--encrypt=required"]);
    stage.stop(started);
    let stage = scene.stage(&[&token]);
    stage.refuse(&[&token, "--encrypt=tcp"], &["does not speak TLS; expected one with --encrypt tcp or required"]);
}

fn coordinator(scene: &Scene) {
    let stage = scene.stage(&[]);
    let own = stage.start_quietly(&[&format!("--coordinator=tcp://localhost:{}", scene.ports[0])]);
    assert_eq!(step(1, &stage.coordinator(&own)), ([-1.0; 2], [1.0; 2]));
    stage.stop(own);
}
