//! Membership of a job, kept by the coordinator: ranks of trainers and slots of servers.
//!
//! A connected member keeps its rank or slot. After a disconnect it keeps it for the grace time, in which it can
//! reconnect. A released rank is free at once.
//!
//! A trainer that joins while no other one is connected begins a new run of the job: shards then wait for every
//! trainer again, also for those that departed from an earlier run.

use std::fmt;
use std::time::Duration;

use super::reply::Refusal;
use super::report::{ServerReport, TrainerReport, TrainerState};
use crate::error::Failure;
use crate::ids::{Incarnation, PeerId, RunNumber, TrainerId};
use crate::time::Now;
use crate::wire::{ErrorCode, RegisterRequest, ServerEntry};

/// Rank holders named in a refusal, at most.
const NAMED_MAX: usize = 8;

/// The process at the other end of a connection, for log lines and errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerOrigin {
    /// The address that the connection comes from.
    pub address: String,
    /// The host's name, as its hello says.
    pub host: String,
    /// The process number, as its hello says.
    pub process: u32,
}

impl PeerOrigin {
    pub(super) fn is_same_process(&self, other: &Self) -> bool {
        (&self.host, self.process) == (&other.host, other.process)
    }
}

impl fmt::Display for PeerOrigin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, process) = (&self.host, self.process);
        if host.is_empty() {
            write!(formatter, "unknown host")
        } else {
            write!(formatter, "host {host}, pid {process}")
        }
    }
}

/// The coordinator's record of a trainer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainerMember {
    /// Its current incarnation; zero when it never joined.
    pub incarnation: Incarnation,
    /// Whether it has departed.
    pub departed: bool,
    /// The process that it runs in.
    pub origin: PeerOrigin,
    /// Time of its last message.
    pub heard: Now,
    /// Time from which its rank is free; `None` while it is connected.
    pub free_from: Option<Now>,
}

impl TrainerMember {
    fn has_joined(&self) -> bool {
        self.incarnation > Incarnation(0)
    }

    fn is_free(&self, now: Now) -> bool {
        !self.has_joined() || self.departed || self.free_from.is_some_and(|from| from <= now)
    }

    /// Whether it takes part in the run, and its process is connected.
    fn takes_part(&self) -> bool {
        self.has_joined() && !self.departed && self.free_from.is_none()
    }
}

/// Decision on a request for a rank or slot.
#[derive(Debug)]
pub(super) enum PlaceClaim<T> {
    /// Granted.
    Taken(T),
    /// Undecided until a change of state, or this time.
    Waits(Now),
    /// Refused.
    Refused(Refusal),
}

/// The ranks of a job.
pub(super) struct Ranks {
    members: Vec<TrainerMember>,
    /// Members of ranks that the job had in earlier runs: a rank that it has again needs a newer incarnation.
    retired: Vec<TrainerMember>,
    grace: Duration,
    run: RunNumber,
}

impl Ranks {
    pub(super) fn new(trainers: u32, grace: Duration) -> Self {
        Self {
            members: vec![TrainerMember::default(); trainers as usize],
            retired: Vec::new(),
            grace,
            run: RunNumber(0),
        }
    }

    /// The trainers' current run, or the last one.
    pub(super) fn run(&self) -> RunNumber {
        self.run
    }

    pub(super) fn members(&self) -> &[TrainerMember] {
        &self.members
    }

    pub(super) fn get(&self, trainer: TrainerId) -> Option<&TrainerMember> {
        self.members.get(trainer.0 as usize)
    }

    fn get_mut(&mut self, trainer: TrainerId) -> Option<&mut TrainerMember> {
        self.members.get_mut(trainer.0 as usize)
    }

