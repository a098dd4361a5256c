//! Data of a program: named columns of a file, one for each data variable.
//!
//! A column has the variable's name; its first dimension counts the rows (examples), the others are those of the
//! variable. The format follows from the file's extension: `.safetensors`, `.npz` or `.csv`. Numbers are converted to
//! the variable's type: floats are rounded once to nearest; a number that an integer type lacks is refused. Columns
//! that no variable names are not read.

mod comma_separated;
mod number;
mod numpy;
mod suitability;
mod tensors;
mod value_file;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::{Dim, Graph, Purpose, Tensor, Variable, VariableFacts};

use super::step_numbers::StepNumbers;
use number::StoredColumn;

pub(crate) use tensors::{TakeBytes, write_parts};
pub use value_file::ValueFile;

/// A data variable: the shape of its examples follows the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DataVariable {
    name: String,
    element_type: ElementType,
    /// Without the batch.
    example: Vec<u64>,
}

/// The formats of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileFormat {
    Safetensors,
    Numpy,
    CommaSeparated,
}

/// The data of a graph's variables, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSet {
    columns: Vec<(String, Tensor)>,
    rows: usize,
}

impl fmt::Display for DataVariable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: String = self.example.iter().map(|length| format!(", {length}")).collect();
        write!(formatter, "{:?}: {}[batch{dims}]", self.name, self.element_type)
    }
}

impl FileFormat {
    fn of(path: &Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("safetensors") => Ok(Self::Safetensors),
            Some("npz") => Ok(Self::Numpy),
            Some("csv") => Ok(Self::CommaSeparated),
            _ => Err(format!(
                "found the extension {:?}; expected .safetensors, .npz or .csv",
                extension.unwrap_or_default()
            )),
        }
    }
}

impl DataSet {
    /// Reads the columns of all data variables of a graph.
    ///
    /// # Errors
    /// Names the file, the variable, what was found and expected: a missing column, another shape, a number that the
    /// type lacks, columns of different rows, a variable whose first dimension is not the batch.
    pub fn read(path: &Path, graph: &Graph) -> Result<Self, Failure> {
        let refuse = |reason: String| Failure::call(format!("{}: {reason}", path.display()));
        let wanted = data_variables(graph).map_err(Failure::call)?;
        let names: Vec<&str> = wanted.iter().map(|one| one.name.as_str()).collect();
        check_file(path).map_err(refuse)?;
        let stored = match FileFormat::of(path).map_err(refuse)? {
            FileFormat::CommaSeparated => {
                let tensors = comma_separated::read(path, &wanted).map_err(refuse)?;
                let columns = wanted.into_iter().map(|one| one.name).zip(tensors);
                return Self::of(columns.collect()).map_err(refuse);
            }
            FileFormat::Safetensors => tensors::read(path, Some(&names)),
            FileFormat::Numpy => numpy::read(path, Some(&names)),
        };
        let mut stored = stored.map_err(refuse)?;
        let columns = wanted.iter().map(|one| Ok((one.name.clone(), column(one, stored.remove(&one.name))?)));
        Self::of(columns.collect::<Result<_, String>>().map_err(refuse)?).map_err(refuse)
    }

    fn of(columns: Vec<(String, Tensor)>) -> Result<Self, String> {
        let first = columns.first().map_or(0, |(_, tensor)| tensor.shape()[0]);
        if let Some((name, other)) = columns.iter().find(|(_, tensor)| tensor.shape()[0] != first) {
            let (found, like) = (other.shape()[0], &columns[0].0);
            return Err(format!("data {name:?} has {found} rows; expected {first}, as {like:?} has"));
        }
        let rows = usize::try_from(first).map_err(|error| error.to_string())?;
        Ok(Self { columns, rows })
    }

    /// Refuses rows that a training cannot use.
    ///
    /// # Errors
    /// Names the file `path`, the variable, the row, what was found and what was expected: an id beyond a table, a
    /// label beyond the classes, a number that is not finite.
    pub fn check(&self, path: &Path, graph: &Graph) -> Result<(), Failure> {
        suitability::check(self, graph).map_err(|reason| Failure::call(format!("{}: {reason}", path.display())))
    }

    /// How many rows there are.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// These rows, in this order, as the data of a step: each variable's name with its tensor.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn batch(&self, rows: &[usize]) -> Vec<(&str, Tensor)> {
        let batch = self.columns.iter().map(|(name, whole)| {
            let mut shape = whole.shape().to_vec();
            shape[0] = rows.len() as u64;
            let mut part = Tensor::zeros(whole.elements().element_type(), &shape);
            let width = whole.bytes().len() / self.rows.max(1);
            if width > 0 {
                for (row, bytes) in rows.iter().zip(part.bytes_mut().chunks_exact_mut(width)) {
                    bytes.copy_from_slice(&whole.bytes()[row * width..(row + 1) * width]);
                }
            }
            (name.as_str(), part)
        });
        batch.collect()
    }

    /// Takes away the last rows, and returns them.
    ///
    /// # Panics
    /// When there are not as many.
    #[must_use]
    pub fn split_off(&mut self, last: usize) -> Self {
        let part = |rows: std::ops::Range<usize>| {
            let rows: Vec<usize> = rows.collect();
            let columns = self.batch(&rows).into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
            Self { columns, rows: rows.len() }
        };
        let (first, last) = (part(0..self.rows - last), part(self.rows - last..self.rows));
        *self = first;
        last
    }
}

