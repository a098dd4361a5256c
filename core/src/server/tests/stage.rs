//! A test stage: a shard, trainers with connections, frames built by hand, and answers as text.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;

use crate::accumulator::{AccumulatorPace, AccumulatorSettings};
use crate::checkpoint::{Folder, Storage};
use crate::config::{Merge, Mode, OptimizerSettings, ParameterConfig};
use crate::dtype::{ElementType, Half};
use crate::error::Failure;
use crate::ids::{
    ChunkId, ChunkIndex, Epoch, Generation, Incarnation, ParameterIndex, PeerId, Round, Sequence, Term, Ticket,
    TrainerId, Version,
};
use crate::limits::RECEIVES_MAX;
use crate::memory::Lease;
use crate::partition::{Buckets, Declaration, DeclarationMessage, Hosted, Name, TotalPart};
use crate::port::{
    self, Accelerator, Event, Flow, FlowSource, Incoming, Outgoing, Payloads, Plain, ReceiveBuffers, Submit,
};
use crate::server::shard::Phase;
use crate::server::{JournalOptions, NoRoom, NonFinite, Restored, ServerOutput, Shard, ShardOptions};
use crate::time::Now;
use crate::wire::{
    Entry, ErrorMessage, FinishMessage, Flags, Frame, Head, HelloMessage, InitMessage, JobMessage, Kind, PushMessage,
};

pub(super) const CHUNK_BYTES: u32 = 4096;
pub(super) const EPOCH: Epoch = Epoch(7);
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// A job: its settings and its parameters.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) mode: Mode,
    pub(super) merge: Merge,
    pub(super) trainers: u32,
    pub(super) parameters: Vec<Parameter>,
}

#[derive(Clone)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    pub(super) element_type: ElementType,
    /// Of a sparse parameter those of a row.
    pub(super) elements: u64,
    pub(super) config: &'static str,
    /// How a sparse parameter's rows are partitioned by bucket.
    pub(super) buckets: Option<Buckets>,
    pub(super) hosted: Option<Hosted>,
}

impl Parameter {
    /// Each number of a table's total is a chunk.
    fn chunk_bytes(&self) -> u32 {
        let settings = OptimizerSettings::from_text(self.config).expect("the test's configuration is valid");
        if settings.total_part.is_some() && self.elements > 1 { TotalPart::NUMBER_BYTES } else { CHUNK_BYTES }
    }
}

impl Plan {
    pub(super) fn new(mode: Mode, merge: Merge, trainers: u32) -> Self {
        Self { mode, merge, trainers, parameters: Vec::new() }
    }

    pub(super) fn with(
        mut self,
        name: &'static str,
        element_type: ElementType,
        elements: u64,
        config: &'static str,
    ) -> Self {
        let settings = OptimizerSettings::from_text(config).expect("the test's configuration is valid");
        let buckets = settings.sparse.map(|sparse| Buckets {
            rows: sparse.rows.or(sparse.height).expect("one of them is said"),
            count: sparse.buckets.expect("the test says how many"),
        });
        self.parameters.push(Parameter { name, element_type, elements, config, buckets, hosted: None });
        self
    }

    /// The same with a parameter of a hosted program.
    pub(super) fn hosting(
        self,
        name: &'static str,
        element_type: ElementType,
        elements: u64,
        config: &'static str,
        hosted: Hosted,
    ) -> Self {
        let mut plan = self.with(name, element_type, elements, config);
        plan.parameters.last_mut().expect("it was just added").hosted = Some(hosted);
        plan
    }

    pub(super) fn job(&self) -> JobMessage {
        let (mode, staleness) = self.mode.numbers();
        let merge = self.merge.number();
        JobMessage { mode, staleness, merge, trainers: self.trainers, chunk_bytes: CHUNK_BYTES }
    }

