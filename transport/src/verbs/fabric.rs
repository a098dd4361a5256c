//! Settings that a fabric of RDMA needs: a lossless class, a key of a partition, patience.
//!
//! A setting is looked for in the option `rdma_fabric`, then in variables of the environment: ours, then those that
//! programs with NCCL or UCX have on the same machines. The first that is set counts.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::choice::{DEVICE_EXPECTED, DeviceChoice};

/// The variables of a setting, and how each writes a value.
struct FabricSetting {
    name: &'static str,
    default: &'static str,
    /// Variables with the functions that translate them: to our form, or to nothing where the variable leaves the
    /// choice.
    variables: &'static [(&'static str, Translation)],
    expected: &'static str,
}

type Translation = fn(&str) -> Option<String>;

/// Settings of queue pairs, ports and registrations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricSettings {
    /// The devices where the job's own setting leaves the choice.
    pub(super) device: DeviceChoice,
    /// The traffic class of RoCE (DSCP in its upper six bits).
    pub(super) traffic_class: u8,
    /// The service level of InfiniBand.
    pub(super) service_level: u8,
    /// The key of the partition; without one the first with full membership.
    pub(super) pkey: Option<PartitionKey>,
    /// The index of the address; without one the best.
    pub(super) gid_index: Option<u8>,
    /// Whether packets over InfiniBand have a global address; without it where a router needs one.
    pub(super) is_global: Option<bool>,
    /// Retransmission timeout: 4.096 us times two to this power.
    pub(super) timeout: u8,
    /// Retransmissions.
    pub(super) retries: u8,
    /// Retries where the receiver is not ready; 7 is for ever.
    pub(super) room_retries: u8,
    /// Whether writes of the card to memory may pass one another.
    pub(super) is_relaxed: bool,
}

/// A partition of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartitionKey {
    /// The place in the port's table.
    Index(u16),
    /// The key, of which the highest bit says full membership.
    Value(u16),
}

/// The settings of the option `rdma_fabric`, such as `traffic_class=106,timeout=20`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FabricOption {
    settings: BTreeMap<&'static str, String>,
    /// The option's name where it was given, for people.
    origin: String,
}

/// A setting's value, and the option or variable that it is from or `default`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricChoice {
    /// The setting.
    pub setting: &'static str,
    /// Its value.
    pub text: String,
    /// Its source.
    pub origin: String,
}

impl fmt::Display for FabricChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} = {} (from {})", self.setting, self.text, self.origin)
    }
}

const SETTINGS: [FabricSetting; 10] = [
    FabricSetting {
        name: "device",
        default: "auto",
        variables: &[
            ("NCCL_IB_DISABLE", |text| (text != "0").then(|| "none".to_owned())),
            ("NCCL_IB_HCA", devices_of_nccl),
            ("UCX_NET_DEVICES", |text| list_of(text, str::to_owned).filter(|list| list != "all")),
        ],
        expected: DEVICE_EXPECTED,
    },
    FabricSetting {
        name: "gid_index",
        default: "auto",
        variables: &[
            ("PSERVER_RDMA_GID_INDEX", plain),
            ("NCCL_IB_GID_INDEX", unless_negative),
            ("UCX_IB_GID_INDEX", plain),
        ],
        expected: "auto, or an index from 0 to 255",
    },
    FabricSetting {
        name: "traffic_class",
        default: "0",
        variables: &[
            ("PSERVER_RDMA_TRAFFIC_CLASS", plain),
            ("NCCL_IB_TC", plain),
            ("UCX_IB_TRAFFIC_CLASS", unless_auto),
        ],
        expected: "a number from 0 to 255",
    },
    FabricSetting {
        name: "service_level",
        default: "0",
        variables: &[("PSERVER_RDMA_SERVICE_LEVEL", plain), ("NCCL_IB_SL", plain), ("UCX_IB_SL", unless_auto)],
        expected: "a number from 0 to 15",
    },
    FabricSetting {
        name: "pkey",
        default: "auto",
        variables: &[
            ("PSERVER_RDMA_PKEY", plain),
            ("NCCL_IB_PKEY", |text| Some(format!("index:{text}"))),
            ("UCX_IB_PKEY", key_of_ucx),
        ],
        expected: "auto, a key such as 0x8001, or index: with a place in the port's table",
    },
    FabricSetting {
        name: "global",
        default: "auto",
        variables: &[("PSERVER_RDMA_GLOBAL", plain), ("UCX_IB_IS_GLOBAL", if_yes)],
        expected: "auto, yes or no",
    },
    FabricSetting {
        name: "timeout",
        default: "18",
        variables: &[("PSERVER_RDMA_TIMEOUT", plain), ("NCCL_IB_TIMEOUT", plain), ("UCX_RC_TIMEOUT", power_of_time)],
        expected: "a number from 1 to 31: 4.096 us times two to this power",
    },
    FabricSetting {
        name: "retries",
        default: "6",
        variables: &[("PSERVER_RDMA_RETRIES", plain), ("NCCL_IB_RETRY_CNT", plain), ("UCX_RC_RETRY_COUNT", plain)],
        expected: "a number from 0 to 7",
    },
    FabricSetting {
        name: "room_retries",
        default: "7",
        variables: &[("PSERVER_RDMA_ROOM_RETRIES", plain), ("UCX_RC_RNR_RETRY_COUNT", plain)],
        expected: "a number from 0 to 7, which is for ever",
    },
    FabricSetting {
        name: "relaxed_ordering",
        default: "yes",
        variables: &[
            ("PSERVER_RDMA_RELAXED_ORDERING", plain),
            ("NCCL_IB_PCI_RELAXED_ORDERING", relaxed),
            ("UCX_IB_PCI_RELAXED_ORDERING", relaxed),
        ],
        expected: "yes or no",
    },
];

