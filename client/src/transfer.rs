//! Pushes, pulls and sets of whole parameters, and saves of models.

use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use pserver_core::client::RequestBody;
use pserver_core::config::ParameterConfig;
use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, Sequence, Version};
use pserver_core::memory::{Lease, LoanBook, LoanIn, LoanOut, Mapping};
use pserver_core::optim::{first_nonfinite, real_at};
use pserver_core::partition::Parameter;
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Entry, Flags, Frame, Head, Kind, PushMessage};
use smallvec::SmallVec;

use super::call::{CallNumber, ParameterIndexes};
use super::carried::CarriedNumbers;
use super::client_lock::ClientGuard;
use super::control::{answer, unexpected};
use super::job::{JoinedJob, ParameterProgress, check_dense};
use super::packer::{ChunkPiece, Packer};
use super::{Client, ClientState, DestinationSlice, Extent, GradientSlice};

/// Longest wait for the coordinator when a rank is released; its answer depends on no trainer.
const RELEASE_LONGEST: Duration = Duration::from_secs(1);
/// Up to this learning rate no parameter's own factor is looked up before a push.
const RATE_UNCHECKED_MAX: f64 = 1e6;

impl Client {
    /// Sends gradients, or deltas where the job optimises on the client. It returns when every server has them for
    /// good; a call that failed may be repeated and is not applied twice. `numbers` replace configured ones, and an
    /// `Option` is the learning rate alone.
    ///
    /// # Errors
    /// The gradient that is refused, and why; or the server that did not answer before the deadline.
    pub fn push<'a>(
        &self,
        gradients: &[GradientSlice<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let _memory = self.hold(gradients.iter().map(|given| Extent::of(given.content)));
        let mut state = self.lock()?;
        let chosen = state.select(gradients, None)?;
        state.lend(|state, book| {
            let call = state.start_push(chosen, gradients, numbers, None, book)?;
            state.finish(call)
        })
    }

