//! Start and stop of servers and trainers, and failures between: each failure is named.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cluster::job::{Job, Local, client, client_with, folder, reader};
use crate::cluster::ports::free_port;
use crate::cluster::process::{Ended, Process, Processes};
use crate::cluster::training::{Tensor, begin, declare, given, initialise, pull, push, push_pull};
use nix::sys::signal::{Signal, kill};
use pserver_client::Client;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{Float32, Float64};
use pserver_core::wire::Address;
use pserver_kernels::conformance::skips::skip;
use pserver_kernels::conformance::standin;
use pserver_kernels::cuda::shipped;

const SGD: &str = "const_lr { learning_rate: 1.0 }";

/// A short deadline for calls that must fail.
const SOON: Duration = Duration::from_secs(2);

fn tensors() -> Vec<Tensor> {
    vec![Tensor::new("weights", Float32, 10_000, SGD), Tensor::new("wide", Float64, 5001, SGD)]
}

fn zeroed(tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.into_iter().map(Tensor::zeroed).collect()
}

/// Checks that every element is `count`.
fn check_count(client: &Client, tensors: &[Tensor], count: u64) {
    assert!(count < 1 << 24, "above it an f32 does not count by one");
    #[expect(clippy::cast_precision_loss, reason = "it was just looked at")]
    let count = count as f32;
    for (tensor, value) in tensors.iter().zip(pull(client, tensors).expect("the tensors are there")) {
        let differs = value.iter().zip(tensor.constant(count)).position(|(found, expected)| *found != expected);
        assert_eq!(differs, None, "\"{}\": the first byte that is not that of {count}", tensor.name);
    }
}

fn push_one(client: &Client, tensors: &[Tensor]) -> Result<(), pserver_core::error::Failure> {
    let ones: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.constant(-1.0)).collect();
    client.push(&given(tensors, &ones), None)
}

/// Checks that something failed, and that the text has every one of the words.
fn check_text(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "expected \"{word}\" in: {text}");
    }
}

#[test]
fn sigterm_drains_and_a_restart_resumes() {
    let folder = folder();
    let job = Job { mode: "async", ..Job::new(2, 2) }.with_checkpoints(folder.path());
    let mut processes = Processes::start(job);
    let coordinator = processes.coordinator();
    let tensors = zeroed(tensors());
    let (stop, pushed) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for trainer in 0..2 {
            let (coordinator, tensors, stop, pushed) = (&coordinator, &tensors, &stop, &pushed);
            scope.spawn(move || {
                let client = client(coordinator, trainer);
                begin(&client, tensors).expect("the tensors are initialised");
                while !stop.load(Ordering::Acquire) {
                    push_one(&client, tensors).expect("a gradient is taken, by the old server or the new one");
                    pushed.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        reader(&coordinator).names().expect("the tensors are initialised");
        for server in [1, 0, 1, 0] {
            let before = pushed.load(Ordering::SeqCst);
            let begun = Instant::now();
            while pushed.load(Ordering::SeqCst) < before + 5 {
                assert!(begun.elapsed() < Duration::from_secs(60), "training goes on");
                std::thread::yield_now();
            }
            let ended = processes.running[server].take().expect("it runs").terminate();
            assert!(ended.status.success(), "{ended:?}");
            processes.start_again(server);
        }
        stop.store(true, Ordering::Release);
    });
    check_count(&reader(&coordinator), &tensors, pushed.into_inner());
    processes.terminate();
}

#[test]
fn a_closed_terminal_ends_a_server_in_order_unless_it_ignores_that() {
    let folder = folder();
    let job = Job::new(1, 1).with_checkpoints(folder.path());
    let bind = format!("tcp://127.0.0.1:{}", free_port());
    let arguments = job.arguments(0, &bind, None);
    let tensors = zeroed(tensors());
    // The tests may themselves run under `nohup`.
    let server = start_through_a_shell("exec env --default-signal=HUP \"$@\"", &arguments).expect("it starts");
    begin(&client(&server.address, 0), &tensors).expect("the tensors are initialised");
    kill(server.id(), Signal::SIGHUP).expect("the process is there");
    let ended = server.wait();
    assert!(ended.status.success(), "{ended:?}");
    let server = start_through_a_shell("trap '' HUP; exec \"$@\"", &arguments).expect("it starts");
    kill(server.id(), Signal::SIGHUP).expect("the process is there");
    reader(&server.address).names().expect("it goes on");
    assert!(server.terminate().status.success());
}

fn refused(arguments: &[String]) -> Ended {
    match Process::start(arguments) {
        Ok(process) => panic!("a server runs at {} and should not", process.address),
        Err(ended) => ended,
    }
}

#[test]
fn a_server_that_cannot_start_says_why_and_exits() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let taken = format!("tcp://{}", listener.local_addr().expect("it is bound"));
    let folder = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "in the way").expect("the folder takes a file");
    let job = Job::new(1, 1);
    let free = "tcp://127.0.0.1:0";
    let below_a_file = job.clone().with_checkpoints(&file.join("checkpoints"));
    let cases = [
        (job.arguments(0, &taken, None), vec![taken.as_str(), "in use"]),
        (below_a_file.arguments(0, free, None), vec!["file/checkpoints"]),
        (job.clone().with("--journal", "on").arguments(0, free, None), vec!["journal", "checkpoint_dir"]),
        (
            job.clone().with("--rdma-device", "none").arguments(0, "verbs://127.0.0.1:0", None),
            vec!["listening on verbs://127.0.0.1:0: verbs are switched off"],
        ),
        (job.clone().with("--optimizer", "optimizer: Adam").arguments(0, free, None), vec!["optimizer", "adam"]),
    ];
    for (arguments, words) in cases {
        let ended = refused(&arguments);
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        check_text(&ended.words, &words);
    }
}

