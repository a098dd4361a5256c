//! A training of the examples: two servers, and programs that print their accuracy.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Trainers of a job.
pub(super) const TRAINERS: usize = 4;
/// Seconds after which a program is ended.
const SECONDS_MAX: &str = "120";
/// Every example reads more of the digits than this, in percent.
const ACCURACY_MIN: f64 = 94.0;

/// A server process, which ends when this value does.
struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start(pserver: &[OsString], more: &[&str]) -> Result<Self> {
        let (program, arguments) = pserver.split_first().context("a program")?;
        let mut command = bounded(program);
        command.args(arguments).args(["serve", "--until-stdin-closes", "--log-level", "warn", "--servers", "2"]);
        command.args(["--bind", "127.0.0.1:0", "--trainers", &TRAINERS.to_string()]).args(more);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start a server")?;
        let mut line = String::new();
        let output = child.stdout.take().context("the output is piped")?;
        let mut server = Self { child, address: String::new() };
        BufReader::new(output).read_line(&mut line).context("cannot read a server's output")?;
        let address = line.trim().strip_prefix("ready ");
        server.address = address.with_context(|| format!("a server said {line:?}; expected its address"))?.to_owned();
        Ok(server)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It stops when its input closes, with a last checkpoint.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A program that is ended when it takes too long.
pub(super) fn bounded(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.arg(SECONDS_MAX).arg(program);
    command
}

/// Runs programs at once against two servers, which `pserver`, a program and its first arguments, starts. Each must end
/// well, and print an accuracy that is high enough.
pub(super) fn train(pserver: &[OsString], options: &[&str], programs: Vec<Command>) -> Result<()> {
    let first = ServerProcess::start(pserver, options)?;
    let second = [options, &["--index", "1", "--coordinator", &first.address]].concat();
    let second = ServerProcess::start(pserver, &second)?;
    let mut running = Vec::new();
    for mut program in programs {
        program.env("PSERVER_COORDINATOR", &first.address).env("PSERVER_DEADLINE", "60s");
        program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        running.push(program.spawn().context("cannot start a trainer")?);
    }
    // All are waited for before one is judged.
    let outputs: Vec<_> = running.into_iter().map(Child::wait_with_output).collect();
    drop((first, second));
    for output in outputs {
        let output = output.context("cannot wait for a trainer")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("a trainer ended with {}:\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        let found = accuracy(&text).with_context(|| format!("a trainer printed no accuracy:\n{text}"))?;
        ensure!(found > ACCURACY_MIN, "accuracy {found} %; expected more than {ACCURACY_MIN} %:\n{text}");
    }
    Ok(())
}

/// The last accuracy of an output, in percent; it may stand there as a share.
fn accuracy(text: &str) -> Option<f64> {
    let rest = text.rsplit_once("accuracy ")?.1;
    let number: f64 = rest.split_whitespace().next()?.parse().ok()?;
    Some(if number <= 1.0 { number * 100.0 } else { number })
}

#[cfg(test)]
mod tests {
    use super::accuracy;

    #[test]
    fn the_last_accuracy_counts_as_a_share_or_in_percent() {
        let check = |text, expected| assert_eq!(accuracy(text), expected, "{text}");
        check("", None);
        check("epoch 1: accuracy 0.25\nepoch 2: accuracy 0.5\n", Some(50.0));
        check("trainer 0: accuracy 96.9 % on held-out digits\n", Some(96.9));
        check("accuracy unknown", None);
    }
}