    /// Sends gradients and fetches the parameters with these gradients in them.
    ///
    /// # Errors
    /// As [`Client::push`] and [`Client::pull`].
    pub fn push_pull<'a>(
        &self,
        gradients: &[GradientSlice<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: &mut [DestinationSlice<'_>],
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let mut state = self.lock()?;
        let into = borrowed(into);
        let chosen = state.select(gradients, Some(&into))?;
        state.lend(|state, book| {
            let call = state.start_push(chosen, gradients, numbers, Some(into), book)?;
            state.finish(call)
        })
    }

    /// Checks gradients, their numbers and their destinations as a push does, and that all elements are finite unless
    /// servers take others; sends nothing. A program whose step is several calls checks all of them before the first
    /// one, so that servers have no part of a step that is refused.
    ///
    /// # Errors
    /// The gradient that a push would be refused for, and why.
    pub fn check_push<'a>(
        &self,
        gradients: &[GradientSlice<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: Option<&mut [DestinationSlice<'_>]>,
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let takes_nonfinite = {
            let mut state = self.lock()?;
            let job = state.ready()?;
            let into = into.map(borrowed);
            let chosen = check_gradients(job, gradients, into.as_deref(), true)?;
            job.check_carried(&chosen.parameters, numbers)?;
            let rate = numbers.rate;
            for index in chosen.parameters.iter().filter(|_| rate.is_some_and(|rate| RATE_UNCHECKED_MAX < rate)) {
                let declaration = job.chosen(*index).declaration();
                let config = ParameterConfig::decode(&declaration.config)?;
                config.rule.check_rate(rate.unwrap_or_default(), declaration.element_type)?;
            }
            job.operator.takes_nonfinite
        };
        // Without the lock: other threads' calls go on.
        if takes_nonfinite { Ok(()) } else { gradients.iter().try_for_each(check_finite) }
    }

    /// [`check_push`](Self::check_push) for the values of rows.
    ///
    /// # Errors
    /// Names the parameter, the element and its value; or the numbers.
    pub fn check_rows<'a>(
        &self,
        gradient: &GradientSlice<'_>,
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let takes_nonfinite = {
            let mut state = self.lock()?;
            let job = state.ready()?;
            let index = job.parameter(gradient.name, &mut None)?;
            job.check_carried(&[index], numbers)?;
            job.operator.takes_nonfinite
        };
        if takes_nonfinite { Ok(()) } else { check_finite(gradient) }
    }

    /// Fetches parameters. In sync mode each has all rounds in it that this trainer has pushed. After a failure
    /// the contents of the places are unspecified.
    ///
    /// # Errors
    /// The parameter that is refused, and why; or the server or trainer that was waited for until the deadline.
    pub fn pull(&self, into: &mut [DestinationSlice<'_>]) -> Result<(), Failure> {
        self.pull_version(into, Version(0)).map(drop)
    }

    /// As [`Client::pull`], but waits until each parameter has at least this many updates in it, whoever sent the
    /// gradients. Returns the most updates that a chunk of them has: more than `least` where a parameter has moved on.
    ///
    /// # Errors
    /// As [`Client::pull`].
    pub fn pull_version(&self, into: &mut [DestinationSlice<'_>], least: Version) -> Result<Version, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        state.lend(|state, book| {
            let call = state.start_pull(borrowed(into), least, None, book)?;
            state.finish_latest(call)
        })
    }

    /// Replaces parameters by the values given. The count of updates and the optimizer's state stay.
    ///
    /// # Errors
    /// As [`Client::push`].
    pub fn set(&self, values: &[GradientSlice<'_>]) -> Result<(), Failure> {
        let _memory = self.hold(values.iter().map(|given| Extent::of(given.content)));
        let mut state = self.lock()?;
        state.ready()?;
        state.lend(|state, book| {
            let call = state.start_set(values, book)?;
            state.finish(call)
        })
    }

    /// Rounds of the job, where a trainer goes on after an earlier process of its rank has ended: the fewest that a
    /// parameter has which gets a gradient in each step. One that is more than two rounds behind the others is none of
    /// these, such as a frozen one; it goes on from its own count. In sync mode this trainer counts every other
    /// parameter from there, so that its next gradients are those of one step; servers acknowledge gradients of rounds
    /// that a parameter has already, and apply nothing. For a client that has pushed nothing.
    ///
    /// # Errors
    /// When the job is not in sync mode, or a server does not answer before the deadline.
    pub fn resume_rounds(&self) -> Result<u64, Failure> {
        let mut state = self.lock()?;
        let job = state.ready()?;
        if !job.counts_rounds() {
            let mode = job.sharing().mode;
            return Err(Failure::call(format!("found a job in mode {mode:?}; expected Sync, which has rounds")));
        }
        let of_flows = job.catalogue().iter().filter(|parameter| parameter.declaration().hosted.is_none());
        let all: Vec<_> = of_flows.map(|parameter| parameter.index()).collect();
        state.learn_rounds(&all)?;
        let job = state.job.as_mut().expect("the job is ready");
        let round = |index: &ParameterIndex| job.progress(*index).round.unwrap_or_default();
        let most = all.iter().map(round).max().unwrap_or_default();
        // One round may be open, and the next one begun.
        let stepping: Vec<_> = all.into_iter().filter(|index| most.0 <= round(index).0 + 2).collect();
        let fewest = stepping.iter().map(round).min().unwrap_or_default();
        stepping.iter().for_each(|index| job.progress_mut(*index).round = Some(fewest));
        Ok(fewest.0)
    }

    /// The rounds that parameters of a hosted program have: how many items the program has taken, or sent.
    ///
    /// # Errors
    /// Names a parameter that is of no hosted program, or the server that did not answer before the deadline.
    pub fn items(&self, names: &[&str]) -> Result<Vec<u64>, Failure> {
        let mut state = self.lock()?;
        let chosen = state.ready()?.hosted(names)?;
        chosen.iter().for_each(|index| state.ready_job().progress_mut(*index).round = None);
        state.learn_rounds(&chosen)?;
        let job = state.ready_job();
        Ok(chosen.iter().map(|index| job.progress(*index).round.unwrap_or_default().0).collect())
    }

    /// Counts what this trainer sends for parameters from here: so many rounds, or items, are sent. Servers
    /// count no second time what they have already.
    ///
    /// # Errors
    /// Names an unknown parameter.
    pub fn resume_at(&self, names: &[&str], sent: u64) -> Result<(), Failure> {
        let mut state = self.lock()?;
        let job = state.ready()?;
        let chosen = names.iter().map(|name| job.parameter(name, &mut None)).collect::<Result<Vec<_>, _>>()?;
        chosen.iter().for_each(|index| state.ready_job().progress_mut(*index).round = Some(Round(sent)));
        Ok(())
    }

    /// Saves the model on server 0's machine, below its model directory; returns where, and its bytes.
    ///
    /// # Errors
    /// What is wrong with the path, or why the disk refused.
    pub fn save_model(&self, path: &str) -> Result<(String, u64), Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        let what = format!("saving the model as \"{}\"", path.chars().take(200).collect::<String>());
        // All parameters go through one disk, so a save may take ten times the deadline of a call.
        let limit = state.options.deadline * 10;
        let times = (state.engine.now() + limit, limit);
        match answer(&state.control_within(Request::Save(path.to_owned()), times, &what)?)? {
            Answer::Saved(saved) => Ok((saved.path, saved.bytes)),
            other => Err(unexpected(&other)),
        }
    }

    /// Says that this trainer is finished: the others do not wait for it any more.
    ///
    /// # Errors
    /// When a server does not answer before the deadline.
    pub fn leave(&self) -> Result<(), Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        state.finish_all();
        let leave = |(_, lane)| (lane, Frame::bare(Head::new(Kind::Leave)), RequestBody::default());
        let frames = state.ready_job().lanes().map(leave).collect();
        // The calls that were waited for had deadlines of their own.
        state.until = state.engine.now() + state.options.deadline;
        state.ask_all(frames, "leaving the job")?;
        state.control(Request::Leave(true), "leaving the job").map(drop)
    }

