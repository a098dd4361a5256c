//! Rows of tables: those that a step's `pull_rows` ask for, and all of a table on demand.

use std::collections::{BTreeMap, BTreeSet};

use pserver_client::{Client, DestinationRows};
use pserver_core::error::Failure;
use pserver_program::{Elements, Graph, OpKind, Tensor, VariableFacts, VariableValue};

use super::server_parameters::{ServerParameter, nodes};

/// Rows of a whole table that one call fetches.
const FETCHED_ROWS: usize = 1 << 16;

/// Refuses a table that an op other than a lookup reads, because only its rows travel.
pub(super) fn check_tables(graph: &Graph, parameters: &[ServerParameter]) -> Result<(), Failure> {
    let is_table = |channel: &str| parameters.iter().any(|one| one.name == channel && one.layout.is_some());
    for node in nodes(graph) {
        let OpKind::Recv { channel } = &node.kind else { continue };
        let received = graph.variable(node.outputs[0]);
        let is_count = matches!(&received.facts, VariableFacts::Dense { shape, .. } if shape.is_empty());
        if is_table(channel) && !is_count {
            let reader = nodes(graph).find(|reader| reader.inputs.contains(&node.outputs[0]));
            let found = reader.map_or("nothing", |reader| reader.kind.name());
            return Err(Failure::call(format!(
                "table {channel:?}: found {found} that reads it; expected only lookup_table, as the first input"
            )));
        }
    }
    Ok(())
}

/// Ids that a part has asked for.
struct AskedRows<'p> {
    channel: String,
    parameter: &'p ServerParameter,
    ids: Vec<u64>,
    values: Tensor,
}

/// Fetches the rows of as many requests as one call may have, one for each parameter, and removes them from `asked`.
/// Returns the channel, the server and the values of each.
pub(super) fn pull_asked(
    client: &Client,
    parameters: &[ServerParameter],
    asked: &mut BTreeMap<String, VariableValue>,
) -> Result<Vec<(String, u32, Tensor)>, Failure> {
    let mut all: Vec<AskedRows<'_>> = Vec::new();
    let mut chosen = BTreeSet::new();
    for (channel, ids) in &*asked {
        let parameter = parameters.iter().find(|one| one.row_channels.contains(channel));
        let parameter = parameter.expect("the channel was recognised by it");
        if chosen.insert(&parameter.name) {
            let Elements::Int64(ids) = ids.tensor().elements() else { unreachable!("ids are int64") };
            let ids: Vec<u64> = ids.iter().map(|id| id.cast_unsigned()).collect();
            let values = Tensor::try_zeros(parameter.element_type, &[ids.len() as u64, parameter.shape[1]])?;
            all.push(AskedRows { channel: channel.clone(), parameter, ids, values });
        }
    }
    let mut wanted: Vec<DestinationRows<'_>> = all
        .iter_mut()
        .map(|one| DestinationRows { name: &one.parameter.name, ids: &one.ids, values: one.values.bytes_mut() })
        .collect();
    client.pull_rows(&mut wanted)?;
    all.iter().for_each(|one| drop(asked.remove(&one.channel)));
    Ok(all.into_iter().map(|one| (one.channel, one.parameter.server, one.values)).collect())
}

/// Fetches every row of a table's piece into its part of the whole table.
pub(super) fn fetch_all(client: &Client, parameter: &ServerParameter, into: &mut [u8]) -> Result<(), Failure> {
    let row_bytes = parameter.layout.expect("a table has rows").row_bytes();
    let mut first = 0;
    for values in into.chunks_mut(FETCHED_ROWS * row_bytes) {
        let ids: Vec<u64> = (first..).take(values.len() / row_bytes).collect();
        first += ids.len() as u64;
        client.pull_rows(&mut [DestinationRows { name: &parameter.name, ids: &ids, values }])?;
    }
    Ok(())
}
