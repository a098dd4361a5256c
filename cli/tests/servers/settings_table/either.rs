//! Settings of a server that take effect in a restarted directory and beside a running server 0 alike.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;

use super::{Scene, Stage, files, read, secret, step, step_of, tensors, trainer, values};
use crate::certificates::{Authority, by_certificate};
use crate::cluster::job::{DEADLINE, client, client_with, folder};
use crate::cluster::ports::free_port;
use crate::cluster::process::Process;
use crate::cluster::settings_page::Case;
use crate::cluster::settings_page::Outcome::TakesEffect;
use crate::cluster::training::{begin, given, pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::checkpoint::owner::server_directory;
use pserver_core::checkpoint::storage::{Directory, LockOutcome};
use pserver_core::wire::Address;
use pserver_transport::network::JobToken;
use std::time::Duration;

/// How long a call may take that must fail.
const SOON: Duration = Duration::from_millis(1500);

/// The cases of both columns.
pub(super) const CASES: [Case<Scene>; 13] = [
    (
        &["--bind", "--advertise", "--checks", "--poll", "--threads", "--rdma-device", "--rdma-fabric"],
        TakesEffect,
        addresses,
    ),
    (&["--http", "--http-token-file", "--log-level", "--log-format"], TakesEffect, watched),
    (&["--ready-fd"], TakesEffect, ready_descriptor),
    (&["--token-file"], TakesEffect, token),
    (&["--encrypt", "--certificate", "--private-key", "--certificate-authority"], TakesEffect, encrypted),
    (&["--insecure"], TakesEffect, insecure),
    (&["--nonfinite"], TakesEffect, nonfinite),
    (&["--device", "--device-memory", "--device-gradients", "--device-least", "--device-cache"], TakesEffect, device),
    (&["--checkpoint-interval-seconds", "--journal"], TakesEffect, journal),
    (&["--accept-torn-tail"], TakesEffect, torn_tail),
    (&["--checkpoint-dir"], TakesEffect, checkpoint_dir),
    (&["--directory-lock"], TakesEffect, directory_lock),
    (&["--round-timeout-seconds", "--rank-grace-seconds"], TakesEffect, times),
];

/// Another port, under another name. Settings without a visible effect at least start without a warning, and give the
/// same values.
fn addresses(scene: &Scene) {
    let stage = scene.stage(&[]);
    let port = free_port();
    let (bind, advertise) = (format!("--bind=tcp://127.0.0.1:{port}"), format!("--advertise=tcp://localhost:{port}"));
    let own = stage.start_quietly(&[&bind, &advertise, "--checks=always", "--poll=block", "--rdma-device=none"]);
    assert_eq!(own.address.to_string(), format!("tcp://localhost:{port}"));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
    stage.goes_on(&own);
    stage.stop(own);
    // Only where a connection may go over verbs.
    let stage = scene.stage(&[]);
    let bind = format!("--bind=127.0.0.1:{}", free_port());
    let own = stage.start_quietly(&[&bind, "--threads=2", "--rdma-fabric=timeout=20,pkey=0x8001"]);
    stage.goes_on(&own);
    stage.stop(own);
}

fn watched(scene: &Scene) {
    let stage = scene.stage(&[]);
    let secrets = folder();
    let token = secret(secrets.path(), "http");
    let http = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let (at, token) = (format!("--http={http}"), format!("--http-token-file={}", token.display()));
    let mut own = stage.start_quietly(&[&at, &token, "--log-level=info", "--log-format=json"]);
    let status = |header: &str| {
        let mut stream = TcpStream::connect(http).expect("it listens");
        write!(stream, "GET /status HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n{header}\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer
    };
    assert!(status("").starts_with("HTTP/1.1 401"), "{}", status(""));
    let answer = status("Authorization: Bearer correct horse battery staple of http\r\n");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"trainers_expected\":2"), "{answer}");
    stage.goes_on(&own);
    let words = own.words();
    let levels: Vec<_> =
        words.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect(line)).collect();
    assert!(levels.iter().any(|line| line["level"] == "INFO"), "{words}");
    stage.stop(own);
}

