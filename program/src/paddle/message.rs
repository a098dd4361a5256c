//! Messages of PaddlePaddle's `framework.proto` (proto2), with the fields that the import reads; prost skips others.

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use pserver_core::error::Failure;
use pserver_core::limits::{PROGRAM_BYTES_MAX, PROGRAM_PARTS_MAX};

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProgramDesc {
    #[prost(message, repeated, tag = "1")]
    pub(super) blocks: Vec<BlockDesc>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct BlockDesc {
    #[prost(message, repeated, tag = "3")]
    pub(super) variables: Vec<VarDesc>,
    #[prost(message, repeated, tag = "4")]
    pub(super) ops: Vec<OpDesc>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct VarDesc {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) facts: Option<VarType>,
    #[prost(bool, tag = "3")]
    pub(super) is_persistable: bool,
    #[prost(bool, tag = "4")]
    pub(super) is_fed: bool,
    #[prost(bool, tag = "5")]
    pub(super) is_parameter: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct VarType {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "3")]
    pub(super) tensor: Option<LodTensorDesc>,
}

/// The kinds of a [`VarType`] that training programs have.
pub(super) const LOD_TENSOR: i32 = 7;
pub(super) const SELECTED_ROWS: i32 = 8;

#[derive(Clone, PartialEq, Message)]
pub(super) struct LodTensorDesc {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor: Option<TensorDesc>,
    #[prost(int32, tag = "2")]
    pub(super) level: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorDesc {
    #[prost(int32, tag = "1")]
    pub(super) element_type: i32,
    #[prost(int64, repeated, packed = "false", tag = "2")]
    pub(super) dims: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct OpDesc {
    #[prost(message, repeated, tag = "1")]
    pub(super) inputs: Vec<SlotDesc>,
    #[prost(message, repeated, tag = "2")]
    pub(super) outputs: Vec<SlotDesc>,
    #[prost(string, tag = "3")]
    pub(super) kind: String,
    #[prost(message, repeated, tag = "4")]
    pub(super) attributes: Vec<AttributeDesc>,
}

/// The variables in one named place of an op's signature.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SlotDesc {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) variables: Vec<String>,
}

/// Of INT, FLOAT, STRING, INTS, STRINGS, BOOLEAN, LONG and LONGS. No mapped op has FLOATS of a meaning.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AttributeDesc {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(int32, optional, tag = "3")]
    pub(super) int: Option<i32>,
    #[prost(float, optional, tag = "4")]
    pub(super) float: Option<f32>,
    #[prost(string, optional, tag = "5")]
    pub(super) text: Option<String>,
    #[prost(int32, repeated, packed = "false", tag = "6")]
    pub(super) ints: Vec<i32>,
    #[prost(string, repeated, tag = "8")]
    pub(super) texts: Vec<String>,
    #[prost(bool, optional, tag = "10")]
    pub(super) boolean: Option<bool>,
    #[prost(int64, optional, tag = "13")]
    pub(super) long: Option<i64>,
    #[prost(int64, repeated, packed = "false", tag = "15")]
    pub(super) longs: Vec<i64>,
}

/// The only block of a program.
///
/// # Errors
/// When the bytes are too many, have too many parts, are no program, or the program has more or fewer blocks than one;
/// `which` names the program.
pub(super) fn decode(which: &str, bytes: &[u8]) -> Result<BlockDesc, Failure> {
    let refuse = |reason: String| Failure::call(format!("the {which} program {reason}"));
    let found = bytes.len();
    if found > PROGRAM_BYTES_MAX {
        return Err(refuse(format!("has {found} bytes; expected at most {PROGRAM_BYTES_MAX}")));
    }
    if count_parts(bytes, DEPTH) > PROGRAM_PARTS_MAX {
        let remedy = "without the attribute op_callstack there are fewer";
        return Err(refuse(format!("has more parts than {PROGRAM_PARTS_MAX}; expected at most as many: {remedy}")));
    }
    let mut program =
        ProgramDesc::decode(bytes).map_err(|error| refuse(format!("is no ProgramDesc in protobuf: {error}")))?;
    match (program.blocks.len(), program.blocks.pop()) {
        (1, Some(block)) => Ok(block),
        (blocks, _) => Err(refuse(format!("has {blocks} blocks; expected 1, without loops and branches"))),
    }
}

/// Levels of messages above an op's texts: program, block, op, attribute or slot.
const DEPTH: usize = 4;

/// Counts the messages and texts of a message before any is allocated: an empty text takes two bytes in the message and
/// twelve times as many in memory, an empty attribute far more. Texts whose bytes look like messages count as more than
/// they are, so the count is an upper bound.
fn count_parts(mut rest: &[u8], depth: usize) -> usize {
    let mut count = 0_usize;
    while let Ok((number, wire_type)) = decode_key(&mut rest) {
        if wire_type == WireType::LengthDelimited {
            let length = decode_varint(&mut rest).ok().and_then(|length| usize::try_from(length).ok());
            let Some((part, after)) = length.and_then(|length| rest.split_at_checked(length)) else { break };
            rest = after;
            count += 1 + if depth > 1 && is_message(depth, number) { count_parts(part, depth - 1) } else { 0 };
        } else if skip_field(wire_type, number, &mut rest, DecodeContext::default()).is_err() {
            break;
        }
    }
    count
}

/// Whether a field of this number is a message that contains parts: blocks; variables and ops; slots and attributes.
const fn is_message(depth: usize, number: u32) -> bool {
    match depth {
        4 => number == 1,
        3 => number == 4,
        _ => matches!(number, 1 | 2 | 4),
    }
}
