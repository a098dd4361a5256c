//! The list of a job's parameters.

use pserver_core::config::{OptimizerSettings, ParameterConfig, SparseSettings};
use pserver_core::error::Failure;
use pserver_core::ids::{ParameterIndex, Round, Sequence, Version};
use pserver_core::memory::LoanBook;
use pserver_core::optim::Rule;
use pserver_core::wire::Kind;

use super::{Client, ParameterFacts};

/// Calls in progress while versions are asked for.
const AT_ONCE: usize = 256;

/// A parameter of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedParameter {
    /// Its name.
    pub name: String,
    /// Its type, length and shape.
    pub facts: ParameterFacts,
    /// The most updates that a chunk of it has.
    pub version: Version,
}

impl Client {
    /// All parameters in the order of declaration, each with its version. Waits until they are initialised. Versions
    /// are asked for one parameter after the other, so they need not be of one moment.
    ///
    /// # Errors
    /// When initialisation does not finish, or a server does not answer, before the deadline.
    pub fn parameters(&self) -> Result<Vec<ListedParameter>, Failure> {
        let mut state = self.lock()?;
        let catalogue = state.ready()?.catalogue();
        let names: Vec<String> = catalogue.iter().map(|one| one.declaration().name.as_str().to_owned()).collect();
        let all: Vec<ParameterIndex> = (0..).map(ParameterIndex).take(names.len()).collect();
        let mut versions = Vec::with_capacity(all.len());
        for some in all.chunks(AT_ONCE) {
            let mut calls = Vec::with_capacity(some.len());
            for index in some {
                calls.push(state.start_version(*index)?);
            }
            for call in calls {
                versions.push(state.finish_latest(call)?);
            }
        }
        let listed = names.into_iter().zip(versions).map(|(name, version)| {
            let facts = state.facts(&name)?;
            Ok(ListedParameter { name, facts, version })
        });
        listed.collect()
    }

    /// Checks that a parameter has the optimizer of these settings, as far as they have one. Learning rates may differ:
    /// each push may replace them.
    ///
    /// # Errors
    /// Names the parameter, the job's optimizer, and the expected one.
    pub fn check_optimizer(&self, name: &str, settings: &OptimizerSettings) -> Result<(), Failure> {
        let Some(rule) = &settings.rule else { return Ok(()) };
        let mut state = self.lock()?;
        let job = state.ready()?;
        let index = job.parameter(name, &mut None)?;
        let declared = ParameterConfig::decode(&job.chosen(index).declaration().config)?;
        let rule = Rule { schedule: declared.rule.schedule.clone(), ..rule.clone() };
        // Initial values are the initialiser's, and so is their seed.
        let seed = declared.sparse.and_then(|sparse| sparse.seed);
        let sparse = settings.sparse.map(|sparse| SparseSettings { seed, ..sparse });
        let found = ParameterConfig { rule, sparse, backup_trainers: settings.backup_trainers };
        if found == declared {
            return Ok(());
        }
        let (found, expected) = (found.to_text(), declared.to_text());
        Err(Failure::call(format!(
            "parameter \"{name}\": found the optimizer `{found}`; expected that with which the job was initialised, \
             `{expected}`"
        )))
    }
}

impl super::ClientState {
    /// Starts a pull of a parameter without its value.
    fn start_version(&mut self, index: ParameterIndex) -> Result<super::CallNumber, Failure> {
        self.open(Kind::Pull, &[index], (0, 0))?;
        let packer = self.packer(Kind::Pull, &[index]).without_values();
        Ok(self.pack_bare(packer, index, &LoanBook::open(), (Round(0), Sequence(0))))
    }
}