    /// [`leave`](Self::leave) at the end of a program: where this trainer has pushed something, and server 0 is
    /// connected. Nothing waits for the gradients of a trainer that has sent none.
    ///
    /// # Errors
    /// As [`leave`](Self::leave).
    pub fn leave_at_end(&self) -> Result<(), Failure> {
        let takes_part = {
            let state = self.lock()?;
            state.engine.is_with_coordinator() && state.job.as_ref().is_some_and(JoinedJob::has_pushed)
        };
        if takes_part { self.leave() } else { Ok(()) }
    }
}

impl ClientGuard<'_> {
    /// Gives the rank up, where the coordinator is connected and answers soon; else the rank is free after the grace
    /// time of its servers.
    pub(super) fn release_rank(&mut self) {
        if self.job.is_none() || self.options.is_reader || !self.engine.is_with_coordinator() {
            return;
        }
        let times = (self.engine.now() + RELEASE_LONGEST, RELEASE_LONGEST);
        let _ = self.control_within(Request::Release(true), times, "releasing the rank");
    }

    /// Waits until the parameters are initialised, checks gradients and destinations, and learns the rounds of the
    /// parameters.
    pub(super) fn select(
        &mut self,
        gradients: &[GradientSlice<'_>],
        into: Option<&[FetchRequest<'_>]>,
    ) -> Result<SelectedParameters, Failure> {
        let chosen = check_gradients(self.ready()?, gradients, into, true)?;
        self.learn_rounds(&chosen.parameters)?;
        Ok(chosen)
    }

    /// Starts a push without gradients for parameters, of which each round counts one of every trainer.
    pub(super) fn start_pass(&mut self, names: &[&str], is_void: bool) -> Result<CallNumber, Failure> {
        let job = self.ready()?;
        if !job.counts_rounds() {
            let mode = job.sharing().mode;
            return Err(Failure::call(format!("a push without gradients in mode {mode:?}; expected mode Sync")));
        }
        let mut last = None;
        let chosen: Vec<_> = names.iter().map(|name| job.parameter(name, &mut last)).collect::<Result<_, _>>()?;
        job.check_once(&chosen)?;
        self.learn_rounds(&chosen)?;
        let sequence = self.open(Kind::Push, &chosen, (0, 0))?;
        let message = PushMessage { is_void, is_pass: true, ..PushMessage::default() }.encode_to_vec();
        let packer = self.packer(Kind::Push, &chosen).with(Flags::default(), message);
        let orders = chosen.into_iter().map(|index| ParameterTransfer { index, given: None, place: None, half: None });
        Ok(self.pack(packer, orders, &LoanBook::open(), |progress| {
            (progress.round.unwrap_or_default(), progress.push_again.unwrap_or(sequence))
        }))
    }

    /// Requests the rounds of parameters that this trainer has not pulled yet; sync mode needs them before a push.
    pub(super) fn learn_rounds(&mut self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let job = self.ready_job();
        let is_unknown = |index: &ParameterIndex| {
            let progress = job.progress(*index);
            progress.counts_rounds && progress.round.is_none()
        };
        if !chosen.iter().any(is_unknown) {
            return Ok(());
        }
        let unknown: Vec<_> = chosen.iter().copied().filter(is_unknown).collect();
        self.open(Kind::Pull, &unknown, (0, 0))?;
        let packer = self.packer(Kind::Pull, &unknown).without_values();
        let orders = unknown.into_iter().map(|index| ParameterTransfer { index, given: None, place: None, half: None });
        let call = self.pack(packer, orders, &LoanBook::open(), |_| (Round(0), Sequence(0)));
        self.finish(call)
    }
}

impl ClientState {
    /// Starts to send gradients for the parameters that [`ClientGuard::select`] found, and to fetch these when there
    /// are places for them.
    pub(super) fn start_push<'env>(
        &mut self,
        chosen: SelectedParameters,
        gradients: &[GradientSlice<'env>],
        numbers: CarriedNumbers<'_>,
        into: Option<FetchRequests<'env>>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        self.job.as_mut().expect("the job is ready").check_carried(&chosen.parameters, numbers)?;
        let has_places = into.is_some();
        let SelectedParameters { parameters: chosen, sent, held, sums } = chosen;
        let mut places = self.places(into.unwrap_or_default(), &chosen, sums)?.into_iter();
        let flags = if has_places { Flags::WANT_VALUE } else { Flags::default() };
        let sequence = self.open(Kind::Push, &chosen, (sent, if has_places { held } else { 0 }))?;
        let packer = self.packer(Kind::Push, &chosen).with(flags, numbers.message());
        let packer = packer.summed(sums).with_controls(self.own_rates(&chosen, numbers));
        let orders = gradients.iter().zip(chosen).map(|(given, index)| {
            let (place, half) = places.next().unzip();
            ParameterTransfer { index, given: Some(*given), place, half: half.flatten() }
        });
        Ok(self.pack(packer, orders, book, |progress| {
            (progress.round.unwrap_or_default(), progress.push_again.unwrap_or(sequence))
        }))
    }

    /// Starts to fetch parameters, each with at least this many updates; with `summed`, frames have these flags, and
    /// the values are summed.
    pub(super) fn start_pull<'env>(
        &mut self,
        into: FetchRequests<'env>,
        least: Version,
        summed: Option<Flags>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let SelectedParameters { parameters: chosen, held: received, .. } =
            check_destinations(self.ready_job(), &into)?;
        let places = self.places(into, &chosen, summed.is_some())?;
        self.open(Kind::Pull, &chosen, (0, received))?;
        let packer = self.packer(Kind::Pull, &chosen).summed(summed.is_some());
        let packer = packer.with(summed.unwrap_or_default(), Vec::new());
        let order = |((place, half), index)| ParameterTransfer { index, given: None, place: Some(place), half };
        let orders = places.into_iter().zip(chosen).map(order);
        Ok(self.pack(packer, orders, book, |progress| {
            (progress.round.unwrap_or_default().max(Round(least.0)), Sequence(0))
        }))
    }

    /// Starts to replace values.
    pub(super) fn start_set<'env>(
        &mut self,
        values: &[GradientSlice<'env>],
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let SelectedParameters { parameters: chosen, sent, .. } =
            check_gradients(self.ready_job(), values, None, false)?;
        let sequence = self.open(Kind::Set, &chosen, (sent, 0))?;
        let packer = self.packer(Kind::Set, &chosen);
        let orders = values.iter().zip(chosen).map(|(given, index)| ParameterTransfer {
            index,
            given: Some(*given),
            place: None,
            half: None,
        });
        Ok(self.pack(packer, orders, book, |progress| (Round(0), progress.set_again.unwrap_or(sequence))))
    }

    /// Packs the frames of the open call, and sends each as soon as it is full.
    fn pack<'env>(
        &mut self,
        mut packer: Packer,
        orders: impl Iterator<Item = ParameterTransfer<'env>>,
        book: &LoanBook<'env>,
        numbers: impl Fn(&ParameterProgress) -> (Round, Sequence),
    ) -> CallNumber {
        let has_buffers = !self.memory.caller.is_empty();
        for order in orders {
            let job = self.ready_job();
            let (_, sequence) = numbers(job.progress(order.index));
            let (round, _) = numbers(job.progress(job.counted_by(order.index)));
            let count = job.chosen(order.index).chunk_count();
            let within = order.given.filter(|_| has_buffers).and_then(|given| self.memory.caller.around(given.content));
            let back = match &order.place {
                Some(ValueTarget::Caller(all, _)) if has_buffers => self.memory.caller.around(all),
                _ => None,
            };
            for buffer in within.iter().chain(&back) {
                self.uses(buffer);
            }
            let mut cut = ChunkCutter::new(order, (within, back), book);
            for chunk in (0..count).map(ChunkIndex) {
                let job = self.job.as_ref().expect("the job is ready");
                let parameter = job.chosen(cut.index);
                let lane = job.lane(parameter.shard_of(chunk));
                if let Some(full) = packer.add(lane, cut.next(parameter, chunk, round, sequence)) {
                    self.send_frame(lane, full);
                    // A lane's send window is bounded: completed sends free it while the rest is packed.
                    self.engine.take_in();
                }
            }
        }
        self.send_rest(packer)
    }

    /// [`pack`](Self::pack) for a parameter without contents.
    pub(super) fn pack_bare<'env>(
        &mut self,
        packer: Packer,
        index: ParameterIndex,
        book: &LoanBook<'env>,
        numbers: (Round, Sequence),
    ) -> CallNumber {
        let order = ParameterTransfer { index, given: None, place: None, half: None };
        self.pack(packer, std::iter::once(order), book, |_| numbers)
    }

    /// Sends the last frames of the open call.
    pub(super) fn send_rest(&mut self, packer: Packer) -> CallNumber {
        for (lane, packed) in packer.rest() {
            self.send_frame(lane, packed);
        }
        self.close()
    }

    /// Reserves a destination for every value before any frame of the call is sent.
    fn places<'env>(
        &mut self,
        into: FetchRequests<'env>,
        chosen: &[ParameterIndex],
        sums: bool,
    ) -> Result<SmallVec<[ReservedValue<'env>; 1]>, Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let mut places = SmallVec::with_capacity(into.len());
        let together = into.iter().filter_map(|one| one.place.as_ref()).map(|place| place.len()).sum();
        // Values that are summed are read at once, so they do not go past the caches.
        let together = if sums { 0 } else { together };
        for (FetchRequest { place, half, .. }, index) in into.into_iter().zip(chosen) {
            if let Some(place) = place {
                job.refuse_viewed(&[*index])?;
                places.push((ValueTarget::Caller(place, together), half));
                continue;
            }
            let parameter = job.chosen(*index);
            let spans = (0..parameter.chunk_count()).map(|chunk| parameter.span(ChunkIndex(chunk)));
            let bytes = spans.map(|span| halved(span.expect("it is one of its chunks").bytes, half));
            let leases = bytes.map(|bytes| self.memory.views.take(bytes)).collect::<Result<Vec<_>, _>>()?;
            places.push((ValueTarget::Leased(leases.into_iter()), half));
        }
        Ok(places)
    }

    pub(super) fn packer(&self, kind: Kind, chosen: &[ParameterIndex]) -> Packer {
        let job = self.job.as_ref().expect("the job is ready");
        Packer::new(kind, job.settings.chunk_bytes, job.lane_count(), chosen.len())
    }
}

