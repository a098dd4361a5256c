//! Differentiation rule of each op.

use crate::op::{Op, OpKind};
use crate::variable::{Dim, VariableFacts};
use pserver_core::dtype::ElementType;

use super::{Backward, gradient_name};

/// An op on the way from the loss to a parameter.
pub(super) struct OpGradient<'b, 'a> {
    pub(super) backward: &'b mut Backward<'a>,
    pub(super) op: &'a Op,
    /// The gradients of its outputs, where the loss depends on them.
    pub(super) output_gradients: Vec<Option<String>>,
    /// For each input, whether it depends on a parameter.
    pub(super) is_needed: Vec<bool>,
}

/// Whether gradients pass through the op. Accuracy and ops that select have derivative zero, or none.
pub(super) const fn passes(kind: &OpKind) -> bool {
    match kind {
        OpKind::Accuracy | OpKind::Greater | OpKind::Sign => false,
        OpKind::Cast { to } => to.is_float(),
        _ => true,
    }
}

/// Appends the ops that propagate the gradients of an op's outputs to the inputs that need one.
pub(super) fn apply(flow: &mut OpGradient<'_, '_>) -> Result<(), String> {
    match &flow.op.kind {
        OpKind::Matmul { transpose_left, transpose_right } => flow.matmul(*transpose_left, *transpose_right),
        OpKind::Add => {
            let output_gradient = flow.output_gradient();
            flow.repeated(0, &output_gradient);
            flow.repeated(1, &output_gradient);
        }
        OpKind::Mul => flow.mul(),
        OpKind::Reshape { .. } => flow.reshape(),
        OpKind::Transpose { axes } => flow.transpose(axes),
        OpKind::Softmax => flow.softmax(),
        OpKind::LogSoftmax => flow.log_softmax(),
        OpKind::Sub => flow.sub(),
        OpKind::Div => flow.div(),
        OpKind::Max => flow.chosen(0, 1),
        OpKind::Min => flow.chosen(1, 0),
        OpKind::Pow => flow.pow(),
        OpKind::Sqrt => flow.sqrt(),
        OpKind::Exp => flow.activation(OpKind::Mul),
        OpKind::Log => flow.log(),
        OpKind::Abs => flow.abs(),
        OpKind::Scale { factor } => {
            let output_gradient = flow.output_gradient();
            flow.make(0, OpKind::Scale { factor: *factor }, &[&output_gradient]);
        }
        OpKind::Sum => {
            let output_gradient = flow.output_gradient();
            (0..flow.op.inputs.len()).for_each(|place| flow.share(place, &output_gradient));
        }
        OpKind::ReduceSum { axes, .. } => {
            let output_gradient = flow.output_gradient();
            flow.make(0, OpKind::Repeat { axes: axes.clone() }, &[&output_gradient, &flow.op.inputs[0]]);
        }
        OpKind::Relu => flow.activation(OpKind::ReluGradient),
        OpKind::Sigmoid => flow.activation(OpKind::SigmoidGradient),
        OpKind::Tanh => flow.activation(OpKind::TanhGradient),
        OpKind::Mean { axes, .. } => {
            let output_gradient = flow.output_gradient();
            flow.make(0, OpKind::MeanGradient { axes: axes.clone() }, &[&flow.op.inputs[0], &output_gradient]);
        }
        OpKind::SoftmaxWithCrossEntropy | OpKind::SigmoidCrossEntropy => return flow.loss(),
        OpKind::LookupTable { padding } => return flow.lookup(*padding),
        OpKind::Concat { axis } => return flow.concat(*axis),
        OpKind::Split { axis, .. } => flow.split(*axis),
        OpKind::Cast { .. } => {
            let output_gradient = flow.output_gradient();
            let to = flow.element_type(0);
            flow.make(0, OpKind::Cast { to }, &[&output_gradient]);
        }
        _ => return network(flow),
    }
    Ok(())
}

