//! Several posted receives of one connection: the shard changes as it does with one receive at a time.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::stage::{Answer, Contents, Parcel, Plan, Stage, id};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::PeerId;
use crate::limits::RECEIVES_MAX;
use crate::memory::Lease;
use crate::port::{Event, Fault, FaultyAccelerator, Incoming, Plain, ReceiveBuffers, Simulated, Submit};
use crate::server::ServerOutput;
use crate::wire::{Frame, Kind};

fn plan(trainers: u32) -> Plan {
    Plan::new(Mode::Sync, Merge::Sum, trainers).with("w", Float32, 1, "optimizer: SGD").with(
        "x",
        Float32,
        1,
        "optimizer: SGD",
    )
}

/// A shard, and connections with at most `receives` posted receives each.
struct Wire {
    stage: Stage,
    receives: usize,
    flows: BTreeMap<u32, Flow>,
}

/// Frames in flight on one connection.
#[derive(Default)]
struct Flow {
    coming: VecDeque<Parcel>,
    /// The head that was reported last, while it has no receive buffers.
    held: Option<Parcel>,
    landing: VecDeque<(Frame, ReceiveBuffers)>,
}

impl Wire {
    fn new(stage: Stage, receives: usize) -> Self {
        Self { stage, receives, flows: BTreeMap::new() }
    }

    fn peer(&self, trainer: u32) -> PeerId {
        self.stage.actors[&trainer].peer
    }

    fn send(&mut self, trainer: u32, parcel: Parcel) {
        self.flows.entry(trainer).or_default().coming.push_back(parcel);
        self.read(trainer);
    }

    fn push(&mut self, trainer: u32, round: u64, chunks: &[(u32, f32)]) -> Parcel {
        let entries = chunks.iter().map(|(chunk, value)| (id(*chunk, 0), round, value.to_le_bytes().to_vec()));
        let parcel = self.stage.push(trainer, entries.collect(), false);
        self.send(trainer, parcel.clone());
        parcel
    }

    fn set(&mut self, trainer: u32, chunk: u32, value: f32) {
        let head = self.stage.call(Kind::Set, trainer);
        self.send(trainer, Parcel::new(head, vec![(id(chunk, 0), 0, Float32, value.to_le_bytes().to_vec())]));
    }

    /// Reports heads while the connection has receives left.
    fn read(&mut self, trainer: u32) {
        let peer = self.peer(trainer);
        loop {
            let flow = self.flows.get_mut(&trainer).expect("something was sent");
            let next = flow.coming.front().filter(|next| !next.body.is_empty());
            if flow.held.is_some() || flow.landing.len() == self.receives || next.is_none() {
                return;
            }
            flow.held = flow.coming.pop_front();
            let frame = flow.held.as_ref().map(|held| held.frame.clone()).expect("it was just put there");
            let mut out = Vec::new();
            self.stage.shard.handle(self.stage.now, Event::Head { peer, frame }, &mut out);
            for output in out {
                let ServerOutput::Submit(Submit::PostReceive { into, .. }) = output else {
                    panic!("a head has no other answer")
                };
                self.fill(trainer, into);
            }
        }
    }

    fn fill(&mut self, trainer: u32, mut into: ReceiveBuffers) {
        let flow = self.flows.get_mut(&trainer).expect("something was sent");
        let Parcel { frame, body } = flow.held.take().expect("a head waits for its places");
        for (place, payload) in into.iter_mut().zip(&body) {
            if !matches!(place, Incoming::Discard { .. }) {
                place.bytes_mut().copy_from_slice(payload);
            }
        }
        flow.landing.push_back((frame, into));
    }

