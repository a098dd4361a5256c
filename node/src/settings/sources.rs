//! The source of each setting: command line, environment, file or default.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use config::{File, FileFormat, Source, Value, ValueKind};

use pserver_client::environment::variable_of;
use pserver_client::launchers::Launchers;
use pserver_client::setting_file;
use pserver_core::text::{escaped, shown, suggestion};
use pserver_transport::verbs::FabricOption;

use super::args::{DEPENDENT_DEFAULTS, ServeArgs, SettingKey};
use super::idle::ExplicitSetting;

/// Settings that an empty text switches off.
const MAY_BE_EMPTY: [&str; 1] = ["device_cache"];

/// A setting as text, before it is checked.
pub(super) struct SettingValue {
    pub(super) text: String,
    origin: SettingOrigin,
    default: &'static str,
}

#[derive(Clone, Debug, PartialEq)]
enum SettingOrigin {
    Flag,
    Environment,
    File(PathBuf),
    /// Variables of a launcher.
    Launcher(String),
    Default,
}

/// Every setting's text, in the order of printing.
pub(super) struct SettingTexts(Vec<(&'static str, SettingValue)>);

/// Turns text into values, and keeps what was wrong.
pub(super) struct SettingReader<'a> {
    sources: &'a SettingTexts,
    /// Each with the place of its setting in the list.
    problems: Vec<(usize, String)>,
}

impl SettingTexts {
    /// Asks the command line, the environment, the file and the defaults, in this order.
    ///
    /// # Errors
    /// When the file cannot be read, is not TOML, or has a key that is no setting; when an option or a variable is
    /// empty, as a script's is that had nothing to say.
    pub(super) fn collect(args: &ServeArgs, environment: &[(String, String)]) -> Result<Self> {
        check_not_empty(args, environment)?;
        let variable = |name: &str| {
            let named = variable_of(name);
            environment.iter().find(|(name, _)| *name == named).map(|(_, text)| text.clone())
        };
        let path = args.config.clone().or_else(|| variable("config").map(PathBuf::from));
        let keys = args.keys();
        let names: Vec<&str> = keys.iter().map(|key| key.name).collect();
        let mut file = match &path {
            Some(path) => read_file(path, &names)?,
            None => BTreeMap::new(),
        };
        let found = |key: SettingKey<'_>| {
            let from_file = file.remove(key.name).zip(path.clone());
            let (text, origin) = if let Some(text) = key.flag {
                (text.to_owned(), SettingOrigin::Flag)
            } else if let Some(text) = variable(key.name) {
                (text, SettingOrigin::Environment)
            } else if let Some((text, path)) = from_file {
                (text, SettingOrigin::File(path))
            } else {
                (key.default.to_owned(), SettingOrigin::Default)
            };
            (key.name, SettingValue { text, origin, default: key.default })
        };
        let mut sources = Self(keys.into_iter().map(found).collect());
        sources.settle_defaults(environment);
        sources.settle_launchers(environment)?;
        Ok(sources)
    }

    /// Takes what nobody configured from the launcher of this process: counts and the index, then, for all but server
    /// 0, the address of server 0, and where to listen.
    fn settle_launchers(&mut self, environment: &[(String, String)]) -> Result<()> {
        let variable = |name: &str| environment.iter().find(|(other, _)| other == name).map(|(_, text)| text.clone());
        let launchers = Launchers::new(&variable);
        for key in ["servers", "trainers", "index", "coordinator", "bind"] {
            if self.unmade(key).is_none() {
                continue;
            }
            let is_first = self.get("index").text.trim() == "0";
            let found = match key {
                "bind" if !is_first && !self.get("coordinator").is_launchers() => None,
                "bind" => launchers.bind_address(is_first)?,
                "coordinator" if is_first => None,
                "coordinator" => match launchers.address() {
                    Some(said) => Some(said),
                    None => launchers.assumed_address()?,
                },
                _ => launchers.of_server(key, Some(self.get("servers").text.as_str()))?,
            };
            if let (Some(found), Some(setting)) = (found, self.unmade(key)) {
                (setting.text, setting.origin) = (found.text, SettingOrigin::Launcher(found.origin));
            }
        }
        Ok(())
    }

    /// Sets defaults that depend on other settings or on the user's folders.
    fn settle_defaults(&mut self, environment: &[(String, String)]) {
        let variable = |name: &str| environment.iter().find(|(other, _)| other == name).map(|(_, text)| text.clone());
        let rules =
            pserver_kernels::cuda::rules_folder(variable).and_then(|path| path.into_os_string().into_string().ok());
        if let (Some(rules), Some(found)) = (rules, self.unmade("device_cache")) {
            found.text = rules;
        }
        for (key, cause, default) in DEPENDENT_DEFAULTS {
            if self.get(cause).text.trim().is_empty() {
                continue;
            }
            if let Some(found) = self.unmade(key) {
                default.clone_into(&mut found.text);
            }
        }
    }

    /// The setting of this name, if it is not configured.
    fn unmade(&mut self, key: &str) -> Option<&mut SettingValue> {
        let found = self.0.iter_mut().find(|(name, found)| *name == key && found.origin == SettingOrigin::Default);
        found.map(|(_, found)| found)
    }

    /// The setting of this name.
    pub(super) fn get(&self, key: &str) -> &SettingValue {
        &self.0[self.place(key)].1
    }

    fn place(&self, key: &str) -> usize {
        self.0.iter().position(|(name, _)| *name == key).expect("settings are asked for by names in the list")
    }

    /// Configured settings, in the order of printing.
    pub(super) fn made(&self) -> Vec<ExplicitSetting> {
        let made = self.0.iter().filter(|(_, found)| found.origin != SettingOrigin::Default);
        let shown = |(name, found): &(&'static str, SettingValue)| ExplicitSetting {
            name,
            shown: format!("{name} = {} (from {})", found.text, OriginName(&found.origin, name)),
        };
        made.map(shown).collect()
    }

    /// The option with settings of RDMA fabrics; none if it is wrong, which its reader reports.
    pub(super) fn fabric(&self) -> FabricOption {
        let found = self.get("rdma_fabric");
        let origin = OriginName(&found.origin, "rdma_fabric").to_string();
        FabricOption::new(&found.text, &origin).unwrap_or_default()
    }

    pub(super) fn reader(&self) -> SettingReader<'_> {
        SettingReader { sources: self, problems: Vec::new() }
    }

    /// TOML that says the same, with the sources as comments.
    pub(super) fn print(&self) -> String {
        let line = |(key, found): &(&str, SettingValue)| {
            // TOML has no number with a leading zero, and no whole one above 63 bits.
            let whole = found.text.parse().is_ok_and(|number: i64| number.to_string() == found.text);
            let real = found.text.parse().is_ok_and(|number: f64| number.to_string() == found.text);
            let number = whole || (real && found.text.contains('.'));
            let bare = number || found.text.parse::<bool>().is_ok();
            // JSON's string is TOML's, but for the one control character that JSON leaves alone.
            let quoted = || serde_json::Value::from(found.text.as_str()).to_string().replace('\u{7f}', "\\u007F");
            let text = if bare { found.text.clone() } else { quoted() };
            format!("{key} = {text} # {}\n", OriginName(&found.origin, key))
        };
        self.0.iter().map(line).collect()
    }
}

