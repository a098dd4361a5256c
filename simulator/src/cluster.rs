//! A simulated cluster: processes, the queue of what happens next, and the end of a simulation.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pserver_core::checkpoint::storage::InMemory;
use pserver_core::port::StoreFault;
use pserver_core::prng::{Prng, mix};
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{MoveRequest, Role, ShardMessage};
use pserver_node::BackgroundWork;
use pserver_node::settings::Settings;

use crate::client::SimClient;
use crate::faults::{PlannedFault, SimFault};
use crate::job::{BOUND, SimJob, SimKill, SimMode, SimReturn};
use crate::machine::ProcessFate;
use crate::network::{EndpointId, HostId, SimNetwork};
use crate::oracle::Oracle;
use crate::server::{PlannedDeath, ServerBirth, ServerHost, ServerTurn, SimServer, TurnEffect};
use crate::time::{SimClock, SimTime};
use crate::trainer::{SimTrainer, TrainerContext, TrainerRecord, TrainerTurn};

/// Simulated time after the last fault in which the job must end.
const END_LIMIT: Duration = Duration::from_secs(300);
/// Time for which faults must keep processes from each other, in all, before a trainer may be called lost: the grace
/// time of a rank, less the longest pause before a client connects again.
const APART_MIN: Duration = Duration::from_millis(900);
/// Time after the end of a fault in which it counts for that: the grace time, and pauses of servers and clients.
const APART_LATER: Duration = Duration::from_secs(6);
/// Events after which a simulation that does not end has failed.
const EVENTS_MAX: u64 = 2_000_000;

/// How often each kind of thing happened.
pub type Sightings = BTreeMap<&'static str, u64>;

/// The outcome of one simulation.
#[derive(Debug, Default)]
pub(crate) struct ClusterOutcome {
    /// The failure; none when everything held.
    pub(crate) failure: Option<String>,
    pub(crate) events: u64,
    pub(crate) seen: Sightings,
    /// A digest of all events in order, for the comparison of two runs.
    pub(crate) digest: u64,
}

/// A process that has turns.
#[derive(Clone, Copy)]
enum Actor {
    Server(u16),
    Trainer(u32),
    Operator,
}

enum SimTask {
    Turn(EndpointId),
    Timer(EndpointId),
    Fault(SimFault),
    Work { server: u16, start: u32, work: BackgroundWork },
    StartServer(u16),
    StartTrainer(u32),
    Unblock(HostId, HostId),
    HealDisk(u16),
}

struct Scheduled {
    at: SimTime,
    number: u64,
    task: SimTask,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    /// The earliest is the greatest, as a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// The events to come.
#[derive(Default)]
struct EventQueue {
    heap: BinaryHeap<Scheduled>,
    numbers: u64,
    /// Turns because of the network.
    turns: BTreeSet<(EndpointId, SimTime)>,
    /// The next turn of each endpoint without an event.
    timers: BTreeMap<EndpointId, SimTime>,
    /// Endpoints whose last turn goes on, and until when.
    busy: BTreeMap<EndpointId, SimTime>,
}

impl EventQueue {
    fn push(&mut self, at: SimTime, task: SimTask) {
        self.numbers += 1;
        self.heap.push(Scheduled { at, number: self.numbers, task });
    }

    fn turn(&mut self, at: SimTime, endpoint: EndpointId) {
        if self.turns.insert((endpoint, at)) {
            self.push(at, SimTask::Turn(endpoint));
        }
    }

    /// Sets the time of the next turn without an event, in place of the one before.
    fn set_timer(&mut self, at: SimTime, endpoint: EndpointId) {
        self.timers.insert(endpoint, at);
        self.push(at, SimTask::Timer(endpoint));
    }