    /// Every chunk and its bytes.
    pub(super) fn chunks(&self) -> Vec<(ChunkId, u32)> {
        let all = (0..).zip(&self.parameters).flat_map(|(index, one)| {
            let bytes = one.elements * one.element_type.bytes();
            let (is_sparse, chunk_bytes) = (one.buckets.is_some(), u64::from(one.chunk_bytes()));
            let count = one.buckets.map_or(bytes.div_ceil(chunk_bytes), |buckets| buckets.count.into());
            (0..count).map(move |chunk| {
                if is_sparse {
                    return (id(index, chunk), 0);
                }
                let left = (bytes - chunk * chunk_bytes).min(chunk_bytes);
                (id(index, chunk), u32::try_from(left).expect("a chunk is small"))
            })
        });
        all.collect()
    }

    pub(super) fn element_type(&self, id: ChunkId) -> ElementType {
        self.parameters[id.parameter.0 as usize].element_type
    }

    pub(super) fn init(&self, index: u32) -> InitMessage {
        let one = &self.parameters[index as usize];
        let settings = OptimizerSettings::from_text(one.config).expect("the test's configuration is valid");
        let rule = settings.rule.expect("the test's configuration has a rule");
        let width = one.elements;
        let height = settings.sparse.and_then(|sparse| sparse.height).unwrap_or(0);
        let rows = one.buckets.map(|buckets| buckets.rows);
        let declaration = Declaration {
            name: Name::new(one.name.as_bytes()).expect("the test's name is valid"),
            element_type: one.element_type,
            bytes: width * rows.unwrap_or(1) * one.element_type.bytes(),
            shape: if rows.is_some() { vec![height, width] } else { vec![width] },
            whole: one.hosted.is_some() || rows.is_none() && !rule.is_element_wise(),
            config: ParameterConfig { rule, sparse: settings.sparse, backup_trainers: settings.backup_trainers }
                .encode(),
            buckets: one.buckets,
            owner: None,
            sender: settings.sender,
            total_part: settings.total_part,
            hosted: one.hosted,
        };
        let declaration = Some(DeclarationMessage::from(&declaration));
        InitMessage { parameter: index, declaration, chunk_bytes: one.chunk_bytes() }
    }

    /// The words for a chunk: `w` is the first of parameter w, `w.1` the second.
    pub(super) fn words(&self, id: ChunkId) -> String {
        let name = self.parameters.get(id.parameter.0 as usize).map_or("?", |one| one.name);
        if id.chunk.0 == 0 { name.to_owned() } else { format!("{name}.{}", id.chunk) }
    }
}

pub(super) fn id(parameter: u32, chunk: u64) -> ChunkId {
    ChunkId { parameter: ParameterIndex(parameter), chunk: ChunkIndex(chunk) }
}

/// A frame and its payloads.
#[derive(Clone)]
pub(super) struct Parcel {
    pub(super) frame: Frame,
    pub(super) body: Vec<Vec<u8>>,
}

impl Parcel {
    pub(super) fn new(head: Head, entries: Vec<(ChunkId, u64, ElementType, Vec<u8>)>) -> Self {
        let mut frame = Frame::bare(head);
        let mut body = Vec::new();
        for (id, round, element_type, payload) in entries {
            frame.entries.push(Entry::with_payload(id, Round(round), element_type, &payload));
            if !payload.is_empty() {
                body.push(payload);
            }
        }
        Self { frame, body }
    }

    /// The same, with some values wanted as halves if values are wanted, always the same ones.
    pub(super) fn with_halves(mut self) -> Self {
        let wants_value = self.frame.head.flags.contains(Flags::WANT_VALUE);
        for entry in self.frame.entries.iter_mut().filter(|one| wants_value && one.element_type == ElementType::Float32)
        {
            let which = u64::from(entry.id.parameter.0) + entry.id.chunk.0 + u64::from(self.frame.head.trainer.0);
            entry.half = [None, Some(Half::Float16), Some(Half::Bfloat16)][usize::try_from(which % 3).expect("small")];
        }
        self
    }

    pub(super) fn carrying(mut self, message: &PushMessage) -> Self {
        self.frame.control = message.encode_to_vec();
        self
    }
}

/// One trainer as it was last heard.
#[derive(Clone, Copy)]
pub(super) struct Actor {
    pub(super) peer: PeerId,
    pub(super) incarnation: Incarnation,
    pub(super) sequence: u64,
}