    /// The next frame of a trainer arrives, if there is one.
    fn post_receive(&mut self, trainer: u32) -> bool {
        let peer = self.peer(trainer);
        let flow = self.flows.entry(trainer).or_default();
        let mut bare = || flow.coming.pop_front().map(|parcel| (parcel.frame, ReceiveBuffers::new()));
        let next = flow.landing.pop_front();
        let Some((frame, body)) = next.or_else(|| if flow.held.is_none() { bare() } else { None }) else {
            return false;
        };
        self.stage.event(Event::Received { peer, frame, body });
        self.serve_heads();
        true
    }

    /// Posts the receives of heads that waited, and reports the next heads.
    fn serve_heads(&mut self) {
        for (peer, into) in std::mem::take(&mut self.stage.late_places) {
            let trainer = self.flows.keys().copied().find(|trainer| self.peer(*trainer) == peer);
            self.fill(trainer.expect("the head came over a line"), into);
        }
        for trainer in self.flows.keys().copied().collect::<Vec<_>>() {
            self.read(trainer);
        }
    }

    /// A turn of the shard in which nothing arrives.
    fn turn(&mut self) {
        self.stage.turn();
        self.serve_heads();
    }

    fn land_all(&mut self, trainer: u32) {
        while self.post_receive(trainer) {}
    }

    /// The number of a trainer's frames with receive buffers, and whether a head waits for some.
    fn state(&self, trainer: u32) -> (usize, bool) {
        let flow = &self.flows[&trainer];
        (flow.landing.len(), flow.held.is_some())
    }

    fn value(&self, chunk: u32) -> (u64, f32) {
        let contents = self.stage.contents();
        let (_, version, bytes, _) = contents.iter().find(|(one, ..)| *one == id(chunk, 0)).expect("it is held");
        (version.0, f32::from_le_bytes(bytes[..].try_into().expect("one element")))
    }
}

fn serving(trainers: u32) -> Wire {
    Wire::new(Stage::serving(plan(trainers)), RECEIVES_MAX)
}

#[test]
fn an_invalid_head_is_refused_once_the_frames_before_it_have_arrived() {
    let mut wire = serving(1);
    for round in 1..=3 {
        wire.push(0, round, &[(0, 1.0)]);
    }
    assert_eq!(wire.state(0), (2, true), "a trainer may be one round ahead, and round 3 waits for round 1");
    wire.post_receive(0);
    assert_eq!(wire.state(0), (2, false));
    wire.land_all(0);
    assert_eq!((wire.value(0), wire.stage.errors()), ((3, -3.0), Vec::new()));
    wire.push(0, 4, &[(0, 1.0)]);
    wire.push(0, 9, &[(0, 1.0)]);
    wire.push(0, 5, &[(0, 1.0)]);
    wire.land_all(0);
    let errors = wire.stage.errors();
    assert!(matches!(&errors[..], [one] if one.contains("trainer 0 sent round 9 while round 5 is open")), "{errors:?}");
    assert_eq!(wire.value(0), (5, -5.0), "those around it are applied");
}

#[test]
fn a_head_waits_for_device_work_that_may_make_it_valid() {
    // Two loads, and the first update never ends.
    for (fault, is_over) in [(Fault::Hangs(u64::MAX), true), (Fault::Hangs(3), false)] {
        let accelerator = FaultyAccelerator::new(Simulated::new(Plain, u64::MAX, 1), fault);
        let mut wire = Wire::new(Stage::empty(plan(1)).with_accelerator(accelerator).initialised(), RECEIVES_MAX);
        wire.stage.is_late = true;
        for round in 1..=3 {
            wire.push(0, round, &[(0, 1.0)]);
        }
        wire.land_all(0);
        assert_eq!(wire.state(0), (0, true), "both before it are here, and the first update is not over");
        for _ in 0..4 {
            wire.turn();
        }
        assert_eq!(wire.state(0), (usize::from(is_over), !is_over), "{fault:?}");
        if is_over {
            wire.stage.is_late = false;
            wire.land_all(0);
            assert_eq!(wire.value(0), (3, -3.0));
        }
        assert_eq!(wire.stage.errors(), Vec::<String>::new());
    }
}

