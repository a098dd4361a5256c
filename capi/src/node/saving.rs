//! Saving a model: a reader of the job pulls every parameter and writes one file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{ModelPath, ModelTensor, ModelWriter, Storage, plan_model};
use pserver_core::error::Failure;
use pserver_core::wire::Address;
use pserver_core::wire::answer::Saved;
use std::sync::Arc;

use crate::client::{Client, ClientOptions, Wanted};

/// Where a model comes from and goes to.
#[derive(Clone, Debug)]
pub(super) struct Saving {
    pub(super) coordinator: Address,
    pub(super) root: PathBuf,
}

/// Saves the model as `path` below the model directory.
pub(super) fn save(saving: &Saving, path: &str) -> Result<Saved, Failure> {
    let path = ModelPath::parse(path)?;
    let storage: Arc<dyn Storage> = Arc::new(Directory::open(&saving.root)?);
    let client = Client::new(ClientOptions { is_reader: true, ..ClientOptions::new(saving.coordinator.clone()) })?;
    let (mut tensors, mut lengths) = (Vec::new(), Vec::new());
    for name in client.names()? {
        let facts = client.describe(&name)?;
        lengths.push(facts.bytes);
        tensors.push(ModelTensor { name, element_type: facts.element_type, shape: facts.shape });
    }
    let plan = plan_model(&tensors)?;
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = ModelWriter::create(storage, &path, &plan, &metadata)?;
    let mut buffer = Vec::new();
    for part in plan.iter().flat_map(|output| &output.parts) {
        let name = &tensors[*part].name;
        let bytes = usize::try_from(lengths[*part])
            .map_err(|_| Failure::call(format!("parameter \"{name}\" is too long for this machine")))?;
        buffer.resize(bytes, 0);
        client.pull(&mut [Wanted { name, content: &mut buffer }])?;
        writer.write(&buffer)?;
    }
    let bytes = writer.finish()?;
    Ok(Saved { path: saving.root.join(path.as_str()).display().to_string(), bytes })
}
