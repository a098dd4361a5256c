//! Kinds as a name and named attributes, which is how both the text form and the binary form write them.

use std::fmt;

use crate::config::Merge;
use crate::dtype::ElementType;

use super::op::{Destination, OpKind, Peer};

/// What an attribute may be.
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

/// Why a kind is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The attribute that is wrong; none when it is the kind, or an attribute that is not there.
    pub(super) attribute: Option<String>,
    /// What was found and what was expected.
    pub(super) reason: String,
}

/// The names of all kinds, in the order of their documentation.
pub(super) const KINDS: [&str; 37] = [
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
    "accuracy",
    "sum_to",
    "repeat",
    "relu_gradient",
    "sigmoid_gradient",
    "tanh_gradient",
    "softmax_with_cross_entropy_gradient",
    "sigmoid_cross_entropy_gradient",
    "mean_gradient",
    "lookup_table_gradient",
    "update",
    "send",
    "recv",
    "enqueue",
    "dequeue",
    "gradient_accumulator",
    "string_accumulator",
    "loop_forever",
];

/// What a kind is told. What has its usual value is left out.
pub(super) fn attributes(kind: &OpKind) -> Vec<(&'static str, Attribute)> {
    use Attribute::{Bool, Real, Text, Whole, Wholes, Word};
    let unless = |usual: bool, name, value| if usual { Vec::new() } else { vec![(name, value)] };
    match kind {
        OpKind::Matmul { transpose_left, transpose_right } => {
            let mut list = unless(!transpose_left, "transpose_left", Bool(true));
            list.extend(unless(!transpose_right, "transpose_right", Bool(true)));
            list
        }
        OpKind::Scale { factor } => vec![("factor", Real(*factor))],
        OpKind::ReduceSum { axis } | OpKind::Concat { axis } | OpKind::Repeat { axis } => {
            vec![("axis", Whole((*axis).into()))]
        }
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
        OpKind::LookupTableGradient { height } => vec![("height", Whole(*height))],
        OpKind::Update { config } => vec![("config", Text(config.clone()))],
        OpKind::Send { channel, to } => {
            let to = match to {
                Destination::Peer(peer) => peer.to_string(),
                Destination::Senders => "senders".to_owned(),
            };
            vec![("channel", Text(channel.clone())), ("to", Word(to))]
        }
        OpKind::Recv { channel } => vec![("channel", Text(channel.clone()))],
        OpKind::Dequeue { min_count } => vec![("min_count", Whole((*min_count).into()))],
        OpKind::GradientAccumulator { count, merge, staleness } => {
            let mut list = vec![("count", Whole((*count).into()))];
            list.extend(unless(*merge == Merge::Mean, "merge", Word("sum".to_owned())));
            list.extend(staleness.map(|bound| ("staleness", Whole(bound.into()))));
            list
        }
        OpKind::StringAccumulator { count } => vec![("count", Whole((*count).into()))],
        OpKind::LoopForever { block } => vec![("block", Whole((*block).into()))],
        _ => Vec::new(),
    }
}

/// The kind of this name, told these attributes.
pub(super) fn kind(name: &str, attributes: Vec<(String, Attribute)>) -> Result<OpKind, Refusal> {
    let mut given = Given::new(attributes)?;
    let kind = arithmetic(name, &mut given)?;
    let kind = match kind {
        Some(kind) => kind,
        None => moving(name, &mut given)?,
    };
    given.finish()?;
    Ok(kind)
}

fn arithmetic(name: &str, given: &mut Given) -> Result<Option<OpKind>, Refusal> {
    Ok(Some(match name {
        "matmul" => OpKind::Matmul {
            transpose_left: given.flag("transpose_left")?,
            transpose_right: given.flag("transpose_right")?,
        },
        "add" => OpKind::Add,
        "mul" => OpKind::Mul,
        "scale" => OpKind::Scale { factor: given.real("factor")? },
        "sum" => OpKind::Sum,
        "reduce_sum" => OpKind::ReduceSum { axis: given.small("axis")? },
        "relu" => OpKind::Relu,
        "sigmoid" => OpKind::Sigmoid,
        "tanh" => OpKind::Tanh,
        "softmax_with_cross_entropy" => OpKind::SoftmaxWithCrossEntropy,
        "sigmoid_cross_entropy" => OpKind::SigmoidCrossEntropy,
        "mean" => OpKind::Mean,
        "lookup_table" => OpKind::LookupTable,
        "concat" => OpKind::Concat { axis: given.small("axis")? },
        "split" => OpKind::Split { axis: given.small("axis")?, lengths: given.wholes("lengths")? },
        "cast" => OpKind::Cast { to: given.word("to", "an element type", element_type)? },
        "fill" => OpKind::Fill { value: given.real("value")? },
        "uniform" => OpKind::Uniform {
            low: given.real("low")?,
            high: given.real("high")?,
            seed: given.whole("seed", None)?,
            first: given.whole("first", Some(0))?,
        },
        "gaussian" => OpKind::Gaussian {
            mean: given.real("mean")?,
            deviation: given.real("deviation")?,
            seed: given.whole("seed", None)?,
            first: given.whole("first", Some(0))?,
        },
        "accuracy" => OpKind::Accuracy,
        "sum_to" => OpKind::SumTo,
        "repeat" => OpKind::Repeat { axis: given.small("axis")? },
        "relu_gradient" => OpKind::ReluGradient,
        "sigmoid_gradient" => OpKind::SigmoidGradient,
        "tanh_gradient" => OpKind::TanhGradient,
        "softmax_with_cross_entropy_gradient" => OpKind::SoftmaxWithCrossEntropyGradient,
        "sigmoid_cross_entropy_gradient" => OpKind::SigmoidCrossEntropyGradient,
        "mean_gradient" => OpKind::MeanGradient,
        "lookup_table_gradient" => OpKind::LookupTableGradient { height: given.whole("height", None)? },
        _ => return Ok(None),
    }))
}