impl Default for FabricSettings {
    fn default() -> Self {
        Self::find(&FabricOption::default(), &|_| None).expect("defaults are right").0
    }
}

/// Every variable of ours.
pub fn fabric_variables() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().flat_map(|setting| setting.variables).map(|(name, _)| *name).filter(|name| is_ours(name))
}

fn is_ours(variable: &str) -> bool {
    variable.starts_with("PSERVER_")
}

fn is_of_others(origin: &str) -> bool {
    origin.starts_with("NCCL_") || origin.starts_with("UCX_")
}

impl FabricOption {
    /// The settings in `text`, which was given by `origin`. Their values are looked at by [`FabricSettings::find`].
    ///
    /// # Errors
    /// The expected form.
    pub fn new(text: &str, origin: &str) -> Result<Self, String> {
        let mut settings = BTreeMap::new();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            // Devices have an option of their own.
            let setting = SETTINGS[1..].iter().find(|setting| setting.name == name.trim());
            let Some(setting) = setting.filter(|_| !value.trim().is_empty()) else { return Err(option_expected()) };
            if settings.insert(setting.name, value.trim().to_owned()).is_some() {
                return Err(format!("{}, each once", option_expected()));
            }
        }
        Ok(Self { settings, origin: origin.to_owned() })
    }
}

/// The expected form of the option.
fn option_expected() -> String {
    let names: Vec<_> = SETTINGS[1..].iter().map(|setting| setting.name).collect();
    format!("name=value, name=value, ... with names of {}", names.join(", "))
}

impl FabricSettings {
    /// The time after which a device must have completed a request, or have given it up.
    pub(crate) fn patience(&self) -> Duration {
        // The first attempt and every retry wait for the timeout.
        Duration::from_nanos(4096 << self.timeout) * (u32::from(self.retries) + 1)
    }

    /// Looks for every setting: in the option, then with `variable`, which looks up a variable of the environment.
    ///
    /// # Errors
    /// The option or variable that is wrong, what was found and what was expected.
    pub fn find(
        option: &FabricOption,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Self, Vec<FabricChoice>), String> {
        let mut choices: Vec<FabricChoice> = SETTINGS.iter().map(|setting| setting.choice(option, variable)).collect();
        let all = &mut choices;
        let settings = Self {
            device: find(all, "device", device_of_others)?,
            traffic_class: find(all, "traffic_class", number(0..=255))?,
            service_level: find(all, "service_level", number(0..=15))?,
            pkey: find(all, "pkey", unless_auto_of(key))?,
            gid_index: find(all, "gid_index", unless_auto_of(number(0..=255)))?,
            is_global: find(all, "global", unless_auto_of(truth))?,
            timeout: find(all, "timeout", number(1..=31))?,
            retries: find(all, "retries", number(0..=7))?,
            room_retries: find(all, "room_retries", number(0..=7))?,
            is_relaxed: find(all, "relaxed_ordering", truth)?,
        };
        Ok((settings, choices))
    }
}

/// The value of a setting. A wrong one of another program's variable is left out, and its choice says so.
fn find<T>(choices: &mut [FabricChoice], name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    let setting = SETTINGS.iter().find(|one| one.name == name).expect("it is a setting");
    let choice = choices.iter_mut().find(|choice| choice.setting == name).expect("each setting has a choice");
    if let Some(found) = parse(&choice.text) {
        return Ok(found);
    }
    let wrong = format!("{}: {name} is {:?}; expected {}", choice.origin, choice.text, setting.expected);
    if !is_of_others(&choice.origin) {
        return Err(wrong);
    }
    (choice.text, choice.origin) = (setting.default.to_owned(), format!("default, without {wrong}"));
    Ok(parse(setting.default).expect("a default is right"))
}