/// An answer.
#[derive(Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) peer: PeerId,
    pub(super) frame: Frame,
    pub(super) body: Vec<Vec<u8>>,
}

/// The contents of a shard, for bitwise comparison.
pub(super) type Contents = Vec<(ChunkId, Version, Vec<u8>, Vec<Vec<u8>>)>;

/// A shard and its clients.
pub(super) struct Stage {
    pub(super) plan: Plan,
    pub(super) shard: Shard,
    pub(super) now: Now,
    pub(super) answers: Vec<Answer>,
    pub(super) closed: Vec<PeerId>,
    pub(super) generation: Generation,
    /// Whether the transport keeps the payloads that were sent.
    pub(super) holds: bool,
    pub(super) held: Vec<(PeerId, Payloads)>,
    pub(super) actors: BTreeMap<u32, Actor>,
    /// The run that the hello of each next connection names.
    pub(super) run: u32,
    /// The trainers of that run.
    pub(super) run_trainers: u32,
    /// Receive buffers for heads that were not answered at once.
    pub(super) late_places: Vec<(PeerId, ReceiveBuffers)>,
    /// Whether an accelerator, if there is one, ends its work only when a script says so.
    pub(super) is_late: bool,
    /// Leases taken by the test, so that the shard has none.
    pub(super) taken: Vec<Lease>,
    /// Where the shard's files are, once it was restored.
    folder: Option<Folder>,
    peers: u64,
    tickets: u64,
}

impl Stage {
    /// A shard without connections.
    pub(super) fn empty(plan: Plan) -> Self {
        Self {
            plan,
            shard: Shard::new(options(), Box::new(Plain)),
            now: Now(1000),
            answers: Vec::new(),
            closed: Vec::new(),
            generation: Generation(1),
            holds: false,
            held: Vec::new(),
            actors: BTreeMap::new(),
            run: 0,
            run_trainers: 0,
            late_places: Vec::new(),
            is_late: false,
            taken: Vec::new(),
            folder: None,
            peers: 0,
            tickets: 0,
        }
    }

    /// The same, with a memory limit.
    pub(super) fn with_memory_limit(self, bytes: u64) -> Self {
        let options = ShardOptions {
            memory_limit: Some(crate::server::ProcessMemory { bytes, need: crate::shares::ShardNeed::default() }),
            ..options()
        };
        Self { shard: Shard::new(options, Box::new(Plain)), ..self }
    }

    /// The same, with an accelerator.
    pub(super) fn with_accelerator(self, accelerator: impl Accelerator + 'static) -> Self {
        Self { shard: self.shard.with_accelerator(Box::new(accelerator), NoRoom::Processor), ..self }
    }

    /// The same, with an accelerator that must have room for all chunks that it supports.
    pub(super) fn with_named_accelerator(self, accelerator: impl Accelerator + 'static) -> Self {
        Self { shard: self.shard.with_accelerator(Box::new(accelerator), NoRoom::Refused), ..self }
    }

    /// A shard whose parameters are initialised, every element zero, with every trainer connected.
    pub(super) fn serving(plan: Plan) -> Self {
        Self::empty(plan).initialised()
    }

    pub(super) fn initialised(mut self) -> Self {
        self.initialise();
        self
    }

    pub(super) fn initialise(&mut self) {
        self.begin();
        assert_eq!(self.shard.generation(), self.generation, "{:?}", self.errors());
        self.answers.clear();
    }

    /// Sends all frames of an initialisation, whether the shard accepts or refuses them.
    pub(super) fn begin(&mut self) {
        for trainer in 0..self.plan.trainers {
            self.connect(trainer, Incarnation(1));
        }
        for index in 0..u32::try_from(self.plan.parameters.len()).expect("few") {
            let parcel = self.init(index, None);
            self.deliver(0, &parcel);
        }
        let chunks = self.plan.chunks().len() as u64;
        let parcel = self.finish(chunks);
        self.deliver(0, &parcel);
    }

