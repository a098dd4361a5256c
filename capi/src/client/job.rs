//! What a client knows of its job: who serves, what is where, and how far each parameter is.

use std::sync::Weak;
use std::time::Duration;

use pserver_core::client::{Finished, LaneId, Refused, RequestBody};
use pserver_core::config::Mode;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ParameterIndex, Place, Round, Sequence, Ticket};
use pserver_core::partition::{Catalogue, Parameter, Topology};
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, JobMessage, Joined, TopologyMessage};

use super::calls::CallNumber;
use super::engine::Engine;
use super::initialise::answer;
use super::transfer::check_dense;
use super::views::is_held;
use super::{Facts, Sharing, State};

/// How often the coordinator is asked where servers are that do not answer.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

/// A job that was joined.
pub(super) struct Job {
    pub(super) settings: JobMessage,
    pub(super) default_config: Vec<u8>,
    pub(super) topology: Topology,
    pub(super) phase: Phase,
    /// The number of the last mutating call.
    sequence: u64,
    /// The lanes of each server's shards.
    lanes: Vec<Vec<LaneId>>,
    /// By parameter.
    progress: Vec<Progress>,
    /// How many questions there were, see [`Job::check_first`].
    question: u64,
}

/// How far this trainer is with one parameter.
#[derive(Clone, Default)]
pub(super) struct Progress {
    /// The last round that a call took; nothing when it is not known yet.
    pub(super) round: Option<Round>,
    /// The last unfinished call about it.
    pub(super) busy: Option<CallNumber>,
    /// The last push about it.
    pub(super) pushed: Option<CallNumber>,
    /// The number of a push that failed: the next push is the same one again, and servers know it by its number.
    pub(super) push_again: Option<Sequence>,
    /// The same for a value that was set.
    pub(super) set_again: Option<Sequence>,
    /// Its view, if there is one.
    pub(super) viewed: Weak<()>,
    /// The last question that found it.
    asked: u64,
}

/// How far the job's initialisation is, as far as this client knows.
pub(super) enum Phase {
    /// Nothing is known.
    Joined,
    /// This client was chosen and declares parameters.
    Initialising(Box<Draft>),
    /// It has declared them all, and a call tells everybody.
    Finishing,
    /// The parameters are there.
    Ready(Box<Catalogue>),
}

/// The question where servers are that do not answer.
#[derive(Default)]
pub(super) struct Search {
    asked: Option<Ticket>,
    /// Not before.
    again: Now,
}

/// The catalogue while it is declared.
pub(super) struct Draft {
    pub(super) catalogue: Catalogue,
    pub(super) settings: JobMessage,
    pub(super) default_config: Vec<u8>,
}

impl Job {
    /// Reads what the coordinator said, and makes a lane to every shard.
    pub(super) fn new(joined: Joined, engine: &mut Engine) -> Result<Self, Failure> {
        let missing = |what: &str| Failure::call(format!("the coordinator's answer has no {what}"));
        let settings = joined.job.ok_or_else(|| missing("settings"))?;
        let servers = joined.topology.ok_or_else(|| missing("servers"))?;
        let topology = topology(&servers)?;
        let mut lanes = vec![Vec::new(); servers.servers.len()];
        for place in topology.places() {
            let server = usize::from(place.server.0);
            let address = Address::parse(&servers.servers[server].address)?;
            let name = format!("server {} shard {}", place.server, place.shard);
            lanes[server].push(engine.add_lane(address, u64::from(place.shard.0) + 1, name));
        }
        Ok(Self {
            settings,
            default_config: joined.default_config,
            topology,
            phase: Phase::Joined,
            sequence: 0,
            lanes,
            progress: Vec::new(),
            question: 0,
        })
    }

    pub(super) fn lane(&self, place: Place) -> LaneId {
        self.lanes[usize::from(place.server.0)][usize::from(place.shard.0)]
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = (Place, LaneId)> + '_ {
        self.topology.places().map(|place| (place, self.lane(place)))
    }

    /// The parameters are there, and of each this is the round that it is at, where that is known.
    pub(super) fn is_initialised(&mut self, catalogue: Catalogue, round: Option<Round>) {
        self.progress = vec![Progress { round, ..Progress::default() }; catalogue.len()];
        self.phase = Phase::Ready(Box::new(catalogue));
    }

    /// The catalogue of a job that is ready.
    ///
    /// # Panics
    /// When it is not: `State::ready` comes first.
    pub(super) fn catalogue(&self) -> &Catalogue {
        match &self.phase {
            Phase::Ready(catalogue) => catalogue,
            Phase::Joined | Phase::Initialising(_) | Phase::Finishing => panic!("the job is not ready"),
        }
    }

