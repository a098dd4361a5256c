//! Frames received ahead have the result of frames received one by one. One shard is given several heads ahead, the
//! other each head as late as possible; all other events are the same. A head that the first shard refuses is given to
//! the second at once; any other when its payload has arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;

use super::stage::{Parcel, Plan, Stage, TIMEOUT, id};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::{ChunkId, Incarnation, PeerId, Round};
use crate::limits::RECEIVES_MAX;
use crate::port::{Event, Incoming, Plain, ReceiveBuffers, Simulated, Submit};
use crate::server::ServerOutput;
use crate::wire::{Entry, Frame, Kind, RowsPart};

const TRAINERS: u32 = 3;
const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const MOMENTUM: &str = "sgd { momentum: 0.5 } const_lr { learning_rate: 1 }";
const CLIPPED: &str = "optimizer: SGD clip_norm: 1e9 const_lr { learning_rate: 1 }";
const ROWS: &str = "const_lr { learning_rate: 1 } sparse { height: 100 width: 2 buckets: 1 constant { value: 10 } }";
/// Polls that work of the accelerator takes at most.
const POLLS_MAX: u64 = 3;

/// Two values that are updated alone, the first of which has no states, one in two chunks that are updated together,
/// and rows.
fn plan(mode: Mode) -> Plan {
    Plan::new(mode, Merge::Sum, TRAINERS)
        .with("w", Float32, 2, SGD)
        .with("m", Float32, 3, MOMENTUM)
        .with("g", Float32, 1025, CLIPPED)
        .with("s", Float32, 2, ROWS)
}

fn rows() -> ChunkId {
    id(3, 0)
}

/// The chunks of each push.
const PUSHES: [&[(u32, u64)]; 6] = [&[(0, 0)], &[(1, 0)], &[(0, 0), (1, 0)], &[(2, 0), (2, 1)], &[(2, 0)], &[(2, 1)]];

/// Where chunks live.
#[derive(Clone, Copy, Debug)]
enum Home {
    Processor,
    /// An accelerator that has time to end its work between two events.
    Accelerator,
    /// An accelerator that works only in turns of the test.
    Late,
}

/// An action of the test.
#[derive(Clone, Debug)]
enum JobAction {
    Push {
        trainer: u32,
        what: usize,
        ahead: u64,
        wants_value: bool,
    },
    Rows {
        trainer: u32,
        parts: Vec<u32>,
    },
    Again {
        trainer: u32,
        back: usize,
    },
    Set {
        trainer: u32,
        parameter: u32,
    },
    Pull {
        trainer: u32,
        parameter: u32,
        version: u64,
    },
    Leave {
        trainer: u32,
    },
    Reborn {
        trainer: u32,
    },
    Cut {
        trainer: u32,
    },
    Begin,
    Wait,
    Turn,
    /// The next frame of a trainer arrives, if there is one.
    Land {
        trainer: u32,
    },
}

fn act() -> impl Strategy<Value = JobAction> {
    let trainer = || 0..TRAINERS;
    // Mostly the next round; sometimes a closed one, or one too far ahead.
    let ahead = prop_oneof![6 => Just(1_u64), 1 => Just(0_u64), 1 => Just(2_u64), 1 => Just(3_u64)];
    let push = (trainer(), 0..PUSHES.len(), ahead, any::<bool>())
        .prop_map(|(trainer, what, ahead, wants_value)| JobAction::Push { trainer, what, ahead, wants_value });
    let parts = prop_oneof![Just(vec![0]), Just(vec![0, 1]), Just(vec![1, 0]), Just(vec![0, 2, 1]), Just(vec![0, 2])];
    let pull = (trainer(), 0..4_u32, 0..4_u64);
    prop_oneof![
        12 => push,
        4 => (trainer(), parts).prop_map(|(trainer, parts)| JobAction::Rows { trainer, parts }),
        2 => (trainer(), 1..5_usize).prop_map(|(trainer, back)| JobAction::Again { trainer, back }),
        2 => (trainer(), 0..3_u32).prop_map(|(trainer, parameter)| JobAction::Set { trainer, parameter }),
        2 => pull.prop_map(|(trainer, parameter, version)| JobAction::Pull { trainer, parameter, version }),
        1 => trainer().prop_map(|trainer| JobAction::Leave { trainer }),
        1 => trainer().prop_map(|trainer| JobAction::Reborn { trainer }),
        1 => trainer().prop_map(|trainer| JobAction::Cut { trainer }),
        1 => Just(JobAction::Begin),
        1 => Just(JobAction::Wait),
        6 => Just(JobAction::Turn),
        18 => trainer().prop_map(|trainer| JobAction::Land { trainer }),
    ]
}

