//! Distance of a card from the processors of this process.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

/// Whether the card of this folder of sysfs is of the one NUMA node whose processors this process has. A process that
/// has those of several nodes is near to all cards and to none.
pub(super) fn is_near(card: &Path) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let own = own_node(&status, Path::new("/sys/devices/system/node"));
    let of_card = fs::read_to_string(card.join("device/numa_node")).ok().and_then(|text| text.trim().parse().ok());
    own.is_some() && own == of_card
}

/// The node of all processors that a process of this status may have, if it is one of several.
fn own_node(status: &str, nodes: &Path) -> Option<u32> {
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed = ranges(allowed);
    let (mut count, mut own) = (0, Vec::new());
    for entry in fs::read_dir(nodes).ok()?.flatten() {
        let name = entry.file_name();
        let Some(node) = name.to_str().and_then(|name| name.strip_prefix("node")?.parse::<u32>().ok()) else {
            continue;
        };
        count += 1;
        let processors = ranges(&fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default());
        let meet = |one: &RangeInclusive<u32>| {
            allowed.iter().any(|other| one.start() <= other.end() && other.start() <= one.end())
        };
        if processors.iter().any(meet) {
            own.push(node);
        }
    }
    match own[..] {
        [node] if 1 < count => Some(node),
        _ => None,
    }
}

/// The ranges of a list such as `0-3,8`.
fn ranges(list: &str) -> Vec<RangeInclusive<u32>> {
    let range = |one: &str| {
        let (first, last) = one.split_once('-').unwrap_or((one, one));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_one_of_several_nodes_has_that_one() {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let add = |node: &str, list: &str| {
            fs::create_dir(folder.path().join(node)).expect("it is new");
            fs::write(folder.path().join(node).join("cpulist"), list).expect("it can be written");
        };
        let check = |allowed: &str, expected| {
            let status = format!("Name:\tpserver\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n");
            assert_eq!(own_node(&status, folder.path()), expected, "{allowed}");
        };
        add("node0", "0-3,8-11\n");
        check("0-3", None);
        add("node1", "4-7,12-15\n");
        add("power", "");
        check("0-3", Some(0));
        check("9,11", Some(0));
        check("4,12-13", Some(1));
        check("0-15", None);
        check("3-4", None);
        check("20", None);
        assert_eq!(own_node("", folder.path()), None);
        assert_eq!(own_node("Cpus_allowed_list:\t0\n", &folder.path().join("missing")), None);
    }
}
