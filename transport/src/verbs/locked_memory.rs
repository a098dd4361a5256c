//! The limit of memory that this process may lock, as registrations do.

use rustix::process::{Resource, getrlimit};

/// The limit of locked memory in bytes, if one applies to this process.
pub(super) fn memory_limit() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let may_lock_all = may_lock_all(&read("/proc/self/status"), &read("/proc/self/uid_map"));
    getrlimit(Resource::Memlock).current.filter(|_| !may_lock_all)
}

/// Whether a process of this status may lock memory beyond its limit (`CAP_IPC_LOCK`). Only the capability in the
/// initial user namespace counts, whose map is the identity.
fn may_lock_all(status: &str, users: &str) -> bool {
    const LOCK: u32 = 14;
    if !users.split_whitespace().eq(["0", "0", "4294967295"]) {
        return false;
    }
    let effective = status.lines().find_map(|connection| connection.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.is_some_and(|capabilities| capabilities >> LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::may_lock_all;

    #[test]
    fn a_process_that_may_lock_all_memory_has_no_limit() {
        let all = "         0          0 4294967295\n";
        let check = |status: &str, users: &str, expected: bool| {
            assert_eq!(may_lock_all(status, users), expected, "{status:?}, {users:?}");
        };
        check("Name:\tpserver\nCapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffffff\n", all, true);
        check("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n", all, false);
        check("CapEff:\t0000000000004000\n", all, true);
        check("CapEff:\t0000000000004000\n", "         0       1000          1\n", false);
        check("CapEff:\t0000000000004000\n", "", false);
        check("CapEff:\t00000000a80425fb\n", all, false);
        check("CapEff:\tnone\n", all, false);
        check("", all, false);
    }
}
