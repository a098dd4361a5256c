//! Saving a model: a reader of the job pulls every parameter and writes one file.
//!
//! A sparse parameter with a height becomes a matrix like any other, with rows that nobody has touched as they begin;
//! one without a height, and one that is large and mostly untouched, becomes two tensors: `name:ids`, ascending, and
//! `name:rows`, a row for each.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{ModelPath, ModelTensor, ModelWriter, Storage, plan_model};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::wire::Address;
use pserver_core::wire::answer::Saved;
use pserver_transport::network::Token;
use std::sync::Arc;

use super::Reach;
use crate::client::{Client, ClientOptions, Facts, Wanted, WantedRows};

/// A sparse parameter's matrix is written whole up to so many bytes, however few of its rows are there.
const MATRIX_BYTES_MAX: u64 = 1024 * 1024 * 1024;
/// And beyond when at least one in so many rows is there.
const ROWS_PER_ROW: u64 = 2;
/// Rows are fetched and written in blocks of about so many bytes.
const BLOCK_BYTES: u64 = 16 * 1024 * 1024;

/// Where a model comes from and goes to.
#[derive(Clone)]
pub(super) struct Saving {
    pub(super) coordinator: Address,
    pub(super) reach: Reach,
    pub(super) root: PathBuf,
    pub(super) token: Option<Token>,
}

/// Where the bytes of a tensor come from.
enum Source {
    /// A dense parameter of so many bytes.
    Whole(String, u64),
    /// Rows of a sparse parameter: those with these ids, or all below a height.
    Rows { name: String, row_bytes: u64, ids: RowIds },
    /// Ids themselves.
    Ids(Arc<Vec<u64>>),
}

#[derive(Clone)]
enum RowIds {
    Below(u64),
    These(Arc<Vec<u64>>),
}

/// Saves the model as `path` below the model directory.
pub(super) fn save(saving: &Saving, path: &str) -> Result<Saved, Failure> {
    let path = ModelPath::parse(path)?;
    let storage: Arc<dyn Storage> = Arc::new(Directory::open(&saving.root)?);
    let (coordinator, token) = (saving.coordinator.clone(), saving.token.clone());
    let options = ClientOptions { is_reader: true, token, ..ClientOptions::new(coordinator) };
    let client = saving.reach.client(options)?;
    let (mut tensors, mut sources) = (Vec::new(), Vec::new());
    for name in client.names()? {
        let facts = client.describe(&name)?;
        if facts.is_sparse {
            let (of_rows, from) = sparse(&client, name, &facts)?;
            tensors.extend(of_rows);
            sources.extend(from);
        } else {
            sources.push(Source::Whole(name.clone(), facts.bytes));
            tensors.push(ModelTensor { name, element_type: facts.element_type, shape: facts.shape });
        }
    }
    let plan = plan_model(&tensors)?;
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = ModelWriter::create(storage, &path, &plan, &metadata)?;
    let mut buffer = Vec::new();
    for part in plan.iter().flat_map(|output| &output.parts) {
        write(&client, &sources[*part], &mut writer, &mut buffer)?;
    }
    let bytes = writer.finish()?;
    Ok(Saved { path: saving.root.join(path.as_str()).display().to_string(), bytes })
}

/// The tensors that a sparse parameter becomes.
fn sparse(client: &Client, name: String, facts: &Facts) -> Result<(Vec<ModelTensor>, Vec<Source>), Failure> {
    let (height, width) = (facts.shape[0], facts.shape[1]);
    let element_type = facts.element_type;
    let row_bytes = width * element_type.bytes();
    let is_small = height.checked_mul(row_bytes).is_some_and(|bytes| bytes <= MATRIX_BYTES_MAX);
    let ids = if height > 0 && is_small { Vec::new() } else { client.list_rows(&name)? };
    let is_dense = (ids.len() as u64).saturating_mul(ROWS_PER_ROW) >= height;
    if height > 0 && (is_small || is_dense) {
        let tensor = ModelTensor { name: name.clone(), element_type, shape: vec![height, width] };
        return Ok((vec![tensor], vec![Source::Rows { name, row_bytes, ids: RowIds::Below(height) }]));
    }
    let (ids, count) = (Arc::new(ids.clone()), ids.len() as u64);
    let tensor =
        |ending: &str, element_type, shape| ModelTensor { name: format!("{name}:{ending}"), element_type, shape };
    // Ids are below 2^63, and a signed index is what other libraries take.
    let tensors =
        vec![tensor("ids", ElementType::Int64, vec![count]), tensor("rows", element_type, vec![count, width])];
    let rows = Source::Rows { name: name.clone(), row_bytes, ids: RowIds::These(Arc::clone(&ids)) };
    Ok((tensors, vec![Source::Ids(ids), rows]))
}

fn write(client: &Client, source: &Source, writer: &mut ModelWriter, buffer: &mut Vec<u8>) -> Result<(), Failure> {
    match source {
        Source::Whole(name, bytes) => {
            let bytes = usize::try_from(*bytes)
                .map_err(|_| Failure::call(format!("parameter \"{name}\" is too long for this machine")))?;
            buffer.resize(bytes, 0);
            client.pull(&mut [Wanted::new(name, buffer)])?;
            writer.write(buffer)
        }
        Source::Ids(ids) => {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            writer.write(&bytes)
        }
        Source::Rows { name, row_bytes, ids } => {
            let count = match ids {
                RowIds::Below(height) => *height,
                RowIds::These(ids) => ids.len() as u64,
            };
            let each = (BLOCK_BYTES / row_bytes).max(1);
            for first in (0..count).step_by(usize::try_from(each).expect("a block is small")) {
                let block = first..count.min(first + each);
                let place = |at: u64| usize::try_from(at).expect("ids are in memory");
                let block: Vec<u64> = match ids {
                    RowIds::Below(_) => block.collect(),
                    RowIds::These(ids) => ids[place(block.start)..place(block.end)].to_vec(),
                };
                buffer.resize(block.len() * place(*row_bytes), 0);
                client.pull_rows(&mut [WantedRows { name, ids: &block, values: buffer }])?;
                writer.write(buffer)?;
            }
            Ok(())
        }
    }
}
