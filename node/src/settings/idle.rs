//! Settings without an effect: variables that name no setting, and settings that another one makes idle.
//!
//! Each is a warning and not an error: an environment or a file may be shared by servers and trainers of several jobs.

use std::time::Duration;

use pserver_core::config::{Merge, Mode, OptimizerSettings, ParameterConfig};
use pserver_core::server::OperatorSettings;
use pserver_core::wire::{Joined, Scheme};
use pserver_transport::verbs::DeviceChoice;

use super::{DeviceSetting, Settings};
use pserver_client::environment::unknown_variables;

/// An explicitly configured setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExplicitSetting {
    pub(super) name: &'static str,
    /// The setting as a person reads it: `trainers = 3 (from --trainers)`.
    pub(super) shown: String,
}

/// Why settings of RDMA have no effect.
const EXCLUDES_RDMA: &str = "the scheme before bind's host excludes RDMA; expected host:port without one, or verbs://";

impl Settings {
    /// Warnings for the operator: variables of `environment` that are no settings, and settings that were made and
    /// have no effect beside the others.
    #[must_use]
    pub fn warnings(&self, environment: &[(String, String)]) -> Vec<String> {
        let mut warnings = unknown_variables(environment);
        for (is_idle, names, why) in self.idle() {
            let made = self.made.iter().filter(|made| is_idle && names.contains(&made.name));
            warnings.extend(made.map(|made| format!("{} has no effect: {why}", made.shown)));
        }
        warnings
    }

    /// Settings without effect, each with its condition and reason.
    fn idle(&self) -> [(bool, &'static [&'static str], &'static str); 8] {
        let never_verbs = matches!(self.addresses.bind.scheme, Scheme::Tcp | Scheme::Shm | Scheme::Loopback);
        [
            (
                self.device.processor == DeviceSetting::Cpu,
                &["device_memory", "device_gradients", "device_least", "device_cache"],
                "the setting device is cpu",
            ),
            (self.storage.checkpoint_dir.is_none(), &["checkpoint_interval_seconds"], "there is no checkpoint_dir"),
            (
                self.job.mode == Mode::Delta && self.index == 0,
                &["optimizer"],
                "in mode delta trainers optimize, and servers add what they send",
            ),
            (self.addresses.http.is_none(), &["http_token_file"], "there is no http"),
            (self.job.mode != Mode::Sync, &["merge"], "merging is for rounds, which only mode sync has"),
            (
                never_verbs && matches!(self.addresses.rdma_device, DeviceChoice::Named(_)),
                &["rdma_device"],
                EXCLUDES_RDMA,
            ),
            (never_verbs, &["rdma_fabric"], EXCLUDES_RDMA),
            (
                self.admission.insecure && self.admission.token_file.is_some(),
                &["insecure"],
                "every client must show the token of token_file",
            ),
        ]
    }

    /// Warnings for the operator of a server other than 0: settings that are the whole job's, and which server 0 was
    /// given otherwise.
    pub(crate) fn overruled(&self, joined: &Joined) -> Vec<String> {
        let Some(job) = &joined.job else { return Vec::new() };
        let mode = Mode::from_numbers(job.mode, job.staleness);
        let merge = Merge::from_number(job.merge);
        let rule = OptimizerSettings::from_text(&self.job.optimizer).ok().map(|own| own.rule.unwrap_or_default());
        let own_config = rule.map(|rule| ParameterConfig::of(rule).encode());
        let optimizer = ParameterConfig::decode(&joined.default_config).map_or_else(|_| unknown(), |one| one.to_text());
        let is_other_mode = mode != Some(self.job.mode);
        let shown_mode = mode.map_or_else(unknown, shown_mode);
        let mut differing = vec![
            ("mode", is_other_mode, format!("the job's mode is {shown_mode}")),
            ("staleness", is_other_mode, format!("the job's mode is {shown_mode}")),
            (
                "merge",
                merge != Some(self.job.merge),
                format!("the job's merge is {}", merge.map_or_else(unknown, shown_merge)),
            ),
            ("trainers", self.job.trainers != job.trainers, format!("the job has {} trainers", job.trainers)),
            (
                "chunk_bytes",
                self.job.chunk_bytes != job.chunk_bytes,
                format!("the job's chunks have {} bytes", job.chunk_bytes),
            ),
            (
                "optimizer",
                own_config.as_ref() != Some(&joined.default_config),
                format!("the job's optimizer is `{optimizer}`"),
            ),
        ];
        if let Some(first) = &joined.first_server {
            let (lease, model_dir) = (Duration::from_millis(first.lease_millis), &first.model_dir);
            let is_other_folder = self.storage.model_dir.display().to_string() != *model_dir;
            let seconds = lease.as_secs_f64();
            differing.push(("lease_seconds", self.times.lease != lease, format!("its lease has {seconds} s")));
            differing.push(("model_dir", is_other_folder, format!("it saves models in {model_dir}")));
        }
        let warning = |(name, differs, job): (&str, bool, String)| {
            let made = self.made.iter().find(|made| differs && made.name == name)?;
            let index = self.index;
            Some(format!("{} has no effect on server {index}: server 0's setting counts, and {job}", made.shown))
        };
        differing.into_iter().filter_map(warning).collect()
    }

    /// The settings that were made and are not left to defaults.
    pub(crate) fn given(&self) -> OperatorSettings {
        OperatorSettings(self.made.iter().map(|made| (made.name, made.shown.clone())).collect())
    }

    /// How an error about a setting's object names the setting: `bind (from --bind)`.
    pub(crate) fn named(&self, name: &'static str) -> String {
        let origin = self.made.iter().find(|made| made.name == name).and_then(|made| made.shown.rsplit_once(" ("));
        origin.map_or_else(|| format!("{name} (default)"), |(_, origin)| format!("{name} ({origin}"))
    }
}

fn unknown() -> String {
    "unknown to this version".to_owned()
}

pub(crate) fn shown_mode(mode: Mode) -> String {
    match mode {
        Mode::Sync => "sync".to_owned(),
        Mode::Async => "async".to_owned(),
        Mode::Staleness { bound } => format!("bounded with staleness {bound}"),
        Mode::Delta => "delta".to_owned(),
    }
}

fn shown_merge(merge: Merge) -> String {
    match merge {
        Merge::Mean => "mean".to_owned(),
        Merge::Sum => "sum".to_owned(),
    }
}
