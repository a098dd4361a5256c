//! A trainer's process: it joins, initialises or waits, and trains.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use prost::Message;
use pserver_client::answer;
use pserver_core::client::{Finished, LaneId, Refused, RequestBody};
use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, Generation, ParameterIndex, Round, Sequence, ShardId, Ticket};
use pserver_core::memory::LendingMemory;
use pserver_core::partition::{Catalogue, CataloguePage, Topology};
use pserver_core::port::{Incoming, Outgoing, Payloads, ReceiveBuffers};
use pserver_core::prng::Prng;
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::{Commit, Request};
use pserver_core::wire::{
    Address, CatalogueRequest, Entry, ErrorCode, FinishMessage, Flags, Frame, Head, InitMessage, JobMessage,
    JoinRequest, Joined, Kind, PushMessage, Role,
};

use crate::client::{RequestResult, SimClient};
use crate::job::{SimChunk, SimJob, SimMode};
use crate::machine::ProcessFate;
use crate::network::{EndpointId, SimTransport};
use crate::oracle::{Acknowledged, Oracle};

const PAGE_BYTES_MAX: u32 = 64 * 1024;
/// Pause before a failed call is repeated, and between two questions for addresses.
const REPEAT_PAUSE: Duration = Duration::from_millis(100);
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// The same while a shard moves.
const MOVE_PAUSE: Duration = Duration::from_millis(20);
/// Longer than servers keep parts of rows.
const HOLD: Duration = Duration::from_secs(31);
/// One of so many steps is held so, until one was.
const HOLDS: u64 = 20;

/// The progress of a rank, which outlives its process: a program would have it in its own checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TrainerRecord {
    /// The last step that was begun.
    begun: u64,
    /// Whether the last value that was wanted is there.
    pub(crate) is_done: bool,
    /// Whether it has left the job.
    pub(crate) has_left: bool,
    /// Whether it has come back after that.
    pub(crate) has_returned: bool,
    /// The last number that it has sent as a value.
    set: u64,
}

/// The trainer's activity.
#[derive(Debug)]
enum TrainerPhase {
    Joining,
    Beginning,
    Declaring {
        next: InitStep,
    },
    Fetching {
        pages: Vec<CataloguePage>,
        of: u32,
    },
    Learning,
    Computing {
        until: Now,
    },
    /// It sends the first parts of rows, before everything else of a step.
    PushingFirst {
        step: u64,
        fetches: bool,
    },
    /// It has sent them, and stands still.
    Holding {
        step: u64,
        fetches: bool,
        until: Now,
    },
    Pushing {
        step: u64,
        fetches: bool,
    },
    Pulling,
    Setting {
        number: u64,
    },
    /// It tells the shards, then the coordinator, that it leaves.
    Leaving {
        is_last: bool,
    },
    Idle,
}

/// The part of the initialisation that follows the current call.
#[derive(Debug)]
enum InitStep {
    Finish,
    Commit { page: usize },
    Done,
}

/// The purpose of a request about chunks.
struct ChunkRequest {
    chunks: Vec<SimChunk>,
    lane: LaneId,
    /// Memory that gets the values.
    memory: Option<LendingMemory>,
    /// Memory with the gradients, which lives until the transport has returned them.
    _gradients: LendingMemory,
    acknowledged: Acknowledged,
}

/// A trainer's process.
pub(crate) struct SimTrainer {
    pub(crate) rank: u32,
    client: SimClient,
    pub(crate) fate: Arc<ProcessFate>,
    prng: Prng,
    phase: TrainerPhase,
    flags: TrainerFlags,
    known: KnownJob,
    sequence: u64,
    /// Steps that the trainer knows to be in each parameter, in mode sync.
    rounds: BTreeMap<ParameterIndex, u64>,
    /// The newest version of each chunk that this process has seen.
    versions: BTreeMap<ChunkId, u64>,
    requests: TrainerRequests,
    times: TrainerTimes,
}

/// Conditions of a trainer's process.
#[derive(Default)]
struct TrainerFlags {
    /// Whether another process has its rank: it ends its call, and begins no other.
    is_former: bool,
    /// Whether it has sent the gradients of a step whose values it has not asked for.
    is_ahead: bool,
    /// Whether it has stood still once with a part of its rows sent.
    has_held: bool,
}

