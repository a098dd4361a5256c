//! How contributions become one update.
//!
//! A round is open for one version of one chunk. Contributions are kept in trainer order and summed in it, so
//! that the same inputs give the same bits whatever the order of arrival. A trainer may be one contribution
//! ahead; that one waits, unacknowledged, until its round opens.

use std::collections::BTreeMap;

use super::chunk::{Mark, Open};
use super::pool::Pool;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{PeerId, TrainerId};
use crate::memory::Lease;
use crate::optim::Gradient;
use crate::port::Kernels;
use crate::time::Now;
use crate::wire::Head;

/// From so many contributions in a row on, their sum replaces them while the round waits for the rest: memory
/// then grows with the trainers that are out of order, not with all of them.
const FOLD_AT: usize = 4;

/// One trainer's gradient for one round of one chunk.
pub(super) struct Contribution {
    pub(super) trainer: TrainerId,
    pub(super) call: Mark,
    pub(super) rate: Option<f64>,
    pub(super) element_type: ElementType,
    pub(super) bytes: u32,
    /// The gradient; gone once it was folded into the round's sum.
    pub(super) gradient: Option<Lease>,
    /// Where in the journal it is.
    pub(super) position: u64,
    /// Who sent it, to answer when it is admitted or applied.
    pub(super) peer: PeerId,
    pub(super) head: Head,
    /// Since when it waits for its round, if it is one ahead; nothing once its sender was told who is missing.
    pub(super) since: Option<Now>,
}

impl Contribution {
    fn gradient(&self) -> Option<Gradient<'_>> {
        let lease = self.gradient.as_ref()?;
        Some(Gradient { bytes: &lease.bytes()[..self.bytes as usize], element_type: self.element_type })
    }

    pub(super) fn is_same_call(&self, head: &Head) -> bool {
        self.call == Mark::of(head)
    }
}

/// The open round of a chunk.
#[derive(Default)]
pub(super) struct Round {
    contributions: BTreeMap<TrainerId, Contribution>,
    ahead: BTreeMap<TrainerId, Contribution>,
    sum: Option<Lease>,
}

impl Round {
    pub(super) fn contribution(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.contributions.get(&trainer)
    }

    pub(super) fn ahead(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.ahead.get(&trainer)
    }

    pub(super) fn ahead_mut(&mut self, trainer: TrainerId) -> Option<&mut Contribution> {
        self.ahead.get_mut(&trainer)
    }

    /// The trainers with a contribution that waits for its turn, in order.
    pub(super) fn trainers_ahead(&self) -> Vec<TrainerId> {
        self.ahead.keys().copied().collect()
    }

    pub(super) fn add(&mut self, contribution: Contribution) {
        let before = self.contributions.insert(contribution.trainer, contribution);
        assert!(before.is_none(), "a trainer contributes once to a round");
    }

    pub(super) fn add_ahead(&mut self, contribution: Contribution) {
        let before = self.ahead.insert(contribution.trainer, contribution);
        assert!(before.is_none(), "a trainer is at most one contribution ahead");
    }

    pub(super) fn take_ahead(&mut self, trainer: TrainerId) -> Option<Contribution> {
        self.ahead.remove(&trainer)
    }

    /// Forgets what `trainer` contributed to the open round, and what of its waits.
    pub(super) fn withdraw(&mut self, trainer: TrainerId) {
        self.contributions.remove(&trainer);
        self.ahead.remove(&trainer);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.contributions.is_empty()
    }

    /// The contributions that are not yet in the value.
    pub(super) fn open(&self) -> impl Iterator<Item = Open> {
        let open = |one: &Contribution, is_ahead| Open { trainer: one.trainer, call: one.call, is_ahead };
        let entered = self.contributions.values().map(move |one| open(one, false));
        entered.chain(self.ahead.values().map(move |one| open(one, true)))
    }

    /// Since when the oldest contribution waits whose sender was not told yet.
    pub(super) fn waits_since(&self) -> Option<Now> {
        self.ahead.values().filter_map(|one| one.since).min()
    }