/// Refuses what is no file: a device may have no end.
fn check_file(path: &Path) -> Result<(), String> {
    let about = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if about.is_file() { Ok(()) } else { Err("found no ordinary file; expected one".to_owned()) }
}

/// The data variables of a graph.
fn data_variables(graph: &Graph) -> Result<Vec<DataVariable>, String> {
    let numbers = StepNumbers::of(graph);
    let is_read = |variable: &&Variable| variable.purpose == Purpose::Data && !numbers.contains(&variable.name);
    let data = graph.variables().iter().filter(is_read);
    let found = data.map(|variable| {
        let (name, facts) = (&variable.name, &variable.facts);
        let example = match facts {
            VariableFacts::Dense { element_type, shape } => match shape.split_first() {
                Some((Dim::Batch, rest)) => {
                    let fixed = rest.iter().map(|dim| if let Dim::Fixed(length) = dim { Some(*length) } else { None });
                    fixed.collect::<Option<Vec<u64>>>().map(|example| (*element_type, example))
                }
                _ => None,
            },
            _ => None,
        };
        let (element_type, example) = example.ok_or_else(|| {
            format!("data {name:?} is {facts}; expected a dense tensor whose first dimension alone is the batch")
        })?;
        Ok(DataVariable { name: name.clone(), element_type, example })
    });
    found.collect()
}

/// A column as the tensor of a variable.
fn column(one: &DataVariable, stored: Option<StoredColumn>) -> Result<Tensor, String> {
    let stored = stored.ok_or_else(|| format!("found no column for data {one}; expected one of this name"))?;
    if stored.shape.get(1..) != Some(one.example.as_slice()) {
        let found = &stored.shape;
        return Err(format!("data {one}: found the shape {found:?}; expected rows first and then these dimensions"));
    }
    let elements = stored.elements(one.element_type).map_err(|reason| format!("data {one}: {reason}"))?;
    Ok(Tensor::new(stored.shape, elements))
}

/// Reads the tensors of a safetensors file, such as a saved model.
///
/// # Errors
/// Names the file and what was found and expected.
pub fn read_model(path: &Path) -> Result<BTreeMap<String, Tensor>, Failure> {
    let refuse = |reason: String| Failure::call(format!("{}: {reason}", path.display()));
    check_file(path).map_err(refuse)?;
    let stored = tensors::read(path, None).map_err(refuse)?;
    let tensors = stored.into_iter().filter_map(|(name, column)| {
        let element_type = column.number_type.element_type()?;
        let elements = column.elements(element_type).expect("a type holds its own numbers");
        Some((name, Tensor::new(column.shape, elements)))
    });
    Ok(tensors.collect())
}

/// Writes tensors; the format follows from the extension: `.safetensors`, `.npz`, or `.csv` for tensors of equal rows.
///
/// # Errors
/// Names the file and the reason.
pub fn write_tensors(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), Failure> {
    let refuse = |reason: String| Failure::call(format!("{}: {reason}", path.display()));
    match FileFormat::of(path).map_err(refuse)? {
        FileFormat::Safetensors => tensors::write(path, tensors.iter().map(|(name, tensor)| (name, tensor))),
        FileFormat::Numpy => numpy::write(path, tensors),
        FileFormat::CommaSeparated => std::fs::write(path, table(tensors)?).map_err(|error| refuse(error.to_string())),
    }
}

/// Writes tensors as a safetensors file, whole or not at all.
///
/// # Errors
/// When the name does not end in `.safetensors`, or the disk refuses.
pub fn write_model(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), Failure> {
    check_model(path)?;
    tensors::write(path, tensors.iter())
}

/// Refuses the name of a file that cannot be a model.
pub(crate) fn check_model(path: &Path) -> Result<(), Failure> {
    match FileFormat::of(path) {
        Ok(FileFormat::Safetensors) => Ok(()),
        _ => Err(Failure::call(format!("{}: expected a file that ends in .safetensors", path.display()))),
    }
}

/// Tensors of equal rows as CSV with a header, of which [`DataSet::read`] reads the same numbers.
///
/// # Errors
/// When two tensors have different rows.
pub fn table(tensors: &[(String, Tensor)]) -> Result<String, Failure> {
    comma_separated::write(tensors)
}

#[cfg(test)]
mod tests;
