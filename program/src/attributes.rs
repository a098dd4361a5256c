//! Kinds of ops as a name and named attributes, for the text form and the binary form.

use std::fmt;

use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;

use super::op::{Destination, OpKind, ProgramPeer};
use super::window::WindowSteps;

/// A value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Attribute {
    Bool(bool),
    Whole(u64),
    Real(f64),
    Text(String),
    Wholes(Vec<u64>),
    /// One of a few words, such as a type's name.
    Word(String),
}

impl fmt::Display for Attribute {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(formatter, "{value}"),
            Self::Whole(value) => write!(formatter, "{value}"),
            Self::Real(value) => write!(formatter, "{value:?}"),
            Self::Text(text) => write!(formatter, "the text {text:?}"),
            Self::Wholes(values) => write!(formatter, "{values:?}"),
            Self::Word(word) => formatter.write_str(word),
        }
    }
}

/// Fault of a kind or of its attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AttributeError {
    /// The wrong attribute; none when the kind is wrong or an attribute is missing.
    pub(super) attribute: Option<String>,
    /// The found and the expected value.
    pub(super) reason: String,
}

/// The names of all kinds, in the order of their documentation.
pub(super) const KINDS: &[&str] = &[
    "matmul",
    "add",
    "mul",
    "scale",
    "sum",
    "reduce_sum",
    "relu",
    "sigmoid",
    "tanh",
    "softmax_with_cross_entropy",
    "sigmoid_cross_entropy",
    "mean",
    "lookup_table",
    "concat",
    "split",
    "cast",
    "fill",
    "uniform",
    "gaussian",
    "given",
    "accuracy",
    "sub",
    "div",
    "max",
    "min",
    "pow",
    "greater",
    "sqrt",
    "exp",
    "log",
    "abs",
    "sign",
    "reshape",
    "transpose",
    "softmax",
    "log_softmax",
    "pow_gradient",
    "sum_to",
    "repeat",
    "relu_gradient",
    "sigmoid_gradient",
    "tanh_gradient",
    "softmax_with_cross_entropy_gradient",
    "sigmoid_cross_entropy_gradient",
    "mean_gradient",
    "lookup_table_gradient",
    "conv2d",
    "max_pool2d",
    "avg_pool2d",
    "gelu",
    "layer_norm",
    "batch_norm",
    "slice",
    "gather",
    "dropout",
    "slice_gradient",
    "gather_gradient",
    "gelu_gradient",
    "layer_norm_gradient",
    "batch_norm_gradient",
    "conv2d_input_gradient",
    "conv2d_filter_gradient",
    "max_pool2d_gradient",
    "avg_pool2d_gradient",
    "update",
    "send",
    "recv",
    "pull_rows",
    "enqueue",
    "dequeue",
    "gradient_accumulator",
    "string_accumulator",
    "loop_forever",
];

