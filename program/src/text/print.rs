//! Printer of the text form of programs.

use std::fmt::{self, Formatter, Write};

use crate::attributes::{self, Attribute};
use crate::block::Program;
use crate::op::Op;
use pserver_core::text::lexer::is_bare;

pub(super) fn program(program: &Program, formatter: &mut Formatter<'_>) -> fmt::Result {
    for (index, block) in program.blocks.iter().enumerate() {
        if index > 0 {
            formatter.write_char('\n')?;
        }
        write!(formatter, "block {index} ")?;
        if let Some(parent) = block.parent {
            write!(formatter, "in {parent} ")?;
        }
        formatter.write_str("{\n")?;
        for variable in &block.variables {
            write!(formatter, "    {} ", variable.purpose.name())?;
            name(&variable.name, formatter)?;
            writeln!(formatter, ": {}", variable.facts)?;
        }
        if !block.variables.is_empty() && !block.ops.is_empty() {
            formatter.write_char('\n')?;
        }
        block.ops.iter().try_for_each(|op| self::op(op, formatter))?;
        formatter.write_str("}\n")?;
    }
    Ok(())
}

fn op(op: &Op, formatter: &mut Formatter<'_>) -> fmt::Result {
    write!(formatter, "    {} ", op.role.name())?;
    list(&op.outputs, formatter)?;
    formatter.write_str(if op.outputs.is_empty() { "" } else { " = " })?;
    write!(formatter, "{}(", op.kind.name())?;
    list(&op.inputs, formatter)?;
    let mut is_first = op.inputs.is_empty();
    for (name, attribute) in attributes::attributes(&op.kind) {
        write!(formatter, "{}{name}=", if is_first { "" } else { ", " })?;
        is_first = false;
        match attribute {
            Attribute::Text(text) => quoted(&text, formatter)?,
            other => write!(formatter, "{other}")?,
        }
    }
    formatter.write_str(")\n")
}

fn list(names: &[String], formatter: &mut Formatter<'_>) -> fmt::Result {
    for (place, name) in names.iter().enumerate() {
        formatter.write_str(if place == 0 { "" } else { ", " })?;
        self::name(name, formatter)?;
    }
    Ok(())
}

fn name(name: &str, formatter: &mut Formatter<'_>) -> fmt::Result {
    if is_bare(name) { formatter.write_str(name) } else { quoted(name, formatter) }
}

fn quoted(text: &str, formatter: &mut Formatter<'_>) -> fmt::Result {
    formatter.write_char('"')?;
    for character in text.chars() {
        match character {
            '"' | '\\' => write!(formatter, "\\{character}")?,
            '\n' => formatter.write_str("\\n")?,
            character if character.is_control() => write!(formatter, "\\u{{{:x}}}", u32::from(character))?,
            character => formatter.write_char(character)?,
        }
    }
    formatter.write_char('"')
}
