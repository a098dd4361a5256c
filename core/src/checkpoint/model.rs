//! Saved model: whole parameters in one safetensors file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::partial::Partial;
use super::path::ModelPath;
use super::storage::Storage;
use super::tensors::{HEADER_BYTES_MAX, HeaderBuilder, tensor_bytes};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::partition::Declaration;

const SHARD_MARK: &str = ":sparse-";
/// A parameter of rows with a height is saved as a dense matrix up to this many bytes, however few of its rows exist.
pub const MATRIX_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// A parameter that is to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelTensor {
    /// Its name. `name:sparse-0` and its successors are the rows of `name`.
    pub name: String,
    /// The type of its elements.
    pub element_type: ElementType,
    /// Its shape, slowest dimension first; empty for a single number.
    pub shape: Vec<u64>,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// Its name in the file.
    pub name: String,
    /// The type of its elements.
    pub element_type: ElementType,
    /// Its shape, slowest dimension first.
    pub shape: Vec<u64>,
    /// The parameters that it consists of, in order, as indices into the planned list.
    pub parts: Vec<usize>,
}

/// Plans the content of a file of these parameters: `name:sparse-0` to `name:sparse-n-1` become `name`, row after row.
///
/// The tensors come in the order in which their bytes must be written: larger elements first, so that each is aligned
/// in a mapped file, and otherwise in input order. A gap, an overlap, unequal widths or types, an index with a leading
/// zero and a repeated name are failures that name the shard.
pub fn plan_model(tensors: &[ModelTensor]) -> Result<Vec<OutputTensor>, Failure> {
    let names = distinct_names(tensors)?;
    let mut groups: BTreeMap<&str, BTreeMap<u64, usize>> = BTreeMap::new();
    // The index of a group's first shard, or of a whole tensor.
    let mut order: Vec<(&str, usize)> = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        checked_bytes(&tensor.name, tensor.element_type, &tensor.shape)?;
        let Some((base, row)) = shard_of(&tensor.name)? else {
            order.push((&tensor.name, index));
            continue;
        };
        if names.contains(base) {
            return Err(refused(&tensor.name, &format!("overlaps with {base:?}, which is there as a whole")));
        }
        let group = groups.entry(base).or_default();
        if group.is_empty() {
            order.push((base, index));
        }
        group.insert(row, index);
    }
    let mut outputs = Vec::with_capacity(order.len());
    for (name, index) in order {
        outputs.push(match groups.get(name) {
            Some(group) => merge(name, group, tensors)?,
            None => whole(&tensors[index], index),
        });
    }
    outputs.sort_by_key(|output| std::cmp::Reverse(output.element_type.bytes()));
    Ok(outputs)
}

/// The form in which a parameter of rows is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsForm {
    /// One matrix of this many rows.
    Matrix(u64),
    /// The ids of this many rows, and these rows.
    Listed(u64),
}

impl RowsForm {
    /// The tensors of `name`, whose rows have `width` elements.
    #[must_use]
    pub fn tensors(self, name: &str, element_type: ElementType, width: u64) -> Vec<ModelTensor> {
        let tensor = |name, element_type, shape| ModelTensor { name, element_type, shape };
        match self {
            Self::Matrix(height) => vec![tensor(name.to_owned(), element_type, vec![height, width])],
            // Other libraries expect a signed index; a hash from 2^63 on is there a negative number.
            Self::Listed(rows) => vec![
                tensor(format!("{name}:ids"), ElementType::Int64, vec![rows]),
                tensor(format!("{name}:rows"), element_type, vec![rows, width]),
            ],
        }
    }
}

/// Whether a parameter of rows is saved as a matrix, whichever of its rows exist.
#[must_use]
pub fn is_always_matrix(height: u64, row_bytes: u64) -> bool {
    height > 0 && height.checked_mul(row_bytes).is_some_and(|bytes| bytes <= MATRIX_BYTES_MAX)
}

/// Refuses a catalogue that no model file can hold, as [`plan_model`] would: `shapes` are the parameters' own. The form
/// of a parameter of rows depends on its rows, so all names that it may get must be free.
pub fn check_savable<'a>(parameters: impl Iterator<Item = &'a Declaration>) -> Result<(), Failure> {
    let mut tensors = Vec::new();
    for Declaration { name, element_type, bytes, shape, buckets, .. } in parameters {
        let (name, element_type) = (name.as_str(), *element_type);
        match (buckets, shape.as_slice()) {
            (Some(buckets), &[height, width]) => {
                let mut forms = vec![RowsForm::Matrix(height)];
                if height == 0 {
                    forms.clear();
                }
                if !is_always_matrix(height, width.saturating_mul(element_type.bytes())) {
                    forms.push(RowsForm::Listed(buckets.rows));
                }
                tensors.extend(forms.into_iter().flat_map(|form| form.tensors(name, element_type, width)));
            }
            (_, []) => {
                let shape = vec![bytes / element_type.bytes()];
                tensors.push(ModelTensor { name: name.to_owned(), element_type, shape });
            }
            (_, shape) => tensors.push(ModelTensor { name: name.to_owned(), element_type, shape: shape.to_vec() }),
        }
    }
    plan_model(&tensors).map(drop)
}

/// A model file being written. It is renamed to its final name when it is complete, and removed when it is dropped
/// before.
pub struct ModelWriter {
    storage: Arc<dyn Storage>,
    file: Partial,
    path: ModelPath,
    /// The final length of the file.
    bytes: u64,
    is_placed: bool,
}

