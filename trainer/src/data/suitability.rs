//! Data that a program cannot be trained on: ids beyond a table, labels beyond the classes, numbers that are not
//! finite.
//!
//! An op that reads such a row refuses it in its step, perhaps after hours; here the row is found before the first one.
//! Numbers that ops make of the data, such as a sum of two ids, are not followed.

use pserver_program::{Dim, Elements, Graph, OpKind, VariableFacts};

use super::DataSet;

/// The numbers that an op takes from a variable.
struct AllowedIndices {
    /// The first number beyond them.
    end: u64,
    padding: Option<u64>,
    /// The things that they number, such as `rows of the table "t"`.
    things: String,
}

/// Names the first value that a training cannot use: its variable, its row and what was expected.
pub(super) fn check(data: &DataSet, graph: &Graph) -> Result<(), String> {
    for (name, tensor) in &data.columns {
        let width = (tensor.elements().len() / data.rows.max(1)).max(1);
        let refuse = |place: usize, found: &dyn std::fmt::Display, expected: &str| {
            let row = place / width;
            Err(format!("data {name:?}: found {found} in row {row}, counted from 0; expected {expected}"))
        };
        let elements = tensor.elements();
        if let Some((place, found)) = first_infinite(elements) {
            return refuse(place, &found, "finite numbers; the row can be left out, or another number written for it");
        }
        let Elements::Int64(values) = elements else { continue };
        for allowed in uses(graph, name) {
            let is_allowed = |value: &i64| {
                u64::try_from(*value).is_ok_and(|value| value < allowed.end || allowed.padding == Some(value))
            };
            if let Some(place) = values.iter().position(|value| !is_allowed(value)) {
                let (last, things) = (allowed.end.saturating_sub(1), &allowed.things);
                return refuse(place, &values[place], &format!("0 to {last}, which number the {things}"));
            }
        }
    }
    Ok(())
}

fn first_infinite(elements: &Elements) -> Option<(usize, f64)> {
    let numbers: Box<dyn Iterator<Item = f64> + '_> = match elements {
        Elements::Float16(values) => Box::new(values.iter().map(|value| f64::from(*value))),
        Elements::Bfloat16(values) => Box::new(values.iter().map(|value| f64::from(*value))),
        Elements::Float32(values) => Box::new(values.iter().map(|value| f64::from(*value))),
        Elements::Float64(values) => Box::new(values.iter().copied()),
        _ => return None,
    };
    numbers.enumerate().find(|(_, number)| !number.is_finite())
}

/// The numbers that ops which always run take from a data variable.
fn uses(graph: &Graph, data: &str) -> Vec<AllowedIndices> {
    let length = |name: &str, dimension: usize| match graph.facts(name) {
        Some(VariableFacts::Dense { shape, .. }) => match shape.get(dimension) {
            Some(Dim::Fixed(length)) => Some(*length),
            _ => None,
        },
        _ => None,
    };
    let ops = graph.program().blocks.first().map_or(&[][..], |block| &block.ops);
    let taken = ops.iter().filter(|op| op.inputs.get(1).is_some_and(|name| name == data)).filter_map(|op| {
        let first = &op.inputs[0];
        let (dimension, padding, things) = match op.kind {
            OpKind::LookupTable { padding } => (0, padding, "rows of the table"),
            OpKind::Gather => (0, None, "rows of"),
            OpKind::SoftmaxWithCrossEntropy => (1, None, "classes of"),
            _ => return None,
        };
        let end = length(first, dimension)?;
        Some(AllowedIndices { end, padding, things: format!("{things} {first:?}") })
    });
    taken.collect()
}
