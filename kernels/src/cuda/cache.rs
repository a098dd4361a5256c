//! Compiled rules, kept between runs.
//!
//! A file is named by what it was made of, so it is never out of date, only missing. It is written under another name
//! and renamed, so it is whole; should it not be, its own digest says so, and the rule is compiled again.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The first bytes of a file, and the form they are followed by: a digest of the rest, and the rest.
const BEGINNING: &[u8; 16] = b"pserver cubin 1\n";

/// A folder of compiled rules. What goes wrong with it is said and costs a compilation, nothing more.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// In this folder, which is made when something is kept.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf() }
    }

    /// What was kept under this name.
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

    /// Keeps an image under this name.
    pub(super) fn put(&self, name: &str, image: &[u8]) {
        if let Err(error) = self.write(name, image) {
            tracing::warn!(%error, folder = %self.folder.display(), "a compiled rule cannot be kept");
        }
    }

    fn write(&self, name: &str, image: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        // Two shards, or two servers, may write the same at the same time.
        let own = self.folder.join(format!("{name}.{}-{:?}", std::process::id(), std::thread::current().id()));
        let mut file = fs::File::create(&own)?;
        let written = [BEGINNING, blake3::hash(image).as_bytes().as_slice(), image]
            .iter()
            .try_for_each(|bytes| file.write_all(bytes))
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&own, self.folder.join(name)));
        if written.is_err() {
            // It is of no use to anybody, and harms nobody when it stays.
            let _ = fs::remove_file(&own);
        }
        written
    }
}

/// The image, or nothing when the file is not what was written.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.read_to_end(&mut bytes)?;
    let Some(rest) = bytes.strip_prefix(BEGINNING) else { return Ok(None) };
    let Some((digest, image)) = rest.split_at_checked(blake3::OUT_LEN) else { return Ok(None) };
    Ok((blake3::hash(image).as_bytes() == digest).then(|| image.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::Cache;

    #[test]
    fn what_was_kept_comes_back_and_what_was_damaged_does_not() {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let cache = Cache::new(&folder.path().join("made/when/needed"));
        assert_eq!(cache.get("one"), None);
        cache.put("one", b"an image");
        assert_eq!(cache.get("one").as_deref(), Some(b"an image".as_slice()));
        cache.put("one", b"another");
        assert_eq!(cache.get("one").as_deref(), Some(b"another".as_slice()));
        assert_eq!(cache.get("two"), None);

        let path = folder.path().join("made/when/needed/one");
        let whole = std::fs::read(&path).expect("it is there");
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).expect("it can be written");
            assert_eq!(cache.get("one"), None, "cut at {length}");
        }
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            std::fs::write(&path, damaged).expect("it can be written");
            assert_eq!(cache.get("one"), None, "damaged at {place}");
        }
        let left = std::fs::read_dir(path.parent().expect("it has one")).expect("it can be listed").count();
        assert_eq!(left, 1, "nothing is left behind");
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_cache() {
        let file = tempfile::NamedTempFile::new().expect("there is a file for tests");
        let cache = Cache::new(file.path());
        cache.put("one", b"an image");
        assert_eq!(cache.get("one"), None);
    }
}
