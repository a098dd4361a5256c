//! Manual pages and completions of the `pserver` program, as `cargo ci install` installs them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::{Shell, generate_to};

/// Where each shell looks for completions of a program, below `share`.
const COMPLETIONS: [(Shell, &str, &str); 3] = [
    (Shell::Bash, "bash-completion/completions", "pserver"),
    (Shell::Zsh, "zsh/site-functions", "_pserver"),
    (Shell::Fish, "fish/vendor_completions.d", "pserver.fish"),
];

/// Options of `pserver pages`.
#[derive(clap::Args)]
pub struct PagesArgs {
    /// The folder of the files, such as /usr/local/share.
    folder: PathBuf,
}

/// Writes a manual page for each subcommand and a completion for each shell.
///
/// # Errors
/// When a file cannot be written.
pub fn run(args: &PagesArgs, command: Command) -> Result<()> {
    let make = |folder: &str| {
        let path = args.folder.join(folder);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok::<PathBuf, anyhow::Error>(path)
    };
    let written = |path: &Path| format!("cannot write to {}", path.display());
    for (shell, folder, name) in COMPLETIONS {
        let path = make(folder)?;
        let file = generate_to(shell, &mut command.clone(), "pserver", &path).with_context(|| written(&path))?;
        fs::rename(&file, path.join(name)).with_context(|| written(&path))?;
    }
    let path = make("man/man1")?;
    clap_mangen::generate_to(command, &path).with_context(|| written(&path))
}
