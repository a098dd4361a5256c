//! Election of the initialising trainer: exactly one trainer finishes the initialisation when any of them are killed,
//! and no trainer waits for ever. The coordinator alone runs 1,000 rounds of 64 trainers. A job over TCP runs 20
//! rounds, and 1,000 with `PSERVER_FULL=1`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::cluster::asked::is_full;
use crate::cluster::job::{Job, Local, client};
use crate::cluster::seeded::SeededPrng;
use crate::cluster::training::{Tensor, declare, pull};
use prost::Message;
use pserver_client::Client;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::{Epoch, Incarnation, NO_TRAINER, PeerId, Ticket, TrainerId};
use pserver_core::partition::{Catalogue, Topology};
use pserver_core::port::{Event, ReceiveBuffers, Submit};
use pserver_core::server::{Coordinator, CoordinatorOptions, CoordinatorOutput, OperatorSettings, ServerOutput};
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::{Commit, Request};
use pserver_core::wire::{
    ControlAnswer, ControlRequest, Frame, Head, HelloMessage, JobMessage, JoinRequest, Kind, Role, ServerEntry,
};

const TRAINERS: u32 = 64;
const LEASE: Duration = Duration::from_millis(200);

/// The stage of a simulated trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    /// The trainer was elected under this generation and has this many steps to do.
    Initialises {
        generation: u32,
        steps: usize,
    },
    /// The connection of the trainer is closed.
    Killed,
    /// The trainer was elected under this generation and sends nothing; later it resumes.
    Stunned {
        generation: u32,
    },
    Finished,
    Lost,
}

/// A coordinator with trainers around it, and a clock.
struct Simulation {
    coordinator: Coordinator,
    now: Now,
    stages: Vec<Stage>,
    heads: BTreeMap<PeerId, Head>,
    page: Vec<u8>,
}

impl Simulation {
    fn new() -> Self {
        let job = JobMessage { mode: 0, staleness: 0, merge: 0, trainers: TRAINERS, chunk_bytes: 4096 };
        let (lease, grace) = (LEASE, Duration::from_secs(2));
        let options = CoordinatorOptions {
            epoch: Epoch(1),
            servers: 1,
            job,
            default_config: Vec::new(),
            given: OperatorSettings::default(),
            lease,
            grace,
            watches: false,
            takes_nonfinite: false,
            model_dir: String::new(),
        };
        let mut coordinator = Coordinator::new(options, None).expect("nothing was kept");
        let server = ServerEntry { address: "tcp://127.0.0.1:1".to_owned(), shards: 1, keeps_journal: false };
        coordinator.register(0, server).expect("there is a server 0");
        let topology = Topology::new(vec![1]).expect("one server");
        let catalogue = Catalogue::new(topology, 4096).expect("a chunk size");
        let page = catalogue.pages(4096).first().expect("an empty catalogue has a page").encode_to_vec();
        let stages = vec![Stage::Waits; usize::try_from(TRAINERS).expect("few")];
        Self { coordinator, now: Now(1), stages, heads: BTreeMap::new(), page }
    }

    /// Connects a trainer, lets it join, and asks to begin.
    fn enter(&mut self, rank: usize) {
        let (peer, trainer) = (peer(rank), u32::try_from(rank).expect("few"));
        self.event(Event::Accepted { peer, origin: "a test".to_owned(), transport: String::new() });
        let head = Head { epoch: Epoch(1), trainer: NO_TRAINER, ..Head::new(Kind::Hello) };
        let hello = HelloMessage {
            role: Role::Trainer.into(),
            host: String::new(),
            process: trainer,
            absence_millis: None,
            run: 0,
            run_trainers: 0,
        };
        self.event(Event::Received { peer, frame: Frame::with_control(head, &hello), body: ReceiveBuffers::new() });
        let head = Head { trainer: TrainerId(trainer), incarnation: Incarnation(1), ..head };
        self.heads.insert(peer, Head { request: Ticket(1), kind: Kind::Control, ..head });
        self.ask(rank, Request::Join(JoinRequest { trainer: Some(trainer), incarnation: 0 }));
        self.ask(rank, Request::Begin(true));
    }

    fn ask(&mut self, rank: usize, request: Request) {
        let peer = peer(rank);
        let frame = Frame::with_control(self.heads[&peer], &ControlRequest { request: Some(request) });
        self.event(Event::Received { peer, frame, body: ReceiveBuffers::new() });
    }

