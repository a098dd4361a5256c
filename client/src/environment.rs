//! How a trainer finds its job: from a call's options, the environment, a file, or the defaults.
//!
//! | setting | environment, the first that is set and not empty (an empty `PSERVER_...` is an error) | default |
//! | --- | --- | --- |
//! | `coordinator`, server 0 | `PSERVER_COORDINATOR`, a [launcher's](crate::launchers) | port 7164 here |
//! | `trainer`, the rank | `PSERVER_TRAINER`, a launcher's | the lowest free one |
//! | `deadline` of a call | `PSERVER_DEADLINE` | `120s` |
//! | `server_absence`, how long a call waits for a server that refuses connections | `PSERVER_SERVER_ABSENCE` | `10s` |
//! | `reader`, who only pulls | `PSERVER_READER` | `no` |
//! | `poll`, how a call waits | `PSERVER_POLL` | `adaptive` |
//! | `token_file`, where the job's token is | `PSERVER_TOKEN_FILE` | none; on loopback, what the server has left |
//! | `encrypt`, what is encrypted | `PSERVER_ENCRYPT` | `off` |
//! | `certificate`, `private_key`, which this client shows | `PSERVER_CERTIFICATE`, `PSERVER_PRIVATE_KEY` | none |
//! | `certificate_authority`, which servers are verified by | `PSERVER_CERTIFICATE_AUTHORITY` | none |
//!
//! A call's options win over the environment, that over the file which `PSERVER_CONFIG` names (TOML), and that over
//! the defaults. A rank comes from a launcher's variable only where nobody said that the client is a reader. An address
//! that is only assumed, of the first node of a job, comes after the file.
//!
//! Not here: the server's settings (`settings`), what a client does with its options ([`crate`]).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{File, FileFormat, Source};
use pserver_core::error::Failure;
use pserver_core::limits::TRAINERS_MAX;
use pserver_core::text::{nearest, shown, suggestion};
use pserver_core::wire::Address;

use pserver_transport::network::{CHECKS_EXPECTED, JobToken, POLL_EXPECTED};
use pserver_transport::tls::{ENCRYPT_EXPECTED, EncryptPolicy, Encryption, EncryptionSettings};
use pserver_transport::verbs::{DEVICE_EXPECTED, FabricOption, FabricSettings, fabric_variables};

use crate::ClientOptions;
use crate::launchers::{LauncherValue, Launchers, PORT_DEFAULT};

/// The longest that a call may be allowed to take.
const DEADLINE_LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Source of a setting that is not configured.
const DEFAULT: &str = "default";
/// Before a setting's name in capitals: its variable in the environment.
const PREFIX: &str = "PSERVER_";
/// How the names of variables begin that only this project's tests read.
const OF_TESTS: [&str; 7] = ["REQUIRE", "SKIP_REPORT", "FULL", "LARGE", "SEED", "TEST_", "STANDIN"];
/// The settings of a server, in the order in which `pserver serve --print-config` prints them. A trainer does not read
/// them, and warns of no variable that is for servers.
pub const SERVER_SETTINGS: &[&str] = &[
    "index",
    "servers",
    "trainers",
    "shards",
    "threads",
    "bind",
    "advertise",
    "coordinator",
    "chunk_bytes",
    "mode",
    "staleness",
    "merge",
    "nonfinite",
    "optimizer",
    "checkpoint_dir",
    "checkpoint_interval_seconds",
    "journal",
    "accept_torn_tail",
    "directory_lock",
    "model_dir",
    "round_timeout_seconds",
    "lease_seconds",
    "rank_grace_seconds",
    "insecure",
    "token_file",
    "encrypt",
    "certificate",
    "private_key",
    "certificate_authority",
    "http",
    "http_token_file",
    "poll",
    "checks",
    "device",
    "rdma_device",
    "rdma_fabric",
    "device_memory",
    "device_gradients",
    "device_least",
    "device_cache",
    "log_level",
    "log_format",
    "ready_fd",
];
/// Every name that options and file know.
const NAMES: [&str; 14] = [
    "coordinator",
    "trainer",
    "deadline",
    "server_absence",
    "reader",
    "poll",
    "checks",
    "rdma_device",
    "rdma_fabric",
    "token_file",
    "encrypt",
    "certificate",
    "private_key",
    "certificate_authority",
];