/// Frames in flight on one connection.
#[derive(Default)]
struct Flow {
    coming: VecDeque<Parcel>,
    /// The head that was reported last, while it has no receive buffers.
    held: Option<Parcel>,
    landing: VecDeque<Landing>,
}

struct Landing {
    parcel: Parcel,
    into: ReceiveBuffers,
    /// The receive buffers of the other shard, if the head was reported to it already.
    posted: Option<ReceiveBuffers>,
}

/// The two shards.
struct Twins {
    home: Home,
    several: Stage,
    single: Stage,
    flows: BTreeMap<PeerId, Flow>,
    rounds: BTreeMap<(u32, ChunkId), u64>,
    /// Frames sent by each trainer in this incarnation.
    sent: BTreeMap<u32, Vec<Parcel>>,
}

fn stage(mode: Mode, home: Home) -> Stage {
    let bare = Stage::empty(plan(mode));
    let mut stage = match home {
        Home::Processor => bare,
        Home::Accelerator | Home::Late => bare.with_accelerator(Simulated::new(Plain, u64::MAX, POLLS_MAX)),
    };
    let disk: Arc<dyn Storage> = Arc::new(InMemory::new());
    stage.restore(&disk, false);
    let mut stage = stage.initialised();
    stage.is_late = true;
    stage
}

fn words(stage: &Stage) -> Vec<String> {
    let frame = |frame: &Frame| format!("{frame:?} {}", String::from_utf8_lossy(&frame.control));
    stage.answers.iter().map(|one| format!("{} {} {:?}", one.peer, frame(&one.frame), one.body)).collect()
}

impl Twins {
    fn new(mode: Mode, home: Home) -> Self {
        let (several, single) = (stage(mode, home), stage(mode, home));
        Self { home, several, single, flows: BTreeMap::new(), rounds: BTreeMap::new(), sent: BTreeMap::new() }
    }

    fn peer(&self, trainer: u32) -> PeerId {
        self.several.actors[&trainer].peer
    }

    /// A frame that is the same for both shards.
    fn make(&mut self, make: impl Fn(&mut Stage) -> Parcel) -> Parcel {
        make(&mut self.single);
        make(&mut self.several)
    }

    fn send(&mut self, trainer: u32, parcel: Parcel) {
        self.sent.entry(trainer).or_default().push(parcel.clone());
        self.send_again(trainer, parcel);
    }

    fn send_again(&mut self, trainer: u32, parcel: Parcel) {
        let peer = self.peer(trainer);
        self.flows.entry(peer).or_default().coming.push_back(parcel);
        self.read(peer);
    }

    fn both(&mut self, act: impl Fn(&mut Stage)) {
        act(&mut self.several);
        act(&mut self.single);
        self.settle_with_accelerator();
    }

    /// Compares the shards after each turn. A head that the first shard reconsiders in a turn is reported to the second
    /// shard before the second accelerator has another turn.
    fn finish_work(&mut self) {
        for _ in 0..1000 {
            let is_busy = |stage: &mut Stage| stage.turn() || stage.shard.is_under_way();
            let busy = [is_busy(&mut self.several), is_busy(&mut self.single)];
            self.settle_event();
            if busy == [false; 2] {
                return;
            }
        }
        panic!("the accelerator does not come to its end");
    }

