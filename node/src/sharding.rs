//! A shard with its disk. Checkpoints are written in steps between turns of the loop, and synced by another thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, TryRecvError, bounded};
use pserver_core::checkpoint::owner::shard_directory;
use pserver_core::checkpoint::{Folder, LOOK_BYTES, RESERVE_BYTES, ShardIdentity, identity_of, journal_room};
use pserver_core::error::Failure;
use pserver_core::ids::{Generation, MapVersion, ShardId, Term};
use pserver_core::port::{Capabilities, Event, Kernels};
use pserver_core::server::{
    CheckpointRequest, JournalOptions, LOST, ProcessMemory, ServerOutput, Shard, ShardCounters, ShardOptions,
};
use pserver_core::time::Now;
use pserver_core::wire::answer::Checkpointed;
use pserver_kernels::cpu::Cpu;

use super::device::{self, ShardDevice};
use super::hosted_programs;
use super::machine::ProcessMachine;
use super::ownership::Ownership;
use super::session::NodeSession;
use super::telemetry::{DiskReport, SessionReport};
use super::{ServedJob, ServerStart, refuse_newer};
use crate::settings::{JournalSetting, StorageSettings};

/// How much of a checkpoint is written between two turns: about a millisecond of the disk's cache.
const CHECKPOINT_STEP_BYTES: u64 = 2 * 1024 * 1024;

/// Longest wait for an accelerator when the server stops.
const SETTLE_LONGEST: Duration = Duration::from_secs(30);

/// Interval at which a shard looks whether the checkpoint that a trainer waits for is on disk.
const ANSWER_PAUSE: Duration = Duration::from_millis(5);

/// Waits of a checkpoint for an accelerator; one wait should suffice.
const SETTLES_MAX: u32 = 3;

pub(super) struct ShardNode {
    shard: Shard,
    /// Time of the last turn.
    now: Now,
    ownership: Ownership,
    disk: Option<Disk>,
}

/// Journals of a server's shards longer than this together, and than four times what they protect, make checkpoints due
/// before their time: the disk holds a bounded amount of them, and a restart replays a bounded amount.
const JOURNAL_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Pause between two warnings that the disk has little room.
const SHORT_SAID_PAUSE: Duration = Duration::from_secs(60);

/// The first pause between checkpoints on a disk that stays short of room, and how often it doubles.
const SHORT_PAUSE: Duration = Duration::from_secs(1);
const SHORT_DOUBLINGS: u32 = 6;

/// Where a shard's checkpoints go, and how far the current one is.
struct Disk {
    folder: Folder,
    /// The checkpoint directory of the server.
    root: PathBuf,
    number: u64,
    /// The generation that has a checkpoint: the first one is taken as soon as parameters are initialised.
    saved: Generation,
    schedule: CheckpointSchedule,
    room: DiskRoom,
    finishing: Option<Receiver<Result<u64, Failure>>>,
    watch: CheckpointWatch,
    done: DiskReport,
    requests: CheckpointRequests,
}

/// When checkpoints are due.
struct CheckpointSchedule {
    interval: Duration,
    /// The time of the next one; none before the first.
    due: Option<Now>,
    /// The journal's position at which it is due whatever the time.
    due_at: u64,
    /// The part of [`JOURNAL_BYTES_MIN`] of one shard.
    journal_least: u64,
}

impl CheckpointSchedule {
    /// The schedule of a start; a shard that comes back with a checkpoint takes its next one like any other.
    fn new(start: &ServerStart, shard: &Shard, has_checkpoint: bool) -> Self {
        let interval = start.settings.storage.checkpoint_interval;
        let journal_least = JOURNAL_BYTES_MIN / u64::from(start.settings.shards);
        let due = has_checkpoint.then(|| start.now() + interval);
        Self { interval, due, due_at: shard.journal_position() + journal_least, journal_least }
    }

    fn is_due(&self, now: Now, shard: &Shard) -> bool {
        self.due.is_some_and(|due| due <= now) || shard.journal_position() >= self.due_at
    }

    /// Notes that a checkpoint of values of so many bytes begins.
    fn begin(&mut self, now: Now, shard: &Shard, bytes: u64) {
        self.due = Some(now + self.interval);
        self.due_at = shard.journal_position() + self.journal_least.max(bytes * 4);
    }
}