/// Every setting of a client.
pub fn client_settings() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter()
}

/// The variable of the environment that makes a setting.
#[must_use]
pub fn variable_of(setting: &str) -> String {
    format!("{PREFIX}{}", setting.to_uppercase())
}

/// A warning for each variable `PSERVER_...` that is set and that neither servers nor trainers read.
#[must_use]
pub fn unknown_variables(environment: &[(String, String)]) -> Vec<String> {
    let servers = SERVER_SETTINGS.iter().map(|setting| variable_of(setting));
    let of_fabrics = fabric_variables().map(str::to_owned);
    let known: Vec<String> = servers.chain(variables()).chain(of_fabrics).collect();
    let is_unknown = |(name, text): &&(String, String)| {
        let rest = name.strip_prefix(PREFIX).filter(|_| !text.trim().is_empty() && !known.contains(name));
        rest.is_some_and(|rest| !OF_TESTS.iter().any(|start| rest.starts_with(start)))
    };
    let warning = |(name, _): &(String, String)| {
        // The common prefix must not count as similarity.
        let bare = |name: &'_ str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
        let names: Vec<String> = known.iter().map(|one| bare(one)).collect();
        let near = nearest(&bare(name), names.iter().map(String::as_str));
        let near = near.map_or_else(String::new, |near| format!("; the nearest is {PREFIX}{near}"));
        format!("{name} (in the environment) is no setting and has no effect{near}")
    };
    environment.iter().filter(is_unknown).map(warning).collect()
}

/// Every variable `PSERVER_...` that a client reads.
pub fn variables() -> impl Iterator<Item = String> {
    NAMES.into_iter().chain(["config", "verbose"]).map(|name| format!("PSERVER_{}", name.to_uppercase()))
}

/// The process's environment. Bytes that are no text are replaced, so that a setting with them is refused by name.
#[must_use]
pub fn of_process() -> Vec<(String, String)> {
    let text = |bytes: OsString| bytes.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Where settings are looked up; handed in, so that only the C boundary asks the process.
pub struct Environment<'a> {
    /// A variable of the environment.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// The text of a file.
    pub file: &'a dyn Fn(&str) -> Result<String, Failure>,
}

/// The options of a client, and the source of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedOptions {
    /// The checked options.
    pub options: ClientOptions,
    /// Each setting with its value and where that is from, for a person. Its display is a line.
    pub choices: Vec<SettingChoice>,
    /// Whether somebody wants to read them: `PSERVER_VERBOSE` is set, and not to `0`.
    pub is_verbose: bool,
}

/// A setting's text and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingChoice {
    /// The setting's name.
    pub setting: &'static str,
    /// Its value.
    pub text: String,
    /// The variable, file or `the options` that it is from, or `default`.
    pub origin: String,
}

/// The sources of settings: options, environment and file.
struct SettingSources<'a> {
    options: BTreeMap<String, String>,
    variable: &'a dyn Fn(&str) -> Option<String>,
    file: BTreeMap<String, String>,
    path: String,
}

