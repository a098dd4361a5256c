//! The rule for imports: a module imports its own floor and the floors below.

use crate::tidy::Report;
use crate::tidy::source::{NamedPath, SourceFile};

/// The modules of `core` and their floors.
const CORE: &[(&str, u8)] = &[
    ("ids", 0),
    ("dtype", 0),
    ("limits", 0),
    ("time", 0),
    ("prng", 0),
    ("checksum", 0),
    ("narrowing", 0),
    ("error", 0),
    ("metrics", 0),
    ("text", 0),
    ("shares", 0),
    ("partition", 0),
    ("wire", 0),
    ("accumulator", 1),
    ("memory", 1),
    ("optim", 1),
    ("config", 1),
    ("checkpoint", 1),
    ("port", 1),
    ("rule", 1),
    ("rows", 1),
    ("client", 2),
    ("server", 2),
];

/// Packages, the names they are imported by, and their floors. `core` as a whole is its highest floor. `ci` stands
/// outside: nobody imports it and it imports nobody.
const PACKAGES: &[(&str, &str, u8)] = &[
    ("core", "pserver_core", 2),
    ("transport", "pserver_transport", 3),
    ("kernels", "pserver_kernels", 3),
    ("program", "pserver_program", 3),
    ("client", "pserver_client", 4),
    ("trainer", "pserver_trainer", 5),
    ("node", "pserver_node", 5),
    ("capi", "paddle_pserver", 5),
    ("processes", "pserver_processes", 5),
    ("cli", "pserver_cli", 6),
    ("python", "_pserver", 6),
    ("bench", "pserver_bench", 6),
    ("simulator", "pserver_simulator", 6),
];
const OUTSIDE: (&str, &str) = ("ci", "pserver_ci");

/// The floor where transports, kernels and programs stand side by side without knowing each other.
const PORTS: u8 = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
struct ModulePlace {
    name: String,
    /// None is outside of the house.
    floor: Option<u8>,
}

/// The rule.
pub(super) fn imports(file: &SourceFile, report: &mut Report<'_>) {
    if !file.is_rust() {
        return;
    }
    let Some(from) = place(&file.path) else {
        return report.refuse(1, "this has no floor; give it one in ci/src/tidy/floors.rs");
    };
    for path in file.paths() {
        if let Some(to) = target(file, &path)
            && let Some(reason) = refusal(&from, &to)
        {
            report.refuse(path.line, reason);
        }
    }
}

/// Whether a folder is a package with a floor, or the one outside.
pub(super) fn is_package(folder: &str) -> bool {
    folder == OUTSIDE.0 || PACKAGES.iter().any(|(name, ..)| *name == folder)
}

/// Why the package in `folder` may not depend on the package `dependency` (`pserver-core`); none when it may.
pub(super) fn dependency_refusal(folder: &str, dependency: &str) -> Option<String> {
    let to = package(&dependency.replace('-', "_"))?;
    refusal(&place(&format!("{folder}/src/lib.rs"))?, &to)
}

fn refusal(from: &ModulePlace, to: &ModulePlace) -> Option<String> {
    let (Some(own), Some(other)) = (from.floor, to.floor) else {
        return (from.name != to.name).then(|| format!("{} and {} know nothing of each other", from.name, to.name));
    };
    if other > own {
        return Some(format!("{} (floor {own}) must not know {} (floor {other})", from.name, to.name));
    }
    let strangers = own == PORTS && other == PORTS && from.name != to.name;
    strangers.then(|| format!("{} and {} never import each other", from.name, to.name))
}

/// Where a file stands; none when nobody gave it a floor.
fn place(path: &str) -> Option<ModulePlace> {
    let (folder, inside) = path.split_once('/')?;
    if folder == OUTSIDE.0 {
        return Some(ModulePlace { name: folder.to_owned(), floor: None });
    }
    let (name, _, floor) = PACKAGES.iter().find(|(name, ..)| *name == folder)?;
    match modules(inside) {
        Some(modules) if folder == "core" && !modules.is_empty() => core_module(&modules[0]),
        _ => Some(ModulePlace { name: (*name).to_owned(), floor: Some(*floor) }),
    }
}

/// The module of this workspace that a path names.
fn target(file: &SourceFile, path: &NamedPath) -> Option<ModulePlace> {
    let (folder, inside) = file.path.split_once('/')?;
    let supers = path.parts.iter().take_while(|part| *part == "super").count();
    let depth = modules(inside).map(|modules| modules.len() + path.inline_modules);
    let at_root = supers > 0 && depth == Some(supers);
    if folder == "core" && (at_root || path.parts[0] == "crate") {
        return core_module(path.parts.get(supers.max(1))?);
    }
    package(&path.parts[0])
}

fn package(import: &str) -> Option<ModulePlace> {
    if import == OUTSIDE.1 {
        return Some(ModulePlace { name: OUTSIDE.0.to_owned(), floor: None });
    }
    let (name, _, floor) = PACKAGES.iter().find(|(_, known, _)| *known == import)?;
    Some(ModulePlace { name: (*name).to_owned(), floor: Some(*floor) })
}

fn core_module(name: &str) -> Option<ModulePlace> {
    let (name, floor) = CORE.iter().find(|(known, _)| *known == name)?;
    Some(ModulePlace { name: format!("core::{name}"), floor: Some(*floor) })
}

/// The modules a file under `src` stands in, outermost first; none outside of `src`.
pub(super) fn modules(inside: &str) -> Option<Vec<String>> {
    let file = inside.strip_prefix("src/")?.strip_suffix(".rs")?;
    let mut modules: Vec<_> = file.split('/').map(str::to_owned).collect();
    if matches!(modules.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        modules.pop();
    }
    Some(modules)
}
