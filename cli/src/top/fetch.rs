//! Source of a job's status: a GET of `/status`, with limits on time and length.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pserver_node::JobStatus;

/// Time for a connection, and for each wait of an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// The longest answer that is read.
const BYTES_MAX: u64 = 64 * 1024 * 1024;

/// A server that is asked for the status of its job.
pub(super) struct StatusSource {
    address: String,
    token: Option<String>,
}

impl StatusSource {
    /// A source at `address`, with or without `http://` before it.
    pub(super) fn new(address: &str, token_file: Option<&Path>) -> Result<Self> {
        let bare = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
        ensure!(
            bare.contains(':'),
            "the address \"{address}\" has no port; expected HOST:PORT, such as 127.0.0.1:9464"
        );
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path).with_context(|| format!("http_token_file {}", path.display()))?;
            let token = text.trim().to_owned();
            let is_header = !token.is_empty() && token.bytes().all(|byte| (0x20..0x7f).contains(&byte));
            ensure!(is_header, "http_token_file {}: expected one line of ASCII", path.display());
            Ok(token)
        };
        Ok(Self { address: bare.to_owned(), token: token_file.map(read).transpose()? })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The status now.
    pub(super) fn fetch(&self) -> Result<JobStatus> {
        let answer = self.ask().with_context(|| format!("asking http://{}/status", self.address))?;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        match head.split(' ').nth(1) {
            Some("200") => {}
            Some("401") => bail!("{} has a token: expected the file with it in --http-token-file", self.address),
            _ => bail!(
                "{} answers \"{}\"; expected a server with --http",
                self.address,
                head.lines().next().unwrap_or("")
            ),
        }
        serde_json::from_str(body).with_context(|| format!("{} answers with no status of this version", self.address))
    }

    fn ask(&self) -> Result<String> {
        let mut failed = None;
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, LIMIT) {
                Ok(stream) => return self.ask_over(stream),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.map_or_else(|| anyhow::anyhow!("the host has no address"), Into::into))
    }

    fn ask_over(&self, mut stream: TcpStream) -> Result<String> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let token = self.token.as_ref().map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        let host = &self.address;
        stream.write_all(
            format!("GET /status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{token}\r\n").as_bytes(),
        )?;
        let mut answer = String::new();
        stream.take(BYTES_MAX).read_to_string(&mut answer)?;
        Ok(answer)
    }
}