/// Layers of networks, and the ops without gradient.
fn network(flow: &mut OpGradient<'_, '_>) -> Result<(), String> {
    match &flow.op.kind {
        OpKind::Conv2d { steps } => {
            let output_gradient = flow.output_gradient();
            let (x, filter) = (&flow.op.inputs[0], &flow.op.inputs[1]);
            flow.make(0, OpKind::Conv2dInputGradient { steps: *steps }, &[filter, &output_gradient, x]);
            flow.make(1, OpKind::Conv2dFilterGradient { steps: *steps }, &[x, &output_gradient, filter]);
        }
        OpKind::Gelu { approximate } => flow.by_input(OpKind::GeluGradient { approximate: *approximate }),
        OpKind::Slice { axis, start, end } => {
            flow.by_input(OpKind::SliceGradient { axis: *axis, start: *start, end: *end });
        }
        OpKind::Gather => {
            let output_gradient = flow.output_gradient();
            flow.make(0, OpKind::GatherGradient, &[&flow.op.inputs[0], &flow.op.inputs[1], &output_gradient]);
        }
        // The mask that the input had.
        OpKind::Dropout { rate, seed } => {
            let output_gradient = flow.output_gradient();
            let places = flow.op.inputs.iter().skip(1).map(String::as_str);
            let inputs: Vec<&str> = std::iter::once(output_gradient.as_str()).chain(places).collect();
            flow.make(0, OpKind::Dropout { rate: *rate, seed: *seed }, &inputs);
        }
        OpKind::LayerNorm { epsilon } => flow.layer_norm(*epsilon),
        OpKind::BatchNorm { epsilon } => return flow.batch_norm(*epsilon),
        OpKind::MaxPool2d { size, steps } => flow.by_input(OpKind::MaxPool2dGradient { size: *size, steps: *steps }),
        OpKind::AvgPool2d { size, steps } => flow.by_input(OpKind::AvgPool2dGradient { size: *size, steps: *steps }),
        other => {
            let name = other.name();
            return Err(format!("found {name} between the loss and a parameter; expected ops that have a gradient"));
        }
    }
    Ok(())
}

impl OpGradient<'_, '_> {
    /// The gradient of the only output.
    fn output_gradient(&self) -> String {
        self.output_gradients[0].clone().expect("an op is met only when an output has a gradient")
    }

    fn facts(&self, place: usize) -> &VariableFacts {
        self.backward.facts(&self.op.inputs[place])
    }

    fn element_type(&self, place: usize) -> ElementType {
        self.facts(place).element_type().expect("only elements are differentiated by")
    }

    /// Adds an output's gradient unchanged to an input's.
    fn share(&mut self, place: usize, output_gradient: &str) {
        if self.is_needed[place] {
            self.backward.share(&self.op.inputs[place], output_gradient);
        }
    }

    /// Adds the output of an op to the gradient of an input.
    fn make(&mut self, place: usize, kind: OpKind, inputs: &[&str]) {
        if self.is_needed[place] {
            let of = &self.op.inputs[place];
            let name = self.backward.part_name(of);
            self.backward.push(kind, inputs, vec![name.clone()]);
            self.backward.record(of, name);
        }
    }

    /// The output of an op on the way to the gradient of an input.
    fn inner(&mut self, place: usize, kind: OpKind, inputs: &[&str]) -> String {
        let name = format!("{}@whole", self.backward.part_name(&self.op.inputs[place]));
        self.backward.push(kind, inputs, vec![name.clone()]);
        name
    }

    /// As [`make`](Self::make) where the op's output has the shape that an input is broadcast to.
    fn make_repeated(&mut self, place: usize, kind: OpKind, inputs: &[&str]) {
        if self.facts(place) == self.backward.facts(&self.op.outputs[0]) {
            self.make(place, kind, inputs);
        } else if self.is_needed[place] {
            let whole = self.inner(place, kind, inputs);
            self.repeated(place, &whole);
        }
    }

    /// Adds what has the shape that an input is broadcast to, with the other sign.
    fn make_negative(&mut self, place: usize, whole: String) {
        if self.is_needed[place] {
            let is_whole = self.facts(place) == self.backward.facts(&self.op.outputs[0]);
            let input = &self.op.inputs[place];
            let summed = if is_whole { whole } else { self.inner(place, OpKind::SumTo, &[&whole, input]) };
            self.make(place, OpKind::Scale { factor: -1.0 }, &[&summed]);
        }
    }

