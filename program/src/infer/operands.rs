//! Operands of an op, with checks of their number, types and shapes.

use crate::op::Op;
use crate::variable::{Dim, VariableFacts};
use pserver_core::dtype::ElementType;

/// The operands of one op.
pub(super) struct Operands<'a> {
    pub(super) op: &'a Op,
    inputs: &'a [&'a VariableFacts],
    declared: &'a [Option<&'a VariableFacts>],
}

impl<'a> Operands<'a> {
    pub(super) fn new(op: &'a Op, inputs: &'a [&'a VariableFacts], declared: &'a [Option<&'a VariableFacts>]) -> Self {
        Self { op, inputs, declared }
    }

    /// Checks how many inputs there are.
    pub(super) fn check_inputs(&self, least: usize, most: usize) -> Result<(), String> {
        check_count("inputs", self.inputs.len(), least, most)
    }

    /// Checks how many outputs there are.
    pub(super) fn check_outputs(&self, expected: usize) -> Result<(), String> {
        check_count("outputs", self.declared.len(), expected, expected)
    }

    pub(super) fn outputs_between(&self, least: usize, most: usize) -> Result<(), String> {
        check_count("outputs", self.declared.len(), least, most)
    }

    pub(super) fn input_count(&self) -> usize {
        self.inputs.len()
    }

    /// The facts of an input that is known to be present.
    pub(super) fn input(&self, place: usize) -> &'a VariableFacts {
        self.inputs[place]
    }

    /// The declared facts of an output, which do not follow from the inputs.
    pub(super) fn declared(&self, place: usize) -> Result<&'a VariableFacts, String> {
        self.declared[place].ok_or_else(|| {
            let name = &self.op.outputs[place];
            format!(
                "found no declaration of output {name:?}; expected one, because its facts do not follow from inputs"
            )
        })
    }

    /// An input that must be dense, and may have any shape that rows have as a matrix.
    pub(super) fn dense(&self, place: usize) -> Result<(ElementType, &'a [Dim]), String> {
        match self.input(place) {
            VariableFacts::Dense { element_type, shape } => Ok((*element_type, shape)),
            VariableFacts::SelectedRows { .. } => {
                Err(self.misfit(place, "a dense tensor, which the sum of a dense one and these rows is"))
            }
            _ => Err(self.misfit(place, "a dense tensor")),
        }
    }

    /// An input that must be dense, of f32 or f64.
    pub(super) fn floats(&self, place: usize) -> Result<(ElementType, &'a [Dim]), String> {
        match self.dense(place)? {
            found @ (ElementType::Float32 | ElementType::Float64, _) => Ok(found),
            _ => Err(self.misfit(place, "float32 or float64")),
        }
    }

    /// [`floats`](Self::floats) of a shape that rows as a matrix have not, which `expected` says.
    pub(super) fn floats_of(&self, place: usize, expected: &str) -> Result<(ElementType, &'a [Dim]), String> {
        match self.input(place) {
            VariableFacts::SelectedRows { .. } => Err(self.misfit(place, expected)),
            _ => self.floats(place),
        }
    }

    /// An input that must be a matrix of f32 or f64.
    pub(super) fn matrix(&self, place: usize) -> Result<(ElementType, Dim, Dim), String> {
        match self.floats(place)? {
            (element_type, [rows, columns]) => Ok((element_type, *rows, *columns)),
            _ => Err(self.misfit(place, "two dimensions")),
        }
    }

    /// An input that must be dense, of 64-bit signed integers.
    pub(super) fn integers(&self, place: usize) -> Result<&'a [Dim], String> {
        match self.input(place) {
            VariableFacts::Dense { element_type: ElementType::Int64, shape } => Ok(shape),
            VariableFacts::Dense { .. } => Err(self.misfit(place, "int64")),
            _ => Err(self.misfit(place, "a dense tensor of int64")),
        }
    }

    /// An input that must have exactly these facts.
    pub(super) fn exactly(&self, place: usize, expected: &VariableFacts) -> Result<(), String> {
        if self.input(place) == expected { Ok(()) } else { Err(self.misfit(place, &expected.to_string())) }
    }

    /// An input that must be dense and of exactly this shape and type.
    pub(super) fn exactly_dense(&self, place: usize, element_type: ElementType, shape: &[Dim]) -> Result<(), String> {
        self.exactly(place, &VariableFacts::dense(element_type, shape))
    }

    /// The index of a dimension of an input.
    pub(super) fn axis(&self, place: usize, axis: u32) -> Result<usize, String> {
        let (_, shape) = self.dense(place)?;
        let found = axis as usize;
        if found < shape.len() {
            return Ok(found);
        }
        Err(self.misfit(place, &format!("a dimension {axis}, counted from zero")))
    }

    /// The error for an input that does not fit.
    pub(super) fn misfit(&self, place: usize, expected: &str) -> String {
        let (name, found) = (&self.op.inputs[place], self.input(place));
        format!("input {} {name:?} is {found}; expected {expected}", place + 1)
    }
}

fn check_count(what: &str, found: usize, least: usize, most: usize) -> Result<(), String> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    let expected = match (least, most) {
        (least, most) if least == most => least.to_string(),
        (least, usize::MAX) => format!("at least {least}"),
        (least, most) => format!("{least} to {most}"),
    };
    Err(format!("found {found} {what}; expected {expected}"))
}
