//! Files whose content is read again once they change: certificates, keys and tokens.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::error::Failure;

/// Files are looked at no more often.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A value that is read from files, and read again when one of them changes. Where the new content is wrong, the value
/// stays, and a warning says why. Once a file is gone, or is of another owner, the value stays for good: its name may
/// be another user's by then, as that of a file for a while in `/tmp`.
pub(crate) struct ReloadedFiles<T> {
    paths: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T, Failure> + Send + Sync>,
    state: Mutex<ReloadState<T>>,
}

struct ReloadState<T> {
    value: Arc<T>,
    /// Of the files when they were last read.
    stamps: Vec<Option<FileStamp>>,
    looked_at: Instant,
    /// Whether files are looked at.
    is_followed: bool,
}

/// Facts that change with a file's content: a rename brings another inode, a write another time or length.
#[derive(Clone, Copy, PartialEq)]
struct FileStamp {
    modified: (i64, i64),
    length: u64,
    inode: u64,
    owner: u32,
}

impl<T> ReloadedFiles<T> {
    /// The value that `read` makes of these files, which is `first` now if it is given.
    ///
    /// # Errors
    /// As `read`.
    pub(crate) fn open(
        paths: Vec<PathBuf>,
        first: Option<T>,
        read: impl Fn() -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<Self, Failure> {
        // The stamps are taken first: a change while the files are read is found later.
        let stamps = stamps(&paths);
        let value = Arc::new(first.map_or_else(&read, Ok)?);
        let is_followed = !paths.is_empty();
        let state = Mutex::new(ReloadState { value, stamps, looked_at: Instant::now(), is_followed });
        Ok(Self { paths, read: Box::new(read), state })
    }

    /// The value of the files as they are now, or were within the last second.
    pub(crate) fn current(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_followed || state.looked_at.elapsed() < LOOK_INTERVAL {
            return Arc::clone(&state.value);
        }
        state.looked_at = Instant::now();
        let found = stamps(&self.paths);
        state.is_followed = found.iter().zip(&state.stamps).all(|(now, before)| is_same_owners(*now, *before));
        if !state.is_followed {
            tracing::debug!(files = %self.names(), "a file is gone, or another user's: what it had stays in use");
        } else if found != state.stamps {
            state.stamps = found;
            match (self.read)() {
                Ok(value) => {
                    tracing::info!(files = %self.names(), "read again, because a file has changed");
                    state.value = Arc::new(value);
                }
                Err(failure) => tracing::warn!("a file has changed, and what it had before stays in use: {failure}"),
            }
        }
        Arc::clone(&state.value)
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.paths.iter().map(|path| path.display().to_string()).collect();
        names.join(", ")
    }
}

/// Whether a file is there, and of the owner that it had; one that was never there has none.
fn is_same_owners(now: Option<FileStamp>, before: Option<FileStamp>) -> bool {
    now.is_some_and(|now| before.is_some_and(|before| now.owner == before.owner))
}

fn stamps(paths: &[PathBuf]) -> Vec<Option<FileStamp>> {
    let stamp = |path: &PathBuf| {
        let facts = fs::metadata(path).ok()?;
        let modified = (facts.mtime(), facts.mtime_nsec());
        Some(FileStamp { modified, length: facts.len(), inode: facts.ino(), owner: facts.uid() })
    };
    paths.iter().map(stamp).collect()
}
