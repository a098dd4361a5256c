//! Schema of the message: fields by name, number and kind. The text parser and the check of the binary form use it.

use crate::error::Failure;

/// A message, with its name in Paddle's file or in this project.
#[derive(Debug)]
pub(super) struct Schema {
    pub(super) name: &'static str,
    pub(super) fields: &'static [Field],
}

#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) number: u32,
    pub(super) kind: FieldKind,
    /// Whether it may be given more than once.
    pub(super) is_repeated: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum FieldKind {
    Double,
    Bool,
    Uint32,
    Uint64,
    Text,
    Enumeration(&'static [(&'static str, u32)]),
    Message(&'static Schema),
}

/// The encoding of a field's value in the binary form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum WireType {
    Varint = 0,
    EightBytes = 1,
    Delimited = 2,
}

/// The kind of a field that holds a value of this type.
pub(super) trait Described {
    const KIND: FieldKind;
}

/// An enumeration of the message.
pub(super) trait Enumerated {
    /// Its values' names and numbers.
    const VALUES: &'static [(&'static str, u32)];
}

impl Described for f64 {
    const KIND: FieldKind = FieldKind::Double;
}

impl Described for bool {
    const KIND: FieldKind = FieldKind::Bool;
}

impl Described for u32 {
    const KIND: FieldKind = FieldKind::Uint32;
}

impl Described for u64 {
    const KIND: FieldKind = FieldKind::Uint64;
}

impl Described for String {
    const KIND: FieldKind = FieldKind::Text;
}

/// The number of a field, which prost's attribute has as text.
pub(super) const fn number(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("the number of a field is decimal"),
    }
}

impl FieldKind {
    pub(super) const fn wire_type(self) -> WireType {
        match self {
            Self::Double => WireType::EightBytes,
            Self::Bool | Self::Uint32 | Self::Uint64 | Self::Enumeration(_) => WireType::Varint,
            Self::Text | Self::Message(_) => WireType::Delimited,
        }
    }
}

impl Field {
    /// The number and wire type, which precede the value.
    pub(super) const fn key(&self) -> u64 {
        (self.number as u64) << 3 | self.kind.wire_type() as u64
    }
}

impl Schema {
    /// The names of its fields, for errors about an unknown one.
    pub(super) fn names(&self) -> String {
        self.fields.iter().map(|field| field.name).collect::<Vec<_>>().join(", ")
    }
}

/// The names of an enumeration, for errors about an unknown one.
pub(super) fn enumerators(values: &[(&str, u32)]) -> String {
    values.iter().map(|(name, number)| format!("{name} ({number})")).collect::<Vec<_>>().join(", ")
}

/// Checks the binary form of `schema`: every field known, of its wire type, complete, and within its enumeration.
///
/// Returns the part before the first zero tag. Protobuf has no tag of zero, so the rest is padding: Paddle's C client
/// passes its buffer's capacity as the length.
pub(super) fn checked<'a>(schema: &'static Schema, bytes: &'a [u8]) -> Result<&'a [u8], Failure> {
    if let [0, ..] = bytes {
        let (name, found) = (schema.name, bytes.len());
        return Err(Failure::call(format!(
            "{name}: {found} bytes that begin with a zero, and no field does; expected a field, or a length of 0"
        )));
    }
    let mut rest = bytes;
    while rest.first().is_some_and(|byte| *byte != 0) {
        check_field(schema, schema.name, &mut rest)?;
    }
    Ok(&bytes[..bytes.len() - rest.len()])
}

fn check_field(schema: &'static Schema, path: &str, rest: &mut &[u8]) -> Result<(), Failure> {
    let key = take_varint(rest, path)?;
    let Some(field) = schema.fields.iter().find(|field| u64::from(field.number) == key >> 3) else {
        return Err(Failure::call(format!(
            "{path}: field number {} is not known; expected one of {}",
            key >> 3,
            schema.names()
        )));
    };
    if field.key() != key {
        return Err(Failure::call(format!(
            "{path}.{}: the wire type is {}; expected {}",
            field.name,
            key & 7,
            field.kind.wire_type() as u8
        )));
    }
    check_value(field.kind, &format!("{path}.{}", field.name), rest)
}

fn check_value(kind: FieldKind, path: &str, rest: &mut &[u8]) -> Result<(), Failure> {
    match kind {
        FieldKind::Double => take(rest, 8, path).map(drop),
        FieldKind::Bool | FieldKind::Uint64 => take_varint(rest, path).map(drop),
        FieldKind::Uint32 => {
            let value = take_varint(rest, path)?;
            u32::try_from(value)
                .map(drop)
                .map_err(|_| Failure::call(format!("{path} is {value}; expected at most {}", u32::MAX)))
        }
        FieldKind::Enumeration(values) => {
            let value = take_varint(rest, path)?;
            match values.iter().any(|(_, number)| u64::from(*number) == value) {
                true => Ok(()),
                false => Err(Failure::call(format!("{path} is {value}; expected one of {}", enumerators(values)))),
            }
        }
        FieldKind::Text | FieldKind::Message(_) => {
            let length = take_varint(rest, path)?;
            let mut inner = take(rest, length, path)?;
            while let (FieldKind::Message(schema), false) = (kind, inner.is_empty()) {
                check_field(schema, path, &mut inner)?;
            }
            Ok(())
        }
    }
}

fn take<'a>(rest: &mut &'a [u8], length: u64, path: &str) -> Result<&'a [u8], Failure> {
    let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
    let Some((taken, left)) = split else {
        return Err(Failure::call(format!("{path}: cut short; expected {length} bytes, found {}", rest.len())));
    };
    *rest = left;
    Ok(taken)
}

/// Takes a varint: groups of seven bits, the lowest first, each but the last with its top bit set.
fn take_varint(rest: &mut &[u8], path: &str) -> Result<u64, Failure> {
    let mut value = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let [byte, left @ ..] = rest else {
            return Err(Failure::call(format!("{path}: cut short within a number")));
        };
        *rest = left;
        let group = u64::from(byte & 0x7f);
        if group << shift >> shift != group {
            break;
        }
        value |= group << shift;
        if *byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Failure::call(format!("{path}: a number is longer than 64 bits")))
}
