//! The forward part: each op of Paddle's as ops of ours.

mod layers;
mod shapes;

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use crate::block::{Block, Program};
use crate::graph::Graph;
use crate::op::{Op, OpKind, OpRole};
use crate::variable::{Dim, Purpose, Variable, VariableFacts};

use super::paddle_op::PaddleOp;
use super::paddle_variables::{self, PaddleVariables, element_type_of};
use super::startup::constant;

/// The forward ops of ours, while they are written.
pub(super) struct ForwardPart<'a> {
    variables: &'a PaddleVariables<'a>,
    declared: Vec<Variable>,
    ops: Vec<Op>,
    /// For each op of ours the op of Paddle's.
    origins: Vec<PaddleOp<'a>>,
    /// Variables without the last dimension of 1 that they have in Paddle: labels, losses and what is made of them.
    columns: BTreeSet<&'a str>,
    /// The scores of which a variable has the places of the largest.
    largest: BTreeMap<&'a str, &'a str>,
}

impl<'a> ForwardPart<'a> {
    /// Maps ops in order.
    ///
    /// # Errors
    /// Names the op that has no counterpart, or the attribute or the variable that prevents it.
    pub(super) fn new(variables: &'a PaddleVariables<'a>, ops: &[PaddleOp<'a>]) -> Result<Self, Failure> {
        let (columns, largest) = (BTreeSet::new(), BTreeMap::new());
        let mut part = Self { variables, declared: Vec::new(), ops: Vec::new(), origins: Vec::new(), columns, largest };
        let labels = ops.iter().filter(|op| matches!(op.kind(), "softmax_with_cross_entropy" | "accuracy"));
        part.columns.extend(labels.flat_map(|op| op.inputs("Label")).map(String::as_str));
        for op in ops {
            part.map(op)?;
        }
        Ok(part)
    }

    /// Declares the data that ops read, and checks the whole against the shapes that Paddle declares.
    pub(super) fn check(&mut self, parameters: &[Variable]) -> Result<(), Failure> {
        let read: BTreeSet<&str> = self.ops.iter().flat_map(|op| &op.inputs).map(String::as_str).collect();
        for variable in self.variables.all().filter(|variable| variable.is_fed && read.contains(variable.name.as_str()))
        {
            let facts = self.facts(&variable.name)?;
            self.declared.push(Variable { name: variable.name.clone(), facts, purpose: Purpose::Data });
        }
        for name in [layers::DROPOUT_STEP, layers::DROPOUT_FIRST].into_iter().filter(|name| read.contains(name)) {
            let facts = VariableFacts::fixed(ElementType::Int64, &[]);
            self.declared.push(Variable { name: name.to_owned(), facts, purpose: Purpose::Data });
        }
        self.declared.extend(parameters.iter().cloned());
        let graph = Graph::new(self.prefix(self.ops.len())).map_err(|failure| self.first_refused(failure))?;
        for (op, origin) in self.ops.iter().zip(&self.origins) {
            let outputs = op.outputs.iter().filter(|output| origin.all_outputs().any(|known| known == *output));
            for output in outputs {
                let (found, expected) = (graph.facts(output), self.facts(output)?);
                if found != Some(&expected) {
                    let found = found.map_or_else(|| "nothing".to_owned(), VariableFacts::to_string);
                    return Err(origin.refuse(format!("output {output:?} is {found}; expected {expected} as declared")));
                }
            }
        }
        Ok(())
    }

    /// The ops as a program.
    pub(super) fn into_program(self) -> Program {
        Program { blocks: vec![Block { parent: None, variables: self.declared, ops: self.ops }] }
    }

    /// For each kind of Paddle's the number of ops, in the order of their names.
    pub(super) fn counts(&self) -> BTreeMap<&'a str, usize> {
        let mut places = BTreeSet::new();
        let mut counts = BTreeMap::new();
        for op in self.origins.iter().filter(|op| places.insert(op.place)) {
            *counts.entry(op.kind()).or_default() += 1;
        }
        counts
    }