    fn event(&mut self, event: Event) {
        let mut out = Vec::new();
        self.coordinator.handle(self.now, event, &mut out);
        self.take(out);
    }

    fn take(&mut self, out: Vec<CoordinatorOutput>) {
        for output in out {
            let CoordinatorOutput::Session(ServerOutput::Submit(Submit::Send { peer, frame, .. })) = output else {
                continue;
            };
            let rank = usize::try_from(peer.0 - 1).expect("few");
            match frame.head.kind {
                Kind::Answer => self.answered(rank, &frame),
                Kind::Error if matches!(self.stages[rank], Stage::Initialises { .. }) => {
                    self.stages[rank] = Stage::Waits;
                    self.ask(rank, Request::Begin(true));
                }
                Kind::Welcome => {}
                other => panic!("trainer {rank} got a frame of kind {other:?}"),
            }
        }
    }

    fn answered(&mut self, rank: usize, frame: &Frame) {
        let answer = ControlAnswer::decode(frame.control.as_slice()).expect("an answer parses").answer;
        let stage = &mut self.stages[rank];
        match answer.expect("an answer is not empty") {
            Answer::Granted(generation) => *stage = Stage::Initialises { generation, steps: 3 },
            Answer::Initialised(_) => *stage = Stage::Lost,
            Answer::Done(_) if matches!(*stage, Stage::Initialises { steps: 0, .. }) => *stage = Stage::Finished,
            _ => {}
        }
    }

    /// The elected trainer does one step, or is sometimes killed or stunned instead.
    fn step(&mut self, rank: usize, dangers: &mut usize, prng: &mut SeededPrng) {
        let Stage::Initialises { generation, steps } = self.stages[rank] else { return };
        if *dangers > 0 && prng.below(4) == 0 {
            *dangers -= 1;
            if prng.below(2) == 0 {
                self.stages[rank] = Stage::Killed;
                self.event(Event::Gone {
                    peer: peer(rank),
                    reason: String::new(),
                    unsent: vec![],
                    unfilled: vec![].into(),
                });
            } else {
                self.stages[rank] = Stage::Stunned { generation };
            }
        } else if steps > 1 {
            self.stages[rank] = Stage::Initialises { generation, steps: steps - 1 };
            self.ask(rank, Request::Heartbeat(true));
        } else {
            self.commit(rank, generation);
        }
    }

    fn commit(&mut self, rank: usize, generation: u32) {
        self.stages[rank] = Stage::Initialises { generation, steps: 0 };
        let page = self.page.clone();
        self.ask(rank, Request::Commit(Commit { generation, page, last: true, job: None, default_config: Vec::new() }));
    }

    /// Time passes, up to the end of a lease.
    fn wait(&mut self, prng: &mut SeededPrng) {
        self.now = Now(self.now.0 + prng.next() % 60);
        if self.coordinator.deadline().is_some_and(|deadline| deadline <= self.now) {
            let mut out = Vec::new();
            self.coordinator.expire(self.now, &mut out);
            self.take(out);
        }
    }

    /// A stunned trainer resumes and commits: under a superseded generation, or before its lease ends.
    fn wake(&mut self, prng: &mut SeededPrng) {
        let stunned = |stage: &Stage| matches!(stage, Stage::Stunned { .. });
        let sleepers: Vec<usize> = (0..self.stages.len()).filter(|rank| stunned(&self.stages[*rank])).collect();
        if sleepers.is_empty() || prng.below(8) > 0 {
            return;
        }
        let rank = sleepers[prng.below(sleepers.len())];
        let Stage::Stunned { generation } = self.stages[rank] else { unreachable!("it was just looked at") };
        self.commit(rank, generation);
    }

    fn is_over(&self) -> bool {
        self.stages.iter().all(|stage| matches!(stage, Stage::Killed | Stage::Finished | Stage::Lost))
    }
}

fn peer(rank: usize) -> PeerId {
    PeerId(u64::try_from(rank).expect("few") + 1)
}

/// One job: trainers join in any order, and some of the elected trainers are killed or stunned.
fn simulate(round: usize, prng: &mut SeededPrng) {
    let mut simulation = Simulation::new();
    let mut order: Vec<usize> = (0..simulation.stages.len()).collect();
    prng.shuffle(&mut order);
    let mut dangers = prng.below(6);
    for _ in 0..100_000 {
        if let Some(rank) = order.pop() {
            simulation.enter(rank);
        }
        let chosen = (0..simulation.stages.len()).collect::<Vec<_>>();
        for rank in chosen {
            simulation.step(rank, &mut dangers, prng);
        }
        simulation.wait(prng);
        simulation.wake(prng);
        if order.is_empty() && simulation.is_over() {
            break;
        }
    }
    assert!(simulation.is_over(), "round {round}: somebody is stuck: {:?}", simulation.stages);
    let finished = simulation.stages.iter().filter(|stage| **stage == Stage::Finished).count();
    assert_eq!(finished, 1, "round {round}: {:?}", simulation.stages);
    assert!(simulation.coordinator.generation().0 > 0);
}

