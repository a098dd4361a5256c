//! `pserver top`: the status of a job in a terminal.
//!
//! Read in this order: `fetch` (the status over HTTP), `text` (its lines), `screen` (the terminal).

mod fetch;
mod screen;
pub(crate) mod text;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use pserver_client::console;

use fetch::StatusSource;
use text::StatusView;

/// Time between two looks at the job.
const PERIOD: Duration = Duration::from_secs(1);

/// Arguments of `pserver top`.
#[derive(clap::Args, Clone, Debug)]
pub struct TopArgs {
    /// The HTTP address of server 0 (pserver serve --http): HOST:PORT, with https:// before it where the server
    /// encrypts.
    #[arg(default_value = "127.0.0.1:9464", value_name = "ADDRESS")]
    address: String,
    /// The file with the token of the server's http_token_file.
    #[arg(long, value_name = "FILE", env = "PSERVER_HTTP_TOKEN_FILE")]
    http_token_file: Option<PathBuf>,
    /// The PEM file with certificates of authorities, one of which the certificate of an https:// address must be from;
    /// needed beyond loopback.
    #[arg(long, value_name = "FILE", env = "PSERVER_CERTIFICATE_AUTHORITY")]
    certificate_authority: Option<PathBuf>,
    /// Print the status once, as plain text, and end. Rates are those of one second.
    #[arg(long)]
    once: bool,
}

/// Shows a job until a key or a signal ends it.
///
/// # Errors
/// With `--once` when the server does not answer; otherwise when there is no terminal.
pub fn run(args: &TopArgs) -> Result<()> {
    let source =
        StatusSource::new(&args.address, args.http_token_file.as_deref(), args.certificate_authority.as_deref())?;
    if !args.once {
        return screen::show(&source);
    }
    let mut view = StatusView::default();
    view.take(source.fetch()?);
    std::thread::sleep(PERIOD);
    view.take(source.fetch()?);
    let lines: String = view.lines().iter().map(|line| format!("{}\n", line.text)).collect();
    Ok(console::print(lines)?)
}
