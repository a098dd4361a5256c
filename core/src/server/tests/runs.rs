//! Runs of a job's trainers: after all have departed, rounds wait for all of them again.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::script::{Script, check};
use super::stage::{GRACE, Parcel, Plan, Stage};
use crate::checkpoint::Storage;
use crate::checkpoint::storage::InMemory;
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::Float32;
use crate::ids::{Incarnation, TrainerId};
use crate::port::{Event, ReceiveBuffers};
use crate::prng::{Prng, mix};
use crate::server::membership::{PeerOrigin, PlaceClaim, Ranks};
use crate::time::Now;
use crate::wire::{Frame, Kind};

const SGD: &str = "optimizer: SGD const_lr { learning_rate: 1 }";
const MOMENTUM: &str = "sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }";
const CLIPPED: &str = "sgd { momentum: 0.9 } clip_norm: 2.5 const_lr { learning_rate: 0.1 }";
/// Steps of each trainer in a job.
const STEPS: u64 = 5;
const SHARDS: usize = 2;

fn plan(mode: Mode, trainers: u32) -> Plan {
    Plan::new(mode, Merge::Mean, trainers).with("w", Float32, 1, SGD)
}

#[test]
fn rounds_wait_for_all_trainers_in_the_run_after_all_have_departed() {
    check(
        plan(Mode::Sync, 2),
        "run 1
         push 0 1 w=1 -> 0 done w@1
         push 1 1 w=3 -> 1 done w@1
         leave 1 -> 1 done
         leave 0 -> 0 done
         run 2
         reborn 0
         push+ 0 2 w=1 ->
         show w -> w@1=-2
         reborn 1
         push+ 1 2 w=3 -> 0 value w@2=-4 & 1 value w@2=-4",
    );
}

#[test]
fn a_trainer_departed_from_the_new_run_is_not_waited_for() {
    check(
        plan(Mode::Sync, 2),
        "leave 1 -> 1 done
         leave 0 -> 0 done
         run 2
         reborn 0
         push+ 0 1 w=1 ->
         reborn 1
         leave 1 -> *1 done*
         push+ 0 2 w=1 -> 0 value w@2=-2",
    );
    // A resent departure from the earlier run counts for that run.
    check(
        plan(Mode::Sync, 2),
        "leave 1 -> 1 done
         leave 0 -> 0 done
         run 2
         reborn 0
         push+ 0 1 w=1 ->
         again 1 -> 1 done
         show w -> w@0=0",
    );
}

#[test]
fn a_rejoined_trainer_is_waited_for_from_its_first_gradient_on() {
    check(
        plan(Mode::Sync, 2),
        "leave 1 -> 1 done
         reborn 1
         push+ 0 1 w=1 -> 0 value w@1=-1
         push+ 1 2 w=3 ->
         push+ 0 2 w=1 -> 0 value w@2=-3 & 1 value w@2=-3",
    );
}

