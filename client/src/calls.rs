//! Calls in progress: their order, their end, and the failure of dependent calls.
//!
//! Servers recognise a repeated call by its sequence number, which must grow for each chunk. Calls about one parameter
//! therefore leave one after the other, each after the answer to its predecessor; calls about different parameters are
//! independent. When a call fails, the calls behind it fail too, and the next call reuses its number and its round, so
//! that servers recognise it as a repetition.
//!
//! Requests to the coordinator, and requests that initialise servers, are control calls about no parameter.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Thread, ThreadId};
use std::time::Duration;

use prost::Message;
use pserver_core::client::{AwaitedAnswer, Finished, LaneId, Refused, RequestBody, ValueSum};
use pserver_core::error::{CallEnd, Failure};
use pserver_core::ids::{ParameterIndex, Round, Sequence, Ticket, Version};
use pserver_core::memory::Mapping;
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{ControlAnswer, Entry, Frame, Kind};
use smallvec::SmallVec;

use super::buffers::HeldBuffers;
use super::call::{Call, CallDeadline, CallNumber, CallSubject, ParameterIndexes, ViewChunk};
use super::cancels::cancelled;
use super::client_lock::{ClientGuard, reason};
use super::engine::CLOSED;
use super::job::{JoinedJob, ServerQuery};
use super::packer::PackedFrame;
use super::{ClientState, DEADLINE_DEFAULT, TransferredBytes};

/// Limit of calls in one client whose results are not taken.
const CALLS_MAX: usize = 4096;

impl ClientState {
    /// Opens a call about distinct parameters. `bytes` are the payload bytes to send and to receive.
    pub(super) fn open(
        &mut self,
        kind: Kind,
        parameters: &[ParameterIndex],
        bytes: (u64, u64),
    ) -> Result<Sequence, Failure> {
        if self.calls.len() >= CALLS_MAX {
            return Err(Failure::call(format!(
                "{CALLS_MAX} calls were started and not waited for; expected a wait before the next"
            )));
        }
        let job = self.job.as_mut().expect("the job is ready");
        self.last_call += 1;
        let number = CallNumber(self.last_call);
        let mut behind = Vec::new();
        for index in parameters {
            let progress = job.progress_mut(*index);
            if let Some(earlier) = progress.busy.replace(number)
                && !behind.contains(&earlier)
            {
                behind.push(earlier);
            }
            if kind == Kind::Push {
                progress.round = progress.round.map(|round| Round(round.0 + 1));
                progress.pushed = Some(number);
            }
        }
        let sequence = if kind == Kind::Pull { Sequence(0) } else { job.next_sequence() };
        let (opened, limit) = (self.engine.now(), self.options.deadline);
        let subject =
            CallSubject { kind, what: String::new(), parameters: parameters.into(), sequence, is_repeated_alike: true };
        let mut call = Call::new(number, subject, CallDeadline::new(opened, (opened + limit, limit)));
        call.requests.behind = behind;
        let (sent, received) = bytes;
        call.moved = TransferredBytes { sent, received };
        self.calls.push(call);
        Ok(sequence)
    }

    /// Starts a control call to the coordinator or servers. `times` are its deadline, and the time from its start to
    /// it.
    pub(super) fn question(
        &mut self,
        what: &str,
        times: (Now, Duration),
        frames: Vec<(LaneId, Frame, RequestBody)>,
    ) -> CallNumber {
        self.last_call += 1;
        let number = CallNumber(self.last_call);
        let (kind, what, sequence) = (Kind::Control, what.to_owned(), Sequence(0));
        let subject =
            CallSubject { kind, what, parameters: ParameterIndexes::new(), sequence, is_repeated_alike: true };
        self.calls.push(Call::new(number, subject, CallDeadline::new(self.engine.now(), times)));
        for (lane, frame, body) in frames {
            self.send_frame(lane, PackedFrame::new(frame, body));
        }
        self.close()
    }

    /// Gives a repetition of the call that was opened last a number of its own.
    pub(super) fn forget_repetition(&mut self) {
        self.calls.last_mut().expect("a call is open").subject.is_repeated_alike = false;
    }

