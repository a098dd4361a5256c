//! The open round of a chunk: contributions that become one update.
//!
//! Contributions are kept and summed in trainer order, so that equal inputs give equal bits in any order of arrival. A
//! trainer may be one contribution ahead; that one waits, unacknowledged, until its round opens.

use smallvec::SmallVec;

use super::contribution::{Contribution, RowsLease};
use super::decided::{Counted, RecordedRound};
use super::pool::Pool;
use crate::accumulator::PieceList;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{PeerId, TrainerId};
use crate::memory::Lease;
use crate::optim::{Gradient, Prepared};
use crate::port::{GradientLease, Kernels};
use crate::rule::StepSettings;
use crate::time::Now;
use crate::wire::Head;

/// From this many consecutive contributions on, their sum replaces them while the round is open: memory grows with
/// trainers that are out of order, not with all of them.
pub(super) const FOLD_AT: usize = 4;

/// The gradients of a round; a few are stored inline.
pub(super) type Gradients<'a> = SmallVec<[Gradient<'a>; 8]>;

/// The open round of a chunk.
#[derive(Default)]
pub(super) struct OpenRound {
    /// At most one per trainer, as in `ahead`.
    contributions: PieceList<Contribution>,
    merged: MergedRound,
    /// Contributions to the round after it. Allocated when a trainer is ahead for the first time.
    ahead: Option<Box<(PieceList<Contribution>, MergedRound)>>,
}

/// The sum of a round's contributions, and its record.
#[derive(Default)]
struct MergedRound {
    /// The sum of its first gradients, or of all.
    sum: Option<Lease>,
    /// Whether the journal has the record that decided it.
    is_recorded: bool,
}

impl OpenRound {
    pub(super) fn contribution(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.contributions.of(trainer)
    }

    pub(super) fn ahead(&self, trainer: TrainerId) -> Option<&Contribution> {
        self.ahead.as_ref()?.0.of(trainer)
    }

    pub(super) fn contribution_mut(&mut self, trainer: TrainerId) -> Option<&mut Contribution> {
        self.contributions.of_mut(trainer)
    }

    pub(super) fn ahead_mut(&mut self, trainer: TrainerId) -> Option<&mut Contribution> {
        self.ahead.as_mut()?.0.of_mut(trainer)
    }

    /// Contributions that wait for a later round, in trainer order.
    pub(super) fn all_ahead(&self) -> &[Contribution] {
        self.ahead.as_ref().map_or(&[], |ahead| ahead.0.as_slice())
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
        self.ahead.get_or_insert_default().0.put(contribution);
    }

    pub(super) fn take_ahead(&mut self, trainer: TrainerId) -> Option<Contribution> {
        self.ahead.as_mut()?.0.take(trainer)
    }