fn ready_descriptor(scene: &Scene) {
    let stage = scene.stage(&[]);
    let line = stage.folder.path().join("ready-line");
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$0" serve "$@" 3>"$READY""#, env!("CARGO_BIN_EXE_pserver")]);
    command.args(scene.arguments(scene.tested, stage.folder.path(), &["--ready-fd=3"])).env("READY", &line);
    let own = Process::run(&mut command).expect("it starts");
    stage.goes_on(&own);
    let ready = format!("ready {}\n", own.address);
    let _folder = stage.stop(own);
    assert_eq!(std::fs::read_to_string(line).expect("it was written"), ready);
}

fn with_token(coordinator: &Address, rank: u32, token: Option<&Path>) -> Client {
    let token = token.map(|path| JobToken::read(path).expect("it is a token"));
    let options = ClientOptions::new(coordinator.clone());
    Client::new(ClientOptions { trainer: Some(rank), deadline: DEADLINE, token, ..options }).expect("it is made")
}

/// Every server of a job is given the new token; a client without it is refused.
fn token(scene: &Scene) {
    let secrets = folder();
    let path = secret(secrets.path(), "token");
    let change = format!("--token-file={}", path.display());
    let stage = scene.stage(&[&change]);
    let own = stage.start_quietly(&[&change]);
    let coordinator = stage.coordinator(&own);
    let refused = with_token(&coordinator, 0, None).names().expect_err("it has no token").to_string();
    assert!(refused.contains("the client shows no token, and this job has one"), "{refused}");
    let trainers = [0, 1].map(|rank| with_token(&coordinator, rank, Some(&path)));
    for trainer in &trainers {
        begin(trainer, &[]).expect("it has the token");
        trainer.resume_rounds().expect("servers answer");
    }
    assert_eq!(step_of(&trainers, scene.tested), ([-1.0; 2], [1.0; 2]));
    drop(trainers);
    stage.stop(own);
}

/// Every server of a job shows its certificate, and a client needs one.
fn encrypted(scene: &Scene) {
    let secrets = folder();
    let authority = Authority::new(secrets.path());
    let [certificate, key] = authority.certify("127.0.0.1");
    let changes = [
        "--encrypt=tcp".to_owned(),
        format!("--certificate={certificate}"),
        format!("--private-key={key}"),
        format!("--certificate-authority={}", authority.file()),
    ];
    let changes = changes.each_ref().map(String::as_str);
    let stage = scene.stage(&changes);
    let own = stage.start_quietly(&changes);
    let coordinator = stage.coordinator(&own);
    let refused = client(&coordinator, 0).names().expect_err("it is plain").to_string();
    assert!(refused.contains("the client does not speak TLS, and this server has encrypt = tcp"), "{refused}");
    let certified = authority.certify("trainer");
    let trainers = [0, 1].map(|rank| {
        let encryption = by_certificate(&authority, &certified);
        let options = ClientOptions::new(coordinator.clone());
        Client::new(ClientOptions { trainer: Some(rank), deadline: DEADLINE, encryption, ..options })
            .expect("it is made")
    });
    for trainer in &trainers {
        begin(trainer, &[]).expect("it has a certificate");
        trainer.resume_rounds().expect("servers answer");
    }
    assert_eq!(step_of(&trainers, scene.tested), ([-1.0; 2], [1.0; 2]));
    drop(trainers);
    stage.stop(own);
}

/// Without it a server on loopback has a socket from which clients of its user get a token.
fn insecure(scene: &Scene) {
    let has_socket = |own: &Process| {
        let sockets = std::fs::read_to_string("/proc/net/unix").expect("the system lists sockets");
        let at = format!("@pserver-token-127.0.0.1-{}", own.address.port);
        sockets.lines().any(|line| line.ends_with(&at))
    };
    let stage = scene.stage(&[]);
    let own = stage.start_quietly(&[]);
    assert!(has_socket(&own));
    own.terminate();
    let own = stage.start_quietly(&["--insecure=true"]);
    assert!(!has_socket(&own));
    stage.goes_on(&own);
    stage.stop(own);
}

