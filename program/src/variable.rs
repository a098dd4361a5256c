//! Variables and their facts: type and shape, known before a program runs.

use std::fmt;

use pserver_core::dtype::ElementType;

/// One dimension of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dim {
    /// Known.
    Fixed(u64),
    /// The number of examples in a run: the same for all values of a run, and unknown before it.
    Batch,
}

impl fmt::Display for Dim {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => write!(formatter, "{length}"),
            Self::Batch => formatter.write_str("batch"),
        }
    }
}

/// The facts of a variable: its type and shape before a program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VariableFacts {
    /// A dense tensor, rows first. No dimension at all means a scalar.
    Dense {
        /// The type of its elements.
        element_type: ElementType,
        /// Its dimensions, the slowest first.
        shape: Vec<Dim>,
    },
    /// Some rows of a matrix of `height` rows; a row may be repeated, and absent rows are zero.
    SelectedRows {
        /// The type of its elements.
        element_type: ElementType,
        /// Rows of the whole matrix.
        height: u64,
        /// Elements of a row.
        width: u64,
    },
    /// A queue: [`Enqueue`](super::OpKind::Enqueue) waits for space, [`Dequeue`](super::OpKind::Dequeue) for items.
    Queue {
        /// The facts of its items: dense, selected rows or strings.
        of: Box<VariableFacts>,
        /// The most items it holds, above zero.
        capacity: u64,
    },
    /// A list of strings: addresses of senders.
    Strings,
}

impl VariableFacts {
    /// Facts of a dense tensor.
    #[must_use]
    pub fn dense(element_type: ElementType, shape: impl Into<Vec<Dim>>) -> Self {
        Self::Dense { element_type, shape: shape.into() }
    }

    /// Facts of a dense tensor whose dimensions are all known.
    #[must_use]
    pub fn fixed(element_type: ElementType, shape: &[u64]) -> Self {
        Self::Dense { element_type, shape: shape.iter().copied().map(Dim::Fixed).collect() }
    }

    /// The type of the elements of a tensor or of rows; none of queues and strings.
    #[must_use]
    pub fn element_type(&self) -> Option<ElementType> {
        match self {
            Self::Dense { element_type, .. } | Self::SelectedRows { element_type, .. } => Some(*element_type),
            Self::Queue { .. } | Self::Strings => None,
        }
    }

    /// Type and dimensions of a dense tensor whose dimensions are all known; none of anything else.
    #[must_use]
    pub fn fixed_dense(&self) -> Option<(ElementType, Vec<u64>)> {
        let Self::Dense { element_type, shape } = self else { return None };
        let lengths = shape.iter().map(|dim| if let Dim::Fixed(length) = dim { Some(*length) } else { None });
        lengths.collect::<Option<Vec<u64>>>().map(|shape| (*element_type, shape))
    }
}

/// As the text form writes them: `float32[batch, 64]`, `rows(float32, 12500, 64)`, `queue(float32[10], 4)`, `strings`.
impl fmt::Display for VariableFacts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense { element_type, shape } => {
                let shape: Vec<String> = shape.iter().map(Dim::to_string).collect();
                write!(formatter, "{element_type}[{}]", shape.join(", "))
            }
            Self::SelectedRows { element_type, height, width } => {
                write!(formatter, "rows({element_type}, {height}, {width})")
            }
            Self::Queue { of, capacity } => write!(formatter, "queue({of}, {capacity})"),
            Self::Strings => formatter.write_str("strings"),
        }
    }
}

/// The purpose of a variable, which decides its lifetime and its writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Fed from outside for every run; no op writes it.
    Data,
    /// Trained, and kept from run to run.
    Parameter,
    /// Kept from run to run beside the parameters: an optimizer's state, its count of updates, a queue.
    State,
    /// Written by one op in every run of its block, then read; gone after the run.
    Temporary,
}

impl Purpose {
    /// Every purpose.
    pub const ALL: [Self; 4] = [Self::Data, Self::Parameter, Self::State, Self::Temporary];

    /// Its name in the text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Parameter => "parameter",
            Self::State => "state",
            Self::Temporary => "temporary",
        }
    }

    /// Whether a value stays from one run to the next.
    #[must_use]
    pub const fn is_persistable(self) -> bool {
        matches!(self, Self::Parameter | Self::State)
    }
}

/// A declared variable. A temporary whose facts follow from the op that writes it needs no declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name, which no other variable of the program has.
    pub name: String,
    /// Its facts.
    pub facts: VariableFacts,
    /// Its purpose.
    pub purpose: Purpose,
}
