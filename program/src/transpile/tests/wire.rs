//! All parts in one process, joined by a wire that delivers at random times.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::executor::{Executor, ExecutorParts, ProgramLink, RunStatus};
use crate::transpile::ProgramPart;
use crate::{Graph, PlainArithmetic, PlainRun, ProgramPeer, Purpose, VariableValue};
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::port::Plain;
use pserver_core::prng::Prng;

/// Inputs by trainer and step.
pub(super) type Feeds = Vec<Vec<Vec<(String, VariableValue)>>>;

/// Sent values by destination and channel.
#[derive(Default)]
struct Post {
    sent: VecDeque<(ProgramPeer, String, VariableValue)>,
}

impl ProgramLink for Post {
    fn has_room(&mut self, _: ProgramPeer, _: &str) -> bool {
        self.sent.len() < 8
    }

    fn send(&mut self, to: ProgramPeer, channel: &str, value: &VariableValue) {
        self.sent.push_back((to, channel.to_owned(), value.clone()));
    }
}

struct Place {
    peer: ProgramPeer,
    graph: Arc<Graph>,
    executor: Executor,
    post: Post,
    /// Steps to run, the next first; empty for a server.
    feeds: VecDeque<Vec<(String, VariableValue)>>,
    has_begun: bool,
    is_done: bool,
}

impl Place {
    fn new(
        peer: ProgramPeer,
        part: &ProgramPart,
        trainers: &[ProgramPeer],
        feeds: &[Vec<(String, VariableValue)>],
    ) -> Self {
        let parts = ExecutorParts {
            arithmetic: Box::new(PlainArithmetic),
            kernels: Box::new(Plain),
            senders: trainers.to_vec(),
            arrivals_max: 4,
            memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
        };
        let graph = Arc::new(part.graph.clone());
        let executor = Executor::new(Arc::clone(&graph), parts).expect("a part can run");
        let feeds = feeds.iter().cloned().collect();
        let mut place = Self { peer, graph, executor, post: Post::default(), feeds, has_begun: false, is_done: false };
        place.begin();
        place
    }

    fn is_server(&self) -> bool {
        matches!(self.peer, ProgramPeer::Server(_))
    }

    /// Begins the next step, if there is one.
    fn begin(&mut self) {
        let Some(fed) = self.feeds.pop_front() else {
            self.is_done = !self.is_server() || self.has_begun;
            self.has_begun = true;
            return;
        };
        for (name, value) in fed.into_iter().filter(|(name, _)| is_data(&self.graph, name)) {
            self.executor.set(&name, value).expect("what is fed fits");
        }
        if std::mem::replace(&mut self.has_begun, true) {
            self.executor.begin().expect("one batch");
        }
    }

    /// Runs some units; returns whether the part made progress.
    fn run(&mut self, units: u64) -> bool {
        for unit in 0..if self.is_done { 0 } else { units } {
            if self.executor.step(&mut self.post).expect("an op runs").is_none() {
                let status = self.executor.run(&mut self.post, 1).expect("no part is stuck");
                if status == RunStatus::Ended {
                    self.begin();
                }
                return unit > 0 || status == RunStatus::Ended;
            }
        }
        !self.is_done
    }
}

/// A job of running parts.
pub(super) struct Job {
    places: Vec<Place>,
}

impl Job {
    /// Runs every trainer's steps, in a random order, until no message is in flight.
    pub(super) fn run(parts: &[ProgramPart], feeds: &Feeds, prng: &mut Prng) -> Self {
        let peers = || parts.iter().flat_map(|part| part.peers.iter().map(move |peer| (*peer, part)));
        let trainers: Vec<ProgramPeer> =
            peers().map(|(peer, _)| peer).filter(|peer| matches!(peer, ProgramPeer::Trainer(_))).collect();
        let place = |(peer, part): (ProgramPeer, &ProgramPart)| {
            let none = Vec::new();
            let fed = match peer {
                ProgramPeer::Trainer(number) => feeds.get(number as usize).unwrap_or(&none),
                ProgramPeer::Server(_) => &none,
            };
            Place::new(peer, part, &trainers, fed)
        };
        let mut job = Self { places: peers().map(place).collect() };
        job.until_quiet(prng);
        job
    }

    fn until_quiet(&mut self, prng: &mut Prng) {
        let places = self.places.len() as u64;
        let mut quiet = 0;
        // Long enough for each part to run many times.
        while quiet < 40 * places {
            let place = usize::try_from(prng.below(places)).expect("few places");
            let has_run = self.places[place].run(1 + prng.below(7));
            let has_moved = self.deliver(place) || has_run;
            quiet = if has_moved { 0 } else { quiet + 1 };
        }
        for place in &self.places {
            assert!(place.is_done || place.is_server(), "{} has not come to its end", place.peer);
        }
    }

    /// Delivers the oldest message of a destination that accepts one.
    fn deliver(&mut self, from: usize) -> bool {
        let Some((to, channel, value)) = self.places[from].post.sent.pop_front() else { return false };
        let sender = self.places[from].peer;
        let receiver = self.places.iter_mut().find(|place| place.peer == to).expect("each peer has a place");
        if let Some(value) = receiver.executor.arrive(&channel, sender, value).expect("the value fits") {
            // Messages behind a refused one may be accepted.
            self.places[from].post.sent.push_back((to, channel, value));
            return false;
        }
        true
    }

    /// The bytes of parameters and states, by name; pieces are joined.
    pub(super) fn kept(&self) -> BTreeMap<String, Vec<u8>> {
        let mut pieces: BTreeMap<String, BTreeMap<usize, Vec<u8>>> = BTreeMap::new();
        for place in &self.places {
            for variable in place.graph.variables().iter().filter(|known| known.purpose.is_persistable()) {
                let value = place.executor.value(&variable.name).expect("it has a value");
                let (name, piece) = match variable.name.split_once("@piece") {
                    Some((name, number)) => (name, number.parse().expect("a piece has a number")),
                    None => (variable.name.as_str(), 0),
                };
                let new = pieces.entry(name.to_owned()).or_default().insert(piece, value.tensor().bytes().to_vec());
                assert!(new.is_none(), "{} is kept twice", variable.name);
            }
        }
        let joined = pieces.into_iter().map(|(name, pieces)| {
            // Every piece counts its own updates.
            let is_count = name.ends_with("@count");
            let bytes = pieces.into_values().take(if is_count { 1 } else { usize::MAX });
            (name, bytes.flatten().collect::<Vec<u8>>())
        });
        joined.collect()
    }

    /// A value of one process.
    pub(super) fn value(&self, peer: ProgramPeer, name: &str) -> Option<&VariableValue> {
        self.places.iter().find(|place| place.peer == peer).and_then(|place| place.executor.value(name))
    }
}

/// The parameters and states of one process that runs the whole program for these steps.
pub(super) fn plainly(graph: &Graph, feeds: &[Vec<(String, VariableValue)>]) -> BTreeMap<String, Vec<u8>> {
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(graph, &mut arithmetic, &mut kernels).expect("the program begins");
    for fed in feeds {
        fed.iter().for_each(|(name, value)| run.set(name, value.clone()).expect("what is fed fits"));
        run.step().expect("a step runs");
    }
    let kept = graph.variables().iter().filter(|known| known.purpose.is_persistable());
    kept.map(|known| (known.name.clone(), run.value(&known.name).expect("it is kept").tensor().bytes().to_vec()))
        .collect()
}

/// Whether this variable is an input.
fn is_data(graph: &Graph, name: &str) -> bool {
    graph.find(name).is_some_and(|index| graph.variable(index).purpose == Purpose::Data)
}
