//! How a trainer finds its job: from a call's options, the environment, a file, or the defaults.
//!
//! | setting | environment, the first that is set and not empty | default |
//! | --- | --- | --- |
//! | `coordinator`, server 0 | `PSERVER_COORDINATOR`, `PADDLE_PSERVER_IPS`, `DMLC_PS_ROOT_URI` | port 7164 here |
//! | `trainer`, the rank | `PSERVER_TRAINER`, `PADDLE_TRAINER_ID`, a launcher's | the lowest free one |
//! | `deadline` of a call | `PSERVER_DEADLINE` | `120s` |
//! | `reader`, who only pulls | `PSERVER_READER` | `no` |
//! | `poll`, how a call waits | `PSERVER_POLL` | `adaptive` |
//! | `token_file`, where the job's token is | `PSERVER_TOKEN_FILE` | none |
//!
//! A call's options win over the environment, that over the file which `PSERVER_CONFIG` names (TOML), and that over
//! the defaults. A rank comes from a launcher's variable only where nobody said that the client is a reader.
//!
//! Not here: the server's settings (`settings`), what a client does with its options ([`crate::client`]).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use config::{File, FileFormat, Source};
use pserver_core::error::Failure;
use pserver_core::limits::TRAINERS_MAX;
use pserver_core::wire::Address;

use pserver_transport::network::{CHECKS_EXPECTED, POLL_EXPECTED, Token};
use pserver_transport::verbs::DEVICE_EXPECTED;

use crate::client::ClientOptions;

/// The port of server 0 where nobody says another: the first that Paddle's servers took.
const PORT_DEFAULT: &str = "7164";
/// The longest that a call may be allowed to take.
const DEADLINE_LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Where a setting is from that nobody made.
const DEFAULT: &str = "default";
/// Every name that options and file know.
const NAMES: [&str; 8] =
    ["coordinator", "trainer", "deadline", "reader", "poll", "checks", "rdma_device", "token_file"];

/// Where settings are looked up; handed in, so that only the C boundary asks the process.
pub struct Surroundings<'a> {
    /// A variable of the environment.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// The text of a file.
    pub file: &'a dyn Fn(&str) -> Result<String, Failure>,
}

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The checked options.
    pub options: ClientOptions,
    /// One line per setting for a person: its name, its value and where that is from.
    pub choices: Vec<String>,
    /// Whether somebody wants to read them: `PSERVER_VERBOSE` is set, and not to `0`.
    pub is_verbose: bool,
}

/// A setting's text and where it is from.
struct Claim {
    setting: &'static str,
    text: String,
    origin: String,
}

/// The three places before the defaults.
struct Places<'a> {
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
/// use paddle_pserver::environment::{Surroundings, find};
///
/// let variable = |name: &str| (name == "SLURM_PROCID").then(|| "3".to_owned());
/// let surroundings = Surroundings { variable: &variable, file: &|_| unreachable!("no file is named") };
/// let found = find("deadline=30s", &surroundings)?;
/// assert_eq!(found.options.trainer, Some(3));
/// assert_eq!(found.choices[1], "trainer = 3 (from SLURM_PROCID)");
/// # Ok::<(), pserver_core::error::Failure>(())
/// ```
pub fn find(options: &str, surroundings: &Surroundings<'_>) -> Result<Found, Failure> {
    let places = Places::open(options, surroundings)?;
    let reader = places.plain("reader", &["PSERVER_READER"], "no");
    let is_reader = reader.read(truth, "yes or no")?;
    let coordinator = places.coordinator();
    let address = Address::parse(&coordinator.text).map_err(|failure| coordinator.refused(&failure.to_string()))?;
    if address.port == 0 {
        return Err(coordinator.refused("port 0; expected the port of server 0"));
    }
    let trainer = places.trainer(is_reader);
    let deadline = places.plain("deadline", &["PSERVER_DEADLINE"], "120s");
    let poll = places.plain("poll", &["PSERVER_POLL"], "adaptive");
    let checks = places.plain("checks", &["PSERVER_CHECKS"], "between-hosts");
    let rdma_device = places.plain("rdma_device", &["PSERVER_RDMA_DEVICE"], "auto");
    let token_file = places.plain("token_file", &["PSERVER_TOKEN_FILE"], "none");
    let options = ClientOptions {
        coordinator: address,
        trainer: trainer.as_ref().map(|claim| claim.read(rank, &rank_expected())).transpose()?,
        is_reader,
        deadline: deadline.read(duration, "a time such as 500ms, 30s, 10m or 2h, at most 168h")?,
        poll: poll.read(|text| text.parse().ok(), POLL_EXPECTED)?,
        checks: checks.read(|text| text.parse().ok(), CHECKS_EXPECTED)?,
        rdma_device: rdma_device.read(|text| text.parse().ok(), DEVICE_EXPECTED)?,
        token: token(&token_file, surroundings)?,
    };
    let rank = trainer.map_or_else(|| "trainer = the lowest free rank (default)".to_owned(), |claim| claim.to_string());
    let plain = [&deadline, &reader, &poll, &checks, &rdma_device, &token_file].map(ToString::to_string);
    let choices = [coordinator.to_string(), rank].into_iter().chain(plain).collect();
    Ok(Found { options, choices, is_verbose: places.variable("PSERVER_VERBOSE").is_some_and(|text| text != "0") })
}

