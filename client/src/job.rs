//! A joined job: its servers, their lanes, the catalogue, and the progress of each parameter.

use std::sync::Weak;
use std::time::Duration;

use pserver_core::client::{Finished, LaneId, Refused};
use pserver_core::config::Mode;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkIndex, ParameterIndex, Round, Sequence, ServerIndex, ShardId, Term, Ticket};
use pserver_core::partition::{Catalogue, Parameter, Topology};
use pserver_core::time::Now;
use pserver_core::wire::answer::Answer;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ErrorCode, JobMessage, Joined, TopologyMessage};

use super::call::CallNumber;
use super::carried::PreparedRules;
use super::control::answer;
use super::engine::ClientEngine;
use super::{ClientState, JobSharing, ParameterFacts};

/// Interval at which the coordinator is asked for addresses of unreachable servers.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// The first such interval while a shard moves; it doubles.
const MOVE_PAUSE: Duration = Duration::from_millis(20);

/// A job that was joined.
pub(super) struct JoinedJob {
    pub(super) settings: JobMessage,
    pub(super) default_config: Vec<u8>,
    pub(super) operator: OperatorChoices,
    /// The default configuration that the job was initialised with; empty where it is unknown.
    pub(super) initial_config: Vec<u8>,
    pub(super) topology: Topology,
    pub(super) phase: InitPhase,
    /// The number of the last mutating call.
    sequence: u64,
    /// The lanes of each server's shards.
    lanes: Vec<Vec<LaneId>>,
    /// Whether any parameter has a learning rate of this client.
    pub(super) has_rates: bool,
    pub(super) rules: PreparedRules,
    progress: JobProgress,
    /// How many questions there were, see [`JoinedJob::check_first`].
    question: u64,
}

/// Settings of the servers that a trainer must know.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperatorChoices {
    /// Whether the operator has set the mode, so that no initialiser changes it.
    pub(super) has_mode: bool,
    /// The same for the merge.
    pub(super) has_merge: bool,
    /// Whether servers take gradients with NaN or infinite elements.
    pub(super) takes_nonfinite: bool,
}

/// This trainer's progress with all parameters.
#[derive(Default)]
struct JobProgress {
    all: Vec<ParameterProgress>,
    /// Whether pushes of any parameter are counted in rounds.
    has_rounds: bool,
}

/// This trainer's progress with one parameter.
#[derive(Clone, Default)]
pub(super) struct ParameterProgress {
    /// Whether its pushes are counted in rounds: in mode sync, and those to a hosted program.
    pub(super) counts_rounds: bool,
    /// Round of the last push; none before it is known, and where there are no rounds.
    pub(super) round: Option<Round>,
    /// The last call about it in progress.
    pub(super) busy: Option<CallNumber>,
    /// The last push about it.
    pub(super) pushed: Option<CallNumber>,
    /// Sequence number of a failed push. The next push reuses it, so that servers recognise a repetition.
    pub(super) push_again: Option<Sequence>,
    /// Sequence number of a failed set, reused likewise.
    pub(super) set_again: Option<Sequence>,
    /// The learning rate of gradients that bring none, where it is another than the job was initialised with.
    pub(super) rate: Option<f64>,
    /// Its view, if there is one.
    pub(super) viewed: Weak<()>,
    /// The last question that found it.
    asked: u64,
}

/// State of the job's initialisation, as this client knows it.
pub(super) enum InitPhase {
    /// Joined; the state is unknown.
    Joined,
    /// This client was elected and declares parameters.
    Initialising(Box<CatalogueDraft>),
    /// A call commits the declared parameters.
    Finishing,
    /// The parameters are initialised.
    Ready(Box<Catalogue>),
}

/// The request for addresses of unreachable servers.
#[derive(Default)]
pub(super) struct ServerQuery {
    asked: Option<Ticket>,
    /// Earliest time of the next request.
    again: Now,
    /// The last pause while a shard moves.
    pause: Duration,
}

/// The catalogue while it is declared.
pub(super) struct CatalogueDraft {
    pub(super) catalogue: Catalogue,
    pub(super) settings: JobMessage,
    pub(super) default_config: Vec<u8>,
    /// Whether that is of the configuration given with begin.
    pub(super) is_config_given: bool,
}

impl JoinedJob {
    /// Checks the coordinator's answer, and adds a lane for every shard.
    pub(super) fn new(joined: Joined, engine: &mut ClientEngine) -> Result<Self, Failure> {
        let missing = |what: &str| Failure::call(format!("the coordinator's answer has no {what}"));
        let settings = joined.job.ok_or_else(|| missing("settings"))?;
        let servers = joined.topology.ok_or_else(|| missing("servers"))?;
        let topology = servers.topology()?;
        let map = joined.map.unwrap_or_default();
        let map = map.map().ok_or_else(|| Failure::call("the coordinator's map of shards is damaged"))?;
        let mut lanes = vec![Vec::new(); servers.servers.len()];
        for shard in topology.shard_ids() {
            let place = map.place(shard);
            let address = address_of(&servers, place.server)?;
            let lane = engine.add_lane(address.clone(), shard.lane(), shard.to_string());
            engine.move_lane(lane, address, place.term);
            lanes[usize::from(shard.server.0)].push(lane);
        }
        Ok(Self {
            settings,
            default_config: joined.default_config,
            operator: OperatorChoices {
                has_mode: joined.is_mode_given,
                has_merge: joined.is_merge_given,
                takes_nonfinite: joined.takes_nonfinite,
            },
            initial_config: Vec::new(),
            topology,
            phase: InitPhase::Joined,
            sequence: 0,
            lanes,
            has_rates: false,
            rules: PreparedRules::default(),
            progress: JobProgress::default(),
            question: 0,
        })
    }

