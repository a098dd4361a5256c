//! One update of a parameter by a rule.

use crate::value::{Elements, Tensor, VariableValue};
use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pserver_core::optim::{Gradient, Prepared, ReducedPiece, Step, reduce, square_sum};
use pserver_core::port::{Kernels, Update};

use super::table;

/// Updates `operands`, which are a parameter, its count and its states, in place by one gradient. A `rate` replaces
/// that of the rule's schedule.
///
/// Selected rows are first made dense, with zeros for absent rows: the reference for every other way of applying them.
/// It costs as much as a dense gradient.
///
/// # Errors
/// When the count is negative or at its maximum, which a foreign checkpoint may hold.
///
/// # Panics
/// When the operands are not those of an update in a checked graph.
pub(super) fn apply_update(
    kernels: &mut dyn Kernels,
    rule: &Prepared,
    operands: &mut [Tensor],
    gradient: &VariableValue,
    rate: Option<f64>,
) -> Result<(), Failure> {
    let [parameter, count, states @ ..] = operands else { panic!("an update without a count in a checked program") };
    let version = next_version(count)?;
    let whole;
    let gradient = match gradient {
        VariableValue::SelectedRows(rows) => {
            whole = table::dense(rows)?;
            &whole
        }
        other => other.tensor(),
    };
    let elements = gradient.elements();
    let gradient = Gradient { bytes: elements.bytes(), element_type: elements.element_type() };
    let element_type = parameter.elements().element_type();
    let mut states: Vec<&mut [u8]> = states.iter_mut().map(Tensor::bytes_mut).collect();
    let mut sum = Vec::new();
    if !rule.rule().is_element_wise() {
        sum.resize(parameter.bytes().len(), 0);
        kernels.sum(element_type, &mut sum, &[gradient]);
    }
    if rule.rule().has_total() {
        return Err(Failure::call("found a stage with total; expected one of a server, which has the job's trainers"));
    }
    let norm = rule.rule().clip_norm.map(|_| square_sum(element_type, &sum).sqrt());
    let step = Step { version, rate, norm, ..Step::FIRST };
    let reduced = reduce(kernels, rule, &step, None, |piece| {
        piece(ReducedPiece { element_type, parameter: parameter.bytes(), states: &mut states, gradient: &sum });
    });
    let mut scalars = Vec::new();
    kernels.update(Update {
        formula: rule.formula_reduced(&step, &reduced, &mut scalars),
        element_type,
        parameter: parameter.bytes_mut(),
        states: &mut states,
        gradients: &[gradient],
    });
    *count = Tensor::new([], Elements::Int64(vec![i64::try_from(version.0).expect("it came from one")]));
    Ok(())
}

/// The number of this update, from one.
fn next_version(count: &Tensor) -> Result<Version, Failure> {
    let Elements::Int64(counts) = count.elements() else { panic!("a count that is not int64 in a checked program") };
    let next = counts[0].checked_add(1).and_then(|next| u64::try_from(next).ok()).filter(|next| *next > 0);
    next.map(Version).ok_or_else(|| Failure::call(format!("a count of {} updates; expected 0 or more", counts[0])))
}
