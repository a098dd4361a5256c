//! Source of a module: the fixed kernels, then rules and their kernels; or one rule's update alone.

use std::collections::BTreeMap;

use pserver_core::dtype::ElementType;

use super::emit::Emitted;

/// The common beginning of every module, in this order: everything that an update needs, without a kernel.
const BASE: [&str; 5] = [
    include_str!("../../cu/base.cu"),
    include_str!("../../cu/elementary.cu"),
    include_str!("../../cu/rule.cu"),
    include_str!("../../cu/sum.cu"),
    include_str!("../../cu/update.cu"),
];

/// The fixed kernels, and helpers for rows.
const FIXED: [&str; 6] = [
    include_str!("../../cu/merge.cu"),
    include_str!("../../cu/rows.cu"),
    include_str!("../../cu/norm.cu"),
    include_str!("../../cu/cast.cu"),
    include_str!("../../cu/sort.cu"),
    include_str!("../../cu/scalars.cu"),
];

/// The fixed kernels, each with its argument structure.
pub const FIXED_ENTRIES: [(&str, &str); 15] = [
    ("pserver_sum_f32", "UpdateArguments"),
    ("pserver_sum_f64", "UpdateArguments"),
    ("pserver_sum_u32", "UpdateArguments"),
    ("pserver_sum_u64", "UpdateArguments"),
    ("pserver_squares_f32", "SquaresArguments"),
    ("pserver_squares_f64", "SquaresArguments"),
    ("pserver_total", "TotalArguments"),
    ("pserver_finite", "FiniteArguments"),
    ("pserver_cast", "CastArguments"),
    ("pserver_sort_count", "SortArguments"),
    ("pserver_sort_scatter", "SortArguments"),
    ("pserver_segment_count", "SortArguments"),
    ("pserver_segment_write", "SortArguments"),
    ("pserver_scan", "ScanArguments"),
    ("pserver_scalars", "ScalarsArguments"),
];

/// A module's source and the names of its kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSource {
    text: String,
    /// Each with its argument structure.
    entries: Vec<(String, &'static str)>,
}

impl ModuleSource {
    /// A module with tensor updates by some rules and row updates by some, for these types, and with the fixed kernels.
    /// Rules with the same key are merged.
    ///
    /// # Panics
    /// When a type is not f32 or f64.
    #[must_use]
    pub fn new<'a>(
        updates: impl IntoIterator<Item = &'a Emitted>,
        rows: impl IntoIterator<Item = &'a Emitted>,
        element_types: &[ElementType],
    ) -> Self {
        let by_key = |rule: &'a Emitted| (rule.key(), rule);
        let updates: BTreeMap<&str, &Emitted> = updates.into_iter().map(by_key).collect();
        let rows: BTreeMap<&str, &Emitted> = rows.into_iter().map(by_key).collect();
        let all: BTreeMap<&str, &Emitted> = updates.iter().chain(&rows).map(|(key, rule)| (*key, *rule)).collect();
        let mut text = [&BASE[..], &FIXED].concat().join("\n");
        let mut entries: Vec<(String, &'static str)> =
            FIXED_ENTRIES.iter().map(|(name, structure)| ((*name).to_owned(), *structure)).collect();
        for (key, rule) in all {
            text.push('\n');
            text.push_str(rule.text());
            for element_type in element_types {
                if updates.contains_key(key) {
                    text.push_str(&rule.update_kernel(*element_type));
                    entries.push((rule.update_entry(*element_type), "UpdateArguments"));
                }
                if rows.contains_key(key) {
                    text.push_str(&rule.rows_kernel(*element_type));
                    entries.push((rule.rows_entry(*element_type), "RowsArguments"));
                }
            }
        }
        Self { text, entries }
    }

    /// A module with one kernel, which updates a tensor of one type by one rule: compiled while the job waits.
    ///
    /// # Panics
    /// When the type is not f32 or f64.
    #[must_use]
    pub fn of_update(rule: &Emitted, element_type: ElementType) -> Self {
        let text = format!("{}\n{}{}", BASE.join("\n"), rule.text(), rule.update_kernel(element_type));
        Self { text, entries: vec![(rule.update_entry(element_type), "UpdateArguments")] }
    }

    /// CUDA C++ without includes.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The names of the kernels.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_str())
    }

    /// The digest of the source.
    #[must_use]
    pub fn digest(&self) -> String {
        blake3::hash(self.text.as_bytes()).to_hex().to_string()
    }

    /// The same kernels as C++ for this machine's processor, for a shared library: see `docs/CUDA.md`.
    #[must_use]
    pub fn shim(&self) -> String {
        let mut text = include_str!("../../cu/shim/shim.h").to_owned();
        text.push_str(&self.text);
        text.push_str("\nstatic const PserverShimKernel pserver_shim_kernels[] = {\n");
        for (name, structure) in &self.entries {
            text.push_str(&format!("    {{\"{name}\", pserver_shim_call<{structure}, {name}>}},\n"));
        }
        text.push_str("};\n");
        text.push_str(include_str!("../../cu/shim/launch.h"));
        text
    }
}
