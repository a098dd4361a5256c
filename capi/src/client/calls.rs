//! Calls on their way: in which order they leave, how they end, and what follows from that.
//!
//! Servers recognise a call that comes twice by its number, which only grows for one chunk. So calls about the same
//! parameter leave one after the other, each when the one before is answered; calls about different parameters
//! know nothing of each other. When a call fails, those that wait behind it fail too: the next one takes its number
//! and its round, and is the same call again.
//!
//! What is asked of the coordinator, and what fills servers, is a call as well, about no parameter: a question.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Thread, ThreadId};
use std::time::Duration;

use pserver_core::client::{Finished, LaneId, Refused, RequestBody};
use pserver_core::error::Failure;
use pserver_core::ids::{ParameterIndex, Round, Sequence, Ticket};
use pserver_core::memory::Mapping;
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Entry, Frame, Kind};

use super::State;
use super::buffers::Held;
use super::job::{Job, Search};
use super::packer::Packed;
use super::turns::{Entered, reason};
use super::views::Kept;

/// Calls of one client that nobody has waited for; more are refused.
const CALLS_MAX: usize = 4096;

/// A call, named; never used twice in the life of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallNumber(u64);

/// A call that nobody has taken the result of.
pub(super) struct Call {
    number: CallNumber,
    kind: Kind,
    /// What a question is about, in words.
    what: String,
    parameters: Vec<ParameterIndex>,
    /// The number that servers recognise it by; zero where they need none.
    sequence: Sequence,
    /// Earlier calls that it waits for.
    behind: Vec<CallNumber>,
    /// Frames that wait for them.
    held: Vec<(LaneId, Packed)>,
    /// Its requests, which have consecutive numbers.
    tickets: Range<u64>,
    /// How many of them are not over.
    open: usize,
    /// Whether all its frames are made.
    is_whole: bool,
    end: Now,
    limit: Duration,
    failure: Option<String>,
    /// What it learned of rounds that were not known.
    seen: Vec<(ParameterIndex, Round)>,
    /// Values that it keeps for a view.
    kept: Vec<Kept>,
    /// The buffers that its gradients lie in and its values go to, until it is over.
    buffers: Vec<Arc<Mapping>>,
    /// Every buffer that it reads from or writes to, until its result is taken.
    memory: Held,
    /// Whether it goes on after the thread that started it has left.
    is_started: bool,
    /// Threads outside that wait for its end.
    waiters: Vec<Thread>,
    /// What a question was answered.
    answer: Vec<u8>,
    /// Payload bytes to and from the servers.
    sent: u64,
    received: u64,
}

impl Call {
    fn new(number: CallNumber, kind: Kind, end: Now, limit: Duration) -> Self {
        Self {
            number,
            kind,
            what: String::new(),
            parameters: Vec::new(),
            sequence: Sequence(0),
            behind: Vec::new(),
            held: Vec::new(),
            tickets: 0..0,
            open: 0,
            is_whole: false,
            end,
            limit,
            failure: None,
            seen: Vec::new(),
            kept: Vec::new(),
            buffers: Vec::new(),
            memory: Held::default(),
            is_started: false,
            waiters: Vec::new(),
            answer: Vec::new(),
            sent: 0,
            received: 0,
        }
    }

    /// What it is about, in words.
    fn text(&self, job: Option<&Job>) -> String {
        let Some(job) = job.filter(|_| self.what.is_empty()) else { return self.what.clone() };
        let what = match self.kind {
            Kind::Push => "sending gradients of",
            Kind::Set => "setting",
            _ => "fetching",
        };
        let first = self.parameters.first().map_or("nothing", |index| job.name(*index));
        match self.parameters.len() {
            0 | 1 => format!("{what} \"{first}\""),
            more => format!("{what} \"{first}\" and {} more", more - 1),
        }
    }

    fn is_over(&self) -> bool {
        self.is_whole && self.open == 0 && self.held.is_empty()
    }