    fn pop(&mut self) -> Option<(SimTime, SimTask)> {
        while let Some(Scheduled { at, task, .. }) = self.heap.pop() {
            match task {
                SimTask::Turn(endpoint) => drop(self.turns.remove(&(endpoint, at))),
                SimTask::Timer(endpoint) if self.timers.get(&endpoint) != Some(&at) => continue,
                SimTask::Timer(endpoint) => drop(self.timers.remove(&endpoint)),
                _ => {}
            }
            return Some((at, task));
        }
        None
    }
}

/// How far the job is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SimStage {
    Training,
    /// Every trainer has finished; all servers are started again, and every value is looked at once more.
    Returning,
    Over,
}

// tidy: allow fields: the whole cluster, which the queue's events change.
struct SimCluster {
    job: SimJob,
    settings: Settings,
    clock: SimClock,
    network: SimNetwork,
    prng: Prng,
    queue: EventQueue,
    servers: Vec<ServerHost>,
    ranks: Vec<TrainerRank>,
    /// The client of the operator who moves shards, from the first order on.
    operator: Option<SimClient>,
    actors: BTreeMap<EndpointId, Actor>,
    oracle: Oracle,
    stage: SimStage,
    /// Faults that keep processes from each other: when the last effect of each ends, and how long it lasts.
    apart: Vec<(SimTime, Duration)>,
    found: ClusterOutcome,
}

/// A trainer's rank, and its process while there is one.
#[derive(Default)]
struct TrainerRank {
    process: Option<SimTrainer>,
    record: TrainerRecord,
    /// Processes that have started.
    starts: u32,
    /// Processes whose rank another one has, and until when they stand still.
    former: Vec<(SimTrainer, SimTime)>,
    /// Whether there has been one.
    was_replaced: bool,
}

impl TrainerRank {
    /// The process with this endpoint, and its rank's record.
    fn find(&mut self, endpoint: EndpointId) -> Option<(&mut SimTrainer, &mut TrainerRecord, SimTime)> {
        let current = self.process.iter_mut().map(|process| (process, SimTime::default()));
        let former = self.former.iter_mut().map(|(process, paused)| (process, *paused));
        let (process, paused) = current.chain(former).find(|(process, _)| process.endpoint() == endpoint)?;
        Some((process, &mut self.record, paused))
    }
}

/// Runs a cluster with the faults of a plan.
pub(crate) fn run(seed: u64, job: &SimJob, plan: &[PlannedFault]) -> Result<ClusterOutcome> {
    let mut cluster = SimCluster::new(seed, job)?;
    let end = plan.iter().map(|planned| planned.at).max().unwrap_or_default();
    for planned in plan {
        cluster.queue.push(SimTime::default() + planned.at, SimTask::Fault(planned.fault));
    }
    let limit = SimTime::default() + end + END_LIMIT;
    let failure = cluster.run(limit).err().map(|error| format!("at {}: {error:#}", cluster.clock.now()));
    cluster.found.seen.insert("values checked", cluster.oracle.values_checked);
    Ok(ClusterOutcome { failure, ..cluster.found })
}

impl SimCluster {
    fn new(seed: u64, job: &SimJob) -> Result<Self> {
        let clock = SimClock::default();
        let mut prng = Prng(mix(seed ^ 0x5eed));
        let network = SimNetwork::new(clock.clone(), prng.next());
        let mut queue = EventQueue::default();
        let shared = InMemory::new();
        let servers = (0..job.servers).map(|index| ServerHost {
            index,
            host: HostId(index),
            disk: if job.shares_disk { shared.clone() } else { InMemory::new() },
            store: (job.stores_apart && index == 0).then(Default::default),
            process: None,
            starts: 0,
            death: None,
            paused_until: None,
            is_to_start: true,
            former: Vec::new(),
        });
        let servers: Vec<_> = servers.collect();
        let soon = |prng: &mut Prng| SimTime(prng.below(20_000_000));
        (0..job.servers).for_each(|server| queue.push(soon(&mut prng), SimTask::StartServer(server)));
        (0..job.trainers).for_each(|trainer| queue.push(soon(&mut prng), SimTask::StartTrainer(trainer)));
        Ok(Self {
            settings: job.settings()?,
            clock,
            network,
            prng,
            queue,
            servers,
            ranks: (0..job.trainers).map(|_| TrainerRank::default()).collect(),
            operator: None,
            actors: BTreeMap::new(),
            oracle: Oracle::new(job.clone()),
            stage: SimStage::Training,
            apart: Vec::new(),
            found: ClusterOutcome { digest: seed, ..ClusterOutcome::default() },
            job: job.clone(),
        })
    }