/// Measures how long checkpoints take.
struct CheckpointWatch {
    machine: Arc<dyn ProcessMachine>,
    /// When the current one began, by the machine's clock.
    begun_nanos: u64,
}

impl CheckpointWatch {
    fn begin(&mut self) {
        self.begun_nanos = self.machine.nanos();
    }

    /// Reports the time and the duration of the checkpoint that has ended.
    fn end(&self, report: &mut DiskReport) {
        let duration = Duration::from_nanos(self.machine.nanos() - self.begun_nanos);
        report.last_duration_seconds = duration.as_secs_f64();
        report.last_unix_seconds = self.machine.unix_time().as_secs_f64();
    }
}

/// The disk's room, which asks for a checkpoint before its time: behind it the journal is cut. The third checkpoint is
/// the first behind which an older one is removed, so that until then there must be room for several.
#[derive(Default)]
struct DiskRoom {
    /// Bytes of a checkpoint, and of the journal that should find room before the next one.
    takes: u64,
    journal: u64,
    /// How many whole checkpoints are on the disk.
    whole: u64,
    /// Bytes of the current one that are written.
    written: u64,
    /// The journal's position at which the disk is looked at again.
    look_at: u64,
    /// The journal's position when the last checkpoint began, and how many began there before it.
    begun_at: u64,
    repeated: u32,
    /// When another may begin there.
    again: Now,
    /// When it may be said again that the disk is short.
    said_until: Option<Now>,
}

impl DiskRoom {
    /// The room as a start finds it; `takes` are the bytes of the checkpoint that was loaded.
    fn new(folder: &Folder, shard: &mut Shard, takes: u64) -> Self {
        let begun_at = shard.journal_position();
        let mut room = Self { takes, begun_at, whole: folder.checkpoints(), ..Self::default() };
        room.measure(shard);
        room
    }

    /// Whether a checkpoint should begin for want of room: a frame was refused, or will be after some more journal.
    fn is_short(&mut self, folder: &Folder, shard: &mut Shard, now: Now) -> bool {
        let position = shard.journal_position();
        if shard.is_short_of_disk() {
            self.say(folder, now, "gradients wait for a checkpoint, which cuts the journal");
            return position != self.begun_at || self.repeated < 2 || self.again <= now;
        }
        if position < self.look_at {
            return false;
        }
        self.measure(shard);
        self.look_at = position + LOOK_BYTES.max(self.journal / 8);
        // Checkpoints one after the other would free nothing.
        if position < self.begun_at + self.journal / 2 {
            return false;
        }
        let is_short = folder.free().is_some_and(|free| free < self.kept() + self.journal);
        if is_short {
            self.say(folder, now, "a checkpoint comes before its time, to cut the journal");
        }
        is_short
    }

    fn say(&mut self, folder: &Folder, now: Now, what: &str) {
        if self.said_until.is_none_or(|until| until <= now) {
            self.said_until = Some(now + SHORT_SAID_PAUSE);
            let (directory, free) = (folder.directory(), folder.free().unwrap_or_default());
            tracing::warn!("{directory}: {what}: {free} bytes of the disk are free for this shard");
        }
    }

    fn begin(&mut self, shard: &mut Shard, now: Now) {
        let position = shard.journal_position();
        self.repeated = if position == self.begun_at { self.repeated + 1 } else { 0 };
        (self.begun_at, self.again) = (position, now + SHORT_PAUSE * (1 << self.repeated.min(SHORT_DOUBLINGS)));
        self.measure(shard);
    }

    /// Estimates what the files of the shard take, at least what they took.
    fn measure(&mut self, shard: &mut Shard) {
        self.takes = self.takes.max(shard.checkpoint_bytes());
        self.journal = if shard.has_journal() { journal_room(shard.value_bytes()) } else { 0 };
        self.reserve(shard);
    }

    /// Reserves room beside the journal, and beside the other shards of the process: for the rest of the checkpoint,
    /// and for the part of the journal that is still to be written.
    fn reserve(&self, shard: &mut Shard) {
        let written = shard.journal_position().saturating_sub(self.begun_at);
        shard.reserve_disk(self.kept(), self.journal.saturating_sub(written));
    }

