//! Membership of a job: which server holds an index and which trainer a rank, when either is free again, and how the
//! other members learn of a loss.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::cluster::asked::is_full;
use crate::cluster::job::{DEADLINE, Job, Local, client, client_with, folder, reader};
use crate::cluster::ports::free_port;
use crate::cluster::process::{Process, Processes, one_test};
use crate::cluster::training::{Tensor, begin, push_pull};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::Address;

const SGD: &str = "const_lr { learning_rate: 1.0 }";

fn tensors() -> Vec<Tensor> {
    vec![Tensor::new("weights", Float32, 10_000, SGD)]
}

/// Checks that a text has every one of the words.
fn check_text(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "expected \"{word}\" in: {text}");
    }
}

/// A trainer that takes the rank that is free.
fn any_rank(coordinator: &Address) -> Client {
    let options = ClientOptions { deadline: DEADLINE, ..ClientOptions::new(coordinator.clone()) };
    Client::new(options).expect("this process can have another transport")
}

#[test]
fn a_second_server_of_an_index_does_not_start_while_the_first_one_lives() {
    let folder = folder();
    let mut processes = Processes::start(Job::new(2, 1).with_checkpoints(folder.path()));
    let coordinator = processes.coordinator();
    let tensors = tensors();
    let trainer = client(&coordinator, 0);
    begin(&trainer, &tensors).expect("the tensors are initialised");
    push_pull(&trainer, &tensors, 0, 1).expect("the first round is closed");
    let mut arguments = Job::new(2, 1).arguments(1, "tcp://127.0.0.1:0", Some(&coordinator.to_string()));
    let first = processes.running[1].as_ref().expect("it runs").address.to_string();
    let second = match Process::start(&arguments) {
        Ok(process) => panic!("a second server 1 runs at {}", process.address),
        Err(ended) => ended,
    };
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    check_text(&second.words, &["server 1 of this job is at", &first, "the one at tcp://127.0.0.1:", "--index"]);
    // A reader asks again for the addresses of the servers.
    assert_eq!(reader(&coordinator).names().expect("the job is there").len(), 1);
    push_pull(&trainer, &tensors, 0, 2).expect("the second round is closed");
    // A server that is stopped by SIGSTOP still holds its index.
    let pid = processes.running[1].as_ref().expect("it runs").id();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("it is there");
    let second = Process::start(&arguments).err();
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).expect("it is there");
    check_text(&second.expect("it is refused").words, &["server 1 of this job is at", &first]);
    // The index of a killed server is free: at its own address at once, at another one after the grace time.
    processes.kill(1);
    arguments = processes.arguments(1);
    let begun = Instant::now();
    processes.running[1] = Some(Process::start(&arguments).expect("its place is free"));
    println!("a killed server was back after {:?}", begun.elapsed());
    push_pull(&trainer, &tensors, 0, 3).expect("the third round is closed");
    processes.terminate();
}

#[test]
fn a_restarted_trainer_without_a_set_rank_gets_its_rank_back() {
    let servers = Local::start(&Job::new(1, 1));
    let coordinator = servers.coordinator();
    let tensors = tensors();
    for life in 0..3 {
        let trainer = any_rank(&coordinator);
        begin(&trainer, &tensors).expect("the tensors are initialised, by this life or an earlier one");
        assert_eq!(trainer.trainer().expect("it has joined"), 0);
        push_pull(&trainer, &tensors, 0, life + 1).expect("a round is closed");
    }
    let holder = any_rank(&coordinator);
    assert_eq!(holder.trainer().expect("it has joined"), 0);
    let refusal = any_rank(&coordinator).trainer().expect_err("the rank is taken").to_string();
    let pid = format!("pid {}", std::process::id());
    check_text(&refusal, &["all 1 ranks of this job are taken", &pid, "--trainers 2", "PSERVER_TRAINER"]);
    // A trainer that asks for a taken rank gets the rank when its holder departs.
    std::thread::scope(|scope| {
        let next = scope.spawn(|| any_rank(&coordinator).trainer());
        // tidy: allow sleep: the call must wait by then, which nothing tells; the test is right however long it takes
        std::thread::sleep(Duration::from_millis(200));
        drop(holder);
        assert_eq!(next.join().expect("a call does not panic").expect("the rank is free"), 0);
    });
    servers.stop();
}