impl SettingValue {
    /// Whether the command line says it.
    pub(super) fn is_flag(&self) -> bool {
        self.origin == SettingOrigin::Flag
    }

    /// Whether a launcher says it.
    fn is_launchers(&self) -> bool {
        matches!(self.origin, SettingOrigin::Launcher(_))
    }

    /// Error text for a wrong value: setting, source, value and expected text.
    pub(super) fn complaint(&self, key: &str, expected: &str) -> String {
        format!("{key} (from {}) is \"{}\"; expected {expected}", OriginName(&self.origin, key), shown(&self.text))
    }
}

impl SettingReader<'_> {
    /// The checked value of a setting. A wrong one is noted, and its default stands in until all were read.
    pub(super) fn take<T>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> T {
        let found = self.sources.get(key);
        parse(found.text.trim()).unwrap_or_else(|expected| {
            self.problems.push((self.sources.place(key), found.complaint(key, &expected)));
            parse(found.default).unwrap_or_else(|_| panic!("the default of {key} is right"))
        })
    }

    /// The complaints, in the order of the settings.
    pub(super) fn problems(mut self) -> Vec<String> {
        self.problems.sort_by_key(|(place, _)| *place);
        self.problems.into_iter().map(|(_, problem)| problem).collect()
    }
}

/// A source, with the name that the setting has there.
struct OriginName<'a>(&'a SettingOrigin, &'a str);

impl fmt::Display for OriginName<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            SettingOrigin::Flag => write!(formatter, "--{}", self.1.replace('_', "-")),
            SettingOrigin::Environment => formatter.write_str(&variable_of(self.1)),
            // A comment ends with its line, and a path may hold anything.
            SettingOrigin::File(path) => formatter.write_str(&escaped(&path.display().to_string())),
            SettingOrigin::Launcher(variables) => formatter.write_str(variables),
            SettingOrigin::Default => formatter.write_str("default"),
        }
    }
}

/// Refuses options and variables that are empty. The file may have empty settings, which are written on purpose.
fn check_not_empty(args: &ServeArgs, environment: &[(String, String)]) -> Result<()> {
    let keys = args.keys();
    let is_empty = |text: &str| text.trim().is_empty();
    for key in &keys {
        let flag = key.flag.filter(|text| is_empty(text) && !MAY_BE_EMPTY.contains(&key.name));
        let option = || OriginName(&SettingOrigin::Flag, key.name).to_string();
        ensure!(flag.is_none(), "{} is empty; expected a value, or no such option", option());
    }
    for (name, _) in environment.iter().filter(|(_, text)| is_empty(text)) {
        let mut settings = keys.iter().map(|key| key.name).chain(["config"]);
        let is_setting = settings.any(|setting| variable_of(setting) == *name && !MAY_BE_EMPTY.contains(&setting));
        ensure!(!is_setting, "{name} is set and empty; expected a value, or no such variable (unset {name})");
    }
    Ok(())
}

/// The settings of a file, as text.
fn read_file(path: &Path, names: &[&str]) -> Result<BTreeMap<String, String>> {
    let shown = path.display();
    let text = setting_file::read(path).with_context(|| format!("the configuration file {shown} cannot be read"))?;
    let values = File::from_str(&text, FileFormat::Toml).collect();
    let values = values.with_context(|| format!("the configuration file {shown} is not TOML"))?;
    let mut settings = BTreeMap::new();
    for (key, value) in values.into_iter().collect::<BTreeMap<String, Value>>() {
        if !names.contains(&key.as_str()) {
            let near = suggestion(&key, names.iter().copied());
            bail!("{key} (from {shown}) is no setting{near}; pserver serve --help lists all");
        }
        let plain = matches!(
            value.kind,
            ValueKind::Boolean(_) | ValueKind::I64(_) | ValueKind::U64(_) | ValueKind::Float(_) | ValueKind::String(_)
        );
        ensure!(plain, "{key} (from {shown}) is {value}; expected one text, number or boolean");
        settings.insert(key, value.into_string()?);
    }
    Ok(settings)
}