    /// A broadcast input gets the sum over its repetitions.
    fn repeated(&mut self, place: usize, output_gradient: &str) {
        if self.facts(place) == self.backward.facts(&self.op.outputs[0]) {
            self.share(place, output_gradient);
        } else {
            self.make(place, OpKind::SumTo, &[output_gradient, &self.op.inputs[place]]);
        }
    }

    /// `C = A B` has `dA = dC B'` and `dB = A' dC`; a transposed operand exchanges the factors of its own.
    fn matmul(&mut self, left: bool, right: bool) {
        let output_gradient = self.output_gradient();
        let (a, b) = (&self.op.inputs[0], &self.op.inputs[1]);
        let product = |transpose_left, transpose_right| OpKind::Matmul { transpose_left, transpose_right };
        if left {
            self.make(0, product(right, true), &[b, &output_gradient]);
        } else {
            self.make(0, product(false, !right), &[&output_gradient, b]);
        }
        if right {
            self.make(1, product(true, left), &[&output_gradient, a]);
        } else {
            self.make(1, product(!left, false), &[a, &output_gradient]);
        }
    }

    fn mul(&mut self) {
        let output_gradient = self.output_gradient();
        let (a, b) = (&self.op.inputs[0], &self.op.inputs[1]);
        self.make_repeated(0, OpKind::Mul, &[&output_gradient, b]);
        self.make_repeated(1, OpKind::Mul, &[&output_gradient, a]);
    }

    fn log(&mut self) {
        let output_gradient = self.output_gradient();
        self.make(0, OpKind::Div, &[&output_gradient, &self.op.inputs[0]]);
    }

    fn abs(&mut self) {
        let output_gradient = self.output_gradient();
        let sign = self.inner(0, OpKind::Sign, &[&self.op.inputs[0]]);
        self.make(0, OpKind::Mul, &[&output_gradient, &sign]);
    }

    /// Back to the shape of the input, in which the batch is what remains.
    fn reshape(&mut self) {
        let output_gradient = self.output_gradient();
        let VariableFacts::Dense { shape, .. } = self.facts(0) else {
            unreachable!("a checked reshape has dense facts")
        };
        let length = |dim: &Dim| if let Dim::Fixed(length) = dim { *length } else { 0 };
        let shape = shape.iter().map(length).collect();
        self.make(0, OpKind::Reshape { shape }, &[&output_gradient]);
    }

    /// By the inverse order.
    fn transpose(&mut self, axes: &[u32]) {
        let output_gradient = self.output_gradient();
        let mut inverse: Vec<(u32, u32)> = axes.iter().copied().zip(0..).collect();
        inverse.sort_unstable();
        let axes = inverse.into_iter().map(|(_, place)| place).collect();
        self.make(0, OpKind::Transpose { axes }, &[&output_gradient]);
    }

    /// The sum of a variable over the last dimension of the input, which stays.
    fn row_sums(&mut self, of: &str) -> String {
        let VariableFacts::Dense { shape, .. } = self.facts(0) else {
            unreachable!("a checked softmax has dense facts")
        };
        let last = u32::try_from(shape.len() - 1).expect("a shape has a few dimensions");
        self.inner(0, OpKind::ReduceSum { axes: vec![last], keep: true }, &[of])
    }

    /// `y = softmax(x)` has `dx = y (dy - sum(dy y))`.
    fn softmax(&mut self) {
        let (output_gradient, y) = (self.output_gradient(), &self.op.outputs[0]);
        let product = self.inner(0, OpKind::Mul, &[&output_gradient, y]);
        let sums = self.row_sums(&product);
        let off = self.inner(0, OpKind::Sub, &[&output_gradient, &sums]);
        self.make(0, OpKind::Mul, &[y, &off]);
    }

    /// `y = log_softmax(x)` has `dx = dy - exp(y) sum(dy)`.
    fn log_softmax(&mut self) {
        let (output_gradient, y) = (self.output_gradient(), &self.op.outputs[0]);
        let sums = self.row_sums(&output_gradient);
        let shares = self.inner(0, OpKind::Exp, &[y]);
        let product = self.inner(0, OpKind::Mul, &[&shares, &sums]);
        self.make(0, OpKind::Sub, &[&output_gradient, &product]);
    }

