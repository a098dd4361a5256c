//! Files below a directory of the host, which no path can leave.

use std::fs::TryLockError;
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, FileExt, OpenOptions};
use rustix::fs::fstatvfs;
use rustix::io::Errno;

use super::{Storage, StorageReader, StorageWriter, join, parent, total};
use crate::error::Failure;

/// The file of a directory's lock.
pub const LOCK: &str = "lock";

/// The result of an attempt to lock a directory.
pub enum LockOutcome {
    /// This process holds the lock.
    Ours(Lock),
    /// A process that lives holds it; its record is in the file at `path`.
    ByAnother {
        /// Below the root.
        path: String,
    },
    /// The file system has no locks.
    Unsupported {
        /// The system's error.
        reason: String,
    },
}

/// The lock of a directory, until it is dropped or the process ends.
pub struct Lock {
    _file: std::fs::File,
}

/// Files below one directory. `..`, absolute paths and symbolic links cannot lead out of it.
pub struct Directory {
    root: Dir,
}

impl Directory {
    /// Opens the root, and creates it when it is not there.
    pub fn open(root: impl AsRef<Path>) -> Result<Self, Failure> {
        let root = root.as_ref();
        Dir::create_ambient_dir_all(root, ambient_authority())
            .and_then(|()| Dir::open_ambient_dir(root, ambient_authority()))
            .map(|root| Self { root })
            .map_err(|error| failure("make or open the folder", &root.display().to_string(), &error))
    }