    /// Whether the parameters are there.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready(_))
    }

    /// Where each lane connects to, as the coordinator knows it now; nothing when it is about other servers.
    fn moved_lanes(&self, joined: Joined) -> Option<Vec<(LaneId, Address)>> {
        let servers = joined.topology?;
        if topology(&servers).ok()? != self.topology {
            return None;
        }
        let mut moved = Vec::new();
        for (place, lane) in self.lanes() {
            let address = Address::parse(&servers.servers[usize::from(place.server.0)].address).ok()?;
            moved.push((lane, address));
        }
        Some(moved)
    }

    fn mode(&self) -> Mode {
        Mode::from_numbers(self.settings.mode, self.settings.staleness).unwrap_or_default()
    }

    pub(super) fn sharing(&self) -> Sharing {
        let merge = pserver_core::config::Merge::from_number(self.settings.merge).unwrap_or_default();
        Sharing { mode: self.mode(), merge, trainers: self.settings.trainers }
    }

    /// The bytes that a payload is cut to.
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.settings.chunk_bytes
    }

    /// Whether each trainer has one gradient in each version.
    pub(super) fn counts_rounds(&self) -> bool {
        self.mode() == Mode::Sync
    }

    /// A parameter by name. Callers mostly name parameters in the order of declaration, so the one that follows the
    /// last is tried first.
    pub(super) fn parameter(&self, name: &str, last: &mut Option<ParameterIndex>) -> Result<ParameterIndex, Failure> {
        let catalogue = self.catalogue();
        let next = ParameterIndex(last.map_or(0, |last| last.0 + 1));
        let is_next = catalogue.parameter(next).is_some_and(|one| one.declaration().name.as_str() == name);
        let found = if is_next { Some(next) } else { catalogue.find(name) };
        let index = found.ok_or_else(|| {
            Failure::call(format!(
                "unknown parameter \"{}\"; this job has {} parameters",
                name.chars().take(64).collect::<String>(),
                catalogue.len()
            ))
        })?;
        *last = Some(index);
        Ok(index)
    }

    /// A parameter that a name was found to stand for.
    pub(super) fn chosen(&self, index: ParameterIndex) -> &Parameter {
        self.catalogue().parameter(index).expect("the index came from this catalogue")
    }

    pub(super) fn name(&self, index: ParameterIndex) -> &str {
        self.chosen(index).declaration().name.as_str()
    }

    pub(super) fn progress(&self, index: ParameterIndex) -> &Progress {
        &self.progress[index.0 as usize]
    }

    pub(super) fn progress_mut(&mut self, index: ParameterIndex) -> &mut Progress {
        &mut self.progress[index.0 as usize]
    }

    /// The number of one more mutating call.
    pub(super) fn next_sequence(&mut self) -> Sequence {
        self.sequence += 1;
        Sequence(self.sequence)
    }

    /// Refuses to fetch a parameter of which there is a view.
    pub(super) fn refuse_viewed(&self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let viewed = chosen.iter().find(|index| is_held(&self.progress(**index).viewed));
        viewed.map_or(Ok(()), |index| {
            let name = self.name(*index);
            Err(Failure::call(format!(
                "parameter \"{name}\": there is a view of it; expected its release before it is fetched"
            )))
        })
    }

    /// Refuses a parameter that is among these twice.
    pub(super) fn check_once(&mut self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let question = self.next_question();
        chosen.iter().try_for_each(|index| self.check_first(*index, question))
    }

    /// One more question for [`Job::check_first`].
    pub(super) fn next_question(&mut self) -> u64 {
        self.question += 1;
        self.question
    }

    /// Refuses a parameter that this question has found before.
    #[inline]
    pub(super) fn check_first(&mut self, index: ParameterIndex, question: u64) -> Result<(), Failure> {
        if std::mem::replace(&mut self.progress_mut(index).asked, question) == question {
            return Err(Failure::call(format!("parameter \"{}\" is in one call twice", self.name(index))));
        }
        Ok(())
    }
}

impl State {
    /// The job, after [`State::ready`].
    pub(super) fn ready_job(&mut self) -> &mut Job {
        self.job.as_mut().expect("the job is ready")
    }

    /// Asks the coordinator where the servers are, when one does not answer: it may have been started elsewhere.
    pub(super) fn look_for_servers(&mut self, now: Now) {
        if self.job.is_none() || self.search.asked.is_some() || now < self.search.again || !self.engine.is_astray() {
            return;
        }
        let (lane, frame) = self.engine.question(Request::Observe(true));
        let asked = Some(self.engine.ask(lane, frame, RequestBody::default()));
        self.search = Search { asked, again: now + SEARCH_PAUSE };
    }

    /// Takes in what the coordinator said about it.
    pub(super) fn note_servers(&mut self, ticket: Ticket, result: Result<Finished, Refused>) {
        if self.search.asked != Some(ticket) {
            return;
        }
        self.search.asked = None;
        let answered = result.ok().and_then(|finished| answer(&finished.control).ok());
        let (Some(Answer::Joined(joined)), Some(job)) = (answered, &self.job) else { return };
        if joined.epoch != self.engine.identity().epoch.0 {
            return;
        }
        for (lane, address) in job.moved_lanes(joined).into_iter().flatten() {
            self.engine.move_lane(lane, address);
        }
    }

    /// The type and the length in bytes of each of these parameters, which are no sparse ones.
    pub(super) fn measure(&self, names: &[&str]) -> Result<Vec<(ElementType, u64)>, Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let mut last = None;
        let measure = |name: &&str| {
            let parameter = job.chosen(job.parameter(name, &mut last)?);
            check_dense(parameter)?;
            Ok((parameter.declaration().element_type, parameter.declaration().bytes))
        };
        names.iter().map(measure).collect()
    }

    pub(super) fn facts(&self, name: &str) -> Result<Facts, Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let declaration = job.chosen(job.parameter(name, &mut None)?).declaration();
        Ok(Facts {
            element_type: declaration.element_type,
            bytes: declaration.bytes,
            shape: declaration.shape.clone(),
            is_sparse: declaration.buckets.is_some(),
        })
    }
}

fn topology(message: &TopologyMessage) -> Result<Topology, Failure> {
    let shards = message.servers.iter().map(|server| {
        u16::try_from(server.shards).map_err(|_| Failure::call(format!("a server with {} shards", server.shards)))
    });
    Topology::new(shards.collect::<Result<Vec<_>, _>>()?)
}
