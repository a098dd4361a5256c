//! Operations: inputs, outputs and attributes of each kind.
//!
//! In the signatures `n` is any leading length, often the batch; a scalar is a dense tensor of no dimensions.

use std::fmt;

use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;
use pserver_core::rows::Initializer;

use super::window::WindowSteps;

/// The phase of training that an op belongs to. A transpiler places ops by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpRole {
    /// Runs once, before everything else, and fills parameters and states.
    Initialise,
    /// From the data to the loss, and other outputs of the network.
    Forward,
    /// From the loss to the gradients.
    Backward,
    /// From gradients to new parameters.
    Optimize,
    /// Moves values between programs, or queues them.
    Communication,
}

impl OpRole {
    /// Every role.
    pub const ALL: [Self; 5] = [Self::Initialise, Self::Forward, Self::Backward, Self::Optimize, Self::Communication];

    /// Its name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Initialise => "initialise",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimize => "optimize",
            Self::Communication => "communication",
        }
    }
}

/// A process that runs a sub-program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProgramPeer {
    /// The trainer with this number.
    Trainer(u32),
    /// The server with this number.
    Server(u32),
}

/// As in the text form: `trainer:0`, `server:1`. A `recv` gives the sender in this form, too.
impl fmt::Display for ProgramPeer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trainer(number) => write!(formatter, "trainer:{number}"),
            Self::Server(number) => write!(formatter, "server:{number}"),
        }
    }
}

/// Destination of an [`OpKind::Send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// One process, fixed when the program was made.
    Peer(ProgramPeer),
    /// Every process whose address is in the op's second input, each once: the senders of earlier values.
    Senders,
}