    /// Handles the consequences of an event, and gives the accelerator its time before the next event.
    fn settle_with_accelerator(&mut self) {
        self.settle_event();
        if !matches!(self.home, Home::Late) {
            self.finish_work();
        }
    }

    /// Handles the consequences of an event: closed connections, posted receives, and the next heads.
    fn settle_event(&mut self) {
        let closed = std::mem::take(&mut self.several.closed);
        assert_eq!(closed, std::mem::take(&mut self.single.closed), "the same connections are closed");
        closed.iter().for_each(|peer| drop(self.flows.remove(peer)));
        for (peer, into) in std::mem::take(&mut self.several.late_places) {
            self.fill(peer, into);
        }
        for peer in self.flows.keys().copied().collect::<Vec<_>>() {
            self.read(peer);
        }
        assert_eq!(words(&self.several), words(&self.single), "the same answers in the same order");
        self.several.answers.clear();
        self.single.answers.clear();
    }

    /// Reports heads while the connection has receives left.
    fn read(&mut self, peer: PeerId) {
        loop {
            let flow = self.flows.get_mut(&peer).expect("something was sent");
            let next = flow
                .coming
                .pop_front_if(|next| !next.body.is_empty() && flow.held.is_none() && flow.landing.len() < RECEIVES_MAX);
            let Some(next) = next else { return };
            let (frame, mut out) = (next.frame.clone(), Vec::new());
            flow.held = Some(next);
            self.several.shard.handle(self.several.now, Event::Head { peer, frame }, &mut out);
            for output in out {
                let ServerOutput::Submit(Submit::PostReceive { into, .. }) = output else {
                    panic!("a head has no other answer")
                };
                self.fill(peer, into);
            }
        }
    }

    fn fill(&mut self, peer: PeerId, mut into: ReceiveBuffers) {
        let Some(flow) = self.flows.get_mut(&peer) else { return };
        let parcel = flow.held.take().expect("a head waits for its places");
        let is_nowhere = |places: &[Incoming]| places.iter().any(|place| matches!(place, Incoming::Discard { .. }));
        let posted = is_nowhere(&into).then(|| self.single.post_receive(peer, &parcel));
        if let Some(places) = &posted {
            assert!(flow.landing.is_empty(), "a head is refused when what came before is here");
            assert!(is_nowhere(places), "what is refused is refused alone, too: {:?}", parcel.frame);
        } else {
            into.iter_mut().zip(&parcel.body).for_each(|(place, payload)| place.bytes_mut().copy_from_slice(payload));
        }
        flow.landing.push_back(Landing { parcel, into, posted });
    }

    /// The next frame of a connection arrives, if there is one.
    fn post_receive(&mut self, peer: PeerId) -> bool {
        let Some(flow) = self.flows.get_mut(&peer) else { return false };
        let (frame, into, alone) = if let Some(Landing { parcel, into, posted }) = flow.landing.pop_front() {
            let alone = posted.unwrap_or_else(|| self.single.post_receive(peer, &parcel));
            (parcel.frame, into, alone)
        } else if flow.held.is_none()
            && let Some(bare) = flow.coming.pop_front()
        {
            (bare.frame, ReceiveBuffers::new(), ReceiveBuffers::new())
        } else {
            return false;
        };
        self.several.event(Event::Received { peer, frame: frame.clone(), body: into });
        self.single.event(Event::Received { peer, frame, body: alone });
        self.settle_with_accelerator();
        true
    }

    fn push(&mut self, trainer: u32, what: usize, ahead: u64, wants_value: bool) {
        let chunks = PUSHES[what].iter().map(|(parameter, chunk)| id(*parameter, *chunk));
        let sizes: BTreeMap<_, _> = self.several.plan.chunks().into_iter().collect();
        let entries: Vec<_> = chunks
            .map(|chunk| {
                let round = self.round(trainer, chunk, ahead);
                let value = (trainer + 1) as f32 * 0.5 + round as f32;
                (chunk, round, value.to_le_bytes().repeat(sizes[&chunk] as usize / 4))
            })
            .collect();
        let parcel = self.make(|stage| stage.push(trainer, entries.clone(), wants_value).with_halves());
        self.send(trainer, parcel);
    }

