//! Why there are no verbs, in words: the library is missing, there is no device, or too little memory may be locked.

use std::io;

use super::provider::Fault;

/// Which of the reasons it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// libibverbs is not there, or not as a library that opens; what the system said.
    Library(String),
    /// There is no device that can be used, and in which way not.
    Device(String),
    /// So much memory was refused, with this error number or these words.
    Memory { bytes: u64, errno: Option<i32>, said: String },
}

/// ENOSYS: the kernel has no verbs.
const NO_VERBS: i32 = 38;
/// EAGAIN and ENOMEM: how kernels say that no more may be locked.
const NO_MORE: [i32; 2] = [11, 12];

/// What to tell somebody who has no verbs, and may lock at most `limit` bytes of memory; none is no limit.
pub(super) fn text(cause: &Cause, limit: Option<u64>) -> String {
    match cause {
        Cause::Library(said) => {
            format!("the library is missing: {said} (rdma-core has it: apt-get install libibverbs1 ibverbs-providers)")
        }
        Cause::Device(how) => format!("there is no RDMA device: {how} (rdma link show lists them)"),
        Cause::Memory { bytes, errno, said } => match (errno, limit) {
            (Some(errno), Some(limit)) if NO_MORE.contains(errno) => format!(
                "too little memory may be locked: {bytes} bytes cannot be registered: {said}; the limit for locked \
                 memory is {limit} bytes, which `ulimit -l unlimited` raises for a shell, `LimitMEMLOCK=infinity` for \
                 a service of systemd and `--ulimit memlock=-1` for a container"
            ),
            _ => format!("{bytes} bytes of memory cannot be registered: {said}"),
        },
    }
}

/// What it means that devices cannot be listed.
pub(super) fn unlisted(error: &io::Error) -> Fault {
    let how = match error.raw_os_error() {
        Some(NO_VERBS) => "the kernel has no support for them".to_owned(),
        _ => format!("they cannot be listed: {error}"),
    };
    Fault::no_device(how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_said_with_what_can_be_done() {
        let check = |cause: &Cause, limit: Option<u64>, expected: &[&str], unexpected: &str| {
            let text = text(cause, limit);
            assert!(expected.iter().all(|words| text.contains(words)), "{text}");
            assert!(!text.contains(unexpected), "{text}");
        };
        let library = Cause::Library("libibverbs.so.1: cannot open shared object file".to_owned());
        let said = ["the library is missing: libibverbs.so.1", "apt-get install libibverbs1"];
        check(&library, Some(65536), &said, "locked");
        let device = Cause::Device("none has an active port".to_owned());
        check(&device, Some(65536), &["no RDMA device: none has an active port", "rdma link show"], "locked");
        let memory = |errno: Option<i32>| Cause::Memory { bytes: 4096, errno, said: "no".to_owned() };
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