    /// The frame that brings a parameter's chunks, or only those named.
    pub(super) fn init(&mut self, index: u32, only: Option<&[u64]>) -> Parcel {
        let head = self.head(Kind::Init, 0);
        let chunks = self
            .plan
            .chunks()
            .into_iter()
            .filter(|(id, _)| id.parameter.0 == index && only.is_none_or(|only| only.contains(&id.chunk.0)));
        let element_type = self.plan.parameters[index as usize].element_type;
        let entries = chunks.map(|(id, bytes)| (id, 0, element_type, vec![0; bytes as usize])).collect();
        let mut parcel = Parcel::new(head, entries);
        parcel.frame.control = self.plan.init(index).encode_to_vec();
        parcel
    }

    pub(super) fn finish(&mut self, chunks: u64) -> Parcel {
        let message = FinishMessage { chunks, job: Some(self.plan.job()) };
        let head = self.head(Kind::Finish, 0);
        Parcel { frame: Frame::with_control(head, &message), body: Vec::new() }
    }

    /// A head of the next request of `trainer`, without a new sequence.
    pub(super) fn head(&mut self, kind: Kind, trainer: u32) -> Head {
        self.tickets += 1;
        let actor = self.actors[&trainer];
        Head {
            epoch: EPOCH,
            trainer: TrainerId(trainer),
            incarnation: actor.incarnation,
            sequence: Sequence(actor.sequence),
            request: Ticket(self.tickets),
            generation: self.generation,
            ..Head::new(kind)
        }
    }

    /// A head of the next mutating call of `trainer`.
    pub(super) fn call(&mut self, kind: Kind, trainer: u32) -> Head {
        self.actors.get_mut(&trainer).expect("the trainer is connected").sequence += 1;
        self.head(kind, trainer)
    }

    pub(super) fn push(&mut self, trainer: u32, entries: Vec<(ChunkId, u64, Vec<u8>)>, wants_value: bool) -> Parcel {
        let mut head = self.call(Kind::Push, trainer);
        if wants_value {
            head.flags = Flags::WANT_VALUE;
        }
        let plan = self.plan.clone();
        let typed = entries.into_iter().map(|(id, round, bytes)| (id, round, plan.element_type(id), bytes));
        Parcel::new(head, typed.collect())
    }

    pub(super) fn connect(&mut self, trainer: u32, incarnation: Incarnation) {
        self.peers += 1;
        let peer = PeerId(self.peers);
        let sequence = self.actors.get(&trainer).filter(|actor| actor.incarnation == incarnation);
        let sequence = sequence.map_or(0, |actor| actor.sequence);
        self.actors.insert(trainer, Actor { peer, incarnation, sequence });
        self.event(Event::Accepted { peer, origin: format!("trainer {trainer}"), transport: "tcp: a test".to_owned() });
        let head = Head { epoch: EPOCH, ..self.head(Kind::Hello, trainer) };
        let (run, run_trainers) = (self.run, self.run_trainers);
        let hello = HelloMessage { host: "h".into(), process: trainer, run, run_trainers, ..HelloMessage::default() };
        let frame = Frame::with_control(head, &hello);
        self.event(Event::Received { peer, frame, body: ReceiveBuffers::new() });
    }

    /// Sends a frame over the connection of `trainer`.
    pub(super) fn deliver(&mut self, trainer: u32, parcel: &Parcel) {
        self.deliver_from(self.actors[&trainer].peer, parcel);
    }

    pub(super) fn deliver_from(&mut self, peer: PeerId, parcel: &Parcel) {
        let frame = parcel.frame.clone();
        if parcel.body.is_empty() {
            self.event(Event::Received { peer, frame, body: ReceiveBuffers::new() });
            return;
        }
        let body = self.post_receive(peer, parcel);
        self.event(Event::Received { peer, frame, body });
    }

    /// The first half of a delivery: posts the shard's receive buffers and fills them.
    pub(super) fn post_receive(&mut self, peer: PeerId, parcel: &Parcel) -> ReceiveBuffers {
        let mut out = Vec::new();
        self.shard.handle(self.now, Event::Head { peer, frame: parcel.frame.clone() }, &mut out);
        let mut places = ReceiveBuffers::new();
        for output in out {
            match output {
                ServerOutput::Submit(Submit::PostReceive { into, .. }) => places = into,
                _ => panic!("the answer to a head is where its payloads go"),
            }
        }
        assert_eq!(places.len(), parcel.body.len(), "one place for every payload");
        for (place, payload) in places.iter_mut().zip(&parcel.body) {
            assert_eq!(place.len() as usize, payload.len(), "a place has its payload's length");
            if !matches!(place, Incoming::Discard { .. }) {
                place.bytes_mut().copy_from_slice(payload);
            }
        }
        places
    }

