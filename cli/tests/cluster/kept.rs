//! Contents of a job's checkpoint directory: whole values and optimizer states, joined from their chunks.

use std::path::Path;

use pserver_client::Client;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::checkpoint::{ChunkRecord, load_latest};
use pserver_core::error::Failure;

use super::job::{Job, Local, TCP, client, folder};
use super::training::{Tensor, begin, push};

/// Every tensor of a job, in the order of declaration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    tensors: Vec<KeptTensor>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct KeptTensor {
    name: String,
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
    versions: Vec<u64>,
}

impl Kept {
    /// The outcome of so many rounds of a job whose servers and trainers nothing disturbs.
    pub(crate) fn undisturbed(tensors: &[Tensor], trainers: u32, rounds: u64) -> Self {
        let folder = folder();
        let job = Job { bind: TCP, ..Job::new(1, trainers).with_checkpoints(folder.path()) };
        let servers = Local::start(&job);
        let clients: Vec<Client> = (0..trainers).map(|trainer| client(&servers.coordinator(), trainer)).collect();
        for client in &clients {
            begin(client, tensors).expect("the tensors are initialised");
        }
        for round in 1..=rounds {
            for (trainer, client) in (0..).zip(&clients) {
                push(client, tensors, trainer, round).expect("a gradient is taken");
            }
        }
        servers.stop();
        Self::read(folder.path(), &job, tensors)
    }

    /// Reads the last checkpoint of every shard of a job that has stopped.
    pub(crate) fn read(root: &Path, job: &Job, tensors: &[Tensor]) -> Self {
        let empty = |tensor: &Tensor| KeptTensor { name: tensor.name.clone(), ..KeptTensor::default() };
        let mut kept = Self { tensors: tensors.iter().map(empty).collect() };
        let storage = Directory::open(root).expect("the checkpoint directory is there");
        for server in 0..job.servers {
            for shard in 0..job.shards {
                let directory = format!("server-{server}/shard-{shard}");
                let mut visit = |record: ChunkRecord<'_>| kept.place(job, tensors, &record);
                let loaded = load_latest(&storage, &directory, None, &mut visit);
                let loaded = loaded.expect("the last checkpoint is whole");
                assert!(loaded.is_some(), "{directory} has a checkpoint");
            }
        }
        for (kept, tensor) in kept.tensors.iter().zip(tensors) {
            assert_eq!(kept.value.len(), tensor.bytes(), "\"{}\" is on disk whole", tensor.name);
        }
        kept
    }

    /// The least and the greatest version of any chunk.
    pub(crate) fn versions(&self) -> (u64, u64) {
        let all = || self.tensors.iter().flat_map(|tensor| tensor.versions.iter().copied());
        (all().min().unwrap_or(0), all().max().unwrap_or(0))
    }

    /// The values, in the order of declaration.
    pub(crate) fn values(&self) -> Vec<Vec<u8>> {
        self.tensors.iter().map(|tensor| tensor.value.clone()).collect()
    }

    /// A digest of the job: tensors in name order, each with its name, its value and its states.
    pub(crate) fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&u64::try_from(bytes.len()).expect("a length has 64 bits").to_le_bytes());
            hasher.update(bytes);
        };
        let mut tensors: Vec<&KeptTensor> = self.tensors.iter().collect();
        tensors.sort_by_key(|tensor| &tensor.name);
        for tensor in tensors {
            add(tensor.name.as_bytes());
            add(&tensor.value);
            tensor.states.iter().for_each(|state| add(state));
        }
        hasher.finalize()
    }

    /// The first difference between two jobs that should be equal.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let pairs = self.tensors.iter().zip(&other.tensors);
        pairs.filter(|(one, two)| one.value != two.value || one.states != two.states).map(describe).next()
    }

    fn place(&mut self, job: &Job, tensors: &[Tensor], record: &ChunkRecord<'_>) -> Result<(), Failure> {
        let index = usize::try_from(record.id.parameter.0).expect("an index is short");
        // The record of the shard itself belongs to no parameter.
        let Some(kept) = self.tensors.get_mut(index) else { return Ok(()) };
        let offset = usize::try_from(record.id.chunk.0 * u64::from(job.chunk_bytes)).expect("tensors are short");
        let bytes = tensors[index].bytes();
        kept.states.resize(record.states.len(), Vec::new());
        put(&mut kept.value, bytes, offset, record.value);
        for (whole, part) in kept.states.iter_mut().zip(record.states) {
            put(whole, bytes, offset, part);
        }
        kept.versions.push(record.version.0);
        Ok(())
    }
}

fn put(whole: &mut Vec<u8>, bytes: usize, offset: usize, part: &[u8]) {
    whole.resize(bytes, 0);
    whole[offset..offset + part.len()].copy_from_slice(part);
}

fn describe((one, two): (&KeptTensor, &KeptTensor)) -> String {
    let value = one.value.iter().zip(&two.value).position(|(left, right)| left != right);
    let states = one.states.iter().zip(&two.states).map(|(left, right)| left == right).collect::<Vec<_>>();
    format!(
        "\"{}\": the first byte that differs in the value: {value:?}; states alike: {states:?}; versions {:?} and {:?}",
        one.name, one.versions, two.versions
    )
}