/// Server 0 starts again while a trainer is connected: it keeps its rank, and a new one waits and is refused.
#[test]
fn ranks_outlive_a_restart_of_the_coordinator() {
    let folder = folder();
    let mut processes = Processes::start(Job::new(1, 1).with_checkpoints(folder.path()));
    let coordinator = processes.coordinator();
    let tensors = tensors();
    let trainer = any_rank(&coordinator);
    begin(&trainer, &tensors).expect("the tensors are initialised");
    processes.kill(0);
    processes.start_again(0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| any_rank(&coordinator).trainer());
        push_pull(&trainer, &tensors, 0, 1).expect("a round is closed");
        let refusal = other.join().expect("a call does not panic").expect_err("the rank is taken").to_string();
        check_text(&refusal, &["all 1 ranks"]);
    });
    push_pull(&trainer, &tensors, 0, 2).expect("a round is closed");
    processes.terminate();
}

/// Arguments of a trainer in a process of its own: the address of server 0 and the rank.
const TRAINER: &str = "PSERVER_TEST_TRAINER";

/// A trainer process that has closed one round; dropping this value kills the process.
struct Other(Child);

impl Other {
    /// Starts one; it says when its round is closed.
    fn start(coordinator: &Address) -> Self {
        let mut command = one_test("members::child_process_of_a_trainer_that_is_killed");
        command.env(TRAINER, coordinator.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().expect("this program starts again"))
    }

    fn wait_for_round(&mut self) {
        let said = BufReader::new(self.0.stdout.take().expect("it is piped"));
        let closed = said.lines().map_while(Result::ok).any(|line| line.contains("the round is closed"));
        assert!(closed, "the other trainer takes part");
    }