/// Parameters of the tested server skip a gradient of NaN; before, it was refused.
fn nonfinite(scene: &Scene) {
    let own_tensor = &tensors(scene.tested)[1..];
    let nan = [own_tensor[0].constant(f32::NAN)];
    for (changes, is_taken) in [(&[][..], false), (&["--nonfinite=skip"][..], true)] {
        let stage = scene.stage(&[]);
        let own = stage.start_quietly(changes);
        let trainers = [0, 1].map(|rank| trainer(&stage.coordinator(&own), rank));
        for trainer in &trainers {
            assert_eq!(trainer.push(&given(own_tensor, &nan), None).is_ok(), is_taken, "{changes:?}");
        }
        if is_taken {
            assert_eq!(values(&trainers[0], scene.tested), [-1.0; 2]);
        }
        drop(trainers);
        stage.stop(own);
    }
}

/// The simulated device stands for a card; sizes are read, and a size that cannot be is refused.
fn device(scene: &Scene) {
    let stage = scene.stage(&[]);
    let gradients = ["--device=simulated", "--device-gradients=1"];
    stage.refuse(&gradients, &["device_gradients (from --device-gradients) is \"1\"", "expected ", " bytes or more"]);
    let sizes = ["--device-memory=1GiB", "--device-gradients=64MiB", "--device-least=4KiB", "--device-cache="];
    let mut own = stage.start_quietly(&[&["--device=simulated", "--log-level=info"], &sizes[..]].concat());
    let words = own.words();
    assert!(words.contains("device: simulated"), "{words}");
    stage.goes_on(&own);
    stage.stop(own);
}

/// Without a journal a killed server restarts from its last checkpoint, which is recent if the interval is short.
fn journal(scene: &Scene) {
    let lost = |changes: &[&str], is_kept: bool| {
        let stage = scene.stage(&[]);
        let own = stage.start_quietly(changes);
        stage.goes_on(&own);
        if changes.contains(&"--checkpoint-interval-seconds=0.1") {
            // The second one from now on began after the step.
            wait_for_checkpoint(&stage);
            wait_for_checkpoint(&stage);
        }
        own.kill();
        let own = stage.start(&[]);
        let expected = if is_kept { -2.0 } else { -1.0 };
        assert_eq!(read(scene.tested, &stage.coordinator(&own))[1], expected, "{changes:?}");
        stage.stop(own);
    };
    lost(&[], true);
    lost(&["--journal=off"], false);
    lost(&["--journal=off", "--checkpoint-interval-seconds=0.1"], true);
}

