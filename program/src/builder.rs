//! Builder of programs in Rust code.

use std::cell::RefCell;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::rows::Initializer;

use super::block::{Block, Program};
use super::graph::Graph;
use super::op::{Op, OpKind, OpRole};
use super::variable::{Dim, Purpose, Variable, VariableFacts};
use super::window::WindowSteps;

/// A variable of a [`Builder`], to be given to its ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Symbol(usize);

/// Writes a program of one block, op by op. Mismatched operands are found by [`finish`](Self::finish).
///
/// ```
/// use pserver_core::dtype::ElementType::{Float32, Int64};
/// use pserver_program::{Builder, Dim, append_backward, append_optimizer};
/// use pserver_core::rows::Initializer;
///
/// let p = Builder::new();
/// let x = p.data("x", Float32, [Dim::Batch, Dim::Fixed(64)]);
/// let label = p.data("label", Int64, [Dim::Batch]);
/// let w = p.parameter("w", Float32, &[64, 10], Initializer::Uniform { low: -0.3, high: 0.3 }, 7);
/// let b = p.parameter("b", Float32, &[10], Initializer::Zeros, 0);
/// let scores = p.add(p.matmul(x, w), b);
/// let (losses, _) = p.softmax_with_cross_entropy(scores, label);
/// let loss = p.named("loss", p.mean(losses));
/// let mut program = p.finish()?.into_program();
///
/// let gradients = append_backward(&mut program, "loss")?;
/// append_optimizer(&mut program, "const_lr { learning_rate: 0.2 }", &gradients)?;
/// # let _ = loss;
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
#[derive(Debug, Default)]
pub struct Builder {
    // A call may have calls of the builder as arguments, so the borrows are short.
    written: RefCell<BuilderState>,
}

#[derive(Debug, Default)]
struct BuilderState {
    /// By symbol.
    names: Vec<String>,
    block: Block,
}

impl BuilderState {
    fn symbol(&mut self, name: String) -> Symbol {
        self.names.push(name);
        Symbol(self.names.len() - 1)
    }

    fn name(&self, symbol: Symbol) -> String {
        self.names[symbol.0].clone()
    }
}

impl Builder {
    /// An empty program.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares an input that is set before every run.
    pub fn data(&self, name: &str, element_type: ElementType, shape: impl Into<Vec<Dim>>) -> Symbol {
        self.declare(name, VariableFacts::dense(element_type, shape), Purpose::Data)
    }

    /// Declares a trained parameter and its initial values.
    pub fn parameter(
        &self,
        name: &str,
        element_type: ElementType,
        shape: &[u64],
        initializer: Initializer,
        seed: u64,
    ) -> Symbol {
        let symbol = self.declare(name, VariableFacts::fixed(element_type, shape), Purpose::Parameter);
        let kind = match initializer {
            Initializer::Zeros => OpKind::Fill { value: 0.0 },
            Initializer::Constant(value) => OpKind::Fill { value },
            Initializer::Uniform { low, high } => OpKind::Uniform { low, high, seed, first: 0 },
            Initializer::Gaussian { mean, deviation } => OpKind::Gaussian { mean, deviation, seed, first: 0 },
        };
        let op = Op { kind, inputs: Vec::new(), outputs: vec![name.to_owned()], role: OpRole::Initialise };
        self.written.borrow_mut().block.ops.push(op);
        symbol
    }

    /// Any variable.
    pub fn declare(&self, name: &str, facts: VariableFacts, purpose: Purpose) -> Symbol {
        let mut written = self.written.borrow_mut();
        written.block.variables.push(Variable { name: name.to_owned(), facts, purpose });
        written.symbol(name.to_owned())
    }

    /// Gives a temporary that an op has made a name of its own.
    ///
    /// # Panics
    /// When the variable was declared, and so has a name.
    pub fn named(&self, name: &str, symbol: Symbol) -> Symbol {
        let mut written = self.written.borrow_mut();
        let old = std::mem::replace(&mut written.names[symbol.0], name.to_owned());
        assert!(written.block.variables.iter().all(|known| known.name != old), "{old:?} was declared with its name");
        for op in &mut written.block.ops {
            for operand in op.inputs.iter_mut().chain(&mut op.outputs).filter(|operand| **operand == old) {
                name.clone_into(operand);
            }
        }
        symbol
    }

    /// A variable's name.
    #[must_use]
    pub fn name(&self, symbol: Symbol) -> String {
        self.written.borrow().name(symbol)
    }

