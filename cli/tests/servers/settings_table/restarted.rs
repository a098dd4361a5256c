//! Settings of a server 0 that is started again in the directory of its job.

use super::either::CASES;
use super::{ADAM, RATE, SERVE, Scene, copy, files, step, step_of, tensors, trainer};
use crate::cluster::job::{client, client_with, folder};
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::settings_page::Outcome::{Refused, TakesEffect};
use crate::cluster::settings_page::{Case, check};
use crate::cluster::training::begin;
use std::time::Duration;

const OWN: [Case<Scene>; 10] = [
    (&["--trainers"], TakesEffect, other_trainers),
    (&["--trainers"], Refused, trainers_that_stay),
    (&["--mode", "--staleness", "--merge", "--chunk-bytes", "--servers", "--shards", "--index"], Refused, other_job),
    (&["--index"], Refused, index_of_server_0),
    (&["--optimizer"], TakesEffect, other_rate),
    (&["--optimizer"], Refused, other_optimizer),
    (&["--lease-seconds"], TakesEffect, lease),
    (&["--model-dir"], TakesEffect, model_dir),
    (&["--coordinator"], TakesEffect, coordinator_elsewhere),
    (&["--coordinator"], Refused, other_coordinator),
];

#[test]
fn settings_in_a_restarted_directory_do_what_the_page_says() {
    check(SERVE, 0, &Scene::new(0), &[&OWN[..], &CASES[..]].concat());
}

/// The end of every refusal of a server 0 whose remedy is another directory.
const REMEDY: &str = "or another checkpoint_dir for a new job";

/// Both trainers leave, and three make the next run.
fn other_trainers(scene: &Scene) {
    let stage = scene.stage(&[]);
    let own = stage.start(&[]);
    [0, 1].map(|rank| trainer(&own.address, rank)).iter().for_each(|one| one.leave().expect("servers answer"));
    own.terminate();
    let own = stage.start_quietly(&["--trainers=3"]);
    let trainers = [0, 1, 2].map(|rank| trainer(&own.address, rank));
    assert_eq!(step_of(&trainers, 0), ([-1.0; 2], [1.0; 2]));
    assert_eq!(trainers[0].trainers().expect("servers answer"), 3);
    drop(trainers);
    stage.stop(own);
}

/// A refused start leaves the job as it was.
fn refused(scene: &Scene, table: &[(&[&str], &[&str])]) {
    let stage = scene.stage(&[]);
    table.iter().for_each(|(changes, expected)| stage.refuse(changes, expected));
    let own = stage.start_quietly(&[]);
    stage.goes_on(&own);
    stage.stop(own);
}

fn trainers_that_stay(scene: &Scene) {
    let words =
        ["trainers = 3 (from --trainers)", "has 2 trainers, and trainer 0, 1 has not left", "expected trainers = 2"];
    refused(scene, &[(&["--trainers=3"], &words)]);
}

fn other_job(scene: &Scene) {
    let index = ["index (from --index) is \"1\"", "expected an index below servers, which is 1"];
    refused(
        scene,
        &[
            (&["--mode=async"], &["mode = async (from --mode)", "mode sync, which stays", REMEDY]),
            (&["--mode=bounded", "--staleness=3"], &["mode = bounded (from --mode)", "mode sync, which stays", REMEDY]),
            (&["--staleness=3"], &["staleness (from --staleness) is \"3\"", "expected 0, or mode bounded"]),
            (&["--merge=sum"], &["merge = sum (from --merge)", "merge mean, which stays", REMEDY]),
            (&["--chunk-bytes=64KiB"], &["chunk_bytes = 64KiB (from --chunk-bytes)", "chunks of 32768 bytes", REMEDY]),
            (
                &["--servers=2"],
                &["servers = 2 (from --servers)", "initialised on 1 servers", "expected servers = 1", REMEDY],
            ),
            (&["--shards=2"], &["server 0 had 1 shards and comes back with 2", "expected --shards 1"]),
            (&["--index=1"], &index),
        ],
    );
}

/// Server 1 of a job, in a directory of its own, is started as server 0, which would begin another job.
fn index_of_server_0(_: &Scene) {
    let pair = Scene::new(1);
    let stage = pair.stage(&[]);
    let alone = folder();
    copy(&stage.folder.path().join("server-1"), &alone.path().join("server-1"));
    let before = files(alone.path());
    let text = Process::start(&pair.arguments(0, alone.path(), &["--bind=tcp://127.0.0.1:0"]));
    let text = text.err().expect("it is refused").words;
    for word in ["index (from --index) is 0", "has parameters of server 1 and no job of server 0", "expected --index 1"]
    {
        assert!(text.contains(word), "expected {word:?} in: {text}");
    }
    assert!(files(alone.path()) == before);
    let own = stage.start_quietly(&[]);
    stage.goes_on(&own);
    stage.stop(own);
}

fn other_rate(scene: &Scene) {
    let stage = scene.stage(&[]);
    let own = stage.start_quietly(&[&format!("--optimizer={RATE}")]);
    assert_eq!(step(0, &own.address), ([-1.0; 2], [0.5; 2]));
    stage.stop(own);
}

fn other_optimizer(scene: &Scene) {
    let change = format!("--optimizer={ADAM}");
    let words = ["optimizer = optimizer: Adam", "initialised with the optimizer `", "learning_rate: 1", REMEDY];
    refused(scene, &[(&[&change], &words)]);
}

/// A directory whose job no trainer has initialised: the lease of a trainer that began and ended lapses.
fn lease(scene: &Scene) {
    let fresh = scene.stage_at(folder(), &[]);
    fresh.start(&[]).terminate();
    let own = fresh.start_quietly(&["--lease-seconds=0.4"]);
    let first = client(&own.address, 0);
    assert!(first.begin_init(&Default::default()).expect("nobody else does"));
    drop(first);
    // The default lease, shortened as its holder's connection is closed, is longer than this deadline.
    let second = client_with(&own.address, 1, Duration::from_secs(2));
    begin(&second, &tensors(0)).expect("the lease has lapsed");
    drop(second);
    fresh.stop(own);
}

fn model_dir(scene: &Scene) {
    let stage = scene.stage(&[]);
    let models = folder();
    let own = stage.start_quietly(&[&format!("--model-dir={}", models.path().display())]);
    trainer(&own.address, 0).save_model("model.safetensors").expect("there is room");
    assert!(models.path().join("model.safetensors").exists());
    stage.stop(own);
}

/// Both servers of a job restart, server 0 at another port, which the settings of server 1 name.
fn coordinator_elsewhere(_: &Scene) {
    let pair = Scene::new(1);
    let port = free_port();
    let stage = pair.stage(&[&format!("--bind=tcp://127.0.0.1:{port}")]);
    let own = stage.start_quietly(&[&format!("--coordinator=tcp://127.0.0.1:{port}")]);
    stage.goes_on(&own);
    stage.stop(own);
}

fn other_coordinator(scene: &Scene) {
    let words = ["coordinator (from --coordinator) is \"tcp://127.0.0.1:9\"", "none or this server's own address"];
    refused(scene, &[(&["--coordinator=tcp://127.0.0.1:9"], &words)]);
}
