//! Token file of a server on loopback. Only its user can read it, and that user's clients find it by the server's
//! address; other local users are refused.
//!
//! The file is named after the address, in a directory of the user: `/run/user/UID/pserver` where the system has
//! `/run/user/UID`, else `/tmp/pserver-UID`. Directory and file must belong to the user, be closed to all others, and
//! not be links, because every user can create names in `/tmp`. A running server holds a lock on its file. A file
//! without a lock is left from a killed server and authenticates nothing.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use pserver_core::error::Failure;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, mkdirat, openat, renameat, unlinkat};
use rustix::process::geteuid;

use super::token::JobToken;

/// Random bytes of a token, written as twice as many hexadecimal digits.
const RANDOM_BYTES: usize = 32;
/// The bytes of a file that are read at most.
const FILE_BYTES_MAX: u64 = 4096;
/// A client that tests the lock holds it for a moment, so a server tries several times, at this interval.
const TRIES: u32 = 100;
const TRY_AGAIN: Duration = Duration::from_millis(10);
/// The mode bits of group and others, which must be clear.
const OTHERS: u32 = 0o077;

/// The token file of a running server. Dropping it removes the file.
#[derive(Debug)]
pub(super) struct LocalToken {
    folder: OwnedFd,
    name: String,
    _lock: File,
}

/// The token and the locked file for a server at this loopback address. An earlier server's token is reused, so that
/// its clients remain valid.
///
/// # Errors
/// The reason why the file cannot be had, and the alternatives.
pub(super) fn keep(at: SocketAddr) -> Result<(JobToken, LocalToken), Failure> {
    let failed = |path: &Path, error: &io::Error| {
        Failure::Node(format!(
            "the token for clients of this user in {}: {error}; expected a folder of this user that is closed to \
             others, or --token-file, or --insecure to let every local user join",
            path.display()
        ))
    };
    let path = folders().into_iter().next().expect("there is always one");
    let folder = open_folder(&path, true).map_err(|error| failed(&path, &error))?;
    let name = name_of(at);
    let kept = match read(&folder, &name) {
        Some((token, file)) => hold(&file).map(|()| (token, file)),
        None => write_new(&folder, &name),
    };
    let (token, file) = kept.map_err(|error| failed(&path, &error))?;
    Ok((token, LocalToken { folder, name, _lock: file }))
}

/// Locks the file of a running server.
fn hold(file: &File) -> io::Result<()> {
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => sleep(TRY_AGAIN),
            // The file system has no locks: clients accept any file.
            Err(TryLockError::Error(_)) => return Ok(()),
        }
    }
    Err(io::Error::other("another server at this address holds it"))
}

/// Whether a running server holds the file.
fn is_held(file: &File) -> bool {
    file.try_lock_shared().is_err()
}

/// Removes the file of an earlier server at this address, because the current one has another token or none.
pub(super) fn forget(at: SocketAddr) {
    for folder in folders().iter().filter_map(|path| open_folder(path, false).ok()) {
        // Usually there is no file.
        let _ = unlinkat(&folder, name_of(at), AtFlags::empty());
    }
}

/// The token of the running server at this address, if the address is loopback and this user has a file for it.
pub(super) fn find(at: SocketAddr) -> Option<JobToken> {
    if !at.ip().to_canonical().is_loopback() {
        return None;
    }
    let folders = folders();
    let found = folders.iter().find_map(|path| read(&open_folder(path, false).ok()?, &name_of(at)));
    found.filter(|(_, file)| is_held(file)).map(|(token, _)| token)
}

impl Drop for LocalToken {
    fn drop(&mut self) {
        // The next server at this address reuses or removes a file that stays.
        let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
    }
}

/// Candidate directories, in order of preference.
fn folders() -> Vec<PathBuf> {
    let user = geteuid().as_raw();
    let run = PathBuf::from(format!("/run/user/{user}"));
    let in_run = open_folder(&run, false).is_ok().then(|| run.join("pserver"));
    in_run.into_iter().chain([PathBuf::from(format!("/tmp/pserver-{user}"))]).collect()
}

fn name_of(at: SocketAddr) -> String {
    format!("{}-{}.token", at.ip().to_canonical(), at.port())
}

/// Opens a directory that belongs to this user alone.
fn open_folder(path: &Path, makes: bool) -> io::Result<OwnedFd> {
    if makes {
        match mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let folder = openat(CWD, path, flags, Mode::empty())?;
    check(&folder, FileType::Directory)?;
    Ok(folder)
}

/// Checks that a descriptor's file is of the expected type, belongs to this user, and is closed to others.
fn check(opened: &OwnedFd, expected: FileType) -> io::Result<()> {
    let facts = fstat(opened)?;
    let user = geteuid().as_raw();
    let wrong = if FileType::from_raw_mode(facts.st_mode) != expected {
        format!("it is a {:?}; expected a {expected:?}", FileType::from_raw_mode(facts.st_mode))
    } else if facts.st_uid != user {
        format!("it belongs to user {}; expected user {user}", facts.st_uid)
    } else if facts.st_mode & OTHERS != 0 {
        format!("its mode is {:03o}; expected nothing for others", facts.st_mode & 0o777)
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, wrong))
}