    /// The round that a trainer sends for next, or a round near that one.
    fn round(&mut self, trainer: u32, chunk: ChunkId, ahead: u64) -> u64 {
        let round = self.rounds.entry((trainer, chunk)).or_default();
        let sent = *round + ahead;
        *round += u64::from(ahead == 1);
        sent
    }

    /// Rows in parts; some parts may be missing.
    fn push_rows(&mut self, trainer: u32, parts: &[u32]) {
        let round = self.round(trainer, rows(), 1);
        let count = parts.iter().max().expect("there is one") + 1;
        let payload = |index: u32| -> Vec<u8> {
            let ids = [u64::from(index), 50 + u64::from(index)];
            let values = [index as f32 + 0.5; 4];
            let bytes = ids.into_iter().flat_map(u64::to_le_bytes).chain(values.into_iter().flat_map(f32::to_le_bytes));
            RowsPart { index, count }.encode().into_iter().chain(bytes).collect()
        };
        let first = self.make(|stage| stage.push(trainer, vec![(rows(), round, payload(0))], false));
        for index in parts {
            let part = Parcel::new(first.frame.head, vec![(rows(), round, Float32, payload(*index))]);
            self.send(trainer, part);
        }
    }

    fn set(&mut self, trainer: u32, parameter: u32) {
        let chunks: Vec<_> = self.several.plan.chunks();
        let chunks = chunks.into_iter().filter(|(chunk, _)| chunk.parameter.0 == parameter);
        let value = |bytes: u32| (7.0_f32 + trainer as f32).to_le_bytes().repeat(bytes as usize / 4);
        let entries: Vec<_> = chunks.map(|(chunk, bytes)| (chunk, 0, Float32, value(bytes))).collect();
        let parcel = self.make(|stage| Parcel::new(stage.call(Kind::Set, trainer), entries.clone()));
        self.send(trainer, parcel);
    }

    /// Pulls a value by its entry, or rows by their ids, which are the payload.
    fn pull(&mut self, trainer: u32, parameter: u32, version: u64) {
        let parcel = self.make(|stage| {
            let head = stage.head(Kind::Pull, trainer);
            if id(parameter, 0) == rows() {
                let ids = [1_u64, 50, 0].into_iter().flat_map(u64::to_le_bytes).collect();
                return Parcel::new(head, vec![(rows(), version, Float32, ids)]);
            }
            let entries = vec![Entry::bare(id(parameter, 0), Round(version), Float32)];
            Parcel { frame: Frame { entries: entries.into(), ..Frame::bare(head) }, body: Vec::new() }
        });
        self.send(trainer, parcel);
    }

    /// The connection ends with its posted receives; a new connection resends the last frames.
    fn cut(&mut self, trainer: u32) {
        let peer = self.peer(trainer);
        let landing = self.flows.remove(&peer).unwrap_or_default().landing;
        let (unfilled, alone): (Vec<_>, Vec<_>) = landing.into_iter().map(|one| (one.into, one.posted)).unzip();
        let gone = |unfilled| Event::Gone { peer, reason: "cut".into(), unsent: Vec::new(), unfilled };
        self.several.event(gone(unfilled.into_iter().flatten().collect()));
        self.single.event(gone(alone.into_iter().flatten().flatten().collect()));
        self.settle_with_accelerator();
        let incarnation = self.several.actors[&trainer].incarnation;
        self.both(|stage| stage.connect(trainer, incarnation));
        let sent = self.sent.entry(trainer).or_default();
        let last: Vec<_> = sent.iter().skip(sent.len().saturating_sub(4)).cloned().collect();
        last.into_iter().for_each(|parcel| self.send_again(trainer, parcel));
    }