/// The devices of a variable of other programs.
fn device_of_others(text: &str) -> Option<DeviceChoice> {
    match text.parse().ok()? {
        DeviceChoice::Named(names) => Some(DeviceChoice::Named(names.of_others())),
        choice => Some(choice),
    }
}

fn number(range: RangeInclusive<u8>) -> impl Fn(&str) -> Option<u8> {
    move |text| u8::try_from(whole(text)?).ok().filter(|number| range.contains(number))
}

fn unless_auto_of<T>(parse: impl Fn(&str) -> Option<T>) -> impl Fn(&str) -> Option<Option<T>> {
    move |text| if text == "auto" { Some(None) } else { parse(text).map(Some) }
}

fn key(text: &str) -> Option<PartitionKey> {
    match text.strip_prefix("index:") {
        Some(index) => whole(index).map(PartitionKey::Index),
        None => whole(text).map(PartitionKey::Value),
    }
}

impl FabricSetting {
    fn choice(&self, option: &FabricOption, variable: &dyn Fn(&str) -> Option<String>) -> FabricChoice {
        if let Some(text) = option.settings.get(self.name) {
            return FabricChoice { setting: self.name, text: text.clone(), origin: option.origin.clone() };
        }
        let said = self.variables.iter().find_map(|(name, translate)| {
            let text = variable(name).filter(|text| !text.trim().is_empty())?;
            Some((translate(text.trim())?, (*name).to_owned()))
        });
        let (text, origin) = said.unwrap_or_else(|| (self.default.to_owned(), "default".to_owned()));
        FabricChoice { setting: self.name, text, origin }
    }
}

/// A number, also of hexadecimal digits.
fn whole(text: &str) -> Option<u16> {
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u16::from_str_radix(digits, 16).ok())
}

