//! A rule of the user's own for the quickstart: `--rule FILE --set lr=0.001,b1=0.9`.

use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use pserver_core::rule::{CheckedRule, RuleSettings};

use super::plan::Sharing;
use pserver_client::rule_file;

/// The learning rate when nobody sets one: that of rules whose steps have the length of the learning rate.
const RATE: f64 = 0.001;

/// The options that choose a rule.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RuleArgs {
    /// A file with an update rule, which the servers run instead of an optimizer; see docs/RULES.md.
    #[arg(long, value_name = "FILE", conflicts_with = "optimizer")]
    pub rule: Option<String>,
    /// Values of the rule's parameters, and of lr, the learning rate.
    #[arg(long, value_name = "NAME=VALUE,...", value_delimiter = ',', requires = "rule")]
    pub set: Vec<Set>,
}

/// `name=value`
#[derive(Clone, Debug, PartialEq)]
pub struct Set {
    name: String,
    value: f64,
}

impl FromStr for Set {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected name=value with a number, found {text:?}");
        let (name, value) = text.split_once('=').ok_or_else(expected)?;
        let value = value.parse().map_err(|_| expected())?;
        Ok(Self { name: name.trim().to_owned(), value })
    }
}

impl RuleArgs {
    /// The servers' configuration in protobuf's text form; nothing when no rule is given.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a rule: its name, the line, the column and the reason.
    pub(super) fn config(&self, sharing: Sharing) -> Result<Option<String>> {
        let Some(path) = &self.rule else { return Ok(None) };
        ensure!(
            sharing != Sharing::Delta,
            "--rule {path}: in delta mode the servers only add; expected another --mode"
        );
        let mut settings = RuleSettings::new();
        for Set { name, value } in &self.set {
            ensure!(settings.insert(name.clone(), *value).is_none(), "--set gives {name:?} twice; expected it once");
        }
        let rate = settings.remove("lr").unwrap_or(RATE);
        let text = rule_file::open(path)?;
        CheckedRule::new(&text, &settings).with_context(|| path.clone())?;
        let set: String =
            settings.iter().map(|(name, value)| format!(" rule_set {{ key: {name:?} value: {value:?} }}")).collect();
        let text = quoted(&text);
        Ok(Some(format!("rule: \"{text}\"{set} lr_policy: Const const_lr {{ learning_rate: {rate:?} }}")))
    }
}

/// A text as a string of protobuf's text form holds it.
fn quoted(text: &str) -> String {
    text.chars().fold(String::new(), |mut quoted, character| {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            other => quoted.push(other),
        }
        quoted
    })
}
