//! How each op hands a gradient on.

use crate::dtype::ElementType;
use crate::program::op::{Op, OpKind};
use crate::program::variable::{Dim, Facts};

use super::{Backward, gradient_name};

/// An op on the way from the loss to a parameter.
pub(super) struct Flow<'b, 'a> {
    pub(super) backward: &'b mut Backward<'a>,
    pub(super) op: &'a Op,
    /// The gradients of its outputs, where the loss depends on them.
    pub(super) slopes: Vec<Option<String>>,
    /// Which inputs a parameter has an influence on.
    pub(super) wanted: Vec<bool>,
}

/// Whether what goes in has a slope in what comes out. Accuracy and what chooses are flat, or nothing at all.
pub(super) const fn passes(kind: &OpKind) -> bool {
    match kind {
        OpKind::Accuracy => false,
        OpKind::Cast { to } => to.is_float(),
        _ => true,
    }
}

/// Appends the ops that hand the gradients of an op's outputs on to those inputs that want one.
pub(super) fn apply(flow: &mut Flow<'_, '_>) -> Result<(), String> {
    match &flow.op.kind {
        OpKind::Matmul { transpose_left, transpose_right } => flow.matmul(*transpose_left, *transpose_right),
        OpKind::Add => {
            let slope = flow.slope();
            flow.share(0, &slope);
            flow.repeated(1, &slope);
        }
        OpKind::Mul => flow.mul(),
        OpKind::Scale { factor } => {
            let slope = flow.slope();
            flow.make(0, OpKind::Scale { factor: *factor }, &[&slope]);
        }
        OpKind::Sum => {
            let slope = flow.slope();
            (0..flow.op.inputs.len()).for_each(|place| flow.share(place, &slope));
        }
        OpKind::ReduceSum { axis } => {
            let slope = flow.slope();
            flow.make(0, OpKind::Repeat { axis: *axis }, &[&slope, &flow.op.inputs[0]]);
        }
        OpKind::Relu => flow.activation(OpKind::ReluGradient),
        OpKind::Sigmoid => flow.activation(OpKind::SigmoidGradient),
        OpKind::Tanh => flow.activation(OpKind::TanhGradient),
        OpKind::Mean => {
            let slope = flow.slope();
            flow.make(0, OpKind::MeanGradient, &[&flow.op.inputs[0], &slope]);
        }
        OpKind::SoftmaxWithCrossEntropy | OpKind::SigmoidCrossEntropy => return flow.loss(),
        OpKind::LookupTable => return flow.lookup(),
        OpKind::Concat { axis } => flow.concat(*axis),
        OpKind::Split { axis, .. } => flow.split(*axis),
        OpKind::Cast { .. } => {
            let slope = flow.slope();
            let to = flow.element_type(0);
            flow.make(0, OpKind::Cast { to }, &[&slope]);
        }
        other => {
            let name = other.name();
            return Err(format!("found {name} between the loss and a parameter; expected ops that have a gradient"));
        }
    }
    Ok(())
}

impl Flow<'_, '_> {
    /// The gradient of the only output.
    fn slope(&self) -> String {
        self.slopes[0].clone().expect("an op is met only when an output has a gradient")
    }

    fn facts(&self, place: usize) -> &Facts {
        self.backward.facts(&self.op.inputs[place])
    }

    fn element_type(&self, place: usize) -> ElementType {
        match self.facts(place) {
            Facts::Dense { element_type, .. } | Facts::SelectedRows { element_type, .. } => *element_type,
            other => unreachable!("{other} has no elements to differentiate by"),
        }
    }

    /// An input's gradient gets an output's as it is.
    fn share(&mut self, place: usize, slope: &str) {
        if self.wanted[place] {
            self.backward.share(&self.op.inputs[place], slope);
        }
    }

    /// An input's gradient gets what an op makes.
    fn make(&mut self, place: usize, kind: OpKind, inputs: &[&str]) {
        if self.wanted[place] {
            let of = &self.op.inputs[place];
            let name = self.backward.part_name(of);
            self.backward.push(kind, inputs, vec![name.clone()]);
            self.backward.record(of, name);
        }
    }

    /// An input that repeats gets the sum over its repetitions.
    fn repeated(&mut self, place: usize, slope: &str) {
        if self.facts(place) == self.backward.facts(&self.op.outputs[0]) {
            self.share(place, slope);
        } else {
            self.make(place, OpKind::SumTo, &[slope, &self.op.inputs[place]]);
        }
    }