    /// Opens a file for writing, and creates the directories above it.
    fn open_new(&self, path: &str, options: &OpenOptions) -> io::Result<File> {
        self.root.open_with(path, options).or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            self.root.create_dir_all(parent(path))?;
            self.root.open_with(path, options)
        })
    }

    /// A new file with a lock on it, which ends with the file's last descriptor, also when the process is killed.
    fn open_owned(&self, path: &str) -> io::Result<File> {
        loop {
            let file = self.open_new(path, OpenOptions::new().write(true).create_new(true))?.into_std();
            match file.lock() {
                // Between the two steps another process may have taken it for abandoned and removed it.
                Ok(()) if file.metadata()?.nlink() == 0 => {}
                Ok(()) => return Ok(File::from_std(file)),
                // A file system without locks: no process can tell that the file is abandoned, so none removes it.
                Err(error) if has_no_locks(&error) => return Ok(File::from_std(file)),
                Err(error) => return Err(error),
            }
        }
    }

    fn remove_unlocked(&self, path: &str) -> io::Result<bool> {
        // Some file systems give the lock to writers only.
        let file = self.root.open_with(path, OpenOptions::new().write(true))?.into_std();
        match file.try_lock() {
            // Removed under the lock, so that no writer takes the file for its own meanwhile.
            Ok(()) => self.root.remove_file(path).map(|()| true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) if has_no_locks(&error) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Takes the lock of a directory for this process, which holds it as long as it lives and the lock is not dropped.
    /// `record` is what another process reads that finds it taken.
    ///
    /// # Errors
    /// When the storage refuses to create the lock's file.
    pub fn lock(&self, directory: &str, record: &[u8]) -> Result<LockOutcome, Failure> {
        let path = join(directory, LOCK);
        let refused = |error: io::Error| failure("lock", &path, &error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        self.root.create_dir_all(directory).map_err(refused)?;
        let file = self.root.open_with(&path, &options).map_err(refused)?.into_std();
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(LockOutcome::ByAnother { path }),
            Err(TryLockError::Error(error)) => return Ok(LockOutcome::Unsupported { reason: error.to_string() }),
        }
        // Written after it was taken: the text is that of the process that holds the lock.
        let written = file.set_len(0).and_then(|()| (&file).write_all(record));
        written.map_err(refused)?;
        Ok(LockOutcome::Ours(Lock { _file: file }))
    }

    /// Whether a process that lives holds the lock of a directory. Where no lock's file is, none is made.
    #[must_use]
    pub fn is_locked(&self, directory: &str) -> bool {
        // A shared lock needs a file that is open for reading only, and is gone with it.
        let file = self.root.open(join(directory, LOCK)).map(File::into_std);
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Opens a file for reading; none when it does not exist.
    fn opened(&self, path: &str) -> Result<Option<File>, Failure> {
        match self.root.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(|error| failure("open", path, &error)),
        }
    }

    fn sync_one(&self, directory: &str) -> io::Result<()> {
        let directory = if directory.is_empty() { "." } else { directory };
        // Opened as a file: a `Dir` is only a path to the kernel, and a path cannot be synced.
        self.root.open(directory)?.sync_all()
    }
}

impl Storage for Directory {
    fn free(&self) -> Option<u64> {
        let found = fstatvfs(&self.root).ok()?;
        // Some file systems do not know.
        (found.f_blocks > 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn create(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        let file = self.open_new(path, OpenOptions::new().write(true).create_new(true));
        Ok(Box::new(writer(path, file.map_err(|error| failure("create", path, &error))?)))
    }

    fn create_owned(&self, path: &str) -> Result<Box<dyn StorageWriter>, Failure> {
        let file = self.open_owned(path).map_err(|error| failure("create", path, &error))?;
        Ok(Box::new(writer(path, file)))
    }

    fn remove_abandoned(&self, path: &str) -> Result<bool, Failure> {
        match self.remove_unlocked(path) {
            // It has its final name by now, or another process has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.map_err(|error| failure("remove the abandoned file", path, &error)),
        }
    }

    fn find(&self, path: &str) -> Result<Option<Box<dyn StorageReader>>, Failure> {
        let Some(file) = self.opened(path)? else { return Ok(None) };
        let metadata = file.metadata().map_err(|error| failure("read the length of", path, &error))?;
        if !metadata.is_file() {
            return Err(Failure::Call(format!("open {path}: it is not a file")));
        }
        Ok(Some(Box::new(FileReader { path: path.to_owned(), file, length: metadata.len() })))
    }

    // A network file system asks its server for an open, and answers a look at a name from what it remembers.
    fn exists(&self, path: &str) -> Result<bool, Failure> {
        Ok(self.opened(path)?.is_some())
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Failure> {
        self.root.rename(from, &self.root, to).map_err(|error| failure("rename", &format!("{from} to {to}"), &error))
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        self.root.remove_file(path).map_err(|error| failure("remove", path, &error))
    }

    fn list(&self, directory: &str) -> Result<Vec<String>, Failure> {
        let refused = |error: io::Error| failure("list", directory, &error);
        let entries = match self.root.read_dir(if directory.is_empty() { "." } else { directory }) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(refused(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry.map_err(refused)?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn sync(&self, path: &str) -> Result<(), Failure> {
        let synced = self.root.open(path).and_then(|file| file.sync_data());
        synced.map_err(|error| failure("sync", path, &error))
    }

    fn sync_directory(&self, directory: &str) -> Result<(), Failure> {
        let mut at = directory;
        loop {
            self.sync_one(at).map_err(|error| failure("sync directory", at, &error))?;
            if at.is_empty() {
                return Ok(());
            }
            at = parent(at);
        }
    }
}

struct FileWriter {
    path: String,
    file: File,
    position: u64,
}

impl StorageWriter for FileWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let wanted = total(parts);
        write_all(&mut self.file, parts)
            .map_err(|error| failure(&format!("write {wanted} bytes at {} to", self.position), &self.path, &error))?;
        self.position += wanted;
        Ok(())
    }

    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|error| failure(&format!("write {} bytes at {offset} to", bytes.len()), &self.path, &error))
    }

    fn sync(&mut self) -> Result<(), Failure> {
        self.file.sync_data().map_err(|error| failure("sync", &self.path, &error))
    }

    fn position(&self) -> u64 {
        self.position
    }
}

struct FileReader {
    path: String,
    file: File,
    length: u64,
}

impl StorageReader for FileReader {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        self.file
            .read_exact_at(into, offset)
            .map_err(|error| failure(&format!("read {} bytes at {offset} of", into.len()), &self.path, &error))
    }
}

pub(super) fn writer(path: &str, file: File) -> impl StorageWriter + use<> {
    FileWriter { path: path.to_owned(), file, position: 0 }
}

fn write_all(file: &mut File, parts: &[&[u8]]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = slices.as_mut_slice();
    // Empty parts at the front would make a write of nothing look like a full disk.
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether a lock was refused because the file system has none.
fn has_no_locks(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL))
}

fn failure(operation: &str, path: &str, error: &io::Error) -> Failure {
    Failure::Call(format!("{operation} {path:?}: {error}"))
}