    /// Any op, of the role [`Forward`](OpRole::Forward): its outputs, which are new temporaries.
    pub fn op<const OUTPUTS: usize>(&self, kind: OpKind, inputs: &[Symbol]) -> [Symbol; OUTPUTS] {
        let mut written = self.written.borrow_mut();
        let number = written.block.ops.len();
        let inputs = inputs.iter().map(|input| written.name(*input)).collect();
        let outputs: [String; OUTPUTS] = std::array::from_fn(|place| match place {
            0 => format!("{}_{number}", kind.name()),
            place => format!("{}_{number}_{place}", kind.name()),
        });
        written.block.ops.push(Op { kind, inputs, outputs: outputs.to_vec(), role: OpRole::Forward });
        outputs.map(|name| written.symbol(name))
    }

    /// Checks the program.
    ///
    /// # Errors
    /// As [`Graph::new`].
    pub fn finish(self) -> Result<Graph, Failure> {
        Graph::new(Program { blocks: vec![self.written.into_inner().block] })
    }

    fn one(&self, kind: OpKind, inputs: &[Symbol]) -> Symbol {
        let [output] = self.op(kind, inputs);
        output
    }

    /// [`OpKind::Matmul`] without transposing.
    pub fn matmul(&self, a: Symbol, b: Symbol) -> Symbol {
        self.matmul_transposed(a, false, b, false)
    }

    /// [`OpKind::Matmul`].
    pub fn matmul_transposed(&self, a: Symbol, transpose_left: bool, b: Symbol, transpose_right: bool) -> Symbol {
        self.one(OpKind::Matmul { transpose_left, transpose_right }, &[a, b])
    }

