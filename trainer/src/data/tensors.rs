//! Safetensors files: columns of data, and values of parameters.

use std::collections::BTreeMap;
use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::Tensor;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

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

/// Writes a file.
pub(super) fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), Failure> {
    let refuse = |error: &dyn std::fmt::Display| Failure::call(format!("{}: {error}", path.display()));
    let view = |(name, tensor): &'_ (String, Tensor)| -> Result<(String, Vec<usize>), Failure> {
        let shape = tensor.shape().iter().map(|length| usize::try_from(*length)).collect::<Result<_, _>>();
        Ok((name.clone(), shape.map_err(|error| refuse(&error))?))
    };
    let shapes = tensors.iter().map(view).collect::<Result<Vec<_>, _>>()?;
    let views = shapes.into_iter().zip(tensors).map(|((name, shape), (_, tensor))| {
        let view = TensorView::new(dtype(tensor.elements().element_type()), shape, tensor.bytes());
        view.map(|view| (name, view)).map_err(|error| refuse(&error))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    safetensors::serialize_to_file(views, None, path).map_err(|error| refuse(&error))
}

const fn dtype(element_type: ElementType) -> Dtype {
    match element_type {
        ElementType::Int32 => Dtype::I32,
        ElementType::Uint32 => Dtype::U32,
        ElementType::Int64 => Dtype::I64,
        ElementType::Uint64 => Dtype::U64,
        ElementType::Float16 => Dtype::F16,
        ElementType::Bfloat16 => Dtype::BF16,
        ElementType::Float32 => Dtype::F32,
        ElementType::Float64 => Dtype::F64,
    }
}
