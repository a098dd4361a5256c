//! The coordinator with its disk, and the thread that saves models for it.

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, unbounded};
use pserver_core::checkpoint::Storage;
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, PeerId};
use pserver_core::port::Event;
use pserver_core::server::{Coordinator, CoordinatorOptions, CoordinatorOutput, Output};
use pserver_core::time::Now;
use pserver_core::wire::Head;
use pserver_core::wire::answer::Saved;

use super::saving::{self, Saving};
use super::session::{Control, Session};
use super::{Start, new_epoch};

/// What the coordinator keeps, below the checkpoint directory.
const KEPT: &str = "server-0/coordinator";
const KEPT_NEW: &str = "server-0/coordinator.new";
const KEPT_DIRECTORY: &str = "server-0";

pub(super) struct CoordinatorNode {
    coordinator: Coordinator,
    storage: Option<Arc<dyn Storage>>,
    saving: Saving,
    control: Control,
    done: Sender<Outcome>,
    saved: Receiver<Outcome>,
    outputs: Vec<CoordinatorOutput>,
    /// What is not carried out yet, because the disk refused what comes first.
    waiting: VecDeque<CoordinatorOutput>,
}

/// The end of one save: who asked, and what came of it.
type Outcome = (PeerId, Head, Result<Saved, Failure>);

impl CoordinatorNode {
    pub(super) fn new(start: &Start, control: Control) -> Result<Self, Failure> {
        let options = CoordinatorOptions {
            epoch: new_epoch(),
            servers: start.settings.servers,
            job: start.job(),
            default_config: start.default_config()?,
            lease: start.settings.lease,
        };
        let recalled = match &start.storage {
            Some(storage) => recall(&**storage)?,
            None => None,
        };
        let mut coordinator = Coordinator::new(options, recalled.as_deref())?;
        coordinator.register(0, start.entry())?;
        let saving = Saving {
            coordinator: start.address.clone(),
            root: start.settings.model_dir.clone(),
            token: start.token.clone(),
        };
        // One save for each connection that asks, and every one of them waits for its answer.
        let (done, saved) = unbounded();
        let node = Self {
            coordinator,
            storage: start.storage.clone(),
            saving,
            control,
            done,
            saved,
            outputs: Vec::new(),
            waiting: VecDeque::new(),
        };
        // The epoch is kept from the first moment: a restart before anybody joined is the same job.
        node.keep(&node.coordinator.kept())?;
        Ok(node)
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.coordinator.epoch()
    }

    /// Does what the coordinator wants, in its order: what is kept is on disk before what follows is sent. While the
    /// disk refuses, what follows waits and is tried again; steps that run need none of it.
    fn carry_out(&mut self, out: &mut Vec<Output>) {
        self.waiting.extend(self.outputs.drain(..));
        while let Some(output) = self.waiting.pop_front() {
            match output {
                CoordinatorOutput::Session(output) => out.push(output),
                CoordinatorOutput::Save { peer, head, path } => self.save(peer, head, path),
                CoordinatorOutput::Keep(bytes) => {
                    let kept = self.keep(&bytes);
                    if let Err(failure) = kept {
                        tracing::error!("nobody can join or initialise while the disk refuses: {failure}");
                        self.waiting.push_front(CoordinatorOutput::Keep(bytes));
                        return;
                    }
                }
            }
        }
    }

    fn keep(&self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(storage) = &self.storage else { return Ok(()) };
        let mut writer = storage.create(KEPT_NEW)?;
        writer.write(&[bytes])?;
        writer.sync()?;
        drop(writer);
        storage.rename(KEPT_NEW, KEPT)?;
        storage.sync_directory(KEPT_DIRECTORY)
    }

    fn save(&mut self, peer: PeerId, head: Head, path: String) {
        let (saving, done, control) = (self.saving.clone(), self.done.clone(), self.control.clone());
        let work = move || {
            let saved = saving::save(&saving, &path);
            // Nobody listens any more when the server has stopped meanwhile.
            let _ = done.send((peer, head, saved));
            control.ring();
        };
        let spawned = std::thread::Builder::new().name("pserver-save".to_owned()).spawn(work);
        if let Err(error) = spawned {
            let failure = Failure::call(format!("starting a thread: {error}"));
            self.coordinator.saved(peer, &head, Err(failure), &mut self.outputs);
        }
    }
}

impl Session for CoordinatorNode {
    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<Output>) -> Result<(), Failure> {
        self.coordinator.handle(now, event, &mut self.outputs);
        self.carry_out(out);
        Ok(())
    }

    fn work(&mut self, now: Now, out: &mut Vec<Output>) -> Result<bool, Failure> {
        while let Ok((peer, head, saved)) = self.saved.try_recv() {
            self.coordinator.saved(peer, &head, saved, &mut self.outputs);
        }
        if self.coordinator.deadline().is_some_and(|deadline| deadline <= now) {
            self.coordinator.expire(now, &mut self.outputs);
        }
        self.carry_out(out);
        Ok(false)
    }

    fn deadline(&self) -> Option<Now> {
        self.coordinator.deadline()
    }

    fn finish(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

fn recall(storage: &dyn Storage) -> Result<Option<Vec<u8>>, Failure> {
    let names = storage.list(KEPT_DIRECTORY)?;
    if !names.iter().any(|name| name == "coordinator") {
        return Ok(None);
    }
    let mut reader = storage.open(KEPT)?;
    let length = usize::try_from(reader.len()).map_err(|_| Failure::Node(format!("{KEPT} is too long")))?;
    let mut bytes = vec![0; length];
    reader.read_at(0, &mut bytes)?;
    Ok(Some(bytes))
}
