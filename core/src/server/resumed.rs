//! Settings of a restarted server 0 beside those of the job in its checkpoint directory: each one takes effect, or
//! refuses the start. `docs/SETTINGS.md` has the table.

use prost::Message;

use super::options::CoordinatorOptions;
use crate::config::{Merge, Mode, ParameterConfig};
use crate::error::Failure;
use crate::ids::{Generation, TrainerId};
use crate::partition::CataloguePage;
use crate::wire::JobMessage;

/// An initialised job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CommittedJob {
    pub(super) generation: Generation,
    pub(super) pages: Vec<Vec<u8>>,
    pub(super) job: JobMessage,
    /// The configuration of parameters without their own; empty where an earlier version initialised the job.
    pub(super) default_config: Vec<u8>,
    /// The configuration that the operator had set when the job was initialised.
    pub(super) operator_config: Vec<u8>,
    /// The learning rate that the operator gives instead of that configuration's.
    pub(super) rate: Option<f64>,
}

impl CommittedJob {
    /// The job as a server 0 with these options goes on with it; `staying` are the trainers that have not departed.
    ///
    /// # Errors
    /// Names the setting, the job's value, and what to do.
    pub(super) fn resume(mut self, options: &CoordinatorOptions, staying: &[TrainerId]) -> Result<Self, Failure> {
        let (new, own) = (&options.job, self.job);
        let is_other_mode = (new.mode, new.staleness) != (own.mode, own.staleness);
        let kept = [
            ("mode", is_other_mode, mode_text(&own)),
            ("staleness", is_other_mode, mode_text(&own)),
            ("merge", new.merge != own.merge, merge_text(&own)),
            ("chunk_bytes", new.chunk_bytes != own.chunk_bytes, format!("chunks of {} bytes", own.chunk_bytes)),
        ];
        for (name, is_other, found) in kept {
            if let Some(shown) = options.given.0.get(name).filter(|_| is_other) {
                return Err(refused(shown, &format!("{found}, which stays")));
            }
        }
        if let Some(shown) = options.given.0.get("optimizer") {
            self.rate = self.other_rate(shown, &options.default_config)?;
        }
        if let Some(shown) = options.given.0.get("trainers").filter(|_| new.trainers != own.trainers) {
            self.check_trainers(shown, new.trainers, staying)?;
            self.job.trainers = new.trainers;
        }
        Ok(self)
    }

    /// The learning rate of another optimizer setting, if it differs from the job's in the rate alone.
    fn other_rate(&self, shown: &str, given: &[u8]) -> Result<Option<f64>, Failure> {
        if given == self.operator_config || given == self.default_config || self.default_config.is_empty() {
            return Ok(None);
        }
        let (given, own) = (ParameterConfig::decode(given)?, ParameterConfig::decode(&self.default_config)?);
        if let Some(rate) = given.rule.rate_instead_of(&own.rule) {
            tracing::info!("{shown}: gradients that bring no learning rate are applied with {rate} from now on");
            return Ok(Some(rate));
        }
        let found =
            format!("the optimizer `{}`, of which a restart changes a constant learning rate alone", own.to_text());
        Err(refused(shown, &found))
    }

    /// Refuses another number of trainers while a round may wait for one of those before.
    fn check_trainers(&self, shown: &str, trainers: u32, staying: &[TrainerId]) -> Result<(), Failure> {
        let before = self.job.trainers;
        if !staying.is_empty() {
            let names: Vec<String> = staying.iter().map(TrainerId::to_string).collect();
            let names = names.join(", ");
            return Err(Failure::Node(format!(
                "{shown}: this job has {before} trainers, and trainer {names} has not left it, so that a round may \
                 wait for a gradient; expected trainers = {before} until every trainer has left (paddle_leave), and \
                 then any number"
            )));
        }
        let pages = self.pages.iter().filter_map(|page| CataloguePage::decode(page.as_slice()).ok());
        for one in pages.flat_map(|page| page.declarations) {
            let backup = ParameterConfig::decode(&one.config).map_or(0, |config| config.backup_trainers);
            let found = match one.sender {
                Some(sender) if trainers <= sender => format!("gradients of trainer {sender} alone"),
                _ if 0 < backup && trainers <= backup => format!("{backup} backup trainers"),
                _ => continue,
            };
            let expected = "expected more trainers than that number";
            let name = String::from_utf8_lossy(&one.name);
            return Err(Failure::Node(format!("{shown}: parameter \"{name}\" of this job has {found}; {expected}")));
        }
        Ok(())
    }
}

fn refused(shown: &str, found: &str) -> Failure {
    Failure::Node(format!(
        "{shown}: the job in this checkpoint_dir was initialised with {found}; expected the same setting or none, or \
         another checkpoint_dir for a new job"
    ))
}

fn mode_text(job: &JobMessage) -> String {
    match Mode::from_numbers(job.mode, job.staleness) {
        Some(Mode::Sync) => "mode sync".to_owned(),
        Some(Mode::Async) => "mode async".to_owned(),
        Some(Mode::Staleness { bound }) => format!("mode bounded and staleness {bound}"),
        Some(Mode::Delta) => "mode delta".to_owned(),
        None => format!("mode {}", job.mode),
    }
}

fn merge_text(job: &JobMessage) -> String {
    match Merge::from_number(job.merge) {
        Some(Merge::Mean) => "merge mean".to_owned(),
        Some(Merge::Sum) => "merge sum".to_owned(),
        None => format!("merge {}", job.merge),
    }
}