/// The token in the file that is named, if one is.
fn token(claim: &Claim, surroundings: &Surroundings<'_>) -> Result<Option<Token>, Failure> {
    if claim.origin == DEFAULT {
        return Ok(None);
    }
    let secret = (surroundings.file)(&claim.text)?;
    Token::new(secret.as_bytes()).map(Some).map_err(|failure| claim.refused(&failure.to_string()))
}

impl<'a> Places<'a> {
    fn open(options: &str, surroundings: &Surroundings<'a>) -> Result<Self, Failure> {
        let mut places = Self {
            options: read_options(options)?,
            variable: surroundings.variable,
            file: BTreeMap::new(),
            path: String::new(),
        };
        if let Some(path) = places.variable("PSERVER_CONFIG") {
            places.file = read_file(&path, &(surroundings.file)(&path)?)?;
            places.path = path;
        }
        Ok(places)
    }

    /// A variable that is set and not empty.
    fn variable(&self, name: &str) -> Option<String> {
        (self.variable)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn option(&self, setting: &'static str) -> Option<Claim> {
        let text = self.options.get(setting)?.clone();
        Some(Claim { setting, text, origin: "the options".to_owned() })
    }

    fn first_variable(&self, setting: &'static str, names: &[&str]) -> Option<Claim> {
        let named = |name: &&str| Some(Claim { setting, text: self.variable(name)?, origin: (*name).to_owned() });
        names.iter().find_map(named)
    }

    fn in_file(&self, setting: &'static str) -> Option<Claim> {
        let text = self.file.get(setting)?.clone();
        Some(Claim { setting, text, origin: self.path.clone() })
    }

    fn plain(&self, setting: &'static str, variables: &[&str], default: &str) -> Claim {
        let said = self.option(setting).or_else(|| self.first_variable(setting, variables));
        said.or_else(|| self.in_file(setting)).unwrap_or_else(|| Claim {
            setting,
            text: default.to_owned(),
            origin: DEFAULT.to_owned(),
        })
    }

    fn coordinator(&self) -> Claim {
        let setting = "coordinator";
        let ours = self.option(setting).or_else(|| self.first_variable(setting, &["PSERVER_COORDINATOR"]));
        ours.or_else(|| self.host_and_port("PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT"))
            .or_else(|| self.host_and_port("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"))
            .unwrap_or_else(|| self.plain(setting, &[], &format!("127.0.0.1:{PORT_DEFAULT}")))
    }

    /// The first host of a list, which is server 0, with the port from another variable unless it has its own.
    fn host_and_port(&self, hosts: &str, port: &str) -> Option<Claim> {
        let list = self.variable(hosts)?;
        let host = list.split(',').next().unwrap_or_default().trim();
        let setting = "coordinator";
        if host.contains(':') && !host.ends_with(']') {
            return Some(Claim { setting, text: host.to_owned(), origin: hosts.to_owned() });
        }
        let (number, origin) = match self.variable(port) {
            Some(number) => (number, format!("{hosts} and {port}")),
            None => (PORT_DEFAULT.to_owned(), hosts.to_owned()),
        };
        Some(Claim { setting, text: format!("{host}:{number}"), origin })
    }

    fn trainer(&self, is_reader: bool) -> Option<Claim> {
        const LAUNCHERS: [&str; 6] =
            ["PSERVER_TRAINER", "PADDLE_TRAINER_ID", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"];
        let launched = || self.first_variable("trainer", &LAUNCHERS).filter(|_| !is_reader);
        self.option("trainer").or_else(launched).or_else(|| self.in_file("trainer").filter(|_| !is_reader))
    }
}

impl Claim {
    fn read<T>(&self, parse: impl Fn(&str) -> Option<T>, expected: &str) -> Result<T, Failure> {
        parse(&self.text).ok_or_else(|| self.refused(&format!("expected {expected}")))
    }

    fn refused(&self, why: &str) -> Failure {
        Failure::call(format!("{} (from {}) is \"{}\": {why}", self.setting, self.origin, shown(&self.text)))
    }
}

impl fmt::Display for Claim {
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
            Failure::call(format!("options: \"{}\"; expected name=value with a name of {names}", shown(word)))
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

fn duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let millis_per_unit: u64 = match &text[digits.len()..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return None,
    };
    let millis = digits.parse::<u64>().ok()?.checked_mul(millis_per_unit)?;
    Some(Duration::from_millis(millis)).filter(|time| !time.is_zero() && *time <= DEADLINE_LONGEST)
}

/// The beginning of somebody's text, fit for a line.
fn shown(text: &str) -> String {
    text.chars().take(100).map(|letter| if letter.is_control() { '?' } else { letter }).collect()
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
        let found = find(options, &Surroundings { variable: &variable, file: &read });
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                let all = found.choices.join("; ");
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
                        deadline = 120s (default); reader = no (default); poll = adaptive (default); \
                        checks = between-hosts (default); rdma_device = auto (default); token_file = none (default)";
        check("", &[], "", Ok(expected));
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
        check("deadline=7m", &[config, "PSERVER_DEADLINE=6s"], file, Ok("deadline = 7m (from the options)"));
        check("", &[config, "PSERVER_COORDINATOR=e:2"], file, Ok("coordinator = e:2 (from PSERVER_COORDINATOR)"));
    }

    #[test]
    fn ranks_come_from_launchers_in_one_order() {
        let all = [
            "PSERVER_TRAINER=1",
            "PADDLE_TRAINER_ID=2",
            "RANK=3",
            "SLURM_PROCID=4",
            "OMPI_COMM_WORLD_RANK=5",
            "PMI_RANK=6",
        ];
        for (first, variable) in all.iter().enumerate() {
            let (name, rank) = variable.split_once('=').expect("it has a value");
            check("", &all[first..], "", Ok(&format!("trainer = {rank} (from {name})")));
        }
        check("", &["PSERVER_TRAINER=", "RANK=3"], "", Ok("trainer = 3 (from RANK)"));
        check("reader=yes", &["RANK=3"], "", Ok("trainer = the lowest free rank"));
    }

    #[test]
    fn server_0_is_found_the_way_other_launchers_name_it() {
        let paddle = ["PADDLE_PSERVER_IPS=a,b", "PADDLE_PSERVER_PORT=6", "DMLC_PS_ROOT_URI=d"];
        check("", &paddle, "", Ok("coordinator = a:6 (from PADDLE_PSERVER_IPS and PADDLE_PSERVER_PORT)"));
        check("", &["PADDLE_PSERVER_IPS=a:9,b:8"], "", Ok("coordinator = a:9 (from PADDLE_PSERVER_IPS)"));
        check("", &["PADDLE_PSERVER_IPS=[::1],b"], "", Ok("coordinator = [::1]:7164 (from PADDLE_PSERVER_IPS)"));
        let dmlc = ["DMLC_PS_ROOT_URI=d", "DMLC_PS_ROOT_PORT=9"];
        check("", &dmlc, "", Ok("coordinator = d:9 (from DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT)"));
        check("", &["MASTER_ADDR=m", "MASTER_PORT=1"], "", Ok("coordinator = 127.0.0.1:7164 (default)"));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_source_and_what_was_expected() {
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
        check("colour=red", &[], "", Err("options: \"colour=red\"; expected name=value"));
        check("trainer", &[], "", Err("options: \"trainer\"; expected name=value"));
        check("trainer=", &[], "", Err("options: \"trainer=\""));
        check("trainer=1 trainer=2", &[], "", Err("trainer is given twice"));
        check("", &["PSERVER_CONFIG=job.toml"], "trainer = ", Err("the file job.toml (from PSERVER_CONFIG)"));
    }
}