    pub(super) fn servers(&self) -> u32 {
        u32::try_from(self.lanes.len()).expect("a server's index has 16 bits")
    }

    pub(super) fn lane(&self, place: ShardId) -> LaneId {
        self.lanes[usize::from(place.server.0)][usize::from(place.shard.0)]
    }

    pub(super) fn lane_count(&self) -> usize {
        self.lanes.iter().map(Vec::len).sum()
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = (ShardId, LaneId)> + '_ {
        self.topology.shard_ids().map(|place| (place, self.lane(place)))
    }

    /// The parameters are there, and of each this is the round that it is at, where that is known.
    pub(super) fn is_initialised(&mut self, catalogue: Catalogue, round: Option<Round>) {
        let is_sync = self.counts_rounds();
        let progress = catalogue.iter().map(|parameter| {
            let counts_rounds = is_sync || parameter.declaration().hosted.is_some();
            ParameterProgress { counts_rounds, round: round.filter(|_| counts_rounds), ..ParameterProgress::default() }
        });
        let all: Vec<ParameterProgress> = progress.collect();
        self.progress = JobProgress { has_rounds: all.iter().any(|one| one.counts_rounds), all };
        self.phase = InitPhase::Ready(Box::new(catalogue));
    }

    /// The catalogue of a job that is ready.
    ///
    /// # Panics
    /// When it is not: `ClientState::ready` comes first.
    pub(super) fn catalogue(&self) -> &Catalogue {
        match &self.phase {
            InitPhase::Ready(catalogue) => catalogue,
            InitPhase::Joined | InitPhase::Initialising(_) | InitPhase::Finishing => panic!("the job is not ready"),
        }
    }