    /// Sends a packed frame of the call that was opened last, or holds it behind earlier calls.
    pub(super) fn send_frame(&mut self, lane: LaneId, packed: PackedFrame) {
        let requests = &mut self.calls.last_mut().expect("a call is open").requests;
        if !requests.behind.is_empty() {
            requests.held.push((lane, packed));
            return;
        }
        requests.note_asked(self.engine.ask(lane, packed.frame, packed.body));
        self.engine.flush();
    }

    /// Adds a packed frame to the second phase of the call that was opened last.
    pub(super) fn send_frame_after(&mut self, lane: LaneId, packed: PackedFrame) {
        self.calls.last_mut().expect("a call is open").requests.after.push((lane, packed));
    }

    /// Marks the call that was opened last as packed.
    pub(super) fn close(&mut self) -> CallNumber {
        let call = self.calls.last_mut().expect("a call is open");
        call.requests.is_whole = true;
        let number = call.number;
        if call.is_over() {
            // A call without frames is over at once.
            self.end(number);
        }
        number
    }

    /// Whether some call is not over.
    pub(super) fn is_running(&self) -> bool {
        self.calls.iter().any(|call| !call.is_over())
    }

    /// Whether a call is over or unknown.
    pub(super) fn is_over(&self, number: CallNumber) -> bool {
        self.position(number).is_none_or(|at| self.calls[at].is_over())
    }

    /// Adds a registered buffer to the call that was opened last.
    pub(super) fn uses(&mut self, buffer: &Arc<Mapping>) {
        let buffers = &mut self.calls.last_mut().expect("a call is open").buffers;
        if !buffers.iter().any(|known| Arc::ptr_eq(known, buffer)) {
            buffers.push(Arc::clone(buffer));
        }
    }

    /// Leaves a call to the driver thread. Its buffers are held until its result is taken.
    pub(super) fn detach(&mut self, number: CallNumber, memory: HeldBuffers) {
        if let Some(at) = self.position(number) {
            self.calls[at].memory = memory;
            self.calls[at].is_detached = true;
        }
    }

    /// Adds a thread to unpark when the call is over.
    pub(super) fn add_waiter(&mut self, number: CallNumber, thread: Thread) {
        if let Some(at) = self.position(number) {
            self.calls[at].waiters.push(thread);
        }
    }

    /// Removes a thread that holds the lock again.
    pub(super) fn remove_waiter(&mut self, number: CallNumber, thread: ThreadId) {
        if let Some(at) = self.position(number) {
            self.calls[at].waiters.retain(|waiter| waiter.id() != thread);
        }
    }

    /// A parked thread whose call is not over.
    pub(super) fn next_waiter(&mut self) -> Option<Thread> {
        let mut running = self.calls.iter().filter(|call| !call.is_over());
        running.find_map(|call| call.waiters.first().cloned())
    }

    /// The sequence number of a push in progress, by parameter.
    pub(super) fn push_sequences(&self, number: CallNumber) -> Vec<(ParameterIndex, Sequence)> {
        let call = &self.calls[self.position(number).expect("the call is known")];
        let job = self.job.as_ref().expect("the job is ready");
        let again = |index: &ParameterIndex| job.progress(*index).push_again;
        call.subject.parameters.iter().map(|index| (*index, again(index).unwrap_or(call.subject.sequence))).collect()
    }

    /// Fails a push whose gradients were applied and whose view failed. A repetition gets the same sequence numbers,
    /// unless another push about a parameter has begun meanwhile.
    pub(super) fn undo_push(
        &mut self,
        number: CallNumber,
        numbers: &[(ParameterIndex, Sequence)],
        failure: Failure,
    ) -> Failure {
        let job = self.ready_job();
        if numbers.iter().any(|(index, _)| job.progress(*index).pushed != Some(number)) {
            let next = "the gradients are applied and must not be sent again; paddle_get_params_view fetches the view";
            return Failure::call(format!("{failure}; {next}"));
        }
        for (index, sequence) in numbers {
            let progress = job.progress_mut(*index);
            progress.push_again = Some(*sequence);
            progress.round = progress.round.map(|round| Round(round.0 - 1));
        }
        failure
    }

