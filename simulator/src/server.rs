//! A server's host and the process on it: sessions of `node` over a simulated network and disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pserver_client::answer;
use pserver_core::checkpoint::storage::InMemory;
use pserver_core::checkpoint::{OwnerRecord, ReplayOptions, Storage, replay};
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation, ShardId, Term};
use pserver_core::port::{CoordinationStore, FailingStore, MemoryStore, StoreFaults};
use pserver_core::server::record_name;
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{ErrorCode, RegisterRequest, Role, ServerEntry};
use pserver_node::settings::Settings;
use pserver_node::{
    BackgroundWork, DrivenProcess, DrivenSession, HoldReport, PlaceChanges, ProcessMachine, ProcessOptions,
};

use crate::client::SimClient;
use crate::disk::ProcessDisk;
use crate::job::SimJob;
use crate::machine::{ProcessFate, SimMachine};
use crate::network::{EndpointId, HostId, SimNetwork, SimTransport};
use crate::time::{SimClock, SimTime};

/// Interval at which a server renews its registration, as `node` does.
const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time in which a server does not see that another process has its shards, and a bit.
const UNSEEN_MAX: Duration = Duration::from_millis(260);
/// Pause before it is looked again whether background work is done.
const WORK_PAUSE: Duration = Duration::from_millis(2);

/// A host, whose disk outlives processes.
pub(crate) struct ServerHost {
    pub(crate) index: u16,
    pub(crate) host: HostId,
    pub(crate) disk: InMemory,
    /// The store of coordination, where it is apart from the disk.
    pub(crate) store: Option<MemoryStore>,
    pub(crate) process: Option<SimServer>,
    /// Processes that have started here.
    pub(crate) starts: u32,
    /// The death that is set for its disk.
    pub(crate) death: Option<PlannedDeath>,
    /// Until when its process stands still.
    pub(crate) paused_until: Option<SimTime>,
    /// Whether a process is to be started.
    pub(crate) is_to_start: bool,
    /// Processes whose place another one has, and until when each stands still.
    pub(crate) former: Vec<(SimServer, SimTime)>,
}

/// The planned death of a server during an operation of its disk.
#[derive(Clone, Copy)]
pub(crate) struct PlannedDeath {
    pub(crate) operations: u64,
    /// Whether its host is lost with what was not synced.
    pub(crate) is_host_lost: bool,
    /// The time until its next start.
    pub(crate) time: Duration,
}

/// A process on it.
pub(crate) struct SimServer {
    pub(crate) fate: Arc<ProcessFate>,
    pub(crate) machine: Arc<SimMachine>,
    pub(crate) disk: ProcessDisk,
    /// Failures to come of its changes of the store of coordination.
    pub(crate) store_faults: StoreFaults,
    process: DrivenProcess,
    coordinator: Option<(EndpointId, DrivenSession<SimTransport>)>,
    shards: BTreeMap<ShardId, (EndpointId, DrivenSession<SimTransport>)>,
    /// The job that it serves, once that is known.
    job: Option<(Epoch, Generation)>,
    registrar: Option<SimRegistration>,
    /// Whether an error of the disk was injected: a session may then end.
    pub(crate) is_troubled: bool,
    /// When it last took a shard up.
    taken_up_at: SimTime,
    /// Whether it was started while a former process stood still.
    is_successor: bool,
}

/// The registration of a server other than 0.
struct SimRegistration {
    client: SimClient,
    /// The number of the last report of what the process holds.
    reported: u64,
    renew_at: Now,
    /// When its client wants a turn.
    due: Option<Now>,
    is_asked: bool,
}

/// The parameters of a process's start.
pub(crate) struct ServerBirth<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) network: &'a SimNetwork,
    pub(crate) clock: &'a SimClock,
    pub(crate) seed: u64,
}

/// The end of a turn of one of a process's endpoints.
pub(crate) enum ServerTurn {
    Goes(TurnEffect),
    /// The process has ended by itself.
    Ended(String),
    /// The process has ended, as server 0 has not let it in.
    Refused,
}

/// The effect of a turn.
#[derive(Default)]
pub(crate) struct TurnEffect {
    /// The next turn is due after this time at the latest.
    pub(crate) wait: Duration,
    /// Endpoints of the process that are due at once.
    pub(crate) others: Vec<EndpointId>,
    /// Endpoints that have gone.
    pub(crate) gone: Vec<EndpointId>,
    /// Shards that were let go, and taken up.
    pub(crate) let_go: usize,
    pub(crate) taken_up: usize,
}