/// The transfer of one parameter in a call.
struct ParameterTransfer<'env> {
    index: ParameterIndex,
    given: Option<GradientSlice<'env>>,
    place: Option<ValueTarget<'env>>,
    /// Half-precision type of the received value; none for the parameter's own type.
    half: Option<Half>,
}

/// A destination, and the half-precision type of the value.
type ReservedValue<'env> = (ValueTarget<'env>, Option<Half>);

/// Destination of a value.
enum ValueTarget<'env> {
    /// Into the caller's memory, with the bytes of all such memory of the call.
    Caller(&'env mut [u8], usize),
    /// A view: a lease for each chunk, unused where the value can stay in the server's memory.
    Leased(std::vec::IntoIter<Lease>),
}

/// Cuts the transfer of a parameter into chunks; holds the remaining part.
struct ChunkCutter<'book, 'env> {
    index: ParameterIndex,
    element_type: Option<ElementType>,
    content: &'env [u8],
    /// The buffer that contains the gradient.
    within: Option<Arc<Mapping>>,
    /// The buffer that contains the destination.
    back: Option<Arc<Mapping>>,
    place: Option<ValueTarget<'env>>,
    half: Option<Half>,
    book: &'book LoanBook<'env>,
}

impl<'book, 'env> ChunkCutter<'book, 'env> {
    fn new(
        order: ParameterTransfer<'env>,
        (within, back): (Option<Arc<Mapping>>, Option<Arc<Mapping>>),
        book: &'book LoanBook<'env>,
    ) -> Self {
        Self {
            index: order.index,
            element_type: order.given.map(|given| given.element_type),
            content: order.given.map_or(&[], |given| given.content),
            within,
            back,
            place: order.place,
            half: order.half,
            book,
        }
    }

