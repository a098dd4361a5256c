//! Binary form of programs: protobuf (proto3), package `pserver.program`. Numbers never change.
//!
//! ```text
//! message Program   { repeated Block blocks = 1; }
//! message Block     { optional uint32 parent = 1; repeated Variable variables = 2; repeated Op ops = 3; }
//! message Variable  { string name = 1; Facts facts = 2; uint32 purpose = 3; }
//! message Facts     { oneof facts { Dense dense = 1; Rows rows = 2; Queue queue = 3; Strings strings = 4; } }
//! message Dense     { uint32 element_type = 1; repeated Dim dims = 2; }
//! message Dim       { optional uint64 length = 1; }          // none is the batch
//! message Rows      { uint32 element_type = 1; uint64 height = 2; uint64 width = 3; }
//! message Queue     { Facts of = 1; uint64 capacity = 2; }
//! message Strings   { }
//! message Op        { string kind = 1; repeated string inputs = 2; repeated string outputs = 3;
//!                     repeated Attribute attributes = 4; uint32 role = 5; }
//! message Attribute { string name = 1; oneof value { bool bool = 2; uint64 whole = 3; double real = 4;
//!                     string text = 5; Wholes wholes = 6; string word = 7; } }
//! message Wholes    { repeated uint64 values = 1; }
//! ```
//!
//! Kinds, attributes and words are those of the text form. Purposes and roles are counted from zero in the order of
//! [`Purpose::ALL`] and [`OpRole::ALL`]; element types have the numbers of [`ElementType::number`].

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::{PROGRAM_BLOCKS_MAX, PROGRAM_BYTES_MAX, PROGRAM_OPS_MAX, PROGRAM_VARIABLES_MAX};

use super::attributes::{self, Attribute};
use super::block::{Block, Program};
use super::op::{Op, OpRole};
use super::variable::{Dim, Purpose, Variable, VariableFacts};

#[derive(Clone, PartialEq, Message)]
struct ProgramMessage {
    #[prost(message, repeated, tag = "1")]
    blocks: Vec<BlockMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct BlockMessage {
    #[prost(uint32, optional, tag = "1")]
    parent: Option<u32>,
    #[prost(message, repeated, tag = "2")]
    variables: Vec<VariableMessage>,
    #[prost(message, repeated, tag = "3")]
    ops: Vec<OpMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct VariableMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    facts: Option<FactsMessage>,
    #[prost(uint32, tag = "3")]
    purpose: u32,
}

#[derive(Clone, PartialEq, Message)]
struct FactsMessage {
    #[prost(oneof = "FactsKind", tags = "1, 2, 3, 4")]
    kind: Option<FactsKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum FactsKind {
    #[prost(message, tag = "1")]
    Dense(DenseMessage),
    #[prost(message, tag = "2")]
    Rows(RowsMessage),
    #[prost(message, tag = "3")]
    Queue(Box<QueueMessage>),
    #[prost(message, tag = "4")]
    Strings(StringsMessage),
}

#[derive(Clone, PartialEq, Message)]
struct DenseMessage {
    #[prost(uint32, tag = "1")]
    element_type: u32,
    #[prost(message, repeated, tag = "2")]
    dims: Vec<DimMessage>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct DimMessage {
    #[prost(uint64, optional, tag = "1")]
    length: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct RowsMessage {
    #[prost(uint32, tag = "1")]
    element_type: u32,
    #[prost(uint64, tag = "2")]
    height: u64,
    #[prost(uint64, tag = "3")]
    width: u64,
}

#[derive(Clone, PartialEq, Message)]
struct QueueMessage {
    #[prost(message, optional, boxed, tag = "1")]
    of: Option<Box<FactsMessage>>,
    #[prost(uint64, tag = "2")]
    capacity: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct StringsMessage {}

#[derive(Clone, PartialEq, Message)]
struct OpMessage {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, repeated, tag = "2")]
    inputs: Vec<String>,
    #[prost(string, repeated, tag = "3")]
    outputs: Vec<String>,
    #[prost(message, repeated, tag = "4")]
    attributes: Vec<AttributeMessage>,
    #[prost(uint32, tag = "5")]
    role: u32,
}

#[derive(Clone, PartialEq, Message)]
struct AttributeMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(oneof = "ValueMessage", tags = "2, 3, 4, 5, 6, 7")]
    value: Option<ValueMessage>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum ValueMessage {
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(uint64, tag = "3")]
    Whole(u64),
    #[prost(double, tag = "4")]
    Real(f64),
    #[prost(string, tag = "5")]
    Text(String),
    #[prost(message, tag = "6")]
    Wholes(WholesMessage),
    #[prost(string, tag = "7")]
    Word(String),
}

#[derive(Clone, PartialEq, Message)]
struct WholesMessage {
    #[prost(uint64, repeated, tag = "1")]
    values: Vec<u64>,
}

impl Program {
    /// The binary form, from which [`decode`](Self::decode) makes an equal program.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        ProgramMessage { blocks: self.blocks.iter().map(encode_block).collect() }.encode_to_vec()
    }

