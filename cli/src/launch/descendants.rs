//! Processes below this one, however deep: none is left behind.
//!
//! A subreaper becomes the parent of every descendant whose own parent ended. A child that was not waited for keeps its
//! number, so a signal to it reaches no stranger.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::process::{getpid, set_child_subreaper};

/// Period at which ending children are looked for.
pub(super) const POLL_PERIOD: Duration = Duration::from_millis(10);

/// This process as the parent of all descendants without another.
pub(super) struct Descendants {
    /// Children of the program that became this process: not ours to end.
    foreign: BTreeSet<i32>,
}

impl Descendants {
    /// Makes this process the subreaper. To be called before it has children.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn adopt() -> io::Result<Self> {
        set_child_subreaper(Some(getpid()))?;
        Ok(Self { foreign: children() })
    }

    /// The present children, ended or not.
    pub(super) fn present(&self) -> BTreeSet<i32> {
        children().difference(&self.foreign).copied().collect()
    }

    pub(super) fn signal(&self, signal: Signal) {
        for child in self.present() {
            // A child that has ended takes no harm.
            let _ = kill(Pid::from_raw(child), signal);
        }
    }

    /// Kills children until none is left; those of a killed child become children in their turn.
    pub(super) fn kill_all(&self) {
        while !self.present().is_empty() {
            self.signal(Signal::SIGKILL);
            while matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(status) if status != WaitStatus::StillAlive) {}
            std::thread::sleep(POLL_PERIOD);
        }
    }
}

/// The children of this process that have ended since the last call.
pub(super) fn ended() -> Vec<(Pid, WaitStatus)> {
    std::iter::from_fn(|| {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(status) => return status.pid().map(|pid| (pid, status)),
                Err(Errno::EINTR) => {}
                Err(_) => return None,
            }
        }
    })
    .collect()
}

/// Children of this process by number, from the kernel's table of processes.
fn children() -> BTreeSet<i32> {
    let own = getpid().as_raw_nonzero().get();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|process| parent(*process) == Some(own)).collect()
}

/// The parent of a process: the second field behind its name, which may have brackets and blanks.
fn parent(process: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}