impl ServerHost {
    /// Starts a process. The failure is that of a start which did not succeed.
    pub(crate) fn start(&mut self, birth: &ServerBirth<'_>) -> Result<Result<Vec<EndpointId>, Failure>> {
        let index = self.index;
        self.starts += 1;
        let fate = Arc::<ProcessFate>::default();
        let machine = SimMachine::start(birth.clock.clone());
        let disk = ProcessDisk::new(self.disk.clone(), Arc::clone(&fate), birth.seed);
        self.death.iter().for_each(|death| disk.die_after(death.operations));
        let mut settings = birth.settings.clone();
        settings.index = index;
        settings.addresses.bind = SimJob::address(index);
        let owner = OwnerRecord {
            server: index,
            process: self.starts,
            host: format!("simulated-{index}"),
            since: "2027-01-15T08:00:00Z".to_owned(),
        };
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        let machine_of = Arc::clone(&machine) as Arc<dyn ProcessMachine>;
        let options = ProcessOptions { settings, machine: machine_of, storage: Some(storage), owner };
        let process = match DrivenProcess::start(options) {
            Ok(process) => process,
            Err(failure) => return Ok(Err(failure)),
        };
        let mut process = SimServer {
            fate,
            machine,
            disk,
            store_faults: StoreFaults::default(),
            process,
            coordinator: None,
            shards: BTreeMap::new(),
            job: None,
            registrar: None,
            is_troubled: false,
            taken_up_at: SimTime::default(),
            is_successor: !self.former.is_empty(),
        };
        let started = if index == 0 {
            let store = self.store.as_ref().map(|store| {
                let failing = FailingStore::new(store.another(), Arc::clone(&process.store_faults));
                Box::new(failing) as Box<dyn CoordinationStore>
            });
            process.start_coordinator(store, self.host, birth)
        } else {
            let transport = birth.network.transport(self.host, Arc::clone(&process.fate), None);
            let number = 1000 * self.starts + u32::from(index);
            let register = process.register(index, birth.settings, false);
            process.registrar = Some(SimRegistration::new(number, transport, register));
            Ok(())
        };
        if let Err(failure) = started {
            process.end(birth.network, false);
            return Ok(Err(failure));
        }
        let endpoints = process.endpoints();
        self.process = Some(process);
        Ok(Ok(endpoints))
    }

    /// Whether a former process may not have noticed that another one has taken its shards: it looks at times.
    pub(crate) fn may_serve_twice(&self, now: SimTime) -> bool {
        let taken = self.process.as_ref().map_or(SimTime::default(), |process| process.taken_up_at);
        !self.former.is_empty() && now < taken + UNSEEN_MAX
    }

    /// The sorts of records in the journals of its disk.
    pub(crate) fn records(&self) -> Result<BTreeSet<&'static str>> {
        let mut found = BTreeSet::new();
        let server = format!("server-{}", self.index);
        for name in self.disk.list(&server).unwrap_or_default() {
            let directory = format!("{server}/{name}");
            let segments = self.disk.list(&directory).unwrap_or_default();
            let starts =
                segments.iter().filter_map(|name| name.strip_prefix("journal-")?.split('-').nth(1)?.parse().ok());
            let Some(from) = starts.min() else { continue };
            let reading = ReplayOptions {
                storage: &self.disk,
                directory: &directory,
                identity: None,
                from,
                accepts_torn_tail: true,
            };
            replay(&reading, &mut |_, record| {
                found.extend(record_name(record));
                Ok(())
            })
            .with_context(|| format!("the journal of {directory}"))?;
        }
        Ok(found)
    }

    /// Describes its processes, for a simulation that does not end.
    pub(crate) fn describe(&self) -> String {
        let process = match &self.process {
            None => "no process".to_owned(),
            Some(process) => match &process.registrar {
                Some(registrar) if process.job.is_none() => format!("registering, {}", registrar.client.describe()),
                _ => format!("{} shards, {:?}", process.shards.len(), process.process.report()),
            },
        };
        format!("{} starts, {process}, {} former", self.starts, self.former.len())
    }

    /// Whether an endpoint is of a process whose place another one has.
    pub(crate) fn is_former(&self, endpoint: EndpointId) -> bool {
        self.former.iter().any(|(process, _)| process.has(endpoint))
    }

    /// The process with this endpoint.
    pub(crate) fn process_of(&mut self, endpoint: EndpointId) -> Option<&mut SimServer> {
        let former = self.former.iter_mut().map(|(process, _)| process);
        self.process.iter_mut().chain(former).find(|process| process.has(endpoint))
    }

    /// Until when the process with this endpoint stands still.
    pub(crate) fn paused(&self, endpoint: EndpointId) -> Option<SimTime> {
        let former = self.former.iter().find(|(process, _)| process.has(endpoint));
        former.map_or(self.paused_until, |(_, until)| Some(*until))
    }

    /// Gives a turn to an endpoint of one of the processes.
    pub(crate) fn turn(&mut self, endpoint: EndpointId, birth: &ServerBirth<'_>) -> Result<ServerTurn> {
        let (index, host, is_former) = (self.index, self.host, self.is_former(endpoint));
        let Some(process) = self.process_of(endpoint) else { bail!("server {index} has no such process") };
        let now = Now(process.machine.nanos() / 1_000_000);
        if process.registrar.as_ref().is_some_and(|one| one.client.endpoint() == endpoint) {
            let registered = process.registrar_turn(now, index, birth.settings)?;
            let due = process.registrar.as_ref().and_then(|registrar| registrar.due);
            let wait = due.map_or(Duration::from_secs(1), |due| now.until(due));
            return match registered {
                Registered::Nothing => Ok(ServerTurn::Goes(process.follow((index, host), wait, birth))),
                // A renewal of a former process, which in truth could not have the address, was before its own. The
                // former one may have ended since.
                Registered::Replaced(_) if !is_former && process.is_successor => Ok(ServerTurn::Refused),
                Registered::Replaced(text) => Ok(ServerTurn::Ended(text)),
                Registered::Refused => Ok(ServerTurn::Refused),
                // The address is that of the process that has its place.
                Registered::Job if is_former => Ok(ServerTurn::Ended("it was replaced".to_owned())),
                Registered::Job => match process.start_shards(index, host, birth) {
                    Ok(()) => {
                        Ok(ServerTurn::Goes(TurnEffect { wait, others: process.endpoints(), ..TurnEffect::default() }))
                    }
                    Err(failure) => Ok(ServerTurn::Ended(failure.to_string())),
                },
            };
        }
        let is_coordinator = process.coordinator.as_ref().is_some_and(|(one, _)| *one == endpoint);
        let mut sessions = process.coordinator.iter_mut().chain(process.shards.values_mut());
        let (_, session) =
            sessions.find(|(one, _)| *one == endpoint).context("an endpoint of a process has a session")?;
        Ok(match session.turn() {
            Ok(wait) if is_coordinator => ServerTurn::Goes(process.follow((index, host), wait, birth)),
            Ok(wait) => ServerTurn::Goes(TurnEffect { wait, ..TurnEffect::default() }),
            Err(failure) => ServerTurn::Ended(failure.to_string()),
        })
    }
}