#[test]
fn a_server_with_another_number_of_shards_is_refused() {
    for server in [0, 1] {
        let folder = folder();
        let mut processes = Processes::start(Job::new(2, 1).with_checkpoints(folder.path()));
        begin(&client(&processes.coordinator(), 0), &tensors()).expect("the tensors are initialised");
        processes.kill(server);
        let mut arguments = processes.arguments(server);
        let place = arguments.iter().position(|one| one == "--shards").expect("the shards are given");
        arguments[place + 1] = "3".to_owned();
        let ended = refused(&arguments);
        check_text(&ended.words, &[&format!("server {server} had 1 shards"), "with 3"]);
        processes.start_again(server);
        processes.terminate();
    }
}

/// A job of another size than the one on disk.
#[test]
fn another_number_of_servers_is_refused() {
    let folder = folder();
    let job = Job::new(1, 1).with_checkpoints(folder.path());
    let servers = Local::start(&job);
    begin(&client(&servers.coordinator(), 0), &tensors()).expect("the tensors are initialised");
    servers.stop();
    let ended = refused(&Job { servers: 2, ..job }.arguments(0, "tcp://127.0.0.1:0", None));
    check_text(&ended.words, &["servers = 2 (from --servers)", "on 1 servers", "expected servers = 1"]);
}

/// A shell's words before the server's: no file may grow beyond so many blocks of 512 bytes.
const SMALL_FILES: &str = "trap '' XFSZ; ulimit -f 512; exec \"$@\"";

/// On the stand-in driver: 25 chunks of Adam, three MiB with their states, on a device with a limit of two.
#[test]
fn parameters_beyond_device_memory_are_refused_or_stay_on_the_cpu() {
    if !standin::is_inside() {
        return match standin::driver_with(&shipped::module()) {
            Ok(vars) => standin::run_again(&vars.iter().map(|(name, text)| (*name, text.as_str())).collect::<Vec<_>>()),
            Err(why) => skip("g++", &why),
        };
    }
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
    let tensors = [Tensor::new("small", Float32, 10_000, adam), Tensor::new("large", Float32, 200_000, adam)];
    let serve = |device: &str, memory: &str| {
        let job = Job::new(1, 1).with("--device", device).with("--device-least", "1KiB");
        let servers = Local::start(&job.with("--device-memory", memory));
        let client = client(&servers.coordinator(), 0);
        assert!(client.begin_init(&OptimizerSettings::default()).expect("nobody else asks"));
        (servers, client)
    };
    let (servers, client) = serve("cuda:0", "2MiB");
    let refused = initialise(&client, &tensors).expect_err("there is less").to_string();
    check_text(
        &refused,
        &["cuda:0", "2520000 bytes were asked for", "2097152 were free", "\"large\"", "of 25 chunks found no room"],
    );
    drop(client);
    servers.stop();
    // On this driver every device is slower than the processor, which `auto` finds.
    for (device, memory) in [("cuda:0", "3MiB"), ("auto", "3MiB")] {
        let (servers, client) = serve(device, memory);
        initialise(&client, &tensors).expect("all of it is somewhere");
        push_pull(&client, &tensors, 0, 1).expect("wherever it is, it is updated");
        drop(client);
        servers.stop();
    }
}