/// Finds every setting. `options` is text such as `coordinator=tcp://node1:7164 trainer=3 deadline=30s`.
///
/// # Errors
/// Which setting is wrong, where it is from, what was found and what was expected.
///
/// ```
/// use pserver_client::environment::{Environment, find};
///
/// let variable = |name: &str| (name == "SLURM_PROCID").then(|| "3".to_owned());
/// let surroundings = Environment { variable: &variable, file: &|_| unreachable!("no file is named") };
/// let found = find("deadline=30s", &surroundings)?;
/// assert_eq!(found.options.trainer, Some(3));
/// assert_eq!(found.choices[1].to_string(), "trainer = 3 (from SLURM_PROCID)");
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
pub fn find(options: &str, surroundings: &Environment<'_>) -> Result<ResolvedOptions, Failure> {
    let places = SettingSources::open(options, surroundings)?;
    let reader = places.plain("reader", &["PSERVER_READER"], "no");
    let is_reader = reader.read(truth, "yes or no")?;
    let coordinator = places.coordinator()?;
    let address = Address::parse(&coordinator.text).map_err(|failure| coordinator.refused(&failure.to_string()))?;
    if address.port == 0 {
        return Err(coordinator.refused("port 0; expected the port of server 0"));
    }
    let (trainer, trainers) = places.trainer(is_reader)?;
    let deadline = places.plain("deadline", &["PSERVER_DEADLINE"], "120s");
    let absence = places.plain("server_absence", &["PSERVER_SERVER_ABSENCE"], "10s");
    let poll = places.plain("poll", &["PSERVER_POLL"], "adaptive");
    let checks = places.plain("checks", &["PSERVER_CHECKS"], "between-hosts");
    let rdma_device = places.plain("rdma_device", &["PSERVER_RDMA_DEVICE"], "auto");
    let rdma_fabric = places.plain("rdma_fabric", &["PSERVER_RDMA_FABRIC"], "none");
    let token_file = places.plain("token_file", &["PSERVER_TOKEN_FILE"], "none");
    let encrypted = EncryptionChoices {
        policy: places.plain("encrypt", &["PSERVER_ENCRYPT"], "off"),
        certificate: places.plain("certificate", &["PSERVER_CERTIFICATE"], "none"),
        private_key: places.plain("private_key", &["PSERVER_PRIVATE_KEY"], "none"),
        authority: places.plain("certificate_authority", &["PSERVER_CERTIFICATE_AUTHORITY"], "none"),
    };
    let options = ClientOptions {
        coordinator: address,
        is_coordinator_default: coordinator.origin == DEFAULT,
        trainer: trainer.as_ref().map(|claim| claim.read(rank, &rank_expected())).transpose()?,
        is_reader,
        deadline: deadline.read(duration, "a time such as 500ms, 30s, 10m or 2h, at most 168h")?,
        server_absence: absence.read(time, "a time such as 0s, 30s, 10m or 2h, at most 168h")?,
        poll: poll.read(|text| text.parse().ok(), POLL_EXPECTED)?,
        checks: checks.read(|text| text.parse().ok(), CHECKS_EXPECTED)?,
        rdma_device: rdma_device.read(|text| text.parse().ok(), DEVICE_EXPECTED)?,
        fabric: fabric(&rdma_fabric, surroundings)?,
        token: token(&token_file, surroundings)?,
        encryption: encryption(&encrypted)?,
    };
    if let (Some(rank), Some(size)) = (&trainer, &trainers) {
        check_below(rank, size)?;
    }
    let lowest = || SettingChoice::new("trainer", "the lowest free rank", DEFAULT);
    let rank = trainer.unwrap_or_else(lowest);
    let plain = [deadline, absence, reader, poll, checks, rdma_device, rdma_fabric, token_file];
    let choices = [coordinator, rank].into_iter().chain(trainers).chain(plain).chain(encrypted.into_list()).collect();
    Ok(ResolvedOptions {
        options,
        choices,
        is_verbose: places.variable("PSERVER_VERBOSE").is_some_and(|text| text != "0"),
    })
}

/// The settings of RDMA fabrics: of the option, then of the variables.
fn fabric(choice: &SettingChoice, surroundings: &Environment<'_>) -> Result<FabricSettings, Failure> {
    let text = if choice.origin == DEFAULT { "" } else { &choice.text };
    let option = FabricOption::new(text, &format!("rdma_fabric of {}", choice.origin));
    let option = option.or_else(|expected| choice.read(|_| None, &expected))?;
    Ok(FabricSettings::find(&option, surroundings.variable).map_err(Failure::call)?.0)
}

/// The token in the file that is named, if one is.
fn token(claim: &SettingChoice, surroundings: &Environment<'_>) -> Result<Option<JobToken>, Failure> {
    if claim.origin == DEFAULT {
        return Ok(None);
    }
    let secret = (surroundings.file)(&claim.text).map_err(|failure| claim.refused(&failure.to_string()))?;
    let token = JobToken::of_file(Path::new(&claim.text), secret.as_bytes());
    token.map(Some).map_err(|failure| claim.refused(&failure.to_string()))
}