    /// The bytes that the journal leaves: of the rest of a checkpoint, and of those behind which none is removed.
    fn kept(&self) -> u64 {
        (self.takes * (3 - self.whole)).saturating_sub(self.written) + RESERVE_BYTES
    }

    fn note_written(&mut self, shard: &mut Shard, written: u64) {
        self.written = written;
        self.takes = self.takes.max(written);
        self.reserve(shard);
    }

    /// The end of a checkpoint, of so many bytes if it is whole.
    fn end(&mut self, folder: &Folder, shard: &mut Shard, bytes: Option<u64>) {
        (self.whole, self.written) = (folder.checkpoints(), 0);
        self.takes = bytes.unwrap_or(self.takes);
        // A checkpoint that comes where this one began has no more to cut, whatever this one carried over.
        self.begun_at += shard.take_carried();
        self.measure(shard);
    }
}

/// Trainers' requests for a checkpoint.
#[derive(Default)]
struct CheckpointRequests {
    /// For the next checkpoint.
    next: Vec<CheckpointRequest>,
    /// For the current one.
    current: Vec<CheckpointRequest>,
    /// The fewest updates that a chunk had when the current one began.
    version: Option<u64>,
    /// Requests that are over, each with its answer.
    over: Vec<(CheckpointRequest, Result<Checkpointed, Failure>)>,
}

impl CheckpointRequests {
    /// Ends the requests for the current checkpoint.
    fn end(&mut self, outcome: &Result<Checkpointed, Failure>) {
        self.over.extend(self.current.drain(..).map(|request| (request, outcome.clone())));
    }
}

impl ShardNode {
    /// The shard's counters.
    pub(super) fn counters(&self) -> &Arc<ShardCounters> {
        self.shard.counters()
    }

    /// A shard, restored from its checkpoint and journal.
    pub(super) fn new(
        start: &ServerStart,
        (id, term): (ShardId, Term),
        job: ServedJob,
        can: Capabilities,
        accelerator: ShardDevice,
    ) -> Result<Self, Failure> {
        let options = ShardOptions {
            epoch: job.epoch,
            term,
            round_timeout: start.settings.times.round_timeout,
            grace: start.settings.times.rank_grace,
            shares_memory: start.shares_memory,
            receives: can.receives,
            memory_limit: start.memory_limit.map(|bytes| ProcessMemory { bytes, need: start.memory_needs.shard() }),
            nonfinite: start.settings.job.nonfinite,
            compile: pserver_program::server_flow::compile,
            load: hosted_programs::load,
        };
        let kernels = Cpu::new();
        if id.shard.0 == 0 && term == Term::FIRST {
            tracing::info!("kernels: {}", kernels.name());
        }
        let mut shard = Shard::new(options, Box::new(kernels));
        if let Some(accelerator) = accelerator {
            shard = shard.with_accelerator(accelerator, device::no_room(&start.settings));
        }
        let Some(storage) = &start.storage else {
            return Ok(Self { shard, now: start.now(), ownership: start.ownership(), disk: None });
        };
        let StorageSettings { journal, accept_torn_tail, .. } = start.settings.storage;
        let identity = ShardIdentity { job: job.epoch.0, server: id.server.0, shard: id.shard.0 };
        let directory = shard_directory(identity.server, identity.shard);
        if term > Term::FIRST {
            refuse_newer(&*storage.storage, &start.settings, [directory.clone()])?;
        }
        let is_known = job.committed > Generation(0) || start.places.version() > MapVersion(0);
        if is_known && identity_of(&*storage.storage, &directory).is_none() {
            let elsewhere = "expected the files of the shard, which has moved here: servers that move shards have one \
                             checkpoint_dir";
            let text = if term > Term::FIRST { elsewhere } else { LOST };
            return Err(Failure::Node(format!("{directory}: {text}")));
        }
        let folder =
            Folder::claim(Arc::clone(&storage.storage), identity, &storage.record, storage.disk_needs.shard())?;
        // A process that takes this server's place claims the shard later, when server 0 has let it in.
        let ownership = Ownership::new(vec![storage.owner.clone(), folder.owner().clone()], start.now());
        let options = JournalOptions {
            is_on: journal != JournalSetting::Off,
            sync: journal == JournalSetting::Sync,
            accepts_torn_tail: accept_torn_tail,
        };
        let restored = shard.restore(&folder, options)?;
        let directory = folder.directory();
        restored.warnings().iter().for_each(|warning| tracing::warn!("{directory}: {warning}"));
        if restored.loaded.is_some() || restored.replayed.records > 0 {
            tracing::info!("{directory}: {} after {} journal records", shard.status(), restored.replayed.records);
        } else if is_known {
            return Err(Failure::Node(format!("{directory}: {LOST}")));
        }
        let checkpoint = restored.loaded.as_ref().map(|loaded| loaded.name.number);
        let takes = restored.loaded.as_ref().map_or(0, |loaded| loaded.bytes);
        let disk = Disk {
            room: DiskRoom::new(&folder, &mut shard, takes),
            folder,
            root: start.settings.storage.checkpoint_dir.clone().unwrap_or_default(),
            number: checkpoint.unwrap_or(0),
            saved: if checkpoint.is_some() { shard.generation() } else { Generation(0) },
            schedule: CheckpointSchedule::new(start, &shard, checkpoint.is_some()),
            finishing: None,
            watch: CheckpointWatch { machine: Arc::clone(&start.machine), begun_nanos: 0 },
            done: DiskReport::default(),
            requests: CheckpointRequests::default(),
        };
        Ok(Self { shard, now: start.now(), ownership, disk: Some(disk) })
    }
}