/// The attributes of a kind. Attributes at their default are omitted.
pub(super) fn attributes(kind: &OpKind) -> Vec<(&'static str, Attribute)> {
    use Attribute::{Bool, Real, Text, Whole, Wholes, Word};
    match kind {
        OpKind::Matmul { transpose_left, transpose_right } => {
            let mut list = unless(!transpose_left, "transpose_left", Bool(true));
            list.extend(unless(!transpose_right, "transpose_right", Bool(true)));
            list
        }
        OpKind::PowGradient { exponent } => unless(!exponent, "exponent", Bool(true)),
        OpKind::Scale { factor } => vec![("factor", Real(*factor))],
        OpKind::ReduceSum { axes, keep } | OpKind::Mean { axes, keep } => {
            let mut list = unless(axes.is_empty(), "axes", dimensions(axes));
            list.extend(unless(!keep, "keep", Bool(true)));
            list
        }
        OpKind::Repeat { axes } | OpKind::MeanGradient { axes } => unless(axes.is_empty(), "axes", dimensions(axes)),
        OpKind::Transpose { axes } => vec![("axes", dimensions(axes))],
        OpKind::Reshape { shape } => vec![("shape", Wholes(shape.clone()))],
        OpKind::Concat { axis } => vec![("axis", Whole((*axis).into()))],
        OpKind::Split { axis, lengths } => {
            vec![("axis", Whole((*axis).into())), ("lengths", Wholes(lengths.clone()))]
        }
        OpKind::Cast { to } => vec![("to", Word(to.name().to_owned()))],
        OpKind::Fill { value } => vec![("value", Real(*value))],
        OpKind::Uniform { low, high, seed, first } => {
            let mut list = vec![("low", Real(*low)), ("high", Real(*high)), ("seed", Whole(*seed))];
            list.extend(unless(*first == 0, "first", Whole(*first)));
            list
        }
        OpKind::Gaussian { mean, deviation, seed, first } => {
            let mut list = vec![("mean", Real(*mean)), ("deviation", Real(*deviation)), ("seed", Whole(*seed))];
            list.extend(unless(*first == 0, "first", Whole(*first)));
            list
        }
        OpKind::Given { name, first } => {
            [vec![("name", Text(name.clone()))], unless(*first == 0, "first", Whole(*first))].concat()
        }
        OpKind::LookupTable { padding } => padding.map(|id| ("padding", Whole(id))).into_iter().collect(),
        OpKind::LookupTableGradient { height, padding } => {
            let mut list = vec![("height", Whole(*height))];
            list.extend(padding.map(|id| ("padding", Whole(id))));
            list
        }
        OpKind::Update { config } => vec![("config", Text(config.clone()))],
        OpKind::Send { channel, to } => {
            let to = match to {
                Destination::Peer(peer) => peer.to_string(),
                Destination::Senders => "senders".to_owned(),
            };
            vec![("channel", Text(channel.clone())), ("to", Word(to))]
        }
        OpKind::Recv { channel } => vec![("channel", Text(channel.clone()))],
        OpKind::PullRows { channel, to, first } => {
            let list = vec![("channel", Text(channel.clone())), ("to", Word(to.to_string()))];
            [list, unless(*first == 0, "first", Whole(*first))].concat()
        }
        OpKind::Dequeue { min_count } => vec![("min_count", Whole((*min_count).into()))],
        OpKind::GradientAccumulator { count, merge, staleness, late } => {
            let mut list = vec![("count", Whole((*count).into()))];
            list.extend(unless(*merge == Merge::Mean, "merge", Word("sum".to_owned())));
            list.extend(staleness.map(|bound| ("staleness", Whole(bound.into()))));
            list.extend(unless(*late == LateGradients::Drop, "late", Word("next".to_owned())));
            list
        }
        OpKind::StringAccumulator { count } => vec![("count", Whole((*count).into()))],
        OpKind::LoopForever { block } => vec![("block", Whole((*block).into()))],
        _ => network_attributes(kind),
    }
}

/// The attributes of layers of networks, and of their gradients.
fn network_attributes(kind: &OpKind) -> Vec<(&'static str, Attribute)> {
    use Attribute::{Bool, Real, Whole};
    match kind {
        OpKind::Slice { axis, start, end } | OpKind::SliceGradient { axis, start, end } => {
            vec![("axis", Whole((*axis).into())), ("start", Whole(*start)), ("end", Whole(*end))]
        }
        OpKind::Dropout { rate, seed } => vec![("rate", Real(*rate)), ("seed", Whole(*seed))],
        OpKind::Gelu { approximate } | OpKind::GeluGradient { approximate } => {
            unless(!approximate, "approximate", Bool(true))
        }
        OpKind::LayerNorm { epsilon }
        | OpKind::LayerNormGradient { epsilon }
        | OpKind::BatchNorm { epsilon }
        | OpKind::BatchNormGradient { epsilon } => vec![("epsilon", Real(*epsilon))],
        OpKind::Conv2d { steps } | OpKind::Conv2dInputGradient { steps } | OpKind::Conv2dFilterGradient { steps } => {
            steps_attributes(*steps)
        }
        OpKind::MaxPool2d { size, steps }
        | OpKind::AvgPool2d { size, steps }
        | OpKind::MaxPool2dGradient { size, steps }
        | OpKind::AvgPool2dGradient { size, steps } => {
            let mut list = vec![("size", pair(*size))];
            list.extend(steps_attributes(*steps));
            list
        }
        _ => Vec::new(),
    }
}

