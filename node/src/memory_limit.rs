//! Memory limit of this process's control groups: beyond it the kernel ends the process without a word.

use std::path::{Path, PathBuf};

/// A limit and the file that says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    pub(crate) bytes: u64,
    pub(crate) path: PathBuf,
}

/// The lowest limit of this process's control group and those around it in bytes, if there is one; it is logged.
pub(crate) fn memory_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = lowest(&groups, Path::new("/sys/fs/cgroup"), |path| std::fs::read_to_string(path).ok())?;
    tracing::info!("memory limit: {} bytes ({})", limit.bytes, limit.path.display());
    Some(limit.bytes)
}

/// Lines of `/proc/self/cgroup` are `0::/path` of version 2, and `7:memory:/path` of version 1. In a container the path
/// may lead out of what is mounted; then the root is the container's own group.
fn lowest(groups: &str, root: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<MemoryLimit> {
    let of = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        let (base, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            one if one.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        let around = base.join(path).ancestors().map(|folder| folder.join(file)).collect::<Vec<_>>();
        let limits = around.into_iter().filter(|path| path.starts_with(root)).filter_map(|path| {
            // "max", and the number of version 1 that is none, are no limits.
            let bytes = read(&path)?.trim().parse().ok().filter(|bytes| *bytes < 1 << 60)?;
            Some(MemoryLimit { bytes, path })
        });
        limits.min_by_key(|limit| limit.bytes)
    };
    groups.lines().filter_map(of).min_by_key(|limit| limit.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_groups_around_a_process_counts() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "4096\n"),
            ("/sys/fs/cgroup/memory.max", "8192\n"),
            ("/sys/fs/cgroup/memory/j/memory.limit_in_bytes", "2048\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        let read =
            |path: &Path| files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned());
        let check = |groups: &str, expected: Option<(u64, &str)>| {
            let found = lowest(groups, Path::new("/sys/fs/cgroup"), read);
            let expected = expected.map(|(bytes, path)| MemoryLimit { bytes, path: path.into() });
            assert_eq!(found, expected, "{groups}");
        };
        check("0::/a/b\n", Some((4096, "/sys/fs/cgroup/a/memory.max")));
        check("0::/elsewhere\n", Some((8192, "/sys/fs/cgroup/memory.max")));
        check("7:cpu:/j\n5:memory,hugetlb:/j\n", Some((2048, "/sys/fs/cgroup/memory/j/memory.limit_in_bytes")));
        check("5:memory:/\n", None);
        check("", None);
    }
}
