//! Files below a directory of the host, which no path can leave.

use std::io::{self, IoSlice, Write};
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, FileExt};

use super::{Reader, Storage, Writer, parent, total};
use crate::error::Failure;

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
            .map_err(|error| failure("open the storage root", &root.display().to_string(), &error))
    }

    fn sync_one(&self, directory: &str) -> io::Result<()> {
        let directory = if directory.is_empty() { "." } else { directory };
        // Opened as a file: a `Dir` is only a path to the kernel, and a path cannot be synced.
        self.root.open(directory)?.sync_all()
    }
}

impl Storage for Directory {
    fn create(&self, path: &str) -> Result<Box<dyn Writer>, Failure> {
        let file = self.root.create(path).or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            self.root.create_dir_all(parent(path))?;
            self.root.create(path)
        });
        let file = file.map_err(|error| failure("create", path, &error))?;
        Ok(Box::new(writer(path, file)))
    }

    fn open(&self, path: &str) -> Result<Box<dyn Reader>, Failure> {
        let file = self.root.open(path).map_err(|error| failure("open", path, &error))?;
        let metadata = file.metadata().map_err(|error| failure("read the length of", path, &error))?;
        if !metadata.is_file() {
            return Err(Failure::Call(format!("open {path}: it is not a file")));
        }
        Ok(Box::new(FileReader { path: path.to_owned(), file, length: metadata.len() }))
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

impl Writer for FileWriter {
    fn write(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let wanted = total(parts);
        write_all(&mut self.file, parts)
            .map_err(|error| failure(&format!("write {wanted} bytes at {} to", self.position), &self.path, &error))?;
        self.position += wanted;
        Ok(())
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

impl Reader for FileReader {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        self.file
            .read_exact_at(into, offset)
            .map_err(|error| failure(&format!("read {} bytes at {offset} of", into.len()), &self.path, &error))
    }
}

pub(super) fn writer(path: &str, file: File) -> impl Writer + use<> {
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

fn failure(operation: &str, path: &str, error: &io::Error) -> Failure {
    Failure::Call(format!("{operation} {path:?}: {error}"))
}
