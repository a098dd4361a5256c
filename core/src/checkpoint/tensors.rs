//! The header of a safetensors file: eight bytes of length, JSON that names every tensor's type, shape and place,
//! then the tensors' bytes without a gap.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::storage::StorageReader;
use crate::dtype::ElementType;
use crate::error::Failure;

/// The longest JSON that readers of the format accept.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

const METADATA: &str = "__metadata__";
/// The data begins at a multiple of the largest element, so that a mapped file's tensors are aligned.
const ALIGNMENT: usize = 8;

/// Builds a header, tensor after tensor, in the order of their bytes.
pub(super) struct HeaderBuilder {
    json: Vec<u8>,
    data_bytes: u64,
}

/// A header that was read.
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    /// In the order of their bytes.
    pub(super) tensors: Vec<FileTensor>,
}

/// A tensor in a file. `start` and `end` count from the file's first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileTensor {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl HeaderBuilder {
    pub(super) fn new(metadata: &BTreeMap<String, String>) -> Self {
        let mut builder = Self { json: b"{".to_vec(), data_bytes: 0 };
        if !metadata.is_empty() {
            builder.member(METADATA, &json!(metadata));
        }
        builder
    }

    /// Adds a tensor after the last. The caller has checked that its bytes can be counted.
    pub(super) fn add(&mut self, name: &str, element_type: ElementType, shape: &[u64]) {
        let bytes = tensor_bytes(element_type, shape).expect("the caller has checked the shape");
        let start = self.data_bytes;
        let end = start.checked_add(bytes).expect("a file is shorter than 2^64 bytes");
        self.member(name, &json!({"dtype": dtype(element_type), "shape": shape, "data_offsets": [start, end]}));
        self.data_bytes = end;
    }

    /// The bytes that the tensors so far will take.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The bytes of JSON so far.
    pub(super) fn header_bytes(&self) -> u64 {
        self.json.len() as u64
    }

    /// The file's first bytes, up to the first tensor's.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.json.push(b'}');
        self.json.resize(self.json.len().next_multiple_of(ALIGNMENT), b' ');
        let length = self.json.len() as u64;
        self.json.splice(0..0, length.to_le_bytes());
        self.json
    }

    fn member(&mut self, name: &str, value: &serde_json::Value) {
        if self.json.len() > 1 {
            self.json.push(b',');
        }
        let text = format!("{}:{value}", json!(name));
        self.json.extend_from_slice(text.as_bytes());
    }
}

/// Reads and checks a header: every tensor's length fits its shape, none overlap, and every byte belongs to one.
pub(super) fn read_header(reader: &mut dyn StorageReader, path: &str) -> Result<Header, Failure> {
    let wrong = |what: String| Failure::Call(format!("{path:?} is not a whole safetensors file: {what}"));
    let length = reader.len();
    if length < 8 {
        return Err(wrong(format!("it has {length} bytes and its header needs 8")));
    }
    let mut prefix = [0; 8];
    reader.read_at(0, &mut prefix)?;
    let json_bytes = u64::from_le_bytes(prefix);
    let bound = HEADER_BYTES_MAX.min(length - 8);
    if json_bytes > bound {
        let text = prefix.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
        return Err(wrong(match text {
            true => format!("it begins with the text \"{}\"; expected the length of a header", prefix.escape_ascii()),
            false => format!("it claims a header of {json_bytes} bytes where at most {bound} can be"),
        }));
    }
    let mut json = vec![0; usize::try_from(json_bytes).expect("bounded above")];
    reader.read_at(8, &mut json)?;
    let raw: RawTensorHeader = serde_json::from_slice(&json).map_err(|error| wrong(format!("its header: {error}")))?;
    let tensors = place(raw.tensors, 8 + json_bytes, length).map_err(wrong)?;
    Ok(Header { metadata: raw.metadata, tensors })
}

/// The bytes of a tensor, when they can be counted in 64 bits.
pub(super) fn tensor_bytes(element_type: ElementType, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(element_type.bytes(), |bytes, dimension| bytes.checked_mul(*dimension))
}

/// The format's name of an element type.
pub(super) fn dtype(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::Int32 => "I32",
        ElementType::Uint32 => "U32",
        ElementType::Int64 => "I64",
        ElementType::Uint64 => "U64",
        ElementType::Float32 => "F32",
        ElementType::Float64 => "F64",
        ElementType::Float16 => "F16",
        ElementType::Bfloat16 => "BF16",
    }
}

fn place(raw: Vec<(String, RawTensor)>, data_start: u64, file_bytes: u64) -> Result<Vec<FileTensor>, String> {
    let mut raw = raw;
    // The sort is stable: tensors without bytes keep their order in the header.
    raw.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let mut at = data_start;
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, RawTensor { dtype, shape, data_offsets: (start, end) }) in raw {
        let start = data_start.checked_add(start).filter(|start| *start == at);
        let end = data_start.checked_add(end).filter(|end| at <= *end);
        let (Some(start), Some(end)) = (start, end) else {
            return Err(format!("tensor {name:?} does not begin where the one before it ends, at {at}"));
        };
        check_shape(&name, &dtype, &shape, end - start)?;
        tensors.push(FileTensor { name, dtype, shape, start, end });
        at = end;
    }
    if at != file_bytes {
        return Err(format!("it has {file_bytes} bytes and its header describes {at}"));
    }
    Ok(tensors)
}

fn check_shape(name: &str, found: &str, shape: &[u64], bytes: u64) -> Result<(), String> {
    // Tensors of other types are listed and not read.
    let Some(element_type) = ElementType::ALL.into_iter().find(|known| dtype(*known) == found) else {
        return Ok(());
    };
    if tensor_bytes(element_type, shape) == Some(bytes) {
        return Ok(());
    }
    Err(format!("tensor {name:?} of type {found} and shape {shape:?} has {bytes} bytes"))
}

#[derive(Default)]
struct RawTensorHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Keeps the order of the members, which a map would lose.
impl<'de> Deserialize<'de> for RawTensorHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = RawTensorHeader;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<RawTensorHeader, A::Error> {
                let mut header = RawTensorHeader::default();
                while let Some(name) = members.next_key::<String>()? {
                    if name == METADATA {
                        header.metadata = members.next_value()?;
                    } else {
                        header.tensors.push((name, members.next_value()?));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(Members)
    }
}
