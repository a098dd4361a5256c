//! Data of ops that predict otherwise than they train (`dropout`, `batch_norm`), which no file has: the number of the
//! step, and that of its first row.

use pserver_program::{Elements, Graph, OpKind, Purpose, Tensor, VariableFacts};

/// The step that is fed for predictions.
const NO_STEP: i64 = -1;

/// The data variables that ops of a program read as numbers of a step and of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepNumbers {
    steps: Vec<String>,
    firsts: Vec<String>,
}

impl StepNumbers {
    pub(crate) fn of(graph: &Graph) -> Self {
        let mut numbers = Self::default();
        for op in graph.program().blocks.iter().flat_map(|block| &block.ops) {
            let places = match (&op.kind, op.inputs.as_slice()) {
                (OpKind::Dropout { .. }, [_, places @ ..])
                | (OpKind::BatchNorm { .. }, [_, _, _, _, _, places @ ..]) => places,
                _ => continue,
            };
            for (name, known) in places.iter().zip([&mut numbers.steps, &mut numbers.firsts]) {
                if is_scalar_data(graph, name) && !known.contains(name) {
                    known.push(name.clone());
                }
            }
        }
        numbers
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.steps.iter().chain(&self.firsts).any(|known| known == name)
    }

    /// The variables' values in a step whose first row has the number `first` in the batch of all trainers.
    pub(crate) fn values(&self, step: u64, first: usize) -> impl Iterator<Item = (&str, Tensor)> {
        let step = i64::try_from(step).expect("steps are counted one by one");
        self.with(step, i64::try_from(first).expect("rows are in memory"))
    }

    /// The variables' values for predictions.
    pub(crate) fn values_of_predictions(&self) -> impl Iterator<Item = (&str, Tensor)> {
        self.with(NO_STEP, 0)
    }

    fn with(&self, step: i64, first: i64) -> impl Iterator<Item = (&str, Tensor)> {
        let value = move |number| Tensor::new([], Elements::Int64(vec![number]));
        let steps = self.steps.iter().map(move |name| (name.as_str(), value(step)));
        steps.chain(self.firsts.iter().map(move |name| (name.as_str(), value(first))))
    }
}

/// Whether a variable is a single number that is fed. The op takes int64 alone.
fn is_scalar_data(graph: &Graph, name: &str) -> bool {
    let found = graph.variables().iter().find(|variable| variable.name == name);
    found.is_some_and(|variable| {
        let is_scalar = matches!(&variable.facts, VariableFacts::Dense { shape, .. } if shape.is_empty());
        variable.purpose == Purpose::Data && is_scalar
    })
}
