//! Disk cache of compiled rules.
//!
//! A file's name is the digest of its source, so an entry is never stale, only absent. A file is written under a
//! temporary name and renamed; its own digest detects damage, and the rule is then compiled again.
//!
//! The content runs on the device. So the folder must belong to this user and be writable by no other; otherwise it is
//! not used.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The first bytes of a file; a digest of the rest and the rest follow.
const BEGINNING: &[u8; 16] = b"pserver cubin 1\n";

/// A new folder is accessible to its owner only.
const FOLDER_MODE: u32 = 0o700;
/// Mode bits that let other users write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A folder of compiled rules. An error in it is logged and costs a compilation, nothing more.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The cache in this folder, which is created on the first write; none when the folder is not trustworthy.
    pub(super) fn new(folder: &Path) -> Option<Self> {
        match check(folder, rustix::process::geteuid().as_raw()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, folder = %folder.display(), "compiled rules are not cached between runs");
                None
            }
            _ => Some(Self { folder: folder.to_path_buf() }),
        }
    }

    /// The image stored under this name.
    pub(super) fn get(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.folder.join(name);
        match read(&path) {
            Ok(Some(image)) => Some(image),
            Ok(None) => {
                tracing::warn!(path = %path.display(), "a compiled rule is damaged and is compiled again");
                None
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "a compiled rule cannot be read and is compiled again");
                None
            }
        }
    }

    /// Stores an image under this name.
    pub(super) fn put(&self, name: &str, image: &[u8]) {
        if let Err(error) = self.write(name, image) {
            tracing::warn!(%error, folder = %self.folder.display(), "a compiled rule cannot be cached");
        }
    }

    fn write(&self, name: &str, image: &[u8]) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&self.folder)?;
        check(&self.folder, rustix::process::geteuid().as_raw())?;
        // Two shards, or two servers, may write the same image at the same time, each to a temporary file of its own.
        let mut file = tempfile::Builder::new().prefix(name).suffix(".part").tempfile_in(&self.folder)?;
        for bytes in [BEGINNING, blake3::hash(image).as_bytes().as_slice(), image] {
            file.write_all(bytes)?;
        }
        file.as_file().sync_all()?;
        file.persist(self.folder.join(name)).map_err(|error| error.error)?;
        Ok(())
    }
}

/// Checks that this is a folder of user `own` that no other user can write to.
fn check(folder: &Path, own: u32) -> io::Result<()> {
    let found = fs::metadata(folder)?;
    if !found.is_dir() {
        return Err(io::Error::other("it is no folder; expected a folder"));
    }
    if found.uid() != own {
        let text = format!("it is user {}'s; expected a folder of this process's user, {own}", found.uid());
        return Err(io::Error::other(text));
    }
    if found.mode() & WRITABLE_BY_OTHERS != 0 {
        let text = format!("others may write to it, mode {:03o}; expected 700", found.mode() & 0o777);
        return Err(io::Error::other(text));
    }
    Ok(())
}

/// The image; none when the file is damaged.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.read_to_end(&mut bytes)?;
    let Some(rest) = bytes.strip_prefix(BEGINNING) else { return Ok(None) };
    let Some((digest, image)) = rest.split_at_checked(blake3::OUT_LEN) else { return Ok(None) };
    Ok((blake3::hash(image).as_bytes() == digest).then(|| image.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::{Cache, check};

    #[test]
    fn cached_images_are_returned_and_damaged_ones_are_not() {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let cache = Cache::new(&folder.path().join("made/when/needed")).expect("nothing is there yet");
        assert_eq!(cache.get("one"), None);
        cache.put("one", b"an image");
        assert_eq!(cache.get("one").as_deref(), Some(b"an image".as_slice()));
        cache.put("one", b"another");
        assert_eq!(cache.get("one").as_deref(), Some(b"another".as_slice()));
        assert_eq!(cache.get("two"), None);

        let path = folder.path().join("made/when/needed/one");
        let whole = fs::read(&path).expect("it is there");
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).expect("it can be written");
            assert_eq!(cache.get("one"), None, "cut at {length}");
        }
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            fs::write(&path, damaged).expect("it can be written");
            assert_eq!(cache.get("one"), None, "damaged at {place}");
        }
        let mode = |path: &std::path::Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
        assert_eq!((mode(path.parent().expect("it has one")), mode(&path)), (0o700, 0o600));
        let left = fs::read_dir(path.parent().expect("it has one")).expect("it can be listed").count();
        assert_eq!(left, 1, "nothing is left behind");
    }

    #[test]
    fn a_folder_that_others_may_write_is_not_used_as_cache() {
        let file = tempfile::NamedTempFile::new().expect("there is a file for tests");
        assert!(Cache::new(file.path()).is_none(), "it is a file");

        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let cache = Cache::new(folder.path()).expect("it is ours");
        cache.put("one", b"an image");
        for mode in [0o720, 0o702, 0o777] {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).expect("it is ours");
            assert!(Cache::new(folder.path()).is_none(), "mode {mode:o}");
            cache.put("two", b"an image");
            assert_eq!(cache.get("two"), None, "nothing is kept where others write");
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
        assert_eq!(Cache::new(folder.path()).expect("others only read").get("one").as_deref(), Some(&b"an image"[..]));
        let refused = check(folder.path(), u32::MAX).expect_err("it is of another user").to_string();
        assert!(refused.ends_with("expected a folder of this process's user, 4294967295"), "{refused}");
    }
}
