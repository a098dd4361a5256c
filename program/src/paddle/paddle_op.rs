//! An op of Paddle's, with access to its variables and attributes by name.

use pserver_core::error::Failure;

use super::message::{AttributeDesc, OpDesc, SlotDesc};

/// An op and its place in block 0 of a program.
#[derive(Clone, Copy)]
pub(super) struct PaddleOp<'a> {
    op: &'a OpDesc,
    pub(super) place: usize,
    /// The program: main or startup.
    which: &'static str,
}

/// The role of an op: bits that Paddle's `op_role` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PaddleRole {
    Forward,
    /// Of the constant 1 that is the loss's gradient by itself.
    LossGradient,
    Backward,
    Optimize,
}

impl<'a> PaddleOp<'a> {
    pub(super) fn all(which: &'static str, ops: &'a [OpDesc]) -> Vec<Self> {
        ops.iter().enumerate().map(|(place, op)| Self { op, place, which }).collect()
    }

    pub(super) fn kind(&self) -> &'a str {
        &self.op.kind
    }

    /// A refusal that names the op.
    pub(super) fn refuse(&self, reason: impl std::fmt::Display) -> Failure {
        let Self { op, place, which } = self;
        Failure::call(format!("{which} program, block 0, op {place} {}: {reason}", op.kind))
    }

    pub(super) fn role(&self) -> Result<PaddleRole, Failure> {
        match self.int("op_role", 0)? {
            0 | 256 => Ok(PaddleRole::Forward),
            1 => Ok(PaddleRole::Backward),
            257 => Ok(PaddleRole::LossGradient),
            // 16: of the learning rate.
            2 | 18 => Ok(PaddleRole::Optimize),
            role => Err(self.refuse(format!(
                "found op_role {role}; expected 0 or 256 (forward), 1 or 257 (backward), 2 or 18 (optimize)"
            ))),
        }
    }

    /// The variables in an input slot; none when it is absent.
    pub(super) fn inputs(&self, slot: &str) -> &'a [String] {
        variables(&self.op.inputs, slot)
    }

    pub(super) fn input(&self, slot: &str) -> Result<&'a str, Failure> {
        self.one("input", slot, self.inputs(slot))
    }

    pub(super) fn output(&self, slot: &str) -> Result<&'a str, Failure> {
        self.one("output", slot, variables(&self.op.outputs, slot))
    }

    /// Every input variable, of all slots.
    pub(super) fn all_inputs(&self) -> impl Iterator<Item = &'a str> {
        self.op.inputs.iter().flat_map(|slot| &slot.variables).map(String::as_str)
    }

    /// Every output variable, of all slots.
    pub(super) fn all_outputs(&self) -> impl Iterator<Item = &'a str> {
        self.op.outputs.iter().flat_map(|slot| &slot.variables).map(String::as_str)
    }

    /// The variables in an output slot; none when it is absent.
    pub(super) fn outputs(&self, slot: &str) -> &'a [String] {
        variables(&self.op.outputs, slot)
    }

    /// Refuses variables in any other input slot: they change the meaning of an op.
    pub(super) fn check_slots(&self, known: &[&str]) -> Result<(), Failure> {
        let mut others = self.op.inputs.iter().filter(|slot| !known.contains(&slot.name.as_str()));
        match others.find_map(|slot| slot.variables.first().map(|variable| (&slot.name, variable))) {
            Some((slot, variable)) => Err(self.refuse(format!(
                "found variable {variable:?} as input {slot:?}; expected none but {}",
                known.join(", ")
            ))),
            None => Ok(()),
        }
    }

    /// Refuses any other value of attributes that change the meaning of an op; absent ones have this value.
    pub(super) fn check_booleans(&self, expected: &[(&str, bool)]) -> Result<(), Failure> {
        for (name, expected) in expected {
            let found = self.boolean(name, *expected)?;
            if found != *expected {
                return Err(self.refuse(format!("found {name} {found}; expected {expected}")));
            }
        }
        Ok(())
    }

    /// As [`check_booleans`](Self::check_booleans).
    pub(super) fn check_ints(&self, expected: &[(&str, i64)]) -> Result<(), Failure> {
        for (name, expected) in expected {
            let found = self.int(name, *expected)?;
            if found != *expected {
                return Err(self.refuse(format!("found {name} {found}; expected {expected}")));
            }
        }
        Ok(())
    }

    /// As [`check_booleans`](Self::check_booleans).
    pub(super) fn check_float(&self, name: &str, expected: f64) -> Result<(), Failure> {
        let found = self.float(name, expected)?;
        if found.to_bits() == expected.to_bits() {
            return Ok(());
        }
        Err(self.refuse(format!("found {name} {found}; expected {expected}")))
    }

    pub(super) fn boolean(&self, name: &str, absent: bool) -> Result<bool, Failure> {
        self.attribute(name, "a boolean", absent, |attribute| attribute.boolean)
    }

    pub(super) fn int(&self, name: &str, absent: i64) -> Result<i64, Failure> {
        self.attribute(name, "an integer", absent, |attribute| attribute.long.or(attribute.int.map(i64::from)))
    }

    /// A float in binary32 as the shortest decimal number that is read as it: the number that a person wrote.
    pub(super) fn float(&self, name: &str, absent: f64) -> Result<f64, Failure> {
        let value = self.attribute(name, "a float", absent, |attribute| attribute.float.map(shortest))?;
        if value.is_finite() { Ok(value) } else { Err(self.refuse(format!("found {name} {value}; expected a number"))) }
    }

    pub(super) fn text(&self, name: &str) -> &'a str {
        self.find(name).and_then(|attribute| attribute.text.as_deref()).unwrap_or("")
    }

    pub(super) fn texts(&self, name: &str) -> &'a [String] {
        self.find(name).map_or(&[], |attribute| &attribute.texts)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A list of integers of either width; empty when absent.
    pub(super) fn ints(&self, name: &str) -> Vec<i64> {
        let Some(attribute) = self.find(name) else { return Vec::new() };
        attribute.ints.iter().map(|value| i64::from(*value)).chain(attribute.longs.iter().copied()).collect()
    }

    fn find(&self, name: &str) -> Option<&'a AttributeDesc> {
        // As in Paddle, the last of equal names counts.
        self.op.attributes.iter().rev().find(|attribute| attribute.name == name)
    }

    fn attribute<T>(
        &self,
        name: &str,
        expected: &str,
        absent: T,
        value: impl Fn(&AttributeDesc) -> Option<T>,
    ) -> Result<T, Failure> {
        let Some(attribute) = self.find(name) else { return Ok(absent) };
        value(attribute)
            .ok_or_else(|| self.refuse(format!("found no value in attribute {name:?}; expected {expected}")))
    }

    fn one(&self, side: &str, slot: &str, found: &'a [String]) -> Result<&'a str, Failure> {
        match found {
            [one] => Ok(one),
            more => Err(self.refuse(format!("found {} variables in {side} {slot:?}; expected 1", more.len()))),
        }
    }
}

fn variables<'a>(slots: &'a [SlotDesc], name: &str) -> &'a [String] {
    slots.iter().rev().find(|slot| slot.name == name).map_or(&[], |slot| &slot.variables)
}

pub(super) fn shortest(value: f32) -> f64 {
    format!("{value:?}").parse().unwrap_or(f64::from(value))
}
