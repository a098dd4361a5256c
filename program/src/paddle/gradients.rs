//! The backward part of Paddle's, which is dropped: which gradient belongs to which parameter, and whether the loss's
//! gradient goes the ways on which ours goes.

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;

use super::paddle_op::{PaddleOp, PaddleRole};
use super::paddle_variables::PaddleVariables;

/// The end of a gradient's name, after the name of its variable.
const GRADIENT: &str = "@GRAD";
/// The name of an output that is not computed.
const EMPTY: &str = "@EMPTY@";

/// The loss, by the op that fills its gradient with 1.
pub(super) fn loss<'a>(ops: &[PaddleOp<'a>]) -> Result<&'a str, Failure> {
    let mut seeds = ops.iter().filter(|op| op.role().is_ok_and(|role| role == PaddleRole::LossGradient));
    let Some(seed) = seeds.next() else {
        return Err(Failure::call(
            "main program: found no op of op_role 257; expected the one that fills the loss's gradient, which an \
             optimizer's minimize adds",
        ));
    };
    if let Some(second) = seeds.next() {
        return Err(second.refuse("found a second op of op_role 257; expected one loss"));
    }
    let value = super::startup::constant(seed)?;
    let loss = seed.output("Out")?.strip_suffix(GRADIENT);
    match loss {
        Some(loss) if seed.kind() == "fill_constant" && value.to_bits() == 1.0_f64.to_bits() => Ok(loss),
        _ => Err(seed.refuse(format!("expected fill_constant of 1 in a variable whose name ends in {GRADIENT}"))),
    }
}

/// Kinds of ops of a backward part that are not called after an op of the forward part.
const PLAIN_KINDS: [&str; 8] =
    ["assign", "cast", "concat", "fill_any_like", "fill_constant", "fill_zeros_like", "scale", "sum"];

/// Checks that the backward part only computes gradients: an op that changes one, such as the scaling of a loss in
/// half precision, would be lost.
pub(super) fn check_ops(forward: &[PaddleOp<'_>], backward: &[PaddleOp<'_>]) -> Result<(), Failure> {
    let kinds: BTreeSet<&str> = forward.iter().map(PaddleOp::kind).collect();
    let mut written = BTreeSet::new();
    for op in backward {
        let kind = op.kind();
        if !PLAIN_KINDS.contains(&kind) && !kind.strip_suffix("_grad").is_some_and(|of| kinds.contains(of)) {
            return Err(op.refuse("found it in the backward part; expected the gradient of an op of the forward part"));
        }
        let mut outputs = op.all_outputs().filter(|name| *name != EMPTY);
        if let Some(name) = outputs.find(|name| !written.insert(*name) || op.all_inputs().any(|input| input == *name)) {
            return Err(op.refuse(format!("found a change of gradient {name:?}; expected one op that computes it")));
        }
    }
    Ok(())
}

/// Checks that Paddle computes a gradient for each variable between the parameters and the loss: where it stops, which
/// no description of a variable says, `append_backward` would not.
pub(super) fn check_ways(
    forward: &[PaddleOp<'_>],
    backward: &[PaddleOp<'_>],
    variables: &PaddleVariables<'_>,
    loss: &str,
) -> Result<(), Failure> {
    let mut influenced: BTreeSet<&str> = BTreeSet::new();
    let is_influenced =
        |name: &str, influenced: &BTreeSet<&str>| variables.is_parameter(name) || influenced.contains(name);
    for op in forward {
        if op.kind() != "fill_constant" && op.all_inputs().any(|name| is_influenced(name, &influenced)) {
            influenced.extend(op.all_outputs());
        }
    }
    let written = backward.iter().flat_map(PaddleOp::all_outputs).filter(|name| *name != EMPTY);
    let with_gradient: BTreeSet<&str> =
        written.filter_map(|name| name.split_once(GRADIENT)).map(|(name, _)| name).collect();
    let mut needed = BTreeSet::from([loss]);
    for op in forward.iter().rev() {
        if !op.all_outputs().any(|name| needed.contains(name)) {
            continue;
        }
        for name in op.all_inputs().filter(|name| is_influenced(name, &influenced)) {
            if !with_gradient.contains(name) {
                return Err(op.refuse(format!(
                    "found no gradient of {name:?} in the backward part; expected one, because the loss depends on a \
                     parameter through it: variables of stop_gradient are not mapped"
                )));
            }
            needed.insert(name);
        }
    }
    Ok(())
}

/// For each gradient the parameter that it belongs to, as the ops that compute it say in `op_role_var`.
pub(super) fn parameters<'a>(
    backward: &[PaddleOp<'a>],
    variables: &PaddleVariables<'_>,
) -> Result<BTreeMap<&'a str, &'a str>, Failure> {
    let mut parameters = BTreeMap::new();
    for op in backward {
        let pairs = op.texts("op_role_var").chunks(2);
        for pair in pairs {
            match pair {
                [parameter, gradient] if variables.is_parameter(parameter) => {
                    parameters.insert(gradient.as_str(), parameter.as_str());
                }
                other => {
                    return Err(
                        op.refuse(format!("found op_role_var {other:?}; expected a parameter and its gradient"))
                    );
                }
            }
        }
    }
    Ok(parameters)
}
