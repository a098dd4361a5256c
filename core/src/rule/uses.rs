//! Who uses which value of straight-line code: what every code generator asks before it gives out registers.

use super::ssa::{Lowered, Op, ValueId};

/// For every value the places that use it, in order.
///
/// Operation `i` stands at place `i`. The results stand behind the operations: state `k` at place `operations + k`, the
/// weight after the last state. A state or weight that the rule leaves as it is has no result to write, and uses
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uses(Vec<Vec<usize>>);

/// A tensor that code writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// The state at this place.
    State(usize),
    /// The parameter.
    Weight,
}

/// One tensor's elements after the update, where they differ from those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// What is written.
    pub tensor: Tensor,
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
        let outputs: Vec<Output> = outputs(code).collect();
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

    /// Whether nobody needs a value.
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

/// What code writes, states first.
pub fn outputs(code: &Lowered) -> impl Iterator<Item = Output> {
    let ops = code.ops();
    let states = code.states().iter().enumerate().map(|(state, result)| (Tensor::State(state), result.value));
    let all = states.chain([(Tensor::Weight, code.weight())]).enumerate();
    all.filter(|(_, (tensor, value))| match (tensor, ops[value.index()]) {
        (Tensor::Weight, Op::Weight) => false,
        (Tensor::State(state), Op::State(read)) => read.index() != *state,
        _ => true,
    })
    .map(|(order, (tensor, value))| Output { tensor, value, place: ops.len() + order })
}
