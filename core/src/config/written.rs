//! Printer of the message in its text form.

use prost::Message;
use prost::encoding::{decode_key, decode_varint};

use super::message::OptimizerConfig;
use super::schema::{Field, FieldKind, Schema};

/// The text that [`OptimizerSettings::from_text`](super::OptimizerSettings::from_text) reads as this message.
pub(super) fn text(message: &OptimizerConfig) -> String {
    let binary = message.encode_to_vec();
    words(&OptimizerConfig::SCHEMA, &mut binary.as_slice()).join(" ")
}

fn words(schema: &Schema, rest: &mut &[u8]) -> Vec<String> {
    let mut words = Vec::new();
    while !rest.is_empty() {
        let (number, _) = decode_key(rest).expect("the message was just encoded");
        let field = schema.fields.iter().find(|field| field.number == number).expect("the schema has every field");
        words.push(word(field, rest));
    }
    words
}

fn word(field: &Field, rest: &mut &[u8]) -> String {
    let name = field.name;
    let mut varint = || decode_varint(rest).expect("the message was just encoded");
    match field.kind {
        FieldKind::Bool => format!("{name}: {}", varint() != 0),
        FieldKind::Uint32 | FieldKind::Uint64 => format!("{name}: {}", varint()),
        FieldKind::Enumeration(values) => {
            let value = varint();
            let known = values.iter().find(|(_, number)| u64::from(*number) == value);
            format!("{name}: {}", known.expect("the schema has every enumerator").0)
        }
        FieldKind::Double => {
            let (bytes, after) = rest.split_first_chunk().expect("the message was just encoded");
            *rest = after;
            format!("{name}: {:?}", f64::from_le_bytes(*bytes))
        }
        FieldKind::Text => format!("{name}: {}", quoted(take(rest))),
        FieldKind::Message(schema) => {
            let inner = words(schema, &mut take(rest)).join(" ");
            if inner.is_empty() { format!("{name} {{}}") } else { format!("{name} {{ {inner} }}") }
        }
    }
}

/// A quoted string. Only characters that need an escape get one, so that a text grows at most twofold: the longest rule
/// stays within [`PARAMETER_CONFIG_BYTES_MAX`](crate::limits::PARAMETER_CONFIG_BYTES_MAX).
fn quoted(bytes: &[u8]) -> String {
    let text = str::from_utf8(bytes).expect("the message's strings are text");
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

fn take<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
    let length = decode_varint(rest).expect("the message was just encoded");
    let (value, after) = rest.split_at(usize::try_from(length).expect("the message is in memory"));
    *rest = after;
    value
}
