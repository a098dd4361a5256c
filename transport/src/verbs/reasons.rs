//! Errors of devices, and the texts for missing verbs: no library, no device, or too little lockable memory.

use std::io;

use thiserror::Error;

/// An error of a device, or of the system below it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct VerbsError(pub(crate) String);

impl VerbsError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The error that no device is usable, for this reason.
    pub(super) fn no_device(how: impl Into<String>) -> Self {
        Self(text(&UnavailableCause::Device(how.into()), None))
    }
}

/// The cause of missing verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UnavailableCause {
    /// libibverbs cannot be opened; the system's text.
    Library(String),
    /// No device is usable; the reason.
    Device(String),
    /// A registration of so many bytes was refused, with this error number or text.
    Memory { bytes: u64, errno: Option<i32>, said: String },
}

/// ENOSYS: the kernel has no verbs.
const NO_VERBS: i32 = 38;
/// EAGAIN and ENOMEM: the kernel's errors at the limit of locked memory.
const NO_MORE: [i32; 2] = [11, 12];

/// The text for a person. `limit` is the limit of locked memory in bytes; none means no limit.
pub(super) fn text(cause: &UnavailableCause, limit: Option<u64>) -> String {
    match cause {
        UnavailableCause::Library(said) => {
            format!("the library is missing: {said} (rdma-core has it: apt-get install libibverbs1 ibverbs-providers)")
        }
        UnavailableCause::Device(how) => format!("there is no RDMA device: {how} (rdma link show lists them)"),
        UnavailableCause::Memory { bytes, errno, said } => match (errno, limit) {
            (Some(errno), Some(limit)) if NO_MORE.contains(errno) => format!(
                "too little memory may be locked: {bytes} bytes cannot be registered: {said}; the limit for locked \
                 memory is {limit} bytes, which `ulimit -l unlimited` raises for a shell, `LimitMEMLOCK=infinity` for \
                 a service of systemd and `--ulimit memlock=-1` for a container"
            ),
            _ => format!("{bytes} bytes of memory cannot be registered: {said}"),
        },
    }
}

/// The error of listing the devices.
pub(super) fn unlisted(error: &io::Error) -> VerbsError {
    let how = match error.raw_os_error() {
        Some(NO_VERBS) => "the kernel has no support for them".to_owned(),
        _ => format!("they cannot be listed: {error}"),
    };
    VerbsError::no_device(how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_reported_with_its_remedy() {
        let check = |cause: &UnavailableCause, limit: Option<u64>, expected: &[&str], unexpected: &str| {
            let text = text(cause, limit);
            assert!(expected.iter().all(|words| text.contains(words)), "{text}");
            assert!(!text.contains(unexpected), "{text}");
        };
        let library = UnavailableCause::Library("libibverbs.so.1: cannot open shared object file".to_owned());
        let said = ["the library is missing: libibverbs.so.1", "apt-get install libibverbs1"];
        check(&library, Some(65536), &said, "locked");
        let device = UnavailableCause::Device("none has an active port".to_owned());
        check(&device, Some(65536), &["no RDMA device: none has an active port", "rdma link show"], "locked");
        let memory = |errno: Option<i32>| UnavailableCause::Memory { bytes: 4096, errno, said: "no".to_owned() };
        let commands = ["`ulimit -l unlimited`", "`LimitMEMLOCK=infinity`", "`--ulimit memlock=-1`"];
        for errno in NO_MORE {
            check(&memory(Some(errno)), Some(65536), &commands, "library");
            check(&memory(Some(errno)), Some(65536), &["locked: 4096 bytes", "memory is 65536 bytes"], "library");
            check(&memory(Some(errno)), None, &["4096 bytes of memory cannot be registered: no"], "ulimit");
        }
        check(&memory(Some(14)), Some(65536), &["4096 bytes of memory cannot be registered: no"], "ulimit");
        check(&memory(None), Some(65536), &["4096 bytes of memory cannot be registered: no"], "ulimit");
    }

    #[test]
    fn a_kernel_without_verbs_is_a_machine_without_a_device() {
        let check = |errno: i32, expected: &str| {
            let fault = unlisted(&io::Error::from_raw_os_error(errno)).to_string();
            assert!(fault.starts_with("there is no RDMA device: ") && fault.contains(expected), "{fault}");
        };
        check(38, "the kernel has no support for them");
        check(13, "they cannot be listed: Permission denied");
    }
}
