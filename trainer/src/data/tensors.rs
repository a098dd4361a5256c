//! Safetensors files: columns of data, and values of parameters.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{ModelPath, ModelWriter, OutputTensor};
use pserver_core::error::Failure;
use pserver_program::Tensor;
use safetensors::tensor::{Dtype, SafeTensors};

use super::number::{NumberType, StoredColumn};

/// Reads the tensors with these names that the file has; all of them without names.
pub(super) fn read(path: &Path, wanted: Option<&[&str]>) -> Result<BTreeMap<String, StoredColumn>, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| format!("not a safetensors file: {error}"))?;
    let mut found = BTreeMap::new();
    for (name, view) in file.iter().filter(|(name, _)| wanted.is_none_or(|wanted| wanted.contains(name))) {
        let number_type = number_type(view.dtype()).ok_or_else(|| {
            let found = view.dtype();
            format!("tensor {name:?}: found the type {found:?}; expected integers or floats of 8 to 64 bits")
        })?;
        let shape = view.shape().iter().map(|length| *length as u64).collect();
        found.insert(name.to_owned(), StoredColumn { number_type, shape, bytes: view.data().to_vec() });
    }
    Ok(found)
}

const fn number_type(found: Dtype) -> Option<NumberType> {
    Some(match found {
        Dtype::BOOL => NumberType::Bool,
        Dtype::U8 => NumberType::Uint8,
        Dtype::I8 => NumberType::Int8,
        Dtype::U16 => NumberType::Uint16,
        Dtype::I16 => NumberType::Int16,
        Dtype::U32 => NumberType::Uint32,
        Dtype::I32 => NumberType::Int32,
        Dtype::U64 => NumberType::Uint64,
        Dtype::I64 => NumberType::Int64,
        Dtype::F16 => NumberType::Float16,
        Dtype::BF16 => NumberType::Bfloat16,
        Dtype::F32 => NumberType::Float32,
        Dtype::F64 => NumberType::Float64,
        _ => return None,
    })
}

/// Writes a file whole or not at all: it gets its name when it is complete.
pub(super) fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), Failure> {
    let refuse = |error: &dyn std::fmt::Display| Failure::call(format!("{}: {error}", path.display()));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The storage would make it.
    std::fs::metadata(folder).map_err(|error| refuse(&error))?;
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| refuse(&"expected a name in UTF-8"))?;
    let mut tensors: Vec<&(String, Tensor)> = tensors.iter().collect();
    // Larger elements come first, so that each is aligned in a mapped file.
    tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.elements().element_type().bytes()));
    let outputs = tensors.iter().map(|(name, tensor)| OutputTensor {
        name: name.clone(),
        element_type: tensor.elements().element_type(),
        shape: tensor.shape().to_vec(),
        parts: Vec::new(),
    });
    let outputs: Vec<OutputTensor> = outputs.collect();
    // Random, because other processes may write to the folder.
    let number = RandomState::new().hash_one(std::process::id());
    let storage = Arc::new(Directory::open(folder)?);
    let mut writer = ModelWriter::create(storage, (&ModelPath::parse(name)?, number), &outputs, &BTreeMap::new())?;
    tensors.iter().try_for_each(|(_, tensor)| writer.write(tensor.bytes()))?;
    writer.finish().map(drop)
}