impl ModelWriter {
    /// Begins a file of these tensors. `number` is one that no other save has, in this process or another, so any
    /// number of saves may write one path at once. `metadata` is for readers, such as the step and the job's name.
    pub fn create(
        storage: Arc<dyn Storage>,
        (path, number): (&ModelPath, u64),
        tensors: &[OutputTensor],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, Failure> {
        let mut header = HeaderBuilder::new(metadata);
        for tensor in tensors {
            checked_bytes(&tensor.name, tensor.element_type, &tensor.shape)?;
            header.add(&tensor.name, tensor.element_type, &tensor.shape);
        }
        let data_bytes = header.data_bytes();
        let header = header.finish();
        if header.len() as u64 > HEADER_BYTES_MAX {
            let (tensors, found) = (tensors.len(), header.len());
            return Err(Failure::Call(format!(
                "the header of {path} would have {found} bytes for {tensors} tensors; readers accept {HEADER_BYTES_MAX}"
            )));
        }
        let file = Partial::create_among_others(&storage, path.as_str().to_owned(), number)?;
        let bytes = header.len() as u64 + data_bytes;
        let mut writer = Self { storage, file, path: path.clone(), bytes, is_placed: false };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Appends the next bytes of the tensors.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let left = self.bytes - self.file.position();
        if bytes.len() as u64 > left {
            let (path, found) = (&self.path, bytes.len());
            return Err(Failure::Call(format!(
                "found {found} more bytes for {path}; expected at most {left}, which its tensors lack"
            )));
        }
        self.file.write(&[bytes])
    }

    /// Renames the file to its final name. Every byte of every tensor must have been written. Returns the file's bytes.
    pub fn finish(mut self) -> Result<u64, Failure> {
        let (path, found, expected) = (&self.path, self.file.position(), self.bytes);
        if found != expected {
            return Err(Failure::Call(format!("found {found} bytes in {path}, header included; expected {expected}")));
        }
        self.file.place()?;
        self.is_placed = true;
        self.storage.sync_directory(self.path.directory())?;
        Ok(expected)
    }
}

impl Drop for ModelWriter {
    fn drop(&mut self) {
        if !self.is_placed {
            self.file.abandon();
        }
    }
}

fn distinct_names(tensors: &[ModelTensor]) -> Result<BTreeSet<&str>, Failure> {
    let mut names = BTreeSet::new();
    for tensor in tensors {
        if tensor.name.is_empty() || tensor.name == "__metadata__" {
            return Err(refused(&tensor.name, "has a name that the safetensors format cannot hold"));
        }
        if !names.insert(tensor.name.as_str()) {
            return Err(refused(&tensor.name, "occurs twice"));
        }
    }
    Ok(names)
}

/// The parameter that this name is a shard of, and its index there.
fn shard_of(name: &str) -> Result<Option<(&str, u64)>, Failure> {
    let Some((base, digits)) = name.rsplit_once(SHARD_MARK) else {
        return Ok(None);
    };
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Ok(None);
    }
    if base.is_empty() {
        return Err(refused(name, "is a shard of a parameter without a name"));
    }
    if digits.len() > 1 && digits.starts_with('0') {
        return Err(refused(name, "has an index with a leading zero, which could be meant for another shard"));
    }
    match digits.parse() {
        Ok(index) => Ok(Some((base, index))),
        Err(_) => Err(refused(name, "has an index that no list of shards can reach")),
    }
}

fn merge(name: &str, group: &BTreeMap<u64, usize>, tensors: &[ModelTensor]) -> Result<OutputTensor, Failure> {
    let parts: Vec<usize> = group.values().copied().collect();
    if let Some((expected, (found, index))) = (0..).zip(group).find(|(expected, (found, _))| expected != *found) {
        let what = format!("is there without {name}{SHARD_MARK}{expected}, found index {found}, expected {expected}");
        return Err(refused(&tensors[*index].name, &what));
    }
    let first = &tensors[parts[0]];
    let mut rows: u64 = 0;
    for part in &parts {
        let tensor = &tensors[*part];
        let Some((height, width)) = tensor.shape.split_first() else {
            return Err(refused(&tensor.name, "is a single number and has no rows to merge"));
        };
        if tensor.element_type != first.element_type {
            let what = format!("is of {}, and {} of {}", tensor.element_type, first.name, first.element_type);
            return Err(refused(&tensor.name, &what));
        }
        if width != &first.shape[1..] {
            let what = format!("has rows of shape {width:?}, and {} of {:?}", first.name, &first.shape[1..]);
            return Err(refused(&tensor.name, &what));
        }
        rows = rows.checked_add(*height).ok_or_else(|| refused(&tensor.name, "has more rows than can be counted"))?;
    }
    let mut shape = first.shape.clone();
    shape[0] = rows;
    checked_bytes(name, first.element_type, &shape)?;
    Ok(OutputTensor { name: name.to_owned(), element_type: first.element_type, shape, parts })
}

fn whole(tensor: &ModelTensor, index: usize) -> OutputTensor {
    let ModelTensor { name, element_type, shape } = tensor.clone();
    OutputTensor { name, element_type, shape, parts: vec![index] }
}

fn checked_bytes(name: &str, element_type: ElementType, shape: &[u64]) -> Result<u64, Failure> {
    tensor_bytes(element_type, shape)
        .filter(|bytes| *bytes <= crate::limits::PARAMETER_BYTES_MAX)
        .ok_or_else(|| refused(name, &format!("has the shape {shape:?}, larger than any parameter may be")))
}

fn refused(name: &str, what: &str) -> Failure {
    Failure::Call(format!("the model cannot be saved: {name:?} {what}"))
}

#[cfg(test)]
mod tests;
