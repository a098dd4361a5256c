//! Descriptors that the program may have closed.
//!
//! A program that becomes a daemon closes every descriptor, including those of this library, and the system reuses
//! their numbers for the next files. Closing such a number again would close a file of the program. A file in memory
//! has an identity, by which its descriptor is distinguished from a later one with the same number.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::Errno;

use super::refused;
use crate::error::Failure;

/// The descriptor of a file in memory. Dropping it closes the file, unless the number belongs to another file by now.
#[derive(Debug)]
pub struct Descriptor {
    /// None only during the drop.
    descriptor: Option<OwnedFd>,
    identity: (u64, u64),
}

impl Descriptor {
    pub(super) fn new(descriptor: OwnedFd) -> Result<Self, Failure> {
        let identity = identity(&descriptor).map_err(|error| refused("looking at a descriptor", &error))?;
        Ok(Self { descriptor: Some(descriptor), identity })
    }

    /// A descriptor that only serves as a witness: when the program has closed it, it has probably closed those that
    /// were made at the same time.
    ///
    /// # Errors
    /// When the process may have no more descriptors.
    pub fn witness() -> Result<Self, Failure> {
        let descriptor = memfd_create("pserver-witness", MemfdFlags::CLOEXEC);
        Self::new(descriptor.map_err(|error| refused("making a descriptor", &error))?)
    }

    /// Whether the number still belongs to this file.
    #[must_use]
    pub fn is_open(&self) -> bool {
        identity(self).is_ok_and(|found| found == self.identity)
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_ref().expect("it is not being dropped").as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if !self.is_open() {
            // The number belongs to another file or to none.
            let _number = self.descriptor.take().map(IntoRawFd::into_raw_fd);
        }
    }
}

fn identity(descriptor: impl AsFd) -> Result<(u64, u64), Errno> {
    fstat(descriptor).map(|found| (found.st_dev, found.st_ino))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_descriptor_number_reused_for_another_file_is_not_closed() {
        let witness = Descriptor::witness().unwrap();
        assert!(witness.is_open());
        // Simulates a program that closes the descriptor and opens a file, which gets its number.
        let own = tempfile::tempfile().unwrap();
        let mut taken = witness.descriptor.as_ref().unwrap().try_clone().unwrap();
        rustix::io::dup2(&own, &mut taken).unwrap();
        let number = taken.as_raw_fd();
        let replaced = Descriptor { descriptor: Some(taken), identity: witness.identity };
        assert!(!replaced.is_open() && witness.is_open());
        drop(replaced);
        assert!(std::fs::metadata(format!("/proc/self/fd/{number}")).unwrap().is_file(), "the program's file is open");
    }
}
