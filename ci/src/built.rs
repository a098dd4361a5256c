//! Builds by cargo, and the paths that cargo reports.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::Workspace;

/// Cargo's messages about one build.
pub(crate) struct Built(String);

impl Built {
    /// Builds. With the tests of the whole workspace it is the build of `rust-tests`, and nothing is built twice.
    pub(crate) fn by(workspace: &Workspace, arguments: &[&str]) -> Result<Self> {
        Self::of(workspace.cargo().args(arguments))
    }

    /// Runs a cargo command that builds, and keeps its messages.
    pub(crate) fn of(cargo: &mut Command) -> Result<Self> {
        cargo.args(["--quiet", "--message-format=json-render-diagnostics"]);
        let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
        ensure!(output.status.success(), "cargo ended with {}", output.status);
        Ok(Self(String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Every test and program of the workspace.
    pub(crate) fn tests(workspace: &Workspace) -> Result<Self> {
        Self::by(workspace, &["test", "--workspace", "--no-run"])
    }

    /// The program of a target, or the program of its tests.
    pub(crate) fn program(&self, target: &str, is_test: bool) -> Result<String> {
        let found = self.messages().find_map(|message| {
            let is_wanted = message["target"]["name"] == target && message["profile"]["test"] == is_test;
            message["executable"].as_str().filter(|_| is_wanted).map(str::to_owned)
        });
        let what = if is_test { "the tests of " } else { "" };
        found.with_context(|| format!("cargo does not say that it built {what}{target}"))
    }

    /// A file of this name that is no program.
    pub(crate) fn file(&self, name: &str) -> Result<String> {
        let found = self.messages().find_map(|message| {
            let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
            files.filter(|file| file.ends_with(name)).map(str::to_owned).next()
        });
        found.with_context(|| format!("cargo does not say that it built {name}"))
    }

    fn messages(&self) -> impl Iterator<Item = serde_json::Value> {
        self.0.lines().filter_map(|line| serde_json::from_str(line).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_among_the_messages_of_cargo() {
        let message = |name: &str, test: bool, path: &str| {
            let executable = if path.is_empty() { "null".to_owned() } else { format!("\"{path}\"") };
            format!(
                "{{\"target\":{{\"name\":\"{name}\"}},\"profile\":{{\"test\":{test}}},\
                 \"filenames\":[\"/a/x.rlib\",\"{path}.so\"],\"executable\":{executable}}}"
            )
        };
        let messages = [
            message("pserver_transport", false, ""),
            message("pserver_transport", true, "/a/unit"),
            message("pserver", true, "/a/tests-of-pserver"),
            "not json".to_owned(),
            message("pserver", false, "/a/pserver"),
            message("kill", true, "/a/libpaddle_pserver"),
        ];
        let built = Built(messages.join("\n"));
        let found = |target, is_test| built.program(target, is_test).map_err(|error| error.to_string());
        assert_eq!(found("pserver_transport", true).as_deref(), Ok("/a/unit"));
        assert_eq!(found("pserver", false).as_deref(), Ok("/a/pserver"));
        assert_eq!(found("kill", true).as_deref(), Ok("/a/libpaddle_pserver"));
        assert_eq!(found("psbench", false).unwrap_err(), "cargo does not say that it built psbench");
        assert_eq!(found("kill", false).unwrap_err(), "cargo does not say that it built kill");
        assert_eq!(found("psbench", true).unwrap_err(), "cargo does not say that it built the tests of psbench");
        assert_eq!(built.file("libpaddle_pserver.so").expect("it is there"), "/a/libpaddle_pserver.so");
    }
}