#[test]
fn the_coordinator_has_one_finisher_in_a_thousand_rounds_of_64_trainers() {
    let mut prng = SeededPrng::of("election, the coordinator alone");
    let begun = Instant::now();
    for round in 0..1000 {
        simulate(round, &mut prng);
    }
    println!("election, the coordinator alone: 1000 rounds in {:.1} s", begun.elapsed().as_secs_f64());
}

/// State that the threads of one round share.
struct Round {
    tensors: Vec<Tensor>,
    /// Winners that are still to be killed.
    dangers: AtomicUsize,
    finished: AtomicUsize,
    killed: AtomicUsize,
}

impl Round {
    /// One process of a trainer. Returns its client, or none if the trainer was killed.
    fn live(&self, client: Client, mut prng: SeededPrng) -> Option<Client> {
        loop {
            if !client.begin_init(&OptimizerSettings::default()).expect("nobody is stuck") {
                // The count is above one for a moment, until a trainer that finishes too late is refused.
                assert!(self.finished.load(Ordering::SeqCst) > 0, "who loses returns after the finish");
                return Some(client);
            }
            let take = |dangers: usize| dangers.checked_sub(1);
            let is_doomed = self.dangers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok();
            let stages = if is_doomed { prng.below(self.tensors.len() + 1) } else { self.tensors.len() };
            let declared = self.tensors[..stages].iter().try_for_each(|tensor| declare(&client, tensor));
            if is_doomed {
                self.killed.fetch_add(1, Ordering::SeqCst);
                return None;
            }
            // Counted before the finish, because trainers that the finish releases read the count. Undone on failure.
            self.finished.fetch_add(1, Ordering::SeqCst);
            match declared.and_then(|()| client.finish_init()) {
                Ok(()) => return Some(client),
                Err(_) => self.finished.fetch_sub(1, Ordering::SeqCst),
            };
        }
    }
}

fn elect_over_tcp(prng: &mut SeededPrng, lease: Duration) -> usize {
    let job = Job { chunk_bytes: 4096, ..Job::new(1, TRAINERS) };
    let servers = Local::start_with(&job, |settings| settings.times.lease = lease);
    let tensor = |number: usize| Tensor::new(&format!("tensor {number}"), Float32, 1500 * (number + 1), "");
    let round = Round {
        tensors: (0..3).map(tensor).collect(),
        dangers: AtomicUsize::new(prng.below(3)),
        finished: AtomicUsize::new(0),
        killed: AtomicUsize::new(0),
    };
    let survivors: usize = std::thread::scope(|scope| {
        let live = |trainer: u32| {
            let (client, prng, round) = (client(&servers.coordinator(), trainer), SeededPrng::new(prng.next()), &round);
            scope.spawn(move || round.live(client, prng))
        };
        let threads: Vec<_> = (0..TRAINERS).map(live).collect();
        let clients = threads.into_iter().filter_map(|thread| thread.join().expect("a trainer does not panic"));
        let clients: Vec<Client> = clients.collect();
        let values = pull(&clients[0], &round.tensors).expect("the tensors are there");
        assert!(round.tensors.iter().zip(values).all(|(tensor, value)| tensor.initial() == value));
        clients.len()
    });
    let killed = round.killed.into_inner();
    assert_eq!(round.finished.into_inner(), 1, "exactly one finishes");
    assert_eq!(survivors + killed, usize::try_from(TRAINERS).expect("few"));
    servers.stop();
    killed
}

#[test]
fn one_of_64_trainers_finishes_when_winners_are_killed() {
    let mut prng = SeededPrng::of("election over TCP");
    let rounds = if is_full() { 1000 } else { 20 };
    let begun = Instant::now();
    let killed: usize = (0..rounds).map(|_| elect_over_tcp(&mut prng, LEASE)).sum();
    let seconds = begun.elapsed().as_secs_f64();
    println!("election over TCP: {rounds} rounds in {seconds:.1} s, {killed} winners killed");
}