    /// Withdraws a trainer's contribution from the open round and drops the one that is ahead; where `is_behind`, only
    /// one that is ahead of another one goes.
    pub(super) fn withdraw(&mut self, trainer: TrainerId, is_behind: bool) -> Option<Contribution> {
        if is_behind && self.contribution(trainer).is_none() {
            return None;
        }
        self.take_ahead(trainer);
        if is_behind { None } else { self.contributions.take(trainer) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.contributions().is_empty()
    }

    /// Whether there is no contribution, in the round or ahead.
    pub(super) fn is_bare(&self) -> bool {
        self.is_empty() && self.all_ahead().is_empty()
    }

    /// The contributions of the open round, or of the next one, that the sum of its first ones does not contain. Each
    /// comes with its gradient.
    pub(super) fn loose(&self, is_next: bool) -> impl Iterator<Item = (&Contribution, Option<Gradient<'_>>)> {
        let (part, folded) = (self.part(is_next), self.folded_count(is_next));
        part[folded..].iter().filter(|one| !one.is_unlogged()).map(|one| (one, one.gradient()))
    }

    /// The contributions that are rounds of their own, the one that has entered or those that wait, each with its
    /// gradient. The one that has entered may be folded for its update.
    pub(super) fn alone(
        &self,
        is_next: bool,
        (element_type, bytes): (ElementType, u32),
    ) -> impl Iterator<Item = (&Contribution, Option<Gradient<'_>>)> {
        let sum = self.sum(is_next).map(|lease| Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
        let part = self.part(is_next).iter().filter(|one| !one.is_unlogged());
        part.map(move |one| (one, one.gradient().or(sum.filter(|_| one.bytes != 0))))
    }

    /// The first contributions of the open round that are summed, and their sum; none where its record has the sum.
    pub(super) fn folded(&self, bytes: u32) -> Option<(&[Contribution], &[u8])> {
        let has_record = self.merged.is_recorded && self.is_recorded_whole(false, false);
        let sum = self.merged.sum.as_ref().filter(|_| !has_record)?;
        Some((&self.contributions()[..self.folded_count(false)], &sum.bytes()[..bytes as usize]))
    }

    /// How many contributions of the open round, or of the next one, are summed: the first ones.
    fn folded_count(&self, is_next: bool) -> usize {
        if self.sum(is_next).is_none() {
            return 0;
        }
        let part = self.part(is_next);
        part.iter().position(|one| one.gradient.is_some()).unwrap_or(part.len())
    }

    /// Start of the oldest unanswered wait.
    pub(super) fn waits_since(&self) -> Option<Now> {
        self.all_ahead().iter().chain(self.contributions()).filter_map(|one| one.since).min()
    }

    /// The connections whose contributions have waited too long. Each is told once, and its contribution stays. The
    /// trainer may then write its gradient again, so a gradient read in place is copied first.
    pub(super) fn take_overdue(&mut self, pool: &mut Pool, is_overdue: impl Fn(Now) -> bool) -> Vec<(PeerId, Head)> {
        let ahead = self.ahead.iter_mut().flat_map(|ahead| ahead.0.as_mut_slice());
        let all = ahead.chain(self.contributions.as_mut_slice());
        let overdue = all.filter(|one| one.since.is_some_and(&is_overdue));
        let notify = |one: &mut Contribution| {
            // Without a free lease its memory returns when the round closes.
            let _ = one.copy_out(pool);
            one.since = None;
            Some((one.sending.peer?, one.sending.head))
        };
        overdue.filter_map(notify).collect()
    }

    /// Whether the open round, or the next one, has its record.
    pub(super) fn is_recorded(&self, is_next: bool) -> bool {
        self.merged_part(is_next).is_some_and(|merged| merged.is_recorded)
    }

    fn merged_part(&self, is_next: bool) -> Option<&MergedRound> {
        if is_next { self.ahead.as_ref().map(|ahead| &ahead.1) } else { Some(&self.merged) }
    }

    /// The sum of the first contributions of the open round, or of the next one, if they are summed.
    fn sum(&self, is_next: bool) -> Option<&Lease> {
        self.merged_part(is_next)?.sum.as_ref()
    }

    /// Notes the record of the open round, or of the next one, and passes on each gradient that has waited for it.
    pub(super) fn set_recorded(&mut self, is_next: bool, recorded: impl FnMut(&mut Contribution)) {
        let (contributions, merged) = self.part_mut(is_next);
        merged.is_recorded = true;
        contributions.as_mut_slice().iter_mut().filter(|one| one.is_unlogged()).for_each(recorded);
    }

    /// The contributions of the open round, or of the next one.
    pub(super) fn part(&self, is_next: bool) -> &[Contribution] {
        if is_next { self.all_ahead() } else { self.contributions() }
    }

    fn part_mut(&mut self, is_next: bool) -> (&mut PieceList<Contribution>, &mut MergedRound) {
        match &mut self.ahead {
            Some(ahead) if is_next => (&mut ahead.0, &mut ahead.1),
            _ => (&mut self.contributions, &mut self.merged),
        }
    }

    /// Whether the record of the open round, or of the next one, has the merged gradient: the journal lacks one of
    /// those that it counts.
    pub(super) fn is_recorded_whole(&self, is_next: bool, is_bucket: bool) -> bool {
        let part = self.part(is_next);
        part.iter().any(Contribution::is_unlogged) && !is_passed(part, is_bucket)
    }

    /// Drops the gradients of the open round, or of the next one, if a trainer has declared it void: in a group, whose
    /// other chunks may be updated, they do not count.
    pub(super) fn drop_void(&mut self, is_next: bool) {
        let (contributions, merged) = self.part_mut(is_next);
        if contributions.as_slice().iter().any(|one| one.sending.is_void) {
            merged.sum = None;
            contributions.as_mut_slice().iter_mut().for_each(Contribution::drop_gradient);
        }
    }

    /// Merges the gradients of the open round, or of the next one, into memory of this process.
    pub(super) fn merge(
        &mut self,
        is_next: bool,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        (element_type, bytes): (ElementType, u32),
    ) -> Result<(), Failure> {
        let (contributions, merged) = self.part_mut(is_next);
        if let ([lone], None) = (contributions.as_mut_slice(), &merged.sum)
            && lone.element_type == element_type
        {
            return lone.copy_out(pool);
        }
        fold_before((contributions, merged), kernels, pool, (element_type, bytes), None)
    }

    /// Whether the gradients of the open round, or of the next one, are in memory of this process as [`Self::merge`]
    /// leaves them.
    pub(super) fn is_merged(&self, is_next: bool) -> bool {
        let (part, folded) = (self.part(is_next), self.folded_count(is_next));
        let is_lone = |one: &Contribution| one.gradient.as_ref().is_some_and(|lease| !lease.is_foreign());
        folded == part.len() || matches!(part, [lone] if is_lone(lone))
    }

    /// The merged gradient of the open round, or of the next one.
    pub(super) fn merged(&self, is_next: bool, bytes: u32) -> &[u8] {
        let lone = || self.part(is_next).first().and_then(|one| one.gradient.as_ref());
        let lease = self.sum(is_next).or_else(lone).expect("the gradients are merged");
        &lease.bytes()[..bytes as usize]
    }

    /// Whether every awaited trainer, or this many, have contributed to the open round, or to the next one.
    #[inline]
    pub(super) fn is_complete(&self, is_next: bool, count: u32, mut awaited: impl Iterator<Item = TrainerId>) -> bool {
        let of = |trainer| if is_next { self.ahead(trainer) } else { self.contribution(trainer) };
        let there = self.part(is_next).len();
        0 < there && (count as usize <= there || awaited.all(|trainer| of(trainer).is_some()))
    }

    /// Whether the round ends without an update: no trainer has a gradient, or one has declared it void.
    pub(super) fn is_passed(&self, is_bucket: bool) -> bool {
        is_passed(self.contributions(), is_bucket)
    }

    /// The mean of the learning rates sent with the contributions, summed in trainer order.
    pub(super) fn rate(&self) -> Option<f64> {
        if let [lone] = self.contributions() {
            return lone.sending.rate;
        }
        mean(self.contributions().iter().filter_map(|one| one.sending.rate))
    }

    /// The settings sent with the contributions: of each the mean over those that carry it, as of the learning rate.
    pub(super) fn settings(&self, rule: &Prepared) -> StepSettings {
        let mut merged = StepSettings::NONE;
        if self.contributions().iter().all(|one| one.sending.settings.is_empty()) {
            return merged;
        }
        for (id, tunable) in rule.tunables() {
            let all = || self.contributions().iter().flat_map(|one| &one.sending.settings);
            let values = || all().filter(|setting| setting.name == tunable.name).map(|setting| setting.value);
            if let Some(mean) = mean(values()) {
                // Rounding takes the mean of equal values beside them, and perhaps out of their range.
                let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
                merged.put(id, mean.clamp(least, most));
            }
        }
        merged
    }

    pub(super) fn contributors(&self) -> usize {
        self.contributions().len()
    }

    /// The gradients to sum, in trainer order, after the folded sum of the first ones.
    #[inline]
    pub(super) fn gradients(&self, element_type: ElementType, bytes: u32) -> Gradients<'_> {
        let mut all = Gradients::new();
        if let Some(lease) = &self.merged.sum {
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

    /// Takes the only contribution's gradient if it equals the sum: same type, and a lease that is ours to write.
    pub(super) fn take_only(&mut self, element_type: ElementType) -> Option<Lease> {
        let is_only = self.contributors() == 1 && self.merged.sum.is_none();
        let only =
            self.contributions.as_mut_slice().first_mut().filter(|one| is_only && one.element_type == element_type)?;
        only.gradient.take_if(|lease| !lease.is_foreign())
    }

    /// Folds the first contributions in trainer order, if no earlier trainer is still awaited.
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
            // Without a lease for the sum the gradients stay apart, which costs memory only.
            let _ = fold_before(self.part_mut(false), kernels, pool, (element_type, bytes), open);
        }
    }

    /// Folds every contribution, for a rule that needs the whole gradient. A lone gradient of the parameter's type is
    /// the sum as it is.
    pub(super) fn fold_all(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        element_type: ElementType,
        bytes: u32,
    ) -> Result<(), Failure> {
        if let ([lone], None) = (self.contributions(), &self.merged.sum)
            && lone.gradient().is_some_and(|gradient| gradient.element_type == element_type)
        {
            return Ok(());
        }
        fold_before(self.part_mut(false), kernels, pool, (element_type, bytes), None)
    }

    /// Takes the gradients out for a device, in summation order; the contributions' records stay.
    pub(super) fn take_gradients(&mut self, element_type: ElementType, bytes: u32) -> Vec<GradientLease> {
        let sum = self.merged.sum.take().map(|lease| GradientLease { lease, bytes, element_type });
        let loose = self.contributions.as_mut_slice().iter_mut().filter_map(|one| {
            Some(GradientLease { lease: one.gradient.take()?, bytes: one.bytes, element_type: one.element_type })
        });
        sum.into_iter().chain(loose).collect()
    }

    /// The contributions, in trainer order.
    pub(super) fn contributions(&self) -> &[Contribution] {
        self.contributions.as_slice()
    }

    /// Fills the round as its record has it: with the gradients that it counts, or their sum.
    ///
    /// # Errors
    /// Names a trainer whose gradient neither the round nor the record has.
    pub(super) fn recall(&mut self, recorded: RecordedRound) -> Result<(), String> {
        let RecordedRound { entry, counted, sum } = recorded;
        // A void round needs no gradient.
        let is_void = counted.iter().any(|one| one.header.is_void);
        let mut found = std::mem::take(&mut self.contributions);
        for Counted { header, has_gradient } in counted {
            let trainer = header.head.trainer;
            let known = found.take(trainer).filter(|one| one.sending.call == header.call);
            let is_known = known.is_some() || sum.is_some() || !has_gradient || is_void;
            if !is_known {
                return Err(format!("the gradient of trainer {trainer} that it counts is missing"));
            }
            let bytes = if has_gradient { entry.bytes } else { 0 };
            let mut one = match known {
                // A repetition of the call that was refused live may have said something else.
                Some(known) => known.counted_as(header),
                None => Contribution::recorded(header, &entry, bytes),
            };
            if sum.is_some() {
                (one.gradient, one.bytes) = (None, bytes);
            }
            self.contributions.put(one);
        }
        if sum.is_some() {
            self.merged.sum = sum;
        }
        self.drop_void(false);
        Ok(())
    }

    /// Ends the round. The sum of the next one, and its record, become the open round's.
    pub(super) fn close(&mut self) {
        self.merged = self.ahead.as_mut().map(|ahead| std::mem::take(&mut ahead.1)).unwrap_or_default();
        self.contributions.clear();
    }
}

/// Sums the contributions of the trainers before `end`, or of all.
fn fold_before(
    (contributions, merged): (&mut PieceList<Contribution>, &mut MergedRound),
    kernels: &mut dyn Kernels,
    pool: &mut Pool,
    (element_type, bytes): (ElementType, u32),
    end: Option<TrainerId>,
) -> Result<(), Failure> {
    let is_before = |one: &&Contribution| end.is_none_or(|end| one.trainer < end);
    let before = contributions.as_slice().iter().filter(is_before);
    if merged.sum.is_some() && before.clone().all(|one| one.gradient.is_none()) {
        return Ok(());
    }
    let mut fresh = pool.take(bytes)?;
    let earlier = merged.sum.iter().map(|lease| Gradient { bytes: &lease.bytes()[..bytes as usize], element_type });
    let gradients: Vec<Gradient<'_>> = earlier.chain(before.filter_map(Contribution::gradient)).collect();
    kernels.sum(element_type, &mut fresh.bytes_mut()[..bytes as usize], &gradients);
    merged.sum = Some(fresh);
    let before = contributions.as_mut_slice().iter_mut().filter(|one| end.is_none_or(|end| one.trainer < end));
    before.for_each(|one| one.gradient = None);
    Ok(())
}

/// Whether a round of these contributions ends without an update.
fn is_passed(all: &[Contribution], is_bucket: bool) -> bool {
    // Without rows for a bucket, a trainer may have some for others: that gradient is zeros.
    let has_none = |one: &Contribution| if is_bucket { one.sending.is_pass } else { one.bytes == 0 };
    all.iter().all(has_none) || all.iter().any(|one| one.sending.is_void)
}

/// The mean of finite numbers, added in order; none of none.
fn mean(numbers: impl Iterator<Item = f64> + Clone) -> Option<f64> {
    let count = u32::try_from(numbers.clone().count()).ok().filter(|count| *count > 0)?;
    let sum = numbers.clone().sum::<f64>();
    if sum.is_finite() {
        return Some(sum / f64::from(count));
    }
    // The sum of finite numbers may overflow. Dividing first rounds differently, so it is done only then.
    Some(numbers.map(|number| number / f64::from(count)).sum::<f64>().clamp(f64::MIN, f64::MAX))
}