impl NodeSession for ShardNode {
    fn begin_turn(&mut self, nanos: u64) {
        self.shard.begin_turn(nanos);
    }

    fn report(&self, now: Now) -> SessionReport {
        let disk = self.disk.as_ref().map(|disk| {
            let is_writing = self.shard.is_checkpointing() || disk.finishing.is_some();
            DiskReport { is_writing, ..disk.done.clone() }
        });
        SessionReport::Shard(self.shard.report(now), disk)
    }

    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        self.shard.handle(now, event, out);
        Ok(())
    }

    fn work(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        self.ownership.look(now)?;
        if self.shard.deadline().is_some_and(|deadline| deadline <= now) {
            self.shard.expire(now, out);
        }
        self.now = now;
        let is_busy = self.shard.attend(now, out)?;
        let asked = self.shard.take_checkpoint_requests();
        let Some(disk) = &mut self.disk else {
            for request in asked {
                let failure = Failure::call("this server takes no checkpoints; expected one with checkpoint_dir");
                self.shard.answer_checkpoint(&request, Err(failure), out);
            }
            return Ok(is_busy);
        };
        disk.requests.next.extend(asked);
        let is_busy = disk.work(now, &mut self.shard) || is_busy;
        for (request, outcome) in disk.requests.over.drain(..) {
            self.shard.answer_checkpoint(&request, outcome, out);
        }
        Ok(is_busy)
    }

    fn commit(&mut self) -> Result<(), Failure> {
        self.shard.commit()
    }

    fn deadline(&self) -> Option<Now> {
        let disk = self.disk.as_ref().and_then(|disk| match disk.finishing {
            // While a checkpoint is finished by its thread, no other is due.
            Some(_) => (!disk.requests.current.is_empty()).then_some(self.now + ANSWER_PAUSE),
            // Without parameters there is none to take, also when an earlier initialisation had one.
            None => disk.schedule.due.filter(|_| self.shard.generation() > Generation(0)),
        });
        self.shard.deadline().into_iter().chain(disk).min()
    }

    fn is_under_way(&self) -> bool {
        self.shard.is_under_way()
    }

    fn awaits_work(&self) -> bool {
        self.disk.as_ref().and_then(|disk| disk.finishing.as_ref()).is_some_and(Receiver::is_empty)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        // The connections are closed, so answers are dropped; only the values matter.
        self.shard.settle(self.now, SETTLE_LONGEST, &mut Vec::new())?;
        match &mut self.disk {
            Some(disk) => disk.finish(self.now, &mut self.shard),
            None => Ok(()),
        }
    }
}

