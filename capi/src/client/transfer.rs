//! Gradients, values, models: what trainers do all day.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use prost::Message;
use pserver_core::client::{Finished, LaneId, RequestBody};
use pserver_core::config::Mode;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ParameterIndex, Round, Sequence, Ticket};
use pserver_core::limits::FRAME_ENTRIES_MAX;
use pserver_core::memory::{LoanBook, LoanIn, lend};
use pserver_core::partition::Parameter;
use pserver_core::port::Outgoing;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Entry, Flags, Frame, Head, Kind, PushMessage};

use super::engine::Engine;
use super::initialise::{answer, unexpected};
use super::job::Job;
use super::{Client, Given, State, Wanted};

impl Client {
    /// Sends gradients, or deltas where the job optimises on the client. It returns when every server has them for
    /// good; a call that failed may be repeated and is not applied twice. `rate` replaces the schedule's rate.
    ///
    /// # Errors
    /// What is wrong with which gradient; or who did not answer before the deadline.
    pub fn push(&self, gradients: &[Given<'_>], rate: Option<f64>) -> Result<(), Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.push(gradients, rate, &mut [])
    }

    /// Sends gradients and fetches the parameters with these gradients in them.
    ///
    /// # Errors
    /// As [`Client::push`] and [`Client::pull`].
    pub fn push_pull(
        &self,
        gradients: &[Given<'_>],
        rate: Option<f64>,
        into: &mut [Wanted<'_>],
    ) -> Result<(), Failure> {
        let alike = gradients.len() == into.len()
            && gradients.iter().zip(into.iter()).all(|(given, wanted)| given.name == wanted.name);
        if !alike {
            return Err(Failure::call("push_pull takes the same parameters, in the same order, on both sides"));
        }
        let mut state = self.enter()?;
        state.ready()?;
        state.push(gradients, rate, into)
    }

    /// Fetches parameters. In sync mode each has all rounds in it that this trainer has pushed. After a failure
    /// the contents of the places are unspecified.
    ///
    /// # Errors
    /// What is wrong with which parameter; or who did not answer, or was waited for, until the deadline.
    pub fn pull(&self, into: &mut [Wanted<'_>]) -> Result<(), Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.pull(into)
    }

    /// Replaces parameters by the values given. The count of updates and the optimizer's state stay.
    ///
    /// # Errors
    /// As [`Client::push`].
    pub fn set(&self, values: &[Given<'_>]) -> Result<(), Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.set(values)
    }

    /// Saves the model on server 0's machine, below its model directory; returns where, and its bytes.
    ///
    /// # Errors
    /// What is wrong with the path, or why the disk refused.
    pub fn save_model(&self, path: &str) -> Result<(String, u64), Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        let what = format!("saving the model as \"{}\"", path.chars().take(200).collect::<String>());
        // A model is all parameters through one disk: ten times what a call may take.
        let deadline = state.options.deadline * 10;
        let finished = state.engine.control(Request::Save(path.to_owned()), deadline, &what)?;
        match answer(&finished.control)? {
            Answer::Saved(saved) => Ok((saved.path, saved.bytes)),
            other => Err(unexpected(&other)),
        }
    }

    /// Says that this trainer is finished: the others do not wait for it any more.
    ///
    /// # Errors
    /// When a server does not answer before the deadline.
    pub fn leave(&self) -> Result<(), Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.leave()
    }
}

/// Frames for lanes: chunks of one lane share a frame up to a chunk's length.
struct Packer<'job> {
    job: &'job Job,
    kind: Kind,
    flags: Flags,
    control: Vec<u8>,
    open: BTreeMap<LaneId, Packed>,
    ready: Vec<(LaneId, Packed)>,
}

struct Packed {
    frame: Frame,
    body: RequestBody,
    parameters: Vec<ParameterIndex>,
    /// Bytes on their way in either direction.
    bytes: u32,
}

/// A request that was sent, and whose chunks it was about.
struct Asked {
    ticket: Ticket,
    parameters: Vec<ParameterIndex>,
}

impl<'job> Packer<'job> {
    fn new(job: &'job Job, kind: Kind) -> Self {
        Self { job, kind, flags: Flags::default(), control: Vec::new(), open: BTreeMap::new(), ready: Vec::new() }
    }

    /// Adds a chunk: an entry, what leaves with it, and where its value goes.
    fn add(&mut self, parameter: &Parameter, entry: Entry, payload: Option<Outgoing>, into: Option<LoanIn>) {
        let lane = self.job.lane(parameter.place(entry.id.chunk));
        let bytes = entry.bytes.max(into.as_ref().map_or(0, LoanIn::len));
        let is_full = |packed: &Packed| {
            packed.bytes.saturating_add(bytes) > self.job.settings.chunk_bytes
                || packed.frame.entries.len() >= FRAME_ENTRIES_MAX as usize
        };
        if self.open.get(&lane).is_some_and(is_full)
            && let Some(full) = self.open.remove(&lane)
        {
            self.ready.push((lane, full));
        }
        let packed = self.open.entry(lane).or_insert_with(|| Packed {
            frame: Frame {
                head: Head { flags: self.flags, ..Head::new(self.kind) },
                entries: Vec::new(),
                control: self.control.clone(),
            },
            body: RequestBody::default(),
            parameters: Vec::new(),
            bytes: 0,
        });
        packed.bytes += bytes;
        packed.frame.entries.push(entry);
        packed.parameters.push(entry.id.parameter);
        packed.body.payload.extend(payload);
        packed.body.into.extend(into);
    }

    fn frames(mut self) -> Vec<(LaneId, Packed)> {
        self.ready.extend(self.open);
        self.ready
    }
}

/// Sends packed frames under one call's number.
fn ask_all(engine: &mut Engine, sequence: Sequence, frames: Vec<(LaneId, Packed)>) -> Vec<Asked> {
    let ask = |(lane, mut packed): (LaneId, Packed)| {
        packed.frame.head.sequence = sequence;
        let ticket = engine.ask(lane, packed.frame, packed.body);
        Asked { ticket, parameters: packed.parameters }
    };
    frames.into_iter().map(ask).collect()
}

/// Waits until everything that was asked is answered.
fn finish_all(engine: &mut Engine, asked: &[Asked], deadline: Duration, what: &str) -> Result<Vec<Finished>, Failure> {
    let tickets: Vec<_> = asked.iter().map(|one| one.ticket).collect();
    Ok(engine.finish(&tickets, deadline, what)?)
}

impl State {
    fn push(&mut self, gradients: &[Given<'_>], rate: Option<f64>, into: &mut [Wanted<'_>]) -> Result<(), Failure> {
        check_rate(rate)?;
        let job = self.job.as_ref().expect("the job is ready");
        let chosen = choose_given(job, gradients, true)?;
        choose_wanted(job, into)?;
        self.know_rounds(&chosen)?;
        let job = self.job.as_ref().expect("the job is ready");
        let sequence = Sequence(job.sequence + 1);
        let counts_rounds = job.mode() == Mode::Sync;
        let what = naming("sending gradients of", gradients.iter().map(|one| one.name));
        let (engine, deadline) = (&mut self.engine, self.options.deadline);
        lend(|book| {
            let mut packer = Packer::new(job, Kind::Push);
            packer.control = PushMessage { rate }.encode_to_vec();
            if !into.is_empty() {
                packer.flags = Flags::WANT_VALUE;
            }
            let mut places = into.iter_mut();
            for (given, index) in gradients.iter().zip(&chosen) {
                let next = job.round(*index).map_or(0, |round| round.0 + 1);
                let round = Round(if counts_rounds { next } else { 0 });
                let place = places.next().map(|wanted| &mut *wanted.content);
                add_gradient(&mut packer, job.chosen(*index), given, round, place, book);
            }
            let asked = ask_all(engine, sequence, packer.frames());
            finish_all(engine, &asked, deadline, &what)
        })?;
        self.pushed(&chosen);
        self.moved.sent += gradients.iter().map(|given| bytes(given.content.len())).sum::<u64>();
        self.moved.received += into.iter().map(|wanted| bytes(wanted.content.len())).sum::<u64>();
        Ok(())
    }

    /// Notes what was acknowledged: the call's number and each parameter's round are used up.
    fn pushed(&mut self, chosen: &[ParameterIndex]) {
        let job = self.job.as_mut().expect("the job is ready");
        job.sequence += 1;
        for index in chosen {
            let next = job.round(*index).map_or(1, |round| round.0 + 1);
            job.set_round(*index, Round(next));
        }
    }

    fn pull(&mut self, into: &mut [Wanted<'_>]) -> Result<(), Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let chosen = choose_wanted(job, into)?;
        let counts_rounds = job.mode() == Mode::Sync;
        let what = naming("fetching", into.iter().map(|one| one.name));
        let (engine, deadline) = (&mut self.engine, self.options.deadline);
        let received: u64 = into.iter().map(|wanted| bytes(wanted.content.len())).sum();
        let versions = lend(|book| {
            let mut packer = Packer::new(job, Kind::Pull);
            for (wanted, index) in into.iter_mut().zip(&chosen) {
                let parameter = job.chosen(*index);
                let least = job.round(*index).filter(|_| counts_rounds).unwrap_or_default();
                let element_type = parameter.declaration().element_type;
                let mut rest = &mut *wanted.content;
                for (chunk, span) in parameter.chunks() {
                    let (place, after) = rest.split_at_mut(span.bytes as usize);
                    rest = after;
                    let id = ChunkId { parameter: *index, chunk };
                    packer.add(parameter, Entry::bare(id, least, element_type), None, Some(book.write(place)));
                }
            }
            let asked = ask_all(engine, Sequence(0), packer.frames());
            least_versions(engine, &asked, deadline, &what)
        })?;
        self.moved.received += received;
        self.note_versions(&versions);
        Ok(())
    }

    /// In sync mode a trainer that has not pulled yet asks how far the parameters are before it pushes.
    fn know_rounds(&mut self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        if job.mode() != Mode::Sync {
            return Ok(());
        }
        let (engine, deadline) = (&mut self.engine, self.options.deadline);
        let mut packer = Packer::new(job, Kind::Pull);
        for index in chosen.iter().filter(|index| job.round(**index).is_none()) {
            let parameter = job.chosen(*index);
            let element_type = parameter.declaration().element_type;
            for (chunk, _) in parameter.chunks() {
                let id = ChunkId { parameter: *index, chunk };
                packer.add(parameter, Entry::bare(id, Round(0), element_type), None, None);
            }
        }
        let asked = ask_all(engine, Sequence(0), packer.frames());
        let versions = least_versions(engine, &asked, deadline, "asking for versions")?;
        self.note_versions(&versions);
        Ok(())
    }

    /// Of a parameter that this trainer has not pushed yet, the next round is the one after what it has seen.
    fn note_versions(&mut self, versions: &BTreeMap<ParameterIndex, u64>) {
        let job = self.job.as_mut().expect("the job is ready");
        for (parameter, version) in versions {
            if job.round(*parameter).is_none() {
                job.set_round(*parameter, Round(*version));
            }
        }
    }

    fn set(&mut self, values: &[Given<'_>]) -> Result<(), Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let chosen = choose_given(job, values, false)?;
        let sequence = Sequence(job.sequence + 1);
        let what = naming("setting", values.iter().map(|one| one.name));
        let (engine, deadline) = (&mut self.engine, self.options.deadline);
        lend(|book| {
            let mut packer = Packer::new(job, Kind::Set);
            for (given, index) in values.iter().zip(&chosen) {
                add_gradient(&mut packer, job.chosen(*index), given, Round(0), None, book);
            }
            let asked = ask_all(engine, sequence, packer.frames());
            finish_all(engine, &asked, deadline, &what)
        })?;
        let job = self.job.as_mut().expect("the job is ready");
        job.sequence += 1;
        self.moved.sent += values.iter().map(|given| bytes(given.content.len())).sum::<u64>();
        Ok(())
    }

    fn leave(&mut self) -> Result<(), Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let lanes: Vec<LaneId> = job.lanes().map(|(_, lane)| lane).collect();
        let leave = |lane| self.engine.ask(lane, Frame::bare(Head::new(Kind::Leave)), RequestBody::default());
        let tickets: Vec<_> = lanes.into_iter().map(leave).collect();
        self.engine.finish(&tickets, self.options.deadline, "leaving the job")?;
        self.engine.control(Request::Leave(true), self.options.deadline, "leaving the job")?;
        Ok(())
    }
}

fn add_gradient<'env>(
    packer: &mut Packer<'_>,
    parameter: &Parameter,
    given: &Given<'env>,
    round: Round,
    place: Option<&'env mut [u8]>,
    book: &LoanBook<'env>,
) {
    let element_bytes = parameter.declaration().element_type.bytes();
    let mut rest = given.content;
    let mut places = place;
    for (chunk, span) in parameter.chunks() {
        let elements = u64::from(span.bytes) / element_bytes;
        let length = usize::try_from(elements * given.element_type.bytes()).expect("it is within a slice");
        let (bytes, after) = rest.split_at(length);
        rest = after;
        let into = places.take().map(|all| {
            let (one, after) = all.split_at_mut(span.bytes as usize);
            places = Some(after);
            book.write(one)
        });
        let id = ChunkId { parameter: parameter.index(), chunk };
        let entry = Entry::with_payload(id, round, given.element_type, bytes);
        packer.add(parameter, entry, Some(Outgoing::Loan(book.read(bytes))), into);
    }
}

/// Finishes pulls and tells the least version of each parameter.
fn least_versions(
    engine: &mut Engine,
    asked: &[Asked],
    deadline: Duration,
    what: &str,
) -> Result<BTreeMap<ParameterIndex, u64>, Failure> {
    let finished = finish_all(engine, asked, deadline, what)?;
    let mut versions = BTreeMap::new();
    for (one, finished) in asked.iter().zip(&finished) {
        for (parameter, version) in one.parameters.iter().zip(&finished.versions) {
            let least = versions.entry(*parameter).or_insert(version.0);
            *least = version.0.min(*least);
        }
    }
    Ok(versions)
}

fn check_rate(rate: Option<f64>) -> Result<(), Failure> {
    match rate {
        Some(rate) if !rate.is_finite() || rate < 0.0 => {
            Err(Failure::call(format!("learning rate {rate}; expected a finite number that is not negative")))
        }
        _ => Ok(()),
    }
}

/// Checks everything about gradients or values before any of the call is sent; says which parameters they are for.
fn choose_given(job: &Job, all: &[Given<'_>], is_gradient: bool) -> Result<Vec<ParameterIndex>, Failure> {
    let check = |given: &Given<'_>| {
        let parameter = job.parameter(given.name)?;
        check_given(parameter, given, is_gradient).map(|()| parameter.index())
    };
    let chosen = all.iter().map(check).collect::<Result<Vec<_>, _>>()?;
    check_once(job, &chosen)?;
    Ok(chosen)
}

fn check_given(parameter: &Parameter, given: &Given<'_>, is_gradient: bool) -> Result<(), Failure> {
    let declaration = parameter.declaration();
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
fn choose_wanted(job: &Job, into: &[Wanted<'_>]) -> Result<Vec<ParameterIndex>, Failure> {
    let check = |wanted: &Wanted<'_>| {
        let parameter = job.parameter(wanted.name)?;
        let expected = parameter.declaration().bytes;
        if bytes(wanted.content.len()) == expected {
            return Ok(parameter.index());
        }
        Err(Failure::call(format!(
            "parameter \"{}\": a place of {} bytes; expected {expected}",
            wanted.name,
            wanted.content.len()
        )))
    };
    let chosen = into.iter().map(check).collect::<Result<Vec<_>, _>>()?;
    check_once(job, &chosen)?;
    Ok(chosen)
}

fn check_once(job: &Job, chosen: &[ParameterIndex]) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    match chosen.iter().find(|index| !seen.insert(**index)) {
        None => Ok(()),
        Some(twice) => {
            let name = job.chosen(*twice).declaration().name.as_str();
            Err(Failure::call(format!("parameter \"{name}\" is in one call twice")))
        }
    }
}

fn naming<'a>(what: &str, mut names: impl Iterator<Item = &'a str>) -> String {
    let first = names.next().unwrap_or("nothing");
    match names.count() {
        0 => format!("{what} \"{first}\""),
        more => format!("{what} \"{first}\" and {more} more"),
    }
}

fn bytes(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
