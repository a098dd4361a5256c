//! Safetensors files: columns of data, and values of parameters.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{ModelPath, ModelWriter, OutputTensor};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::Tensor;
use safetensors::tensor::{Dtype, Metadata};

use super::number::{ColumnFacts, NumberType, StoredColumn, column_bytes};

/// Longest header that is read, in bytes; the format's libraries have the same bound.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Reads the tensors with these names that the file has; all of them without names.
pub(super) fn read(path: &Path, wanted: Option<&[&str]>) -> Result<BTreeMap<String, StoredColumn>, String> {
    let mut found = BTreeMap::new();
    for (name, (facts, begin)) in contents(path)? {
        if wanted.is_none_or(|wanted| wanted.contains(&name.as_str())) {
            let (number_type, shape) = facts?;
            let mut bytes = vec![0; column_bytes(number_type, &shape)?];
            read_at(path, begin, &mut bytes)?;
            found.insert(name, StoredColumn { number_type, shape, bytes });
        }
    }
    Ok(found)
}

/// Reads bytes of the file from a place on.
pub(super) fn read_at(path: &Path, begin: u64, bytes: &mut [u8]) -> Result<(), String> {
    let read = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(begin))?;
        file.read_exact(bytes)
    });
    read.map_err(|error| error.to_string())
}

/// Type and shape of each tensor, or why it cannot be read, and the place of its first byte in the file.
pub(super) fn contents(path: &Path) -> Result<BTreeMap<String, (ColumnFacts, u64)>, String> {
    let refuse = |error: &dyn std::fmt::Display| format!("not a safetensors file: {error}");
    let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    let mut prefix = [0; 8];
    read_at(path, 0, &mut prefix).map_err(|error| refuse(&error))?;
    let header_bytes = u64::from_le_bytes(prefix);
    let bound = HEADER_BYTES_MAX.min(length.saturating_sub(8));
    if header_bytes > bound {
        return Err(refuse(&format!("found a header of {header_bytes} bytes; expected at most {bound}")));
    }
    let mut header = vec![0; usize::try_from(header_bytes).map_err(|error| error.to_string())?];
    read_at(path, 8, &mut header)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|error| refuse(&error))?;
    let begin = 8 + header_bytes;
    if header.data_len() as u64 != length - begin {
        let (found, expected) = (length - begin, header.data_len());
        return Err(refuse(&format!("found {found} bytes of tensors; expected {expected}, as its header says")));
    }
    let tensors = header.tensors().into_iter().map(|(name, info)| {
        let shape: Vec<u64> = info.shape.iter().map(|length| *length as u64).collect();
        let facts = number_type(&name, info.dtype).map(|number_type| (number_type, shape));
        (name, (facts, begin + info.data_offsets.0 as u64))
    });
    Ok(tensors.collect())
}

fn number_type(name: &str, found: Dtype) -> Result<NumberType, String> {
    Ok(match found {
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
        other => {
            return Err(format!(
                "tensor {name:?}: found the type {other:?}; expected integers or floats of 8 to 64 bits"
            ));
        }
    })
}

/// Passes on the bytes of the tensor with this name.
pub(crate) type BytesOf<'a> = dyn FnMut(&str, &mut TakeBytes<'_>) -> Result<(), Failure> + 'a;
/// Takes the next bytes of a tensor.
pub(crate) type TakeBytes<'a> = dyn FnMut(&[u8]) -> Result<(), Failure> + 'a;

/// Writes a file whole or not at all: it gets its name when it is complete.
pub(super) fn write<'t>(path: &Path, tensors: impl Iterator<Item = (&'t String, &'t Tensor)>) -> Result<(), Failure> {
    let tensors: Vec<_> = tensors.collect();
    let by_name: BTreeMap<&str, &Tensor> = tensors.iter().map(|(name, tensor)| (name.as_str(), *tensor)).collect();
    let facts = |(name, tensor): &(&String, &Tensor)| {
        ((*name).clone(), tensor.elements().element_type(), tensor.shape().to_vec())
    };
    write_parts(path, tensors.iter().map(facts), &mut |name, take| take(by_name[name].bytes()))
}

/// As [`write()`], of tensors of which never more than a part is in memory: each with its name, type and shape.
pub(crate) fn write_parts(
    path: &Path,
    tensors: impl Iterator<Item = (String, ElementType, Vec<u64>)>,
    bytes_of: &mut BytesOf<'_>,
) -> Result<(), Failure> {
    let refuse = |error: &dyn std::fmt::Display| Failure::call(format!("{}: {error}", path.display()));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The storage would make it.
    std::fs::metadata(folder).map_err(|error| refuse(&error))?;
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| refuse(&"expected a name in UTF-8"))?;
    let output = |(name, element_type, shape)| OutputTensor { name, element_type, shape, parts: Vec::new() };
    let mut outputs: Vec<OutputTensor> = tensors.map(output).collect();
    // Larger elements come first, so that each is aligned in a mapped file.
    outputs.sort_by_key(|output| std::cmp::Reverse(output.element_type.bytes()));
    // Random, because other processes may write to the folder.
    let number = RandomState::new().hash_one(std::process::id());
    let storage = Arc::new(Directory::open(folder)?);
    let mut writer = ModelWriter::create(storage, (&ModelPath::parse(name)?, number), &outputs, &BTreeMap::new())?;
    outputs.iter().try_for_each(|output| bytes_of(&output.name, &mut |bytes| writer.write(bytes)))?;
    writer.finish().map(drop)
}