    pub(super) fn event(&mut self, event: Event) {
        let mut out = Vec::new();
        self.shard.handle(self.now, event, &mut out);
        self.shard.commit().expect("the disk is well");
        self.outputs(out);
        if !self.is_late {
            self.finish_work();
        }
    }

    /// Waits for the accelerator as before a last checkpoint, so that the states can be seen.
    pub(super) fn settle(&mut self) {
        self.try_settle().expect("nothing is lost");
    }

    pub(super) fn try_settle(&mut self) -> Result<(), Failure> {
        while matches!(&self.shard.phase, Phase::Serving(serving) if serving.is_catching_up()) {
            self.turn();
        }
        let mut out = Vec::new();
        let settled = self.shard.settle(self.now, Duration::from_millis(100), &mut out);
        self.shard.commit().expect("the disk is well");
        self.outputs(out);
        settled
    }

    /// Gives the accelerator all the turns that it needs.
    pub(super) fn finish_work(&mut self) {
        // A hung accelerator gets more turns than any work needs.
        for _ in 0..1000 {
            if !self.turn() && !self.shard.is_under_way() {
                return;
            }
        }
    }

    /// One turn of the shard's loop in which nothing arrives.
    pub(super) fn turn(&mut self) -> bool {
        let mut out = Vec::new();
        let is_busy = self.shard.attend(self.now, &mut out).expect("nothing is lost");
        self.shard.commit().expect("the disk is well");
        self.outputs(out);
        is_busy
    }

    /// Lets the transport finish what it holds.
    pub(super) fn release(&mut self) {
        self.holds = false;
        for (peer, body) in std::mem::take(&mut self.held) {
            self.event(Event::Sent { peer, ticket: Ticket(0), body });
        }
    }

    /// Takes every lease that is free now, so that updates of chunks with readers have none.
    pub(super) fn starve(&mut self) {
        for bytes in [CHUNK_BYTES, 1] {
            self.taken.extend(std::iter::from_fn(|| self.shard.pool.take_free(bytes)));
        }
    }

    /// Returns one of the taken leases, of at least `bytes` bytes; the shard gets no event.
    pub(super) fn spare(&mut self, bytes: u32) {
        let fits = self.taken.iter().rposition(|lease| bytes <= lease.len()).expect("one that is so long was taken");
        self.taken.remove(fits);
    }

    /// Returns the taken leases, and ends the reads in progress.
    pub(super) fn feed(&mut self) {
        self.taken.clear();
        self.release();
        let peer = PeerId(self.peers);
        self.event(Event::Sent { peer, ticket: Ticket(0), body: Payloads::new() });
    }

