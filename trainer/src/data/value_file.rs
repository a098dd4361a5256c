//! Files with values of parameters and states: sources for ops `given`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::GivenValues;

use super::number::{ColumnFacts, NumberType};
use super::{FileFormat, check_file, numpy, tensors};

/// The tensors of a safetensors or npz file, which are read when they are needed, and only those rows.
#[derive(Clone, Debug)]
pub struct ValueFile {
    path: PathBuf,
    values: BTreeMap<String, FileValue>,
}

#[derive(Clone, Debug)]
struct FileValue {
    facts: ColumnFacts,
    /// The place of its first byte in the file; none in an archive.
    begin: Option<u64>,
}

impl ValueFile {
    /// Reads names, types and shapes of a file that ends in `.safetensors` or `.npz`.
    ///
    /// # Errors
    /// Names the file and what was found and expected.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let values = match check_file(path).and_then(|()| FileFormat::of(path)) {
            Ok(FileFormat::Safetensors) => tensors::contents(path).map(|all| {
                let values = all.into_iter().map(|(name, (facts, begin))| (name, (facts, Some(begin))));
                values.collect::<BTreeMap<_, _>>()
            }),
            Ok(FileFormat::Numpy) => {
                numpy::contents(path).map(|all| all.into_iter().map(|(name, facts)| (name, (facts, None))).collect())
            }
            Ok(FileFormat::CommaSeparated) => {
                Err("found CSV, which has no shapes; expected .safetensors or .npz".into())
            }
            Err(reason) => Err(reason),
        };
        let values = values.map_err(|reason| Failure::call(format!("{}: {reason}", path.display())))?;
        let values = values.into_iter().map(|(name, (facts, begin))| (name, FileValue { facts, begin })).collect();
        Ok(Self { path: path.to_owned(), values })
    }

    /// Whether the file has a tensor of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    fn refuse(&self, reason: impl std::fmt::Display) -> Failure {
        Failure::call(format!("{}: {reason}", self.path.display()))
    }

    fn find(&self, name: &str) -> Result<(&FileValue, NumberType, &[u64]), Failure> {
        let found = self.values.get(name).ok_or_else(|| {
            self.refuse(format!("found no tensor {name:?} among {}; expected one of this name", self.values.len()))
        })?;
        let (number_type, shape) = found.facts.as_ref().map_err(|reason| self.refuse(reason))?;
        Ok((found, *number_type, shape))
    }
}

impl GivenValues for ValueFile {
    fn facts(&self, name: &str) -> Result<(ElementType, Vec<u64>), Failure> {
        let (_, number_type, shape) = self.find(name)?;
        let element_type = number_type.element_type().ok_or_else(|| {
            self.refuse(format!("tensor {name:?}: found the type {number_type:?}; expected one that variables have"))
        })?;
        Ok((element_type, shape.to_vec()))
    }

    fn read(&self, name: &str, first: u64, content: &mut [u8]) -> Result<(), Failure> {
        let (value, number_type, shape) = self.find(name)?;
        let row_bytes = shape.iter().skip(1).fold(number_type.bytes() as u64, |bytes, length| bytes * length);
        let rows = shape.first().copied().unwrap_or(1);
        let end = first.checked_mul(row_bytes).and_then(|begin| begin.checked_add(content.len() as u64));
        if end.is_none_or(|end| end > rows * row_bytes) {
            let expected = content.len();
            return Err(self.refuse(format!(
                "tensor {name:?} has {rows} rows of {row_bytes} bytes; expected {expected} bytes from row {first} on"
            )));
        }
        let read = match value.begin {
            Some(begin) => tensors::read_at(&self.path, begin + first * row_bytes, content),
            None => numpy::read_at(&self.path, name, first * row_bytes, content),
        };
        read.map_err(|reason| self.refuse(format!("tensor {name:?}: {reason}")))
    }
}