    fn tickets(&self) -> Vec<Ticket> {
        self.tickets.clone().map(Ticket).collect()
    }
}

impl State {
    /// Opens a call about parameters that are in it once. `bytes` go to the servers and come from them.
    pub(super) fn open(
        &mut self,
        kind: Kind,
        parameters: &[ParameterIndex],
        bytes: (u64, u64),
    ) -> Result<Sequence, Failure> {
        if self.calls.len() >= CALLS_MAX {
            return Err(Failure::call(format!("{CALLS_MAX} calls were started and not waited for")));
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
        let limit = self.options.deadline;
        let end = self.engine.now() + limit;
        let (sent, received) = bytes;
        let parameters = parameters.to_vec();
        let call = Call { parameters, sequence, behind, sent, received, ..Call::new(number, kind, end, limit) };
        self.calls.push(call);
        Ok(sequence)
    }

    /// Asks the coordinator or servers something that is about no parameter; it is over at `end`, within `limit`.
    pub(super) fn question(
        &mut self,
        what: &str,
        (end, limit): (Now, Duration),
        frames: Vec<(LaneId, Frame, RequestBody)>,
    ) -> CallNumber {
        self.last_call += 1;
        let number = CallNumber(self.last_call);
        self.calls.push(Call { what: what.to_owned(), ..Call::new(number, Kind::Control, end, limit) });
        for (lane, frame, body) in frames {
            self.frame(lane, Packed::new(frame, body));
        }
        self.close()
    }

    /// A frame of the call that was opened last is full: it leaves, or waits for earlier calls.
    pub(super) fn frame(&mut self, lane: LaneId, packed: Packed) {
        let call = self.calls.last_mut().expect("a call is open");
        call.held.push((lane, packed));
        if call.behind.is_empty() {
            let at = self.calls.len() - 1;
            self.release(at);
        }
    }

    /// Every frame of the call that was opened last is made.
    pub(super) fn close(&mut self) -> CallNumber {
        let call = self.calls.last_mut().expect("a call is open");
        call.is_whole = true;
        let number = call.number;
        if call.is_over() {
            // A call about nothing.
            self.end(number);
        }
        number
    }

    /// Whether some call is not over.
    pub(super) fn is_running(&self) -> bool {
        self.calls.iter().any(|call| !call.is_over())
    }

    /// Whether a call is over; true also when nobody knows it.
    pub(super) fn is_over(&self, number: CallNumber) -> bool {
        self.position(number).is_none_or(|at| self.calls[at].is_over())
    }

    /// Gradients of the call that was opened last lie in this buffer, or values go there.
    pub(super) fn uses(&mut self, buffer: &Arc<Mapping>) {
        let buffers = &mut self.calls.last_mut().expect("a call is open").buffers;
        if !buffers.iter().any(|known| Arc::ptr_eq(known, buffer)) {
            buffers.push(Arc::clone(buffer));
        }
    }

    /// A call goes on alone; its buffers are held until somebody has waited for it.
    pub(super) fn goes_on_alone(&mut self, number: CallNumber, memory: Held) {
        if let Some(at) = self.position(number) {
            self.calls[at].memory = memory;
            self.calls[at].is_started = true;
        }
    }

    /// A thread sleeps outside until a call is over.
    pub(super) fn waits(&mut self, number: CallNumber, thread: Thread) {
        if let Some(at) = self.position(number) {
            self.calls[at].waiters.push(thread);
        }
    }

    /// It is inside again.
    pub(super) fn waits_no_more(&mut self, number: CallNumber, thread: ThreadId) {
        if let Some(at) = self.position(number) {
            self.calls[at].waiters.retain(|waiter| waiter.id() != thread);
        }
    }

    /// Somebody who waits for a call that is not over.
    pub(super) fn next_waiter(&mut self) -> Option<Thread> {
        let mut running = self.calls.iter().filter(|call| !call.is_over());
        running.find_map(|call| call.waiters.first().cloned())
    }

    /// The numbers by which servers recognise a push that is on its way, by parameter.
    pub(super) fn numbers_of(&self, number: CallNumber) -> Vec<(ParameterIndex, Sequence)> {
        let call = &self.calls[self.position(number).expect("the call is known")];
        let job = self.job.as_ref().expect("the job is ready");
        let again = |index: &ParameterIndex| job.progress(*index).push_again;
        call.parameters.iter().map(|index| (*index, again(index).unwrap_or(call.sequence))).collect()
    }

    /// What follows a push went wrong, so that it fails and may be made again: as the same one, unless another push
    /// about the parameter has begun meanwhile.
    pub(super) fn take_back(
        &mut self,
        number: CallNumber,
        numbers: &[(ParameterIndex, Sequence)],
        failure: Failure,
    ) -> Failure {
        let job = self.ready_job();
        if numbers.iter().any(|(index, _)| job.progress(*index).pushed != Some(number)) {
            let next = "the gradients are applied and not to be sent again; paddle_get_params_view fetches the view";
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
        Some(call.failure.take().map_or(Ok(call), |text| Err(Failure::Call(text))))
    }

    /// One turn for all calls, of at most so long. Should it panic, every call is over.
    pub(super) fn advance(&mut self, longest: Duration) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.turn(longest))) {
            self.collapse(panic.as_ref());
        }
    }

    fn turn(&mut self, longest: Duration) {
        let now = self.engine.now();
        self.look_for_servers(now);
        let left = self.calls.iter().filter(|call| call.failure.is_none()).map(|call| now.until(call.end)).min();
        if left.is_some_and(|left| left.is_zero()) {
            self.expire(now);
        } else {
            // What ended while a call was packed may be what another waits for.
            let longest = if self.engine.has_finished() { Duration::ZERO } else { longest };
            self.engine.turn(left.unwrap_or(Duration::MAX).min(longest));
        }
        self.settle();
    }

    /// After a panic: the transport goes with all that was lent, and every call fails. What is left is whole.
    pub(super) fn collapse(&mut self, panic: &(dyn Any + Send)) -> Failure {
        let text = format!("a bug in libpaddle_pserver, please report it: {}", reason(panic));
        let failure = Failure::Call(text.clone());
        self.engine.break_off(&failure);
        self.engine.take_finished().for_each(drop);
        self.over.clear();
        self.search = Search::default();
        let mut ended = Vec::new();
        for call in self.calls.iter_mut().filter(|call| !call.is_over()) {
            call.held.clear();
            call.behind.clear();
            (call.open, call.is_whole) = (0, true);
            call.failure.get_or_insert_with(|| text.clone());
            ended.push(call.number);
        }
        for number in ended {
            // What is behind these panics is unknown; a call that cannot be concluded is over all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| self.conclude(number)));
        }
        failure
    }

    /// Begins to give up calls.
    fn begin_to_abort(&mut self, numbers: &[CallNumber], why: &str) {
        for number in numbers {
            let Some(at) = self.position(*number).filter(|at| !self.calls[*at].is_over()) else { continue };
            self.calls[at].is_whole = true;
            self.give_up(at, why.to_owned());
        }
        self.settle();
    }

    /// Sends the frames that a call holds.
    fn release(&mut self, at: usize) {
        let call = &mut self.calls[at];
        for (lane, packed) in call.held.drain(..) {
            let Ticket(ticket) = self.engine.ask(lane, packed.frame, packed.body);
            if call.tickets.is_empty() {
                call.tickets = ticket..ticket;
            }
            assert_eq!(call.tickets.end, ticket, "nothing is asked between the frames of a call");
            call.tickets.end += 1;
            call.open += 1;
        }
        self.engine.flush();
    }

    /// Takes in what is over.
    fn settle(&mut self) {
        let mut over = std::mem::take(&mut self.over);
        over.extend(self.engine.take_finished());
        for (ticket, result) in over.drain(..) {
            let Some(at) = self.calls.iter().position(|call| call.tickets.contains(&ticket.0)) else {
                self.note_servers(ticket, result);
                continue;
            };
            self.calls[at].open -= 1;
            match result {
                Ok(finished) => self.note(at, finished),
                Err(Refused { text, .. }) => self.fail(at, text),
            }
            if self.calls[at].is_over() {
                let number = self.calls[at].number;
                self.end(number);
            }
        }
        self.over = over;
    }

    /// Of a parameter whose round is not known, a pull tells it: that of the chunk that is furthest behind.
    fn note(&mut self, at: usize, finished: Finished) {
        let call = &mut self.calls[at];
        let Some(job) = self.job.as_ref().filter(|_| call.kind != Kind::Control) else {
            call.answer = finished.control;
            return;
        };
        if call.kind == Kind::Pull && job.counts_rounds() {
            let seen = finished.entries.iter().zip(&finished.versions);
            let seen = seen.filter(|(entry, _)| job.progress(entry.id.parameter).round.is_none());
            call.seen.extend(seen.map(|(entry, version)| (entry.id.parameter, Round(version.0))));
        }
        let kept = finished.entries.iter().zip(finished.kept);
        let kept = kept.map(|(Entry { id, .. }, lease)| Kept { parameter: id.parameter, chunk: id.chunk, lease });
        call.kept.extend(kept);
    }

    /// The first failure of a call is its result; what it holds is dropped.
    fn fail(&mut self, at: usize, text: String) {
        let call = &mut self.calls[at];
        call.held.clear();
        call.behind.clear();
        if call.failure.is_none() {
            call.failure = Some(format!("{}: {text}", call.text(self.job.as_ref())));
        }
    }

    /// Ends the calls whose time is up.
    fn expire(&mut self, now: Now) {
        for at in 0..self.calls.len() {
            let call = &self.calls[at];
            if call.failure.is_some() || call.is_over() || call.end > now {
                continue;
            }
            let limit = call.limit;
            let text = match call.tickets().as_slice() {
                [] => format!("an earlier call about it was not over within {:.1} s", limit.as_secs_f64()),
                tickets => self.engine.late(tickets, limit),
            };
            self.give_up(at, text);
        }
    }

    /// Fails a call, and gets back what the transport has of it.
    fn give_up(&mut self, at: usize, text: String) {
        let (number, tickets) = (self.calls[at].number, self.calls[at].tickets());
        self.fail(at, text.clone());
        if self.calls[at].is_over() {
            self.end(number);
        } else {
            self.engine.abandon(&tickets, text);
        }
    }

    /// A call is over; those behind it go on, or fail with it and are over too.
    fn end(&mut self, number: CallNumber) {
        let mut over = vec![number];
        while let Some(number) = over.pop() {
            let has_failed = self.conclude(number);
            for at in 0..self.calls.len() {
                if !self.calls[at].behind.contains(&number) {
                    continue;
                }
                if has_failed {
                    self.fail(at, "an earlier call about one of its parameters failed".to_owned());
                    over.push(self.calls[at].number);
                } else {
                    self.calls[at].behind.retain(|one| *one != number);
                    if self.calls[at].behind.is_empty() {
                        self.release(at);
                    }
                }
            }
        }
    }

    /// The numbers of a call that is over are used up, or given back; true when it failed.
    fn conclude(&mut self, number: CallNumber) -> bool {
        let at = self.position(number).expect("the call is known");
        let call = &mut self.calls[at];
        call.waiters.drain(..).for_each(|thread| thread.unpark());
        let has_failed = call.failure.is_some();
        let buffers = std::mem::take(&mut call.buffers);
        if let Some(text) = call.failure.as_mut() {
            // The caller may write again.
            for failure in buffers.iter().filter_map(|buffer| buffer.withdraw().err()) {
                text.push_str(&format!("; {failure}"));
            }
            call.kept.clear();
        }
        drop(buffers);
        let Some(job) = &mut self.job else { return has_failed };
        for index in &call.parameters {
            let progress = job.progress_mut(*index);
            progress.busy = progress.busy.filter(|busy| *busy != number);
            if has_failed && call.kind == Kind::Push {
                progress.round = progress.round.map(|round| Round(round.0 - 1));
            }
            let again = match call.kind {
                Kind::Push => &mut progress.push_again,
                Kind::Set => &mut progress.set_again,
                _ => continue,
            };
            if !has_failed {
                *again = None;
            } else if !call.tickets.is_empty() {
                again.get_or_insert(call.sequence);
            }
        }
        if !has_failed {
            self.moved.count(call.sent, call.received);
            call.seen.sort_unstable();
            for (index, round) in call.seen.drain(..) {
                job.progress_mut(index).round.get_or_insert(round);
            }
        }
        has_failed
    }

    fn position(&self, number: CallNumber) -> Option<usize> {
        self.calls.binary_search_by_key(&number, |call| call.number).ok()
    }
}