/// Settings of encryption, before they are checked.
struct EncryptionChoices {
    policy: SettingChoice,
    certificate: SettingChoice,
    private_key: SettingChoice,
    authority: SettingChoice,
}

impl EncryptionChoices {
    fn into_list(self) -> [SettingChoice; 4] {
        [self.policy, self.certificate, self.private_key, self.authority]
    }
}

/// Encryption with the files that are named. A file without it would be a mistake that leaves bytes readable.
fn encryption(choices: &EncryptionChoices) -> Result<Option<Encryption>, Failure> {
    let policy = choices.policy.read(|text| text.parse().ok(), ENCRYPT_EXPECTED)?;
    let files = [&choices.certificate, &choices.private_key, &choices.authority];
    let named = files.into_iter().find(|choice| choice.origin != DEFAULT);
    if let Some(named) = named.filter(|_| policy == EncryptPolicy::Off) {
        return Err(named.refused("encrypt is off; expected encrypt tcp or required with it"));
    }
    let path = |choice: &SettingChoice| (choice.origin != DEFAULT).then(|| PathBuf::from(&choice.text));
    Encryption::of_client(&EncryptionSettings {
        policy,
        certificate: path(&choices.certificate),
        private_key: path(&choices.private_key),
        authority: path(&choices.authority),
    })
}

impl<'a> SettingSources<'a> {
    fn open(options: &str, surroundings: &Environment<'a>) -> Result<Self, Failure> {
        let mut places = Self {
            options: read_options(options)?,
            variable: surroundings.variable,
            file: BTreeMap::new(),
            path: String::new(),
        };
        for name in variables() {
            if (places.variable)(&name).is_some_and(|text| text.trim().is_empty()) {
                let text = format!("{name} is set and empty; expected a value, or no such variable (unset {name})");
                return Err(Failure::call(text));
            }
        }
        if let Some(path) = places.variable("PSERVER_CONFIG") {
            let text = (surroundings.file)(&path);
            let text = text.map_err(|failure| Failure::call(format!("{failure} (named by PSERVER_CONFIG)")))?;
            places.file = read_file(&path, &text)?;
            places.path = path;
        }
        Ok(places)
    }

    /// A variable that is set and not empty.
    fn variable(&self, name: &str) -> Option<String> {
        (self.variable)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn option(&self, setting: &'static str) -> Option<SettingChoice> {
        let text = self.options.get(setting)?.clone();
        Some(SettingChoice { setting, text, origin: "the options".to_owned() })
    }

    fn first_variable(&self, setting: &'static str, names: &[&str]) -> Option<SettingChoice> {
        let named =
            |name: &&str| Some(SettingChoice { setting, text: self.variable(name)?, origin: (*name).to_owned() });
        names.iter().find_map(named)
    }

    fn in_file(&self, setting: &'static str) -> Option<SettingChoice> {
        let text = self.file.get(setting)?.clone();
        Some(SettingChoice { setting, text, origin: self.path.clone() })
    }

    fn plain(&self, setting: &'static str, variables: &[&str], default: &str) -> SettingChoice {
        let said = self.option(setting).or_else(|| self.first_variable(setting, variables));
        said.or_else(|| self.in_file(setting)).unwrap_or_else(|| SettingChoice {
            setting,
            text: default.to_owned(),
            origin: DEFAULT.to_owned(),
        })
    }

    /// The address of server 0: said, in the file, or assumed.
    fn coordinator(&self) -> Result<SettingChoice, Failure> {
        let (setting, launchers) = ("coordinator", Launchers::new(self.variable));
        let of_launcher = |found: LauncherValue| SettingChoice { setting, text: found.text, origin: found.origin };
        let said = self.option(setting).or_else(|| launchers.address().map(of_launcher));
        if let Some(said) = said.or_else(|| self.in_file(setting)) {
            return Ok(said);
        }
        let default = || SettingChoice::new(setting, &format!("127.0.0.1:{PORT_DEFAULT}"), DEFAULT);
        Ok(launchers.assumed_address()?.map_or_else(default, of_launcher))
    }

    /// The rank, and the number of trainers that it is one of.
    fn trainer(&self, is_reader: bool) -> Result<(Option<SettingChoice>, Option<SettingChoice>), Failure> {
        let launchers = Launchers::new(self.variable);
        let option = self.option("trainer");
        let launched = if option.is_some() || is_reader { None } else { launchers.rank()? };
        let trainers = launchers.size(launched.as_ref()).filter(|_| !is_reader);
        let choice = |setting, found: LauncherValue| SettingChoice { setting, text: found.text, origin: found.origin };
        let rank = option.or_else(|| launched.map(|found| choice("trainer", found)));
        let rank = rank.or_else(|| self.in_file("trainer").filter(|_| !is_reader));
        Ok((rank, trainers.map(|found| choice("trainers", found))))
    }
}

/// Refuses a rank beyond the number of trainers that comes with it.
fn check_below(rank: &SettingChoice, size: &SettingChoice) -> Result<(), Failure> {
    let numbers = rank.text.parse::<u32>().ok().zip(size.text.parse::<u32>().ok());
    if numbers.is_some_and(|(rank, size)| size <= rank) {
        let (text, origin) = (shown(&size.text), &size.origin);
        return Err(rank.refused(&format!("expected a rank below trainers, which (from {origin}) is \"{text}\"")));
    }
    Ok(())
}

impl SettingChoice {
    fn new(setting: &'static str, text: &str, origin: &str) -> Self {
        Self { setting, text: text.to_owned(), origin: origin.to_owned() }
    }

