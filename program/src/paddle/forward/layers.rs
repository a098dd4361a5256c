//! Layers of Paddle's, and functions of several of our ops.

use pserver_core::error::Failure;

use crate::op::OpKind;
use crate::variable::{Dim, Purpose, Variable, VariableFacts};
use crate::window::WindowSteps;

use super::super::paddle_op::PaddleOp;
use super::{ForwardPart, axis_number, signed};

/// Data of ops `dropout`: the number of the step, and that of the first row of a part of a batch.
pub(super) const DROPOUT_STEP: &str = "dropout@step";
pub(super) const DROPOUT_FIRST: &str = "dropout@first";

impl<'a> ForwardPart<'a> {
    /// Maps an op of this page; false where it is none.
    pub(super) fn layer(&mut self, op: &PaddleOp<'a>) -> Result<bool, Failure> {
        match op.kind() {
            "softmax" => self.over_last(op, OpKind::Softmax)?,
            "log_softmax" => self.over_last(op, OpKind::LogSoftmax)?,
            "gelu" => {
                let approximate = op.boolean("approximate", false)?;
                self.unary(op, OpKind::Gelu { approximate })?;
            }
            "silu" => self.silu(op)?,
            "relu6" => self.between(op, 0.0, op.float("threshold", 6.0)?)?,
            "brelu" => self.between(op, op.float("t_min", 0.0)?, op.float("t_max", 24.0)?)?,
            "clip" => self.between(op, op.float("min", 0.0)?, op.float("max", 0.0)?)?,
            "assign" => self.unary(op, OpKind::Scale { factor: 1.0 })?,
            "sign" => self.unary(op, OpKind::Sign)?,
            "rsqrt" => self.power_of(op, -0.5)?,
            "reciprocal" => self.power_of(op, -1.0)?,
            "swish" => {
                op.check_float("beta", 1.0)?;
                self.silu(op)?;
            }
            "tanh_shrink" => self.tanh_shrink(op)?,
            "leaky_relu" => self.leaky_relu(op)?,
            "pow" => self.power_of(op, op.float("factor", 1.0)?)?,
            "dropout" => self.dropout(op)?,
            "layer_norm" => self.layer_norm(op)?,
            "conv2d" => self.convolution(op)?,
            "pool2d" => self.pool(op)?,
            "top_k_v2" => self.top(op)?,
            "accuracy" => self.accuracy(op)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A scalar of the type of a variable.
    pub(super) fn constant(
        &mut self,
        op: &PaddleOp<'a>,
        name: String,
        value: f64,
        like: &str,
    ) -> Result<String, Failure> {
        let (element_type, _) = self.variables.dense(like)?;
        let facts = VariableFacts::fixed(element_type, &[]);
        self.declared.push(Variable { name: name.clone(), facts, purpose: Purpose::Temporary });
        self.push(op, OpKind::Fill { value }, &[], &[&name]);
        Ok(name)
    }

    fn over_last(&mut self, op: &PaddleOp<'a>, kind: OpKind) -> Result<(), Failure> {
        self.check_whole(op)?;
        let (x, out) = self.one_to_one(op)?;
        let last = signed(self.shape(x)?.len()) - 1;
        let axis = op.int("axis", -1)?;
        if axis != -1 && axis != last {
            return Err(op.refuse(format!("found axis {axis}; expected -1 or {last}, the last")));
        }
        self.push(op, kind, &[x], &[out]);
        Ok(())
    }

    fn silu(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let (x, out) = self.one_to_one(op)?;
        let slope = format!("{out}@sigmoid");
        self.push(op, OpKind::Sigmoid, &[x], &[&slope]);
        self.push(op, OpKind::Mul, &[x, &slope], &[out]);
        Ok(())
    }

    fn tanh_shrink(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let (x, out) = self.one_to_one(op)?;
        let tanh = format!("{out}@tanh");
        self.push(op, OpKind::Tanh, &[x], &[&tanh]);
        self.push(op, OpKind::Sub, &[x, &tanh], &[out]);
        Ok(())
    }

    /// As in Paddle, an element at a bound has the slope zero. The largest number of binary32 is no bound.
    fn between(&mut self, op: &PaddleOp<'a>, low: f64, high: f64) -> Result<(), Failure> {
        let (x, out) = self.one_to_one(op)?;
        let (above, is_bound) = (format!("{out}@above"), |bound: f64| bound.abs() < f64::from(f32::MAX));
        let lower = is_bound(low).then(|| self.constant(op, format!("{out}@low"), low, x)).transpose()?;
        let upper = is_bound(high).then(|| self.constant(op, format!("{out}@high"), high, x)).transpose()?;
        match (lower, upper) {
            (Some(lower), Some(upper)) => {
                self.push(op, OpKind::Max, &[x, &lower], &[&above]);
                self.push(op, OpKind::Min, &[&above, &upper], &[out]);
            }
            (Some(lower), None) => self.push(op, OpKind::Max, &[x, &lower], &[out]),
            (None, Some(upper)) => self.push(op, OpKind::Min, &[x, &upper], &[out]),
            (None, None) => self.push(op, OpKind::Scale { factor: 1.0 }, &[x], &[out]),
        }
        Ok(())
    }

    /// The larger of `x` and `alpha x`, which is the second below zero.
    fn leaky_relu(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let alpha = op.float("alpha", 0.02)?;
        if !(0.0..1.0).contains(&alpha) {
            return Err(op.refuse(format!("found alpha {alpha}; expected one from 0, below 1")));
        }
        let (x, out) = self.one_to_one(op)?;
        let leak = format!("{out}@leak");
        self.push(op, OpKind::Scale { factor: alpha }, &[x], &[&leak]);
        self.push(op, OpKind::Max, &[x, &leak], &[out]);
        Ok(())
    }

    fn power_of(&mut self, op: &PaddleOp<'a>, exponent: f64) -> Result<(), Failure> {
        let (x, out) = self.one_to_one(op)?;
        let exponent = self.constant(op, format!("{out}@exponent"), exponent, x)?;
        self.push(op, OpKind::Pow, &[x, &exponent], &[out]);
        Ok(())
    }

    /// Which elements are dropped follows from the number of the step, which is fed; without dropout it is -1.
    fn dropout(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let rate = op.float("dropout_prob", 0.5)?;
        let (seed, is_test) = (op.int("seed", 0)?, op.boolean("is_test", false)?);
        // The first form scales what is kept while it trains, the other scales everything afterwards.
        let factor = match op.text("dropout_implementation") {
            "upscale_in_train" => 1.0,
            "" | "downgrade_in_infer" => 1.0 - rate,
            other => {
                let expected = "expected \"upscale_in_train\" or \"downgrade_in_infer\"";
                return Err(op.refuse(format!("found dropout_implementation {other:?}; {expected}")));
            }
        };
        let (x, out) = self.one_to_one(op)?;
        if is_test || rate == 0.0 {
            self.push(op, OpKind::Scale { factor }, &[x], &[out]);
            return Ok(());
        }
        let seed = if seed == 0 { op.place as u64 + 1 } else { seed.unsigned_abs() };
        let kept = if factor == 1.0 { out.to_owned() } else { format!("{out}@kept") };
        self.push(op, OpKind::Dropout { rate, seed }, &[x, DROPOUT_STEP, DROPOUT_FIRST], &[&kept]);
        if factor != 1.0 {
            self.push(op, OpKind::Scale { factor }, &[&kept], &[out]);
        }
        Ok(())
    }

    /// Over the dimensions from `begin_norm_axis` on, which are joined for the op and parted again.
    fn layer_norm(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X", "Scale", "Bias"])?;
        self.check_whole(op)?;
        let kind = OpKind::LayerNorm { epsilon: op.float("epsilon", 1e-5)? };
        let (x, scale, bias, out) = (op.input("X")?, op.input("Scale")?, op.input("Bias")?, op.output("Y")?);
        let shape = self.shape(x)?;
        let begin = op.int("begin_norm_axis", 1)?;
        let begin = usize::try_from(begin).ok().filter(|begin| (1..shape.len()).contains(begin)).ok_or_else(|| {
            op.refuse(format!("found begin_norm_axis {begin}; expected one from 1, below {}", shape.len()))
        })?;
        if begin + 1 == shape.len() {
            self.push(op, kind, &[x, scale, bias], &[out]);
            return Ok(());
        }
        let mut joined = shape[..begin].to_vec();
        joined.push(self.joined(op, x, &shape[begin..])?);
        let (flat, normal) = (format!("{out}@flat"), format!("{out}@normal"));
        self.reshape_to(op, x, &flat, &joined)?;
        self.push(op, kind, &[&flat, scale, bias], &[&normal]);
        self.reshape_to(op, &normal, out, &shape)
    }

    fn check_pictures(op: &PaddleOp<'_>) -> Result<(), Failure> {
        match op.text("data_format") {
            "" | "NCHW" | "AnyLayout" => Ok(()),
            other => Err(op.refuse(format!("found data_format {other:?}; expected \"NCHW\""))),
        }
    }

    /// Two numbers for height and width.
    fn height_and_width(op: &PaddleOp<'_>, name: &str) -> Result<[u32; 2], Failure> {
        let found = op.ints(name);
        let [height, width] = found[..] else {
            return Err(op.refuse(format!("found {name} {found:?}; expected two, of height and width")));
        };
        let small = |length: i64| u32::try_from(length).ok();
        small(height)
            .zip(small(width))
            .map(|(height, width)| [height, width])
            .ok_or_else(|| op.refuse(format!("found {name} {found:?}; expected numbers from 0, below 2^32")))
    }

    fn steps(op: &PaddleOp<'_>) -> Result<WindowSteps, Failure> {
        let padding = match (op.text("padding_algorithm"), &op.ints("paddings")[..]) {
            ("VALID", _) => [0, 0],
            ("" | "EXPLICIT", [top, bottom, left, right]) if top == bottom && left == right => {
                let small = |length: i64| {
                    u32::try_from(length)
                        .map_err(|_| op.refuse(format!("found padding {length}; expected one from 0, below 2^32")))
                };
                [small(*top)?, small(*left)?]
            }
            ("" | "EXPLICIT", [_, _]) => Self::height_and_width(op, "paddings")?,
            (algorithm, found) => {
                return Err(op.refuse(format!(
                    "found padding_algorithm {algorithm:?} with paddings {found:?}; expected \"EXPLICIT\" with as many \
                     on both sides, or \"VALID\""
                )));
            }
        };
        Ok(WindowSteps { stride: Self::height_and_width(op, "strides")?, padding })
    }

    fn convolution(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["Input", "Filter"])?;
        self.check_whole(op)?;
        Self::check_pictures(op)?;
        op.check_ints(&[("groups", 1)])?;
        if op.ints("dilations").iter().any(|dilation| *dilation != 1) {
            return Err(op.refuse(format!("found dilations {:?}; expected 1", op.ints("dilations"))));
        }
        let kind = OpKind::Conv2d { steps: Self::steps(op)? };
        self.push(op, kind, &[op.input("Input")?, op.input("Filter")?], &[op.output("Output")?]);
        Ok(())
    }

    fn pool(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        self.check_whole(op)?;
        Self::check_pictures(op)?;
        op.check_booleans(&[("ceil_mode", false)])?;
        let x = op.input("X")?;
        let is_whole = op.boolean("global_pooling", false)?
            || (op.boolean("adaptive", false)? && op.ints("ksize").iter().all(|length| *length == 1));
        if !is_whole {
            op.check_booleans(&[("adaptive", false)])?;
        }
        let (size, steps) = match (is_whole, &self.shape(x)?[..]) {
            (true, [_, _, Dim::Fixed(height), Dim::Fixed(width)]) => {
                let small = |length: &u64| axis_number(op, usize::try_from(*length).unwrap_or(usize::MAX));
                ([small(height)?, small(width)?], WindowSteps::default())
            }
            (true, other) => {
                return Err(op.refuse(format!("found {x:?} of {} dimensions; expected four, fixed ones", other.len())));
            }
            (false, _) => (Self::height_and_width(op, "ksize")?, Self::steps(op)?),
        };
        let kind = match op.text("pooling_type") {
            "max" => OpKind::MaxPool2d { size, steps },
            "avg" if steps.padding == [0, 0] || op.boolean("exclusive", true)? => OpKind::AvgPool2d { size, steps },
            "avg" => return Err(op.refuse("found exclusive false with padding; expected true, or no padding")),
            other => return Err(op.refuse(format!("found pooling_type {other:?}; expected \"max\" or \"avg\""))),
        };
        self.push(op, kind, &[x], &[op.output("Out")?]);
        Ok(())
    }

    /// The largest score of each row, of which the op accuracy needs the place.
    fn top(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        op.check_booleans(&[("largest", true)])?;
        op.check_ints(&[("k", 1), ("axis", -1)])?;
        self.largest.insert(op.output("Indices")?, op.input("X")?);
        Ok(())
    }

    fn accuracy(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["Out", "Indices", "Label"])?;
        let (indices, label, out) = (op.input("Indices")?, op.input("Label")?, op.output("Accuracy")?);
        let scores = self.largest.get(indices).copied().ok_or_else(|| {
            op.refuse(format!("found {indices:?} as the places; expected those of a top_k_v2 with k 1"))
        })?;
        self.scalar(out)?;
        self.push(op, OpKind::Accuracy, &[scores, label], &[out]);
        Ok(())
    }
}