/// An attribute that is written unless it has its usual value.
fn unless(is_usual: bool, name: &'static str, value: Attribute) -> Vec<(&'static str, Attribute)> {
    if is_usual { Vec::new() } else { vec![(name, value)] }
}

fn steps_attributes(steps: WindowSteps) -> Vec<(&'static str, Attribute)> {
    let usual = WindowSteps::default();
    let list = [("stride", steps.stride, usual.stride), ("padding", steps.padding, usual.padding)];
    list.into_iter().filter(|(_, found, usual)| found != usual).map(|(name, found, _)| (name, pair(found))).collect()
}

fn pair(numbers: [u32; 2]) -> Attribute {
    Attribute::Wholes(numbers.map(u64::from).to_vec())
}

fn dimensions(axes: &[u32]) -> Attribute {
    Attribute::Wholes(axes.iter().copied().map(u64::from).collect())
}

/// The kind with this name and these attributes.
pub(super) fn kind(name: &str, attributes: Vec<(String, Attribute)>) -> Result<OpKind, AttributeError> {
    let mut reader = AttributeReader::new(attributes)?;
    let kind = arithmetic(name, &mut reader)?;
    let kind = match kind {
        Some(kind) => kind,
        None => match network(name, &mut reader)? {
            Some(kind) => kind,
            None => moving(name, &mut reader)?,
        },
    };
    reader.finish()?;
    Ok(kind)
}

fn arithmetic(name: &str, reader: &mut AttributeReader) -> Result<Option<OpKind>, AttributeError> {
    Ok(Some(match name {
        "matmul" => OpKind::Matmul {
            transpose_left: reader.flag("transpose_left")?,
            transpose_right: reader.flag("transpose_right")?,
        },
        "add" => OpKind::Add,
        "mul" => OpKind::Mul,
        "scale" => OpKind::Scale { factor: reader.real("factor")? },
        "sum" => OpKind::Sum,
        "reduce_sum" => OpKind::ReduceSum { axes: reader.axes()?, keep: reader.flag("keep")? },
        "relu" => OpKind::Relu,
        "sigmoid" => OpKind::Sigmoid,
        "tanh" => OpKind::Tanh,
        "softmax_with_cross_entropy" => OpKind::SoftmaxWithCrossEntropy,
        "sigmoid_cross_entropy" => OpKind::SigmoidCrossEntropy,
        "mean" => OpKind::Mean { axes: reader.axes()?, keep: reader.flag("keep")? },
        "lookup_table" => OpKind::LookupTable { padding: reader.padding()? },
        "concat" => OpKind::Concat { axis: reader.small("axis")? },
        "split" => OpKind::Split { axis: reader.small("axis")?, lengths: reader.wholes("lengths")? },
        "cast" => OpKind::Cast { to: reader.word("to", "an element type", element_type)? },
        "fill" => OpKind::Fill { value: reader.real("value")? },
        "uniform" => OpKind::Uniform {
            low: reader.real("low")?,
            high: reader.real("high")?,
            seed: reader.whole("seed", None)?,
            first: reader.whole("first", Some(0))?,
        },
        "gaussian" => OpKind::Gaussian {
            mean: reader.real("mean")?,
            deviation: reader.real("deviation")?,
            seed: reader.whole("seed", None)?,
            first: reader.whole("first", Some(0))?,
        },
        "given" => OpKind::Given { name: reader.text("name")?, first: reader.whole("first", Some(0))? },
        "accuracy" => OpKind::Accuracy,
        "sum_to" => OpKind::SumTo,
        "repeat" => OpKind::Repeat { axes: reader.axes()? },
        "relu_gradient" => OpKind::ReluGradient,
        "sigmoid_gradient" => OpKind::SigmoidGradient,
        "tanh_gradient" => OpKind::TanhGradient,
        "softmax_with_cross_entropy_gradient" => OpKind::SoftmaxWithCrossEntropyGradient,
        "sigmoid_cross_entropy_gradient" => OpKind::SigmoidCrossEntropyGradient,
        "mean_gradient" => OpKind::MeanGradient { axes: reader.axes()? },
        "lookup_table_gradient" => {
            OpKind::LookupTableGradient { height: reader.whole("height", None)?, padding: reader.padding()? }
        }
        _ => return math(name, reader),
    }))
}