    fn read<T>(&self, parse: impl Fn(&str) -> Option<T>, expected: &str) -> Result<T, Failure> {
        parse(&self.text).ok_or_else(|| self.refused(&format!("expected {expected}")))
    }

    fn refused(&self, why: &str) -> Failure {
        Failure::call(format!("{} (from {}) is \"{}\": {why}", self.setting, self.origin, shown(&self.text)))
    }
}

impl fmt::Display for SettingChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, text, origin } = self;
        if origin == DEFAULT {
            write!(formatter, "{setting} = {text} (default)")
        } else {
            write!(formatter, "{setting} = {text} (from {origin})")
        }
    }
}

fn read_options(options: &str) -> Result<BTreeMap<String, String>, Failure> {
    let mut read = BTreeMap::new();
    for word in options.split_whitespace() {
        let expected = || {
            let names = NAMES.join(", ");
            let near = word.split_once('=').filter(|(name, _)| !NAMES.contains(name));
            let near = near.map_or_else(String::new, |(name, _)| suggestion(name, NAMES));
            Failure::call(format!("options: \"{}\"; expected name=value with a name of {names}{near}", shown(word)))
        };
        let (name, value) = word.split_once('=').ok_or_else(expected)?;
        if !NAMES.contains(&name) || value.is_empty() {
            return Err(expected());
        }
        if read.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(Failure::call(format!("options: {name} is given twice; expected once")));
        }
    }
    Ok(read)
}

/// The client's settings of a file; others in it are the server's.
fn read_file(path: &str, text: &str) -> Result<BTreeMap<String, String>, Failure> {
    let wrong = |why: String| Failure::call(format!("the file {path} (from PSERVER_CONFIG): {why}"));
    let values = File::from_str(text, FileFormat::Toml).collect().map_err(|error| wrong(error.to_string()))?;
    let mut read = BTreeMap::new();
    for name in NAMES {
        let Some(value) = values.get(name) else { continue };
        let value = value.clone().into_string().map_err(|error| wrong(format!("{name}: {error}")))?;
        read.insert(name.to_owned(), value);
    }
    Ok(read)
}

fn rank(text: &str) -> Option<u32> {
    text.parse().ok().filter(|rank| *rank < TRAINERS_MAX)
}

fn rank_expected() -> String {
    format!("a whole number from 0 to {}", TRAINERS_MAX - 1)
}

fn truth(text: &str) -> Option<bool> {
    match text {
        "yes" | "true" | "1" => Some(true),
        "no" | "false" | "0" => Some(false),
        _ => None,
    }
}

