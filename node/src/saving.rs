//! Saves a model: a reader of the job pulls every parameter and writes one file.
//!
//! A sparse parameter with a height becomes a matrix, in which unused rows have their initial values. A sparse
//! parameter without a height, or a large and mostly unused one, becomes two tensors: `name:ids`, ascending, and
//! `name:rows`, a row for each.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{
    ModelPath, ModelTensor, ModelWriter, RowsForm, Storage, is_always_matrix, plan_model, sweep_models,
};
use pserver_core::error::Failure;
use pserver_core::wire::Address;
use pserver_core::wire::answer::Saved;
use pserver_transport::network::JobToken;
use pserver_transport::tls::Encryption;
use std::sync::Arc;

use super::ServerNetwork;
use pserver_client::{Client, ClientOptions, DestinationRows, DestinationSlice, ParameterFacts};

/// A large matrix is written whole when at least one in this many rows exists.
const ROWS_PER_ROW: u64 = 2;
/// Approximate bytes of a block of rows that is pulled and written at once.
const BLOCK_BYTES: u64 = 16 * 1024 * 1024;

/// Source and destination of saved models.
#[derive(Clone)]
pub(super) struct ModelSave {
    pub(super) coordinator: Address,
    pub(super) reach: ServerNetwork,
    pub(super) root: PathBuf,
    pub(super) token: Option<JobToken>,
    pub(super) encryption: Option<Encryption>,
}

/// Source of a tensor's bytes.
enum TensorSource {
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

impl ModelSave {
    /// Gives back the disk space of models that killed processes left unfinished in the model directory, if there is
    /// one. Directories below it are swept by the next save in them.
    pub(super) fn sweep(&self) {
        if !self.root.is_dir() {
            return;
        }
        let swept = Directory::open(&self.root).and_then(|storage| sweep_models(&storage, ""));
        log_sweep(swept, &self.root.display().to_string());
    }
}

/// Logs the result of a sweep. A failed sweep prevents neither the start of a server nor a save.
fn log_sweep(swept: Result<usize, Failure>, directory: &str) {
    match swept {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, directory, "unfinished models of killed processes are removed"),
        Err(failure) => tracing::warn!(directory, "unfinished models of killed processes stay: {failure}"),
    }
}

/// Saves the model as `path` below the model directory.
pub(super) fn save(saving: &ModelSave, path: &str) -> Result<Saved, Failure> {
    let path = model_path(saving, path)?;
    let opened = Directory::open(&saving.root);
    let opened = opened.map_err(|failure| Failure::call(format!("model_dir of server 0: {failure}")))?;
    let storage: Arc<dyn Storage> = Arc::new(opened);
    let (coordinator, token) = (saving.coordinator.clone(), saving.token.clone());
    let encryption = saving.encryption.clone();
    let options = ClientOptions { is_reader: true, token, encryption, ..ClientOptions::new(coordinator) };
    let client = saving.reach.client(options)?;
    let (mut tensors, mut sources) = (Vec::new(), Vec::new());
    for name in client.names()? {
        let facts = client.describe(&name)?;
        if facts.is_sparse {
            let (of_rows, from) = sparse(&client, name, &facts)?;
            tensors.extend(of_rows);
            sources.extend(from);
        } else {
            sources.push(TensorSource::Whole(name.clone(), facts.bytes));
            tensors.push(ModelTensor { name, element_type: facts.element_type, shape: facts.shape });
        }
    }
    let plan = plan_model(&tensors)?;
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    log_sweep(sweep_models(&*storage, path.directory()), path.directory());
    // Random, because saves of other processes and machines may share the directory.
    let number = RandomState::new().hash_one(std::process::id());
    let mut writer = ModelWriter::create(storage, (&path, number), &plan, &metadata)?;
    let mut buffer = Vec::new();
    for part in plan.iter().flat_map(|output| &output.parts) {
        write(&client, &sources[*part], &mut writer, &mut buffer)?;
    }
    let bytes = writer.finish()?;
    Ok(Saved { path: saving.root.join(path.as_str()).display().to_string(), bytes })
}