impl Entered<'_> {
    /// Waits until a call is over.
    pub(super) fn finish(&mut self, number: CallNumber) -> Result<(), Failure> {
        self.finish_call(number).map(drop)
    }

    /// The same, with the values that it keeps.
    pub(super) fn finish_kept(&mut self, number: CallNumber) -> Result<Vec<Kept>, Failure> {
        self.finish_call(number).map(|call| call.kept)
    }

    fn finish_call(&mut self, number: CallNumber) -> Result<Call, Failure> {
        self.wait_over(number);
        self.take_call(number).expect("only one waits for it")
    }

    /// Waits until every call is over that was started before.
    pub(super) fn finish_all(&mut self) {
        let numbers: Vec<_> = self.calls.iter().map(|call| call.number).collect();
        numbers.into_iter().for_each(|number| self.wait_over(number));
    }

    /// Gives up calls: waits until the caller's memory is the caller's again.
    pub(super) fn abort(&mut self, numbers: &[CallNumber], why: &str) {
        self.begin_to_abort(numbers, why);
        numbers.iter().for_each(|number| self.wait_over(*number));
    }

    /// Gives up every call.
    pub(super) fn abort_all(&mut self, why: &str) {
        let numbers: Vec<_> = self.calls.iter().map(|call| call.number).collect();
        self.abort(&numbers, why);
    }

    /// Gives up the calls that go on alone; whoever waits for one is told why.
    pub(super) fn abort_started(&mut self, why: &str) {
        let numbers: Vec<_> = self.calls.iter().filter(|call| call.is_started).map(|call| call.number).collect();
        self.abort(&numbers, why);
    }

    /// Asks the coordinator, and waits for what it answers until the call that entered must be over.
    pub(super) fn control(&mut self, request: Request, what: &str) -> Result<Vec<u8>, Failure> {
        let times = (self.until, self.options.deadline);
        self.control_within(request, times, what)
    }

    /// The same until some other time.
    pub(super) fn control_within(
        &mut self,
        request: Request,
        times: (Now, Duration),
        what: &str,
    ) -> Result<Vec<u8>, Failure> {
        let (lane, frame) = self.engine.question(request);
        let call = self.question(what, times, vec![(lane, frame, RequestBody::default())]);
        self.finish_call(call).map(|call| call.answer)
    }

    /// The answer to a question that is over.
    pub(super) fn take_answer(&mut self, call: CallNumber) -> Result<Vec<u8>, Failure> {
        self.take_call(call).expect("only one takes it").map(|call| call.answer)
    }

    /// Sends frames that are about no parameter, and waits until all are answered.
    pub(super) fn ask_all(&mut self, frames: Vec<(LaneId, Frame, RequestBody)>, what: &str) -> Result<(), Failure> {
        let times = (self.until, self.options.deadline);
        let call = self.question(what, times, frames);
        self.finish(call)
    }
}
