//! Circles of imports: files of a package that name each other, directly or through other files.
//!
//! A file in a circle cannot be read, tested or moved without the others. A module and the file of its parent may name
//! each other, because the parent's file introduces the module.

use std::collections::{BTreeMap, BTreeSet};

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

/// The rule over all files: a finding for each file that stands in a circle.
pub(super) fn circles(files: &[SourceFile]) -> Vec<Finding> {
    let graph = ImportGraph::new(files);
    let reached: Vec<BTreeSet<usize>> = (0..graph.files.len()).map(|from| graph.reached_from(from)).collect();
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
            standing: Standing::Counted,
        })
    };
    (0..graph.files.len()).filter_map(finding).collect()
}

impl<'a> ImportGraph<'a> {
    fn new(files: &'a [SourceFile]) -> Self {
        let placed: Vec<(ModulePath, &SourceFile)> =
            files.iter().filter_map(|file| Some((module_path(file)?, file))).collect();
        let by_module: BTreeMap<&ModulePath, usize> = placed.iter().map(|(module, _)| module).zip(0..).collect();
        let imports_of = |(own, file): &(ModulePath, &SourceFile)| {
            let mut imports = BTreeMap::new();
            for path in file.paths().iter().filter(|path| !file.is_test(path.line)) {
                let target = target(own, path, &by_module);
                if let Some(to) = target.filter(|to| !are_parent_and_child(own, &placed[*to].0)) {
                    imports.entry(to).or_insert(path.line);
                }
            }
            imports
        };
        let imports = placed.iter().map(imports_of).collect();
        Self { files: placed.into_iter().map(|(_, file)| file).collect(), imports }
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

fn module_path(file: &SourceFile) -> Option<ModulePath> {
    let (folder, inside) = file.path.split_once('/')?;
    Some((folder.to_owned(), modules(inside)?))
}

/// The file that a path names: that of the longest module in it.
fn target(own: &ModulePath, path: &NamedPath, by_module: &BTreeMap<&ModulePath, usize>) -> Option<usize> {
    let (folder, own) = own;
    let supers = path.parts.iter().take_while(|part| *part == "super").count();
    let is_child = || by_module.contains_key(&(folder.clone(), [&own[..], &path.parts[..1]].concat()));
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
    let mut module = (folder.clone(), [base, rest].concat());
    loop {
        if let Some(to) = by_module.get(&module) {
            return Some(*to);
        }
        module.1.pop()?;
    }
}

fn are_parent_and_child((_, one): &ModulePath, (_, other): &ModulePath) -> bool {
    let is_parent = |parent: &[String], child: &[String]| child.len() == parent.len() + 1 && child.starts_with(parent);
    one == other || is_parent(one, other) || is_parent(other, one)
}
