//! Random data for a program.

use pserver_core::dtype::ElementType;
use pserver_core::prng::Prng;
use pserver_program::{Dim, Elements, Graph, OpKind, Purpose, Tensor, Variable, VariableFacts, VariableIndex};

/// Data of one step, by variable.
pub(super) type StepData = Vec<(String, Tensor)>;

/// Data of one step for every data variable: ids and labels below their bounds, other numbers in [0, 1).
pub(super) fn step_data(graph: &Graph, batch: u64, prng: &mut Prng) -> StepData {
    let known = graph.variables().iter().filter(|known| known.purpose == Purpose::Data);
    let tensor = |known: &Variable| {
        let VariableFacts::Dense { element_type, shape } = &known.facts else { return None };
        let lengths: Vec<u64> = shape.iter().map(|dim| length(dim, batch)).collect();
        let index = graph.find(&known.name)?;
        Some((known.name.clone(), random(*element_type, lengths, bound(graph, index), prng)))
    };
    known.filter_map(tensor).collect()
}

const fn length(dim: &Dim, batch: u64) -> u64 {
    match dim {
        Dim::Fixed(length) => *length,
        Dim::Batch => batch,
    }
}

fn random(element_type: ElementType, shape: Vec<u64>, bound: u64, prng: &mut Prng) -> Tensor {
    let count = shape.iter().product::<u64>();
    match element_type {
        ElementType::Int64 => {
            let numbers = (0..count).map(|_| i64::try_from(prng.below(bound)).unwrap_or(0)).collect();
            Tensor::new(shape, Elements::Int64(numbers))
        }
        ElementType::Float32 => {
            let numbers = (0..count).map(|_| prng.below(1 << 16) as f32 / 65_536.0).collect();
            Tensor::new(shape, Elements::Float32(numbers))
        }
        other => Tensor::zeros(other, &shape),
    }
}

/// The end of the range of an integer variable: a table's rows, or a label's classes; zeros otherwise.
fn bound(graph: &Graph, variable: VariableIndex) -> u64 {
    let readers = graph.scopes()[0].nodes.iter().filter(|node| node.inputs.get(1) == Some(&variable));
    let bounds = readers.filter_map(|node| {
        let VariableFacts::Dense { shape, .. } = &graph.variable(node.inputs[0]).facts else { return None };
        let dim = match node.kind {
            OpKind::LookupTable { .. } | OpKind::Gather => shape.first(),
            OpKind::SoftmaxWithCrossEntropy | OpKind::Accuracy => shape.last(),
            _ => None,
        };
        dim.map(|dim| length(dim, 1))
    });
    bounds.min().unwrap_or(1)
}