    fn prefix(&self, ops: usize) -> Program {
        let block = Block { parent: None, variables: self.declared.clone(), ops: self.ops[..ops].to_vec() };
        Program { blocks: vec![block] }
    }

    /// The refusal of the first op that does not fit its variables, with the name that Paddle has for it.
    fn first_refused(&self, whole: Failure) -> Failure {
        let (mut fits, mut refused) = (0, self.ops.len());
        if Graph::new(self.prefix(0)).is_err() || refused == 0 {
            return whole;
        }
        while refused - fits > 1 {
            let middle = fits.midpoint(refused);
            if Graph::new(self.prefix(middle)).is_ok() { fits = middle } else { refused = middle }
        }
        self.origins[fits].refuse(whole_of(&self.prefix(refused), whole))
    }

    /// The facts that a variable has in our program.
    fn facts(&self, name: &str) -> Result<VariableFacts, Failure> {
        let (element_type, mut shape) = self.variables.dense(name)?;
        if self.columns.contains(name) && shape.pop() != Some(Dim::Fixed(1)) {
            return Err(paddle_variables::refuse(
                name,
                "found no last dimension of 1; expected it of labels and losses",
            ));
        }
        Ok(VariableFacts::Dense { element_type, shape })
    }

    fn shape(&self, name: &str) -> Result<Vec<Dim>, Failure> {
        match self.facts(name)? {
            VariableFacts::Dense { shape, .. } => Ok(shape),
            other => unreachable!("{other} as the facts of a dense variable"),
        }
    }

    fn push(&mut self, origin: &PaddleOp<'a>, kind: OpKind, inputs: &[&str], outputs: &[&str]) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.ops.push(Op { kind, inputs: owned(inputs), outputs: owned(outputs), role: OpRole::Forward });
        self.origins.push(*origin);
    }

    fn map(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        match op.kind() {
            "mul" | "matmul" | "matmul_v2" => self.product(op),
            "elementwise_add" => self.pair(op, OpKind::Add),
            "elementwise_mul" => self.pair(op, OpKind::Mul),
            "elementwise_sub" => self.pair(op, OpKind::Sub),
            "elementwise_div" => self.pair(op, OpKind::Div),
            "elementwise_max" => self.pair(op, OpKind::Max),
            "elementwise_min" => self.pair(op, OpKind::Min),
            "elementwise_pow" => self.pair(op, OpKind::Pow),
            "relu" => self.unary(op, OpKind::Relu),
            "sigmoid" => self.unary(op, OpKind::Sigmoid),
            "tanh" => self.unary(op, OpKind::Tanh),
            "sqrt" => self.unary(op, OpKind::Sqrt),
            "exp" => self.unary(op, OpKind::Exp),
            "log" => self.unary(op, OpKind::Log),
            "abs" => self.unary(op, OpKind::Abs),
            "scale" => self.scale(op),
            "square" => {
                let (x, out) = self.one_to_one(op)?;
                self.push(op, OpKind::Mul, &[x, x], &[out]);
                Ok(())
            }
            "cast" => {
                let number = op.int("out_dtype", -1)?;
                let to = element_type_of(number)
                    .ok_or_else(|| op.refuse(format!("found out_dtype {number}; expected a number type of ours")))?;
                self.unary(op, OpKind::Cast { to })
            }
            "sum" => self.sum(op),
            "mean" => self.unary_to(op, OpKind::Mean { axes: Vec::new(), keep: false }),
            "reduce_sum" | "reduce_mean" => self.reduce(op),
            "softmax_with_cross_entropy" => self.softmax_with_cross_entropy(op),
            "sigmoid_cross_entropy_with_logits" => self.sigmoid_cross_entropy(op),
            "lookup_table_v2" => self.lookup(op),
            "concat" => self.concat(op),
            "split" => self.split(op),
            "fill_constant" => self.fill(op),
            _ if self.arrange(op)? || self.layer(op)? => Ok(()),
            _ => Err(op.refuse("found an op that is not mapped; docs/PROGRAMS.md has the list")),
        }
    }