    /// Restores ranks kept by an earlier coordinator; [`Ranks::begin_grace`] follows.
    pub(super) fn recall(&mut self, incarnations: &[u32], departed: &[bool], run: RunNumber) {
        self.run = run;
        let known = incarnations.len().saturating_sub(self.members.len());
        self.retired = vec![TrainerMember::default(); known];
        let members = self.members.iter_mut().chain(&mut self.retired);
        for ((member, incarnation), departed) in members.zip(incarnations).zip(departed) {
            (member.incarnation, member.departed) = (Incarnation(*incarnation), *departed);
        }
    }

    /// Changes the number of ranks between two runs.
    pub(super) fn resize(&mut self, trainers: u32) {
        let mut all: Vec<TrainerMember> = self.members.drain(..).chain(self.retired.drain(..)).collect();
        all.resize(all.len().max(trainers as usize), TrainerMember::default());
        self.retired = all.split_off(trainers as usize);
        self.members = all;
    }

    /// The trainers that have joined and not departed.
    pub(super) fn staying(&self) -> Vec<TrainerId> {
        let all = (0..).map(TrainerId).zip(self.members.iter().chain(&self.retired));
        all.filter(|(_, member)| member.has_joined() && !member.departed).map(|(trainer, _)| trainer).collect()
    }

    /// Starts the grace time in which members of an earlier coordinator reconnect.
    pub(super) fn begin_grace(&mut self, now: Now) {
        let free_from = Some(now + self.grace);
        self.members.iter_mut().filter(|member| member.has_joined()).for_each(|member| member.free_from = free_from);
    }

    /// Refuses a rank that the job does not have.
    pub(super) fn check(&self, trainer: TrainerId) -> Result<&TrainerMember, Refusal> {
        self.get(trainer).ok_or_else(|| Refusal::no_such_trainer(trainer, self.members.len()))
    }

    /// Refuses a superseded incarnation.
    pub(super) fn check_life(&self, trainer: TrainerId, incarnation: Incarnation) -> Result<(), Refusal> {
        let member = self.check(trainer)?;
        if incarnation < member.incarnation {
            let refusal = Refusal::superseded(trainer, incarnation, member.incarnation);
            return Err(Refusal { text: format!("{} ({})", refusal.text, member.origin), ..refusal });
        }
        Ok(())
    }

    pub(super) fn heard(&mut self, now: Now, trainer: TrainerId) {
        self.get_mut(trainer).into_iter().for_each(|member| member.heard = now);
    }

    /// Records the reconnect of a trainer.
    pub(super) fn connected(&mut self, trainer: TrainerId, incarnation: Incarnation, origin: &PeerOrigin) {
        let Some(member) = self.get_mut(trainer).filter(|member| member.incarnation == incarnation) else { return };
        if member.free_from.take().is_some() {
            tracing::info!(%trainer, %incarnation, "trainer connected again: {origin}");
        }
        member.origin = origin.clone();
    }

    /// Records the close of a trainer's last connection.
    pub(super) fn lost(&mut self, now: Now, trainer: TrainerId, incarnation: Incarnation) {
        let grace = self.grace;
        let Some(member) = self.get_mut(trainer).filter(|member| member.incarnation == incarnation) else { return };
        if member.free_from.is_none() && !member.departed {
            let (seconds, origin) = (grace.as_secs_f64(), &member.origin);
            let text = "its connection is closed, and its rank is free in";
            tracing::warn!(%trainer, %incarnation, "trainer lost: {text} {seconds} s: {origin}");
        }
        member.free_from.get_or_insert(now + grace);
    }

    /// Releases a trainer's rank.
    pub(super) fn released(&mut self, now: Now, trainer: TrainerId) {
        let Some(member) = self.get_mut(trainer) else { return };
        tracing::info!(%trainer, incarnation = %member.incarnation, "trainer released its rank: {}", member.origin);
        member.free_from = Some(now);
    }

    /// Records a departure.
    pub(super) fn note_departed(&mut self, trainer: TrainerId) {
        let Some(member) = self.get_mut(trainer) else { return };
        tracing::info!(%trainer, incarnation = %member.incarnation, "trainer left: {}", member.origin);
        member.departed = true;
    }