fn truth(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "y" | "on" | "1" => Some(true),
        "no" | "n" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn plain(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn unless_auto(text: &str) -> Option<String> {
    (text != "auto").then(|| text.to_owned())
}

/// A list without its empty entries, each translated; none without any.
fn list_of(text: &str, translate: impl Fn(&str) -> String) -> Option<String> {
    let (sign, list) = text.strip_prefix('^').map_or(("", text), |list| ("^", list));
    let names: Vec<String> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(translate).collect();
    (!names.is_empty()).then(|| format!("{sign}{}", names.join(",")))
}

/// A list of NCCL, whose names are beginnings of names unless `=` is before them.
fn devices_of_nccl(text: &str) -> Option<String> {
    if text.trim_start_matches('^').starts_with('=') {
        return list_of(&text.replacen('=', "", 1), str::to_owned);
    }
    list_of(text, |name| match name.split_once(':') {
        Some((device, port)) => format!("{device}*:{port}"),
        None => format!("{name}*"),
    })
}

/// A key of UCX, which has 15 bits: a full member is meant.
fn key_of_ucx(text: &str) -> Option<String> {
    Some(whole(text).map_or_else(|| text.to_owned(), |key| format!("{:#06x}", key | 0x8000)))
}

/// Of UCX `n` leaves the choice.
fn if_yes(text: &str) -> Option<String> {
    (truth(text) != Some(false)).then(|| text.to_owned())
}

/// A number of NCCL, for which a negative one leaves the choice.
fn unless_negative(text: &str) -> Option<String> {
    (!text.starts_with('-')).then(|| text.to_owned())
}

/// Of NCCL 2 leaves the choice, of UCX `auto` and `try`.
fn relaxed(text: &str) -> Option<String> {
    (!matches!(text.to_ascii_lowercase().as_str(), "2" | "auto" | "try")).then(|| text.to_owned())
}

/// A time of UCX such as `1000000.00us`, as the least power that is as long.
fn power_of_time(text: &str) -> Option<String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1e6,
        "ms" => 1e3,
        "us" => 1.0,
        "ns" => 1e-3,
        _ => return Some(text.to_owned()),
    };
    let Ok(time) = digits.parse::<f64>() else { return Some(text.to_owned()) };
    let power = (1..=31).find(|power| time * unit <= 4.096 * f64::from(1_u32 << power));
    Some(power.unwrap_or(31).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Result<(FabricSettings, Vec<FabricChoice>), String> {
        let variable =
            |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| (*text).to_owned());
        FabricSettings::find(&FabricOption::default(), &variable)
    }

    #[test]
    fn an_option_takes_precedence_over_the_variables() {
        let read = |text: &str, variable: &str| {
            let variable = |name: &str| (name == "PSERVER_RDMA_TIMEOUT").then(|| variable.to_owned());
            FabricSettings::find(&FabricOption::new(text, "--rdma-fabric")?, &variable)
        };
        let (settings, choices) = read(" traffic_class=106, timeout = 20 ,", "14").expect("it is right");
        assert_eq!((settings.traffic_class, settings.timeout, settings.retries), (106, 20, 6));
        let timeout = choices.iter().find(|choice| choice.setting == "timeout").expect("it is a setting");
        assert_eq!(timeout.to_string(), "timeout = 20 (from --rdma-fabric)");
        assert_eq!(read("retries=3", "14").expect("it is right").0.timeout, 14);
        let error = read("timeout=32", "14").expect_err("it is too long");
        assert_eq!(
            error,
            "--rdma-fabric: timeout is \"32\"; expected a number from 1 to 31: 4.096 us times two to \
             this power"
        );
        for wrong in ["tmeout=3", "timeout", "timeout=", "device=mlx5_0", "retries=3,retries=4"] {
            let expected = read(wrong, "14").expect_err("it is no option");
            assert!(
                expected.starts_with("name=value, name=value, ... with names of gid_index, traffic_class,"),
                "{expected}"
            );
        }
    }

    fn of_others(text: &str) -> DeviceChoice {
        DeviceChoice::Named(text.parse::<super::super::DeviceNames>().expect("names").of_others())
    }

    #[test]
    fn our_variables_take_precedence_over_nccl_and_nccl_over_ucx() {
        let check = |variables: &[(&str, &str)], change: fn(&mut FabricSettings), said: &str| {
            let (settings, choices) = found(variables).expect("they are right");
            let mut expected = FabricSettings::default();
            change(&mut expected);
            assert_eq!(settings, expected, "{variables:?}");
            let texts: Vec<String> = choices.iter().map(ToString::to_string).collect();
            assert!(texts.iter().any(|text| text == said), "{texts:?}; expected {said}");
        };
        check(&[], |_| {}, "traffic_class = 0 (from default)");
        let (ours, nccl, ucx) =
            (("PSERVER_RDMA_TRAFFIC_CLASS", "104"), ("NCCL_IB_TC", "106"), ("UCX_IB_TRAFFIC_CLASS", "108"));
        check(&[ucx], |all| all.traffic_class = 108, "traffic_class = 108 (from UCX_IB_TRAFFIC_CLASS)");
        check(&[ucx, nccl], |all| all.traffic_class = 106, "traffic_class = 106 (from NCCL_IB_TC)");
        check(
            &[ucx, nccl, ours],
            |all| all.traffic_class = 104,
            "traffic_class = 104 (from PSERVER_RDMA_TRAFFIC_CLASS)",
        );
        check(&[("UCX_IB_TRAFFIC_CLASS", "auto")], |_| {}, "traffic_class = 0 (from default)");
        check(
            &[("NCCL_IB_GID_INDEX", "-1"), ("UCX_IB_GID_INDEX", "3")],
            |all| all.gid_index = Some(3),
            "gid_index = 3 (from UCX_IB_GID_INDEX)",
        );
        check(
            &[("NCCL_IB_PKEY", "1")],
            |all| all.pkey = Some(PartitionKey::Index(1)),
            "pkey = index:1 (from NCCL_IB_PKEY)",
        );
        check(
            &[("UCX_IB_PKEY", "0x0001")],
            |all| all.pkey = Some(PartitionKey::Value(0x8001)),
            "pkey = 0x8001 (from UCX_IB_PKEY)",
        );
        check(
            &[("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1")],
            |all| all.device = of_others("mlx5_0:1,mlx5_1"),
            "device = mlx5_0:1,mlx5_1 (from NCCL_IB_HCA)",
        );
        check(
            &[("NCCL_IB_HCA", "^mlx5_bond,mlx5_4:1")],
            |all| all.device = of_others("^mlx5_bond*,mlx5_4*:1"),
            "device = ^mlx5_bond*,mlx5_4*:1 (from NCCL_IB_HCA)",
        );
        check(
            &[("NCCL_IB_DISABLE", "1")],
            |all| all.device = DeviceChoice::None,
            "device = none (from NCCL_IB_DISABLE)",
        );
        check(
            &[("NCCL_IB_DISABLE", "0"), ("UCX_NET_DEVICES", "mlx5_0:1")],
            |all| all.device = of_others("mlx5_0:1"),
            "device = mlx5_0:1 (from UCX_NET_DEVICES)",
        );
        check(&[("UCX_NET_DEVICES", "all")], |_| {}, "device = auto (from default)");
        check(&[("UCX_IB_IS_GLOBAL", "y")], |all| all.is_global = Some(true), "global = y (from UCX_IB_IS_GLOBAL)");
        check(&[("NCCL_IB_TIMEOUT", "20")], |all| all.timeout = 20, "timeout = 20 (from NCCL_IB_TIMEOUT)");
        check(&[("UCX_RC_TIMEOUT", "2000000.00us")], |all| all.timeout = 19, "timeout = 19 (from UCX_RC_TIMEOUT)");
        check(&[("NCCL_IB_RETRY_CNT", "5")], |all| all.retries = 5, "retries = 5 (from NCCL_IB_RETRY_CNT)");
        check(
            &[("NCCL_IB_PCI_RELAXED_ORDERING", "0")],
            |all| all.is_relaxed = false,
            "relaxed_ordering = 0 (from NCCL_IB_PCI_RELAXED_ORDERING)",
        );
        check(&[("NCCL_IB_PCI_RELAXED_ORDERING", "2")], |_| {}, "relaxed_ordering = yes (from default)");
        check(&[("PSERVER_RDMA_SERVICE_LEVEL", " ")], |_| {}, "service_level = 0 (from default)");
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_variable() {
        let check = |name: &str, text: &str, expected: &str| {
            let refused = found(&[(name, text)]).map(drop).expect_err("it is wrong");
            assert!(refused.starts_with(&format!("{name}: ")) && refused.contains(expected), "{refused}");
        };
        check("PSERVER_RDMA_TRAFFIC_CLASS", "256", "traffic_class is \"256\"; expected a number from 0 to 255");
        check("PSERVER_RDMA_SERVICE_LEVEL", "x", "expected a number from 0 to 15");
        check("PSERVER_RDMA_TIMEOUT", "0", "expected a number from 1 to 31");
        check("PSERVER_RDMA_GID_INDEX", "300", "expected auto, or an index from 0 to 255");
        check("PSERVER_RDMA_PKEY", "0xfffff", "expected auto, a key such as 0x8001");
        check("PSERVER_RDMA_GLOBAL", "maybe", "expected auto, yes or no");
    }

    #[test]
    fn an_invalid_value_of_another_programs_variable_is_ignored_and_reported() {
        let check = |name: &str, text: &str, expected: &str| {
            let (settings, choices) = found(&[(name, text)]).expect("it is no error");
            assert_eq!(settings, FabricSettings::default(), "{name}={text}");
            let texts: Vec<String> = choices.iter().map(ToString::to_string).collect();
            assert!(texts.iter().any(|one| one.contains(expected)), "{texts:?}");
        };
        check("NCCL_IB_TC", "1000", "traffic_class = 0 (from default, without NCCL_IB_TC: traffic_class is \"1000\"");
        check("NCCL_IB_TIMEOUT", "0", "timeout = 18 (from default, without NCCL_IB_TIMEOUT");
        check("UCX_RC_TIMEOUT", "long", "without UCX_RC_TIMEOUT");
        check("UCX_RC_RETRY_COUNT", "inf", "without UCX_RC_RETRY_COUNT");
        check("NCCL_IB_HCA", "=", "device = auto (from default)");
        check("NCCL_IB_HCA", "mlx5 0", "without NCCL_IB_HCA");
        check("UCX_IB_IS_GLOBAL", "n", "global = auto (from default)");
        check("UCX_IB_PCI_RELAXED_ORDERING", "TRY", "relaxed_ordering = yes (from default)");
    }

    #[test]
    fn lists_have_no_empty_entries() {
        let check = |text, expected: &str| assert_eq!(devices_of_nccl(text).as_deref(), Some(expected), "{text}");
        check("mlx5_0,", "mlx5_0*");
        check("^mlx5_bond_0,", "^mlx5_bond_0*");
        check("=mlx5_0,", "mlx5_0");
        check("^=mlx5_0:1,,mlx5_1", "^mlx5_0:1,mlx5_1");
        assert_eq!(devices_of_nccl("^,"), None);
    }

    #[test]
    fn a_time_is_the_least_power_that_is_as_long() {
        let check = |text, expected: &str| assert_eq!(power_of_time(text).as_deref(), Some(expected), "{text}");
        check("1s", "18");
        check("4.096us", "1");
        check("8.2us", "2");
        check("67ms", "14");
        check("10000s", "31");
    }
}