/// A time that is not nothing.
fn duration(text: &str) -> Option<Duration> {
    time(text).filter(|time| !time.is_zero())
}

fn time(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let millis_per_unit: u64 = match &text[digits.len()..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return None,
    };
    let millis = digits.parse::<u64>().ok()?.checked_mul(millis_per_unit)?;
    Some(Duration::from_millis(millis)).filter(|time| *time <= DEADLINE_LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Variables as `NAME=value` words; `file:` is the text of the file that `PSERVER_CONFIG` names.
    fn check(options: &str, variables: &[&str], file: &str, expected: Result<&str, &str>) {
        let variable = |name: &str| {
            variables.iter().find_map(|one| one.split_once('=').filter(|(key, _)| *key == name)).map(|one| one.1.into())
        };
        let read = |_: &str| Ok(file.to_owned());
        let found = find(options, &Environment { variable: &variable, file: &read });
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                let all = found.choices.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                assert!(all.contains(expected), "{options} {variables:?}: {all}; expected {expected}");
            }
            (Err(failure), Err(expected)) => {
                let text = failure.to_string();
                assert!(text.contains(expected), "{options} {variables:?}: {text}; expected {expected}");
            }
            (found, expected) => panic!("{options} {variables:?}: {found:?}; expected {expected:?}"),
        }
    }

    #[test]
    fn a_client_without_any_setting_looks_for_a_server_on_its_own_machine() {
        let expected = "coordinator = 127.0.0.1:7164 (default); trainer = the lowest free rank (default); \
                        deadline = 120s (default); server_absence = 10s (default); reader = no (default); \
                        poll = adaptive (default); \
                        checks = between-hosts (default); rdma_device = auto (default); \
                        rdma_fabric = none (default); token_file = none (default)";
        check("", &[], "", Ok(expected));
    }

    #[test]
    fn settings_of_fabrics_are_options_too() {
        let variable = "PSERVER_RDMA_TIMEOUT=14";
        check(
            "rdma_fabric=timeout=20,traffic_class=106",
            &[variable],
            "",
            Ok("rdma_fabric = timeout=20,traffic_class=106"),
        );
        let expected = "rdma_fabric of the options: timeout is \"99\"; expected a number from 1 to 31";
        check("rdma_fabric=timeout=99", &[variable], "", Err(expected));
        let expected = "rdma_fabric (from PSERVER_RDMA_FABRIC) is \"tmeout=2\": expected";
        check("", &["PSERVER_RDMA_FABRIC=tmeout=2"], "", Err(expected));
    }

    #[test]
    fn options_win_over_the_environment_and_that_over_the_file() {
        let file = "coordinator = \"tcp://f:1\"\ntrainer = 5\ndeadline = \"5s\"\ntrainers = 9\n";
        let config = "PSERVER_CONFIG=job.toml";
        check("", &[config], file, Ok("coordinator = tcp://f:1 (from job.toml); trainer = 5 (from job.toml)"));
        check("", &[config, "PSERVER_TRAINER=4"], file, Ok("trainer = 4 (from PSERVER_TRAINER)"));
        let device = "PSERVER_RDMA_DEVICE=mlx5_0:1";
        check("", &[device], "", Ok("rdma_device = mlx5_0:1 (from PSERVER_RDMA_DEVICE)"));
        check("rdma_device=none", &[device], "", Ok("rdma_device = none (from the options)"));
        check("rdma_device=mlx5_0:x", &[], "", Err("NAME:PORT:GID"));
        let token = "PSERVER_TOKEN_FILE=/run/token";
        let secret = "0123456789abcdef\n";
        check("", &[token], secret, Ok("token_file = /run/token (from PSERVER_TOKEN_FILE)"));
        check("token_file=t", &[token], secret, Ok("token_file = t (from the options)"));
        let short = "token_file (from the options) is \"t\": a token of 5 bytes; expected 16 to 1024";
        check("token_file=t", &[], "short", Err(short));
        check("", &[config, "PMI_RANK=4"], file, Ok("trainer = 4 (from PMI_RANK)"));
        check("trainer=3", &[config, "PSERVER_TRAINER=4"], file, Ok("trainer = 3 (from the options)"));
        check("", &[config, "PSERVER_DEADLINE=6s"], file, Ok("deadline = 6s (from PSERVER_DEADLINE)"));
        check("server_absence=0s", &["PSERVER_SERVER_ABSENCE=6s"], "", Ok("server_absence = 0s (from the options)"));
        check("", &["PSERVER_SERVER_ABSENCE=6s"], "", Ok("server_absence = 6s (from PSERVER_SERVER_ABSENCE)"));
        check("deadline=7m", &[config, "PSERVER_DEADLINE=6s"], file, Ok("deadline = 7m (from the options)"));
        check("", &[config, "PSERVER_COORDINATOR=e:2"], file, Ok("coordinator = e:2 (from PSERVER_COORDINATOR)"));
    }

    #[test]
    fn ranks_come_from_launchers_in_one_order() {
        let all = [
            "PSERVER_TRAINER=1",
            "PADDLE_TRAINER_ID=2",
            "DMLC_WORKER_ID=3",
            "DMLC_RANK=4",
            "RANK=5",
            "OMPI_COMM_WORLD_RANK=6",
            "PMI_RANK=7",
            "PMIX_RANK=8",
            "SLURM_PROCID=9",
            "JOB_COMPLETION_INDEX=10",
        ];
        for (first, variable) in all.iter().enumerate() {
            let (name, rank) = variable.split_once('=').expect("it has a value");
            check("", &all[first..], "", Ok(&format!("trainer = {rank} (from {name})")));
        }
        check("", &["PSERVER_TRAINER=", "RANK=3"], "", Err("PSERVER_TRAINER is set and empty; expected a value"));
        check("", &["RANK=", "SLURM_PROCID=3"], "", Ok("trainer = 3 (from SLURM_PROCID)"));
        check("reader=yes", &["RANK=3"], "", Ok("trainer = the lowest free rank"));
    }

    #[test]
    fn contradicting_ranks_are_refused_by_both_names() {
        let slurm = ["SLURM_PROCID=2", "SLURM_NTASKS=4", "SLURM_STEP_ID=0"];
        check("", &slurm, "", Ok("trainer = 2 (from SLURM_PROCID); trainers = 4 (from SLURM_NTASKS)"));
        // mpirun numbers what it starts, within a batch script or within the step of its own daemons.
        let inner = ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4"];
        let both = [&inner[..], &slurm].concat();
        let text =
            "trainer (from OMPI_COMM_WORLD_RANK) is \"3\" and (from SLURM_PROCID) \"2\", each of 4: expected one";
        check("", &both, "", Err(text));
        let ours = "trainer = 3 (from OMPI_COMM_WORLD_RANK); trainers = 4";
        check("", &both[..4], "", Ok(ours));
        check("", &[&inner[..], &["SLURM_PROCID=2", "SLURM_NTASKS=3", "SLURM_STEP_ID=0"]].concat(), "", Ok(ours));
        check("", &[&both[..], &["PSERVER_TRAINER=1"]].concat(), "", Ok("trainer = 1 (from PSERVER_TRAINER)"));
        check("trainer=1", &both, "", Ok("trainer = 1 (from the options)"));
        let beyond = ["SLURM_PROCID=4", "SLURM_NTASKS=4"];
        let text =
            "trainer (from SLURM_PROCID) is \"4\": expected a rank below trainers, which (from SLURM_NTASKS) is \"4\"";
        check("", &beyond, "", Err(text));
        check("", &["RANK=2", "PSERVER_TRAINERS=2"], "", Err("which (from PSERVER_TRAINERS) is \"2\""));
        check("trainer=2", &["PSERVER_TRAINERS=2"], "", Err("trainer (from the options) is \"2\""));
        check("", &["DMLC_RANK=0", "DMLC_ROLE=server"], "", Err("DMLC_ROLE is \"server\"; expected worker"));
        check("", &["DMLC_RANK=0", "DMLC_ROLE=worker", "DMLC_NUM_WORKER=2"], "", Ok("trainers = 2"));
    }

    #[test]
    fn server_0_is_found_by_the_variables_of_other_launchers() {
        let paddle = ["PADDLE_PSERVER_IPS=a,b", "PADDLE_PSERVER_PORT=6", "DMLC_PS_ROOT_URI=d"];
        check("", &paddle, "", Ok("coordinator = a:6 (from PADDLE_PSERVER_IPS and PADDLE_PSERVER_PORT)"));
        check("", &["PADDLE_PSERVER_IPS=a:9,b:8"], "", Ok("coordinator = a:9 (from PADDLE_PSERVER_IPS)"));
        check("", &["PADDLE_PSERVER_IPS=[::1],b"], "", Ok("coordinator = [::1]:7164 (from PADDLE_PSERVER_IPS)"));
        let dmlc = ["DMLC_PS_ROOT_URI=d", "DMLC_PS_ROOT_PORT=9"];
        check("", &dmlc, "", Ok("coordinator = d:9 (from DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT)"));
        let torchrun = ["MASTER_ADDR=m", "MASTER_PORT=1", "SLURM_JOB_NODELIST=n[01-03,7],gpu-1"];
        check("", &torchrun, "", Ok("coordinator = m:7164 (from MASTER_ADDR)"));
        check("", &["MASTER_ADDR=::1"], "", Ok("coordinator = [::1]:7164 (from MASTER_ADDR)"));
        check("", &torchrun[2..], "", Ok("coordinator = n01:7164 (from SLURM_JOB_NODELIST)"));
        let one = "coordinator = 127.0.0.1:7164 (from SLURM_JOB_NODELIST, of one node)";
        check("", &["SLURM_JOB_NODELIST=n7"], "", Ok(one));
        let file = ["PSERVER_CONFIG=job.toml", "SLURM_JOB_NODELIST=n["];
        check("", &file, "coordinator = \"f:1\"", Ok("coordinator = f:1 (from job.toml)"));
        check("", &["SLURM_JOB_NODELIST=n["], "", Err("SLURM_JOB_NODELIST is \"n[\": the end within brackets"));
    }

    #[test]
    fn a_wrong_setting_is_named_with_its_source_and_the_expected_value() {
        check(
            "server_absence=ten",
            &[],
            "",
            Err("server_absence (from the options) is \"ten\": expected a time such as"),
        );
        check("", &["RANK=first"], "", Err("trainer (from RANK) is \"first\": expected a whole number from 0 to 4095"));
        check("", &["RANK=-1"], "", Err("trainer (from RANK) is \"-1\""));
        check("trainer=4096", &[], "", Err("trainer (from the options) is \"4096\""));
        check("deadline=30", &[], "", Err("deadline (from the options) is \"30\": expected a time such as"));
        check("deadline=0s", &[], "", Err("deadline (from the options) is \"0s\""));
        check("deadline=169h", &[], "", Err("at most 168h"));
        check("deadline=99999999999999999999h", &[], "", Err("at most 168h"));
        check("", &["PSERVER_COORDINATOR=x"], "", Err("coordinator (from PSERVER_COORDINATOR) is \"x\""));
        check("coordinator=a:0", &[], "", Err("port 0"));
        check("", &["PSERVER_READER=maybe"], "", Err("reader (from PSERVER_READER) is \"maybe\": expected yes or no"));
        check("trainr=1", &[], "", Err("; the nearest is trainer"));
        let absent = |_: &str| Err(Failure::call("the file t: No such file"));
        let variable = |name: &str| (name == "PSERVER_TOKEN_FILE").then(|| "t".to_owned());
        let failure = find("", &Environment { variable: &variable, file: &absent }).expect_err("there is no such file");
        assert_eq!(failure.to_string(), "token_file (from PSERVER_TOKEN_FILE) is \"t\": the file t: No such file");
        check("colour=red", &[], "", Err("options: \"colour=red\"; expected name=value"));
        check("trainer", &[], "", Err("options: \"trainer\"; expected name=value"));
        check("trainer=", &[], "", Err("options: \"trainer=\""));
        check("trainer=1 trainer=2", &[], "", Err("trainer is given twice"));
        check("", &["PSERVER_CONFIG=job.toml"], "trainer = ", Err("the file job.toml (from PSERVER_CONFIG)"));
    }
}