    /// Grants a rank: the requested one, even if it is held, or the lowest free one. A trainer that returns in the same
    /// process gets its lost rank.
    pub(super) fn claim(
        &mut self,
        now: Now,
        asked: Now,
        wish: Option<u32>,
        origin: &PeerOrigin,
    ) -> PlaceClaim<TrainerId> {
        let Some(rank) = wish.or_else(|| self.free_rank(now, origin)) else { return self.all_taken(now, asked) };
        let trainer = TrainerId(rank);
        if let Err(refusal) = self.check(trainer) {
            return PlaceClaim::Refused(refusal);
        }
        let member = self.get_mut(trainer).expect("the rank was just checked");
        if !member.is_free(now) && member.free_from.is_none() {
            tracing::warn!(%trainer, "{origin} takes the rank over from {}, which is connected", member.origin);
        }
        let incarnation = Incarnation(member.incarnation.0 + 1);
        *member = TrainerMember { incarnation, departed: false, origin: origin.clone(), heard: now, free_from: None };
        let is_alone = (0..).zip(&self.members).all(|(other, member)| other == rank || !member.takes_part());
        self.run.0 += u32::from(is_alone);
        tracing::info!(%trainer, %incarnation, run = %self.run, "trainer joined: {origin}");
        PlaceClaim::Taken(trainer)
    }

    fn free_rank(&self, now: Now, origin: &PeerOrigin) -> Option<u32> {
        let is_lost_here = |member: &TrainerMember| member.free_from.is_some() && member.origin.is_same_process(origin);
        let lost = self.members.iter().position(is_lost_here).filter(|_| !origin.host.is_empty());
        let rank = lost.or_else(|| self.members.iter().position(|member| member.is_free(now)))?;
        u32::try_from(rank).ok()
    }

    /// Answers a claim when no rank is free: it waits for one within its grace time, or is refused.
    fn all_taken(&self, now: Now, asked: Now) -> PlaceClaim<TrainerId> {
        let soon = self.members.iter().filter_map(|member| member.free_from).filter(|from| now < *from).min();
        let until = soon.unwrap_or(asked + self.grace);
        if now < until {
            return PlaceClaim::Waits(until);
        }
        let holders = self.members.iter().enumerate().take(NAMED_MAX);
        let holders: Vec<String> = holders.map(|(rank, member)| format!("{rank}: {}", member.origin)).collect();
        let more = self.members.len().saturating_sub(NAMED_MAX);
        let more = if more == 0 { String::new() } else { format!("; and {more} more") };
        PlaceClaim::Refused(Refusal::invalid(format!(
            "all {} ranks of this job are taken by trainers that are connected ({}{more}); start the servers with \
             --trainers {} for one more trainer, or set PSERVER_TRAINER to the rank that this one takes over",
            self.members.len(),
            holders.join("; "),
            self.members.len() + 1
        )))
    }

    /// Whether the trainer of any rank is connected, and has not left.
    pub(super) fn are_any_connected(&self) -> bool {
        self.members.iter().any(|member| member.takes_part())
    }

    /// Every rank, for monitoring.
    pub(super) fn reports(&self, now: Now) -> Vec<TrainerReport> {
        let report = |(rank, member): (usize, &TrainerMember)| TrainerReport {
            rank: u32::try_from(rank).unwrap_or(u32::MAX),
            state: match member {
                _ if !member.has_joined() => TrainerState::Absent,
                _ if member.departed => TrainerState::Departed,
                _ if member.free_from.is_some() => TrainerState::Lost,
                _ => TrainerState::Connected,
            },
            host: member.origin.host.clone(),
            process: member.origin.process,
            incarnation: member.incarnation.0,
            silent_milliseconds: u64::try_from(member.heard.until(now).as_millis()).unwrap_or(u64::MAX),
        };
        self.members.iter().enumerate().map(report).collect()
    }

