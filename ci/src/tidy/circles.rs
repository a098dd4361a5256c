//! Circles of imports: files of a package that name each other, directly or through other files.
//!
//! A file in a circle cannot be read, tested or moved without the others. A module and the file of its parent may name
//! each other, because the parent's file introduces the module. A name that a module takes from another by `pub use`
//! leads to the file that has it; only a parent may see the file of its module as the owner of all names there.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::calls;
use crate::tidy::floors::modules;
use crate::tidy::source::{NamedPath, SourceFile};
use crate::tidy::{Finding, Standing};

/// A package's folder, and the path of a module in it.
type ModulePath = (String, Vec<String>);

/// The files that each file names, and the first line that names each.
struct ImportGraph<'a> {
    files: Vec<&'a SourceFile>,
    imports: Vec<BTreeMap<usize, usize>>,
}

/// The modules of all packages.
struct ModuleIndex<'a> {
    files: Vec<(ModulePath, &'a SourceFile)>,
    by_module: BTreeMap<ModulePath, usize>,
    /// The paths that each file re-exports.
    exports: Vec<Vec<NamedPath>>,
}

/// Files in a circle of imports and calls that is not counted.
const CALL_CIRCLE_MAX: usize = 4;

/// The rules over all files: a finding for each file that stands in a circle of imports, and a counted one for each in
/// a larger circle of imports and calls.
pub(super) fn circles(files: &[SourceFile]) -> Vec<Finding> {
    let mut graph = ImportGraph::new(files);
    let mut findings = import_circles(&graph);
    graph.add_calls();
    findings.extend(call_circles(&graph));
    findings
}

fn call_circles(graph: &ImportGraph<'_>) -> Vec<Finding> {
    let reached = graph.reached();
    let finding = |from: usize| {
        let circle: Vec<usize> = reached[from].iter().copied().filter(|to| reached[*to].contains(&from)).collect();
        let in_circle = graph.imports[from].iter().filter(|(to, _)| circle.contains(to));
        let line = in_circle.map(|(_, line)| *line).min()?;
        (circle.len() > CALL_CIRCLE_MAX).then(|| Finding {
            path: graph.files[from].path.clone(),
            line,
            rule: "call-circles",
            text: format!("stands in a circle of calls between {} files", circle.len()),
            standing: Standing::Counted,
        })
    };
    (0..graph.files.len()).filter_map(finding).collect()
}

fn import_circles(graph: &ImportGraph<'_>) -> Vec<Finding> {
    let reached = graph.reached();
    let finding = |from: usize| {
        let back: Vec<(&usize, &usize)> =
            graph.imports[from].iter().filter(|(to, _)| reached[**to].contains(&from)).collect();
        let line = back.iter().map(|(_, line)| **line).min()?;
        let names: Vec<&str> = back.iter().map(|(to, _)| graph.files[**to].path.as_str()).collect();
        Some(Finding {
            path: graph.files[from].path.clone(),
            line,
            rule: "circles",
            text: format!("names {}, from where imports lead back to this file", names.join(", ")),
            standing: Standing::Refused,
        })
    };
    (0..graph.files.len()).filter_map(finding).collect()
}

impl<'a> ImportGraph<'a> {
    fn new(files: &'a [SourceFile]) -> Self {
        let modules = ModuleIndex::new(files);
        let imports_of = |(own, file): &(ModulePath, &SourceFile)| {
            let mut imports = BTreeMap::new();
            for path in file.paths().iter().filter(|path| !file.is_test(path.line)) {
                let targets = modules.targets(own, own, path);
                for to in targets.into_iter().filter(|to| !are_parent_and_child(own, &modules.files[*to].0)) {
                    imports.entry(to).or_insert(path.line);
                }
            }
            imports
        };
        let imports = modules.files.iter().map(imports_of).collect();
        Self { files: modules.files.iter().map(|(_, file)| *file).collect(), imports }
    }