impl SimServer {
    fn start_coordinator(
        &mut self,
        store: Option<Box<dyn CoordinationStore>>,
        host: HostId,
        birth: &ServerBirth<'_>,
    ) -> Result<(), Failure> {
        let transport = self.transport(0, 0, host, birth);
        let endpoint = transport.endpoint();
        let (session, job) = match self.process.coordinator(store, transport) {
            Ok(started) => started,
            Err(failure) => {
                birth.network.remove(endpoint, false);
                return Err(failure);
            }
        };
        self.coordinator = Some((endpoint, session));
        self.job = Some(job);
        self.start_shards(0, host, birth)
    }

    fn start_shards(&mut self, index: u16, host: HostId, birth: &ServerBirth<'_>) -> Result<(), Failure> {
        let PlaceChanges { version, takes_up, .. } = self.process.changes();
        for (shard, term) in takes_up {
            let taken = self.take_up((shard, term), (index, host), birth);
            if self.process.needs(shard) {
                taken?;
            }
        }
        self.process.follow(version);
        Ok(())
    }

    fn take_up(
        &mut self,
        (shard, term): (ShardId, Term),
        (index, host): (u16, HostId),
        birth: &ServerBirth<'_>,
    ) -> Result<EndpointId, Failure> {
        let job = self.job.ok_or_else(|| Failure::call("the job is not known yet"))?;
        let transport = self.transport(index, shard.lane(), host, birth);
        let endpoint = transport.endpoint();
        let now = birth.clock.now();
        let begun = self.process.shard((shard, term), job, transport);
        if begun.is_err() {
            birth.network.remove(endpoint, false);
        }
        self.shards.insert(shard, (endpoint, begun?));
        self.taken_up_at = now;
        Ok(endpoint)
    }

    /// Does what the newest map of shards asks, as `node` does.
    fn follow(&mut self, server: (u16, HostId), wait: Duration, birth: &ServerBirth<'_>) -> TurnEffect {
        let mut outcome = TurnEffect { wait, ..TurnEffect::default() };
        if self.job.is_none() {
            return outcome;
        }
        let PlaceChanges { version, lets_go, takes_up } = self.process.changes();
        let awaits_work = |shard: &ShardId| self.shards.get(shard).is_some_and(|(_, session)| session.awaits_work());
        if lets_go.iter().any(awaits_work) {
            outcome.wait = wait.min(WORK_PAUSE);
            return outcome;
        }
        for shard in lets_go {
            if let Some((endpoint, session)) = self.shards.remove(&shard) {
                birth.network.remove(endpoint, false);
                outcome.gone.push(endpoint);
                outcome.let_go += 1;
                // Without its last checkpoint it is taken up from the one before and the journal.
                let _ = session.finish();
            }
            self.process.let_go(shard);
        }
        for (shard, term) in takes_up {
            // One that fails is tried again in the next turn.
            if let Ok(endpoint) = self.take_up((shard, term), server, birth) {
                outcome.others.push(endpoint);
                outcome.taken_up += 1;
            }
        }
        self.process.follow(version);
        if outcome.let_go + outcome.taken_up > 0 {
            // The coordinator is to know.
            outcome.others.extend(self.coordinator.iter().map(|(endpoint, _)| *endpoint));
            outcome.others.extend(self.registrar.iter().map(|registrar| registrar.client.endpoint()));
        }
        outcome
    }