    /// `c = a - b` has `da = dc` and `db = -dc`.
    fn sub(&mut self) {
        let output_gradient = self.output_gradient();
        self.repeated(0, &output_gradient);
        self.make_negative(1, output_gradient);
    }

    /// `c = a / b` has `da = dc / b` and `db = -c dc / b`.
    fn div(&mut self) {
        let output_gradient = self.output_gradient();
        let share = self.inner(0, OpKind::Div, &[&output_gradient, &self.op.inputs[1]]);
        self.repeated(0, &share);
        if self.is_needed[1] {
            let product = self.inner(1, OpKind::Mul, &[&share, &self.op.outputs[0]]);
            self.make_negative(1, product);
        }
    }

    /// The larger or smaller of two has the slope where it was chosen; the second, where they are equal.
    fn chosen(&mut self, above: usize, below: usize) {
        let output_gradient = self.output_gradient();
        let operands = [&*self.op.inputs[above], &*self.op.inputs[below]];
        let is_first = self.inner(0, OpKind::Greater, &operands);
        let first = self.inner(0, OpKind::Mul, &[&output_gradient, &is_first]);
        self.repeated(0, &first);
        if self.is_needed[1] {
            let second = self.inner(1, OpKind::Sub, &[&output_gradient, &first]);
            self.repeated(1, &second);
        }
    }

    fn pow(&mut self) {
        let output_gradient = self.output_gradient();
        for (place, exponent) in [(0, false), (1, true)] {
            let inputs = [&*self.op.inputs[0], &*self.op.inputs[1], &output_gradient];
            self.make_repeated(place, OpKind::PowGradient { exponent }, &inputs);
        }
    }

    /// `y = sqrt(x)` has `dx = dy / (2 y)`.
    fn sqrt(&mut self) {
        let output_gradient = self.output_gradient();
        let quotient = self.inner(0, OpKind::Div, &[&output_gradient, &self.op.outputs[0]]);
        self.make(0, OpKind::Scale { factor: 0.5 }, &[&quotient]);
    }

    /// A function whose derivative is computed from its value.
    fn activation(&mut self, kind: OpKind) {
        let output_gradient = self.output_gradient();
        self.make(0, kind, &[&self.op.outputs[0], &output_gradient]);
    }

    fn layer_norm(&mut self, epsilon: f64) {
        let output_gradient = self.output_gradient();
        let (x, scale) = (&self.op.inputs[0], &self.op.inputs[1]);
        self.input_and_scale(OpKind::LayerNormGradient { epsilon }, &[x, scale, &output_gradient]);
        self.repeated(2, &output_gradient);
    }

    fn batch_norm(&mut self, epsilon: f64) -> Result<(), String> {
        let [Some(output_gradient), None, None] = &self.output_gradients[..] else {
            return Err("found a loss that depends on a batch's mean or variance; expected it to depend on the first \
                        output alone"
                .to_owned());
        };
        let output_gradient = output_gradient.clone();
        if let Some(place) = (3..5).find(|place| self.is_needed[*place]) {
            return Err(format!(
                "found {:?}, which is trained, as a mean or variance for predictions; expected one that ops of the \
                 role optimize write",
                self.op.inputs[place]
            ));
        }
        let op = self.op;
        let inputs = [&op.inputs[0], &op.inputs[1], &op.outputs[1], &op.outputs[2], &op.inputs[5], &output_gradient];
        self.input_and_scale(OpKind::BatchNormGradient { epsilon }, &inputs.map(String::as_str));
        let VariableFacts::Dense { shape, .. } = self.facts(0) else { unreachable!("a checked input is dense") };
        let axes = (0_u32..).zip(shape).map(|(axis, _)| axis).filter(|axis| *axis != 1).collect();
        self.make(2, OpKind::ReduceSum { axes, keep: false }, &[&output_gradient]);
        Ok(())
    }