    /// Adds the calls of methods between files of one package.
    fn add_calls(&mut self) {
        let mut packages: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, file) in self.files.iter().enumerate() {
            packages.entry(file.path.split('/').next().unwrap_or_default()).or_default().push(at);
        }
        for places in packages.into_values() {
            let files: Vec<&SourceFile> = places.iter().map(|at| self.files[*at]).collect();
            for (from, calls) in calls::between(&files).into_iter().enumerate() {
                for (to, line) in calls {
                    self.imports[places[from]].entry(places[to]).or_insert(line);
                }
            }
        }
    }

    /// For each file those that it leads to.
    fn reached(&self) -> Vec<BTreeSet<usize>> {
        (0..self.files.len()).map(|from| self.reached_from(from)).collect()
    }

    /// The files that the imports of `from` lead to; `from` itself only over another file.
    fn reached_from(&self, from: usize) -> BTreeSet<usize> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            next.extend(self.imports[file].keys().copied().filter(|to| reached.insert(*to)));
        }
        reached
    }
}

impl<'a> ModuleIndex<'a> {
    fn new(files: &'a [SourceFile]) -> Self {
        let files: Vec<_> = files.iter().filter_map(|file| Some((module_path(file)?, file))).collect();
        let by_module = files.iter().map(|(module, _)| module.clone()).zip(0..).collect();
        let exports = |(_, file): &(ModulePath, &SourceFile)| {
            file.paths().into_iter().filter(|path| path.exported.is_some() && !file.is_test(path.line)).collect()
        };
        let exports = files.iter().map(exports).collect();
        Self { files, by_module, exports }
    }

    /// The files that a path in `module` names for the file of `importer`: that of the longest module in the path, or
    /// the one from which that module re-exports the name. All names of a `*` may be of either.
    fn targets(&self, importer: &ModulePath, module: &ModulePath, path: &NamedPath) -> Vec<usize> {
        let (mut found, mut followed) = (Vec::new(), BTreeSet::new());
        let mut left = vec![(module, path)];
        while let Some((module, path)) = left.pop() {
            let Some((to, rest)) = self.target(module, path) else { continue };
            let owner = &self.files[to].0;
            let Some(name) = rest.first().filter(|_| !is_parent(importer, owner)) else {
                found.push(to);
                continue;
            };
            // Modules may re-export each other's names.
            if !followed.insert((to, name.clone())) {
                continue;
            }
            let exported_as = |wanted: &str| {
                let exports = self.exports[to].iter().filter(move |export| export.exported.as_deref() == Some(wanted));
                exports.map(|export| (owner, export)).collect::<Vec<_>>()
            };
            let mut exports = exported_as(name);
            if exports.is_empty() || name == "*" {
                found.push(to);
                exports = exported_as("*");
            }
            left.extend(exports);
        }
        found
    }

    /// The file of the longest module in a path, and the rest of the path.
    fn target(&self, (folder, own): &ModulePath, path: &NamedPath) -> Option<(usize, Vec<String>)> {
        let supers = path.parts.iter().take_while(|part| *part == "super").count();
        let is_child = || self.by_module.contains_key(&(folder.clone(), [&own[..], &path.parts[..1]].concat()));
        let (base, rest) = match path.parts[0].as_str() {
            "crate" => (&[][..], &path.parts[1..]),
            "self" => (&own[..], &path.parts[1..]),
            "super" => {
                let up = supers.saturating_sub(path.inline_modules);
                (&own[..own.len().checked_sub(up)?], &path.parts[supers..])
            }
            _ if is_child() => (&own[..], &path.parts[..]),
            _ => return None,
        };
        let (mut module, mut rest) = ((folder.clone(), [base, rest].concat()), Vec::new());
        loop {
            if let Some(to) = self.by_module.get(&module) {
                rest.reverse();
                return Some((*to, rest));
            }
            rest.push(module.1.pop()?);
        }
    }
}

fn module_path(file: &SourceFile) -> Option<ModulePath> {
    let (folder, inside) = file.path.split_once('/')?;
    Some((folder.to_owned(), modules(inside)?))
}

fn are_parent_and_child(one: &ModulePath, other: &ModulePath) -> bool {
    one == other || is_parent(one, other) || is_parent(other, one)
}

fn is_parent((_, parent): &ModulePath, (_, child): &ModulePath) -> bool {
    child.len() == parent.len() + 1 && child.starts_with(parent)
}
