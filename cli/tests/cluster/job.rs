//! Servers of a job: their settings, and the servers that run within the test process.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use pserver_client::{Client, ClientOptions};
use pserver_core::wire::Address;
use pserver_node::Server;
use pserver_node::settings::Settings;
use tempfile::TempDir;

/// How long any call of a test's client may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The default address on which servers listen, with a port that the system chooses: `PSERVER_TEST_BIND`, which runs
/// the same tests over another transport, or [`TCP`].
pub(crate) static BIND: LazyLock<String> =
    LazyLock::new(|| std::env::var("PSERVER_TEST_BIND").unwrap_or_else(|_| TCP.to_owned()));
pub(crate) const TCP: &str = "tcp://127.0.0.1:0";

/// Settings that all servers of a job share.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) servers: u16,
    pub(crate) shards: u16,
    pub(crate) chunk_bytes: u32,
    pub(crate) trainers: u32,
    pub(crate) mode: &'static str,
    /// The address on which servers within this process listen, with a port that the system chooses.
    pub(crate) bind: &'static str,
    /// Further options of `pserver serve`, each with its value.
    pub(crate) more: Vec<(&'static str, String)>,
}

impl Job {
    pub(crate) fn new(servers: u16, trainers: u32) -> Self {
        Self { servers, shards: 1, chunk_bytes: 32 * 1024, trainers, mode: "sync", bind: &BIND, more: Vec::new() }
    }

    pub(crate) fn with(mut self, option: &'static str, value: impl ToString) -> Self {
        self.more.push((option, value.to_string()));
        self
    }

    pub(crate) fn with_checkpoints(self, directory: &Path) -> Self {
        self.with("--checkpoint-dir", directory.display())
    }

    /// Settings of server `index`, which `{index}` in a value stands for; every server but the first needs the
    /// coordinator's address.
    pub(crate) fn arguments(&self, index: u16, bind: &str, coordinator: Option<&str>) -> Vec<String> {
        let mut all = vec![
            ("--index", index.to_string()),
            ("--servers", self.servers.to_string()),
            ("--shards", self.shards.to_string()),
            ("--trainers", self.trainers.to_string()),
            ("--chunk-bytes", self.chunk_bytes.to_string()),
            ("--bind", bind.to_owned()),
            ("--log-level", "warn".to_owned()),
        ];
        // The default is left out, so that a job's initialiser may choose another mode.
        all.extend((self.mode != "sync").then(|| ("--mode", self.mode.to_owned())));
        all.extend(coordinator.map(|address| ("--coordinator", address.to_owned())));
        all.extend(self.more.clone());
        let index = index.to_string();
        all.into_iter().flat_map(|(option, value)| [option.to_owned(), value.replace("{index}", &index)]).collect()
    }

    /// The settings of a server within this process, on a port of the system's choice.
    pub(crate) fn settings(&self, index: u16, coordinator: Option<&str>) -> Settings {
        let arguments = self.arguments(index, self.bind, coordinator);
        Settings::of_words(arguments).expect("the test's settings are right")
    }
}

/// A client of rank `trainer`, which has not connected yet.
pub(crate) fn client(coordinator: &Address, trainer: u32) -> Client {
    client_with(coordinator, trainer, DEADLINE)
}

pub(crate) fn client_with(coordinator: &Address, trainer: u32, deadline: Duration) -> Client {
    // A busy machine may take long to restart a server.
    let (trainer, server_absence) = (Some(trainer), DEADLINE);
    let options = ClientOptions { trainer, deadline, server_absence, ..ClientOptions::new(coordinator.clone()) };
    Client::new(options).expect("this process can have another transport")
}

/// A client that only reads.
pub(crate) fn reader(coordinator: &Address) -> Client {
    let (is_reader, deadline, server_absence) = (true, DEADLINE, DEADLINE);
    let options = ClientOptions { is_reader, deadline, server_absence, ..ClientOptions::new(coordinator.clone()) };
    Client::new(options).expect("this process can have another transport")
}

/// Servers within this process.
pub(crate) struct Local {
    servers: Vec<Server>,
}

impl Local {
    pub(crate) fn start(job: &Job) -> Self {
        Self::start_with(job, |_| {})
    }

    /// Starts servers whose settings the test may change further than the command line can.
    pub(crate) fn start_with(job: &Job, change: impl Fn(&mut Settings)) -> Self {
        let mut servers: Vec<Server> = Vec::new();
        for index in 0..job.servers {
            let coordinator = servers.first().map(|first| first.address().to_string());
            let mut settings = job.settings(index, coordinator.as_deref());
            change(&mut settings);
            servers.push(Server::start(settings).expect("a server starts on a free port"));
        }
        Self { servers }
    }

    /// The address of server 0, by which trainers find the job.
    pub(crate) fn coordinator(&self) -> Address {
        self.servers[0].address().clone()
    }

    /// Drains every server and takes the last checkpoints, all at once.
    pub(crate) fn stop(self) {
        let stop = |server: Server| std::thread::spawn(move || server.stop());
        let stopping: Vec<_> = self.servers.into_iter().map(stop).collect();
        for one in stopping {
            one.join().expect("stopping does not panic").expect("a server stops without a failure");
        }
    }
}

/// A folder that is removed when the test ends.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("there is a place for temporary files")
}