    /// Reads the binary form. The program is unchecked until a [`Graph`](super::Graph) is made of it.
    ///
    /// # Errors
    /// Names the block and the variable or the op, what was found and what was expected.
    pub fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        if bytes.len() > PROGRAM_BYTES_MAX {
            let found = bytes.len();
            return Err(Failure::call(format!("the program has {found} bytes; expected at most {PROGRAM_BYTES_MAX}")));
        }
        check_counts(bytes)?;
        let message = ProgramMessage::decode(bytes)
            .map_err(|error| Failure::call(format!("found bytes that are no program: {error}")))?;
        let blocks = message.blocks.into_iter().enumerate().map(|(index, block)| decode_block(index, block));
        Ok(Self { blocks: blocks.collect::<Result<_, _>>()? })
    }
}

/// Bound of the attributes of an op, above the number that any kind has.
const ATTRIBUTES_MAX: usize = 16;

/// Counts the parts of a program before any is allocated: an empty op takes two bytes in the message and fifty times as
/// many in memory.
fn check_counts(bytes: &[u8]) -> Result<(), Failure> {
    let (mut blocks, mut variables, mut ops) = (0, 0, 0);
    let check = |found: usize, what: &str, most: usize| match found > most {
        true => Err(Failure::call(format!("the program has more than {most} {what}; expected at most {most}"))),
        false => Ok(()),
    };
    for (_, block) in parts(bytes).filter(|(number, _)| *number == 1) {
        blocks += 1;
        check(blocks, "blocks", PROGRAM_BLOCKS_MAX)?;
        for (number, part) in parts(block) {
            variables += usize::from(number == 2);
            check(variables, "variables", PROGRAM_VARIABLES_MAX)?;
            if number == 3 {
                ops += 1;
                check(ops, "ops", PROGRAM_OPS_MAX)?;
                let attributes = parts(part).filter(|(number, _)| *number == 4).count();
                check(attributes, "attributes of one op", ATTRIBUTES_MAX)?;
            }
        }
    }
    Ok(())
}

/// The texts and messages in a message, each with its field's number. The list ends at bytes that are no message, where
/// decoding fails too.
fn parts(mut rest: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        loop {
            let (number, wire_type) = decode_key(&mut rest).ok()?;
            if wire_type == WireType::LengthDelimited {
                let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
                let (part, after) = rest.split_at_checked(length)?;
                rest = after;
                return Some((number, part));
            }
            skip_field(wire_type, number, &mut rest, DecodeContext::default()).ok()?;
        }
    })
}

fn encode_block(block: &Block) -> BlockMessage {
    let variables = block.variables.iter().map(|variable| VariableMessage {
        name: variable.name.clone(),
        facts: Some(encode_facts(&variable.facts)),
        purpose: number(&Purpose::ALL, variable.purpose),
    });
    let ops = block.ops.iter().map(|op| OpMessage {
        kind: op.kind.name().to_owned(),
        inputs: op.inputs.clone(),
        outputs: op.outputs.clone(),
        attributes: attributes::attributes(&op.kind).into_iter().map(encode_attribute).collect(),
        role: number(&OpRole::ALL, op.role),
    });
    BlockMessage { parent: block.parent, variables: variables.collect(), ops: ops.collect() }
}

fn encode_facts(facts: &VariableFacts) -> FactsMessage {
    let kind = match facts {
        VariableFacts::Dense { element_type, shape } => {
            let dims = shape.iter().map(|dim| DimMessage {
                length: match dim {
                    Dim::Fixed(length) => Some(*length),
                    Dim::Batch => None,
                },
            });
            FactsKind::Dense(DenseMessage { element_type: element_type.number().into(), dims: dims.collect() })
        }
        VariableFacts::SelectedRows { element_type, height, width } => {
            let element_type = element_type.number().into();
            FactsKind::Rows(RowsMessage { element_type, height: *height, width: *width })
        }
        VariableFacts::Queue { of, capacity } => {
            let of = Some(Box::new(encode_facts(of)));
            FactsKind::Queue(Box::new(QueueMessage { of, capacity: *capacity }))
        }
        VariableFacts::Strings => FactsKind::Strings(StringsMessage {}),
    };
    FactsMessage { kind: Some(kind) }
}