#[test]
fn a_head_that_no_device_work_makes_valid_is_refused_during_that_work() {
    let hangs = FaultyAccelerator::new(Simulated::new(Plain, u64::MAX, 1), Fault::Hangs(3));
    let mut wire = Wire::new(Stage::empty(plan(1)).with_accelerator(hangs).initialised(), RECEIVES_MAX);
    wire.stage.is_late = true;
    wire.push(0, 1, &[(0, 1.0)]);
    wire.push(0, 9, &[(1, 1.0)]);
    assert_eq!(wire.state(0), (1, true), "it waits for the one before it");
    wire.post_receive(0);
    wire.turn();
    assert!(wire.stage.shard.is_under_way());
    assert_eq!(wire.state(0), (1, false));
    wire.post_receive(0);
    let errors = wire.stage.errors();
    assert!(matches!(&errors[..], [one] if one.contains("trainer 0 sent round 9 while round 1 is open")), "{errors:?}");
}

#[test]
fn a_push_received_twice_at_once_counts_once() {
    let mut wire = serving(2);
    let parcel = wire.push(0, 1, &[(0, 1.0), (1, 2.0)]);
    wire.send(0, parcel.clone());
    wire.push(1, 1, &[(0, 10.0), (1, 20.0)]);
    assert_eq!(wire.state(0), (2, false));
    wire.post_receive(0);
    wire.land_all(1);
    assert_eq!((wire.value(0), wire.value(1)), ((1, -11.0), (1, -22.0)));
    wire.send(0, parcel);
    wire.land_all(0);
    assert_eq!((wire.value(0), wire.value(1)), ((1, -11.0), (1, -22.0)));
    assert_eq!(wire.stage.errors(), Vec::<String>::new());
}

#[test]
fn a_set_between_two_pushes_is_applied_between_them() {
    let mut wire = serving(1);
    wire.push(0, 1, &[(0, 1.0)]);
    wire.set(0, 0, 100.0);
    wire.push(0, 2, &[(0, 1.0)]);
    assert_eq!(wire.state(0), (3, false));
    wire.land_all(0);
    assert_eq!(wire.value(0), (2, 99.0));
}

#[test]
fn a_head_without_memory_waits_until_earlier_frames_free_some() {
    let mut wire = serving(1);
    let parcel = wire.push(0, 1, &[(0, 1.0)]);
    let mut taken: Vec<Lease> = Vec::new();
    while let Ok(lease) = wire.stage.shard.pool.take(4) {
        taken.push(lease);
    }
    wire.send(0, parcel);
    wire.push(0, 2, &[(0, 1.0)]);
    assert_eq!(wire.state(0), (1, true), "there is no room for the second");
    wire.land_all(0);
    assert_eq!((wire.value(0), wire.stage.errors()), ((2, -2.0), Vec::new()));
}

#[test]
fn a_closed_connection_returns_its_receive_buffers() {
    let count = |stage: &mut Stage| {
        let taken: Vec<Lease> = std::iter::from_fn(|| stage.shard.pool.take(4).ok()).collect();
        taken.len()
    };
    let mut wire = serving(2);
    let free = count(&mut wire.stage);
    for round in [1, 2, 3, 3] {
        wire.push(0, round, &[(0, 1.0), (1, 1.0)]);
    }
    assert_eq!(wire.state(0), (2, true));
    assert_eq!(count(&mut wire.stage), free - 4);
    let (peer, flow) = (wire.peer(0), wire.flows.remove(&0).expect("frames are on their way"));
    let unfilled = flow.landing.into_iter().flat_map(|(_, places)| places).collect();
    wire.stage.event(Event::Gone { peer, reason: "cut".into(), unsent: Vec::new(), unfilled });
    assert_eq!((count(&mut wire.stage), wire.stage.late_places.len()), (free, 0));
    assert_eq!(wire.value(0), (0, 0.0));
}

