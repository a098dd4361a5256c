//! NumPy archives (`.npz`): a zip file with a `.npy` file for each array.
//!
//! A `.npy` file begins with the bytes `\x93NUMPY`, its version, the length of the header, and the header: a Python
//! dictionary with the keys `descr`, `fortran_order` and `shape`. The numbers follow.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::Tensor;

use super::number::{ColumnFacts, NumberType, StoredColumn, column_bytes};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Longest header that is read; one of a plain array has 118 bytes.
const HEADER_BYTES_MAX: usize = 1 << 16;
/// Header and numbers begin at multiples of this.
const ALIGNMENT: usize = 64;

/// Reads the arrays with these names that the file has; all of them without names.
pub(super) fn read(path: &Path, wanted: Option<&[&str]>) -> Result<BTreeMap<String, StoredColumn>, String> {
    let mut found = BTreeMap::new();
    visit(path, |name, entry| {
        if wanted.is_none_or(|wanted| wanted.contains(&name)) {
            found.insert(name.to_owned(), array(entry)?);
        }
        Ok(())
    })?;
    Ok(found)
}

/// Type and shape of each array, or why it cannot be read.
pub(super) fn contents(path: &Path) -> Result<BTreeMap<String, ColumnFacts>, String> {
    let mut found = BTreeMap::new();
    visit(path, |name, entry| {
        let facts = header(entry).and_then(|facts| column_bytes(facts.0, &facts.1).map(|_| facts));
        found.insert(name.to_owned(), facts.map_err(|reason| format!("array {name:?}: {reason}")));
        Ok(())
    })?;
    Ok(found)
}

/// Reads bytes of an array's numbers from a place on; the archive is not kept in memory.
pub(super) fn read_at(path: &Path, wanted: &str, begin: u64, bytes: &mut [u8]) -> Result<(), String> {
    visit(path, |name, entry| {
        if name != wanted {
            return Ok(());
        }
        header(entry)?;
        let skipped = std::io::copy(&mut entry.take(begin), &mut std::io::sink());
        skipped.and_then(|_| entry.read_exact(bytes)).map_err(|error| error.to_string())
    })
}

/// Opens each array of a file in turn.
fn visit(path: &Path, mut each: impl FnMut(&str, &mut dyn Read) -> Result<(), String>) -> Result<(), String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| format!("not an npz file: {error}"))?;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| format!("not an npz file: {error}"))?;
        let name = entry.name().map_err(|error| error.to_string())?.into_owned();
        if let Some(name) = name.strip_suffix(".npy") {
            each(name, &mut entry).map_err(|reason| format!("array {name:?}: {reason}"))?;
        }
    }
    Ok(())
}

fn array(source: &mut dyn Read) -> Result<StoredColumn, String> {
    let (number_type, shape) = header(source)?;
    let count = column_bytes(number_type, &shape)? as u64;
    let mut bytes = Vec::new();
    let read = source.take(count + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if read as u64 != count {
        return Err(format!("found {read} bytes of numbers, or more; expected {count}, as its shape {shape:?} says"));
    }
    Ok(StoredColumn { number_type, shape, bytes })
}

/// Reads the bytes before the numbers.
fn header(source: &mut dyn Read) -> ColumnFacts {
    let mut exact = |length: usize| {
        let mut bytes = vec![0; length];
        source.read_exact(&mut bytes).map(|()| bytes).map_err(|error| format!("the header cannot be read: {error}"))
    };
    let begin = exact(MAGIC.len() + 2)?;
    if !begin.starts_with(MAGIC) {
        return Err("found no npy header; expected one".to_owned());
    }
    let length = match begin[MAGIC.len()] {
        1 => exact(2)?.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte)),
        2 | 3 => exact(4)?.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte)),
        other => return Err(format!("found npy version {other}; expected 1, 2 or 3")),
    };
    if length > HEADER_BYTES_MAX {
        return Err(format!("found a header of {length} bytes; expected at most {HEADER_BYTES_MAX}"));
    }
    let header = String::from_utf8(exact(length)?).map_err(|_| "the header is not UTF-8".to_owned())?;
    facts(&header)
}