/// Waits for another checkpoint of the tested server; its manifest is the last file.
fn wait_for_checkpoint(stage: &Stage<'_>) {
    let shard = stage.folder.path().join(format!("server-{}/shard-0", stage.scene.tested));
    let newest = || {
        let names = std::fs::read_dir(&shard).expect("it is there").map(|entry| entry.expect("a name").file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".json")).max()
    };
    let last = newest();
    let mut tries = 0..6000;
    while newest() == last {
        assert!(tries.next().is_some(), "no checkpoint after {last:?}");
        // tidy: allow sleep: checkpoints are taken by the clock
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn torn_tail(scene: &Scene) {
    let stage = scene.stage(&[]);
    let own = stage.start(&[]);
    for _ in 0..3 {
        step(scene.tested, &stage.coordinator(&own));
    }
    own.kill();
    let journal = format!("server-{}/shard-0/journal", scene.tested);
    let found = files(stage.folder.path()).into_iter().filter(|(path, _)| path.to_string_lossy().starts_with(&journal));
    let (path, mut bytes) = found.max_by_key(|(_, bytes)| bytes.len()).expect("it has a journal");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(stage.folder.path().join(path), bytes).expect("there is room");
    let shard = format!("server-{}/shard-0", scene.tested);
    let of_shard = || {
        let all = files(stage.folder.path()).into_iter();
        all.filter(|(path, _)| path.starts_with(&shard)).collect::<Vec<_>>()
    };
    let before = of_shard();
    let refused = stage.try_start(&[]).err().expect("the journal is damaged").words;
    for word in ["is damaged at offset", "start with --accept-torn-tail to continue without"] {
        assert!(refused.contains(word), "expected {word:?} in: {refused}");
    }
    assert!(of_shard() == before, "a refused start changes nothing of the shard");
    let mut own = stage.start(&["--accept-torn-tail=true"]);
    assert!(own.words().contains("WARN"), "what is dropped is said");
    let value = read(scene.tested, &stage.coordinator(&own))[1];
    assert!((-4.0..-1.0).contains(&value), "{value} is a value before the damage");
    stage.stop(own);
}

/// Another folder is that of another job, and the first stays as it was.
fn checkpoint_dir(scene: &Scene) {
    let other = folder();
    let before = files(scene.kept.path());
    let fresh = scene.stage_at(folder(), &[]);
    let change = format!("--checkpoint-dir={}", other.path().display());
    let own = fresh.start_quietly(&[&change]);
    let coordinator = fresh.coordinator(&own);
    assert!(begin(&client(&coordinator, 0), &tensors(scene.tested)).expect("nobody else does"), "the job is new");
    assert_eq!(step(scene.tested, &coordinator), ([0.0; 2], [1.0; 2]));
    let folder = fresh.stop(own);
    let server = server_directory(scene.tested);
    assert!(other.path().join(&server).exists() && !folder.path().join(server).exists());
    assert!(files(scene.kept.path()) == before);
}

fn directory_lock(scene: &Scene) {
    let is_locked = |stage: &Stage<'_>| {
        let directory = Directory::open(stage.folder.path()).expect("it is there");
        let locked = directory.lock(&server_directory(scene.tested), b"a test").expect("it can be asked");
        matches!(locked, LockOutcome::ByAnother { .. })
    };
    let stage = scene.stage(&[]);
    let own = stage.start_quietly(&[]);
    assert!(is_locked(&stage));
    own.terminate();
    let own = stage.start_quietly(&["--directory-lock=false"]);
    assert!(!is_locked(&stage));
    stage.goes_on(&own);
    stage.stop(own);
}

/// A round of the tested server waits for a silent trainer, and for a lost one, as long as its settings say.
fn times(scene: &Scene) {
    let own_tensor = &tensors(scene.tested)[1..];
    let one = [own_tensor[0].constant(1.0)];
    let waits = |changes: &[&str], is_lost: bool| {
        let stage = scene.stage(&[]);
        let own = stage.start_quietly(changes);
        let coordinator = stage.coordinator(&own);
        let first = client_with(&coordinator, 0, SOON);
        begin(&first, &[]).expect("servers answer");
        first.resume_rounds().expect("servers answer");
        let second = trainer(&coordinator, 1);
        if is_lost {
            drop(second);
        }
        first.push(&given(own_tensor, &one), None).expect("it is taken");
        let text = pull(&first, own_tensor).expect_err("the round waits").to_string();
        assert!(text.contains("trainer 1"), "{changes:?}: {text}");
        stage.stop(own);
        text
    };
    let text = waits(&["--round-timeout-seconds=0.3"], false);
    assert!(text.contains("was not reached within 0.3 s (--round-timeout-seconds"), "{text}");
    for (changes, is_kept) in [(&[][..], false), (&["--rank-grace-seconds=600"][..], true)] {
        let text = waits(changes, true);
        assert_eq!(text.contains("no answer within 1.5 s"), is_kept, "{changes:?}: {text}");
    }
}