    #[inline]
    fn next(&mut self, parameter: &Parameter, chunk: ChunkIndex, round: Round, sequence: Sequence) -> ChunkPiece {
        let declared = parameter.declaration().element_type;
        let span = parameter.span(chunk).expect("the chunk is one of the parameter's");
        let id = ChunkId { parameter: self.index, chunk };
        let (into, half) = (self.into(halved(span.bytes, self.half)), self.half);
        let Some(element_type) = self.element_type else {
            let entry = Entry { half, ..Entry::bare(id, round, declared) };
            return ChunkPiece { entry, payload: None, into, sequence };
        };
        let elements = u64::from(span.bytes) / declared.bytes();
        let length = usize::try_from(elements * element_type.bytes()).expect("it is within a slice");
        let (content, after) = self.content.split_at(length);
        self.content = after;
        let entry = Entry { half, ..Entry::with_payload(id, round, element_type, content) };
        let loan = self.book.read(content);
        let loan = self.within.iter().fold(loan, LoanOut::within);
        ChunkPiece { entry, payload: Some(Outgoing::Loan(loan)), into, sequence }
    }

    /// The destination of the next chunk's value.
    fn into(&mut self, bytes: u32) -> Option<Incoming> {
        match self.place.take()? {
            ValueTarget::Caller(all, together) => {
                let (one, after) = all.split_at_mut(bytes as usize);
                self.place = Some(ValueTarget::Caller(after, together));
                let loan = self.book.write(one).of(together);
                Some(Incoming::Loan(self.back.iter().fold(loan, LoanIn::within)))
            }
            ValueTarget::Leased(mut leases) => {
                let lease = leases.next().expect("there is one for each chunk");
                self.place = Some(ValueTarget::Leased(leases));
                Some(Incoming::Chunk { lease, bytes })
            }
        }
    }
}