    /// Another initialisation begins, while frames of the earlier one are in flight.
    fn begin(&mut self) {
        self.several.generation.0 += 1;
        self.single.generation.0 += 1;
        self.rounds.clear();
        for parameter in 0..4 {
            let parcel = self.make(|stage| stage.init(parameter, None));
            self.send_again(0, parcel);
        }
        let chunks = self.several.plan.chunks().len() as u64;
        let parcel = self.make(|stage| stage.finish(chunks));
        self.send_again(0, parcel);
    }

    fn act(&mut self, act: &JobAction) {
        match act {
            JobAction::Push { trainer, what, ahead, wants_value } => self.push(*trainer, *what, *ahead, *wants_value),
            JobAction::Rows { trainer, parts } => self.push_rows(*trainer, parts),
            JobAction::Again { trainer, back } => {
                let sent = self.sent.entry(*trainer).or_default();
                if let Some(parcel) = sent.len().checked_sub(*back).map(|at| sent[at].clone()) {
                    self.send_again(*trainer, parcel);
                }
            }
            JobAction::Set { trainer, parameter } => self.set(*trainer, *parameter),
            JobAction::Pull { trainer, parameter, version } => self.pull(*trainer, *parameter, *version),
            JobAction::Leave { trainer } => {
                let frame = |stage: &mut Stage| Frame::bare(stage.call(Kind::Leave, *trainer));
                let parcel = self.make(|stage| Parcel { frame: frame(stage), body: Vec::new() });
                self.send(*trainer, parcel);
            }
            JobAction::Reborn { trainer } => {
                let incarnation = Incarnation(self.several.actors[trainer].incarnation.0 + 1);
                self.sent.remove(trainer);
                self.both(|stage| stage.connect(*trainer, incarnation));
            }
            JobAction::Cut { trainer } => self.cut(*trainer),
            JobAction::Begin => self.begin(),
            JobAction::Wait => self.both(|stage| stage.wait(TIMEOUT)),
            JobAction::Turn => self.both(|stage| _ = stage.turn()),
            JobAction::Land { trainer } => _ = self.post_receive(self.peer(*trainer)),
        }
    }

    /// Completes every receive and all work of the accelerator.
    fn end(&mut self) {
        let mut is_any = true;
        while is_any {
            self.finish_work();
            is_any = false;
            for peer in self.flows.keys().copied().collect::<Vec<_>>() {
                is_any |= self.post_receive(peer);
            }
        }
        let is_done = |flow: &Flow| flow.coming.is_empty() && flow.held.is_none() && flow.landing.is_empty();
        assert!(self.flows.values().all(is_done), "nothing is left on its way");
        self.both(Stage::settle);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn frames_received_ahead_give_the_result_of_frames_received_one_by_one(
        mode in prop::sample::select(vec![Mode::Sync, Mode::Async, Mode::Staleness { bound: 1 }, Mode::Delta]),
        home in prop::sample::select(vec![Home::Processor, Home::Accelerator, Home::Late]),
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let mut twins = Twins::new(mode, home);
        acts.iter().for_each(|act| twins.act(act));
        twins.end();
        prop_assert_eq!(twins.several.contents(), twins.single.contents(), "the same values and states");
        prop_assert_eq!(twins.several.shard.journal_position(), twins.single.shard.journal_position());
    }
}

/// Every trainer has departed: the gradient of the first chunk ends the round of both.
#[test]
fn a_grouped_gradient_is_late_if_its_first_chunk_has_ended_the_round() {
    let push = |trainer, what, ahead| JobAction::Push { trainer, what, ahead, wants_value: false };
    let leave = |trainer| JobAction::Leave { trainer };
    let acts = [
        push(1, 5, 2),
        leave(0),
        leave(2),
        push(1, 5, 1),
        JobAction::Rows { trainer: 0, parts: vec![0] },
        push(0, 0, 1),
        leave(1),
        push(0, 3, 1),
        push(0, 3, 1),
    ];
    let mut twins = Twins::new(Mode::Sync, Home::Processor);
    acts.iter().for_each(|act| twins.act(act));
    twins.end();
    assert_eq!(twins.several.contents(), twins.single.contents(), "the same values and states");
}