fn encode_attribute((name, attribute): (&'static str, Attribute)) -> AttributeMessage {
    let value = match attribute {
        Attribute::Bool(value) => ValueMessage::Bool(value),
        Attribute::Whole(value) => ValueMessage::Whole(value),
        Attribute::Real(value) => ValueMessage::Real(value),
        Attribute::Text(text) => ValueMessage::Text(text),
        Attribute::Wholes(values) => ValueMessage::Wholes(WholesMessage { values }),
        Attribute::Word(word) => ValueMessage::Word(word),
    };
    AttributeMessage { name: name.to_owned(), value: Some(value) }
}

fn decode_block(index: usize, message: BlockMessage) -> Result<Block, Failure> {
    let variables = message.variables.into_iter().map(|variable| {
        let name = variable.name.clone();
        decode_variable(variable).map_err(|reason| Failure::call(format!("block {index}, variable {name:?}: {reason}")))
    });
    let variables = variables.collect::<Result<_, _>>()?;
    let ops = message.ops.into_iter().enumerate().map(|(place, op)| {
        let kind = op.kind.clone();
        decode_op(op).map_err(|reason| Failure::call(format!("block {index}, op {place} {kind}: {reason}")))
    });
    Ok(Block { parent: message.parent, variables, ops: ops.collect::<Result<_, _>>()? })
}

fn decode_variable(message: VariableMessage) -> Result<Variable, String> {
    let purpose = numbered(&Purpose::ALL, message.purpose, "purpose")?;
    let facts = message.facts.ok_or("found no facts; expected some")?;
    Ok(Variable { name: message.name, facts: decode_facts(facts)?, purpose })
}

fn decode_facts(message: FactsMessage) -> Result<VariableFacts, String> {
    match message.kind.ok_or("found no facts; expected dense, rows, queue or strings")? {
        FactsKind::Dense(DenseMessage { element_type, dims }) => {
            let shape = dims.iter().map(|dim| dim.length.map_or(Dim::Batch, Dim::Fixed)).collect();
            Ok(VariableFacts::Dense { element_type: decode_type(element_type)?, shape })
        }
        FactsKind::Rows(RowsMessage { element_type, height, width }) => {
            Ok(VariableFacts::SelectedRows { element_type: decode_type(element_type)?, height, width })
        }
        FactsKind::Queue(queue) => {
            let of = queue.of.ok_or("found a queue of nothing; expected facts of its items")?;
            if let Some(FactsKind::Queue(_)) = of.kind {
                return Err("found a queue of queues; expected dense, rows or strings in it".to_owned());
            }
            Ok(VariableFacts::Queue { of: Box::new(decode_facts(*of)?), capacity: queue.capacity })
        }
        FactsKind::Strings(StringsMessage {}) => Ok(VariableFacts::Strings),
    }
}

fn decode_type(number: u32) -> Result<ElementType, String> {
    ElementType::from_number(number.into()).ok_or_else(|| format!("found element type {number}; expected 0 to 7"))
}

fn decode_op(message: OpMessage) -> Result<Op, String> {
    let mut attributes = Vec::with_capacity(message.attributes.len());
    for AttributeMessage { name, value } in message.attributes {
        let value = match value {
            Some(ValueMessage::Bool(value)) => Attribute::Bool(value),
            Some(ValueMessage::Whole(value)) => Attribute::Whole(value),
            Some(ValueMessage::Real(value)) => Attribute::Real(value),
            Some(ValueMessage::Text(text)) => Attribute::Text(text),
            Some(ValueMessage::Wholes(wholes)) => Attribute::Wholes(wholes.values),
            Some(ValueMessage::Word(word)) => Attribute::Word(word),
            None => return Err(format!("attribute {name:?} has no value; expected one")),
        };
        attributes.push((name, value));
    }
    let role = numbered(&OpRole::ALL, message.role, "role")?;
    let kind = attributes::kind(&message.kind, attributes).map_err(|refusal| refusal.reason)?;
    Ok(Op { kind, inputs: message.inputs, outputs: message.outputs, role })
}

/// The index of a value in a short list.
fn number<T: PartialEq>(all: &[T], one: T) -> u32 {
    let place = all.iter().position(|found| *found == one).expect("it is one of all");
    u32::try_from(place).expect("there are a few")
}

fn numbered<T: Copy>(all: &[T], number: u32, what: &str) -> Result<T, String> {
    let found = all.get(number as usize).copied();
    found.ok_or_else(|| format!("found {what} {number}; expected 0 to {}", all.len() - 1))
}