/// Requests that have no result.
#[derive(Default)]
struct TrainerRequests {
    of_chunks: BTreeMap<Ticket, ChunkRequest>,
    /// Initial values that may be on their way.
    initial: BTreeMap<Ticket, LendingMemory>,
}

/// The job as the trainer knows it.
#[derive(Default)]
struct KnownJob {
    lanes: BTreeMap<ShardId, LaneId>,
    settings: Option<JobMessage>,
    topology: Option<Topology>,
    catalogue: Option<Catalogue>,
}

#[derive(Default)]
struct TrainerTimes {
    /// When the call in progress is cancelled.
    impatient_at: Option<Now>,
    /// When a failed call is repeated.
    repeat_at: Option<Now>,
    /// How much longer than others the next step takes.
    slow: Duration,
    /// Earliest time of the next question for addresses.
    search_at: Now,
}

/// The parts of the simulation that a turn of a trainer uses.
pub(crate) struct TrainerContext<'a> {
    pub(crate) job: &'a SimJob,
    pub(crate) oracle: &'a mut Oracle,
    pub(crate) record: &'a mut TrainerRecord,
    /// Whether every rank that has not left has a process that has joined.
    pub(crate) may_leave: bool,
    /// Whether faults have kept a trainer from servers for long.
    pub(crate) may_be_lost: bool,
    /// Whether a server whose place another process has taken may not have noticed that. It answers as before.
    pub(crate) may_read_old: bool,
    pub(crate) seen: &'a mut BTreeMap<&'static str, u64>,
}

impl TrainerContext<'_> {
    fn note(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }
}

/// The end of a turn.
pub(crate) enum TrainerTurn {
    /// The next turn is due at this time at the latest.
    Goes(Option<Now>),
    /// A newer process of this rank has replaced this one.
    Replaced,
}

/// Whether a refusal says that a trainer is lost.
fn is_of_loss(text: &str) -> bool {
    text.contains("which has not connected again")
}

impl SimTrainer {
    pub(crate) fn start(rank: u32, process: u32, transport: SimTransport, fate: Arc<ProcessFate>, seed: u64) -> Self {
        let mut client = SimClient::new(Role::Trainer, process, transport);
        client.ask_control(Request::Join(JoinRequest { trainer: Some(rank), incarnation: 0 }));
        Self {
            rank,
            client,
            fate,
            prng: Prng(seed),
            phase: TrainerPhase::Joining,
            flags: TrainerFlags::default(),
            known: KnownJob::default(),
            sequence: 0,
            rounds: BTreeMap::new(),
            versions: BTreeMap::new(),
            requests: TrainerRequests::default(),
            times: TrainerTimes::default(),
        }
    }

    pub(crate) fn endpoint(&self) -> EndpointId {
        self.client.endpoint()
    }

    /// Describes its activity, for a simulation that does not end.
    pub(crate) fn describe(&self) -> String {
        let rounds: Vec<u64> = self.rounds.values().copied().collect();
        format!("{:?}, rounds {rounds:?}, open {}", self.phase, self.client.describe())
    }

    /// Another process takes its rank.
    pub(crate) fn retire(&mut self) {
        self.flags.is_former = true;
    }