    pub(super) fn incarnations(&self) -> Vec<u32> {
        self.members.iter().chain(&self.retired).map(|member| member.incarnation.0).collect()
    }

    pub(super) fn departed(&self) -> Vec<bool> {
        self.members.iter().chain(&self.retired).map(|member| member.departed).collect()
    }
}

/// A server that has not renewed its registration for so long is said to be silent.
const SILENT: Duration = Duration::from_secs(10);

/// The servers of a job.
pub(super) struct ServerSlots {
    slots: Vec<ServerSlot>,
    grace: Duration,
}

/// The slot of one server.
#[derive(Clone, Default)]
struct ServerSlot {
    /// The registration of this server with this coordinator.
    entry: Option<ServerEntry>,
    /// Its address as an earlier coordinator kept it.
    address: String,
    origin: PeerOrigin,
    /// The random number of its process.
    start: u64,
    /// Its open connection.
    connection: Option<ServerConnection>,
    /// Time from which a server at another address may take the slot, after a disconnect.
    free_from: Option<Now>,
    /// The status that it reported last.
    status: Vec<u8>,
    /// Its last registration, which it renews every second.
    heard: Now,
    /// Whether it was said that it is silent.
    is_said: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ServerConnection {
    /// The server that embeds the coordinator.
    Embedded,
    /// A connection.
    Peer(PeerId),
}

impl ServerSlots {
    pub(super) fn new(servers: u16, grace: Duration) -> Self {
        Self { slots: vec![ServerSlot::default(); servers.into()], grace }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Restores addresses kept by an earlier coordinator; [`ServerSlots::begin_grace`] follows.
    pub(super) fn recall(&mut self, addresses: &[String]) {
        for (slot, address) in self.slots.iter_mut().zip(addresses) {
            slot.address.clone_from(address);
        }
    }

    /// Starts the grace time in which known servers register again.
    pub(super) fn begin_grace(&mut self, now: Now) {
        let free_from = Some(now + self.grace);
        let known = self.slots.iter_mut().filter(|slot| slot.entry.is_none() && !slot.address.is_empty());
        known.for_each(|slot| slot.free_from = free_from);
    }

    pub(super) fn addresses(&self) -> Vec<String> {
        self.slots.iter().map(|slot| slot.address.clone()).collect()
    }

    /// The registration of a server.
    pub(super) fn entry(&self, server: usize) -> Option<&ServerEntry> {
        self.slots.get(server)?.entry.as_ref()
    }

    /// Whether a server has registered and its connection is open.
    pub(super) fn is_connected(&self, server: u32) -> bool {
        self.slots.get(server as usize).is_some_and(|slot| slot.connection.is_some())
    }

    /// Whether the process of this registration has registered with this coordinator before, and no other since.
    pub(super) fn is_held_by(&self, register: &RegisterRequest, origin: &PeerOrigin) -> bool {
        let is_it = |slot: &ServerSlot| slot.origin.is_same_process(origin) && slot.start == register.start;
        self.slots.get(register.server as usize).is_some_and(|slot| slot.entry.is_some() && is_it(slot))
    }

    /// The registered servers.
    pub(super) fn entries(&self) -> impl Iterator<Item = &ServerEntry> {
        self.slots.iter().filter_map(|slot| slot.entry.as_ref())
    }

    /// Every slot, for monitoring.
    pub(super) fn reports(&self, now: Now) -> Vec<ServerReport> {
        let report = |slot: &ServerSlot| ServerReport {
            address: slot.address.clone(),
            is_connected: slot.connection.is_some(),
            silent_milliseconds: slot.silence(now).as_millis().try_into().unwrap_or(u64::MAX),
            status: slot.status.clone(),
        };
        self.slots.iter().map(report).collect()
    }

    /// When another server will have been silent for long.
    pub(super) fn silence_due(&self) -> Option<Now> {
        let others = self.slots.iter().filter(|slot| slot.is_other() && !slot.is_said);
        others.map(|slot| slot.heard + SILENT).min()
    }

    /// Logs each server that has become silent: its connection is open, and its process or host hangs.
    pub(super) fn log_silent(&mut self, now: Now) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if !slot.is_said && SILENT <= slot.silence(now) {
                slot.is_said = true;
                let (address, origin, seconds) = (&slot.address, &slot.origin, slot.silence(now).as_secs());
                tracing::warn!(
                    server = index,
                    address,
                    "server silent for {seconds} s: its process is stopped, or its host or network hangs; calls that \
                     need it wait: {origin}"
                );
            }
        }
    }