    /// [`OpKind::Add`].
    pub fn add(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Add, &[a, b])
    }

    /// [`OpKind::Mul`].
    pub fn mul(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Mul, &[a, b])
    }

    /// [`OpKind::Sub`].
    pub fn sub(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Sub, &[a, b])
    }

    /// [`OpKind::Div`].
    pub fn div(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Div, &[a, b])
    }

    /// [`OpKind::Max`].
    pub fn max(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Max, &[a, b])
    }

    /// [`OpKind::Min`].
    pub fn min(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Min, &[a, b])
    }

    /// [`OpKind::Pow`].
    pub fn pow(&self, a: Symbol, b: Symbol) -> Symbol {
        self.one(OpKind::Pow, &[a, b])
    }

    /// [`OpKind::Sqrt`].
    pub fn sqrt(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Sqrt, &[x])
    }

    /// [`OpKind::Exp`].
    pub fn exp(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Exp, &[x])
    }

    /// [`OpKind::Log`].
    pub fn log(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Log, &[x])
    }

    /// [`OpKind::Abs`].
    pub fn abs(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Abs, &[x])
    }

    /// [`OpKind::Sign`].
    pub fn sign(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Sign, &[x])
    }

    /// [`OpKind::Scale`].
    pub fn scale(&self, x: Symbol, factor: f64) -> Symbol {
        self.one(OpKind::Scale { factor }, &[x])
    }

    /// [`OpKind::Sum`].
    pub fn sum(&self, inputs: &[Symbol]) -> Symbol {
        self.one(OpKind::Sum, inputs)
    }

    /// [`OpKind::ReduceSum`] over one dimension.
    pub fn reduce_sum(&self, x: Symbol, axis: u32) -> Symbol {
        self.reduce_sum_over(x, &[axis], false)
    }

    /// [`OpKind::ReduceSum`].
    pub fn reduce_sum_over(&self, x: Symbol, axes: &[u32], keep: bool) -> Symbol {
        self.one(OpKind::ReduceSum { axes: axes.to_vec(), keep }, &[x])
    }

    /// [`OpKind::Mean`] over some dimensions.
    pub fn mean_over(&self, x: Symbol, axes: &[u32], keep: bool) -> Symbol {
        self.one(OpKind::Mean { axes: axes.to_vec(), keep }, &[x])
    }

    /// [`OpKind::Reshape`].
    pub fn reshape(&self, x: Symbol, shape: &[u64]) -> Symbol {
        self.one(OpKind::Reshape { shape: shape.to_vec() }, &[x])
    }

    /// [`OpKind::Transpose`].
    pub fn transpose(&self, x: Symbol, axes: &[u32]) -> Symbol {
        self.one(OpKind::Transpose { axes: axes.to_vec() }, &[x])
    }

    /// [`OpKind::Softmax`].
    pub fn softmax(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Softmax, &[x])
    }

    /// [`OpKind::LogSoftmax`].
    pub fn log_softmax(&self, x: Symbol) -> Symbol {
        self.one(OpKind::LogSoftmax, &[x])
    }

    /// [`OpKind::Relu`].
    pub fn relu(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Relu, &[x])
    }

    /// [`OpKind::Sigmoid`].
    pub fn sigmoid(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Sigmoid, &[x])
    }

    /// [`OpKind::Tanh`].
    pub fn tanh(&self, x: Symbol) -> Symbol {
        self.one(OpKind::Tanh, &[x])
    }

    /// [`OpKind::SoftmaxWithCrossEntropy`]: the losses and the probabilities.
    pub fn softmax_with_cross_entropy(&self, scores: Symbol, label: Symbol) -> (Symbol, Symbol) {
        let [loss, probabilities] = self.op(OpKind::SoftmaxWithCrossEntropy, &[scores, label]);
        (loss, probabilities)
    }

    /// [`OpKind::SigmoidCrossEntropy`].
    pub fn sigmoid_cross_entropy(&self, scores: Symbol, label: Symbol) -> Symbol {
        self.one(OpKind::SigmoidCrossEntropy, &[scores, label])
    }

    /// [`OpKind::Mean`] of all elements.
    pub fn mean(&self, x: Symbol) -> Symbol {
        self.mean_over(x, &[], false)
    }

    /// [`OpKind::LookupTable`] without padding.
    pub fn lookup_table(&self, table: Symbol, ids: Symbol) -> Symbol {
        self.one(OpKind::LookupTable { padding: None }, &[table, ids])
    }

    /// [`OpKind::Concat`].
    pub fn concat(&self, inputs: &[Symbol], axis: u32) -> Symbol {
        self.one(OpKind::Concat { axis }, inputs)
    }

    /// [`OpKind::Split`].
    pub fn split<const PIECES: usize>(&self, x: Symbol, axis: u32, lengths: [u64; PIECES]) -> [Symbol; PIECES] {
        self.op(OpKind::Split { axis, lengths: lengths.to_vec() }, &[x])
    }

    /// [`OpKind::Cast`].
    pub fn cast(&self, x: Symbol, to: ElementType) -> Symbol {
        self.one(OpKind::Cast { to }, &[x])
    }

    /// [`OpKind::Accuracy`].
    pub fn accuracy(&self, scores: Symbol, label: Symbol) -> Symbol {
        self.one(OpKind::Accuracy, &[scores, label])
    }
    /// [`OpKind::Conv2d`].
    pub fn conv2d(&self, x: Symbol, filter: Symbol, steps: WindowSteps) -> Symbol {
        self.one(OpKind::Conv2d { steps }, &[x, filter])
    }

    /// [`OpKind::MaxPool2d`].
    pub fn max_pool2d(&self, x: Symbol, size: [u32; 2], steps: WindowSteps) -> Symbol {
        self.one(OpKind::MaxPool2d { size, steps }, &[x])
    }

    /// [`OpKind::AvgPool2d`].
    pub fn avg_pool2d(&self, x: Symbol, size: [u32; 2], steps: WindowSteps) -> Symbol {
        self.one(OpKind::AvgPool2d { size, steps }, &[x])
    }
    /// [`OpKind::Gelu`].
    pub fn gelu(&self, x: Symbol, approximate: bool) -> Symbol {
        self.one(OpKind::Gelu { approximate }, &[x])
    }

    /// [`OpKind::LayerNorm`].
    pub fn layer_norm(&self, x: Symbol, scale: Symbol, bias: Symbol, epsilon: f64) -> Symbol {
        self.one(OpKind::LayerNorm { epsilon }, &[x, scale, bias])
    }

    /// [`OpKind::BatchNorm`] with the scale, bias, mean and variance of each channel.
    pub fn batch_norm(&self, x: Symbol, by_channel: [Symbol; 4], step: Symbol, epsilon: f64) -> [Symbol; 3] {
        let [scale, bias, mean, variance] = by_channel;
        self.op(OpKind::BatchNorm { epsilon }, &[x, scale, bias, mean, variance, step])
    }

    /// [`OpKind::Slice`] from `start` to before `end`.
    pub fn slice(&self, x: Symbol, axis: u32, start: u64, end: u64) -> Symbol {
        self.one(OpKind::Slice { axis, start, end }, &[x])
    }

    /// [`OpKind::Gather`].
    pub fn gather(&self, x: Symbol, indices: Symbol) -> Symbol {
        self.one(OpKind::Gather, &[x, indices])
    }

    /// [`OpKind::Dropout`] of a batch whose first row has number 0.
    pub fn dropout(&self, x: Symbol, step: Symbol, rate: f64, seed: u64) -> Symbol {
        self.one(OpKind::Dropout { rate, seed }, &[x, step])
    }
}
