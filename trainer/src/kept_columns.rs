//! The columns of a weight that trainers keep ([`Columns`]), collected by trainer 0 after a training.
//!
//! Servers have no part of the weight during the training. In the end each other trainer sends its columns once, to a
//! parameter of their name that the job has for it, as an item of a queue; trainer 0 waits for them.

use pserver_client::{DestinationSlice, GradientSlice};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::Version;
use pserver_program::transpile::{Cluster, ColumnShares, Columns, ProgramPart};
use pserver_program::{Graph, Tensor};

use super::queues::ServerQueue;
use super::server_parameters::dimensions;
use super::trainer::Trainer;

/// The columns of one weight, by trainer.
#[derive(Clone, Debug)]
pub(super) struct KeptColumns {
    /// The weight's name in the whole program.
    pub(super) parameter: String,
    element_type: ElementType,
    rows: u64,
    shares: Vec<ColumnsOfTrainer>,
}

#[derive(Clone, Debug)]
struct ColumnsOfTrainer {
    name: String,
    columns: u64,
}

impl KeptColumns {
    /// The columns of a program that is divided into these parts.
    pub(super) fn of(graph: &Graph, cluster: Cluster, parts: &[ProgramPart]) -> Result<Self, Failure> {
        let ColumnShares { parameter, names } = Columns::shares(graph, cluster)?;
        let mut kept = Self { parameter, element_type: ElementType::Float32, rows: 0, shares: Vec::new() };
        for (name, part) in names.into_iter().zip(parts) {
            let facts = part.graph.facts(&name).expect("every trainer has its columns");
            let (element_type, shape) = dimensions(facts).map_err(Failure::call)?;
            (kept.element_type, kept.rows) = (element_type, shape[0]);
            kept.shares.push(ColumnsOfTrainer { name, columns: shape[1] });
        }
        Ok(kept)
    }

    /// Room on servers for the columns of all trainers but 0, on the servers in turn.
    pub(super) fn queues(&self, servers: u32) -> Vec<ServerQueue> {
        let others = (0..).zip(&self.shares).skip(1);
        let queue = |(trainer, share): (u32, &ColumnsOfTrainer)| {
            let shape = [self.rows, share.columns];
            ServerQueue::of_trainer(share.name.clone(), trainer % servers, trainer, self.element_type, &shape)
        };
        others.map(queue).collect()
    }

    /// Sends this trainer's columns to the servers. A repetition after a failure counts once.
    pub(super) fn publish(&self, trainer: &Trainer<'_>, rank: usize) -> Result<(), Failure> {
        let ColumnsOfTrainer { name, .. } = &self.shares[rank];
        let content = self.own(trainer, rank)?.bytes();
        trainer.client().push(&[GradientSlice { name, element_type: self.element_type, content }], None)
    }

    /// The whole weight, at trainer 0, when all other trainers have sent their columns.
    pub(super) fn whole(&self, trainer: &Trainer<'_>) -> Result<Tensor, Failure> {
        let columns: u64 = self.shares.iter().map(|share| share.columns).sum();
        let mut whole = self.zeros(columns)?;
        let (mut offset, row) = (0, self.row_bytes(columns)?);
        for (rank, share) in self.shares.iter().enumerate() {
            let width = self.row_bytes(share.columns)?;
            let mut received = None;
            let part: &Tensor = if rank == 0 {
                self.own(trainer, rank)?
            } else {
                let part = received.insert(self.zeros(share.columns)?);
                let place = DestinationSlice::new(&share.name, part.bytes_mut());
                trainer.client().pull_version(&mut [place], Version(1))?;
                part
            };
            for (to, from) in whole.bytes_mut().chunks_exact_mut(row).zip(part.bytes().chunks_exact(width)) {
                to[offset..offset + width].copy_from_slice(from);
            }
            offset += width;
        }
        Ok(whole)
    }

    fn own<'t>(&self, trainer: &'t Trainer<'_>, rank: usize) -> Result<&'t Tensor, Failure> {
        let name = &self.shares[rank].name;
        let value = trainer.value(name);
        value
            .map(pserver_program::VariableValue::tensor)
            .ok_or_else(|| Failure::call(format!("found no value of {name:?} before the first step; expected a step")))
    }

    fn zeros(&self, columns: u64) -> Result<Tensor, Failure> {
        let zeros = Tensor::try_zeros(self.element_type, &[self.rows, columns]);
        zeros.map_err(|failure| Failure::call(format!("parameter {:?}: {failure}", self.parameter)))
    }

    fn row_bytes(&self, columns: u64) -> Result<usize, Failure> {
        let bytes = columns.saturating_mul(self.element_type.bytes());
        usize::try_from(bytes).map_err(|_| Failure::call(format!("found rows of {bytes} bytes")))
    }
}