    /// `C = A B` has `dA = dC B'` and `dB = A' dC`; a transposed operand exchanges the factors of its own.
    fn matmul(&mut self, left: bool, right: bool) {
        let slope = self.slope();
        let (a, b) = (&self.op.inputs[0], &self.op.inputs[1]);
        let product = |transpose_left, transpose_right| OpKind::Matmul { transpose_left, transpose_right };
        if left {
            self.make(0, product(right, true), &[b, &slope]);
        } else {
            self.make(0, product(false, !right), &[&slope, b]);
        }
        if right {
            self.make(1, product(true, left), &[&slope, a]);
        } else {
            self.make(1, product(!left, false), &[a, &slope]);
        }
    }

    fn mul(&mut self) {
        let slope = self.slope();
        let (a, b) = (&self.op.inputs[0], &self.op.inputs[1]);
        self.make(0, OpKind::Mul, &[&slope, b]);
        if self.facts(0) == self.facts(1) {
            self.make(1, OpKind::Mul, &[&slope, a]);
        } else if self.wanted[1] {
            let product = format!("{}@whole", self.backward.part_name(b));
            self.backward.push(OpKind::Mul, &[&slope, a], vec![product.clone()]);
            self.make(1, OpKind::SumTo, &[&product, b]);
        }
    }

    /// A function whose slope follows from its value.
    fn activation(&mut self, kind: OpKind) {
        let slope = self.slope();
        self.make(0, kind, &[&self.op.outputs[0], &slope]);
    }

    fn loss(&mut self) -> Result<(), String> {
        let label = &self.op.inputs[1];
        if self.wanted[1] {
            return Err(format!("found label {label:?}, which a parameter has an influence on; expected data"));
        }
        if let Some(Some(_)) = self.slopes.get(1) {
            let name = &self.op.outputs[1];
            return Err(format!(
                "found probabilities {name:?} between the loss and a parameter; expected only the losses"
            ));
        }
        let slope = self.slope();
        if self.op.kind == OpKind::SigmoidCrossEntropy {
            self.make(0, OpKind::SigmoidCrossEntropyGradient, &[&self.op.inputs[0], label, &slope]);
        } else {
            self.make(0, OpKind::SoftmaxWithCrossEntropyGradient, &[&self.op.outputs[1], label, &slope]);
        }
        Ok(())
    }

    fn lookup(&mut self) -> Result<(), String> {
        let (table, ids) = (&self.op.inputs[0], &self.op.inputs[1]);
        let slope = self.slope();
        match self.facts(0) {
            Facts::Dense { shape, .. } if let [Dim::Fixed(height), _] = shape[..] => {
                self.make(0, OpKind::LookupTableGradient { height }, &[ids, &slope]);
                Ok(())
            }
            other => Err(format!("found table {table:?} of {other}; expected a fixed height")),
        }
    }

    fn concat(&mut self, axis: u32) {
        let slope = self.slope();
        let lengths = (0..self.op.inputs.len()).map(|place| match self.facts(place) {
            Facts::Dense { shape, .. } => match shape[axis as usize] {
                Dim::Fixed(length) => length,
                Dim::Batch => unreachable!("a checked concat has fixed lengths"),
            },
            other => unreachable!("a checked concat has dense inputs, not {other}"),
        });
        let lengths = lengths.collect();
        let pieces: Vec<String> = self.op.inputs.iter().map(|of| self.backward.part_name(of)).collect();
        self.backward.push(OpKind::Split { axis, lengths }, &[&slope], pieces.clone());
        for ((of, piece), wanted) in self.op.inputs.iter().zip(pieces).zip(&self.wanted) {
            if *wanted {
                self.backward.record(of, piece);
            }
        }
    }

    /// A piece that the loss does not depend on has a gradient of zero.
    fn split(&mut self, axis: u32) {
        let scalar = Facts::fixed(self.element_type(0), &[]);
        let mut slopes = Vec::with_capacity(self.slopes.len());
        for (output, slope) in self.op.outputs.iter().zip(self.slopes.clone()) {
            slopes.push(slope.unwrap_or_else(|| {
                let name = gradient_name(output);
                let zero = self.backward.constant(&format!("{name}@zero"), scalar.clone(), 0.0);
                self.backward.push(OpKind::MeanGradient, &[output, &zero], vec![name.clone()]);
                name
            }));
        }
        let slopes: Vec<&str> = slopes.iter().map(String::as_str).collect();
        self.make(0, OpKind::Concat { axis }, &slopes);
    }
}