/// A send of a trainer, or the completion of its next receive.
#[derive(Clone, Debug)]
enum TrainerAction {
    Push { trainer: u32, ahead: u64, chunks: Vec<(u32, f32)> },
    Again { trainer: u32 },
    Set { trainer: u32, chunk: u32 },
    Leave { trainer: u32 },
    Land { trainer: u32 },
}

const TRAINERS: u32 = 3;

fn act() -> impl Strategy<Value = TrainerAction> {
    let trainer = || 0..TRAINERS;
    let chunks = prop_oneof![Just(vec![0]), Just(vec![1]), Just(vec![0, 1])];
    let value = (1_u8..100).prop_map(f32::from);
    let push = (trainer(), 0_u64..8, chunks, value).prop_map(|(trainer, ahead, chunks, value)| {
        let chunks = chunks.into_iter().map(|chunk| (chunk, value)).collect();
        // Mostly the next round; sometimes a closed one, or one too far ahead.
        TrainerAction::Push { trainer, ahead: if ahead < 5 { 1 } else { ahead - 5 }, chunks }
    });
    prop_oneof![
        12 => push,
        2 => trainer().prop_map(|trainer| TrainerAction::Again { trainer }),
        2 => (trainer(), 0..2_u32).prop_map(|(trainer, chunk)| TrainerAction::Set { trainer, chunk }),
        1 => trainer().prop_map(|trainer| TrainerAction::Leave { trainer }),
        12 => trainer().prop_map(|trainer| TrainerAction::Land { trainer }),
    ]
}

/// Plays the acts. Returns the answers as text and the final contents.
fn play(stage: Stage, receives: usize, acts: &[TrainerAction]) -> (Vec<String>, Contents) {
    let mut wire = Wire::new(stage, receives);
    let mut rounds = BTreeMap::new();
    let mut last = BTreeMap::new();
    for act in acts {
        match act {
            TrainerAction::Push { trainer, ahead, chunks } => {
                let round = rounds.entry(*trainer).or_insert(0_u64);
                let sent = *round + ahead;
                *round += u64::from(*ahead == 1);
                last.insert(*trainer, wire.push(*trainer, sent, chunks));
            }
            TrainerAction::Again { trainer } => {
                if let Some(parcel) = last.get(trainer) {
                    wire.send(*trainer, parcel.clone());
                }
            }
            TrainerAction::Set { trainer, chunk } => wire.set(*trainer, *chunk, 7.0),
            TrainerAction::Leave { trainer } => {
                let head = wire.stage.call(Kind::Leave, *trainer);
                wire.send(*trainer, Parcel { frame: Frame::bare(head), body: Vec::new() });
            }
            TrainerAction::Land { trainer } => _ = wire.post_receive(*trainer),
        }
    }
    (0..TRAINERS).for_each(|trainer| wire.land_all(trainer));
    let words = |Answer { peer, frame, .. }: &Answer| {
        let control = String::from_utf8_lossy(&frame.control);
        let entries: Vec<_> = frame.entries.iter().map(|entry| (entry.id.parameter.0, entry.round.0)).collect();
        format!("{peer} {:?} {} {entries:?} {control}", frame.head.kind, frame.head.request)
    };
    (wire.stage.answers.iter().map(words).collect(), wire.stage.contents())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn concurrent_receives_give_the_result_of_one_at_a_time(
        acts in prop::collection::vec(act(), 1..120),
        polls_max in prop::option::of(1_u64..4),
    ) {
        let stage = || {
            let bare = Stage::empty(plan(TRAINERS));
            match polls_max {
                None => bare.initialised(),
                Some(polls_max) => bare.with_accelerator(Simulated::new(Plain, u64::MAX, polls_max)).initialised(),
            }
        };
        let (expected, found) = (play(stage(), 1, &acts), play(stage(), RECEIVES_MAX, &acts));
        prop_assert_eq!(expected.0, found.0);
        prop_assert!(expected.1 == found.1, "the values are the same");
    }
}