    fn run(&mut self, limit: SimTime) -> Result<()> {
        while self.stage != SimStage::Over {
            let (at, task) = self.queue.pop().context("nothing is to come, and trainers are not done")?;
            self.clock.advance(at.max(self.clock.now()));
            self.found.events += 1;
            if at > limit || self.found.events > EVENTS_MAX {
                bail!("the job has not ended: {}", self.describe());
            }
            self.perform(task)?;
            for (at, endpoint) in self.network.take_wakes() {
                if self.actors.contains_key(&endpoint) {
                    self.queue.turn(at, endpoint);
                }
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let servers = self.servers.iter().map(|one| format!("server {}: {}", one.index, one.describe()));
        let trainers = self.ranks.iter().enumerate().map(|(rank, one)| {
            let process = one.process.as_ref().map_or("no process".to_owned(), SimTrainer::describe);
            format!("trainer {rank}: {:?}, {process}", one.record)
        });
        servers.chain(trainers).collect::<Vec<_>>().join("\n")
    }

    fn note(&mut self, what: &'static str) {
        *self.found.seen.entry(what).or_default() += 1;
    }

    fn digest(&mut self, number: u64) {
        self.found.digest = mix(self.found.digest ^ number);
    }

    fn perform(&mut self, task: SimTask) -> Result<()> {
        self.digest(self.clock.now().0);
        match task {
            SimTask::Turn(endpoint) | SimTask::Timer(endpoint) => match self.actors.get(&endpoint).copied() {
                Some(Actor::Server(server)) => self.server_turn(server, endpoint),
                Some(Actor::Trainer(trainer)) => self.trainer_turn(trainer, endpoint),
                Some(Actor::Operator) => self.operator_turn(),
                None => Ok(()),
            },
            SimTask::Fault(fault) => {
                if self.stage == SimStage::Training {
                    self.strike(fault);
                }
                Ok(())
            }
            SimTask::Work { server, start, work } => {
                let host = &self.servers[usize::from(server)];
                if host.starts == start && host.process.is_some() {
                    work();
                    self.end_if_dead(server);
                }
                Ok(())
            }
            SimTask::StartServer(server) => self.start_server(server),
            SimTask::StartTrainer(trainer) => {
                self.start_trainer(trainer);
                Ok(())
            }
            SimTask::Unblock(from, to) => {
                self.network.block(from, to, false);
                Ok(())
            }
            SimTask::HealDisk(server) => {
                self.servers[usize::from(server)].process.iter().for_each(|process| process.disk.set_slowness(1));
                Ok(())
            }
        }
    }

    fn forget(&mut self, endpoint: EndpointId) {
        self.actors.remove(&endpoint);
        self.queue.busy.remove(&endpoint);
    }

    fn server_turn(&mut self, server: u16, endpoint: EndpointId) -> Result<()> {
        let now = self.clock.now();
        let host = &self.servers[usize::from(server)];
        let (paused, is_former) = (host.paused(endpoint), host.is_former(endpoint));
        let busy = self.queue.busy.get(&endpoint).copied();
        if let Some(until) = [paused, busy].into_iter().flatten().max().filter(|until| now < *until) {
            self.queue.turn(until, endpoint);
            return Ok(());
        }
        let seed = self.prng.next();
        let birth = ServerBirth { settings: &self.settings, network: &self.network, clock: &self.clock, seed };
        let host = &mut self.servers[usize::from(server)];
        let turn = match host.turn(endpoint, &birth) {
            Err(_) if is_former => ServerTurn::Ended("it was refused".to_owned()),
            turn => turn?,
        };
        if let ServerTurn::Goes(TurnEffect { gone, .. }) = &turn {
            gone.iter().for_each(|gone| self.forget(*gone));
        }
        let host = &mut self.servers[usize::from(server)];
        let start = host.starts;
        let may_be_replaced = self.job.shares_disk && 1 < start;
        let Some(process) = host.process_of(endpoint) else { return Ok(()) };
        let (lag, is_troubled) = (process.fate.take_lag(), process.is_troubled);
        let turn = if is_former && process.fate.is_dead() { ServerTurn::Refused } else { turn };
        for work in process.take_work() {
            let at = now + Duration::from_micros(100 + self.prng.below(20_000));
            self.queue.push(at, SimTask::Work { server, start, work });
        }
        if self.end_if_dead(server) {
            return Ok(());
        }
        match turn {
            ServerTurn::Goes(TurnEffect { wait, others, let_go, taken_up, .. }) => {
                for other in others {
                    self.actors.insert(other, Actor::Server(server));
                    self.queue.turn(now, other);
                }
                (0..let_go).for_each(|_| self.note("a shard is let go"));
                (0..taken_up).for_each(|_| self.note("a shard that moved is taken up"));
                let least = lag.max(Duration::from_micros(1));
                self.queue.busy.insert(endpoint, now + lag);
                self.queue.set_timer(now + wait.max(least), endpoint);
                Ok(())
            }
            ServerTurn::Ended(_) | ServerTurn::Refused if is_former => {
                self.note("a replaced server ends");
                self.end_former(server, |process| process.endpoints().contains(&endpoint));
                Ok(())
            }
            ServerTurn::Ended(_) if is_troubled => {
                self.note("a server ends because of its disk");
                self.end_server(server, false, Duration::from_millis(500));
                Ok(())
            }
            // The connection of the process before may seem open for long, and a supervisor starts it again.
            ServerTurn::Refused => {
                self.note("a server is not let in while another seems to have its place");
                self.end_server(server, false, Duration::from_millis(500));
                Ok(())
            }
            // A registration of an earlier process that came late: its shard has moved without it.
            ServerTurn::Ended(text) if may_be_replaced && text.contains("was replaced by owner") => {
                self.note("a server ends as its shard was taken");
                self.end_server(server, false, Duration::from_millis(500));
                Ok(())
            }
            ServerTurn::Ended(text) => bail!("server {server} ended: {text}"),
        }
    }

    fn start_server(&mut self, server: u16) -> Result<()> {
        let host = &mut self.servers[usize::from(server)];
        if !std::mem::take(&mut host.is_to_start) || host.process.is_some() {
            return Ok(());
        }
        let seed = self.prng.next();
        let birth = ServerBirth { settings: &self.settings, network: &self.network, clock: &self.clock, seed };
        let is_again = host.starts > 0;
        let records = host.records()?;
        let started = host.start(&birth)?;
        records.into_iter().for_each(|record| self.note(record));
        let host = &mut self.servers[usize::from(server)];
        match started {
            Ok(endpoints) => {
                let now = self.clock.now();
                for endpoint in endpoints {
                    self.actors.insert(endpoint, Actor::Server(server));
                    self.queue.turn(now, endpoint);
                }
                if is_again {
                    self.note("a server starts again");
                }
                Ok(())
            }
            Err(_) if host.death.is_some() => {
                let death = host.death.take().expect("it was just there");
                self.note("a server is killed while it starts");
                if death.is_host_lost {
                    self.lose_host(server);
                }
                self.restart(server, death.time);
                Ok(())
            }
            Err(failure) => bail!("server {server} does not start: {failure}"),
        }
    }

    fn restart(&mut self, server: u16, time: Duration) {
        self.servers[usize::from(server)].is_to_start = true;
        self.queue.push(self.clock.now() + time, SimTask::StartServer(server));
    }

    /// Ends a process that was killed during an operation of its disk. Returns whether it was.
    fn end_if_dead(&mut self, server: u16) -> bool {
        let host = &mut self.servers[usize::from(server)];
        if !host.process.as_ref().is_some_and(|process| process.fate.is_dead()) {
            return false;
        }
        let death = host.death.take();
        self.note("a server is killed during an operation of the disk");
        let is_host_lost = death.is_some_and(|death| death.is_host_lost);
        self.end_server(server, is_host_lost, death.map_or(Duration::from_millis(100), |death| death.time));
        true
    }

    fn end_server(&mut self, server: u16, is_host_lost: bool, time: Duration) {
        let host = &mut self.servers[usize::from(server)];
        (host.death, host.paused_until) = (None, None);
        if let Some(process) = host.process.take() {
            for endpoint in process.endpoints() {
                self.actors.remove(&endpoint);
                self.queue.busy.remove(&endpoint);
            }
            process.end(&self.network, is_host_lost);
        }
        if is_host_lost {
            self.lose_host(server);
        }
        self.restart(server, time);
    }

    /// Ends processes whose place another one has.
    fn end_former(&mut self, server: u16, ends: impl Fn(&SimServer) -> bool) {
        let former = std::mem::take(&mut self.servers[usize::from(server)].former);
        let (ending, others): (Vec<_>, Vec<_>) = former.into_iter().partition(|(process, _)| ends(process));
        self.servers[usize::from(server)].former = others;
        for (process, _) in ending {
            for endpoint in process.endpoints() {
                self.actors.remove(&endpoint);
            }
            process.end(&self.network, false);
        }
    }

    /// Starts another process in a server's place, while the one that has it stands still.
    fn replace_server(&mut self, server: u16, time: Duration) {
        let host = &mut self.servers[usize::from(server)];
        let Some(process) = host.process.take() else { return };
        host.death = None;
        host.former.push((process, self.clock.now() + time));
        self.note("a server is replaced while it stands still");
        self.restart(server, Duration::from_millis(1));
    }

    fn lose_host(&mut self, server: u16) {
        self.note("a host is lost");
        self.end_former(server, |_| true);
        if self.job.shares_disk {
            return;
        }
        let disk = &self.servers[usize::from(server)].disk;
        match self.prng.below(3) {
            0 => disk.crash(),
            1 => disk.crash_after_removals(),
            _ => disk.crash_torn(&mut self.prng),
        }
    }

    fn start_trainer(&mut self, number: u32) {
        let rank = &mut self.ranks[number as usize];
        if rank.process.is_some() {
            return;
        }
        rank.starts += 1;
        let fate = Arc::<ProcessFate>::default();
        let host = HostId(self.job.servers + u16::try_from(number).expect("it is small"));
        let transport = self.network.transport(host, Arc::clone(&fate), None);
        let process = 100 * rank.starts + number;
        let process = rank.process.insert(SimTrainer::start(number, process, transport, fate, self.prng.next()));
        self.actors.insert(process.endpoint(), Actor::Trainer(number));
        self.queue.turn(self.clock.now(), process.endpoint());
    }

    fn kill_trainer(&mut self, number: u32, time: Duration) {
        if self.ranks[number as usize].process.is_some() {
            self.ranks[number as usize].record.is_done = false;
            self.note("a trainer is killed");
            self.restart_trainer(number, time);
        }
    }

    /// Ends a trainer's process, if there is one, and starts another one of its rank after a time.
    fn restart_trainer(&mut self, number: u32, time: Duration) {
        if let Some(process) = self.ranks[number as usize].process.take() {
            process.fate.kill();
            self.actors.remove(&process.endpoint());
            self.network.remove(process.endpoint(), false);
        }
        self.queue.push(self.clock.now() + time, SimTask::StartTrainer(number));
    }

    fn trainer_turn(&mut self, number: u32, endpoint: EndpointId) -> Result<()> {
        let now = self.clock.now();
        let is_there = |rank: &TrainerRank| rank.process.as_ref().is_some_and(SimTrainer::has_joined);
        // A former process that joins after its successor has left would keep the run open.
        let is_late = |rank: &TrainerRank| rank.former.iter().any(|(process, _)| !process.has_joined());
        let may_leave = self.ranks.iter().all(|rank| (rank.record.has_left || is_there(rank)) && !is_late(rank));
        let Some((process, record, paused)) = self.ranks[number as usize].find(endpoint) else { return Ok(()) };
        if now < paused {
            self.queue.turn(paused, endpoint);
            return Ok(());
        }
        let (job, oracle, seen) = (&self.job, &mut self.oracle, &mut self.found.seen);
        let is_former = process.is_former();
        let apart = self.apart.iter().filter(|(end, _)| now < *end).map(|(_, time)| *time);
        let may_be_lost = APART_MIN < apart.sum::<Duration>();
        let may_read_old = self.servers.iter().any(|host| host.may_serve_twice(now));
        let mut cx = TrainerContext { job, oracle, record, may_leave, may_be_lost, may_read_old, seen };
        match process.turn(trainer_time(now), &mut cx).with_context(|| format!("trainer {number}"))? {
            TrainerTurn::Goes(due) => {
                let due = due.map_or(now + Duration::from_secs(1), |due| SimTime(due.0 * 1_000_000));
                self.queue.set_timer(due.max(SimTime(now.0 + 1)), endpoint);
            }
            TrainerTurn::Replaced if is_former => {
                self.note("a replaced trainer is refused");
                self.ranks[number as usize].former.retain(|(process, _)| process.endpoint() != endpoint);
                self.actors.remove(&endpoint);
                self.network.remove(endpoint, false);
            }
            // The join of a former process was late, so that it has the newer incarnation.
            TrainerTurn::Replaced if self.ranks[number as usize].was_replaced => {
                self.kill_trainer(number, Duration::from_millis(50));
            }
            TrainerTurn::Replaced => bail!("trainer {number} was replaced by no other"),
        }
        match self.job.returns {
            SimReturn::Alone { after, kill } if self.may_return(number) => {
                self.note("a trainer returns that has left");
                self.plan_kill(kill);
                self.bring_back(number, after);
            }
            SimReturn::SecondRun { after, kill, .. }
                if (0..self.job.trainers).all(|trainer| self.may_return(trainer)) =>
            {
                self.note("a second run of trainers begins");
                self.plan_kill(kill);
                for trainer in 0..self.job.trainers {
                    let time = after + Duration::from_millis(self.prng.below(100));
                    self.bring_back(trainer, time);
                }
            }
            _ => {}
        }
        if self.ranks.iter().all(|rank| rank.record.is_done) {
            self.all_done();
        }
        Ok(())
    }

    fn may_return(&self, trainer: u32) -> bool {
        let record = &self.ranks[trainer as usize].record;
        record.has_left && !record.has_returned
    }

    fn plan_kill(&mut self, kill: Option<SimKill>) {
        if let Some(SimKill { server, after }) = kill {
            let fault = SimFault::KillServer { server, time: Duration::from_millis(5) };
            self.queue.push(self.clock.now() + after, SimTask::Fault(fault));
        }
    }

    /// Ends the process of a trainer that has left, and starts another one of its rank after a time.
    fn bring_back(&mut self, trainer: u32, time: Duration) {
        let rank = &mut self.ranks[trainer as usize];
        (rank.record.is_done, rank.record.has_left, rank.record.has_returned) = (false, false, true);
        self.restart_trainer(trainer, time);
    }

    /// Starts another process of a trainer's rank, while the one that has it stands still.
    fn replace_trainer(&mut self, number: u32, time: Duration) {
        let now = self.clock.now();
        let rank = &mut self.ranks[number as usize];
        let Some(mut process) = rank.process.take() else { return };
        process.retire();
        rank.record.is_done = false;
        rank.was_replaced = true;
        rank.former.push((process, now + time));
        self.note("a trainer is replaced while it stands still");
        self.queue.push(now + Duration::from_millis(1), SimTask::StartTrainer(number));
    }

    /// Every trainer has the values that it wants.
    fn all_done(&mut self) {
        self.stage = match self.stage {
            SimStage::Training => {
                let is_host_lost = self.job.is_synced;
                for server in 0..self.job.servers {
                    let time = Duration::from_millis(self.prng.below(500));
                    self.end_former(server, |_| true);
                    self.end_server(server, is_host_lost, time);
                }
                for rank in self.ranks.iter_mut().filter(|rank| !rank.record.has_left) {
                    rank.record.is_done = false;
                    let Some(process) = &mut rank.process else { continue };
                    process.look_again();
                    self.queue.turn(self.clock.now(), process.endpoint());
                }
                SimStage::Returning
            }
            SimStage::Returning | SimStage::Over => SimStage::Over,
        };
    }

    /// Whether a process of a trainer may end before its time. A trainer that comes back while no other is connected
    /// begins a new run, which awaits those that have left. Where staleness is bounded, a trainer whose processes have
    /// lost more steps than the bound, each the one that it was sending, is waited for at its end, where it stays.
    fn may_come_back(&self, trainer: u32) -> bool {
        let has_lost = || self.job.mode == SimMode::Bounded && self.ranks[trainer as usize].starts > BOUND;
        let is_leaving = |rank: &TrainerRank| rank.process.as_ref().is_some_and(SimTrainer::is_leaving);
        let has_left = || self.ranks.iter().any(|rank| rank.record.has_left || is_leaving(rank));
        !self.job.has_leavers() && !has_left() && !has_lost()
    }

    fn strike(&mut self, fault: SimFault) {
        let now = self.clock.now();
        self.apart.push((now + fault.apart() + APART_LATER, fault.apart()));
        match fault {
            SimFault::KillTrainer { trainer, .. } | SimFault::ReplaceTrainer { trainer, .. }
                if !self.may_come_back(trainer) => {}
            SimFault::Cut { choice } => {
                if let Some(unnoticed) = self.network.cut(choice) {
                    self.apart.push((now + unnoticed + APART_LATER, unnoticed));
                    self.note("a connection is cut");
                }
            }
            SimFault::Block { from, to, time } => {
                let (from, to) = (HostId(from), HostId(to));
                self.note("a host's frames do not reach another");
                self.network.block(from, to, true);
                self.queue.push(now + time, SimTask::Unblock(from, to));
            }
            SimFault::KillTrainer { trainer, time } => self.kill_trainer(trainer, time),
            SimFault::KillServer { server, time } => {
                self.note("a server is killed");
                self.end_server(server, false, time);
            }
            SimFault::LoseHost { server, time } => self.end_server(server, true, time),
            SimFault::KillAtDisk { server, operations, time } => {
                self.set_death(server, PlannedDeath { operations, is_host_lost: false, time });
            }
            SimFault::LoseHostAtDisk { server, operations, time } => {
                self.set_death(server, PlannedDeath { operations, is_host_lost: true, time });
            }
            SimFault::FailDisk { server, operations } => {
                if let Some(process) = &mut self.servers[usize::from(server)].process {
                    process.disk.fail_after(operations);
                    process.is_troubled = true;
                    self.note("an operation of a disk fails");
                }
            }
            SimFault::FailStore { is_done, times } => self.fail_store(is_done, times),
            SimFault::SlowDisk { server, slowness, time } => {
                if let Some(process) = &self.servers[usize::from(server)].process {
                    process.disk.set_slowness(slowness);
                    self.note("a disk is slow");
                    self.queue.push(now + time, SimTask::HealDisk(server));
                }
            }
            SimFault::PauseServer { server, time } => {
                self.note("a server stands still");
                self.servers[usize::from(server)].paused_until = Some(now + time);
            }
            SimFault::ReplaceServer { server, time } => self.replace_server(server, time),
            SimFault::JumpClock { server, time } => self.jump_clock(server, time),
            SimFault::ReplaceTrainer { trainer, time } => self.replace_trainer(trainer, time),
            SimFault::MoveShard { server, shard, to } => {
                let shard = ShardMessage { server: server.into(), shard: shard.into() };
                self.order(Request::Move(MoveRequest { shard: Some(shard), to: to.into(), seen: self.map_version() }));
            }
            SimFault::SlowStep { trainer, time } => {
                if let Some(process) = &mut self.ranks[trainer as usize].process {
                    process.slow_down(time);
                    self.note("a trainer computes for long");
                }
            }
            SimFault::Cancel { trainer } => {
                if let Some(process) = &mut self.ranks[trainer as usize].process {
                    process.lose_patience(trainer_time(now));
                    self.queue.turn(now, process.endpoint());
                }
            }
        }
    }

    fn fail_store(&mut self, is_done: bool, times: u32) {
        let Some(process) = &self.servers[0].process else { return };
        let fault = if is_done { StoreFault::Unanswered } else { StoreFault::Refused };
        let mut faults = process.store_faults.lock().unwrap_or_else(PoisonError::into_inner);
        (0..times).for_each(|_| faults.push_back(fault));
        drop(faults);
        self.note(if is_done { "an answer of the store is lost" } else { "a change of the store fails" });
    }

    /// The version of the newest map of shards.
    fn map_version(&self) -> u64 {
        let known = self.servers.iter().filter_map(|host| Some(host.process.as_ref()?.map_version()));
        known.max().unwrap_or(0)
    }

    /// Has the operator ask something of the coordinator.
    fn order(&mut self, request: Request) {
        if self.operator.is_none() {
            let host = HostId(self.job.servers + u16::try_from(self.job.trainers).expect("it is small"));
            let transport = self.network.transport(host, Arc::<ProcessFate>::default(), None);
            let operator = SimClient::new(Role::Reader, 1, transport);
            self.actors.insert(operator.endpoint(), Actor::Operator);
            self.operator = Some(operator);
        }
        let operator = self.operator.as_mut().expect("it was just made");
        operator.ask_beside(request);
        self.queue.turn(self.clock.now(), operator.endpoint());
    }

    fn operator_turn(&mut self) -> Result<()> {
        let now = self.clock.now();
        let Some(operator) = &mut self.operator else { return Ok(()) };
        let due = operator.turn(trainer_time(now))?;
        let due = due.map_or(now + Duration::from_secs(1), |due| SimTime(due.0 * 1_000_000));
        self.queue.set_timer(due.max(SimTime(now.0 + 1)), operator.endpoint());
        for (_, result) in operator.take_beside() {
            self.note(if result.is_ok() { "a move has ended" } else { "a move is refused" });
        }
        Ok(())
    }

    /// Kills a server during an operation of its disk, of this process or of the next.
    fn set_death(&mut self, server: u16, death: PlannedDeath) {
        let host = &mut self.servers[usize::from(server)];
        host.process.iter().for_each(|process| process.disk.die_after(death.operations));
        host.death = Some(death);
    }

    fn jump_clock(&mut self, server: u16, time: Duration) {
        let Some(process) = &self.servers[usize::from(server)].process else { return };
        process.machine.jump(time);
        let endpoints = process.endpoints();
        endpoints.into_iter().for_each(|endpoint| self.queue.turn(self.clock.now(), endpoint));
        self.note("a clock jumps ahead");
    }
}

fn trainer_time(now: SimTime) -> Now {
    Now(now.0 / 1_000_000)
}