fn start_through_a_shell(script: &str, arguments: &[String]) -> Result<Process, Ended> {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_pserver"), "serve"]).args(arguments);
    Process::run(&mut command)
}

#[test]
fn training_goes_on_when_files_cannot_grow() {
    let folder = folder();
    let job = Job { mode: "async", ..Job::new(1, 1) }.with_checkpoints(folder.path()).with("--journal", "on");
    let job = job.with("--checkpoint-interval-seconds", 1);
    // A checkpoint of these does not fit into a file of 256 KiB, and a few pushes fill a segment of the journal.
    let tensors = zeroed(vec![Tensor::new("a", Float32, 8000, SGD), Tensor::new("b", Float32, 70_000, SGD)]);
    let bind = format!("tcp://127.0.0.1:{}", free_port());
    let arguments = job.arguments(0, &bind, None);
    let mut process = start_through_a_shell(SMALL_FILES, &arguments).expect("a server with small files starts");
    let client = client(&process.address, 0);
    begin(&client, &tensors).expect("the tensors are initialised");
    for _ in 0..30 {
        push_one(&client, &tensors).expect("a gradient is taken");
    }
    check_count(&client, &tensors, 30);
    check_text(&process.words(), &["checkpoint 1", "large"]);
    process.kill();
    let process = Process::start(&arguments).expect("what is on disk is whole");
    push_one(&client, &tensors).expect("a gradient is taken");
    check_count(&client, &tensors, 31);
    assert!(process.terminate().status.success());
}

/// A small disk, unmounted when this is dropped.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=18m", "tmpfs"]).arg(path).stderr(std::process::Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(Self(path))
    }

    /// Fills it with a file, which is returned.
    fn fill(&self) -> PathBuf {
        let other = self.0.join("other");
        let filled = std::io::copy(&mut std::io::repeat(1), &mut File::create(&other).expect("there is room"));
        assert!(filled.is_err(), "the disk is full");
        other
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        // A failed unmount does not change the test's result.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_push_that_a_full_disk_cannot_keep_is_refused_and_not_applied() {
    let folder = folder();
    let Some(disk) = SmallDisk::mount(folder.path()) else {
        return skip("full-disk", "a tmpfs cannot be mounted here, which takes root");
    };
    let job = Job { mode: "async", chunk_bytes: 1024 * 1024, ..Job::new(1, 1) };
    let job = job.with_checkpoints(folder.path()).with("--journal", "on");
    let process = Process::start(&job.arguments(0, "tcp://127.0.0.1:0", None)).expect("a server starts");
    let tensors = zeroed(vec![Tensor::new("weights", Float32, 50_000, SGD)]);
    let client = client_with(&process.address, 0, SOON);
    begin(&client, &tensors).expect("the tensors are initialised");
    push_one(&client, &tensors).expect("there is room");
    let other = disk.fill();
    let refusal = push_one(&client, &tensors).expect_err("the disk has no room for it").to_string();
    check_text(&refusal, &["weights", "journal", "bytes of the disk are free", &process.address.to_string()]);
    check_count(&client, &tensors, 1);
    std::fs::remove_file(&other).expect("it is there");
    push_one(&client, &tensors).expect("there is room again");
    check_count(&client, &tensors, 2);
}

#[test]
fn parameters_that_the_disk_cannot_take_are_refused_at_once() {
    let folder = folder();
    let Some(disk) = SmallDisk::mount(folder.path()) else {
        return skip("full-disk", "a tmpfs cannot be mounted here, which takes root");
    };
    let job = Job::new(1, 1).with_checkpoints(folder.path());
    let process = Process::start(&job.arguments(0, "tcp://127.0.0.1:0", None)).expect("a server starts");
    let client = client_with(&process.address, 0, SOON);
    assert!(client.begin_init(&OptimizerSettings::default()).expect("server 0 answers"));
    declare(&client, &Tensor::new("first", Float32, 10, SGD)).expect("there is room");
    disk.fill();
    let refusal = declare(&client, &Tensor::new("weights", Float32, 200_000, SGD)).expect_err("it is full").to_string();
    check_text(&refusal, &["weights", "before the parameters are initialised: expected a larger disk"]);
}