    pub(crate) fn has_joined(&self) -> bool {
        !matches!(self.phase, TrainerPhase::Joining)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.phase, TrainerPhase::Leaving { .. })
    }

    pub(crate) fn is_former(&self) -> bool {
        self.flags.is_former
    }

    /// Cancels the call in progress, if there is one, soon.
    pub(crate) fn lose_patience(&mut self, now: Now) {
        use TrainerPhase::{Learning, Pulling, Pushing, PushingFirst};
        if matches!(self.phase, PushingFirst { .. } | Pushing { .. } | Pulling | Learning) {
            self.times.impatient_at = Some(now);
        }
    }

    /// The next step takes so much longer.
    pub(crate) fn slow_down(&mut self, time: Duration) {
        self.times.slow = time;
    }

    /// Asks for every value once more.
    pub(crate) fn look_again(&mut self) {
        if matches!(self.phase, TrainerPhase::Idle) {
            self.phase = TrainerPhase::Computing { until: Now(0) };
        }
    }

    pub(crate) fn turn(&mut self, now: Now, cx: &mut TrainerContext<'_>) -> Result<TrainerTurn> {
        loop {
            let due = self.client.turn(now)?;
            self.check_losses(cx)?;
            if self.search(now, cx)? {
                return Ok(TrainerTurn::Replaced);
            }
            if self.times.impatient_at.is_some_and(|at| at <= now) {
                self.times.impatient_at = None;
                cx.note("a trainer cancels a call");
                self.client.cancel();
                continue;
            }
            if let Some(results) = self.client.take_call() {
                self.times.impatient_at = None;
                if let Some(refused) = self.take(now, results, cx)? {
                    // An initialiser may have lost its lease, and not its rank.
                    let is_declaring = matches!(self.phase, TrainerPhase::Declaring { .. });
                    if refused.code == ErrorCode::Fenced && !is_declaring {
                        return Ok(TrainerTurn::Replaced);
                    }
                    self.refused(now, &refused, cx)?;
                }
                continue;
            }
            if self.times.repeat_at.is_some_and(|at| at <= now) {
                self.times.repeat_at = None;
                self.repeat(cx)?;
                continue;
            }
            if let TrainerPhase::Computing { until } = self.phase
                && until <= now
            {
                self.step(cx)?;
                continue;
            }
            if let TrainerPhase::Holding { step, fetches, until } = self.phase
                && until <= now
            {
                self.push_rest(step, fetches, cx)?;
                continue;
            }
            let computing = match self.phase {
                TrainerPhase::Computing { until } | TrainerPhase::Holding { until, .. } => Some(until),
                _ => None,
            };
            let all = [due, computing, self.times.impatient_at, self.times.repeat_at];
            return Ok(TrainerTurn::Goes(all.into_iter().flatten().min()));
        }
    }

    /// Checks that nobody is called lost who was not away.
    fn check_losses(&mut self, cx: &TrainerContext<'_>) -> Result<()> {
        let mut all = self.client.take_refusals().into_iter();
        match all.find(|text| is_of_loss(text) && !cx.may_be_lost) {
            Some(text) => bail!("no trainer was away for long: {text}"),
            None => Ok(()),
        }
    }

    /// Asks for the addresses of servers while one does not answer. True where another process has the rank.
    fn search(&mut self, now: Now, cx: &mut TrainerContext<'_>) -> Result<bool> {
        for (_, result) in self.client.take_beside() {
            let finished = match result {
                Ok(finished) => finished,
                Err(refused) if refused.code == ErrorCode::Fenced => return Ok(true),
                Err(_) => continue,
            };
            let Answer::Joined(joined) = answer(&finished.control)? else { bail!("an answer to another request") };
            let (servers, map) = (joined.topology.unwrap_or_default(), joined.map.unwrap_or_default());
            let map = map.map().context("no map of shards")?;
            for (shard, lane) in &self.known.lanes {
                let place = map.place(*shard);
                let entry = &servers.servers[usize::from(place.server.0)];
                self.client.client.move_lane(*lane, Address::parse(&entry.address)?, place.term);
            }
            cx.note("a trainer asks where a server is");
        }
        if self.times.search_at <= now && self.client.client.needs_address() && !self.client.is_asked_beside() {
            let has_moved = self.client.client.has_moved();
            self.times.search_at = now + if has_moved { MOVE_PAUSE } else { SEARCH_PAUSE };
            self.client.ask_beside(Request::Observe(true));
        }
        Ok(false)
    }

    /// Takes the results of a call; the refusal, if one of its requests was refused.
    fn take(&mut self, now: Now, results: Vec<RequestResult>, cx: &mut TrainerContext<'_>) -> Result<Option<Refused>> {
        let (mut refused, mut finished) = (None, Vec::new());
        for (ticket, result) in results {
            self.requests.initial.remove(&ticket);
            match result {
                Ok(one) => finished.push((ticket, one)),
                Err(one) => {
                    self.requests.of_chunks.remove(&ticket);
                    refused = refused.or(Some(one));
                }
            }
        }
        for (ticket, one) in &finished {
            self.finished(*ticket, one, cx)?;
        }
        if refused.is_some() {
            return Ok(refused);
        }
        self.advance(now, finished, cx)?;
        Ok(None)
    }

    /// Goes on after a call that was answered.
    fn advance(&mut self, now: Now, finished: Vec<(Ticket, Finished)>, cx: &mut TrainerContext<'_>) -> Result<()> {
        let phase = std::mem::replace(&mut self.phase, TrainerPhase::Idle);
        match phase {
            TrainerPhase::Joining => {
                let Answer::Joined(joined) = answer(&finished[0].1.control)? else { bail!("expected a rank") };
                self.joined(joined)?;
                self.begin();
            }
            TrainerPhase::Beginning => match answer(&finished[0].1.control)? {
                Answer::Granted(generation) => {
                    cx.note("a trainer is elected");
                    self.client.client.identify(|one| one.generation = Generation(generation));
                    self.declare(cx)?;
                }
                Answer::Initialised(done) => {
                    self.client.client.identify(|one| one.generation = Generation(done.generation));
                    self.fetch(Vec::new(), done.pages);
                }
                _ => bail!("expected a grant or a catalogue"),
            },
            TrainerPhase::Declaring { next } => self.initialise(next, cx)?,
            TrainerPhase::Fetching { mut pages, of } => {
                let Answer::Page(bytes) = answer(&finished[0].1.control)? else { bail!("expected a page") };
                pages.push(CataloguePage::decode(bytes.as_slice())?);
                if pages.len() < of as usize {
                    self.fetch(pages, of);
                } else {
                    self.known.catalogue = Some(Catalogue::from_pages(pages)?);
                    self.pull(TrainerPhase::Learning, cx)?;
                }
            }
            TrainerPhase::PushingFirst { step, fetches } => self.pushed_first(now, (step, fetches), cx)?,
            TrainerPhase::Pushing { step, fetches } => {
                if cx.job.mode == SimMode::Sync {
                    self.rounds.values_mut().for_each(|round| *round = (*round).max(step));
                }
                cx.record.begun = cx.record.begun.max(step);
                self.sequence += 1;
                if fetches {
                    self.flags.is_ahead = false;
                    self.compute(now, cx);
                } else if !self.flags.is_ahead && self.prng.below(3) == 0 {
                    self.flags.is_ahead = true;
                    self.compute(now, cx);
                } else {
                    self.pull(TrainerPhase::Pulling, cx)?;
                }
            }
            TrainerPhase::Setting { .. } => {
                self.sequence += 1;
                self.compute(now, cx);
            }
            TrainerPhase::Leaving { is_last: false } => {
                self.client.ask_control(Request::Leave(true));
                self.phase = TrainerPhase::Leaving { is_last: true };
            }
            TrainerPhase::Leaving { is_last: true } => {
                cx.note("a trainer leaves");
                (cx.record.is_done, cx.record.has_left) = (true, true);
            }
            TrainerPhase::Learning | TrainerPhase::Pulling => {
                self.flags.is_ahead = false;
                self.compute(now, cx);
            }
            TrainerPhase::Computing { .. } | TrainerPhase::Holding { .. } | TrainerPhase::Idle => {
                bail!("an answer to no call")
            }
        }
        Ok(())
    }

    /// Goes on after the first parts of rows of a step, once with a pause.
    fn pushed_first(&mut self, now: Now, (step, fetches): (u64, bool), cx: &mut TrainerContext<'_>) -> Result<()> {
        if 0 < self.rank || self.flags.has_held || 0 < self.prng.below(HOLDS) {
            return self.push_rest(step, fetches, cx);
        }
        cx.note("a trainer stands still between parts of rows");
        self.flags.has_held = true;
        self.phase = TrainerPhase::Holding { step, fetches, until: now + HOLD };
        Ok(())
    }

    fn is_initialising(&self) -> bool {
        matches!(self.phase, TrainerPhase::Declaring { .. } | TrainerPhase::Beginning)
    }

    /// Decides what follows a refused call.
    fn refused(&mut self, now: Now, refused: &Refused, cx: &mut TrainerContext<'_>) -> Result<()> {
        match refused.code {
            ErrorCode::Invalid => bail!("trainer {}: a call was refused: {}", self.rank, refused.text),
            _ if self.flags.is_former => self.phase = TrainerPhase::Idle,
            ErrorCode::Deadline => {
                if is_of_loss(&refused.text) {
                    cx.note("a call ends because a trainer is lost");
                }
                if refused.text.contains("were dropped") {
                    cx.note("a trainer pushes rows anew");
                    self.sequence += 1;
                }
                cx.note("a call ends without an answer");
                self.times.repeat_at = Some(now + REPEAT_PAUSE);
            }
            ErrorCode::InitialisationLost | ErrorCode::NotInitialised | ErrorCode::Fenced if self.is_initialising() => {
                cx.note("an initialisation is lost");
                self.known.catalogue = None;
                self.begin();
            }
            _ => bail!("trainer {}: a call was refused ({:?}): {}", self.rank, refused.code, refused.text),
        }
        Ok(())
    }

    /// Repeats the call that failed.
    fn repeat(&mut self, cx: &mut TrainerContext<'_>) -> Result<()> {
        match self.phase {
            TrainerPhase::PushingFirst { step, fetches } | TrainerPhase::Pushing { step, fetches } => {
                self.push(step, fetches, cx)
            }
            TrainerPhase::Pulling => self.pull(TrainerPhase::Pulling, cx),
            TrainerPhase::Learning => self.pull(TrainerPhase::Learning, cx),
            TrainerPhase::Setting { number } => self.set(number, cx),
            TrainerPhase::Leaving { .. } => {
                self.leave();
                Ok(())
            }
            TrainerPhase::Joining => {
                let join = JoinRequest { trainer: Some(self.rank), incarnation: 0 };
                self.client.ask_control(Request::Join(join));
                Ok(())
            }
            TrainerPhase::Fetching { ref pages, of } => {
                let pages = pages.clone();
                self.fetch(pages, of);
                Ok(())
            }
            _ => {
                self.begin();
                Ok(())
            }
        }
    }

    fn joined(&mut self, joined: Joined) -> Result<()> {
        self.client.client.identify(|one| one.join(&joined));
        self.known.settings = joined.job;
        let servers = joined.topology.context("no servers")?;
        let topology = servers.topology()?;
        let map = joined.map.unwrap_or_default().map().context("no map of shards")?;
        for shard in topology.shard_ids() {
            let place = map.place(shard);
            let address = Address::parse(&servers.servers[usize::from(place.server.0)].address)?;
            let client = &mut self.client;
            let add = || client.add_lane(address.clone(), shard.lane(), shard.to_string());
            let lane = *self.known.lanes.entry(shard).or_insert_with(add);
            self.client.client.move_lane(lane, address, place.term);
        }
        self.known.topology = Some(topology);
        Ok(())
    }

    fn begin(&mut self) {
        self.phase = TrainerPhase::Beginning;
        self.client.ask_control(Request::Begin(true));
    }

    /// Sends the parameters, all zeros.
    fn declare(&mut self, cx: &mut TrainerContext<'_>) -> Result<()> {
        let catalogue = cx.job.catalogue(self.known.topology.clone().context("not joined")?)?;
        for parameter in catalogue.iter() {
            let message = InitMessage::from(parameter);
            for (shard, SimChunk { id, bytes, rows, .. }) in cx.job.chunks(parameter) {
                // A table begins without rows.
                let bytes = if rows.is_some() { 0 } else { bytes };
                let mut memory = LendingMemory::new(vec![0; bytes as usize]);
                let mut frame = Frame::with_control(Head::new(Kind::Init), &message);
                let zeros = vec![0; bytes as usize];
                frame.entries.push(Entry::with_payload(id, Round(0), parameter.declaration().element_type, &zeros));
                let payload = (bytes > 0).then(|| Outgoing::Loan(memory.read(bytes, |_| ())));
                let payload: Payloads = payload.into_iter().collect();
                let lane = self.known.lanes[&shard];
                let ticket = self.client.ask(lane, frame, RequestBody { payload, ..RequestBody::default() });
                self.requests.initial.insert(ticket, memory);
            }
        }
        self.known.catalogue = Some(catalogue);
        self.phase = TrainerPhase::Declaring { next: InitStep::Finish };
        Ok(())
    }

    fn initialise(&mut self, next: InitStep, cx: &TrainerContext<'_>) -> Result<()> {
        let catalogue = self.known.catalogue.as_ref().context("nothing was declared")?;
        let next = match next {
            InitStep::Finish => {
                for (shard, lane) in &self.known.lanes {
                    let chunks = catalogue.chunks_on(*shard).count() as u64;
                    let message = FinishMessage { chunks, job: self.known.settings };
                    let frame = Frame::with_control(Head::new(Kind::Finish), &message);
                    self.client.ask(*lane, frame, RequestBody::default());
                }
                InitStep::Commit { page: 0 }
            }
            InitStep::Commit { page } => {
                let pages = catalogue.pages(PAGE_BYTES_MAX);
                let last = page + 1 == pages.len();
                let commit = Commit {
                    generation: self.client.client.identity().generation.0,
                    page: pages[page].encode_to_vec(),
                    last,
                    job: self.known.settings.filter(|_| last),
                    default_config: Vec::new(),
                };
                self.client.ask_control(Request::Commit(commit));
                if last { InitStep::Done } else { InitStep::Commit { page: page + 1 } }
            }
            InitStep::Done => {
                self.rounds = catalogue.iter().map(|parameter| (parameter.index(), 0)).collect();
                self.rounds.retain(|index, _| cx.job.has_gradients(*index));
                self.phase = TrainerPhase::Computing { until: Now(0) };
                self.sequence = 1;
                return Ok(());
            }
        };
        self.phase = TrainerPhase::Declaring { next };
        Ok(())
    }

    fn fetch(&mut self, pages: Vec<CataloguePage>, of: u32) {
        let page = u32::try_from(pages.len()).expect("they are few");
        self.client.ask_control(Request::Catalogue(CatalogueRequest { page }));
        self.phase = TrainerPhase::Fetching { pages, of };
    }

    fn compute(&mut self, now: Now, cx: &mut TrainerContext<'_>) {
        self.sequence = self.sequence.max(1);
        if self.flags.is_former {
            self.phase = TrainerPhase::Idle;
            return;
        }
        let leaves = cx.job.leaves(self.rank, cx.record.has_returned);
        let has_all = self.has_all(cx) && !self.flags.is_ahead;
        // The last gradient of a trainer that leaves may be in an open round.
        if self.is_at_end(cx) && (has_all || leaves && self.prng.below(2) == 0) {
            match (leaves, cx.may_leave) {
                (true, true) => self.leave(),
                (true, false) => self.phase = TrainerPhase::Computing { until: now + REPEAT_PAUSE },
                (false, _) => {
                    cx.record.is_done = true;
                    self.phase = TrainerPhase::Idle;
                }
            }
            return;
        }
        let pause = Duration::from_millis(self.prng.below(30)) + std::mem::take(&mut self.times.slow);
        self.phase = TrainerPhase::Computing { until: now + pause };
    }

    /// Whether every step of this trainer was sent.
    fn is_at_end(&self, cx: &TrainerContext<'_>) -> bool {
        let last = cx.job.last(self.rank, cx.record.has_returned);
        match cx.job.mode {
            SimMode::Sync => self.rounds.values().all(|round| *round >= last),
            _ => cx.record.begun >= last,
        }
    }

    /// Whether the last values that this process saw contain them.
    fn has_all(&self, cx: &TrainerContext<'_>) -> bool {
        let last = cx.job.last(self.rank, cx.record.has_returned);
        let has_it = |(id, version): (&ChunkId, &u64)| !cx.job.has_gradients(id.parameter) || *version >= last;
        cx.job.mode != SimMode::Sync || self.versions.iter().all(has_it)
    }

    fn step(&mut self, cx: &mut TrainerContext<'_>) -> Result<()> {
        if self.is_at_end(cx) {
            return self.pull(TrainerPhase::Pulling, cx);
        }
        if self.rank == 0 && cx.job.has_set() && self.prng.below(5) == 0 {
            cx.record.set += 1;
            return self.set(cx.record.set, cx);
        }
        let step = match cx.job.mode {
            SimMode::Sync => self.rounds.values().min().copied().unwrap_or(0) + 1,
            _ => cx.record.begun + 1,
        };
        cx.record.begun = cx.record.begun.max(step);
        let fetches = self.prng.below(2) == 0;
        self.push(step, fetches, cx)
    }

    /// Replaces the values that only this trainer writes; a repetition has the same number.
    fn set(&mut self, number: u64, cx: &mut TrainerContext<'_>) -> Result<()> {
        let head = Head { sequence: Sequence(self.sequence), ..Head::new(Kind::Set) };
        for ((lane, _), chunks) in self.chunks_by_lane(cx.job)? {
            let chunks: Vec<_> = chunks.into_iter().filter(|chunk| chunk.is_set).collect();
            if chunks.is_empty() {
                continue;
            }
            let mut frame = Frame::bare(head);
            let mut values = Vec::new();
            for chunk in &chunks {
                let value = (number as f32).to_le_bytes().repeat(chunk.bytes as usize / 4);
                frame.entries.push(Entry::with_payload(chunk.id, Round(0), ElementType::Float32, &value));
                values.extend(value);
                cx.oracle.set(chunk.id, number);
            }
            self.ask_chunks(lane, frame, LendingMemory::new(values), (chunks, false), cx);
        }
        cx.note("a trainer sets a value");
        self.phase = TrainerPhase::Setting { number };
        Ok(())
    }

    /// Tells every shard that this trainer leaves the job.
    fn leave(&mut self) {
        let head = Head { sequence: Sequence(self.sequence), ..Head::new(Kind::Leave) };
        for lane in self.known.lanes.values() {
            self.client.ask(*lane, Frame::bare(head), RequestBody::default());
        }
        self.phase = TrainerPhase::Leaving { is_last: false };
    }

    /// Sends the gradients of a step; a repetition has the same number.
    fn push(&mut self, step: u64, fetches: bool, cx: &mut TrainerContext<'_>) -> Result<()> {
        for ((lane, _), mut chunks) in self.chunks_by_lane(cx.job)? {
            chunks.retain(|chunk| 1 < chunk.parts && cx.job.has_row(self.rank, step, chunk));
            self.push_chunks(step, (lane, true), (chunks, false), cx);
        }
        if self.requests.of_chunks.is_empty() {
            return self.push_rest(step, fetches, cx);
        }
        self.phase = TrainerPhase::PushingFirst { step, fetches };
        Ok(())
    }

    /// Sends the gradients of a step without first parts of rows.
    fn push_rest(&mut self, step: u64, fetches: bool, cx: &mut TrainerContext<'_>) -> Result<()> {
        for ((lane, is_of_rows), chunks) in self.chunks_by_lane(cx.job)? {
            // A push of rows brings no value back.
            self.push_chunks(step, (lane, false), (chunks, fetches && !is_of_rows), cx);
        }
        self.phase = TrainerPhase::Pushing { step, fetches };
        Ok(())
    }

    fn push_chunks(
        &mut self,
        step: u64,
        (lane, is_first): (LaneId, bool),
        (mut chunks, fetches): (Vec<SimChunk>, bool),
        cx: &mut TrainerContext<'_>,
    ) {
        chunks.retain(|chunk| chunk.has_gradients);
        if chunks.is_empty() {
            return;
        }
        let flags = if fetches { Flags::WANT_VALUE } else { Flags::default() };
        let head = Head { flags, sequence: Sequence(self.sequence), ..Head::new(Kind::Push) };
        let round = if cx.job.mode == SimMode::Sync { step } else { 0 };
        let mut frame = Frame::with_control(head, &PushMessage::default());
        let mut gradients = Vec::new();
        for chunk in &chunks {
            let part = if is_first { 0 } else { chunk.parts - 1 };
            let gradient = cx.job.gradient(self.rank, step, chunk, part);
            frame.entries.push(Entry::with_payload(chunk.id, Round(round), ElementType::Float32, &gradient));
            gradients.extend(gradient);
            cx.oracle.sent(chunk.id, self.rank, step);
        }
        self.ask_chunks(lane, frame, LendingMemory::new(gradients), (chunks, fetches), cx);
    }

    /// Asks for every value, in mode sync with every gradient that this process has sent.
    fn pull(&mut self, phase: TrainerPhase, cx: &mut TrainerContext<'_>) -> Result<()> {
        for ((lane, _), chunks) in self.chunks_by_lane(cx.job)? {
            let mut frame = Frame::bare(Head::new(Kind::Pull));
            let mut ids = Vec::new();
            for chunk in &chunks {
                let least = match (cx.job.mode, &phase) {
                    // An earlier attempt may have learned the round of some chunks only.
                    (_, TrainerPhase::Learning) => 0,
                    (SimMode::Sync, _) => self.rounds.get(&chunk.id.parameter).copied().unwrap_or(0),
                    _ => 0,
                };
                let wanted: Vec<u8> = chunk.rows.iter().flatten().flat_map(|row| row.to_le_bytes()).collect();
                frame.entries.push(Entry::with_payload(chunk.id, Round(least), ElementType::Float32, &wanted));
                ids.extend(wanted);
            }
            self.ask_chunks(lane, frame, LendingMemory::new(ids), (chunks, true), cx);
        }
        self.phase = phase;
        Ok(())
    }

    fn ask_chunks(
        &mut self,
        lane: LaneId,
        frame: Frame,
        mut gradients: LendingMemory,
        (chunks, fetches): (Vec<SimChunk>, bool),
        cx: &mut TrainerContext<'_>,
    ) {
        let bytes: usize = chunks.iter().map(|chunk| chunk.bytes as usize).sum();
        let mut memory = fetches.then(|| LendingMemory::new(vec![0xff; bytes]));
        let lend_in = |memory: &mut LendingMemory, bytes| Incoming::Loan(memory.write(bytes));
        let into: ReceiveBuffers = match &mut memory {
            Some(memory) => chunks.iter().map(|chunk| lend_in(memory, chunk.bytes)).collect(),
            None => ReceiveBuffers::new(),
        };
        let mut acknowledged = cx.oracle.acknowledged_now(chunks.iter());
        if cx.may_read_old {
            acknowledged.iter_mut().for_each(|(_, before)| before.fill(0));
        }
        let payloads = frame.entries.iter().filter(|entry| entry.bytes > 0).map(|entry| entry.bytes);
        let payload = payloads.map(|bytes| Outgoing::Loan(gradients.read(bytes, |_| ()))).collect();
        let body = RequestBody { payload, into, ..RequestBody::default() };
        let ticket = self.client.ask(lane, frame, body);
        self.requests
            .of_chunks
            .insert(ticket, ChunkRequest { chunks, lane, memory, _gradients: gradients, acknowledged });
    }

    /// Takes an answer about chunks: it acknowledges gradients, or brings values, or both.
    fn finished(&mut self, ticket: Ticket, finished: &Finished, cx: &mut TrainerContext<'_>) -> Result<()> {
        let Some(ChunkRequest { chunks, lane, memory, acknowledged, .. }) = self.requests.of_chunks.remove(&ticket)
        else {
            return Ok(());
        };
        let pushed = match self.phase {
            TrainerPhase::Pushing { step, .. } => Some(step),
            _ => None,
        };
        let values = memory.map(|memory| memory.take_back().context("a finished request returns its memory"));
        let values = values.transpose()?;
        let mut at = 0;
        for (index, chunk) in chunks.iter().enumerate() {
            let id = &chunk.id;
            match (&self.phase, pushed) {
                (_, Some(step)) => cx.oracle.acknowledged(*id, self.rank, step),
                (TrainerPhase::Setting { number }, None) => cx.oracle.acknowledged_set(*id, *number),
                _ => {}
            }
            let Some(values) = &values else { continue };
            let value = &values[at..at + chunk.bytes as usize];
            at += chunk.bytes as usize;
            let version = finished.versions[index].0;
            let mut before = acknowledged[index].1.clone();
            if let Some(step) = pushed {
                before[self.rank as usize] |= 1 << (step - 1);
                // A later set is not in the value of the step.
                before[cx.job.trainers as usize] = 0;
            }
            let known = self.versions.entry(*id).or_default();
            // A former process may have taken the step.
            let of_step = pushed.filter(|step| *known < *step);
            cx.oracle.check(chunk, (version, of_step), value, &before).with_context(|| format!("of lane {lane:?}"))?;
            ensure!(*known <= version, "chunk {id:?} went back from version {known} to {version}");
            *known = version;
        }
        if matches!(self.phase, TrainerPhase::Learning) && cx.job.mode == SimMode::Sync {
            for SimChunk { id, .. } in chunks.iter().filter(|chunk| chunk.has_gradients) {
                let version = self.versions[id];
                let round = self.rounds.entry(id.parameter).or_insert(version);
                *round = version.min(*round);
            }
        }
        Ok(())
    }

    /// The chunks of each lane, those of rows apart.
    fn chunks_by_lane(&self, job: &SimJob) -> Result<BTreeMap<(LaneId, bool), Vec<SimChunk>>> {
        let mut lanes: BTreeMap<(LaneId, bool), Vec<SimChunk>> = BTreeMap::new();
        for parameter in self.known.catalogue.as_ref().context("no catalogue")?.iter() {
            for (shard, chunk) in job.chunks(parameter) {
                lanes.entry((self.known.lanes[&shard], chunk.rows.is_some())).or_default().push(chunk);
            }
        }
        Ok(lanes)
    }
}