#[test]
fn a_trainer_not_yet_connected_in_this_run_is_awaited_and_not_lost() {
    check(
        plan(Mode::Sync, 2),
        "leave 1 -> 1 done
         gone 1
         gone 0
         wait 10000 ->
         run 2
         reborn 0
         push+ 0 1 w=1 ->
         wait 59999 ->
         ask 0 -> 0 *round 1 waits for trainer 1 (not connected in this run of the job; host h, pid 1 was its process*
         wait 1 -> 0 error Deadline: *",
    );
}

#[test]
fn staleness_clocks_are_equal_at_the_start_of_a_run() {
    check(
        plan(Mode::Staleness { bound: 1 }, 2),
        "push 0 0 w=1 -> 0 done w@1
         leave 1 -> 1 done
         push 0 0 w=1 -> 0 done w@2
         push 0 0 w=1 -> 0 done w@3
         leave 0 -> 0 done
         run 2
         reborn 1
         push 1 0 w=1 -> 1 done w@4
         push 1 0 w=1 ->
         reborn 0
         push 0 0 w=1 -> 0 done w@5 & 1 done w@6
         push 1 0 w=1 ->",
    );
}

/// Connects the trainers of a new run of this size.
fn join_run(script: &mut Script, run: u32, trainers: u32) {
    (script.stage.run, script.stage.run_trainers) = (run, trainers);
    for trainer in 0..trainers {
        let life = script.stage.actors.get(&trainer).map_or(1, |actor| actor.incarnation.0 + 1);
        script.stage.connect(trainer, Incarnation(life));
        script.stage.answers.clear();
    }
}

#[test]
fn the_number_of_trainers_may_change_after_all_have_departed() {
    let disk = InMemory::new();
    let mut stage = Stage::empty(plan(Mode::Sync, 2));
    restore(&mut stage, &disk);
    stage.initialise();
    let mut script = Script::new(stage);
    script.run("push 0 1 w=1 -> 0 done w@1\n leave 0 -> 0 done\n push 1 1 w=3 -> 1 done w@1\n leave 1 -> 1 done");
    join_run(&mut script, 2, 3);
    script.run("push 2 2 w=3 -> 2 done w@2\n push 0 2 w=3 -> 0 done w@2\n show w -> w@1=-2");
    // The restart replays the start of the run.
    let mut stage = Stage::empty(plan(Mode::Sync, 2));
    restore(&mut stage, &disk);
    stage.actors = script.stage.actors.clone();
    (stage.run, stage.run_trainers) = (2, 3);
    stage.actors.clone().iter().for_each(|(trainer, actor)| stage.connect(*trainer, actor.incarnation));
    let mut script = Script::new(stage);
    script.run("push+ 1 2 w=6 -> 1 value w@2=-6\n leave 0 -> 0 done\n leave 1 -> 1 done\n leave 2 -> 2 done");
    join_run(&mut script, 3, 1);
    script.run("push+ 0 3 w=1 -> 0 value w@3=-7");
}

#[test]
fn the_number_of_trainers_may_not_change_before_all_have_departed() {
    let mut script = Script::new(Stage::serving(plan(Mode::Sync, 2)));
    script.run("leave 0 -> 0 done");
    join_run(&mut script, 2, 3);
    script.run("push 2 1 w=3 -> 2 error Invalid: a run of 3 trainers begins, and the 2 trainers of the one before *");
}

/// The next step of a trainer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// Its process begins at this time.
    Away(Now),
    /// It pushes for this round; which shards have answered.
    Pushing(u64, [bool; SHARDS]),
    /// It departs; which shards have answered.
    Leaving([bool; SHARDS]),
    /// Its process has ended.
    Over,
}

struct Worker {
    doing: Doing,
    life: Incarnation,
    run: u32,
    /// The unanswered frame of each shard, and the number of its unanswered entries.
    unanswered: [Option<(Parcel, usize)>; SHARDS],
}

/// Servers and trainers of one job after another.
struct World {
    prng: Prng,
    trainers: u32,
    now: Now,
    ranks: Ranks,
    shards: Vec<Stage>,
    disks: Vec<InMemory>,
    checkpoints: u64,
    workers: Vec<Worker>,
}

fn plans(trainers: u32) -> Vec<Plan> {
    let plan = || Plan::new(Mode::Sync, Merge::Mean, trainers);
    vec![plan().with("a", Float32, 3, MOMENTUM), plan().with("b", Float32, 2, SGD).with("c", Float32, 1030, CLIPPED)]
}