    /// Refuses variables that lack their last dimension here.
    fn check_whole(&self, op: &PaddleOp<'_>) -> Result<(), Failure> {
        match op.all_inputs().find(|name| self.columns.contains(name)) {
            Some(name) => Err(op.refuse(format!(
                "found variable {name:?}, whose last dimension of 1 is dropped as a label's or a loss's; expected it \
                 only in element-wise ops, means and sums"
            ))),
            None => Ok(()),
        }
    }

    /// The output lacks its last dimension if the inputs do, which then all must.
    fn follow(&mut self, op: &PaddleOp<'a>, inputs: &[&str], output: &'a str) -> Result<(), Failure> {
        match inputs.iter().filter(|name| self.columns.contains(**name)).count() {
            0 => Ok(()),
            count if count == inputs.len() => {
                self.columns.insert(output);
                Ok(())
            }
            _ => self.check_whole(op),
        }
    }

    fn one_to_one(&mut self, op: &PaddleOp<'a>) -> Result<(&'a str, &'a str), Failure> {
        op.check_slots(&["X"])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        self.follow(op, &[x], out)?;
        Ok((x, out))
    }

    fn unary(&mut self, op: &PaddleOp<'a>, kind: OpKind) -> Result<(), Failure> {
        let (x, out) = self.one_to_one(op)?;
        self.push(op, kind, &[x], &[out]);
        Ok(())
    }

    /// To a scalar.
    fn unary_to(&mut self, op: &PaddleOp<'a>, kind: OpKind) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        self.scalar(out)?;
        self.push(op, kind, &[x], &[out]);
        Ok(())
    }

    /// Programs of older versions have scalars of one dimension.
    fn scalar(&mut self, out: &'a str) -> Result<(), Failure> {
        if self.variables.dense(out)?.1 == [Dim::Fixed(1)] {
            self.columns.insert(out);
        }
        Ok(())
    }

    fn product(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X", "Y"])?;
        self.check_whole(op)?;
        op.check_ints(&[("x_num_col_dims", 1), ("y_num_col_dims", 1)])?;
        if op.kind() == "mul" && self.shape(op.input("X")?)?.len() > 2 {
            return self.flat_product(op);
        }
        op.check_float("alpha", 1.0)?;
        let either = |new, old| Ok::<bool, Failure>(op.boolean(new, false)? || op.boolean(old, false)?);
        let transpose_left = either("trans_x", "transpose_X")?;
        let transpose_right = either("trans_y", "transpose_Y")?;
        let kind = OpKind::Matmul { transpose_left, transpose_right };
        self.push(op, kind, &[op.input("X")?, op.input("Y")?], &[op.output("Out")?]);
        Ok(())
    }

    /// The op `mul` takes the dimensions after the first as one.
    fn flat_product(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let (x, out) = (op.input("X")?, op.output("Out")?);
        let shape = self.shape(x)?;
        let width = self.joined(op, x, &shape[1..])?;
        let flat = format!("{out}@flat");
        self.reshape_to(op, x, &flat, &[shape[0], width])?;
        let kind = OpKind::Matmul { transpose_left: false, transpose_right: false };
        self.push(op, kind, &[&flat, op.input("Y")?], &[out]);
        Ok(())
    }