    pub(super) fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        if self.shard.deadline().is_some_and(|deadline| deadline <= self.now) {
            let mut out = Vec::new();
            self.shard.expire(self.now, &mut out);
            self.shard.commit().expect("the disk is well");
            self.outputs(out);
        }
        assert!(self.shard.deadline().is_none_or(|deadline| self.now < deadline), "what is over was ended");
    }

    fn outputs(&mut self, out: Vec<ServerOutput>) {
        for output in out {
            match output {
                ServerOutput::Submit(Submit::Send { peer, frame, body, .. }) => {
                    let payloads = body.iter().map(|one| one.bytes().to_vec()).collect();
                    check_payloads(&frame, &body);
                    self.answers.push(Answer { peer, frame, body: payloads });
                    if self.holds {
                        self.held.push((peer, body));
                    } else {
                        self.event(Event::Sent { peer, ticket: Ticket(0), body });
                    }
                }
                ServerOutput::Submit(Submit::PostReceive { peer, into }) => self.late_places.push((peer, into)),
                ServerOutput::Submit(Submit::PostAnswer { .. }) => panic!("a server asks nothing"),
                ServerOutput::Close(peer) => {
                    self.closed.push(peer);
                    let gone = Event::Gone {
                        peer,
                        reason: "closed".into(),
                        unsent: Vec::new(),
                        unfilled: ReceiveBuffers::new(),
                    };
                    self.event(gone);
                }
            }
        }
    }

    pub(super) fn errors(&self) -> Vec<String> {
        let refusals = self.answers.iter().filter(|one| matches!(one.frame.head.kind, Kind::Error | Kind::Refused));
        let text = |one: &Answer| ErrorMessage::decode(one.frame.control.as_slice()).expect("it parses").text;
        refusals.map(text).collect()
    }

    pub(super) fn contents(&self) -> Contents {
        contents(&self.shard)
    }

    /// Claims the shard's directory, restores its contents, and keeps a journal.
    pub(super) fn restore(&mut self, disk: &Arc<dyn Storage>, sync: bool) -> Restored {
        let folder = self.folder.insert(Folder::claim_alone(Arc::clone(disk), EPOCH).expect("the disk is well"));
        let options = JournalOptions { is_on: true, sync, accepts_torn_tail: false };
        self.shard.restore(folder, options).expect("what was kept can be read")
    }

    /// Claims the shard's directory, for checkpoints of a shard that keeps no journal.
    pub(super) fn claim(&mut self, disk: &Arc<dyn Storage>) {
        self.folder = Some(Folder::claim_alone(Arc::clone(disk), EPOCH).expect("the disk is well"));
    }

    pub(super) fn begin_checkpoint(&mut self, number: u64) -> Result<bool, Failure> {
        self.shard.begin_checkpoint(self.folder.as_ref().expect("the shard was restored"), number)
    }

    /// Takes a checkpoint at once.
    pub(super) fn checkpoint(&mut self, number: u64) {
        assert!(self.begin_checkpoint(number).expect("the disk is well"), "the shard serves");
        let writer = self.shard.continue_checkpoint(u64::MAX).expect("the disk is well");
        writer.expect("all of it was written").finish().expect("the disk is well");
    }

    pub(super) fn retain_journal(&mut self) -> Result<(), Failure> {
        self.shard.retain_journal(self.folder.as_ref().expect("the shard was restored"))
    }
}

fn options() -> ShardOptions {
    ShardOptions {
        memory_limit: None,
        epoch: EPOCH,
        term: Term(0),
        round_timeout: TIMEOUT,
        grace: GRACE,
        shares_memory: false,
        receives: RECEIVES_MAX,
        nonfinite: NonFinite::Refuse,
        compile: flow_of_mode,
        load: super::hosted::load,
    }
}

/// The flow of each mode, as the program of the mode computes it.
fn flow_of_mode(source: FlowSource<'_>) -> Result<Flow, Failure> {
    let FlowSource { mode, merge, trainers, backup_trainers, declaration, .. } = source;
    let is_float = declaration.element_type.is_float();
    let settings = AccumulatorSettings::of(mode, merge, trainers).without(backup_trainers);
    let divides = mode == Mode::Delta && merge == Merge::Mean && is_float;
    let stage = port::Stage {
        merge: if is_float { settings.merge } else { Merge::Sum },
        factor: if divides { 1.0 / f64::from(trainers) } else { 1.0 },
    };
    Ok(Flow { pace: AccumulatorPace::of(settings.staleness), count: settings.count, stage })
}

pub(super) fn contents(shard: &Shard) -> Contents {
    let mut contents = Contents::new();
    shard.visit(&mut |id, version, value, states| {
        contents.push((id, version, value.to_vec(), states.iter().map(|state| state.to_vec()).collect()));
    });
    contents
}

fn check_payloads(frame: &Frame, body: &[Outgoing]) {
    let lengths = frame.entries.iter().filter(|entry| entry.bytes > 0);
    assert_eq!(lengths.clone().count(), body.len(), "one payload for every entry that has one");
    for (entry, one) in lengths.zip(body) {
        assert_eq!(entry.bytes as usize, one.bytes().len(), "a payload has its entry's length");
    }
}