/// Element-wise functions of one and two operands.
fn math(name: &str, reader: &mut AttributeReader) -> Result<Option<OpKind>, AttributeError> {
    Ok(Some(match name {
        "sub" => OpKind::Sub,
        "div" => OpKind::Div,
        "max" => OpKind::Max,
        "min" => OpKind::Min,
        "pow" => OpKind::Pow,
        "greater" => OpKind::Greater,
        "sqrt" => OpKind::Sqrt,
        "exp" => OpKind::Exp,
        "log" => OpKind::Log,
        "abs" => OpKind::Abs,
        "sign" => OpKind::Sign,
        "reshape" => OpKind::Reshape { shape: reader.wholes("shape")? },
        "transpose" => OpKind::Transpose { axes: reader.smalls("axes")? },
        "softmax" => OpKind::Softmax,
        "log_softmax" => OpKind::LogSoftmax,
        "pow_gradient" => OpKind::PowGradient { exponent: reader.flag("exponent")? },
        _ => return Ok(None),
    }))
}

/// Layers of networks, and their gradients.
fn network(name: &str, reader: &mut AttributeReader) -> Result<Option<OpKind>, AttributeError> {
    Ok(Some(match name {
        "conv2d" => OpKind::Conv2d { steps: reader.steps()? },
        "max_pool2d" => OpKind::MaxPool2d { size: reader.pair("size", None)?, steps: reader.steps()? },
        "avg_pool2d" => OpKind::AvgPool2d { size: reader.pair("size", None)?, steps: reader.steps()? },
        "gelu" => OpKind::Gelu { approximate: reader.flag("approximate")? },
        "layer_norm" => OpKind::LayerNorm { epsilon: reader.real("epsilon")? },
        "batch_norm" => OpKind::BatchNorm { epsilon: reader.real("epsilon")? },
        "slice" => OpKind::Slice {
            axis: reader.small("axis")?,
            start: reader.whole("start", None)?,
            end: reader.whole("end", None)?,
        },
        "gather" => OpKind::Gather,
        "dropout" => OpKind::Dropout { rate: reader.real("rate")?, seed: reader.whole("seed", None)? },
        "slice_gradient" => OpKind::SliceGradient {
            axis: reader.small("axis")?,
            start: reader.whole("start", None)?,
            end: reader.whole("end", None)?,
        },
        "gather_gradient" => OpKind::GatherGradient,
        "gelu_gradient" => OpKind::GeluGradient { approximate: reader.flag("approximate")? },
        "layer_norm_gradient" => OpKind::LayerNormGradient { epsilon: reader.real("epsilon")? },
        "batch_norm_gradient" => OpKind::BatchNormGradient { epsilon: reader.real("epsilon")? },
        "conv2d_input_gradient" => OpKind::Conv2dInputGradient { steps: reader.steps()? },
        "conv2d_filter_gradient" => OpKind::Conv2dFilterGradient { steps: reader.steps()? },
        "max_pool2d_gradient" => OpKind::MaxPool2dGradient { size: reader.pair("size", None)?, steps: reader.steps()? },
        "avg_pool2d_gradient" => OpKind::AvgPool2dGradient { size: reader.pair("size", None)?, steps: reader.steps()? },
        _ => return Ok(None),
    }))
}