    /// Takes the result of a call that is over.
    pub(super) fn take(&mut self, number: CallNumber) -> Option<Result<(), Failure>> {
        Some(self.take_call(number)?.map(drop))
    }

    fn take_call(&mut self, number: CallNumber) -> Option<Result<Call, Failure>> {
        let at = self.position(number)?;
        if !self.calls[at].is_over() {
            return None;
        }
        let mut call = self.calls.remove(at);
        Some(call.outcome.failure.take().map_or(Ok(call), Err))
    }

    /// Drives all calls once and waits for at most `longest`. A panic fails every call.
    pub(super) fn advance(&mut self, longest: Duration) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.turn(longest))) {
            self.fail_all(panic.as_ref());
        }
    }

    fn turn(&mut self, longest: Duration) {
        let now = self.engine.tick();
        self.end_cancelled();
        self.query_servers(now);
        let running = self.calls.iter().filter(|call| call.is_pending());
        let left = running.map(|call| call.deadline.due(now)).min();
        if left.is_some_and(|left| left.is_zero()) {
            self.expire(now);
        } else {
            // A call that ended during packing may unblock another.
            let longest = if self.engine.has_finished() { Duration::ZERO } else { longest };
            self.engine.turn(left.unwrap_or(Duration::MAX).min(longest));
        }
        self.give_up_absent();
        self.settle();
    }

    /// Ends calls that wait for a server which has refused connections for longer than `server_absence`.
    fn give_up_absent(&mut self) {
        let limit = self.options.server_absence;
        if !self.engine.has_absent(limit) {
            return;
        }
        for at in 0..self.calls.len() {
            let call = &self.calls[at];
            if !call.is_pending() {
                continue;
            }
            if let Some(absent) = self.engine.absent(limit, call.deadline.opened, &call.requests.tickets()) {
                let (coordinator, seconds) = (&self.options.coordinator, limit.as_secs_f64());
                let text = format!(
                    "{absent}, in the job whose server 0 is at {coordinator}; a call waits {seconds:.1} s for a server \
                     that is started again (server_absence, PSERVER_SERVER_ABSENCE)"
                );
                self.give_up(at, &Failure::ended(CallEnd::ServerLost, text));
            }
        }
    }

    /// Drops the transport and fails every call after a panic. The remaining state is consistent.
    pub(super) fn fail_all(&mut self, panic: &(dyn Any + Send)) -> Failure {
        let text = if self.engine.drop_closed() {
            CLOSED.to_owned()
        } else {
            format!("a bug in libpaddle_pserver, please report it: {}", reason(panic))
        };
        let failure = Failure::Call(text);
        self.engine.break_off(&failure);
        self.engine.take_finished().for_each(drop);
        self.over.clear();
        self.search = ServerQuery::default();
        self.asked.clear();
        let mut ended = Vec::new();
        for call in self.calls.iter_mut().filter(|call| !call.is_over()) {
            call.requests.drop_held();
            (call.requests.open, call.requests.is_whole) = (0, true);
            call.outcome.failure.get_or_insert_with(|| failure.clone());
            ended.push(call.number);
        }
        for number in ended {
            // The cause of the panic is unknown, so concluding may panic too. The call is over all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| self.conclude(number)));
        }
        failure
    }

    /// Starts to abort calls.
    fn begin_to_abort(&mut self, numbers: &[CallNumber], why: &str) {
        for number in numbers {
            let Some(at) = self.position(*number).filter(|at| !self.calls[*at].is_over()) else { continue };
            self.calls[at].requests.is_whole = true;
            self.give_up(at, &Failure::ended(CallEnd::Cancelled, why));
        }
        self.settle();
    }

    /// Sends the held frames of a call.
    fn release(&mut self, at: usize) {
        let held = std::mem::take(&mut self.calls[at].requests.held);
        self.ask_frames(at, held);
    }

    /// Sends the frames of a call's second phase, once its first one is answered.
    fn begin_second_phase(&mut self, at: usize) {
        let requests = &mut self.calls[at].requests;
        if requests.is_whole && requests.is_answered() && !requests.after.is_empty() {
            requests.tickets = 0..0;
            let after = std::mem::take(&mut requests.after);
            self.ask_frames(at, after);
        }
    }

    fn ask_frames(&mut self, at: usize, frames: Vec<(LaneId, PackedFrame)>) {
        let requests = &mut self.calls[at].requests;
        for (lane, packed) in frames {
            requests.note_asked(self.engine.ask(lane, packed.frame, packed.body));
        }
        self.engine.flush();
    }

    /// Records finished requests, and ends their calls.
    fn settle(&mut self) {
        let mut over = std::mem::take(&mut self.over);
        over.extend(self.engine.take_finished());
        for (ticket, result) in over.drain(..) {
            let Some(at) = self.calls.iter().position(|call| call.requests.tickets.contains(&ticket.0)) else {
                self.note_awaited(ticket, &result);
                self.update_addresses(ticket, result);
                continue;
            };
            self.calls[at].requests.open -= 1;
            match result {
                Ok(finished) => self.note(at, finished),
                Err(refused) => self.fail(at, &refused.into()),
            }
            self.begin_second_phase(at);
            if self.calls[at].is_over() {
                let number = self.calls[at].number;
                self.end(number);
            }
        }
        self.over = over;
    }

    /// Records a server's answer about what calls wait for.
    fn note_awaited(&mut self, ticket: Ticket, result: &Result<Finished, Refused>) {
        let Some(at) = self.asked.iter().position(|(asked, _)| *asked == ticket) else { return };
        let (_, lane) = self.asked.swap_remove(at);
        // An older server does not know the request and answers with an error.
        let decoded = result.as_ref().ok().and_then(|finished| ControlAnswer::decode(finished.control.as_slice()).ok());
        if let Some(ControlAnswer { answer: Some(Answer::Waiting(text)), ends_by_itself }) = decoded {
            self.engine.note_awaited(lane, AwaitedAnswer { text, ends_by_itself });
        }
    }

    /// Records an answer. A pull reports the round of a parameter without a known one, and a push that of a parameter
    /// whose rounds were complete without it: the lowest of its chunks.
    fn note(&mut self, at: usize, finished: Finished) {
        let call = &mut self.calls[at];
        let Some(job) = self.job.as_ref().filter(|_| call.subject.kind != Kind::Control) else {
            call.outcome.answer = finished.control;
            return;
        };
        call.outcome.earliest = finished.versions.iter().copied().chain(call.outcome.earliest).min();
        call.outcome.latest = finished.versions.iter().copied().fold(call.outcome.latest, Version::max);
        if job.has_rounds() {
            let is_new = |index: ParameterIndex, version: &Version| {
                let progress = job.progress(index);
                match (call.subject.kind, progress.round) {
                    (Kind::Pull, None) => progress.counts_rounds,
                    (Kind::Push, Some(round)) => round.0 < version.0,
                    _ => false,
                }
            };
            let seen = finished.entries.iter().zip(&finished.versions);
            let seen = seen.filter(|(entry, version)| is_new(entry.id.parameter, version));
            let of_chunk = |(Entry { id, .. }, version): (&Entry, &Version)| (id.parameter, id.chunk, Round(version.0));
            call.outcome.seen.extend(seen.map(of_chunk));
        }
        call.outcome.sums.extend(finished.entries.iter().map(|entry| entry.id).zip(finished.sums));
        let kept = finished.entries.iter().zip(finished.kept);
        let kept = kept.map(|(Entry { id, .. }, lease)| ViewChunk { parameter: id.parameter, chunk: id.chunk, lease });
        call.outcome.kept.extend(kept);
    }

    /// Records the first failure of a call and drops its held frames.
    fn fail(&mut self, at: usize, failure: &Failure) {
        let call = &mut self.calls[at];
        call.requests.drop_held();
        if call.outcome.failure.is_none() {
            let about = describe(&call.subject, self.job.as_ref());
            call.outcome.failure = Some(Failure::ended(failure.end(), format!("{about}: {failure}")));
        }
    }

    /// Whether a call was cancelled, over or not.
    pub(super) fn is_cancelled(&self, number: CallNumber) -> bool {
        self.position(number).is_some_and(|at| self.cancels.reach(self.calls[at].began))
    }

    /// Ends a call that is not over.
    pub(super) fn cancel_call(&mut self, number: CallNumber) {
        if let Some(at) = self.position(number).filter(|at| self.calls[*at].outcome.failure.is_none()) {
            self.give_up(at, &cancelled());
            self.settle();
        }
    }

    /// Ends the calls that were cancelled.
    fn end_cancelled(&mut self) {
        let ends = |call: &Call| call.is_pending() && self.cancels.reach(call.began);
        let ending: Vec<usize> = (0..self.calls.len()).filter(|at| ends(&self.calls[*at])).collect();
        // All are marked first, so that each reports the cancellation and not the failure of an earlier call.
        ending.iter().for_each(|at| self.fail(*at, &cancelled()));
        ending.iter().for_each(|at| self.give_up(*at, &cancelled()));
    }

    /// Asks servers about calls that are close to their deadline, and ends calls that have passed it.
    fn expire(&mut self, now: Now) {
        for at in 0..self.calls.len() {
            let call = &mut self.calls[at];
            if !call.is_pending() || !call.deadline.due(now).is_zero() {
                continue;
            }
            if !std::mem::replace(&mut call.deadline.has_asked, true) {
                let tickets = call.requests.tickets();
                let asked = self.engine.ask_awaited(&tickets);
                self.asked.extend(asked);
            }
            if now < self.calls[at].deadline.end || self.extend(now, at) {
                continue;
            }
            let call = &self.calls[at];
            let limit = call.deadline.limit;
            let text = match call.requests.tickets().as_slice() {
                [] => {
                    format!("an earlier call about the same parameter did not end within {:.1} s", limit.as_secs_f64())
                }
                tickets => self.engine.late(tickets, limit),
            };
            self.give_up(at, &Failure::ended(CallEnd::Timeout, text));
        }
    }

    /// Lets a call go on past a deadline that the program has left at its default, while servers answer that they end
    /// its wait themselves: they wait for a trainer that is alive.
    fn extend(&mut self, now: Now, at: usize) -> bool {
        if self.options.deadline != DEADLINE_DEFAULT {
            return false;
        }
        let call = &self.calls[at];
        let awaited = match call.requests.tickets().as_slice() {
            [] => Some("an earlier call about the same parameter".to_owned()),
            tickets => self.engine.ends_by_itself(tickets),
        };
        let Some(awaited) = awaited else { return false };
        let (about, seconds) = (describe(&call.subject, self.job.as_ref()), call.deadline.opened.until(now).as_secs());
        tracing::warn!("{about} goes on after {seconds} s, as servers answer: {awaited}");
        let deadline = &mut self.calls[at].deadline;
        (deadline.end, deadline.has_asked) = (now + deadline.limit, false);
        true
    }

    /// Fails a call and reclaims its buffers from the transport.
    fn give_up(&mut self, at: usize, failure: &Failure) {
        let (number, tickets) = (self.calls[at].number, self.calls[at].requests.tickets());
        self.fail(at, failure);
        if self.calls[at].is_over() {
            self.end(number);
        } else {
            self.engine.abandon(&tickets, failure.to_string());
        }
    }

    /// Ends a call. The calls behind it are released, or fail with it.
    fn end(&mut self, number: CallNumber) {
        let mut over: SmallVec<[CallNumber; 1]> = [number].into();
        while let Some(number) = over.pop() {
            let ended = self.conclude(number);
            for at in 0..self.calls.len() {
                if !self.calls[at].requests.behind.contains(&number) {
                    continue;
                }
                if let Some(end) = &ended {
                    let text = "an earlier call about one of its parameters failed";
                    self.fail(at, &Failure::ended(end.clone(), text));
                    over.push(self.calls[at].number);
                } else {
                    self.calls[at].requests.behind.retain(|one| *one != number);
                    if self.calls[at].requests.behind.is_empty() {
                        self.release(at);
                    }
                }
            }
        }
    }

    /// Consumes the sequence numbers of a successful call; returns those of a failed one to be used again. The result
    /// is why it failed.
    fn conclude(&mut self, number: CallNumber) -> Option<CallEnd> {
        let at = self.position(number).expect("the call is known");
        let call = &mut self.calls[at];
        call.waiters.drain(..).for_each(|thread| thread.unpark());
        let ended = call.outcome.failure.as_ref().map(Failure::end);
        let has_failed = ended.is_some();
        let buffers = std::mem::take(&mut call.buffers);
        if let Some(failure) = call.outcome.failure.as_mut() {
            // The caller may write to these buffers again.
            for other in buffers.iter().filter_map(|buffer| buffer.withdraw().err()) {
                *failure = Failure::ended(failure.end(), format!("{failure}; {other}"));
            }
            call.outcome.kept.clear();
        }
        drop(buffers);
        if let Some(rows) = call.rows.take() {
            rows.finish(!has_failed, &mut self.memory.rows.kept);
        }
        let Some(job) = &mut self.job else { return ended };
        for index in &call.subject.parameters {
            let progress = job.progress_mut(*index);
            progress.busy = progress.busy.filter(|busy| *busy != number);
            if has_failed && call.subject.kind == Kind::Push {
                progress.round = progress.round.map(|round| Round(round.0 - 1));
            }
            let again = match call.subject.kind {
                Kind::Push => &mut progress.push_again,
                Kind::Set => &mut progress.set_again,
                _ => continue,
            };
            if !has_failed {
                *again = None;
            } else if call.subject.is_repeated_alike && !call.requests.tickets.is_empty() {
                again.get_or_insert(call.subject.sequence);
            }
        }
        if !has_failed {
            self.moved.count(call.moved.sent, call.moved.received);
            call.outcome.seen.sort_unstable();
            for seen in call.outcome.seen.chunk_by(|one, next| one.0 == next.0) {
                job.learn_round(seen);
            }
            call.outcome.seen.clear();
        }
        ended
    }

    fn position(&self, number: CallNumber) -> Option<usize> {
        self.calls.binary_search_by_key(&number, |call| call.number).ok()
    }
}