    /// Describes the servers that have not registered; empty when all have.
    pub(super) fn describe_absent(&self) -> String {
        let absent: Vec<String> = self.absent().take(NAMED_MAX).map(|index| index.to_string()).collect();
        let more = self.absent().count().saturating_sub(NAMED_MAX);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        match absent.as_slice() {
            [] => String::new(),
            _ => format!("server {}{more} of {} has not registered with server 0", absent.join(", "), self.len()),
        }
    }

    /// The refusal of a trainer that has waited for servers since `asked`.
    pub(super) fn refuse_absent(&self, now: Now, asked: Now) -> Refusal {
        let (absent, seconds) = (self.describe_absent(), asked.until(now).as_secs_f64());
        let text = format!(
            "{absent} for {seconds:.1} s: start it with its --index and with --coordinator, or let trainers wait \
             longer (server_absence, PSERVER_SERVER_ABSENCE)"
        );
        Refusal::new(ErrorCode::Deadline, text)
    }

    /// The indices of servers that have not registered.
    pub(super) fn absent(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().enumerate().filter(|(_, slot)| slot.entry.is_none()).map(|(index, _)| index)
    }

    /// Refuses a server whose settings have another number of servers.
    pub(super) fn check_count(&self, register: &RegisterRequest) -> Result<(), Failure> {
        let (server, count) = (register.server, self.slots.len());
        match register.servers.filter(|servers| *servers as usize != count) {
            None => Ok(()),
            Some(other) => Err(Failure::call(format!(
                "server {server} is started with servers = {other}, and server 0 with servers = {count}; expected \
                 --servers {count}, or the --coordinator of another job"
            ))),
        }
    }

    /// Checks the server's index and that its shard count is unchanged; `placed` is the count at placement.
    pub(super) fn check(&self, server: u32, entry: &ServerEntry, placed: Option<u32>) -> Result<(), Failure> {
        let count = self.slots.len();
        let Some(slot) = self.slots.get(server as usize) else {
            let expected =
                format!("expected an --index below {count}, or servers that are all started with more --servers");
            return Err(Failure::call(format!(
                "server index {server}: this job has {count} servers, numbered from 0; {expected}"
            )));
        };
        let before = slot.entry.as_ref().map(|before| before.shards).or(placed);
        if let Some(before) = before.filter(|before| *before != entry.shards) {
            return Err(Failure::call(format!(
                "server {server} had {before} shards and comes back with {}: chunks would move to other shards; \
                 expected --shards {before}",
                entry.shards
            )));
        }
        Ok(())
    }

    /// Registers the server that embeds the coordinator, after [`ServerSlots::check`].
    pub(super) fn embed(&mut self, server: u32, entry: ServerEntry) {
        let address = entry.address.clone();
        let connection = Some(ServerConnection::Embedded);
        self.slots[server as usize] = ServerSlot { entry: Some(entry), address, connection, ..ServerSlot::default() };
    }