/// A path below the model directory. An absolute one that leads there is taken, as trainers on this host know it.
fn model_path(saving: &ModelSave, path: &str) -> Result<ModelPath, Failure> {
    let root = std::path::absolute(&saving.root).unwrap_or_else(|_| saving.root.clone());
    let roots = root.canonicalize().into_iter().chain([root.clone()]);
    let below = { roots }.find_map(|root| Path::new(path).strip_prefix(root).ok()?.to_str());
    let below = below.filter(|_| path.starts_with('/')).unwrap_or(path);
    ModelPath::parse(below).map_err(|failure| {
        let (root, host) = (root.display(), super::host_name());
        Failure::call(format!("{failure}; on server 0 (host {host}) that directory is {root}"))
    })
}

/// The tensors that a sparse parameter becomes.
fn sparse(
    client: &Client,
    name: String,
    facts: &ParameterFacts,
) -> Result<(Vec<ModelTensor>, Vec<TensorSource>), Failure> {
    let (height, width) = (facts.shape[0], facts.shape[1]);
    let element_type = facts.element_type;
    let row_bytes = width * element_type.bytes();
    let is_small = is_always_matrix(height, row_bytes);
    let ids = if is_small { Vec::new() } else { client.list_rows(&name)? };
    let is_dense = (ids.len() as u64).saturating_mul(ROWS_PER_ROW) >= height;
    if height > 0 && (is_small || is_dense) {
        let tensors = RowsForm::Matrix(height).tensors(&name, element_type, width);
        return Ok((tensors, vec![TensorSource::Rows { name, row_bytes, ids: RowIds::Below(height) }]));
    }
    let tensors = RowsForm::Listed(ids.len() as u64).tensors(&name, element_type, width);
    let ids = Arc::new(ids);
    let rows = TensorSource::Rows { name: name.clone(), row_bytes, ids: RowIds::These(Arc::clone(&ids)) };
    Ok((tensors, vec![TensorSource::Ids(ids), rows]))
}

fn write(
    client: &Client,
    source: &TensorSource,
    writer: &mut ModelWriter,
    buffer: &mut Vec<u8>,
) -> Result<(), Failure> {
    match source {
        TensorSource::Whole(name, bytes) => {
            let bytes = usize::try_from(*bytes).map_err(|_| {
                Failure::call(format!("parameter \"{name}\" has more bytes than this machine can address"))
            })?;
            buffer.resize(bytes, 0);
            client.pull(&mut [DestinationSlice::new(name, buffer)])?;
            writer.write(buffer)
        }
        TensorSource::Ids(ids) => {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            writer.write(&bytes)
        }
        TensorSource::Rows { name, row_bytes, ids } => {
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
                client.pull_rows(&mut [DestinationRows { name, ids: &block, values: buffer }])?;
                writer.write(buffer)?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absolute_path_below_the_model_directory_is_taken() {
        let folder = tempfile::TempDir::new().expect("there is room");
        let root = folder.path().canonicalize().expect("it is there");
        let saving = ModelSave {
            coordinator: Address::parse("127.0.0.1:1").expect("an address"),
            reach: ServerNetwork::Network,
            root: root.clone(),
            token: None,
            encryption: None,
        };
        let check = |path: &str, expected: Result<&str, &str>| match (model_path(&saving, path), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found.as_str(), expected),
            (Err(failure), Err(expected)) => assert!(failure.to_string().contains(expected), "{failure}"),
            (found, expected) => panic!("{path}: {found:?}; expected {expected:?}"),
        };
        check("a/m.safetensors", Ok("a/m.safetensors"));
        check(&format!("{}/a/m.safetensors", root.display()), Ok("a/m.safetensors"));
        check(&format!("{}/../m.safetensors", root.display()), Err("holds \"..\""));
        let refusal = format!("that directory is {}", root.display());
        check("/elsewhere/m.safetensors", Err(&refusal));
        check("/elsewhere/m.safetensors", Err("is absolute; expected a path below the model directory"));
    }
}