/// Updates and flow.
fn moving(name: &str, reader: &mut AttributeReader) -> Result<OpKind, AttributeError> {
    Ok(match name {
        "update" => OpKind::Update { config: reader.text("config")? },
        "send" => OpKind::Send {
            channel: reader.text("channel")?,
            to: reader.word("to", "trainer:N, server:N or senders", destination)?,
        },
        "recv" => OpKind::Recv { channel: reader.text("channel")? },
        "pull_rows" => OpKind::PullRows {
            channel: reader.text("channel")?,
            to: reader.word("to", "trainer:N or server:N", peer)?,
            first: reader.whole("first", Some(0))?,
        },
        "enqueue" => OpKind::Enqueue,
        "dequeue" => OpKind::Dequeue { min_count: reader.small("min_count")? },
        "gradient_accumulator" => OpKind::GradientAccumulator {
            count: reader.small("count")?,
            merge: if reader.has("merge") { reader.word("merge", "mean or sum", merge)? } else { Merge::Mean },
            staleness: if reader.has("staleness") { Some(reader.small("staleness")?) } else { None },
            late: if reader.has("late") { reader.word("late", "drop or next", late)? } else { LateGradients::Drop },
        },
        "string_accumulator" => OpKind::StringAccumulator { count: reader.small("count")? },
        "loop_forever" => OpKind::LoopForever { block: reader.small("block")? },
        _ => {
            let reason = format!("found op {name:?}; expected one of {}", KINDS.join(", "));
            return Err(AttributeError { attribute: None, reason });
        }
    })
}

pub(super) fn element_type(word: &str) -> Option<ElementType> {
    ElementType::ALL.into_iter().find(|element_type| element_type.name() == word)
}

fn destination(word: &str) -> Option<Destination> {
    if word == "senders" { Some(Destination::Senders) } else { peer(word).map(Destination::Peer) }
}

fn peer(word: &str) -> Option<ProgramPeer> {
    let (side, number) = word.split_once(':')?;
    // The canonical form: no sign, no leading zero.
    let number = number.parse().ok().filter(|parsed: &u32| parsed.to_string() == number)?;
    match side {
        "trainer" => Some(ProgramPeer::Trainer(number)),
        "server" => Some(ProgramPeer::Server(number)),
        _ => None,
    }
}

fn late(word: &str) -> Option<LateGradients> {
    match word {
        "drop" => Some(LateGradients::Drop),
        "next" => Some(LateGradients::NextRound),
        _ => None,
    }
}

fn merge(word: &str) -> Option<Merge> {
    match word {
        "mean" => Some(Merge::Mean),
        "sum" => Some(Merge::Sum),
        _ => None,
    }
}

/// Bound of the attributes of a kind: above the number that any has, and few enough to compare each with all others.
const ATTRIBUTES_MAX: usize = 16;

/// The attributes that are not converted yet.
struct AttributeReader(Vec<(String, Attribute)>);

