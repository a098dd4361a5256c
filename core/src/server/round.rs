//! How contributions become one update.
//!
//! A round is open for one version of one chunk. Contributions are kept in trainer order and summed in it, so
//! that the same inputs give the same bits whatever the order of arrival. A trainer may be one contribution
//! ahead; that one waits, unacknowledged, until its round opens.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bucket::RowsLease;
use super::chunk::{Mark, Open, Stage, Waiter};
use super::pool::Pool;
use crate::dtype::{ElementType, Half};
use crate::error::Failure;
use crate::ids::{PeerId, Round as RoundNumber, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::Gradient;
use crate::port::{GradientLease, Kernels};
use crate::program::executor::{Pieces, Sent};
use crate::time::Now;
use crate::wire::Head;

/// From so many contributions in a row on, their sum replaces them while the round waits for the rest: memory
/// then grows with the trainers that are out of order, not with all of them.
pub(super) const FOLD_AT: usize = 4;

/// What the gradients of one frame have in common, kept once for all of them.
#[derive(Clone)]
pub(super) struct Sending {
    pub(super) call: Mark,
    pub(super) rate: Option<f64>,
    /// Where in the journal it is.
    pub(super) position: u64,
    /// How many pushes had arrived before it.
    pub(super) arrival: u64,
    /// Who sent it, to answer when it is admitted or applied.
    pub(super) peer: PeerId,
    pub(super) head: Head,
}

/// One trainer's gradient for one round of one chunk.
pub(super) struct Contribution {
    pub(super) trainer: TrainerId,
    /// The round it is for, where trainers count rounds.
    pub(super) round: RoundNumber,
    pub(super) element_type: ElementType,
    pub(super) bytes: u32,
    /// The gradient; gone once it was folded into the round's sum.
    pub(super) gradient: Option<Lease>,
    /// The gradient of a bucket, in parts; none where it brings no rows.
    pub(super) rows: Vec<RowsLease>,
    /// Whether the frame at hand brings a part of it that is not the last: such a frame does not wait for a round.
    pub(super) is_early_part: bool,
    /// What its sender wants the value as, where that is not the parameter's type.
    pub(super) half: Option<Half>,
    /// Since when its sender waits for an answer: for the round to open, if it is one ahead, or for the value of its
    /// round, if it asked for it. Nothing when it was answered, also by being told who is missing.
    pub(super) since: Option<Now>,
    pub(super) sending: Arc<Sending>,
}

// It goes from a frame to its round by way of those that run in step: what is longer is moved by calls.
const _: () = assert!(size_of::<Contribution>() <= 128, "a contribution is moved by a few instructions");

impl Contribution {
    fn gradient(&self) -> Option<Gradient<'_>> {
        let lease = self.gradient.as_ref()?;
        Some(Gradient { bytes: &lease.bytes()[..self.bytes as usize], element_type: self.element_type })
    }

    /// Copies a gradient that lies in its sender's memory. Without room for it the sender goes on lending: it is told
    /// what is wrong, and waits with its end until the round is over or its own time is.
    fn make_own(&mut self, pool: &mut Pool) {
        let foreign = self.gradient.as_mut().filter(|lease| lease.is_foreign());
        if let Some(gradient) = foreign
            && let Ok(mut own) = pool.take(gradient.len())
        {
            own.bytes_mut().copy_from_slice(gradient.bytes());
            *gradient = own;
        }
    }

    pub(super) fn is_same_call(&self, head: &Head) -> bool {
        self.sending.call == Mark::of(head)
    }

    /// Its sender, as one who waits for a version.
    pub(super) fn waiter(&self, version: Version, since: Now) -> Waiter {
        let Sending { peer, head, .. } = *self.sending;
        Waiter { half: self.half, ..Waiter::new(peer, head, version, since) }
    }

    /// The same came again: whoever sent it now is answered, as it says now.
    pub(super) fn answer_to(&mut self, again: &Self) {
        let sending = Arc::make_mut(&mut self.sending);
        (sending.peer, sending.head) = (again.sending.peer, again.sending.head);
        self.half = again.half;
    }
}

impl Sent for Contribution {
    type Sender = TrainerId;