    /// Gives a server its slot, after [`ServerSlots::check`]; true when its address changed. A server that reconnects
    /// from its address gets the slot at once; a server at another address gets it when the connection of the
    /// previous one has been closed for the grace time.
    pub(super) fn claim(
        &mut self,
        (now, asked): (Now, Now),
        peer: PeerId,
        origin: &PeerOrigin,
        register: &RegisterRequest,
        entry: &ServerEntry,
    ) -> PlaceClaim<bool> {
        let slot = &mut self.slots[register.server as usize];
        let is_same = slot.address == entry.address;
        let is_its_own = slot.connection == Some(ServerConnection::Peer(peer));
        let is_alive = slot.connection.is_some() && !is_its_own;
        if is_alive && !(is_same && slot.origin.is_same_process(origin)) {
            let until = asked + self.grace;
            if now < until && !register.renews {
                return PlaceClaim::Waits(until);
            }
            return PlaceClaim::Refused(slot.refuse(register, entry));
        }
        if let Some(free_from) = slot.free_from.filter(|from| now < *from && !is_same) {
            return PlaceClaim::Waits(free_from);
        }
        if slot.is_said && is_its_own {
            let seconds = slot.silence(now).as_secs();
            tracing::info!(server = register.server, address = entry.address, "server heard again after {seconds} s");
        }
        if !is_its_own {
            tracing::info!(server = register.server, address = entry.address, "server registered: {origin}");
        }
        *slot = ServerSlot {
            entry: Some(entry.clone()),
            address: entry.address.clone(),
            origin: origin.clone(),
            start: register.start,
            connection: Some(ServerConnection::Peer(peer)),
            free_from: None,
            status: register.status.clone(),
            heard: now,
            is_said: false,
        };
        PlaceClaim::Taken(!is_same)
    }

    /// Releases the slot of a server that ends in order: a successor gets it at once, at any address. False where the
    /// connection is no server's.
    pub(super) fn leave(&mut self, peer: PeerId) -> bool {
        let leaves = |slot: &&mut ServerSlot| slot.connection == Some(ServerConnection::Peer(peer));
        let left = self.slots.iter_mut().find(leaves);
        left.map(|slot| (slot.connection, slot.free_from) = (None, None)).is_some()
    }

    /// Records the close of a connection whose server has not left.
    pub(super) fn lost(&mut self, now: Now, peer: PeerId) {
        let grace = self.grace;
        let lost = self.slots.iter_mut().enumerate();
        for (index, slot) in lost.filter(|(_, slot)| slot.connection == Some(ServerConnection::Peer(peer))) {
            let (address, origin) = (&slot.address, &slot.origin);
            tracing::warn!(server = index, address, "server lost: its connection is closed: {origin}");
            (slot.connection, slot.free_from) = (None, Some(now + grace));
        }
    }
}

impl ServerSlot {
    /// Whether a server other than the coordinator's own is connected.
    fn is_other(&self) -> bool {
        matches!(self.connection, Some(ServerConnection::Peer(_)))
    }

    /// The time since the last renewal of a connected server.
    fn silence(&self, now: Now) -> Duration {
        if self.is_other() { self.heard.until(now) } else { Duration::ZERO }
    }

    /// Refuses a server whose slot another one holds.
    fn refuse(&self, register: &RegisterRequest, entry: &ServerEntry) -> Refusal {
        let RegisterRequest { server, renews, .. } = register;
        let holder = match self.connection {
            Some(ServerConnection::Embedded) => "the process of the coordinator".to_owned(),
            _ => self.origin.to_string(),
        };
        let (ours, found) = (&self.address, &entry.address);
        if *renews {
            let text = format!(
                "server {server} of this job is now at {ours} ({holder}), and trainers connect there: the one at \
                 {found} had lost its connection and was replaced"
            );
            return Refusal::new(ErrorCode::Fenced, text);
        }
        Refusal::invalid(format!(
            "server {server} of this job is at {ours} ({holder}) and is connected: the one at {found} cannot take its \
             place; give it an --index of its own, or stop the server at {ours} first"
        ))
    }
}
