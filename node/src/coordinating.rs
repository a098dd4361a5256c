//! The coordinator with its store, and the thread that saves models for it.

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, unbounded};
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, PeerId, ServerIndex};
use pserver_core::port::{CoordinationStore, Event, StoreFailure, StoreVersion};
use pserver_core::server::{
    Coordinator, CoordinatorOptions, CoordinatorOutput, NonFinite, ServerOutput, server_without_job,
};
use pserver_core::time::Now;
use pserver_core::wire::Head;
use pserver_core::wire::answer::Saved;

use super::machine::ProcessMachine;
use super::ownership::LastLook;
use super::places::ShardPlaces;
use super::saving::{self, ModelSave};
use super::session::{NodeSession, SessionControl};
use super::telemetry::SessionReport;
use super::{ServedJob, ServerStart};

pub(super) struct CoordinatorNode {
    coordinator: Coordinator,
    kept: KeptState,
    saving: ModelSave,
    control: SessionControl,
    machine: Arc<dyn ProcessMachine>,
    done: Sender<SaveOutcome>,
    saved: Receiver<SaveOutcome>,
    places: Arc<ShardPlaces>,
    /// The number of the last report of what this server holds.
    reported: u64,
    outputs: Vec<CoordinatorOutput>,
    /// Outputs that wait because the first of them could not be written.
    waiting: VecDeque<CoordinatorOutput>,
}

/// The place of its state.
struct KeptState {
    store: Box<dyn CoordinationStore>,
    /// The version that the state has there.
    version: StoreVersion,
    last_look: LastLook,
}

/// Result of one save, for the peer that requested it.
type SaveOutcome = (PeerId, Head, Result<Saved, Failure>);

impl KeptState {
    fn keep(&mut self, bytes: &[u8]) -> Result<(), StoreFailure> {
        self.version = self.store.compare_and_set(self.version, bytes)?;
        Ok(())
    }

    /// Looks in the store again when the last look is old. It comes before the answers of a turn leave: a process that
    /// stood still, and was replaced meanwhile, would otherwise let trainers join that its successor has let in.
    fn look(&mut self, now: Now) -> Result<(), Failure> {
        if !self.last_look.is_old(now) {
            return Ok(());
        }
        match self.store.watch(self.version) {
            Err(superseded @ StoreFailure::Superseded(_)) => Err(superseded.into()),
            // A store that does not answer is no reason to stop.
            _ => Ok(()),
        }
    }
}

impl CoordinatorNode {
    pub(super) fn new(
        start: &ServerStart,
        mut store: Box<dyn CoordinationStore>,
        control: SessionControl,
    ) -> Result<Self, Failure> {
        let options = CoordinatorOptions {
            epoch: new_epoch(&*start.machine),
            servers: start.settings.job.servers,
            job: start.job(),
            default_config: start.default_config()?,
            given: start.settings.given(),
            lease: start.settings.times.lease,
            grace: start.settings.times.rank_grace,
            watches: start.settings.addresses.http.is_some(),
            takes_nonfinite: start.settings.job.nonfinite != NonFinite::Refuse,
            model_dir: start.settings.storage.model_dir.display().to_string(),
        };
        let found = store.read()?;
        let is_new = found.version == StoreVersion::default();
        let other = start.storage.as_ref().filter(|_| is_new);
        if let Some(server) = other.map(|owned| server_without_job(&*owned.storage)).transpose()?.flatten() {
            return Err(Failure::Node(format!(
                "{} is 0: this checkpoint_dir has parameters of server {server} and no job of server 0; expected \
                 --index {server}, the checkpoint_dir of server 0, or another one for a new job",
                start.settings.named("index")
            )));
        }
        let mut coordinator = Coordinator::new(options, (!is_new).then_some(found.bytes.as_slice()))?;
        coordinator.register(0, start.entry())?;
        let saving = ModelSave {
            coordinator: start.address.clone(),
            reach: start.reach.clone(),
            root: start.settings.storage.model_dir.clone(),
            token: start.token.clone(),
            encryption: start.encryption.clone(),
        };
        saving.sweep();
        // Bounded in effect: each connection waits for the answer to its one save.
        let (done, saved) = unbounded();
        let machine = Arc::clone(&start.machine);
        let (outputs, waiting) = (Vec::new(), VecDeque::new());
        let places = Arc::clone(&start.places);
        places.publish(coordinator.map());
        places.report_to(control.doorbell().clone());
        let reported = 0;
        let mut node = Self {
            coordinator,
            kept: KeptState { store, version: found.version, last_look: LastLook(start.now()) },
            saving,
            control,
            machine,
            done,
            saved,
            places,
            reported,
            outputs,
            waiting,
        };
        // The epoch is kept from the first moment: a restart before anybody joined is the same job.
        node.kept.keep(&node.coordinator.kept())?;
        Ok(node)
    }