/// The pulls of a call.
pub(super) type FetchRequests<'env> = SmallVec<[FetchRequest<'env>; 1]>;

/// A pull of one parameter, into the caller's memory or for a view.
pub(super) struct FetchRequest<'env> {
    pub(super) name: &'env str,
    pub(super) place: Option<&'env mut [u8]>,
    pub(super) half: Option<Half>,
}

impl<'env> FetchRequest<'env> {
    /// Into the caller's memory.
    pub(super) fn all(into: Vec<DestinationSlice<'env>>) -> FetchRequests<'env> {
        let fetch = |DestinationSlice { name, content, half }| FetchRequest { name, place: Some(content), half };
        into.into_iter().map(fetch).collect()
    }
}

/// The destinations, borrowed for a blocking call.
fn borrowed<'a>(into: &'a mut [DestinationSlice<'_>]) -> FetchRequests<'a> {
    let fetch = |one: &'a mut DestinationSlice<'_>| FetchRequest {
        name: one.name,
        place: Some(&mut *one.content),
        half: one.half,
    };
    into.iter_mut().map(fetch).collect()
}

/// Refuses a gradient with an element that is NaN or infinite.
fn check_finite(given: &GradientSlice<'_>) -> Result<(), Failure> {
    let Some(at) = first_nonfinite(given.element_type, given.content) else { return Ok(()) };
    let value = real_at(given.element_type, given.content, at).unwrap_or(f64::NAN);
    Err(Failure::call(format!(
        "parameter \"{}\": the gradient has {value} ({}) as element {at}; expected finite numbers: a corrected \
         gradient (a smaller learning rate or a limit of the norm keeps a training from diverging), or servers with \
         --nonfinite skip or accept",
        given.name, given.element_type
    )))
}

/// The parameters of a call's gradients or values.
pub(super) struct SelectedParameters {
    pub(super) parameters: ParameterIndexes,
    /// Payload bytes of the gradients, and of the values to receive.
    sent: u64,
    held: u64,
    /// Whether the values are summed.
    sums: bool,
}

impl SelectedParameters {
    fn with_capacity(parameters: usize) -> Self {
        Self { parameters: ParameterIndexes::with_capacity(parameters), sent: 0, held: 0, sums: false }
    }

    /// The same for a call that sums the values, if so.
    pub(super) fn summed(self, sums: bool) -> Self {
        Self { sums, ..self }
    }
}

/// Checks everything about gradients or values before any of the call is sent, and that places are for the same
/// parameters; says which these are. One pass: of many small parameters each is looked up in memory that is not in
/// cache.
fn check_gradients(
    job: &mut JoinedJob,
    all: &[GradientSlice<'_>],
    into: Option<&[FetchRequest<'_>]>,
    is_gradient: bool,
) -> Result<SelectedParameters, Failure> {
    let mut chosen = SelectedParameters::with_capacity(all.len());
    let (mut last, mut misplaced) = (None, None);
    let mut is_alike = into.is_none_or(|into| into.len() == all.len());
    let question = job.next_lookup();
    for (at, given) in all.iter().enumerate() {
        let index = job.parameter(given.name, &mut last)?;
        let parameter = job.chosen(index);
        check_gradient(parameter, given, is_gradient)?;
        if let Some(wanted) = into.and_then(|into| into.get(at)) {
            // Mostly both are the caller's one name.
            is_alike &= std::ptr::eq(given.name, wanted.name) || given.name == wanted.name;
            misplaced = misplaced.or_else(|| check_destination(parameter, wanted).err());
        }
        chosen.sent += bytes(given.content.len());
        chosen.held += value_bytes(parameter, into.and_then(|into| into.get(at)).and_then(|wanted| wanted.half));
        job.check_first(index, question)?;
        chosen.parameters.push(index);
    }
    if !is_alike {
        return Err(Failure::call("push_pull takes the same parameters, in the same order, on both sides"));
    }
    misplaced.map_or(Ok(chosen), Err)
}

fn check_gradient(parameter: &Parameter, given: &GradientSlice<'_>, is_gradient: bool) -> Result<(), Failure> {
    let declaration = parameter.declaration();
    check_dense(parameter)?;
    let (found, declared) = (given.element_type, declaration.element_type);
    if found != declared && !(is_gradient && found.is_gradient_for(declared)) {
        return Err(Failure::call(format!("parameter \"{}\": element type {found}; expected {declared}", given.name)));
    }
    let expected = declaration.bytes / declared.bytes() * found.bytes();
    if bytes(given.content.len()) == expected {
        return Ok(());
    }
    Err(Failure::call(format!(
        "parameter \"{}\": {} bytes; expected {expected} bytes of {found}",
        given.name,
        given.content.len()
    )))
}

/// Checks every place for a value; says which parameters they are for.
fn check_destinations(job: &mut JoinedJob, into: &[FetchRequest<'_>]) -> Result<SelectedParameters, Failure> {
    let mut chosen = SelectedParameters::with_capacity(into.len());
    let mut last = None;
    for wanted in into {
        let index = job.parameter(wanted.name, &mut last)?;
        check_destination(job.chosen(index), wanted)?;
        chosen.held += value_bytes(job.chosen(index), wanted.half);
        chosen.parameters.push(index);
    }
    job.check_once(&chosen.parameters)?;
    Ok(chosen)
}

fn check_destination(parameter: &Parameter, wanted: &FetchRequest<'_>) -> Result<(), Failure> {
    check_dense(parameter)?;
    let name = wanted.name;
    check_half(name, parameter.declaration().element_type, wanted.half)?;
    let expected = value_bytes(parameter, wanted.half);
    match wanted.place.as_ref().map(|place| place.len()) {
        Some(found) if bytes(found) != expected => {
            Err(Failure::call(format!("parameter \"{name}\": a destination of {found} bytes; expected {expected}")))
        }
        _ => Ok(()),
    }
}

/// Refuses half precision for parameters other than float32.
pub fn check_half(name: &str, declared: ElementType, half: Option<Half>) -> Result<(), Failure> {
    match half {
        Some(half) if !declared.has_halves() => Err(Failure::call(format!(
            "parameter \"{name}\": its value as {half}; expected {declared}, as only float32 converts to half precision"
        ))),
        _ => Ok(()),
    }
}

/// Bytes of a parameter's value in the requested type.
fn value_bytes(parameter: &Parameter, half: Option<Half>) -> u64 {
    let bytes = parameter.declaration().bytes;
    if half.is_some() { bytes / 2 } else { bytes }
}

/// Bytes of a chunk's value in the requested type.
fn halved(bytes: u32, half: Option<Half>) -> u32 {
    if half.is_some() { bytes / 2 } else { bytes }
}

fn bytes(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
