//! Reference implementation of every arithmetic op, one element after another. Kernels are compared with it.
//!
//! Everything is computed in the type of the values, but for sums of `batch_norm`, which are in binary64. Every sum
//! runs from the first element to the last, whatever its length, so equal inputs give equal bits. `exp`, `ln` and
//! `tanh` are those of the system's library, which may differ in the last bit between machines. Ops of the role
//! `optimize` compute these functions, powers and sums over everything as rules of servers do, so that a server's stage
//! has the bits of one process.

mod arrange;
mod batch_norm;
mod loss;
mod matrix;
mod network;
mod pointwise;
mod real;
mod reduce;
mod run;
mod select;
mod stage;
mod table;
mod update;
mod window;

use pserver_core::error::Failure;

use super::arithmetic::Arithmetic;
use super::graph::Node;
use super::op::{OpKind, OpRole};
use super::value::{Elements, VariableValue};
use super::variable::VariableFacts;

use real::TensorReal;

pub use run::PlainRun;
pub(crate) use run::{read, run_node};

type OpOutputs = Result<Vec<VariableValue>, Failure>;

/// The plain form, which is the oracle.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainArithmetic;

impl Arithmetic for PlainArithmetic {
    fn run(&mut self, node: &Node, inputs: &[&VariableValue], outputs: &[&VariableFacts]) -> OpOutputs {
        match &node.kind {
            OpKind::Concat { .. } if matches!(inputs[0], VariableValue::SelectedRows(_)) => {
                table::concat(inputs).map(|rows| vec![rows])
            }
            OpKind::Concat { axis } => Ok(vec![arrange::concat(inputs, *axis as usize)]),
            OpKind::Split { axis, lengths } => arrange::split(inputs[0], *axis as usize, lengths),
            OpKind::Reshape { shape } => Ok(vec![arrange::reshape(inputs[0].tensor(), shape).into()]),
            OpKind::Transpose { axes } => Ok(vec![arrange::transpose(inputs[0].tensor(), axes).into()]),
            OpKind::Cast { to } => Ok(vec![arrange::cast(inputs[0].tensor(), *to).into()]),
            OpKind::Fill { .. } | OpKind::Uniform { .. } | OpKind::Gaussian { .. } => {
                Ok(vec![arrange::made(&node.kind, outputs[0]).into()])
            }
            OpKind::Sum if matches!(outputs[0], VariableFacts::SelectedRows { .. }) => {
                table::sum(inputs).map(|rows| vec![rows])
            }
            OpKind::Sum if inputs.iter().any(|input| matches!(input, VariableValue::SelectedRows(_))) => {
                let whole = inputs.iter().map(|input| table::whole(input)).collect::<Result<Vec<_>, _>>()?;
                self.run(node, &whole.iter().collect::<Vec<_>>(), outputs)
            }
            OpKind::Scale { factor } if matches!(inputs[0], VariableValue::SelectedRows(_)) => {
                let values = self.run(node, &[&table::values(inputs[0].rows())], outputs)?;
                table::with_values(inputs[0].rows(), &values[0]).map(|rows| vec![rows])
            }
            OpKind::Slice { axis, start, end } => {
                Ok(vec![select::slice(inputs[0].tensor(), *axis as usize, *start..*end).into()])
            }
            OpKind::Gather => select::gather(inputs[0].tensor(), inputs[1].tensor()).map(|y| vec![y.into()]),
            OpKind::LookupTable { padding } if matches!(inputs[0], VariableValue::SelectedRows(_)) => {
                table::lookup_rows(inputs[0].rows(), inputs[1].tensor(), *padding).map(|y| vec![y.into()])
            }
            // The element type of the result decides; the first input holds ids.
            OpKind::LookupTableGradient { height, padding } => {
                table::gradient(inputs, *height, *padding).map(|rows| vec![rows])
            }
            kind => match inputs[0].tensor().elements() {
                Elements::Float32(_) => outputs_of::<f32>(node, inputs),
                Elements::Float64(_) => outputs_of::<f64>(node, inputs),
                other => panic!("{} of {} in a checked program", kind.name(), other.element_type()),
            },
        }
    }

    fn name(&self) -> &'static str {
        "plain"
    }
}