    fn sender(&self) -> TrainerId {
        self.trainer
    }
}

/// The gradients of a round; the usual few are kept without memory of their own.
pub(super) type Gradients<'a> = SmallVec<[Gradient<'a>; 8]>;

/// The open round of a chunk.
#[derive(Default)]
pub(super) struct Round {
    /// One of a trainer at most, as of what is ahead.
    contributions: Pieces<Contribution>,
    /// Made when somebody is ahead for the first time.
    ahead: Option<Box<Pieces<Contribution>>>,
    sum: Option<Lease>,
}

impl Round {
    pub(super) fn contribution(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.contributions.of(trainer)
    }

    pub(super) fn ahead(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.ahead.as_ref()?.of(trainer)
    }

    pub(super) fn contribution_mut(&mut self, trainer: TrainerId) -> Option<&mut Contribution> {
        self.contributions.of_mut(trainer)
    }

    pub(super) fn ahead_mut(&mut self, trainer: TrainerId) -> Option<&mut Contribution> {
        self.ahead.as_mut()?.of_mut(trainer)
    }

    /// The contributions that wait for their turn, in trainer order.
    pub(super) fn all_ahead(&self) -> &[Contribution] {
        self.ahead.as_ref().map_or(&[], |ahead| ahead.as_slice())
    }

    #[inline]
    pub(super) fn add(&mut self, contribution: Contribution) -> &mut Contribution {
        let is_first = self.contributions.of(contribution.trainer).is_none();
        assert!(is_first, "a trainer contributes once to a round");
        self.contributions.put(contribution)
    }

    pub(super) fn add_ahead(&mut self, contribution: Contribution) {
        let is_first = self.ahead(contribution.trainer).is_none();
        assert!(is_first, "a trainer is at most one contribution ahead");
        self.ahead.get_or_insert_default().put(contribution);
    }

    pub(super) fn take_ahead(&mut self, trainer: TrainerId) -> Option<Contribution> {
        self.ahead.as_mut()?.take(trainer)
    }

    /// Takes back what `trainer` contributed to the open round, and forgets what of its waits.
    pub(super) fn withdraw(&mut self, trainer: TrainerId) -> Option<Contribution> {
        self.take_ahead(trainer);
        self.contributions.take(trainer)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.contributions().is_empty()
    }

    /// Whether nobody is in it or ahead of it.
    pub(super) fn is_bare(&self) -> bool {
        self.is_empty() && self.all_ahead().is_empty()
    }

    /// The contributions that are not yet in the value.
    pub(super) fn open(&self) -> impl Iterator<Item = Open> {
        let open = |one: &Contribution, stage| Open { trainer: one.trainer, call: one.sending.call, stage };
        let entered = self.contributions().iter().map(move |one| open(one, Stage::Entered));
        entered.chain(self.all_ahead().iter().map(move |one| open(one, Stage::Ahead)))
    }

    /// Since when the first of those who wait for an answer does.
    pub(super) fn waits_since(&self) -> Option<Now> {
        self.all_ahead().iter().chain(self.contributions()).filter_map(|one| one.since).min()
    }

    /// Whom to tell that a contribution has waited for too long; it goes on waiting, and they are told once. Who is
    /// told may write its gradient again, so what is still read at its sender's is copied before.
    pub(super) fn take_overdue(&mut self, pool: &mut Pool, is_overdue: impl Fn(Now) -> bool) -> Vec<(PeerId, Head)> {
        let ahead = self.ahead.iter_mut().flat_map(|ahead| ahead.as_mut_slice());
        let all = ahead.chain(self.contributions.as_mut_slice());
        let overdue = all.filter(|one| one.since.is_some_and(&is_overdue));
        let tell = |one: &mut Contribution| {
            one.make_own(pool);
            one.since = None;
            (one.sending.peer, one.sending.head)
        };
        overdue.map(tell).collect()
    }

    /// The oldest journal position that is not yet in the value.
    pub(super) fn oldest_position(&self) -> Option<u64> {
        self.contributions().iter().chain(self.all_ahead()).map(|one| one.sending.position).min()
    }