/// Description of a call, for errors.
fn describe(subject: &CallSubject, job: Option<&JoinedJob>) -> String {
    let Some(job) = job.filter(|_| subject.what.is_empty()) else { return subject.what.clone() };
    let what = match subject.kind {
        Kind::Push => "sending gradients of",
        Kind::Set => "setting",
        _ => "fetching",
    };
    let first = subject.parameters.first().map_or("nothing", |index| job.name(*index));
    match subject.parameters.len() {
        0 | 1 => format!("{what} \"{first}\""),
        more => format!("{what} \"{first}\" and {} more", more - 1),
    }
}

impl ClientGuard<'_> {
    /// Waits until a call is over.
    pub(super) fn finish(&mut self, number: CallNumber) -> Result<(), Failure> {
        self.finish_call(number).map(drop)
    }

    /// Waits until a call is over, and takes the received chunks of its view.
    pub(super) fn finish_kept(&mut self, number: CallNumber) -> Result<Vec<ViewChunk>, Failure> {
        self.finish_call(number).map(|call| call.outcome.kept)
    }

    /// Waits until a call is over, and says the highest version among its answers.
    pub(super) fn finish_latest(&mut self, number: CallNumber) -> Result<Version, Failure> {
        self.finish_call(number).map(|call| call.outcome.latest)
    }

    /// Waits until a call is over, and says the checksum of the value of each of its parameters.
    pub(super) fn finish_sums(&mut self, number: CallNumber) -> Result<Vec<u32>, Failure> {
        let Call { subject, mut outcome, .. } = self.finish_call(number)?;
        let sums = &mut outcome.sums;
        sums.sort_unstable_by_key(|(id, _)| *id);
        let of = |parameter| {
            let first = sums.partition_point(|(id, _)| id.parameter < parameter);
            let chunks = sums[first..].iter().take_while(|(id, _)| id.parameter == parameter);
            chunks.map(|(_, chunk)| *chunk).reduce(ValueSum::followed_by).unwrap_or_default().sum
        };
        Ok(subject.parameters.into_iter().map(of).collect())
    }

    /// Waits until a call is over, and says the version of all its answers; none when they differ.
    pub(super) fn finish_versions(&mut self, number: CallNumber) -> Result<Option<Version>, Failure> {
        let outcome = self.finish_call(number)?.outcome;
        Ok(outcome.earliest.filter(|earliest| *earliest == outcome.latest))
    }

    /// Waits until a control call is over, and takes its answer.
    pub(super) fn finish_answer(&mut self, number: CallNumber) -> Result<Vec<u8>, Failure> {
        self.finish_call(number).map(|call| call.outcome.answer)
    }

    fn finish_call(&mut self, number: CallNumber) -> Result<Call, Failure> {
        self.wait_over(number);
        self.take_call(number).expect("only one waits for it")
    }

    /// Waits until cancelled calls are over. A new call behind one of them would fail with it.
    pub(super) fn wait_for_cancelled(&mut self) {
        let is_ending = |call: &&Call| !call.is_over() && self.cancels.reach(call.began);
        let numbers: Vec<_> = self.calls.iter().filter(is_ending).map(|call| call.number).collect();
        numbers.into_iter().for_each(|number| self.wait_over(number));
    }

    /// Waits until every call in progress is over.
    pub(super) fn finish_all(&mut self) {
        let numbers: Vec<_> = self.calls.iter().map(|call| call.number).collect();
        numbers.into_iter().for_each(|number| self.wait_over(number));
    }

    /// Aborts calls, and waits until the transport has returned the caller's memory.
    pub(super) fn abort(&mut self, numbers: &[CallNumber], why: &str) {
        self.begin_to_abort(numbers, why);
        numbers.iter().for_each(|number| self.wait_over(*number));
    }

    /// Aborts every call.
    pub(super) fn abort_all(&mut self, why: &str) {
        let numbers: Vec<_> = self.calls.iter().map(|call| call.number).collect();
        self.abort(&numbers, why);
    }

    /// Aborts the calls of the driver thread. A thread that waits for one gets `why` as the error.
    pub(super) fn abort_started(&mut self, why: &str) {
        let numbers: Vec<_> = self.calls.iter().filter(|call| call.is_detached).map(|call| call.number).collect();
        self.abort(&numbers, why);
    }

    /// Sends a request to the coordinator and waits for the answer until the deadline of the current call.
    pub(super) fn control(&mut self, request: Request, what: &str) -> Result<Vec<u8>, Failure> {
        let times = (self.until, self.options.deadline);
        self.control_within(request, times, what)
    }

    /// [`control`](Self::control) with another deadline.
    pub(super) fn control_within(
        &mut self,
        request: Request,
        times: (Now, Duration),
        what: &str,
    ) -> Result<Vec<u8>, Failure> {
        let (lane, frame) = self.engine.question(request);
        let call = self.question(what, times, vec![(lane, frame, RequestBody::default())]);
        self.finish_call(call).map(|call| call.outcome.answer)
    }

    /// Takes the answer to a control call that is over.
    pub(super) fn take_answer(&mut self, call: CallNumber) -> Result<Vec<u8>, Failure> {
        self.take_call(call).expect("only one takes it").map(|call| call.outcome.answer)
    }

    /// Sends frames of a control call, and waits until all are answered.
    pub(super) fn ask_all(&mut self, frames: Vec<(LaneId, Frame, RequestBody)>, what: &str) -> Result<(), Failure> {
        let times = (self.until, self.options.deadline);
        let call = self.question(what, times, frames);
        self.finish(call)
    }
}
