//! Uses of each value of straight-line code, for register allocation.

use super::ssa::{Lowered, RuleOp, ValueId};

/// For every value the places that use it, in order.
///
/// Operation `i` stands at place `i`. The results stand behind the operations: state `k` at place `operations + k`, the
/// weight after the last state. A state or weight that the rule leaves as it is has no result to write, and uses
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uses(Vec<Vec<usize>>);

/// A tensor that code writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdatedTensor {
    /// The state at this place.
    State(usize),
    /// The parameter.
    Weight,
}

/// A tensor's element after the update, for tensors that change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdatedElement {
    /// The tensor.
    pub tensor: UpdatedTensor,
    /// With which value.
    pub value: ValueId,
    /// Where this stands among the uses.
    pub place: usize,
}

impl Uses {
    /// Of this code.
    #[must_use]
    pub fn of(code: &Lowered) -> Self {
        let ops = code.ops();
        let mut uses = vec![Vec::new(); ops.len()];
        let outputs: Vec<UpdatedElement> = outputs(code).collect();
        let mut is_needed = vec![false; ops.len()];
        outputs.iter().for_each(|result| is_needed[result.value.index()] = true);
        for (place, op) in ops.iter().enumerate().rev() {
            if is_needed[place] {
                op.operands().for_each(|operand| is_needed[operand.index()] = true);
            }
        }
        for (place, op) in ops.iter().enumerate().filter(|(place, _)| is_needed[*place]) {
            op.operands().for_each(|operand| uses[operand.index()].push(place));
        }
        outputs.iter().for_each(|result| uses[result.value.index()].push(result.place));
        Self(uses)
    }

    /// The first use of a value behind a place.
    #[must_use]
    pub fn next(&self, value: usize, behind: usize) -> Option<usize> {
        self.0[value].iter().copied().find(|&place| behind < place)
    }

    /// Whether a value has no uses.
    #[must_use]
    pub fn is_unused(&self, value: usize) -> bool {
        self.0[value].is_empty()
    }

    /// How often a value is used.
    #[must_use]
    pub fn count(&self, value: usize) -> usize {
        self.0[value].len()
    }
}

/// The written tensors, states first.
pub fn outputs(code: &Lowered) -> impl Iterator<Item = UpdatedElement> {
    let ops = code.ops();
    let states = code.states().iter().enumerate().map(|(state, result)| (UpdatedTensor::State(state), result.value));
    let all = states.chain([(UpdatedTensor::Weight, code.weight())]).enumerate();
    all.filter(|(_, (tensor, value))| match (tensor, ops[value.index()]) {
        (UpdatedTensor::Weight, RuleOp::Weight) => false,
        (UpdatedTensor::State(state), RuleOp::State(read)) => read.index() != *state,
        _ => true,
    })
    .map(|(order, (tensor, value))| UpdatedElement { tensor, value, place: ops.len() + order })
}
