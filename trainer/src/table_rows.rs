//! Rows of tables: those that a step's `pull_rows` ask for, and all of a table on demand.

use std::collections::{BTreeMap, BTreeSet};

use pserver_client::{Client, DestinationRows};
use pserver_core::error::Failure;
use pserver_program::{Elements, Graph, OpKind, Tensor, VariableFacts, VariableValue};

use super::data::TakeBytes;
use super::server_parameters::{ServerParameter, nodes};

/// Bytes of a whole table's rows that one call fetches.
const FETCHED_BYTES: usize = 16 << 20;

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
    let mut first = 0;
    for values in into.chunks_mut(fetched_bytes(parameter)) {
        first = fetch_from(client, parameter, first, values)?;
    }
    Ok(())
}

/// Passes on every row of a table's piece, those of one call at a time.
pub(super) fn pass_all(client: &Client, parameter: &ServerParameter, take: &mut TakeBytes<'_>) -> Result<(), Failure> {
    let (mut first, mut left, each) = (0, parameter.byte_count()?, fetched_bytes(parameter));
    let mut values = vec![0; left.min(each)];
    while left > 0 {
        let values = &mut values[..left.min(each)];
        left -= values.len();
        first = fetch_from(client, parameter, first, values)?;
        take(values)?;
    }
    Ok(())
}

/// Bytes of the rows that one call fetches; one row at least.
fn fetched_bytes(parameter: &ServerParameter) -> usize {
    let row_bytes = parameter.layout.expect("a table has rows").row_bytes();
    (FETCHED_BYTES / row_bytes).max(1) * row_bytes
}

/// Fetches rows from a place of a piece on, and returns the place after them.
fn fetch_from(client: &Client, parameter: &ServerParameter, first: u64, values: &mut [u8]) -> Result<u64, Failure> {
    let rows = values.len() / parameter.layout.expect("a table has rows").row_bytes();
    let ids: Vec<u64> = (first..).take(rows).collect();
    client.pull_rows(&mut [DestinationRows { name: &parameter.name, ids: &ids, values }])?;
    Ok(first + rows as u64)
}