impl AttributeReader {
    fn new(attributes: Vec<(String, Attribute)>) -> Result<Self, AttributeError> {
        if attributes.len() > ATTRIBUTES_MAX {
            let reason = format!("found {} attributes; expected at most {ATTRIBUTES_MAX}", attributes.len());
            return Err(AttributeError { attribute: None, reason });
        }
        for (place, (name, _)) in attributes.iter().enumerate() {
            if attributes[..place].iter().any(|(before, _)| before == name) {
                let reason = format!("found attribute {name:?} twice; expected it once");
                return Err(AttributeError { attribute: Some(name.clone()), reason });
            }
        }
        Ok(Self(attributes))
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(reader, _)| reader == name)
    }

    /// Takes an attribute and converts it.
    fn take<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl Fn(&Attribute) -> Option<T>,
    ) -> Result<T, AttributeError> {
        let Some(place) = self.0.iter().position(|(reader, _)| reader == name) else {
            let reason = format!("found no attribute {name:?}; expected {expected}");
            return Err(AttributeError { attribute: None, reason });
        };
        let (_, attribute) = self.0.remove(place);
        convert(&attribute).ok_or_else(|| {
            let reason = format!("attribute {name:?} is {attribute}; expected {expected}");
            AttributeError { attribute: Some(name.to_owned()), reason }
        })
    }

    fn flag(&mut self, name: &str) -> Result<bool, AttributeError> {
        if !self.has(name) {
            return Ok(false);
        }
        self.take(name, "true or false", |attribute| match attribute {
            Attribute::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A real number, which a text may write as a whole one.
    fn real(&mut self, name: &str) -> Result<f64, AttributeError> {
        self.take(name, "a number", |attribute| match attribute {
            Attribute::Real(value) => Some(*value),
            Attribute::Whole(value) => Some(*value as f64),
            _ => None,
        })
    }

    fn whole(&mut self, name: &str, usual: Option<u64>) -> Result<u64, AttributeError> {
        if let (Some(usual), false) = (usual, self.has(name)) {
            return Ok(usual);
        }
        self.take(name, "a whole number below 2^64", |attribute| match attribute {
            Attribute::Whole(value) => Some(*value),
            _ => None,
        })
    }

    fn small(&mut self, name: &str) -> Result<u32, AttributeError> {
        self.take(name, "a whole number below 2^32", |attribute| match attribute {
            Attribute::Whole(value) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    fn wholes(&mut self, name: &str) -> Result<Vec<u64>, AttributeError> {
        self.take(name, "whole numbers in brackets", |attribute| match attribute {
            Attribute::Wholes(values) => Some(values.clone()),
            _ => None,
        })
    }

    fn pair(&mut self, name: &str, usual: Option<[u32; 2]>) -> Result<[u32; 2], AttributeError> {
        if let (Some(usual), false) = (usual, self.has(name)) {
            return Ok(usual);
        }
        self.take(name, "two whole numbers below 2^32 in brackets", |attribute| match attribute {
            Attribute::Wholes(values) => match values[..] {
                [first, second] => Some([u32::try_from(first).ok()?, u32::try_from(second).ok()?]),
                _ => None,
            },
            _ => None,
        })
    }

    fn padding(&mut self) -> Result<Option<u64>, AttributeError> {
        if self.has("padding") { self.whole("padding", None).map(Some) } else { Ok(None) }
    }

    fn steps(&mut self) -> Result<WindowSteps, AttributeError> {
        let usual = WindowSteps::default();
        let stride = self.pair("stride", Some(usual.stride))?;
        Ok(WindowSteps { stride, padding: self.pair("padding", Some(usual.padding))? })
    }

    fn smalls(&mut self, name: &str) -> Result<Vec<u32>, AttributeError> {
        self.take(name, "whole numbers below 2^32 in brackets", |attribute| match attribute {
            Attribute::Wholes(values) => values.iter().map(|value| u32::try_from(*value).ok()).collect(),
            _ => None,
        })
    }

    /// Dimensions: one as `axis`, several as `axes`, none for all.
    fn axes(&mut self) -> Result<Vec<u32>, AttributeError> {
        match (self.has("axis"), self.has("axes")) {
            (true, _) => Ok(vec![self.small("axis")?]),
            (false, true) => self.smalls("axes"),
            (false, false) => Ok(Vec::new()),
        }
    }

    fn text(&mut self, name: &str) -> Result<String, AttributeError> {
        self.take(name, "a text in quotes", |attribute| match attribute {
            Attribute::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    fn word<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl Fn(&str) -> Option<T>,
    ) -> Result<T, AttributeError> {
        self.take(name, expected, |attribute| match attribute {
            Attribute::Word(word) => convert(word),
            _ => None,
        })
    }

    fn finish(self) -> Result<(), AttributeError> {
        match self.0.into_iter().next() {
            Some((name, _)) => {
                let reason = format!("found attribute {name:?}; expected none of this name");
                Err(AttributeError { attribute: Some(name), reason })
            }
            None => Ok(()),
        }
    }
}
