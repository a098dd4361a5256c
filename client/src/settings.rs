//! Settings of a trainer beside those of a job that is initialised: a learning rate takes effect, any other difference
//! is refused. `docs/SETTINGS.md` has the table.

use std::collections::BTreeMap;

use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::error::Failure;
use pserver_core::ids::ParameterIndex;
use pserver_core::optim::Rule;

use super::carried::CarriedNumbers;
use super::client_lock::ClientGuard;
use super::job::JoinedJob;
use super::{Client, ClientState};

impl Client {
    /// Compares a parameter's optimizer with that of these settings, as far as they have one. Another constant learning
    /// rate takes effect: gradients of this client bring it, where a call brings none.
    ///
    /// # Errors
    /// Names the parameter, the job's optimizer, and the given one, where they differ in more.
    pub fn follow_optimizer(&self, name: &str, settings: &OptimizerSettings) -> Result<(), Failure> {
        let Some(rule) = &settings.rule else { return Ok(()) };
        let mut state = self.lock()?;
        let job = state.ready()?;
        let index = job.parameter(name, &mut None)?;
        let declared = job.config(index)?;
        let OptimizerSettings { sparse, backup_trainers, .. } = *settings;
        let given = ParameterConfig { rule: rule.clone(), sparse, backup_trainers };
        if given == declared {
            job.progress_mut(index).rate = None;
            return Ok(());
        }
        let is_alike = (given.sparse, given.backup_trainers) == (declared.sparse, declared.backup_trainers);
        match rule.rate_instead_of(&declared.rule).filter(|_| is_alike) {
            Some(rate) => job.take_rate(&[index], rate),
            None => {
                let (given, declared) = (given.to_text(), declared.to_text());
                Err(other_optimizer(&format!("parameter \"{name}\": "), &given, &declared))
            }
        }
    }
}

impl ClientGuard<'_> {
    /// Compares the settings of `begin_init` with those of a job that is initialised.
    pub(super) fn follow_settings(&mut self, settings: &OptimizerSettings) -> Result<(), Failure> {
        let job = self.ready_job();
        job.check_sharing(settings, (true, true))?;
        let Some(rule) = settings.rule.as_ref().filter(|_| !job.initial_config.is_empty()) else { return Ok(()) };
        let initial = ParameterConfig::decode(&job.initial_config)?.rule;
        if *rule == initial {
            return Ok(());
        }
        match rule.rate_instead_of(&initial) {
            Some(rate) => self.take_default_rate(rate),
            None => {
                let text = |rule: Rule| ParameterConfig::of(rule).to_text();
                Err(other_optimizer("", &text(rule.clone()), &text(initial)))
            }
        }
    }

    /// Gradients of parameters with the default optimizer bring this learning rate from now on.
    pub(super) fn take_default_rate(&mut self, rate: f64) -> Result<(), Failure> {
        let job = self.ready_job();
        if job.initial_config.is_empty() {
            return Ok(());
        }
        let initial = ParameterConfig::decode(&job.initial_config)?.rule;
        let all = (0..).map(ParameterIndex).take(job.catalogue().len());
        let mut those = Vec::new();
        for index in all {
            if job.config(index)?.rule == initial {
                those.push(index);
            }
        }
        job.take_rate(&those, rate)
    }
}

impl ClientState {
    /// The control messages of gradients that bring a learning rate of their parameter, where the call brings none.
    pub(super) fn own_rates(
        &self,
        chosen: &[ParameterIndex],
        numbers: CarriedNumbers<'_>,
    ) -> BTreeMap<ParameterIndex, Vec<u8>> {
        let job = self.job.as_ref().expect("the job is ready");
        if numbers.rate.is_some() || !job.has_rates {
            return BTreeMap::new();
        }
        let own = |index: &ParameterIndex| {
            let rate = job.progress(*index).rate?;
            Some((*index, CarriedNumbers { rate: Some(rate), ..numbers }.message()))
        };
        chosen.iter().filter_map(own).collect()
    }
}

impl JoinedJob {
    /// Refuses numbers that servers would refuse for one of these parameters.
    pub(super) fn check_carried(
        &mut self,
        chosen: &[ParameterIndex],
        numbers: CarriedNumbers<'_>,
    ) -> Result<(), Failure> {
        let mut rules = std::mem::take(&mut self.rules);
        let checked = rules.check(chosen.iter().map(|index| self.chosen(*index).declaration()), numbers);
        self.rules = rules;
        checked
    }

    /// The declared configuration of a parameter.
    pub(super) fn config(&self, index: ParameterIndex) -> Result<ParameterConfig, Failure> {
        ParameterConfig::decode(&self.chosen(index).declaration().config)
    }

    fn take_rate(&mut self, indices: &[ParameterIndex], rate: f64) -> Result<(), Failure> {
        for index in indices {
            let element_type = self.chosen(*index).declaration().element_type;
            self.config(*index)?.rule.check_rate(rate, element_type)?;
        }
        for index in indices {
            let name = self.name(*index).to_owned();
            tracing::info!("parameter {name:?}: gradients of this trainer bring the learning rate {rate}");
            self.progress_mut(*index).rate = Some(rate);
            self.has_rates = true;
        }
        Ok(())
    }

    /// Refuses another mode or merge than the job has, where these are decided.
    pub(super) fn check_sharing(&self, settings: &OptimizerSettings, decided: (bool, bool)) -> Result<(), Failure> {
        let job = self.sharing();
        let refuse = |what: &str, given: String, found: String| {
            Err(Failure::call(format!(
                "found {what} {given} in the configuration; expected {found}, as the job has, or none: servers are \
                 started with another --{what}"
            )))
        };
        if let Some(mode) = settings.mode.filter(|mode| decided.0 && *mode != job.mode) {
            return refuse("mode", format!("{mode:?}"), format!("{:?}", job.mode));
        }
        match settings.merge.filter(|merge| decided.1 && *merge != job.merge) {
            Some(merge) => refuse("merge", format!("{merge:?}"), format!("{:?}", job.merge)),
            None => Ok(()),
        }
    }
}

fn other_optimizer(place: &str, given: &str, declared: &str) -> Failure {
    Failure::call(format!(
        "{place}found the optimizer `{given}`; expected that with which the job was initialised, `{declared}`, of \
         which only a constant learning rate may change"
    ))
}