#[test]
fn a_silent_server_is_named_when_the_deadline_passes() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let address = format!("tcp://{}", silent.local_addr().expect("it is bound"));
    let client = client_with(&Address::parse(&address).expect("it is an address"), 0, SOON);
    let refusal = client.begin_init(&OptimizerSettings::default()).expect_err("nobody answers").to_string();
    check_text(&refusal, &["2.0 s", &address]);
    let closed = free_port();
    let address = Address::parse(&format!("tcp://127.0.0.1:{closed}")).expect("it is an address");
    let refusal = client_with(&address, 0, SOON).names().expect_err("nobody is there").to_string();
    check_text(&refusal, &["2.0 s", &address.to_string(), "refused"]);
}

fn start_trainers(servers: &Local, tensors: &[Tensor], deadline: Duration) -> Vec<Client> {
    let clients: Vec<Client> = (0..3).map(|trainer| client_with(&servers.coordinator(), trainer, deadline)).collect();
    for client in &clients {
        begin(client, tensors).expect("the tensors are initialised");
    }
    clients
}

/// Runs one call of each client at once.
fn together<T: Send>(clients: &[Client], call: impl Fn(u32, &Client) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let call = &call;
        let start = |(trainer, client)| scope.spawn(move || call(trainer, client));
        let threads: Vec<_> = (0..).zip(clients).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a call does not panic")).collect()
    })
}

#[test]
fn rounds_do_not_wait_for_a_departed_trainer() {
    let servers = Local::start(&Job::new(2, 3));
    let tensors = tensors();
    let clients = start_trainers(&servers, &tensors, Duration::from_secs(60));
    for done in together(&clients, |trainer, client| push_pull(client, &tensors, trainer, 1)) {
        done.expect("the first round is closed");
    }
    // The others are in the middle of a round when the last one leaves.
    let done = together(&clients, |trainer, client| match trainer {
        2 => client.leave(),
        _ => (2..5).try_for_each(|round| push_pull(client, &tensors, trainer, round)),
    });
    done.into_iter().for_each(|one| one.expect("the rounds are closed"));
    servers.stop();
}

/// One trainer of three is lost, and the calls of the trainers that wait for it name it.
#[test]
fn a_lost_trainer_is_named_and_its_successor_goes_on() {
    let servers = Local::start(&Job::new(2, 3).with("--round-timeout-seconds", 1));
    let tensors = tensors();
    let mut clients = start_trainers(&servers, &tensors, Duration::from_secs(60));
    for done in together(&clients, |trainer, client| push_pull(client, &tensors, trainer, 1)) {
        done.expect("the first round is closed");
    }
    // Its connections break, as they do when a process is killed.
    drop(clients.pop());
    for refusal in together(&clients, |trainer, client| push_pull(client, &tensors, trainer, 2)) {
        let refusal = refusal.expect_err("the round cannot be closed").to_string();
        check_text(&refusal, &["waits for trainer 2", "within 1.0 s", "round 2"]);
    }
    clients.push(client(&servers.coordinator(), 2));
    assert!(!begin(&clients[2], &tensors).expect("the tensors are there"));
    for round in 2..5 {
        for done in together(&clients, |trainer, client| push_pull(client, &tensors, trainer, round)) {
            done.unwrap_or_else(|failure| panic!("round {round}: {failure}"));
        }
    }
    servers.stop();
}

/// Trainers that only push: the second push is one round ahead, waits, and names the lost trainer.
#[test]
fn a_lost_trainer_is_named_to_trainers_that_only_push() {
    let servers = Local::start(&Job::new(1, 3).with("--round-timeout-seconds", 1));
    let tensors = tensors();
    let mut clients = start_trainers(&servers, &tensors, Duration::from_secs(20));
    drop(clients.pop());
    let refusals = together(&clients, |trainer, client| {
        push(client, &tensors, trainer, 1).expect("the first round takes a gradient");
        push(client, &tensors, trainer, 2)
    });
    for refusal in refusals {
        let refusal = refusal.expect_err("the first round cannot be closed").to_string();
        check_text(&refusal, &["waits for trainer 2", "within 1.0 s", "round 1"]);
    }
    clients.push(client(&servers.coordinator(), 2));
    assert!(!begin(&clients[2], &tensors).expect("the tensors are there"));
    let done = together(&clients, |trainer, client| {
        let first = if trainer == 2 { 1 } else { 2 };
        (first..4).try_for_each(|round| push(client, &tensors, trainer, round))
    });
    done.into_iter().for_each(|one| one.expect("the rounds are closed"));
    servers.stop();
}