    /// Appends the op that gives the gradients of the first two inputs, if one of them is needed.
    fn input_and_scale(&mut self, kind: OpKind, inputs: &[&str]) {
        if self.is_needed[0] || self.is_needed[1] {
            let names = [0, 1].map(|place: usize| self.backward.part_name(&self.op.inputs[place]));
            self.backward.push(kind, inputs, names.to_vec());
            for (place, name) in names.into_iter().enumerate().filter(|(place, _)| self.is_needed[*place]) {
                self.backward.record(&self.op.inputs[place], name);
            }
        }
    }

    /// A function whose derivative is computed from its only input.
    fn by_input(&mut self, kind: OpKind) {
        let output_gradient = self.output_gradient();
        self.make(0, kind, &[&self.op.inputs[0], &output_gradient]);
    }

    fn loss(&mut self) -> Result<(), String> {
        let label = &self.op.inputs[1];
        if self.is_needed[1] {
            return Err(format!("found label {label:?}, which depends on a parameter; expected data"));
        }
        if let Some(Some(_)) = self.output_gradients.get(1) {
            let name = &self.op.outputs[1];
            return Err(format!(
                "found probabilities {name:?} between the loss and a parameter; expected only the losses"
            ));
        }
        let output_gradient = self.output_gradient();
        if self.op.kind == OpKind::SigmoidCrossEntropy {
            self.make(0, OpKind::SigmoidCrossEntropyGradient, &[&self.op.inputs[0], label, &output_gradient]);
        } else {
            self.make(0, OpKind::SoftmaxWithCrossEntropyGradient, &[&self.op.outputs[1], label, &output_gradient]);
        }
        Ok(())
    }

    fn lookup(&mut self, padding: Option<u64>) -> Result<(), String> {
        let (table, ids) = (&self.op.inputs[0], &self.op.inputs[1]);
        let output_gradient = self.output_gradient();
        match self.facts(0) {
            VariableFacts::Dense { shape, .. } if let [Dim::Fixed(height), _] = shape[..] => {
                self.make(0, OpKind::LookupTableGradient { height, padding }, &[ids, &output_gradient]);
                Ok(())
            }
            other => Err(format!("found table {table:?} of {other}; expected a fixed height")),
        }
    }

    fn concat(&mut self, axis: u32) -> Result<(), String> {
        let output_gradient = self.output_gradient();
        let lengths = (0..self.op.inputs.len()).map(|place| match self.facts(place) {
            VariableFacts::Dense { shape, .. } => match shape[axis as usize] {
                Dim::Fixed(length) => Ok(length),
                Dim::Batch => unreachable!("a checked concat has fixed lengths"),
            },
            other => Err(format!("found {:?} of {other}; expected dense tensors", self.op.inputs[place])),
        });
        let lengths = lengths.collect::<Result<_, _>>()?;
        let pieces: Vec<String> = self.op.inputs.iter().map(|of| self.backward.part_name(of)).collect();
        self.backward.push(OpKind::Split { axis, lengths }, &[&output_gradient], pieces.clone());
        for ((of, piece), is_needed) in self.op.inputs.iter().zip(pieces).zip(&self.is_needed) {
            if *is_needed {
                self.backward.record(of, piece);
            }
        }
        Ok(())
    }

    /// A piece that the loss does not depend on has a gradient of zero.
    fn split(&mut self, axis: u32) {
        let scalar = VariableFacts::fixed(self.element_type(0), &[]);
        let mut output_gradients = Vec::with_capacity(self.output_gradients.len());
        for (output, output_gradient) in self.op.outputs.iter().zip(self.output_gradients.clone()) {
            output_gradients.push(output_gradient.unwrap_or_else(|| {
                let name = gradient_name(output);
                let zero = self.backward.constant(&format!("{name}@zero"), scalar.clone(), 0.0);
                self.backward.push(OpKind::MeanGradient { axes: Vec::new() }, &[output, &zero], vec![name.clone()]);
                name
            }));
        }
        let output_gradients: Vec<&str> = output_gradients.iter().map(String::as_str).collect();
        self.make(0, OpKind::Concat { axis }, &output_gradients);
    }
}
