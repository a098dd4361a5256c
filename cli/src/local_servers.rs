//! The servers of a job that lies on this machine, as child processes.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use pserver_core::config::Mode;
use pserver_processes::{Children, unconfigured};
use pserver_transport::verbs::DeviceChoice;

/// Time until a server listens.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Most servers, and most trainers, on one machine.
pub(crate) const CHILDREN_MAX: i64 = 64;

/// The servers of a job.
pub(crate) struct LocalServers<'a> {
    pub(crate) servers: u16,
    pub(crate) shards: u16,
    pub(crate) trainers: u32,
    pub(crate) mode: Mode,
    /// The scheme of an address.
    pub(crate) transport: &'a str,
    pub(crate) rdma_device: &'a DeviceChoice,
    /// Configuration of parameters that have none of their own.
    pub(crate) optimizer: &'a str,
    /// Folder of saved models; absent for none.
    pub(crate) model_dir: Option<&'a Path>,
    /// Checkpoint directory; absent for none.
    pub(crate) checkpoint_dir: Option<&'a Path>,
}

impl LocalServers<'_> {
    /// Starts server 0, then the servers that join it. Returns the address of server 0.
    ///
    /// # Errors
    /// Names the server that does not get ready.
    pub(crate) fn start(&self, children: &mut Children, program: &Path) -> Result<String> {
        let mut coordinator: Option<String> = None;
        for index in 0..self.servers {
            let mut command = unconfigured(program);
            command
                .args(["serve", "--bind", &format!("{}://127.0.0.1:0", self.transport), "--merge", "mean"])
                .arg("--until-stdin-closes")
                .args(["--index", &index.to_string(), "--servers", &self.servers.to_string()])
                .args(["--trainers", &self.trainers.to_string(), "--shards", &self.shards.to_string()])
                .args(mode_options(self.mode))
                .args(Some(self.optimizer).filter(|text| !text.is_empty()).map(|text| format!("--optimizer={text}")))
                .args(["--rdma-device", &self.rdma_device.to_string()]);
            if let Some(folder) = self.model_dir {
                command.arg("--model-dir").arg(folder);
            }
            if let Some(folder) = self.checkpoint_dir {
                command.arg("--checkpoint-dir").arg(folder);
            }
            if let Some(coordinator) = &coordinator {
                command.args(["--coordinator", coordinator]);
            }
            let server = children.start(format!("server {index}"), &mut command)?;
            let address = children.await_ready(server, READY_TIMEOUT)?;
            coordinator.get_or_insert(address);
        }
        coordinator.context("a job has at least one server")
    }
}

/// The options of `pserver serve` for a mode.
fn mode_options(mode: Mode) -> Vec<String> {
    let (name, bound) = match mode {
        Mode::Sync => ("sync", None),
        Mode::Async => ("async", None),
        Mode::Staleness { bound } => ("bounded", Some(bound)),
        Mode::Delta => ("delta", None),
    };
    let bound = bound.into_iter().flat_map(|bound| ["--staleness".to_owned(), bound.to_string()]);
    ["--mode", name].map(str::to_owned).into_iter().chain(bound).collect()
}
