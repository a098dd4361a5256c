//! Which source each setting's text comes from.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use config::{File, FileFormat, Source, Value, ValueKind};

use super::args::{DEPENDENT_DEFAULTS, Key, ServeArgs};

const PREFIX: &str = "PSERVER_";

/// A setting as text, before it is checked.
pub(super) struct Found {
    pub(super) text: String,
    origin: Origin,
    default: &'static str,
}

#[derive(Clone, Debug, PartialEq)]
enum Origin {
    Flag,
    Environment,
    File(PathBuf),
    Default,
}

/// Every setting's text, in the order of printing.
pub(super) struct Sources(Vec<(&'static str, Found)>);

/// Turns text into values, and keeps what was wrong.
pub(super) struct Reader<'a> {
    sources: &'a Sources,
    problems: Vec<String>,
}

impl Sources {
    /// Asks the command line, the environment, the file and the defaults, in this order. An empty variable is none, as
    /// a trainer has it: somebody's script had nothing to say.
    ///
    /// # Errors
    /// When the file cannot be read, is not TOML, or has a key that is no setting.
    pub(super) fn collect(args: &ServeArgs, environment: &[(String, String)]) -> Result<Self> {
        let variable = |name: &str| {
            let named = format!("{PREFIX}{}", name.to_uppercase());
            let found = environment.iter().find(|(name, text)| *name == named && !text.trim().is_empty());
            found.map(|(_, text)| text.clone())
        };
        let path = args.config.clone().or_else(|| variable("config").map(PathBuf::from));
        let keys = args.keys();
        let names: Vec<&str> = keys.iter().map(|key| key.name).collect();
        let mut file = match &path {
            Some(path) => read_file(path, &names)?,
            None => BTreeMap::new(),
        };
        let found = |key: Key<'_>| {
            let from_file = file.remove(key.name).zip(path.clone());
            let (text, origin) = if let Some(text) = key.flag {
                (text.to_owned(), Origin::Flag)
            } else if let Some(text) = variable(key.name) {
                (text, Origin::Environment)
            } else if let Some((text, path)) = from_file {
                (text, Origin::File(path))
            } else {
                (key.default.to_owned(), Origin::Default)
            };
            (key.name, Found { text, origin, default: key.default })
        };
        let mut sources = Self(keys.into_iter().map(found).collect());
        sources.settle_defaults(environment);
        Ok(sources)
    }

    /// Gives settings that nobody made what other settings, or the user's folders, make their default.
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

    /// The setting of this name, if nobody made it.
    fn unmade(&mut self, key: &str) -> Option<&mut Found> {
        let found = self.0.iter_mut().find(|(name, found)| *name == key && found.origin == Origin::Default);
        found.map(|(_, found)| found)
    }

    /// The setting of this name.
    pub(super) fn get(&self, key: &str) -> &Found {
        let found = self.0.iter().find(|(name, _)| *name == key);
        &found.expect("settings are asked for by names in the list").1
    }

    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { sources: self, problems: Vec::new() }
    }

    /// TOML that says the same, with the sources as comments.
    pub(super) fn print(&self) -> String {
        let line = |(key, found): &(&str, Found)| {
            // TOML has no number with a leading zero, and no whole one above 63 bits.
            let whole = found.text.parse().is_ok_and(|number: i64| number.to_string() == found.text);
            let real = found.text.parse().is_ok_and(|number: f64| number.to_string() == found.text);
            let number = whole || (real && found.text.contains('.'));
            let bare = number || found.text.parse::<bool>().is_ok();
            // JSON's string is TOML's, but for the one control character that JSON leaves alone.
            let quoted = || serde_json::Value::from(found.text.as_str()).to_string().replace('\u{7f}', "\\u007F");
            let text = if bare { found.text.clone() } else { quoted() };
            format!("{key} = {text} # {}\n", Named(&found.origin, key))
        };
        self.0.iter().map(line).collect()
    }
}

impl Found {
    /// What is wrong with it, for the person who wrote it.
    pub(super) fn complaint(&self, key: &str, expected: &str) -> String {
        format!("{key} (from {}) is \"{}\"; expected {expected}", Named(&self.origin, key), self.text)
    }
}

impl Reader<'_> {
    /// The checked value of a setting. A wrong one is noted, and its default stands in until all were read.
    pub(super) fn take<T>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> T {
        let found = self.sources.get(key);
        parse(found.text.trim()).unwrap_or_else(|expected| {
            self.problems.push(found.complaint(key, &expected));
            parse(found.default).unwrap_or_else(|_| panic!("the default of {key} is right"))
        })
    }

    pub(super) fn problems(self) -> Vec<String> {
        self.problems
    }
}

/// A source, with the name that the setting has there.
struct Named<'a>(&'a Origin, &'a str);

impl fmt::Display for Named<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Origin::Flag => write!(formatter, "--{}", self.1.replace('_', "-")),
            Origin::Environment => write!(formatter, "{PREFIX}{}", self.1.to_uppercase()),
            // A comment ends with its line, and a path may hold anything.
            Origin::File(path) => formatter.write_str(&path.display().to_string().replace(char::is_control, "?")),
            Origin::Default => formatter.write_str("default"),
        }
    }
}

/// The settings of a file, as text.
fn read_file(path: &Path, names: &[&str]) -> Result<BTreeMap<String, String>> {
    let shown = path.display();
    let text =
        std::fs::read_to_string(path).with_context(|| format!("the configuration file {shown} cannot be read"))?;
    let values = File::from_str(&text, FileFormat::Toml).collect();
    let values = values.with_context(|| format!("the configuration file {shown} is not TOML"))?;
    let mut settings = BTreeMap::new();
    for (key, value) in values.into_iter().collect::<BTreeMap<String, Value>>() {
        if !names.contains(&key.as_str()) {
            let nearest = names.iter().min_by_key(|name| distance(name, &key)).expect("there are settings");
            bail!("{key} (from {shown}) is no setting; the nearest is {nearest}");
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

/// Letters to add, drop or change to make one word of the other.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, letter) in left.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for column in 1..row.len() {
            let change = diagonal + usize::from(right[column - 1] != letter);
            diagonal = row[column];
            row[column] = change.min(diagonal + 1).min(row[column - 1] + 1);
        }
    }
    row[right.len()]
}
