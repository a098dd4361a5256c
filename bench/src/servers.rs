//! Servers in this process.

use anyhow::{Result, ensure};
use pserver_node::Server;
use pserver_node::settings::Settings;

/// Servers of a job, reached over this transport on this machine; each shard is a thread. `merge` is `sum`, or the
/// `mean` of programs.
///
/// # Errors
/// When there are none, or one does not start.
pub fn serve(transport: &str, merge: &str, trainers: u32, (count, shards): (u16, u16)) -> Result<Vec<Server>> {
    let mut servers: Vec<Server> = Vec::new();
    for index in 0..count {
        let bind = format!("{transport}://127.0.0.1:0");
        let numbers = [index, count, shards].map(|number| number.to_string());
        let trainers = trainers.to_string();
        let mut line = vec!["--bind", &bind, "--log-level", "off", "--merge", merge, "--trainers", &trainers];
        line.extend([
            "--index",
            &numbers[0],
            "--servers",
            &numbers[1],
            "--shards",
            &numbers[2],
            "--threads",
            &numbers[2],
        ]);
        let coordinator = servers.first().map(|first| first.address().to_string());
        line.extend(coordinator.iter().flat_map(|address| ["--coordinator", address.as_str()]));
        servers.push(Server::start(Settings::of_words(line)?)?);
    }
    ensure!(!servers.is_empty(), "--servers 0: expected 1 or more");
    Ok(servers)
}