    fn kill(&mut self) {
        self.0.kill().expect("it is a child");
        self.0.wait().expect("it is a child");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The trainer process of other tests in this file; run by itself, it does nothing.
#[test]
fn child_process_of_a_trainer_that_is_killed() {
    let Ok(coordinator) = std::env::var(TRAINER) else { return };
    let client = client(&Address::parse(&coordinator).expect("it is an address"), 1);
    begin(&client, &tensors()).expect("the tensors are initialised");
    push_pull(&client, &tensors(), 1, 1).expect("a round is closed");
    println!("the round is closed");
    // The trainer is busy until it is killed.
    let _ = std::io::stdin().read(&mut [0]);
}

/// The time in which a survivor learns of a loss on an idle machine: the grace time of 2 s and one second more.
const HEARD_WITHIN: Duration = Duration::from_secs(3);
/// The time on a busy machine, far below the time that a round may take.
const HEARD_AT_LAST: Duration = Duration::from_secs(20);

#[test]
fn a_killed_trainer_is_named_to_the_others_and_its_successor_goes_on() {
    let (kills, limit) = if is_full() { (50, HEARD_WITHIN) } else { (2, HEARD_AT_LAST) };
    let servers = Local::start(&Job::new(2, 2));
    let coordinator = servers.coordinator();
    let tensors = tensors();
    let survivor = client(&coordinator, 0);
    let mut longest = Duration::ZERO;
    let mut other = Other::start(&coordinator);
    begin(&survivor, &tensors).expect("the tensors are initialised");
    push_pull(&survivor, &tensors, 0, 1).expect("the first round is closed");
    other.wait_for_round();
    for round in 2..kills + 2 {
        let pid = other.0.id();
        let (refusal, time) = std::thread::scope(|scope| {
            let call = scope.spawn(|| (push_pull(&survivor, &tensors, 0, round), Instant::now()));
            // tidy: allow sleep: the call shall wait by then, which nothing tells; it ends alike when it comes later
            std::thread::sleep(Duration::from_millis(100));
            let killed = Instant::now();
            other.kill();
            let (done, ended) = call.join().expect("a call does not panic");
            (done.expect_err("the round cannot be closed").to_string(), ended - killed)
        });
        longest = longest.max(time);
        assert!(time < limit, "heard after {time:?}");
        check_text(
            &refusal,
            &["\"weights\"", &format!("round {round} waits for trainer 1 (host "), &format!("pid {pid};")],
        );
        let again = Instant::now();
        push_pull(&survivor, &tensors, 0, round).expect_err("nobody has taken its rank");
        assert!(again.elapsed() < limit, "a later call ends at once");
        // The survivor's gradient is in the round, which its successor closes.
        other = Other::start(&coordinator);
        other.wait_for_round();
        push_pull(&survivor, &tensors, 0, round).expect("the round is closed");
    }
    println!("survivors of {kills} killed trainers heard of it within {longest:?}");
    servers.stop();
}

/// A deadline below the time that a round may take.
#[test]
fn a_late_trainer_is_named_and_no_healthy_server() {
    let servers = Local::start(&Job::new(2, 2));
    let tensors = tensors();
    let clients: Vec<Client> =
        (0..2).map(|rank| client_with(&servers.coordinator(), rank, Duration::from_secs(3))).collect();
    for client in &clients {
        begin(client, &tensors).expect("the tensors are initialised");
    }
    clients[1].names().expect("it is connected");
    crate::cluster::training::pull(&clients[1], &tensors).expect("it is connected to every server");
    let refusal = push_pull(&clients[0], &tensors, 0, 1).expect_err("the other is late").to_string();
    let pid = format!("pid {}", std::process::id());
    check_text(&refusal, &["within 3.0 s", "round 1 waits for trainer 1 (host ", &pid]);
    assert!(!refusal.contains("without an answer"), "{refusal}");
    servers.stop();
}

fn impatient(coordinator: &Address) -> Client {
    let server_absence = Duration::from_secs(1);
    let options = ClientOptions { deadline: DEADLINE, server_absence, ..ClientOptions::new(coordinator.clone()) };
    Client::new(options).expect("this process can have another transport")
}

/// Checks that a call ends soon after the time that it waits for a server, and checks its error text.
fn check_absent<T: std::fmt::Debug>(call: impl FnOnce() -> Result<T, pserver_core::error::Failure>, words: &[&str]) {
    let begun = Instant::now();
    let refusal = call().expect_err("a server is absent").to_string();
    let time = begun.elapsed();
    println!("an absent server was named after {time:?}: {refusal}");
    assert!(time < if is_full() { Duration::from_secs(3) } else { DEADLINE / 2 }, "{time:?}");
    check_text(&refusal, words);
}

#[test]
fn an_absent_server_is_named_soon() {
    let nobody = Address::parse(&format!("tcp://127.0.0.1:{}", free_port())).expect("it is an address");
    let words = ["the coordinator (server 0) at tcp://127.0.0.1:", "has refused connections for 1.", "server_absence"];
    check_absent(|| impatient(&nobody).trainer(), &words);
    // Server 1 has not started.
    let job = Job::new(2, 1);
    let bind = format!("tcp://127.0.0.1:{}", free_port());
    let lone = Process::start(&job.arguments(0, &bind, None)).expect("server 0 starts alone");
    check_absent(|| impatient(&lone.address).trainer(), &["server 1 of 2 has not registered", "--index"]);
    let hasty = client_with(&lone.address, 0, Duration::from_secs(2));
    let refusal = hasty.trainer().expect_err("a server is absent").to_string();
    check_text(&refusal, &["within 2.0 s", "server 1 of 2 has not registered"]);
    drop(lone);
    // Server 1 was killed.
    let folder = folder();
    let mut processes =
        Processes::start(job.with_checkpoints(folder.path()).with("--model-dir", folder.path().display()));
    let coordinator = processes.coordinator();
    let trainer = impatient(&coordinator);
    let tensors = vec![Tensor::new("weights", Float32, 100_000, SGD)];
    begin(&trainer, &tensors).expect("the tensors are initialised");
    push_pull(&trainer, &tensors, 0, 1).expect("the first round is closed");
    let address = processes.running[1].as_ref().expect("it runs").address.to_string();
    processes.kill(1);
    let job_at = format!("server 0 is at {coordinator}");
    check_absent(
        || push_pull(&trainer, &tensors, 0, 2),
        &["server 1 shard 0 at ", &address, &job_at, "has refused connections"],
    );
    // A server that saves is as patient as a trainer is by default.
    let begun = Instant::now();
    let refusal = trainer.save_model("model").expect_err("a server is absent").to_string();
    check_text(&refusal, &["server 1 shard 0", &address]);
    assert!(begun.elapsed() < DEADLINE, "it does not take ten deadlines: {:?}", begun.elapsed());
    processes.start_again(1);
    push_pull(&trainer, &tensors, 0, 2).expect("the server is back");
    processes.terminate();
}