/// The gradients of a trainer for a round, as any process of its rank computes them.
fn gradients(stage: &mut Stage, shard: usize, trainer: u32, round: u64) -> Parcel {
    let value = |place: u64| {
        let bits = mix(round << 20 | u64::from(trainer) << 12 | place << 4 | shard as u64);
        f32::from(u16::try_from(bits >> 48).expect("16 bits")) / 1e4 - 3.0
    };
    let chunks = (0..).zip(stage.plan.chunks());
    let bytes = |place, bytes: u32| value(place).to_le_bytes().repeat(bytes as usize / 4);
    let entries = chunks.map(|(place, (id, length))| (id, round, bytes(place, length))).collect();
    stage.push(trainer, entries, true)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut prng = Prng(seed);
        let trainers = 2 + u32::try_from(prng.below(2)).expect("small");
        let disks: Vec<InMemory> = (0..SHARDS).map(|_| InMemory::new()).collect();
        let mut shards: Vec<Stage> = plans(trainers).into_iter().map(Stage::empty).collect();
        for (stage, disk) in shards.iter_mut().zip(&disks) {
            restore(stage, disk);
            stage.initialise();
        }
        let worker = |_| Worker { doing: Doing::Over, life: Incarnation(1), run: 0, unanswered: [None, None] };
        let workers = (0..trainers).map(worker).collect();
        let mut ranks = Ranks::new(trainers, GRACE);
        (0..trainers).for_each(|trainer| drop(ranks.claim(Now(0), Now(0), Some(trainer), &PeerOrigin::default())));
        (0..trainers).for_each(|trainer| ranks.lost(Now(0), TrainerId(trainer), Incarnation(1)));
        Self { prng, trainers, now: Now(1000), ranks, shards, disks, checkpoints: 0, workers }
    }

    /// One job: every trainer joins within 3 s, takes its steps, and departs.
    fn job(&mut self, last: u64, kills: u64) {
        for index in 0..self.workers.len() {
            let at = self.now + Duration::from_millis(self.prng.below(3000));
            self.workers[index].doing = Doing::Away(at);
        }
        while self.workers.iter().any(|worker| worker.doing != Doing::Over) {
            let step = Duration::from_millis(self.prng.below(400));
            self.now = self.now + step;
            self.shards.iter_mut().for_each(|stage| stage.wait(step));
            let index = self.prng.index(self.workers.len());
            self.act(index, last);
            if self.prng.below(100) < kills {
                match self.prng.below(3) {
                    0 => self.restart(),
                    _ => self.kill(index),
                }
            }
            if self.prng.below(20) == 0 {
                self.checkpoint();
            }
            self.answers(last);
        }
    }

    fn act(&mut self, index: usize, last: u64) {
        let trainer = u32::try_from(index).expect("few");
        match self.workers[index].doing {
            Doing::Away(at) if at <= self.now => self.join(index, last),
            Doing::Away(_) | Doing::Over => {}
            Doing::Pushing(round, answered) => {
                let shard = self.prng.index(SHARDS);
                if !answered[shard] {
                    let sent = self.workers[index].unanswered[shard].take();
                    let stage = &mut self.shards[shard];
                    let parcel = sent.map_or_else(|| gradients(stage, shard, trainer, round), |(parcel, _)| parcel);
                    self.send(index, shard, parcel);
                }
            }
            Doing::Leaving([true, true]) => {
                self.ranks.note_departed(TrainerId(trainer));
                self.end(index, Doing::Over);
            }
            Doing::Leaving(answered) => {
                let shard = self.prng.index(SHARDS);
                if !answered[shard] {
                    let head = self.shards[shard].call(Kind::Leave, trainer);
                    self.send(index, shard, Parcel { frame: Frame::bare(head), body: Vec::new() });
                }
            }
        }
    }

    /// A process of this rank starts, and continues after the rounds that every shard has applied.
    fn join(&mut self, index: usize, last: u64) {
        let trainer = u32::try_from(index).expect("few");
        let PlaceClaim::Taken(_) = self.ranks.claim(self.now, self.now, Some(trainer), &PeerOrigin::default()) else {
            panic!("a named rank is given")
        };
        let worker = &mut self.workers[index];
        worker.life = self.ranks.get(TrainerId(trainer)).expect("it has joined").incarnation;
        worker.run = self.ranks.run().0;
        self.connect(index);
        let versions = self.shards.iter().flat_map(Stage::contents).map(|(_, version, ..)| version.0);
        let done = versions.min().expect("there are chunks");
        self.workers[index].doing = next(done, last);
    }

    fn connect(&mut self, index: usize) {
        let Worker { life, run, .. } = self.workers[index];
        for stage in &mut self.shards {
            stage.run = run;
            stage.connect(u32::try_from(index).expect("few"), life);
            stage.answers.clear();
        }
    }

    fn send(&mut self, index: usize, shard: usize, parcel: Parcel) {
        self.shards[shard].deliver(u32::try_from(index).expect("few"), &parcel);
        let entries = parcel.frame.entries.len();
        self.workers[index].unanswered[shard] = Some((parcel, entries));
    }

    /// A process ends, in order or killed.
    fn end(&mut self, index: usize, doing: Doing) {
        let trainer = u32::try_from(index).expect("few");
        let worker = &mut self.workers[index];
        (worker.doing, worker.unanswered) = (doing, [None, None]);
        self.ranks.lost(self.now, TrainerId(trainer), worker.life);
        for stage in &mut self.shards {
            let peer = stage.actors[&trainer].peer;
            stage.event(Event::Gone {
                peer,
                reason: "killed".into(),
                unsent: Vec::new(),
                unfilled: ReceiveBuffers::new(),
            });
        }
    }

    fn kill(&mut self, index: usize) {
        if matches!(self.workers[index].doing, Doing::Pushing(..) | Doing::Leaving(_)) {
            let again = self.now + Duration::from_millis(self.prng.below(3000));
            self.end(index, Doing::Away(again));
        }
    }

    /// All servers are killed, or end after the job, and restart from their files.
    fn restart(&mut self) {
        let mut ranks = Ranks::new(self.trainers, GRACE);
        ranks.recall(&self.ranks.incarnations(), &self.ranks.departed(), self.ranks.run());
        ranks.begin_grace(self.now);
        self.ranks = ranks;
        for (shard, plan) in (0..).zip(plans(self.trainers)) {
            let mut stage = Stage::empty(plan);
            stage.now = self.shards[shard].now;
            restore(&mut stage, &self.disks[shard]);
            stage.actors = self.shards[shard].actors.clone();
            self.shards[shard] = stage;
        }
        for index in 0..self.workers.len() {
            if matches!(self.workers[index].doing, Doing::Pushing(..) | Doing::Leaving(_)) {
                let trainer = TrainerId(u32::try_from(index).expect("few"));
                self.ranks.connected(trainer, self.workers[index].life, &PeerOrigin::default());
                self.connect(index);
                for shard in 0..SHARDS {
                    if let Some((parcel, _)) = self.workers[index].unanswered[shard].take() {
                        self.send(index, shard, parcel);
                    }
                }
            }
        }
    }

    fn checkpoint(&mut self) {
        self.checkpoints += 1;
        for stage in &mut self.shards {
            stage.checkpoint(self.checkpoints);
            stage.retain_journal().expect("the disk is well");
        }
    }

    /// Processes the answers of the shards. A request that waited for a lost trainer is refused and sent again.
    fn answers(&mut self, last: u64) {
        for shard in 0..SHARDS {
            for answer in std::mem::take(&mut self.shards[shard].answers) {
                let index = answer.frame.head.trainer.0 as usize;
                let worker = &mut self.workers[index];
                let asked = answer.frame.head.request;
                let sent = worker.unanswered[shard].as_mut().filter(|(sent, _)| sent.frame.head.request == asked);
                let Some((_, left)) = sent else { continue };
                if !matches!(answer.frame.head.kind, Kind::Value | Kind::Done) {
                    continue;
                }
                *left -= answer.frame.entries.len();
                if *left > 0 {
                    continue;
                }
                worker.unanswered[shard] = None;
                match &mut worker.doing {
                    Doing::Pushing(_, answered) | Doing::Leaving(answered) => answered[shard] = true,
                    Doing::Away(_) | Doing::Over => {}
                }
            }
        }
        for worker in &mut self.workers {
            if let Doing::Pushing(round, [true, true]) = worker.doing {
                worker.doing = next(round, last);
            }
        }
    }
}

