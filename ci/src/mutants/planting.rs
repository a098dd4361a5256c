//! A copy of the workspace with every fault planted in it, switched on by name at run time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::table::Mutant;

/// The variable that names the fault which is on; without it none is.
pub(super) const CHOSEN: &str = "PSERVER_MUTANT";

/// The module that the copy of `core` has beside its own: whether a fault is on. The variable is read once.
const SWITCH: &str = "//! Planted faults.\n\n/// Whether this fault is on.\npub fn is_on(name: &str) -> bool {\n    \
                      static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();\n    \
                      CHOSEN.get_or_init(|| std::env::var(\"PSERVER_MUTANT\").ok()).as_deref() == Some(name)\n}\n";
const SWITCH_FILE: &str = "core/src/mutant.rs";
const CORE: &str = "core/src/lib.rs";
const MANIFEST: &str = "core/Cargo.toml";
/// The test program of the copy: the unit tests of `core` under a name. A test program that has a name can be built
/// alone with every package selected, which gives packages of others the features that they are already built with.
pub(super) const PROGRAM: &str = "planted";
/// Folders that the copy does not need.
const LEFT_OUT: [&str; 3] = ["target", ".git", "models"];

/// Brings the copy below `copy` up to date with the workspace at `root`, faults planted. A file whose content stays is
/// not written, so that only what changed is compiled again.
pub(super) fn plant(root: &Path, copy: &Path, mutants: &[Mutant]) -> Result<()> {
    let mut planted = planted_files(root, mutants)?;
    let read = |file: &str| fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"));
    planted.insert(CORE.into(), format!("{}\npub mod mutant;\n", read(CORE)?));
    let program = format!("\n[[test]]\nname = \"{PROGRAM}\"\npath = \"src/lib.rs\"\n");
    planted.insert(MANIFEST.into(), read(MANIFEST)? + &program);
    planted.insert(SWITCH_FILE.into(), SWITCH.to_owned());
    let mut kept = BTreeSet::new();
    copy_folder(root, copy, Path::new(""), &planted, &mut kept)?;
    let switch = PathBuf::from(SWITCH_FILE);
    write(&copy.join(&switch), SWITCH.as_bytes())?;
    kept.insert(switch);
    remove_others(copy, &copy.join("core/src"), &kept)
}

/// The content of every file that has faults, by its path.
pub(super) fn planted_files(root: &Path, mutants: &[Mutant]) -> Result<BTreeMap<PathBuf, String>> {
    let mut files: BTreeMap<&str, Vec<&Mutant>> = BTreeMap::new();
    mutants.iter().for_each(|mutant| files.entry(mutant.file).or_default().push(mutant));
    let one = |(file, mutants): (&str, Vec<&Mutant>)| {
        let text = fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))?;
        Ok((file.into(), with_faults(file, &text, &mutants)?))
    };
    files.into_iter().map(one).collect()
}

/// A text with these faults. Each replaces its own place, so no fault changes what another looks for.
fn with_faults(file: &str, text: &str, mutants: &[&Mutant]) -> Result<String> {
    let mut places = Vec::new();
    for mutant in mutants {
        let found: Vec<usize> = text.match_indices(mutant.original).map(|(at, _)| at).collect();
        let (name, count) = (mutant.name, found.len());
        ensure!(count == 1, "mutant \"{name}\": its text occurs {count} times in {file}; expected once");
        places.push((found[0]..found[0] + mutant.original.len(), mutant));
    }
    places.sort_by_key(|(place, _)| place.start);
    for pair in places.windows(2) {
        if pair[1].0.start < pair[0].0.end {
            bail!("mutants \"{}\" and \"{}\" change one place of {file}", pair[0].1.name, pair[1].1.name);
        }
    }
    let (mut planted, mut end) = (String::new(), 0);
    for (place, mutant) in places {
        planted += &text[end..place.start];
        planted += &mutant.planted.replace("MUTANT", &format!("crate::mutant::is_on({:?})", mutant.name));
        end = place.end;
    }
    Ok(planted + &text[end..])
}

fn copy_folder(
    root: &Path,
    copy: &Path,
    folder: &Path,
    planted: &BTreeMap<PathBuf, String>,
    kept: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    let entries = fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        let kind = entry.file_type()?;
        if LEFT_OUT.iter().any(|left_out| path == Path::new(left_out)) {
            continue;
        }
        if kind.is_dir() {
            copy_folder(root, copy, &path, planted, kept)?;
        } else if kind.is_file() {
            let content = match planted.get(&path) {
                Some(text) => text.clone().into_bytes(),
                None => fs::read(entry.path()).with_context(|| format!("cannot read {}", path.display()))?,
            };
            write(&copy.join(&path), &content)?;
            kept.insert(path);
        }
    }
    Ok(())
}

/// Removes sources below `folder` that the workspace does not have any more; what tests have left there stays.
fn remove_others(copy: &Path, folder: &Path, kept: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if path.is_dir() {
            remove_others(copy, &path, kept)?;
        } else if is_source && !kept.contains(path.strip_prefix(copy)?) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|found| found == content) {
        return Ok(());
    }
    let folder = path.parent().expect("a file is in a folder");
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(name: &'static str, original: &'static str, planted: &'static str) -> Mutant {
        Mutant { name, file: "a.rs", original, planted, tests: &[] }
    }

    #[test]
    fn each_fault_replaces_its_own_place_and_is_off_until_it_is_named() {
        let (one, other) = (mutant("b", "two()", "if MUTANT { one() } else { two() }"), mutant("a", "one()", "MUTANT"));
        let planted = with_faults("a.rs", "one(); two(); three()", &[&one, &other]).expect("both are there");
        let expected = "crate::mutant::is_on(\"a\"); if crate::mutant::is_on(\"b\") { one() } else { two() }; three()";
        assert_eq!(planted, expected);
    }

    #[test]
    fn a_fault_whose_place_is_not_there_once_is_named() {
        let fails = |text: &str, mutants: &[&Mutant]| with_faults("a.rs", text, mutants).unwrap_err().to_string();
        let one = mutant("a", "one()", "");
        assert_eq!(fails("two()", &[&one]), "mutant \"a\": its text occurs 0 times in a.rs; expected once");
        assert_eq!(fails("one() one()", &[&one]), "mutant \"a\": its text occurs 2 times in a.rs; expected once");
        let other = mutant("b", "one() +", "");
        assert_eq!(fails("one() + 1", &[&one, &other]), "mutants \"a\" and \"b\" change one place of a.rs");
    }
}