/// The kind of an op with its attributes. Inputs and outputs are positional, as written at each kind.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// `(a[n, k], b[k, m]) -> [n, m]`; a transposed operand is read with its two dimensions exchanged.
    Matmul {
        /// Whether the first operand is given as `[k, n]`.
        transpose_left: bool,
        /// Whether the second operand is given as `[m, k]`.
        transpose_right: bool,
    },
    /// `(a, b) -> the shape of both broadcast`: `a + b`. Shapes are compared from their last dimensions on; a dimension
    /// of 1, or one that is not there, repeats.
    Add,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): `a * b`, element by element.
    Mul,
    /// `(x) -> x's shape`: `factor * x`. Of selected rows the values are scaled, and the ids stay.
    Scale {
        /// The factor, rounded to the type of `x`.
        factor: f64,
    },
    /// `(x, y, ...) -> x's shape`: all inputs, of one shape and type, added from left to right. Selected rows alone are
    /// put one after another; beside a dense tensor they are added to it.
    Sum,
    /// `(x) -> x's shape without some dimensions`, over which it is added.
    ReduceSum {
        /// The dimensions, from zero; none for all.
        axes: Vec<u32>,
        /// Whether they stay, with length 1.
        keep: bool,
    },
    /// `(x) -> x's shape`: `max(x, 0)`.
    Relu,
    /// `(x) -> x's shape`: `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `(x) -> x's shape`: the hyperbolic tangent.
    Tanh,
    /// `(scores[n, c], label: int64[n]) -> (loss[n], probabilities[n, c])`: the softmax of every row, and
    /// `-ln` of the label's probability.
    SoftmaxWithCrossEntropy,
    /// `(scores, label) -> loss`, all of one shape and type: `max(s, 0) - s l + ln(1 + exp(-|s|))`, the loss of a
    /// label `l` in [0, 1] whose probability is the sigmoid of `s`.
    SigmoidCrossEntropy,
    /// `(x) -> x's shape without some dimensions`: the sum over them, over the number of elements added.
    Mean {
        /// As in [`ReduceSum`](Self::ReduceSum): without any the mean is a scalar.
        axes: Vec<u32>,
        /// As in [`ReduceSum`](Self::ReduceSum).
        keep: bool,
    },
    /// `(table[h, w], ids: int64[...]) -> [..., w]`: the table's rows by number. The table may be selected rows that
    /// [`PullRows`](Self::PullRows) gives: ascending, each once, with every id that is looked up.
    LookupTable {
        /// An id whose row is read as zeros, whatever the table has there, and gets no gradient.
        padding: Option<u64>,
    },
    /// `(x, y, ...) -> all of them side by side` along one dimension; the others are equal. Selected rows are put
    /// together along dimension 0, and their ids are counted from the first row of the first.
    Concat {
        /// The dimension, from zero.
        axis: u32,
    },
    /// `(x) -> as many pieces as there are lengths`, side by side along one dimension. Selected rows are split along
    /// dimension 0, and each piece counts its rows from its own zero.
    Split {
        /// The dimension, from zero.
        axis: u32,
        /// The pieces' lengths, which add up to the dimension's.
        lengths: Vec<u64>,
    },
    /// `(x) -> x's shape` in another type, rounded to the nearest; to an integer towards zero, and held at its limits.
    Cast {
        /// The type.
        to: ElementType,
    },
    /// `() -> the declared facts of its output`: one value everywhere.
    Fill {
        /// The value.
        value: f64,
    },
    /// `() -> the declared facts of its output`: independent, uniform in `[low, high)`.
    Uniform {
        /// The lowest value.
        low: f64,
        /// The value that is not reached.
        high: f64,
        /// The seed: equal seeds give equal values.
        seed: u64,
        /// The number of the first row. A row is one index of the first dimension; its values depend on the seed, its
        /// number and its width only, so that some rows of a tensor are filled as in the whole tensor.
        first: u64,
    },
    /// `() -> the declared facts of its output`: independent, normal.
    Gaussian {
        /// The mean.
        mean: f64,
        /// The standard deviation, zero or above.
        deviation: f64,
        /// As in [`Uniform`](Self::Uniform).
        seed: u64,
        /// As in [`Uniform`](Self::Uniform).
        first: u64,
    },
    /// `() -> the declared facts of its output`: a value from outside of the program, which
    /// [`GivenValues`](super::GivenValues) have.
    Given {
        /// The name that the value has there.
        name: String,
        /// The number of the first row, as in [`Uniform`](Self::Uniform): some rows of the value.
        first: u64,
    },
    /// `(scores[n, c], label: int64[n]) -> float32 scalar`: the share of rows whose largest score, the first of
    /// equals, is the label's.
    Accuracy,

    /// `(a, b)`, broadcast as by [`Add`](Self::Add): `a - b`.
    Sub,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): `a / b`.
    Div,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): the larger; NaN where either is. The gradient goes to `b` where
    /// they are equal.
    Max,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): the smaller; NaN where either is. The gradient goes to `b` where
    /// they are equal.
    Min,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): `a` to the power of `b`.
    Pow,
    /// `(a, b)`, broadcast as by [`Add`](Self::Add): 1 where `a > b`, else 0, in their type. Its slope is zero.
    Greater,
    /// `(x) -> x's shape`: the square root.
    Sqrt,
    /// `(x) -> x's shape`: the exponential.
    Exp,
    /// `(x) -> x's shape`: the natural logarithm.
    Log,
    /// `(x) -> x's shape`: the magnitude; the gradient at 0 is 0.
    Abs,
    /// `(x) -> x's shape`: 1, 0 or -1 with the sign of `x`; NaN where `x` is. Its slope is zero.
    Sign,
    /// `(x) -> the same elements in another shape`, of any type.
    Reshape {
        /// The lengths. One may be 0, for what remains: the batch if `x` has one, else a length.
        shape: Vec<u64>,
    },
    /// `(x) -> x with its dimensions in another order`, of any type.
    Transpose {
        /// For each dimension of the result its number in `x`, from zero.
        axes: Vec<u32>,
    },
    /// `(x) -> x's shape`: the exponentials over their sum along the last dimension, which is fixed.
    Softmax,
    /// `(x) -> x's shape`: the natural logarithm of the [`Softmax`](Self::Softmax), computed without it.
    LogSoftmax,
    /// `(a, b, dy) -> dy's shape`: the gradient of [`Pow`](Self::Pow) by its base, `dy b a^(b - 1)`, zero where `b` is
    /// 0; or by its exponent, `dy a^b ln(a)`, zero where `a` is 0 and `b` is not below.
    PowGradient {
        /// Whether it is the gradient by the exponent.
        exponent: bool,
    },

    /// `(x, like) -> like's shape`: `x` summed over the dimensions that broadcast `like`; the gradient of
    /// [`Add`](Self::Add) for `b`.
    SumTo,
    /// `(x, like) -> like's shape`: `x`, which lacks some dimensions or has 1 there, repeated along them; the gradient
    /// of [`ReduceSum`](Self::ReduceSum).
    Repeat {
        /// The dimensions, from zero; none for all.
        axes: Vec<u32>,
    },
    /// `(y, dy) -> dx` with `y = relu(x)`: `dy` where `y > 0`, else zero.
    ReluGradient,
    /// `(y, dy) -> dx` with `y = sigmoid(x)`: `dy y (1 - y)`.
    SigmoidGradient,
    /// `(y, dy) -> dx` with `y = tanh(x)`: `dy (1 - y y)`.
    TanhGradient,
    /// `(probabilities[n, c], label: int64[n], dloss[n]) -> [n, c]`: `dloss (p - [label])`.
    SoftmaxWithCrossEntropyGradient,
    /// `(scores, label, dloss) -> scores' shape`: `dloss (sigmoid(s) - label)`.
    SigmoidCrossEntropyGradient,
    /// `(x, dmean) -> x's shape`: `dmean` over the number of elements of each mean, repeated along the dimensions that
    /// it lacks, or has as 1.
    MeanGradient {
        /// As in [`Repeat`](Self::Repeat).
        axes: Vec<u32>,
    },
    /// `(ids: int64[...], dy[..., w]) -> rows(height, w)`: row `ids[i]` with the values `dy[i]`, for every `i` in
    /// order. A repeated id gives repeated rows.
    LookupTableGradient {
        /// The rows of the table.
        height: u64,
        /// That of the lookup: its ids give no rows.
        padding: Option<u64>,
    },

    /// `(x[n, c, h, w], filter[o, c, kh, kw]) -> [n, o, h', w']`: at every place of the window, the sum of the products
    /// of the elements under it with those of each filter; the padding is zero. `h'` is
    /// `(h + 2 padding - kh) / stride + 1`, rounded down.
    Conv2d {
        /// The places of the window.
        steps: WindowSteps,
    },
    /// `(x[n, c, h, w]) -> [n, c, h', w']`: the largest element under the window, at every place; padding is not among
    /// them.
    MaxPool2d {
        /// Height and width of the window.
        size: [u32; 2],
        /// The places of the window; its padding is below its size.
        steps: WindowSteps,
    },
    /// `(x[n, c, h, w]) -> [n, c, h', w']`: the mean of the elements under the window, at every place; padding does not
    /// count, neither in the sum nor in the number.
    AvgPool2d {
        /// Height and width of the window.
        size: [u32; 2],
        /// The places of the window; its padding is below its size.
        steps: WindowSteps,
    },
    /// `(x) -> x's shape`: `x / 2 (1 + erf(x / sqrt(2)))`, or about that.
    Gelu {
        /// Whether it is `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x x x)))`.
        approximate: bool,
    },
    /// `(x[..., c], scale[c], bias[c]) -> x's shape`: over the last dimension, `(x - mean) / sqrt(variance + epsilon)`,
    /// times the scale, and the bias added. The variance is that of all `c` elements, not of a sample.
    LayerNorm {
        /// Above zero.
        epsilon: f64,
    },
    /// `(x[n, c, ...], scale[c], bias[c], mean[c], variance[c], step: int64 scalar) -> (x's shape, c, c)`: for each
    /// channel `(x - mean) / sqrt(variance + epsilon)`, times the scale, and the bias added; then the mean and the
    /// variance that this was computed with. They are those of the channel's elements in `x`, with the variance of all
    /// elements, not of a sample; at a step below zero, as for a prediction, they are the inputs.
    BatchNorm {
        /// Above zero.
        epsilon: f64,
    },
    /// `(x) -> x's elements` from `start` on, before `end`, along one fixed dimension; of any type.
    Slice {
        /// The dimension, from zero.
        axis: u32,
        /// The first element, from zero.
        start: u64,
        /// The element after the last.
        end: u64,
    },
    /// `(x[h, ...], indices: int64[k...]) -> [k..., ...]`: the pieces of dimension 0 by number; of any type.
    Gather,
    /// `(x, step: int64 scalar)` or `(x, step, first: int64 scalar) -> x's shape`: zero with the probability `rate`,
    /// else `x / (1 - rate)`. An element's mask depends on the seed, on the step, on its row (its index of dimension 0)
    /// and on its number in the row. `first` numbers row 0, so that a piece of a batch has the mask that it has in the
    /// whole batch. At a step below zero, as for a prediction, the result is `x`.
    Dropout {
        /// From zero, below one.
        rate: f64,
        /// The seed: equal seeds give equal masks.
        seed: u64,
    },
    /// `(x, dy) -> dx` with `y = slice(x)`: `dy` in its place, else zero.
    SliceGradient {
        /// That of the slice.
        axis: u32,
        /// That of the slice.
        start: u64,
        /// That of the slice.
        end: u64,
    },
    /// `(x, indices, dy) -> dx` with `y = gather(x, indices)`: the pieces of `dy` added in order where they come from.
    GatherGradient,
    /// `(x, dy) -> dx` with `y = gelu(x)`.
    GeluGradient {
        /// That of the function.
        approximate: bool,
    },
    /// `(x, scale, dy) -> (dx, dscale)` with `y = layer_norm(x, scale, bias)`.
    LayerNormGradient {
        /// That of the layer.
        epsilon: f64,
    },
    /// `(x, scale, mean, variance, step, dy) -> (dx, dscale)` with `y, mean, variance = batch_norm(x, scale, ...)`.
    BatchNormGradient {
        /// That of the layer.
        epsilon: f64,
    },
    /// `(filter, dy, x) -> dx` with `y = conv2d(x, filter)`; of `x` only the shape counts.
    Conv2dInputGradient {
        /// The steps of the convolution.
        steps: WindowSteps,
    },
    /// `(x, dy, filter) -> dfilter` with `y = conv2d(x, filter)`; of `filter` only the shape counts.
    Conv2dFilterGradient {
        /// The steps of the convolution.
        steps: WindowSteps,
    },
    /// `(x, dy) -> dx` with `y = max_pool2d(x)`: the first of equal largest elements gets the slope.
    MaxPool2dGradient {
        /// That of the pool.
        size: [u32; 2],
        /// The steps of the pool.
        steps: WindowSteps,
    },
    /// `(x, dy) -> dx` with `y = avg_pool2d(x)`; of `x` only the shape counts.
    AvgPool2dGradient {
        /// That of the pool.
        size: [u32; 2],
        /// The steps of the pool.
        steps: WindowSteps,
    },

    /// `(parameter, gradient, count: int64 scalar, state...) -> (parameter, count, state...)`: one update by a rule.
    /// The gradient is dense or selected rows; the count of updates increases by one; outputs are the inputs' own
    /// variables.
    Update {
        /// The rule as `OptimizerConfig` in protobuf's text form, which [`pserver_core::config`] reads.
        config: String,
    },

    /// `(x)` or `(x, addresses: strings) -> ()`: gives a value, with the sender's address, to the `recv` of the same
    /// channel at the destination.
    Send {
        /// The channel of the matching `recv`.
        channel: String,
        /// The destination.
        to: Destination,
    },
    /// `() -> (x)` or `(x, address: strings)`, as declared: a received value, and its sender. It is ready when a value
    /// has been received.
    Recv {
        /// The channel of the matching `send`.
        channel: String,
    },
    /// `(count: int64 scalar, ids: int64[...], ...) -> rows(height, width)`, as declared: asks a process for the rows
    /// of a table, or of some rows of one, and gives those that it answers: one for each id, ascending, each once. The
    /// count is that of the table's updates, whose arrival says that the rows may be asked for. It sends the ids on its
    /// channel and gets as many rows on the same one. Ids outside of the rows are not asked for.
    PullRows {
        /// The channel of the matching `recv` and `send`.
        channel: String,
        /// The process that has the rows.
        to: ProgramPeer,
        /// The id of its first row: ids are sent relative to it.
        first: u64,
    },
    /// `(queue, x) -> ()`: it is ready when the queue has space.
    Enqueue,
    /// `(queue) -> (x, y, ...)`: as many items as outputs, oldest first. It is ready when the queue holds them.
    Dequeue {
        /// The number of outputs.
        min_count: u32,
    },
    /// `(gradient)` or `(gradient, address: strings) -> gradient's facts`: takes one piece per run of its block, and on
    /// the `count`th gives all of them merged; ops that need it are not ready before. With addresses, pieces are added
    /// in their senders' order, else in order of arrival. With a staleness bound the `recv` that the address comes from
    /// gives a piece only when it is its sender's turn, and keeps it until then.
    GradientAccumulator {
        /// Number of pieces in a merged gradient: 1 in asynchronous training, the number of trainers in synchronous.
        count: u32,
        /// How pieces are merged.
        merge: Merge,
        /// The most pieces by which a sender may be ahead of the slowest one: 0 is one piece of every sender in each
        /// merged gradient, which is synchronous training; none accepts every piece.
        staleness: Option<u32>,
        /// On servers, the fate of a piece whose round was completed by the pieces of others.
        late: LateGradients,
    },
    /// `(string: strings) -> strings`: takes strings, and on the `count`th gives the list of them: addresses in the
    /// order of their processes, then other strings in the order of their text.
    StringAccumulator {
        /// Number of strings in a list.
        count: u32,
    },
    /// `() -> ()`: runs a block repeatedly, without end.
    LoopForever {
        /// The block's index; its parent is the block of this op.
        block: u32,
    },
}

