//! What a client knows of its job: who serves, what is where, and how far each parameter is.

use std::collections::BTreeMap;

use pserver_core::client::LaneId;
use pserver_core::config::Mode;
use pserver_core::error::Failure;
use pserver_core::ids::{ParameterIndex, Place, Round};
use pserver_core::partition::{Catalogue, Parameter, Topology};
use pserver_core::wire::{Address, JobMessage, Joined, TopologyMessage};

use super::engine::Engine;
use super::{Facts, State};

/// A job that was joined.
pub(super) struct Job {
    pub(super) settings: JobMessage,
    pub(super) default_config: Vec<u8>,
    pub(super) topology: Topology,
    pub(super) phase: Phase,
    /// The number of the last mutating call that every server acknowledged.
    pub(super) sequence: u64,
    lanes: BTreeMap<Place, LaneId>,
    /// Of each parameter the last round pushed, where rounds are counted; nothing when it is not known yet.
    rounds: BTreeMap<ParameterIndex, Round>,
}

/// How far the job's initialisation is, as far as this client knows.
pub(super) enum Phase {
    /// Nothing is known.
    Joined,
    /// This client was chosen and declares parameters.
    Initialising(Box<Draft>),
    /// The parameters are there.
    Ready(Box<Catalogue>),
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
        let mut lanes = BTreeMap::new();
        for place in topology.places() {
            let address = Address::parse(&servers.servers[usize::from(place.server.0)].address)?;
            let name = format!("server {} shard {}", place.server, place.shard);
            lanes.insert(place, engine.add_lane(address, u64::from(place.shard.0) + 1, name));
        }
        Ok(Self {
            settings,
            default_config: joined.default_config,
            topology,
            phase: Phase::Joined,
            sequence: 0,
            lanes,
            rounds: BTreeMap::new(),
        })
    }

    pub(super) fn lane(&self, place: Place) -> LaneId {
        self.lanes[&place]
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = (Place, LaneId)> + '_ {
        self.lanes.iter().map(|(place, lane)| (*place, *lane))
    }

    /// The catalogue of a job that is ready.
    ///
    /// # Panics
    /// When it is not: `State::ready` comes first.
    pub(super) fn catalogue(&self) -> &Catalogue {
        match &self.phase {
            Phase::Ready(catalogue) => catalogue,
            Phase::Joined | Phase::Initialising(_) => panic!("the job is not ready"),
        }
    }

    pub(super) fn mode(&self) -> Mode {
        Mode::from_numbers(self.settings.mode, self.settings.staleness).unwrap_or_default()
    }

    /// A parameter by name.
    pub(super) fn parameter(&self, name: &str) -> Result<&Parameter, Failure> {
        let catalogue = self.catalogue();
        let index = catalogue.find(name).ok_or_else(|| {
            Failure::call(format!(
                "unknown parameter \"{}\"; this job has {} parameters",
                name.chars().take(64).collect::<String>(),
                catalogue.len()
            ))
        })?;
        Ok(self.chosen(index))
    }

    /// A parameter that a name was found to stand for.
    pub(super) fn chosen(&self, index: ParameterIndex) -> &Parameter {
        self.catalogue().parameter(index).expect("the index came from this catalogue")
    }

    pub(super) fn round(&self, parameter: ParameterIndex) -> Option<Round> {
        self.rounds.get(&parameter).copied()
    }

    pub(super) fn set_round(&mut self, parameter: ParameterIndex, round: Round) {
        self.rounds.insert(parameter, round);
    }
}

impl State {
    pub(super) fn facts(&self, name: &str) -> Result<Facts, Failure> {
        let job = self.job.as_ref().expect("the job is ready");
        let declaration = job.parameter(name)?.declaration();
        Ok(Facts { element_type: declaration.element_type, bytes: declaration.bytes, shape: declaration.shape.clone() })
    }
}

fn topology(message: &TopologyMessage) -> Result<Topology, Failure> {
    let shards = message.servers.iter().map(|server| {
        u16::try_from(server.shards).map_err(|_| Failure::call(format!("a server with {} shards", server.shards)))
    });
    Topology::new(shards.collect::<Result<Vec<_>, _>>()?)
}
