//! Source of a job's status: a GET of `/status` over HTTP or HTTPS, with limits on time and length.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pserver_node::JobStatus;
use pserver_transport::tls::{EncryptPolicy, Encryption, EncryptionSettings};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

/// Time for a connection, and for each wait of an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// How a server answers that expects TLS: with an alert.
const ALERT: &str = "\x15\x03";
/// The longest answer that is read.
const BYTES_MAX: u64 = 64 * 1024 * 1024;

/// A server that is asked for the status of its job.
pub(super) struct StatusSource {
    address: String,
    token: Option<String>,
    /// With an `https://` address.
    encryption: Option<Encryption>,
}

impl StatusSource {
    /// A source at `address`, with `https://`, `http://` or nothing before it.
    pub(super) fn new(address: &str, token_file: Option<&Path>, authority: Option<&Path>) -> Result<Self> {
        let secure = address.strip_prefix("https://");
        let bare = secure.or_else(|| address.strip_prefix("http://")).unwrap_or(address).trim_end_matches('/');
        ensure!(
            bare.contains(':'),
            "the address \"{address}\" has no port; expected HOST:PORT, such as 127.0.0.1:9464"
        );
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path).with_context(|| format!("http_token_file {}", path.display()))?;
            // A file has several while a token is changed, and the first is shown.
            let token = text.trim().lines().next().unwrap_or_default().trim().to_owned();
            let is_header = !token.is_empty() && token.bytes().all(|byte| (0x20..0x7f).contains(&byte));
            ensure!(is_header, "http_token_file {}: expected a line of ASCII", path.display());
            Ok(token)
        };
        let policy = if secure.is_some() { EncryptPolicy::Tcp } else { EncryptPolicy::Off };
        let authority = authority.map(Path::to_owned);
        let encryption = Encryption::of_client(&EncryptionSettings { policy, authority, ..Default::default() })?;
        Ok(Self { address: bare.to_owned(), token: token_file.map(read).transpose()?, encryption })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The status now.
    pub(super) fn fetch(&self) -> Result<JobStatus> {
        let answer = self.ask().with_context(|| format!("asking {}://{}/status", self.scheme(), self.address))?;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        match head.split(' ').nth(1) {
            Some("200") => {}
            Some("401") => bail!("{} has a token: expected the file with it in --http-token-file", self.address),
            _ if answer.starts_with(ALERT) => bail!("{} speaks TLS; expected https:// before it", self.address),
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
                Ok(stream) => return self.ask_over(stream, address),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.map_or_else(|| anyhow::anyhow!("the host has no address"), Into::into))
    }

    fn scheme(&self) -> &'static str {
        if self.encryption.is_some() { "https" } else { "http" }
    }

    fn ask_over(&self, stream: TcpStream, address: SocketAddr) -> Result<String> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let Some(encryption) = &self.encryption else { return self.request(stream) };
        // The server that answers gets the token. On loopback only users of this machine can be that server.
        ensure!(
            encryption.verifies() || address.ip().to_canonical().is_loopback(),
            "no certificate_authority to verify the server by; expected --certificate-authority, or a loopback address"
        );
        let (host, _) = self.address.rsplit_once(':').unwrap_or((&self.address, ""));
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
        self.request(StreamOwned::new(ClientConnection::new(encryption.client_config(), name)?, stream))
    }

    fn request(&self, mut stream: impl Read + Write) -> Result<String> {
        let token = self.token.as_ref().map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        let host = &self.address;
        stream.write_all(
            format!("GET /status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{token}\r\n").as_bytes(),
        )?;
        let mut answer = Vec::new();
        stream.take(BYTES_MAX).read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}