    /// The served job.
    pub(super) fn serves(&self) -> ServedJob {
        ServedJob { epoch: self.coordinator.epoch(), committed: self.coordinator.generation() }
    }

    /// Carries out the coordinator's outputs in order: state is in the store before later answers are sent. While the
    /// store does not answer, the outputs wait and are retried; running steps do not need them.
    ///
    /// # Errors
    /// When another process coordinates.
    fn carry_out(&mut self, out: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        self.waiting.extend(self.outputs.drain(..));
        while let Some(output) = self.waiting.pop_front() {
            match output {
                CoordinatorOutput::Session(output) => out.push(output),
                CoordinatorOutput::Save { peer, head, path } => self.save(peer, head, path),
                CoordinatorOutput::Map(map) => self.places.publish(&map),
                CoordinatorOutput::Keep(bytes) => match self.kept.keep(&bytes) {
                    Ok(()) => {}
                    Err(superseded @ StoreFailure::Superseded(_)) => return Err(superseded.into()),
                    Err(StoreFailure::Unavailable(failure)) => {
                        tracing::error!(
                            "no trainer can join or initialise until the coordinator's state is kept: {failure}"
                        );
                        self.waiting.push_front(CoordinatorOutput::Keep(bytes));
                        return Ok(());
                    }
                },
            }
        }
        Ok(())
    }

    fn save(&mut self, peer: PeerId, head: Head, path: String) {
        let (saving, done, control) = (self.saving.clone(), self.done.clone(), self.control.clone());
        let work = move || {
            let saved = saving::save(&saving, &path);
            // The receiver is gone when the server has stopped.
            let _ = done.send((peer, head, saved));
            control.ring();
        };
        if let Err(failure) = self.machine.spawn("pserver-save", Box::new(work)) {
            self.coordinator.saved(peer, &head, Err(failure), &mut self.outputs);
        }
    }
}

impl NodeSession for CoordinatorNode {
    fn report(&self, now: Now) -> SessionReport {
        SessionReport::Coordinator(self.coordinator.report(now))
    }

    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        self.coordinator.handle(now, event, &mut self.outputs);
        self.carry_out(out)
    }

    fn work(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        self.kept.look(now)?;
        if self.places.report_number() != self.reported {
            let report = self.places.report();
            self.reported = report.number;
            self.coordinator.note_held(ServerIndex(0), Some(report.version), &report.held, &mut self.outputs);
        }
        while let Ok((peer, head, saved)) = self.saved.try_recv() {
            self.coordinator.saved(peer, &head, saved, &mut self.outputs);
        }
        if self.coordinator.deadline().is_some_and(|deadline| deadline <= now) {
            self.coordinator.expire(now, &mut self.outputs);
        }
        self.carry_out(out)?;
        Ok(false)
    }

    fn deadline(&self) -> Option<Now> {
        self.coordinator.deadline()
    }

    fn finish(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// A new epoch: the current time, so that no earlier job has it.
fn new_epoch(machine: &dyn ProcessMachine) -> Epoch {
    Epoch(u64::try_from(machine.unix_time().as_nanos()).unwrap_or(u64::MAX).max(1))
}