/// Ops whose first input is of f32 or f64; those of the role `optimize` as servers compute them.
fn outputs_of<R: TensorReal>(node: &Node, inputs: &[&VariableValue]) -> OpOutputs {
    let is_optimizer = node.role == OpRole::Optimize;
    let staged = if is_optimizer { stage::output::<R>(&node.kind, inputs) } else { None };
    staged.map_or_else(|| real_outputs::<R>(&node.kind, inputs), |output| Ok(vec![output.into()]))
}

/// Ops whose first input is of f32 or f64.
fn real_outputs<R: TensorReal>(kind: &OpKind, inputs: &[&VariableValue]) -> OpOutputs {
    let x = inputs[0].tensor();
    let second = || inputs[1].tensor();
    let output = match kind {
        OpKind::Matmul { transpose_left, transpose_right } => {
            matrix::product::<R>(x, second(), *transpose_left, *transpose_right)
        }
        OpKind::Scale { factor } => {
            let factor = R::nearest(*factor);
            pointwise::map::<R>(x, |x| factor * x)
        }
        OpKind::Sum => pointwise::sum::<R>(inputs),
        OpKind::ReduceSum { axes, keep } => reduce::sum::<R>(x, axes, *keep),
        OpKind::Relu => pointwise::map::<R>(x, |x| if x > R::ZERO { x } else { R::ZERO }),
        OpKind::Sigmoid => pointwise::map::<R>(x, TensorReal::sigmoid),
        OpKind::Tanh => pointwise::map::<R>(x, TensorReal::tanh),
        OpKind::Mean { axes, keep } => {
            let count = R::count(reduce::count(x.shape(), axes));
            pointwise::map::<R>(&reduce::sum::<R>(x, axes, *keep), |sum| sum / count)
        }
        OpKind::SumTo => pointwise::sum_to::<R>(x, second().shape()),
        OpKind::Repeat { axes } => reduce::repeat::<R>(x, second().shape(), axes),
        OpKind::ReluGradient => pointwise::zip::<R>(x, second(), |y, slope| if y > R::ZERO { slope } else { R::ZERO }),
        OpKind::SigmoidGradient => pointwise::zip::<R>(x, second(), |y, slope| slope * y * (R::ONE - y)),
        OpKind::TanhGradient => pointwise::zip::<R>(x, second(), |y, slope| slope * (R::ONE - y * y)),
        OpKind::MeanGradient { axes } => {
            let count = R::count(reduce::count(x.shape(), axes));
            reduce::repeat::<R>(&pointwise::map::<R>(second(), |slope| slope / count), x.shape(), axes)
        }
        OpKind::Softmax => loss::softmax_rows::<R>(x, |power, _, sum| power / sum),
        OpKind::LogSoftmax => loss::softmax_rows::<R>(x, |_, above, sum| above - sum.ln()),
        OpKind::LookupTable { padding } => table::lookup::<R>(x, second(), *padding)?,
        OpKind::SliceGradient { axis, start, .. } => select::slice_gradient(x, second(), *axis as usize, *start),
        OpKind::GatherGradient => select::gather_gradient::<R>(x.shape(), second(), inputs[2].tensor())?,
        OpKind::Dropout { rate, seed } => select::dropout::<R>(inputs, *rate, *seed),
        OpKind::Gelu { approximate } => pointwise::map::<R>(x, |x| network::gelu(x, *approximate)),
        OpKind::GeluGradient { approximate } => {
            pointwise::zip::<R>(x, second(), |x, slope| slope * network::gelu_slope(x, *approximate))
        }
        OpKind::LayerNorm { epsilon } => network::layer_norm::<R>(inputs, *epsilon),
        OpKind::LayerNormGradient { epsilon } => return Ok(network::layer_norm_gradient::<R>(inputs, *epsilon)),
        OpKind::BatchNorm { epsilon } => return Ok(batch_norm::output::<R>(inputs, *epsilon)),
        OpKind::BatchNormGradient { epsilon } => return Ok(batch_norm::gradient::<R>(inputs, *epsilon)),
        kind => match pointwise::outputs::<R>(kind, inputs).or_else(|| window::output::<R>(kind, inputs)) {
            Some(output) => output,
            None => return loss::outputs::<R>(kind, inputs),
        },
    };
    Ok(vec![output.into()])
}

/// The sum from the first to the last.
fn total<R: TensorReal>(values: &[R]) -> R {
    values.iter().fold(R::ZERO, |total, value| total + *value)
}