impl OpKind {
    /// Its name in the text form and in errors.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Matmul { .. } => "matmul",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Scale { .. } => "scale",
            Self::Sum => "sum",
            Self::ReduceSum { .. } => "reduce_sum",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
            Self::Tanh => "tanh",
            Self::SoftmaxWithCrossEntropy => "softmax_with_cross_entropy",
            Self::SigmoidCrossEntropy => "sigmoid_cross_entropy",
            Self::Mean { .. } => "mean",
            Self::LookupTable { .. } => "lookup_table",
            Self::Concat { .. } => "concat",
            Self::Split { .. } => "split",
            Self::Cast { .. } => "cast",
            Self::Fill { .. } => "fill",
            Self::Uniform { .. } => "uniform",
            Self::Gaussian { .. } => "gaussian",
            Self::Given { .. } => "given",
            Self::Accuracy => "accuracy",
            Self::Sub => "sub",
            Self::Div => "div",
            Self::Max => "max",
            Self::Min => "min",
            Self::Pow => "pow",
            Self::Greater => "greater",
            Self::Sqrt => "sqrt",
            Self::Exp => "exp",
            Self::Log => "log",
            Self::Abs => "abs",
            Self::Sign => "sign",
            Self::Reshape { .. } => "reshape",
            Self::Transpose { .. } => "transpose",
            Self::Softmax => "softmax",
            Self::LogSoftmax => "log_softmax",
            Self::Conv2d { .. } => "conv2d",
            Self::MaxPool2d { .. } => "max_pool2d",
            Self::AvgPool2d { .. } => "avg_pool2d",
            Self::Gelu { .. } => "gelu",
            Self::LayerNorm { .. } => "layer_norm",
            Self::BatchNorm { .. } => "batch_norm",
            Self::Slice { .. } => "slice",
            Self::Gather => "gather",
            Self::Dropout { .. } => "dropout",
            Self::Update { .. } => "update",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
            Self::PullRows { .. } => "pull_rows",
            Self::Enqueue => "enqueue",
            Self::Dequeue { .. } => "dequeue",
            Self::GradientAccumulator { .. } => "gradient_accumulator",
            Self::StringAccumulator { .. } => "string_accumulator",
            Self::LoopForever { .. } => "loop_forever",
            _ => self.name_of_gradient().expect("every other kind is one of gradients"),
        }
    }

    /// The name of a kind that only gradients need.
    const fn name_of_gradient(&self) -> Option<&'static str> {
        Some(match self {
            Self::PowGradient { .. } => "pow_gradient",
            Self::SumTo => "sum_to",
            Self::Repeat { .. } => "repeat",
            Self::ReluGradient => "relu_gradient",
            Self::SigmoidGradient => "sigmoid_gradient",
            Self::TanhGradient => "tanh_gradient",
            Self::SoftmaxWithCrossEntropyGradient => "softmax_with_cross_entropy_gradient",
            Self::SigmoidCrossEntropyGradient => "sigmoid_cross_entropy_gradient",
            Self::MeanGradient { .. } => "mean_gradient",
            Self::LookupTableGradient { .. } => "lookup_table_gradient",
            Self::SliceGradient { .. } => "slice_gradient",
            Self::GatherGradient => "gather_gradient",
            Self::GeluGradient { .. } => "gelu_gradient",
            Self::LayerNormGradient { .. } => "layer_norm_gradient",
            Self::BatchNormGradient { .. } => "batch_norm_gradient",
            Self::Conv2dInputGradient { .. } => "conv2d_input_gradient",
            Self::Conv2dFilterGradient { .. } => "conv2d_filter_gradient",
            Self::MaxPool2dGradient { .. } => "max_pool2d_gradient",
            Self::AvgPool2dGradient { .. } => "avg_pool2d_gradient",
            _ => return None,
        })
    }

    /// The initializer of a kind that computes a tensor from nothing; none for every other kind.
    #[must_use]
    pub const fn initializer(&self) -> Option<Initializer> {
        match *self {
            Self::Fill { value } => Some(Initializer::Constant(value)),
            Self::Uniform { low, high, .. } => Some(Initializer::Uniform { low, high }),
            Self::Gaussian { mean, deviation, .. } => Some(Initializer::Gaussian { mean, deviation }),
            _ => None,
        }
    }

    /// Whether it fills its output without inputs, row by row: an initializer or a given value.
    #[must_use]
    pub const fn is_filler(&self) -> bool {
        self.initializer().is_some() || matches!(self, Self::Given { .. })
    }

    /// Moves the first row that it fills by so many.
    pub(crate) const fn skip_rows(&mut self, rows: u64) {
        if let Self::Uniform { first, .. } | Self::Gaussian { first, .. } | Self::Given { first, .. } = self {
            *first = first.saturating_add(rows);
        }
    }

    /// Whether it computes each element of its output from one element of each of two operands, which are broadcast.
    #[must_use]
    pub const fn is_binary_arithmetic(&self) -> bool {
        matches!(self, Self::Add | Self::Sub | Self::Mul | Self::Div | Self::Max | Self::Min | Self::Pow)
    }

    /// Whether the op waits for values or moves them, so that the executor runs it; every other kind is arithmetic, a
    /// pure function of its inputs.
    #[must_use]
    pub const fn is_flow(&self) -> bool {
        matches!(
            self,
            Self::Send { .. }
                | Self::Recv { .. }
                | Self::PullRows { .. }
                | Self::Enqueue
                | Self::Dequeue { .. }
                | Self::GradientAccumulator { .. }
                | Self::StringAccumulator { .. }
                | Self::LoopForever { .. }
        )
    }
}

/// One operation: a kind, applied to variables by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// The kind and its attributes.
    pub kind: OpKind,
    /// The variables it reads, in the order of the kind's signature.
    pub inputs: Vec<String>,
    /// The variables it writes, in the order of the kind's signature.
    pub outputs: Vec<String>,
    /// The phase it belongs to.
    pub role: OpRole,
}