    /// Whom to tell that a contribution has waited for too long; it goes on waiting, and they are told once.
    pub(super) fn take_overdue(&mut self, is_overdue: impl Fn(Now) -> bool) -> Vec<(PeerId, Head)> {
        let overdue = self.ahead.values_mut().filter(|one| one.since.is_some_and(&is_overdue));
        let tell = |one: &mut Contribution| {
            one.since = None;
            (one.peer, one.head)
        };
        overdue.map(tell).collect()
    }

    /// The oldest journal position that is not yet in the value.
    pub(super) fn oldest_position(&self) -> Option<u64> {
        self.contributions.values().chain(self.ahead.values()).map(|one| one.position).min()
    }

    /// Whether everybody that is waited for has contributed.
    pub(super) fn is_complete(&self, mut awaited: impl Iterator<Item = TrainerId>) -> bool {
        !self.is_empty() && awaited.all(|trainer| self.contributions.contains_key(&trainer))
    }

    /// The mean of the rates that were sent with the contributions, in trainer order.
    pub(super) fn rate(&self) -> Option<f64> {
        let rates: Vec<f64> = self.contributions.values().filter_map(|one| one.rate).collect();
        let count = u32::try_from(rates.len()).ok().filter(|count| *count > 0)?;
        Some(rates.iter().sum::<f64>() / f64::from(count))
    }

    pub(super) fn contributors(&self) -> usize {
        self.contributions.len()
    }

    /// The gradients to sum, in trainer order; a sum of the first ones stands for them.
    pub(super) fn gradients(&self, element_type: ElementType, bytes: u32) -> Vec<Gradient<'_>> {
        let sum = self.sum.iter().map(|lease| Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
        sum.chain(self.contributions.values().filter_map(Contribution::gradient)).collect()
    }

    /// Takes the gradient of the only contribution, when it is of this type and so is its own sum.
    pub(super) fn take_only(&mut self, element_type: ElementType) -> Option<Lease> {
        let is_only = self.contributions.len() == 1 && self.sum.is_none();
        let only = self.contributions.values_mut().next().filter(|one| is_only && one.element_type == element_type)?;
        only.gradient.take()
    }

    /// Sums the first contributions in trainer order when nobody who comes before them is still awaited.
    pub(super) fn fold(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        element_type: ElementType,
        bytes: u32,
        awaited: impl Iterator<Item = TrainerId>,
    ) {
        let open = awaited.into_iter().find(|trainer| !self.contributions.contains_key(trainer));
        let ready = |trainer: &TrainerId| open.is_none_or(|first| *trainer < first);
        let loose = self.contributions.values().filter(|one| one.gradient.is_some() && ready(&one.trainer)).count();
        if loose >= FOLD_AT {
            // A pool without room for the sum keeps the gradients apart, which costs memory and nothing else.
            let _ = self.fold_before(kernels, pool, element_type, bytes, open);
        }
    }

    /// Sums every contribution, for a rule that needs the whole gradient before it can step.
    pub(super) fn fold_all(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        element_type: ElementType,
        bytes: u32,
    ) -> Result<(), Failure> {
        self.fold_before(kernels, pool, element_type, bytes, None)
    }

    fn fold_before(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        element_type: ElementType,
        bytes: u32,
        end: Option<TrainerId>,
    ) -> Result<(), Failure> {
        let mut fresh = pool.take(bytes)?;
        let earlier = self.sum.iter().map(|lease| Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
        let before = |one: &&Contribution| end.is_none_or(|end| one.trainer < end);
        let loose = self.contributions.values().filter(before).filter_map(Contribution::gradient);
        let gradients: Vec<Gradient<'_>> = earlier.chain(loose).collect();
        kernels.sum(element_type, &mut fresh.bytes_mut()[..bytes as usize], &gradients);
        self.sum = Some(fresh);
        for one in self.contributions.values_mut().filter(|one| end.is_none_or(|end| one.trainer < end)) {
            one.gradient = None;
        }
        Ok(())
    }

    /// Ends the round and gives back who took part.
    pub(super) fn close(&mut self) -> Vec<Contribution> {
        self.sum = None;
        std::mem::take(&mut self.contributions).into_values().collect()
    }
}
