//! The variables of a Paddle program, and their types and shapes in ours.

use std::collections::BTreeMap;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::DIMENSIONS_MAX;

use crate::variable::{Dim, VariableFacts};

use super::message::{LOD_TENSOR, SELECTED_ROWS, VarDesc};

/// The declared variables of block 0 of the main program, by name.
pub(super) struct PaddleVariables<'a> {
    by_name: BTreeMap<&'a str, &'a VarDesc>,
}

impl<'a> PaddleVariables<'a> {
    /// Refuses a name that is declared twice.
    pub(super) fn new(variables: &'a [VarDesc]) -> Result<Self, Failure> {
        let mut by_name = BTreeMap::new();
        for variable in variables {
            if by_name.insert(variable.name.as_str(), variable).is_some() {
                return Err(refuse(&variable.name, "found two declarations; expected one"));
            }
        }
        Ok(Self { by_name })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &'a VarDesc> {
        self.by_name.values().copied()
    }

    pub(super) fn is_parameter(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|variable| variable.is_parameter)
    }

    /// Whether it has selected rows, as the gradient of a sparse lookup has.
    pub(super) fn is_rows(&self, name: &str) -> bool {
        self.by_name
            .get(name)
            .and_then(|variable| variable.facts.as_ref())
            .is_some_and(|facts| facts.kind == SELECTED_ROWS)
    }

    /// The type and the dimensions of a dense variable: -1 is the batch, of data only first.
    pub(super) fn dense(&self, name: &str) -> Result<(ElementType, Vec<Dim>), Failure> {
        let found = self.by_name.get(name).ok_or_else(|| refuse(name, "found no declaration; expected one"))?;
        let facts = found.facts.as_ref().ok_or_else(|| refuse(name, "found no type; expected a dense tensor"))?;
        if facts.kind != LOD_TENSOR {
            return Err(refuse(name, format!("found type {}; expected {LOD_TENSOR}, a dense tensor", facts.kind)));
        }
        let tensor = facts.tensor.as_ref().ok_or_else(|| refuse(name, "found no tensor; expected one"))?;
        if tensor.level != 0 {
            let level = tensor.level;
            return Err(refuse(name, format!("found LoD level {level}; expected 0, values without sequences")));
        }
        let tensor = tensor.tensor.as_ref().ok_or_else(|| refuse(name, "found no tensor; expected one"))?;
        // Every op that touches the variable reads them.
        if tensor.dims.len() > DIMENSIONS_MAX {
            let found = tensor.dims.len();
            return Err(refuse(name, format!("found {found} dimensions; expected at most {DIMENSIONS_MAX}")));
        }
        let dims = tensor.dims.iter().enumerate().map(|(place, dim)| match (place, u64::try_from(*dim)) {
            (_, Ok(length)) => Ok(Dim::Fixed(length)),
            // Only an op puts the batch elsewhere.
            (place, Err(_)) if *dim == -1 && (place == 0 || !found.is_fed) => Ok(Dim::Batch),
            _ => Err(refuse(name, format!("found dimensions {:?}; expected -1 as the first only", tensor.dims))),
        });
        Ok((element_type(name, tensor.element_type)?, dims.collect::<Result<_, _>>()?))
    }

    pub(super) fn facts(&self, name: &str) -> Result<VariableFacts, Failure> {
        self.dense(name).map(|(element_type, shape)| VariableFacts::Dense { element_type, shape })
    }
}

/// A refusal that names the variable.
pub(super) fn refuse(name: &str, reason: impl std::fmt::Display) -> Failure {
    Failure::call(format!("main program, block 0, variable {name:?}: {reason}"))
}

/// The type with this number in Paddle's `VarType.Type`.
pub(super) fn element_type_of(number: i64) -> Option<ElementType> {
    match number {
        2 => Some(ElementType::Int32),
        3 => Some(ElementType::Int64),
        4 => Some(ElementType::Float16),
        5 => Some(ElementType::Float32),
        6 => Some(ElementType::Float64),
        22 => Some(ElementType::Bfloat16),
        _ => None,
    }
}

fn element_type(name: &str, number: i32) -> Result<ElementType, Failure> {
    let expected = "expected 2 int32, 3 int64, 4 float16, 5 float32, 6 float64 or 22 bfloat16";
    element_type_of(number.into()).ok_or_else(|| refuse(name, format!("found element type {number}; {expected}")))
}