/// Type and shape of a header.
fn facts(header: &str) -> ColumnFacts {
    let after = |key: &str| {
        let place = header.find(&format!("'{key}':")).ok_or_else(|| format!("the header has no {key}"))?;
        Ok::<&str, String>(header[place + key.len() + 3..].trim_start())
    };
    let descr = after("descr")?.strip_prefix('\'').and_then(|text| text.split_once('\'')).map_or("", |(text, _)| text);
    let number_type = match descr {
        "|b1" => NumberType::Bool,
        "|u1" => NumberType::Uint8,
        "|i1" => NumberType::Int8,
        "<u2" => NumberType::Uint16,
        "<i2" => NumberType::Int16,
        "<u4" => NumberType::Uint32,
        "<i4" => NumberType::Int32,
        "<u8" => NumberType::Uint64,
        "<i8" => NumberType::Int64,
        "<f2" => NumberType::Float16,
        "<f4" => NumberType::Float32,
        "<f8" => NumberType::Float64,
        other => {
            return Err(format!(
                "found the type {other:?}; expected little-endian integers or floats, such as \"<f4\" or \"<i8\""
            ));
        }
    };
    if !after("fortran_order")?.starts_with("False") {
        return Err("found the order of Fortran; expected that of C (numpy.ascontiguousarray)".to_owned());
    }
    let shape = after("shape")?.strip_prefix('(').and_then(|text| text.split_once(')')).map(|(text, _)| text);
    let lengths = shape.unwrap_or("?").split(',').map(str::trim).filter(|length| !length.is_empty());
    let shape = lengths.map(|length| length.trim_end_matches('L').parse()).collect::<Result<Vec<u64>, _>>();
    Ok((number_type, shape.map_err(|_| format!("the header {header:?} has no shape"))?))
}

/// Writes an uncompressed archive.
pub(super) fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<(), Failure> {
    let written = (|| {
        let mut archive = zip::ZipWriter::new(File::create(path)?);
        let options = zip::write::SimpleFileOptions::default()
            .compression_method(zip::CompressionMethod::Stored)
            .large_file(true);
        for (name, tensor) in tensors {
            archive.start_file(format!("{name}.npy"), options)?;
            let descr = descr(tensor.elements().element_type())?;
            let lengths: String = tensor.shape().iter().map(|length| format!("{length}, ")).collect();
            let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", lengths.trim_end());
            let length = (MAGIC.len() + 4 + header.len() + 1).next_multiple_of(ALIGNMENT) - MAGIC.len() - 4;
            let short = u16::try_from(length).map_err(std::io::Error::other)?;
            archive.write_all(MAGIC)?;
            archive.write_all(&[1, 0])?;
            archive.write_all(&short.to_le_bytes())?;
            archive.write_all(format!("{header:<0$}\n", length - 1).as_bytes())?;
            archive.write_all(tensor.bytes())?;
        }
        archive.finish()?.sync_all()?;
        Ok::<(), zip::result::ZipError>(())
    })();
    written.map_err(|error| Failure::call(format!("{}: {error}", path.display())))
}

fn descr(element_type: ElementType) -> std::io::Result<&'static str> {
    Ok(match element_type {
        ElementType::Int32 => "<i4",
        ElementType::Uint32 => "<u4",
        ElementType::Int64 => "<i8",
        ElementType::Uint64 => "<u8",
        ElementType::Float16 => "<f2",
        ElementType::Float32 => "<f4",
        ElementType::Float64 => "<f8",
        ElementType::Bfloat16 => {
            return Err(std::io::Error::other(
                "found bfloat16, which NumPy lacks; expected another type or safetensors",
            ));
        }
    })
}
