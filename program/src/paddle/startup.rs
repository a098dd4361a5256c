//! Initial values: the startup program.

use std::collections::BTreeMap;

use pserver_core::error::Failure;

use crate::op::OpKind;

use super::message::BlockDesc;
use super::paddle_op::PaddleOp;

/// The ops of a startup program, by the variable that each fills.
pub(super) struct StartupValues<'a> {
    by_variable: BTreeMap<&'a str, PaddleOp<'a>>,
}

impl<'a> StartupValues<'a> {
    pub(super) fn new(block: &'a BlockDesc) -> Result<Self, Failure> {
        let mut by_variable = BTreeMap::new();
        for op in PaddleOp::all("startup", &block.ops) {
            for variable in op.all_outputs() {
                if by_variable.insert(variable, op).is_some() {
                    return Err(op.refuse(format!("found variable {variable:?} filled twice; expected once")));
                }
            }
        }
        Ok(Self { by_variable })
    }

    /// The op of ours that fills a parameter of this shape, and the seed that was chosen where Paddle has none.
    pub(super) fn initializer(&self, variable: &str, shape: &[u64]) -> Result<(OpKind, Option<u64>), Failure> {
        let op = self.op(variable)?;
        op.check_slots(&[])?;
        let found = op.ints("shape");
        if !found.iter().map(|length| u64::try_from(*length)).eq(shape.iter().map(|length| Ok(*length))) {
            return Err(op.refuse(format!("found shape {found:?}; expected {shape:?}, which {variable:?} has")));
        }
        let seed = match op.int("seed", 0)? {
            0 => op.place as u64 + 1,
            seed => u64::try_from(seed).map_err(|_| op.refuse(format!("found seed {seed}; expected 0 or above")))?,
        };
        let chosen = (op.int("seed", 0)? == 0).then_some(seed);
        match op.kind() {
            "fill_constant" => Ok((OpKind::Fill { value: constant(&op)? }, None)),
            "uniform_random" => {
                op.check_ints(&[("diag_num", 0)])?;
                let (low, high) = (op.float("min", -1.0)?, op.float("max", 1.0)?);
                Ok((OpKind::Uniform { low, high, seed, first: 0 }, chosen))
            }
            "gaussian_random" => {
                let (mean, deviation) = (op.float("mean", 0.0)?, op.float("std", 1.0)?);
                Ok((OpKind::Gaussian { mean, deviation, seed, first: 0 }, chosen))
            }
            _ => Err(op.refuse(format!(
                "expected fill_constant, uniform_random or gaussian_random to fill {variable:?}, or its values in a \
                 file"
            ))),
        }
    }

    /// The constant that a variable begins with: a learning rate, a state.
    pub(super) fn constant(&self, variable: &str) -> Result<f64, Failure> {
        let op = self.op(variable)?;
        match op.kind() {
            "fill_constant" => constant(&op),
            _ => Err(op.refuse(format!("found it fill {variable:?}; expected fill_constant"))),
        }
    }

    fn op(&self, variable: &str) -> Result<PaddleOp<'a>, Failure> {
        let op = self.by_variable.get(variable).copied();
        op.ok_or_else(|| Failure::call(format!("startup program: found no op that fills {variable:?}; expected one")))
    }
}

/// The value of a `fill_constant`: its text, or where that is empty its float.
pub(super) fn constant(op: &PaddleOp<'_>) -> Result<f64, Failure> {
    op.check_slots(&[])?;
    match op.text("str_value") {
        "" => op.float("value", 0.0),
        text => match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(value),
            _ => Err(op.refuse(format!("found str_value {text:?}; expected a number"))),
        },
    }
}