    /// An element-wise op of two, whose shapes are aligned at the last dimension.
    fn pair(&mut self, op: &PaddleOp<'a>, kind: OpKind) -> Result<(), Failure> {
        op.check_slots(&["X", "Y"])?;
        let (x, y, out) = (op.input("X")?, op.input("Y")?, op.output("Out")?);
        self.follow(op, &[x, y], out)?;
        let mut shape = self.shape(y)?;
        let (long, short) = (signed(self.shape(x)?.len()), signed(shape.len()));
        let axis = op.int("axis", -1)?;
        if axis == -1 || axis == long - short {
            self.push(op, kind, &[x, y], &[out]);
            return Ok(());
        }
        // Dimensions of 1 behind `y` align it with dimensions of `x` from the axis on.
        let missing = usize::try_from(long - short - axis).ok().filter(|_| axis >= 0).ok_or_else(|| {
            let most = long - short;
            op.refuse(format!("found axis {axis}; expected -1 or at most {most}, as {y:?} has {short} dimensions"))
        })?;
        shape.extend(std::iter::repeat_n(Dim::Fixed(1), missing));
        let aligned = format!("{out}@aligned");
        self.reshape_to(op, y, &aligned, &shape)?;
        self.push(op, kind, &[x, &aligned], &[out]);
        Ok(())
    }

    fn scale(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let (factor, bias) = (op.float("scale", 1.0)?, op.float("bias", 0.0)?);
        let is_last = op.boolean("bias_after_scale", true)?;
        let (x, out) = self.one_to_one(op)?;
        let kind = OpKind::Scale { factor };
        if bias == 0.0 {
            self.push(op, kind, &[x], &[out]);
            return Ok(());
        }
        let bias = self.constant(op, format!("{out}@bias"), bias, x)?;
        let middle = format!("{out}@{}", if is_last { "scaled" } else { "shifted" });
        if is_last {
            self.push(op, kind, &[x], &[&middle]);
            self.push(op, OpKind::Add, &[&middle, &bias], &[out]);
        } else {
            self.push(op, OpKind::Add, &[x, &bias], &[&middle]);
            self.push(op, kind, &[&middle], &[out]);
        }
        Ok(())
    }

    fn sum(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        let inputs: Vec<&str> = op.inputs("X").iter().map(String::as_str).collect();
        let out = op.output("Out")?;
        self.follow(op, &inputs, out)?;
        self.push(op, OpKind::Sum, &inputs, &[out]);
        Ok(())
    }

    /// Over all dimensions or over some.
    fn reduce(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        op.check_ints(&[("out_dtype", -1)])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        let dims = if op.has("dim") { op.ints("dim") } else { vec![0] };
        let keep = op.boolean("keep_dim", false)?;
        let is_whole = op.boolean("reduce_all", false)? || dims.is_empty();
        let numbers = if is_whole { Vec::new() } else { axes(op, &dims, self.rank(x)?)? };
        if is_whole && !keep {
            self.scalar(out)?;
        } else {
            self.check_whole(op)?;
        }
        let axes = numbers.into_iter().map(|axis| axis_number(op, axis)).collect::<Result<Vec<_>, _>>()?;
        let is_mean = op.kind() == "reduce_mean";
        let kind = if is_mean { OpKind::Mean { axes, keep } } else { OpKind::ReduceSum { axes, keep } };
        self.push(op, kind, &[x], &[out]);
        Ok(())
    }

    fn rank(&self, name: &str) -> Result<usize, Failure> {
        Ok(self.variables.dense(name)?.1.len())
    }