/// A file and its token; nothing unless it is well-formed, belongs to this user, and is closed to others.
fn read(folder: &OwnedFd, name: &str) -> Option<(JobToken, File)> {
    // Opening a pipe of that name must not block.
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY | OFlags::NONBLOCK;
    let file = openat(folder, name, flags, Mode::empty()).ok()?;
    check(&file, FileType::RegularFile).ok()?;
    let (file, mut secret) = (File::from(file), Vec::new());
    (&file).take(FILE_BYTES_MAX).read_to_end(&mut secret).ok()?;
    Some((JobToken::new(&secret).ok()?, file))
}

/// Replaces the file by one with a new token.
fn write_new(folder: &OwnedFd, name: &str) -> io::Result<(JobToken, File)> {
    let mut random = [0; RANDOM_BYTES];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let secret: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let fresh = format!("{name}.{}", std::process::id());
    // A file of an earlier process with this number.
    let _ = unlinkat(folder, &fresh, AtFlags::empty());
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::WRONLY;
    let mut file = File::from(openat(folder, &fresh, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(secret.as_bytes())?;
    hold(&file)?;
    renameat(folder, &fresh, folder, name)?;
    let token = JobToken::new(secret.as_bytes()).map_err(|failure| io::Error::other(failure.to_string()))?;
    Ok((token, file))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::time::Instant;

    use pserver_core::wire::Address;

    use super::super::NetworkOptions;
    use super::super::listener::Listener;
    use super::*;

    /// Addresses without a server: port 1 needs privileges.
    fn place(last: u8) -> (SocketAddr, PathBuf) {
        let at = SocketAddr::from(([127, 77, 77, last], 1));
        let folder = folders().into_iter().next().expect("there is one");
        (at, folder.join(name_of(at)))
    }

    #[test]
    fn a_server_leaves_a_token_for_its_user_and_takes_it_away() {
        let (at, path) = place(1);
        let (token, file) = keep(at).expect("the folder can be made");
        assert_eq!(path.metadata().expect("it is there").permissions().mode() & 0o777, 0o600);
        assert!(find(at) == Some(token.clone()), "a client has the same one");
        assert!(find(SocketAddr::from(([192, 0, 2, 1], 1))).is_none(), "it is for loopback alone");
        // A killed server leaves its token for the next one, and clients do not accept it until then.
        file._lock.unlock().expect("it is locked");
        std::mem::forget(file);
        assert!(find(at).is_none() && path.exists(), "no server is there");
        let (again, file) = keep(at).expect("it is there");
        assert!(again == token, "its clients know the next server");
        drop(file);
        assert!(find(at).is_none() && !path.exists());
    }

    #[test]
    fn a_server_that_starts_again_holds_its_token_before_clients_can_connect() {
        let free = TcpListener::bind("127.77.77.4:0").and_then(|one| one.local_addr()).expect("a port is free");
        let (token, file) = keep(free).expect("the folder can be made");
        file._lock.unlock().expect("it is locked");
        std::mem::forget(file);
        let path = folders().into_iter().next().expect("there is one").join(name_of(free));
        // As a client that tests the lock, for longer.
        let tested = File::open(&path).expect("a killed server left it");
        tested.lock_shared().expect("no server holds it");
        let address = Address::parse(&format!("tcp://{free}")).expect("it is an address");
        let options = NetworkOptions { local_token: true, ..NetworkOptions::default() };
        let server = std::thread::spawn(move || Listener::bind(&address, options));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(300) {
            assert!(TcpStream::connect(free).is_err(), "a client would find no token");
        }
        tested.unlock().expect("it was locked");
        let _listener = server.join().expect("it does not panic").expect("the port is free");
        assert!(find(free) == Some(token) && TcpStream::connect(free).is_ok());
    }

    #[test]
    fn a_file_that_others_could_have_made_is_no_token() {
        let (at, path) = place(2);
        let (token, file) = keep(at).expect("the folder can be made");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("it is ours");
        assert!(find(at).is_none(), "others could read it");
        let (other, _file) = keep(at).expect("a new one takes its place");
        assert!(other != token);
        let target = path.with_extension("target");
        std::fs::rename(&path, &target).expect("it is there");
        symlink(&target, &path).expect("a link can be made");
        assert!(find(at).is_none(), "a link is not followed");
        std::fs::remove_file(&target).expect("it is there");
        forget(at);
        assert!(path.symlink_metadata().is_err());
        drop(file);
    }
}