fn next(done: u64, last: u64) -> Doing {
    if done < last { Doing::Pushing(done + 1, [false; SHARDS]) } else { Doing::Leaving([false; SHARDS]) }
}

fn restore(stage: &mut Stage, disk: &InMemory) {
    let disk: Arc<dyn Storage> = Arc::new(disk.clone());
    stage.restore(&disk, false);
}

/// A case here takes long.
const CASES: u32 = 24;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn jobs_in_a_row_equal_undisturbed_jobs(seed in any::<u64>(), kills in prop_oneof![Just(0u64), 1u64..12]) {
        let mut world = World::new(seed);
        let mut peace: Vec<Stage> = plans(world.trainers).into_iter().map(Stage::serving).collect();
        for job in 1..=4 {
            world.job(job * STEPS, kills);
            for (shard, stage) in peace.iter_mut().enumerate() {
                for round in (job - 1) * STEPS + 1..=job * STEPS {
                    for trainer in 0..world.trainers {
                        let parcel = gradients(stage, shard, trainer, round);
                        stage.deliver(trainer, &parcel);
                    }
                }
                assert_eq!(world.shards[shard].contents(), stage.contents(), "shard {shard} after job {job}");
            }
            match world.prng.below(3) {
                0 => world.restart(),
                1 => world.checkpoint(),
                _ => {}
            }
        }
    }
}