    fn softmax_with_cross_entropy(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["Logits", "Label"])?;
        op.check_booleans(&[("soft_label", false), ("use_softmax", true)])?;
        let (scores, label) = (op.input("Logits")?, op.input("Label")?);
        let (axis, ignored) = (op.int("axis", -1)?, op.int("ignore_index", -100)?);
        if axis != -1 && axis != 1 {
            return Err(op.refuse(format!("found axis {axis}; expected -1, the last")));
        }
        // A run refuses negative labels, so that none is ignored silently.
        if ignored >= 0 {
            return Err(op.refuse(format!("found ignore_index {ignored}; expected a negative one, which no label is")));
        }
        if self.columns.contains(scores) {
            return self.check_whole(op);
        }
        let (losses, probabilities) = (op.output("Loss")?, op.output("Softmax")?);
        self.columns.insert(losses);
        self.push(op, OpKind::SoftmaxWithCrossEntropy, &[scores, label], &[losses, probabilities]);
        Ok(())
    }

    fn sigmoid_cross_entropy(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X", "Label"])?;
        op.check_booleans(&[("normalize", false)])?;
        let ignored = op.int("ignore_index", -100)?;
        if (0..=1).contains(&ignored) {
            return Err(op.refuse(format!("found ignore_index {ignored}; expected one that no label is")));
        }
        let (scores, label, out) = (op.input("X")?, op.input("Label")?, op.output("Out")?);
        self.follow(op, &[scores, label], out)?;
        self.push(op, OpKind::SigmoidCrossEntropy, &[scores, label], &[out]);
        Ok(())
    }

    fn lookup(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["W", "Ids"])?;
        self.check_whole(op)?;
        let padding = match op.int("padding_idx", -1)? {
            -1 => None,
            id => Some(u64::try_from(id).map_err(|_| {
                op.refuse(format!("found padding_idx {id}; expected -1 for none, or the number of a row"))
            })?),
        };
        op.check_booleans(&[("is_distributed", false)])?;
        self.push(op, OpKind::LookupTable { padding }, &[op.input("W")?, op.input("Ids")?], &[op.output("Out")?]);
        Ok(())
    }

    fn concat(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        self.check_whole(op)?;
        let inputs: Vec<&str> = op.inputs("X").iter().map(String::as_str).collect();
        let first = inputs.first().ok_or_else(|| op.refuse("found no variable in input \"X\"; expected some"))?;
        let axis = axes(op, &[op.int("axis", 0)?], self.rank(first)?)?[0];
        self.push(op, OpKind::Concat { axis: axis_number(op, axis)? }, &inputs, &[op.output("Out")?]);
        Ok(())
    }

    fn split(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        self.check_whole(op)?;
        let x = op.input("X")?;
        let axis = axes(op, &[op.int("axis", 0)?], self.rank(x)?)?[0];
        let outputs: Vec<&str> = op.outputs("Out").iter().map(String::as_str).collect();
        let lengths = outputs.iter().map(|output| match self.shape(output)?.get(axis) {
            Some(Dim::Fixed(length)) => Ok(*length),
            _ => Err(op.refuse(format!("found output {output:?} with no fixed dimension {axis}; expected one"))),
        });
        let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
        self.push(op, OpKind::Split { axis: axis_number(op, axis)?, lengths }, &[x], &outputs);
        Ok(())
    }

    fn fill(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let out = op.output("Out")?;
        let facts = self.variables.facts(out)?;
        self.declared.push(Variable { name: out.to_owned(), facts, purpose: Purpose::Temporary });
        self.push(op, OpKind::Fill { value: constant(op)? }, &[], &[out]);
        Ok(())
    }
}

fn whole_of(program: &Program, whole: Failure) -> Failure {
    Graph::new(program.clone()).err().unwrap_or(whole)
}

/// A number of dimensions.
fn signed(rank: usize) -> i64 {
    i64::try_from(rank).expect("there are few dimensions")
}

/// Dimensions counted from zero, ascending, each once; Paddle counts also from the end.
fn axes(op: &PaddleOp<'_>, dims: &[i64], rank: usize) -> Result<Vec<usize>, Failure> {
    let mut axes = BTreeSet::new();
    for dim in dims {
        let from_start = if *dim < 0 { dim.saturating_add(signed(rank)) } else { *dim };
        let axis = usize::try_from(from_start).ok().filter(|axis| *axis < rank);
        let axis = axis.ok_or_else(|| op.refuse(format!("found dimension {dim}; expected one of {rank}")))?;
        axes.insert(axis);
    }
    Ok(axes.into_iter().collect())
}

fn axis_number(op: &PaddleOp<'_>, axis: usize) -> Result<u32, Failure> {
    u32::try_from(axis).map_err(|_| op.refuse(format!("found dimension {axis}; expected one below 2^32")))
}