impl Disk {
    /// Continues a checkpoint, or begins one that is due. A failure is logged and the checkpoint is retried later;
    /// training continues, and earlier checkpoints stay.
    fn work(&mut self, now: Now, shard: &mut Shard) -> bool {
        if self.collect(shard) {
            return false;
        }
        if shard.is_checkpointing() {
            return self.step(shard);
        }
        let generation = shard.generation();
        if generation == Generation(0) {
            return false;
        }
        let first = generation != self.saved;
        let due = self.schedule.is_due(now, shard) || self.room.is_short(&self.folder, shard, now);
        if !(first || due || !self.requests.next.is_empty()) {
            return false;
        }
        self.requests.current = std::mem::take(&mut self.requests.next);
        let status = shard.status();
        self.requests.version = (status.chunks > 0).then_some(status.slowest.0);
        self.saved = generation;
        self.schedule.begin(now, shard, status.bytes);
        self.number += 1;
        self.watch.begin();
        self.room.begin(shard, now);
        let begun = shard.begin_checkpoint(&self.folder, self.number);
        self.report(begun).unwrap_or(false)
    }

    /// Whether an earlier checkpoint is still being finished.
    fn collect(&mut self, shard: &mut Shard) -> bool {
        let Some(finishing) = &self.finishing else { return false };
        let finished = match finishing.try_recv() {
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => {
                Err(Failure::Node("the thread of a checkpoint ended without a result".to_owned()))
            }
            Ok(finished) => finished,
        };
        self.finishing = None;
        let whole = self.report(finished);
        if let Some(bytes) = whole {
            self.done.checkpoints += 1;
            self.done.last_bytes = bytes;
            self.watch.end(&mut self.done);
            tracing::debug!("{}: checkpoint {} of {bytes} bytes", self.folder.directory(), self.number);
            let directory = self.root.join(self.folder.directory()).display().to_string();
            let (number, version) = (self.number, self.requests.version);
            self.requests.end(&Ok(Checkpointed { directory, number, bytes, version }));
            let retained = shard.retain_journal(&self.folder);
            self.report(retained);
        }
        self.room.end(&self.folder, shard, whole);
        false
    }

    fn step(&mut self, shard: &mut Shard) -> bool {
        let stepped = shard.continue_checkpoint(CHECKPOINT_STEP_BYTES);
        let Some(Some(writer)) = self.report(stepped) else {
            let goes_on = shard.is_checkpointing();
            let written = shard.checkpoint_written();
            match goes_on {
                true => self.room.note_written(shard, written),
                false => self.room.end(&self.folder, shard, None),
            }
            return goes_on;
        };
        self.room.note_written(shard, writer.written());
        let (sender, receiver) = bounded(1);
        let finish = move || {
            // The receiver is gone when the server has stopped.
            let _ = sender.send(writer.finish());
        };
        let spawned = self.watch.machine.spawn("pserver-checkpoint", Box::new(finish));
        match self.report(spawned) {
            Some(_) => self.finishing = Some(receiver),
            None => self.room.end(&self.folder, shard, None),
        }
        false
    }

    /// Writes the last checkpoint at once, as no trainer waits.
    fn finish(&mut self, now: Now, shard: &mut Shard) -> Result<(), Failure> {
        if let Some(finishing) = self.finishing.take() {
            let _ = finishing.recv();
        }
        if shard.is_checkpointing()
            && let Err(failure) = write_rest(now, shard)
        {
            // The last one follows.
            tracing::error!("{}: checkpoint {}: {failure}", self.folder.directory(), self.number);
        }
        self.number += 1;
        if !shard.begin_checkpoint(&self.folder, self.number)? {
            return Ok(());
        }
        let bytes = write_rest(now, shard)?;
        tracing::info!("{}: last checkpoint, {bytes} bytes", self.folder.directory());
        shard.retain_journal(&self.folder)
    }

    fn report<T>(&mut self, outcome: Result<T, Failure>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(failure) => {
                self.done.failures += 1;
                tracing::error!("{}: checkpoint {}: {failure}", self.folder.directory(), self.number);
                self.requests.end(&Err(Failure::call(format!("checkpoint {}: {failure}", self.number))));
                None
            }
        }
    }
}

/// Writes the rest of the current checkpoint and waits for the disk. Work in flight on an accelerator finishes first.
fn write_rest(now: Now, shard: &mut Shard) -> Result<u64, Failure> {
    for _ in 0..SETTLES_MAX {
        if let Some(writer) = shard.continue_checkpoint(u64::MAX)? {
            return writer.finish();
        }
        shard.settle(now, SETTLE_LONGEST, &mut Vec::new())?;
    }
    Err(Failure::call(format!("the last checkpoint waits for chunks that are not at rest after {SETTLES_MAX} waits")))
}
