//! The initial file system of a guest, in the archive format that the kernel unpacks (cpio, "newc").
//!
//! Not here: which files, see [`mod@super::furnish`].

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::debian::succeed;

/// Files by their paths in the guest, without the leading `/`.
#[derive(Default)]
pub(super) struct Image {
    entries: BTreeMap<String, CpioEntry>,
}

enum CpioEntry {
    Folder,
    /// Everything is executable: it costs nothing, and nobody forgets it.
    File(Vec<u8>),
    Link(String),
    /// A character device, by its two numbers.
    Device(u32, u32),
}

impl Image {
    pub(super) fn folder(&mut self, path: &str) {
        self.insert(path, CpioEntry::Folder);
    }

    pub(super) fn bytes(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.insert(path, CpioEntry::File(bytes.into()));
    }

    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.insert(path, CpioEntry::Link(target.to_owned()));
    }

    /// The devices of the first process before it has mounted a file system: a console and an empty input.
    pub(super) fn devices(&mut self) {
        self.insert("dev/console", CpioEntry::Device(5, 1));
        self.insert("dev/null", CpioEntry::Device(1, 3));
    }

    pub(super) fn file(&mut self, path: &str, source: &Path) -> Result<()> {
        let bytes = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        self.bytes(path, bytes);
        Ok(())
    }

    /// A program and the libraries that it is linked with, looked for in `libraries` before this machine's own.
    pub(super) fn program(&mut self, path: &str, source: &Path, libraries: &[PathBuf]) -> Result<()> {
        self.file(path, source)?;
        let search = std::env::join_paths(libraries).context("a library's folder has a colon in its name")?;
        let listing = succeed(Command::new("ldd").arg(source).env("LD_LIBRARY_PATH", search))?;
        for library in libraries_of(&listing).with_context(|| format!("{}", source.display()))? {
            let name = library.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let folder = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
            self.file(&format!("{folder}/{name}"), &library)?;
        }
        Ok(())
    }

    /// The archive.
    pub(super) fn archive(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        for (number, (path, entry)) in self.entries.iter().enumerate() {
            let (mode, bytes, device) = match entry {
                CpioEntry::Folder => (0o040_755, &[][..], (0, 0)),
                CpioEntry::File(bytes) => (0o100_755, &bytes[..], (0, 0)),
                CpioEntry::Link(target) => (0o120_777, target.as_bytes(), (0, 0)),
                CpioEntry::Device(major, minor) => (0o020_666, &[][..], (*major, *minor)),
            };
            append(&mut archive, number + 1, path, &CpioFile { mode, device, bytes });
        }
        append(&mut archive, 0, "TRAILER!!!", &CpioFile { mode: 0, device: (0, 0), bytes: &[] });
        archive
    }

    fn insert(&mut self, path: &str, entry: CpioEntry) {
        for (at, _) in path.match_indices('/') {
            self.entries.entry(path[..at].to_owned()).or_insert(CpioEntry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
    }
}

/// The part of an entry behind its path.
struct CpioFile<'a> {
    /// Type and permissions, as `stat` has them.
    mode: u32,
    /// The two numbers of a character device.
    device: (u32, u32),
    bytes: &'a [u8],
}

/// One entry: thirteen numbers of eight hexadecimal digits, the name with a zero, the bytes; both filled up to fours.
fn append(archive: &mut Vec<u8>, number: usize, path: &str, file: &CpioFile<'_>) {
    let CpioFile { mode, device: (major, minor), bytes } = *file;
    let fill = |archive: &mut Vec<u8>| archive.resize(archive.len().next_multiple_of(4), 0);
    let (size, name) = (bytes.len(), path.len() + 1);
    archive.extend(format!("070701{number:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}", 0, 1).bytes());
    archive.extend(format!("{size:08x}{0:08x}{0:08x}{major:08x}{minor:08x}{name:08x}{0:08x}{path}\0", 0).bytes());
    fill(archive);
    archive.extend(bytes);
    fill(archive);
}

/// The files in what `ldd` says; none for a program that is linked with nothing.
fn libraries_of(listing: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in listing.lines().map(str::trim) {
        let found = line.split_once("=> ").map_or(line, |(_, found)| found);
        if found.starts_with("not found") {
            bail!("needs {}, which no package that is unpacked has", line.split(' ').next().unwrap_or(line));
        }
        if let Some((file, _)) = found.split_once(" (0x")
            && file.starts_with('/')
        {
            libraries.push(PathBuf::from(file));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Path, mode and bytes of every entry, read as the kernel reads them.
    fn read(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        while !archive.is_empty() {
            let field = |index: usize| {
                let digits = std::str::from_utf8(&archive[6 + 8 * index..][..8]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6) as usize, field(11) as usize);
            assert_eq!(&archive[..6], b"070701");
            assert_eq!(archive[110 + name - 1], 0, "a name ends with a zero");
            let path = String::from_utf8(archive[110..110 + name - 1].to_vec()).unwrap();
            let data = (110 + name).next_multiple_of(4);
            entries.push((path, mode, archive[data..data + size].to_vec()));
            archive = &archive[(data + size).next_multiple_of(4)..];
        }
        entries
    }

    #[test]
    fn an_archive_is_what_the_kernel_reads() {
        let mut image = Image::default();
        image.bytes("a/b/five", "five!");
        image.link("a/link", "b/five");
        image.devices();
        let read = read(&image.archive());
        let entry = |path: &str, mode: u32, bytes: &[u8]| (path.to_owned(), mode, bytes.to_vec());
        let expected = [
            entry("a", 0o040_755, b""),
            entry("a/b", 0o040_755, b""),
            entry("a/b/five", 0o100_755, b"five!"),
            entry("a/link", 0o120_777, b"b/five"),
            entry("dev", 0o040_755, b""),
            entry("dev/console", 0o020_666, b""),
            entry("dev/null", 0o020_666, b""),
            entry("TRAILER!!!", 0, b""),
        ];
        assert_eq!(read, expected, "a folder comes before what is in it");
    }

    #[test]
    fn a_library_that_is_missing_is_named() {
        let listing = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld-linux.so.2 (0x7f)\n";
        assert_eq!(libraries_of(listing).unwrap(), [Path::new("/lib/libc.so.6"), Path::new("/lib64/ld-linux.so.2")]);
        assert!(libraries_of("\tstatically linked\n").unwrap().is_empty());
        let error = libraries_of("\tlibpci.so.3 => not found\n").unwrap_err();
        assert_eq!(error.to_string(), "needs libpci.so.3, which no package that is unpacked has");
    }
}