#[test]
fn a_model_is_saved_inside_its_folder_and_nowhere_else() {
    let (models, outside) = (folder(), folder());
    std::os::unix::fs::symlink(outside.path(), models.path().join("door")).expect("a link can be made");
    let servers = Local::start(&Job::new(2, 1).with("--model-dir", models.path().display()));
    let client = client(&servers.coordinator(), 0);
    begin(&client, &tensors()).expect("the tensors are initialised");
    for path in ["model.safetensors", "deep/er/model.safetensors"] {
        let (saved, bytes) = client.save_model(path).expect("the model is saved");
        assert_eq!(Path::new(&saved), models.path().join(path));
        assert_eq!(std::fs::metadata(&saved).expect("it is there").len(), bytes);
    }
    for path in ["../model", "deep/../../model", "/tmp/pserver-model", "", "door/model", "a//b", "deep/er"] {
        let refusal = client.save_model(path).expect_err(path).to_string();
        check_text(&refusal, &[path]);
        if path.starts_with(['/', '.']) {
            let root = models.path().display().to_string();
            check_text(&refusal, &["--model-dir", "PSERVER_MODEL_DIR", "on server 0", &root]);
        }
    }
    assert_eq!(std::fs::read_dir(outside.path()).expect("it is there").count(), 0, "nothing leaves the folder");
    servers.stop();
}

#[test]
fn shards_that_no_model_can_hold_are_refused_before_training() {
    let servers = Local::start(&Job::new(2, 1));
    let client = client(&servers.coordinator(), 0);
    assert!(client.begin_init(&OptimizerSettings::default()).expect("it is chosen"));
    let declare = |name: &str| client.init_param(name, Float32, &[1, 2], &[0; 8], &OptimizerSettings::default());
    declare("e:sparse-0").expect("a shard is declared");
    declare("e:sparse-2").expect("a shard is declared");
    let refusal = client.finish_init().expect_err("a shard is missing").to_string();
    check_text(&refusal, &["\"e:sparse-2\" is there without e:sparse-1"]);
    declare("e:sparse-1").expect("what is missing may still be declared");
    client.finish_init().expect("the shards are whole");
    servers.stop();
}

/// A file as Python reads it: names, shapes, and the sum of every tensor's bytes.
const PYTHON: &str = "\
import sys
from safetensors import deserialize
for name, tensor in sorted(deserialize(open(sys.argv[1], 'rb').read())):
    print(name, tensor['dtype'], list(tensor['shape']), sum(tensor['data']))
";

/// A Python that has safetensors: that of `python3 -m venv target/python && target/python/bin/pip install safetensors`,
/// or the system's.
fn python() -> Option<String> {
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("python").join("bin/python3");
    let has_it = |python: &String| {
        let output = Command::new(python).args(["-c", "import safetensors"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    [own.display().to_string(), "python3".to_owned()].into_iter().find(has_it)
}

#[test]
fn python_opens_a_model_and_finds_the_rows_of_an_embedding_together() {
    let models = folder();
    let servers = Local::start(&Job::new(2, 1).with("--model-dir", models.path().display()));
    let client = client(&servers.coordinator(), 0);
    assert!(client.begin_init(&OptimizerSettings::default()).expect("it is chosen"));
    let rows = [2_u8, 1, 4];
    for (number, rows) in rows.into_iter().enumerate() {
        let value: Vec<u8> = (0..rows * 3).flat_map(|at| f32::from(at).to_le_bytes()).collect();
        let settings = OptimizerSettings::default();
        client
            .init_param(&format!("emb:sparse-{number}"), Float32, &[rows.into(), 3], &value, &settings)
            .expect("a part of an embedding is declared");
    }
    client.init_param("bias", Float64, &[1], &1.0_f64.to_le_bytes(), &OptimizerSettings::default()).expect("declared");
    client.finish_init().expect("it is initialised");
    let (saved, _) = client.save_model("model.safetensors").expect("the model is saved");
    servers.stop();
    let Some(python) = python() else {
        return skip("python-safetensors", "no Python here has the package safetensors");
    };
    let output = Command::new(python).args(["-c", PYTHON, &saved]).output().expect("Python runs");
    let numbers = |rows: u8| (0..rows * 3).flat_map(|at| f32::from(at).to_le_bytes()).map(u64::from).sum::<u64>();
    let expected = format!("bias F64 [1] {}\nemb F32 [7, 3] {}\n", 0xf0 + 0x3f, rows.map(numbers).iter().sum::<u64>());
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", String::from_utf8_lossy(&output.stderr));
}
