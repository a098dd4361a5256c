//! Numbers that gradients carry for the rule of their parameter.

use std::collections::BTreeMap;
use std::sync::Arc;

use prost::Message;
use pserver_core::config::ParameterConfig;
use pserver_core::error::Failure;
use pserver_core::optim::Prepared;
use pserver_core::partition::Declaration;
use pserver_core::rows::{CatchUp, check_step_settings};
use pserver_core::wire::{PushMessage, SettingMessage};

/// Numbers that a push carries in place of configured ones, for the update of which its gradients are a part.
///
/// ```
/// use pserver_client::CarriedNumbers;
///
/// let settings = [("beta_1", 0.85), ("l2", 0.01)];
/// let numbers = CarriedNumbers { rate: Some(0.1), settings: &settings };
/// assert_eq!(CarriedNumbers::from(Some(0.1)), CarriedNumbers { settings: &[], ..numbers });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CarriedNumbers<'a> {
    /// The learning rate, in place of the schedule's.
    pub rate: Option<f64>,
    /// Numbers of the rule by name, which the rule of every parameter of the push has: a parameter of a rule's text,
    /// or an optimizer's constant as configuration names it.
    pub settings: &'a [(&'a str, f64)],
}

impl From<Option<f64>> for CarriedNumbers<'_> {
    fn from(rate: Option<f64>) -> Self {
        Self { rate, settings: &[] }
    }
}

impl CarriedNumbers<'_> {
    /// The control message of a push.
    pub(super) fn message(self) -> Vec<u8> {
        let setting = |(name, value): &(&str, f64)| SettingMessage { name: (*name).to_owned(), value: *value };
        let settings = self.settings.iter().map(setting).collect();
        PushMessage { rate: self.rate, settings, ..PushMessage::default() }.encode_to_vec()
    }
}

/// Rules of the parameters to which settings were sent, by their configuration.
#[derive(Default)]
pub(super) struct PreparedRules(BTreeMap<Vec<u8>, (Arc<Prepared>, Option<CatchUp>)>);

impl PreparedRules {
    /// Refuses numbers that servers would refuse for one of these parameters.
    pub(super) fn check<'a>(
        &mut self,
        declarations: impl Iterator<Item = &'a Declaration>,
        numbers: CarriedNumbers<'_>,
    ) -> Result<(), Failure> {
        match numbers.rate {
            Some(rate) if !rate.is_finite() || rate < 0.0 => {
                let text = format!("learning rate {rate}; expected a finite number that is not negative");
                return Err(Failure::call(text));
            }
            _ if numbers.settings.is_empty() => return Ok(()),
            _ => {}
        }
        let mut last: Option<&[u8]> = None;
        for declaration in declarations {
            // Most parameters have the configuration of the one before.
            if last.replace(&declaration.config) == Some(&declaration.config) {
                continue;
            }
            let (rule, catch_up) = self.rule(&declaration.config)?;
            let settings = numbers.settings.iter().copied();
            check_step_settings(&rule, declaration.element_type, catch_up, settings)
                .map_err(|failure| Failure::call(format!("parameter \"{}\": {failure}", declaration.name.as_str())))?;
        }
        Ok(())
    }

    fn rule(&mut self, config: &[u8]) -> Result<(Arc<Prepared>, Option<CatchUp>), Failure> {
        if let Some(known) = self.0.get(config) {
            return Ok(known.clone());
        }
        let ParameterConfig { rule, sparse, .. } = ParameterConfig::decode(config)?;
        let made = (Arc::new(Prepared::new(rule)?), sparse.map(|sparse| sparse.catch_up()));
        self.0.insert(config.to_vec(), made.clone());
        Ok(made)
    }
}
