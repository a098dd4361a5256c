//! Updates of buckets: rows are merged, and catch up with the updates that they missed.

use std::sync::Arc;

use crate::error::Failure;
use crate::ids::Version;
use crate::optim::{Prepared, ReducedPiece, Step};
use crate::port::Kernels;
use crate::server::bucket::{RowsPlan, RowsWorkspace};
use crate::server::chunk::{Chunk, Content};

impl Chunk {
    /// Applies the round to a bucket, with the values of the rule's reductions; false when it takes another turn.
    pub(in crate::server) fn update_rows(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        (step, reduced): (&Step, &[f64]),
        left: &mut u64,
    ) -> Result<bool, Failure> {
        let Content::Rows(bucket) = &mut self.content else { panic!("rows go to a bucket") };
        let is_over = bucket.update(room, kernels, (step, reduced), self.round.rows(), left)?;
        if is_over {
            self.version = Version(self.version.0 + 1);
        }
        Ok(is_over)
    }

    /// Passes the sums of the round's rows to a reduction.
    pub(in crate::server) fn reduce_rows(
        &self,
        room: &mut RowsWorkspace,
        reduce: &mut dyn FnMut(ReducedPiece<'_, '_>),
    ) -> Result<(), Failure> {
        self.bucket().expect("rows are of a bucket").reduce(room, self.round.rows(), reduce)
    }

    /// Replaces the rule, before the first update.
    pub(in crate::server) fn replace_rule(
        &mut self,
        rule: &Arc<Prepared>,
        plan: Option<&RowsPlan>,
    ) -> Result<(), Failure> {
        self.rule = Arc::clone(rule);
        if let (Some(bucket), Some(plan)) = (self.bucket_mut(), plan) {
            bucket.replace_rule(rule, plan)?;
        }
        Ok(())
    }
}
