//! Ops of the role `optimize` whose bits are those of rules: functions, powers, and sums over a whole tensor.

use pserver_core::optim::element_sum;
use pserver_core::rule::ssa::{RuleFunction, power};

use crate::op::OpKind;
use crate::value::{Tensor, VariableValue};

use super::pointwise::{broadcast, map};
use super::real::TensorReal;
use super::reduce::count;

/// The output; none for a kind that every role computes alike.
pub(super) fn output<R: TensorReal>(kind: &OpKind, inputs: &[&VariableValue]) -> Option<Tensor> {
    let x = inputs[0].tensor();
    let of = |function: RuleFunction| map::<R>(x, |x| R::nearest(function.of(x.widen())));
    let whole = |axes: &[u32], keep: bool| {
        let rank = x.shape().len();
        let shape = vec![1; if keep { rank } else { 0 }];
        let sum = R::nearest(element_sum(x.elements().element_type(), x.bytes()));
        (axes.is_empty() || axes.len() == rank).then(|| Tensor::new(shape, R::wrap(vec![sum])))
    };
    Some(match kind {
        OpKind::Exp => of(RuleFunction::Exponential),
        OpKind::Log => of(RuleFunction::Logarithm),
        OpKind::Tanh => of(RuleFunction::HyperbolicTangent),
        OpKind::Pow => broadcast::<R>(x, inputs[1].tensor(), |a, b| R::nearest(power(a.widen(), b.widen()))),
        OpKind::ReduceSum { axes, keep } => whole(axes, *keep)?,
        OpKind::Mean { axes, keep } => {
            let count = R::count(count(x.shape(), axes));
            map::<R>(&whole(axes, *keep)?, |sum| sum / count)
        }
        _ => return None,
    })
}