    fn register(&self, index: u16, settings: &Settings, renews: bool) -> Request {
        let (address, shards) = (SimJob::address(index).to_string(), settings.shards.into());
        let HoldReport { version, held: holds, .. } = self.process.report();
        Request::Register(RegisterRequest {
            server: index.into(),
            entry: Some(ServerEntry { address, shards, keeps_journal: true }),
            renews,
            status: Vec::new(),
            servers: Some(settings.job.servers.into()),
            holds,
            map_version: renews.then_some(version.0),
            start: 0,
        })
    }

    /// The version of the newest map of shards that it knows.
    pub(crate) fn map_version(&self) -> u64 {
        self.process.map_version().0
    }

    /// A turn of the registration.
    fn registrar_turn(&mut self, now: Now, index: u16, settings: &Settings) -> Result<Registered> {
        let registrar = self.registrar.as_mut().context("it has a registration")?;
        registrar.due = registrar.client.turn(now)?;
        if let Some(results) = registrar.client.take_call() {
            registrar.is_asked = false;
            registrar.renew_at = now + RENEW_INTERVAL;
            for (_, result) in results {
                match result {
                    Ok(finished) => {
                        let Answer::Joined(joined) = answer(&finished.control)? else { bail!("expected a job") };
                        joined.map.and_then(|map| map.map()).iter().for_each(|map| self.process.publish(map));
                        let found = (Epoch(joined.epoch), Generation(joined.generation));
                        let Some((epoch, _)) = self.job else {
                            self.job = Some(found);
                            return Ok(Registered::Job);
                        };
                        ensure!(found.0 == epoch, "server 0 serves another job than before");
                    }
                    Err(refused) if refused.code == ErrorCode::Fenced => return Ok(Registered::Replaced(refused.text)),
                    Err(_) => return Ok(Registered::Refused),
                }
            }
        }
        if registrar.is_asked {
            return Ok(Registered::Nothing);
        }
        let number = self.process.report_number();
        if self.job.is_none() || (now < registrar.renew_at && registrar.reported == number) {
            registrar.due = registrar.due.into_iter().chain([registrar.renew_at]).min();
            return Ok(Registered::Nothing);
        }
        (registrar.is_asked, registrar.reported) = (true, number);
        let register = self.register(index, settings, true);
        let registrar = self.registrar.as_mut().context("it has a registration")?;
        registrar.client.ask_control(register);
        registrar.due = registrar.client.turn(now)?;
        Ok(Registered::Nothing)
    }

    fn transport(&self, index: u16, lane: u64, host: HostId, birth: &ServerBirth<'_>) -> SimTransport {
        let address = SimJob::address(index).of_lane(lane);
        birth.network.transport(host, Arc::clone(&self.fate), Some(&address))
    }

    fn has(&self, endpoint: EndpointId) -> bool {
        self.endpoints().contains(&endpoint)
    }

    pub(crate) fn endpoints(&self) -> Vec<EndpointId> {
        let sessions = self.coordinator.iter().chain(self.shards.values()).map(|(endpoint, _)| *endpoint);
        sessions.chain(self.registrar.iter().map(|registrar| registrar.client.endpoint())).collect()
    }

    pub(crate) fn take_work(&self) -> Vec<BackgroundWork> {
        self.machine.take_work()
    }

    /// Ends the process. The host of a lost one tells its peers nothing.
    pub(crate) fn end(self, network: &SimNetwork, is_host_lost: bool) {
        self.fate.kill();
        self.endpoints().into_iter().for_each(|endpoint| network.remove(endpoint, is_host_lost));
    }
}

enum Registered {
    Nothing,
    /// Server 0 has named the job.
    Job,
    Replaced(String),
    /// Another process has the place.
    Refused,
}

impl SimRegistration {
    fn new(process: u32, transport: SimTransport, register: Request) -> Self {
        let mut client = SimClient::new(Role::Server, process, transport);
        client.ask_control(register);
        Self { client, reported: 0, renew_at: Now(0), is_asked: true, due: None }
    }
}