    /// Whether everybody that is waited for has contributed.
    #[inline]
    pub(super) fn is_complete(&self, mut awaited: impl Iterator<Item = TrainerId>) -> bool {
        !self.is_empty() && awaited.all(|trainer| self.contribution(trainer).is_some())
    }

    /// The mean of the rates that were sent with the contributions, in trainer order.
    pub(super) fn rate(&self) -> Option<f64> {
        if let [lone] = self.contributions() {
            return lone.sending.rate;
        }
        let rates = || self.contributions().iter().filter_map(|one| one.sending.rate);
        let count = u32::try_from(rates().count()).ok().filter(|count| *count > 0)?;
        let sum = rates().sum::<f64>();
        if sum.is_finite() {
            return Some(sum / f64::from(count));
        }
        // Finite rates may have a sum that is not. To divide first rounds otherwise, so it is done only then.
        Some(rates().map(|rate| rate / f64::from(count)).sum::<f64>().min(f64::MAX))
    }

    pub(super) fn contributors(&self) -> usize {
        self.contributions().len()
    }

    /// The gradients to sum, in trainer order; a sum of the first ones stands for them.
    #[inline]
    pub(super) fn gradients(&self, element_type: ElementType, bytes: u32) -> Gradients<'_> {
        let mut all = Gradients::new();
        if let Some(lease) = &self.sum {
            all.push(Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
        }
        for gradient in self.contributions().iter().filter_map(Contribution::gradient) {
            all.push(gradient);
        }
        all
    }

    /// The rows to sum, in trainer order.
    pub(super) fn rows(&self) -> impl Iterator<Item = &RowsLease> {
        self.contributions().iter().flat_map(|one| &one.rows)
    }

    /// Takes the gradient of the only contribution, when it is of this type and so is its own sum, and is ours to
    /// write.
    pub(super) fn take_only(&mut self, element_type: ElementType) -> Option<Lease> {
        let is_only = self.contributors() == 1 && self.sum.is_none();
        let only =
            self.contributions.as_mut_slice().first_mut().filter(|one| is_only && one.element_type == element_type)?;
        only.gradient.take_if(|lease| !lease.is_foreign())
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
        if self.contributors() < FOLD_AT {
            return;
        }
        let open = awaited.into_iter().find(|trainer| self.contribution(*trainer).is_none());
        let ready = |trainer: &TrainerId| open.is_none_or(|first| *trainer < first);
        let loose = self.contributions().iter().filter(|one| one.gradient.is_some() && ready(&one.trainer)).count();
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
        let before = |one: &&Contribution| end.is_none_or(|end| one.trainer < end);
        if self.sum.is_some() && self.contributions().iter().filter(before).all(|one| one.gradient.is_none()) {
            return Ok(());
        }
        let mut fresh = pool.take(bytes)?;
        let earlier = self.sum.iter().map(|lease| Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
        let loose = self.contributions().iter().filter(before).filter_map(Contribution::gradient);
        let gradients: Vec<Gradient<'_>> = earlier.chain(loose).collect();
        kernels.sum(element_type, &mut fresh.bytes_mut()[..bytes as usize], &gradients);
        self.sum = Some(fresh);
        for one in self.contributions.as_mut_slice().iter_mut().filter(|one| end.is_none_or(|end| one.trainer < end)) {
            one.gradient = None;
        }
        Ok(())
    }

    /// Takes the gradients out, in the order in which they are summed, for a device; who brought them stays.
    pub(super) fn lend(&mut self, element_type: ElementType, bytes: u32) -> Vec<GradientLease> {
        let sum = self.sum.take().map(|lease| GradientLease { lease, bytes, element_type });
        let loose = self.contributions.as_mut_slice().iter_mut().filter_map(|one| {
            Some(GradientLease { lease: one.gradient.take()?, bytes: one.bytes, element_type: one.element_type })
        });
        sum.into_iter().chain(loose).collect()
    }

    /// Who takes part, in trainer order.
    pub(super) fn contributions(&self) -> &[Contribution] {
        self.contributions.as_slice()
    }

    /// Ends the round.
    pub(super) fn close(&mut self) {
        self.sum = None;
        self.contributions.clear();
    }
}