/// Updates and flow.
fn moving(name: &str, given: &mut Given) -> Result<OpKind, Refusal> {
    Ok(match name {
        "update" => OpKind::Update { config: given.text("config")? },
        "send" => OpKind::Send {
            channel: given.text("channel")?,
            to: given.word("to", "trainer:N, server:N or senders", destination)?,
        },
        "recv" => OpKind::Recv { channel: given.text("channel")? },
        "enqueue" => OpKind::Enqueue,
        "dequeue" => OpKind::Dequeue { min_count: given.small("min_count")? },
        "gradient_accumulator" => OpKind::GradientAccumulator {
            count: given.small("count")?,
            merge: if given.has("merge") { given.word("merge", "mean or sum", merge)? } else { Merge::Mean },
            staleness: if given.has("staleness") { Some(given.small("staleness")?) } else { None },
        },
        "string_accumulator" => OpKind::StringAccumulator { count: given.small("count")? },
        "loop_forever" => OpKind::LoopForever { block: given.small("block")? },
        _ => {
            let reason = format!("found op {name:?}; expected one of {}", KINDS.join(", "));
            return Err(Refusal { attribute: None, reason });
        }
    })
}

pub(super) fn element_type(word: &str) -> Option<ElementType> {
    ElementType::ALL.into_iter().find(|element_type| element_type.name() == word)
}

fn destination(word: &str) -> Option<Destination> {
    if word == "senders" {
        return Some(Destination::Senders);
    }
    let (side, number) = word.split_once(':')?;
    // As it is written again: no sign, no leading zero.
    let number = number.parse().ok().filter(|parsed: &u32| parsed.to_string() == number)?;
    match side {
        "trainer" => Some(Destination::Peer(Peer::Trainer(number))),
        "server" => Some(Destination::Peer(Peer::Server(number))),
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

/// More than any kind is told, and few enough to compare all of them with one another.
const ATTRIBUTES_MAX: usize = 16;

/// Attributes that are taken one after another, until none is left.
struct Given(Vec<(String, Attribute)>);

impl Given {
    fn new(attributes: Vec<(String, Attribute)>) -> Result<Self, Refusal> {
        if attributes.len() > ATTRIBUTES_MAX {
            let reason = format!("found {} attributes; expected at most {ATTRIBUTES_MAX}", attributes.len());
            return Err(Refusal { attribute: None, reason });
        }
        for (place, (name, _)) in attributes.iter().enumerate() {
            if attributes[..place].iter().any(|(before, _)| before == name) {
                let reason = format!("found attribute {name:?} twice; expected it once");
                return Err(Refusal { attribute: Some(name.clone()), reason });
            }
        }
        Ok(Self(attributes))
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(given, _)| given == name)
    }

    /// Takes an attribute, turned into what it is for.
    fn take<T>(&mut self, name: &str, expected: &str, convert: impl Fn(&Attribute) -> Option<T>) -> Result<T, Refusal> {
        let Some(place) = self.0.iter().position(|(given, _)| given == name) else {
            let reason = format!("found no attribute {name:?}; expected {expected}");
            return Err(Refusal { attribute: None, reason });
        };
        let (_, attribute) = self.0.remove(place);
        convert(&attribute).ok_or_else(|| {
            let reason = format!("attribute {name:?} is {attribute}; expected {expected}");
            Refusal { attribute: Some(name.to_owned()), reason }
        })
    }

    fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        if !self.has(name) {
            return Ok(false);
        }
        self.take(name, "true or false", |attribute| match attribute {
            Attribute::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A whole number is a real one as well, as people write it.
    fn real(&mut self, name: &str) -> Result<f64, Refusal> {
        self.take(name, "a number", |attribute| match attribute {
            Attribute::Real(value) => Some(*value),
            Attribute::Whole(value) => Some(*value as f64),
            _ => None,
        })
    }

    fn whole(&mut self, name: &str, usual: Option<u64>) -> Result<u64, Refusal> {
        if let (Some(usual), false) = (usual, self.has(name)) {
            return Ok(usual);
        }
        self.take(name, "a whole number below 2^64", |attribute| match attribute {
            Attribute::Whole(value) => Some(*value),
            _ => None,
        })
    }

    fn small(&mut self, name: &str) -> Result<u32, Refusal> {
        self.take(name, "a whole number below 2^32", |attribute| match attribute {
            Attribute::Whole(value) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    fn wholes(&mut self, name: &str) -> Result<Vec<u64>, Refusal> {
        self.take(name, "whole numbers in brackets", |attribute| match attribute {
            Attribute::Wholes(values) => Some(values.clone()),
            _ => None,
        })
    }

    fn text(&mut self, name: &str) -> Result<String, Refusal> {
        self.take(name, "a text in quotes", |attribute| match attribute {
            Attribute::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    fn word<T>(&mut self, name: &str, expected: &str, convert: impl Fn(&str) -> Option<T>) -> Result<T, Refusal> {
        self.take(name, expected, |attribute| match attribute {
            Attribute::Word(word) => convert(word),
            _ => None,
        })
    }

    fn finish(self) -> Result<(), Refusal> {
        match self.0.into_iter().next() {
            Some((name, _)) => {
                let reason = format!("found attribute {name:?}; expected none of this name");
                Err(Refusal { attribute: Some(name), reason })
            }
            None => Ok(()),
        }
    }
}