    /// Whether the parameters are initialised.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.phase, InitPhase::Ready(_))
    }

    /// Where each lane connects to, as the coordinator knows it now, and under which term; nothing when it is about
    /// other servers.
    fn moved_lanes(&self, joined: Joined) -> Option<Vec<(LaneId, Address, Term)>> {
        let (servers, map) = (joined.topology?, joined.map.unwrap_or_default().map()?);
        if servers.topology().ok()? != self.topology {
            return None;
        }
        let mut moved = Vec::new();
        for (shard, lane) in self.lanes() {
            let place = map.place(shard);
            moved.push((lane, address_of(&servers, place.server).ok()?, place.term));
        }
        Some(moved)
    }

    fn mode(&self) -> Mode {
        Mode::from_numbers(self.settings.mode, self.settings.staleness).unwrap_or_default()
    }

    pub(super) fn sharing(&self) -> JobSharing {
        let merge = pserver_core::config::Merge::from_number(self.settings.merge).unwrap_or_default();
        JobSharing { mode: self.mode(), merge, trainers: self.settings.trainers }
    }

    /// Bytes of a chunk, the limit of a payload.
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.settings.chunk_bytes
    }

    /// Whether this trainer has begun to push something.
    pub(super) fn has_pushed(&self) -> bool {
        self.progress.all.iter().any(|one| one.pushed.is_some())
    }

    /// Whether pushes of any parameter are counted in rounds.
    pub(super) fn has_rounds(&self) -> bool {
        self.progress.has_rounds
    }

    /// Whether pushes are counted in rounds, as in sync mode.
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

    /// Parameters of hosted programs, by their names.
    pub(super) fn hosted(&self, names: &[&str]) -> Result<Vec<ParameterIndex>, Failure> {
        let find = |name: &&str| {
            let index = self.parameter(name, &mut None)?;
            let is_hosted = self.chosen(index).declaration().hosted.is_some();
            let text = || Failure::call(format!("parameter \"{name}\" is of no hosted program"));
            is_hosted.then_some(index).ok_or_else(text)
        };
        names.iter().map(find).collect()
    }

    pub(super) fn name(&self, index: ParameterIndex) -> &str {
        self.chosen(index).declaration().name.as_str()
    }

    /// The parameter whose pushes number the rounds of this one: of a share and of a total the one that reads the
    /// total. The version of a total does not say which round a trainer is in, as another trainer may have sent it.
    pub(super) fn counted_by(&self, index: ParameterIndex) -> ParameterIndex {
        let part = self.chosen(index).declaration().total_part;
        part.and_then(|part| part.reader(index)).unwrap_or(index)
    }

    pub(super) fn progress(&self, index: ParameterIndex) -> &ParameterProgress {
        &self.progress.all[index.0 as usize]
    }

    /// Learns the round of a parameter from versions of its chunks, in their order: that of the last push, if it is
    /// unknown; and the one before the open round where rounds do not wait for this trainer.
    pub(super) fn learn_round(&mut self, seen: &[(ParameterIndex, ChunkIndex, Round)]) {
        let index = seen[0].0;
        let lowest = seen.iter().map(|(.., round)| *round).min().expect("there is one");
        let Some(round) = self.progress(index).round else {
            self.progress_mut(index).round = Some(lowest);
            return;
        };
        let chunks = seen.chunk_by(|one, next| one.1 == next.1).count() as u64;
        let is_late = round < lowest && chunks == self.chosen(index).chunk_count();
        // A gradient for a round that is over would be dropped.
        if is_late && self.config(index).is_ok_and(|config| 0 < config.backup_trainers) {
            self.progress_mut(index).round = Some(lowest);
        }
    }

    pub(super) fn progress_mut(&mut self, index: ParameterIndex) -> &mut ParameterProgress {
        &mut self.progress.all[index.0 as usize]
    }

    /// The number of one more mutating call.
    pub(super) fn next_sequence(&mut self) -> Sequence {
        self.sequence += 1;
        Sequence(self.sequence)
    }

    /// Refuses to pull parameters that a view holds.
    pub(super) fn refuse_viewed(&self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let viewed = chosen.iter().find(|index| self.progress(**index).viewed.strong_count() > 0);
        viewed.map_or(Ok(()), |index| {
            let name = self.name(*index);
            Err(Failure::call(format!(
                "parameter \"{name}\": a view holds it; expected the view's release before another fetch"
            )))
        })
    }

    /// Refuses a parameter that occurs twice.
    pub(super) fn check_once(&mut self, chosen: &[ParameterIndex]) -> Result<(), Failure> {
        let question = self.next_lookup();
        chosen.iter().try_for_each(|index| self.check_first(*index, question))
    }

    /// One more question for [`JoinedJob::check_first`].
    pub(super) fn next_lookup(&mut self) -> u64 {
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

impl ClientState {
    /// Whether the client has joined its job.
    pub(super) fn has_joined(&self) -> bool {
        self.job.is_some()
    }

    /// The job, after `ClientState::ready`.
    pub(super) fn ready_job(&mut self) -> &mut JoinedJob {
        self.job.as_mut().expect("the job is ready")
    }

    /// Asks the coordinator for the servers' addresses when one is unreachable, as it may have restarted elsewhere.
    pub(super) fn query_servers(&mut self, now: Now) {
        if self.job.is_none() || self.search.asked.is_some() || now < self.search.again || !self.engine.needs_address()
        {
            return;
        }
        let asked = Some(self.engine.start(Request::Observe(true)));
        let moving = (self.search.pause * 2).clamp(MOVE_PAUSE, SEARCH_PAUSE);
        let (wait, pause) = if self.engine.has_moved() { (moving, moving) } else { (SEARCH_PAUSE, Duration::ZERO) };
        self.search = ServerQuery { asked, again: now + wait, pause };
    }

    /// Records the coordinator's answer, and changes the addresses of moved servers.
    pub(super) fn update_addresses(&mut self, ticket: Ticket, result: Result<Finished, Refused>) {
        if self.search.asked != Some(ticket) {
            return;
        }
        self.search.asked = None;
        if let Err(refused) = &result
            && refused.code == ErrorCode::Fenced
        {
            // A shard that moved would say so too, and is not found.
            self.engine.refuse_all(refused);
        }
        let answered = result.ok().and_then(|finished| answer(&finished.control).ok());
        let (Some(Answer::Joined(joined)), Some(job)) = (answered, &self.job) else { return };
        if joined.epoch != self.engine.identity().epoch.0 {
            return;
        }
        for (lane, address, term) in job.moved_lanes(joined).into_iter().flatten() {
            self.engine.move_lane(lane, address, term);
        }
        if !self.engine.has_moved() {
            self.search.pause = Duration::ZERO;
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

    pub(super) fn facts(&self, name: &str) -> Result<ParameterFacts, Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let declaration = job.chosen(job.parameter(name, &mut None)?).declaration();
        Ok(ParameterFacts {
            element_type: declaration.element_type,
            bytes: declaration.bytes,
            shape: declaration.shape.clone(),
            is_sparse: declaration.buckets.is_some(),
        })
    }
}

/// The address of a server.
fn address_of(servers: &TopologyMessage, server: ServerIndex) -> Result<Address, Failure> {
    let entry = servers.servers.get(usize::from(server.0));
    let entry = entry.ok_or_else(|| Failure::call(format!("the coordinator's answer lacks server {server}")))?;
    Address::parse(&entry.address)
}

/// Refuses a sparse parameter.
pub(super) fn check_dense(parameter: &Parameter) -> Result<(), Failure> {
    if parameter.declaration().buckets.is_none() {
        return Ok(());
    }
    let name = parameter.declaration().name.as_str();
    Err(Failure::call(format!("parameter \"{name}\" is sparse: it is sent and fetched by rows, not as a whole")))
}
