//! Configuration of parameters: optimizers and sparse tables, parsed and checked.
//!
//! The message is Paddle's `OptimizerConfig`, number for number, with fields of this project from 1000 up. It is given
//! in protobuf's text form, as `base64:` and its binary form, or as the binary form itself:
//!
//! ```
//! use pserver_core::config::{Mode, OptimizerSettings};
//!
//! let settings = OptimizerSettings::from_text(
//!     r#"optimizer: Adam  adam { beta_1: 0.9 }  const_lr { learning_rate: 1e-3 }  l2: 1e-4  mode: Async"#,
//! )?;
//! assert!(settings.rule.is_some());
//! assert_eq!(settings.mode, Some(Mode::Async));
//! # Ok::<(), pserver_core::error::Failure>(())
//! ```
//!
//! Differences from Paddle, whose behaviour was undefined, unsafe or wrong there:
//!
//! - No `optimizer` and no `algorithm` is SGD, and no `const_lr` is a learning rate of 1, as in Paddle. Any other
//!   choice needs its message, which may be empty; a message that the choice leaves unused is refused.
//! - `algorithm` names what Paddle's enumeration lacks: `add`, `sum`, `rmsprop`, `adamw`, `ftrl`, or one of the rules
//!   that are only texts, such as `lion`. Momentum is `sgd { momentum }`.
//! - `rule` is a rule's own text ([`crate::rule`]), `rule_file` the file it lies in, and each `rule_set { key: "b1"
//!   value: 0.9 }` a value of one of its parameters. The text itself is sent over the wire.
//! - Adam's `beta_1`, `beta_2` and `epsilon` default to 0.9, 0.999 and 1e-8; Paddle's were zero.
//! - `decay` is `l2` when no `l2` is given, and then the regularizer is decoupled (`w -= r decay w`) unless
//!   `regularizer` says otherwise; for SGD with momentum it is coupled, because Paddle kept the decay in the velocity.
//! - `clip_norm` and `clip_value` work (Paddle never read them); zero means none.
//! - `sender: 1` makes the rounds of a dense parameter in mode sync of gradients of trainer 1 alone. With `algorithm:
//!   "sum"` its value is the last one sent: a queue of one item.
//! - `backup_trainers: 1` completes a round in mode sync without the gradient of the slowest trainer, which is dropped.
//! - `total_part: Share`, then `total_part: Total`, each with `algorithm: "sum"`, are what a parameter declared before
//!   them, whose stage has `total`, gives to trainers and gets from them.
//! - `sparse { height: 12500 width: 64 }` makes a parameter one of rows, each of which exists after the first push to
//!   it; `rows` is the most rows that may exist, and is required without a `height`.
//!
//! Not here: the effect of the settings ([`crate::optim`]); options of processes (`node`, `client`).

mod message;
mod numbers;
mod rule;
mod schema;
mod sparse;
#[cfg(test)]
mod tests;
mod text;
mod written;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use prost::Message;

use crate::error::Failure;
use crate::ids::{ServerIndex, TrainerId};
use crate::limits::PARAMETER_CONFIG_BYTES_MAX;
use crate::optim::Rule;
use crate::partition::{Hosted, TotalPart};

pub use sparse::{SparseSettings, row_layout};

use message::OptimizerConfig;

/// The prefix of the binary form in base64.
const BASE64_PREFIX: &str = "base64:";
/// Base64 with the standard alphabet; the `=` at the end is optional.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Mode of training: how the gradients of several trainers update a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// One update per round, from one gradient of every trainer.
    #[default]
    Sync,
    /// One update per gradient, as it arrives.
    Async,
    /// As `Async`, but the fastest trainer is at most `bound` steps ahead of the slowest.
    Staleness {
        /// Fastest minus slowest, in steps.
        bound: u32,
    },
    /// Trainers optimize and push differences, which the server adds.
    Delta,
}

/// Merge of the gradients of one round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Merge {
    /// Their sum divided by their number.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// Optimizer settings, checked. Unspecified settings are none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerSettings {
    /// The update rule; none when no field of a rule was given.
    pub rule: Option<Rule>,
    /// The mode of training.
    pub mode: Option<Mode>,
    /// The merge of the gradients of one round.
    pub merge: Option<Merge>,
    /// The settings of a sparse parameter.
    pub sparse: Option<SparseSettings>,
    /// The server that holds the whole parameter, if one is specified.
    pub owner: Option<ServerIndex>,
    /// The only trainer that sends to the parameter, if one is specified.
    pub sender: Option<TrainerId>,
    /// The parameter's part in the total that a parameter before it reads.
    pub total_part: Option<TotalPart>,
    /// Trainers without whose gradients a round is complete.
    pub backup_trainers: u32,
    /// The parameter's place in a hosted program; no text has it.
    pub hosted: Option<Hosted>,
}

impl OptimizerSettings {
    /// Reads protobuf's text form, or `base64:` followed by the binary form. A blank text has no settings.
    ///
    /// The error of the text form has the line and the column; every error has the field, what was found and what was
    /// expected.
    pub fn from_text(text: &str) -> Result<Self, Failure> {
        Self::from_text_with(text, &no_files)
    }

    /// As [`from_text`](Self::from_text), where `rule_file` is opened by `open`.
    pub fn from_text_with(text: &str, open: OpenRule<'_>) -> Result<Self, Failure> {
        // Of the binary form in base64 the decoded length counts.
        let (found, most) = (text.len(), 2 * PARAMETER_CONFIG_BYTES_MAX);
        if found > most {
            return Err(Failure::call(format!("configuration of {found} bytes; expected at most {most}")));
        }
        let binary = match text.trim().strip_prefix(BASE64_PREFIX) {
            Some(encoded) => binary_of(encoded.trim())?,
            None => text::to_binary(&OptimizerConfig::SCHEMA, text)?,
        };
        Self::from_bytes_with(&binary, open)
    }

    /// Reads configuration from a C string, without the terminating zero: the text form, `base64:`, or the binary form.
    ///
    /// The input is in the binary form when it contains a byte that no text has (a control character that is no blank,
    /// or invalid UTF-8) and is a complete message. A binary form with an embedded zero was cut off there, within a
    /// field, and is never complete. At most [`PARAMETER_CONFIG_BYTES_MAX`] bytes, comments and blanks included; after
    /// `base64:` the decoded length counts.
    pub fn from_c_text(bytes: &[u8], open: OpenRule<'_>) -> Result<Self, Failure> {
        let is_base64 = bytes.trim_ascii_start().starts_with(BASE64_PREFIX.as_bytes());
        let most = if is_base64 { 2 * PARAMETER_CONFIG_BYTES_MAX } else { PARAMETER_CONFIG_BYTES_MAX };
        if bytes.len() > most {
            let found = bytes.len();
            return Err(Failure::call(format!("configuration of {found} bytes; expected at most {most}")));
        }
        let text = str::from_utf8(bytes)
            .map_err(|error| Failure::call(format!("configuration: not UTF-8 at byte {}", error.valid_up_to())));
        let no_text = match text.and_then(|text| Self::from_text_with(text, open)) {
            Ok(settings) => return Ok(settings),
            Err(failure) if bytes.iter().all(|byte| is_of_text(*byte)) && str::from_utf8(bytes).is_ok() => {
                return Err(failure);
            }
            Err(failure) => failure,
        };
        Self::from_bytes_with(bytes, open).map_err(|failure| {
            Failure::call(format!(
                "{no_text}; as the binary form, which ends at its first zero byte here: {failure}; expected the text \
                 form, \"base64:\" and the binary form in base64, or the binary form and its length in the function \
                 whose name ends in _n"
            ))
        })
    }

    /// Reads the binary form, up to the first zero tag: the rest is padding. An unknown, truncated or out-of-range
    /// field is refused by name, and so is padding without a field. No bytes mean no settings.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        Self::from_bytes_with(bytes, &no_files)
    }

    /// As [`from_bytes`](Self::from_bytes), where `rule_file` is opened by `open`.
    pub fn from_bytes_with(bytes: &[u8], open: OpenRule<'_>) -> Result<Self, Failure> {
        let checked = schema::checked(&OptimizerConfig::SCHEMA, bytes)?;
        let message = OptimizerConfig::decode(checked)
            .map_err(|error| Failure::call(format!("{}: {error}", OptimizerConfig::SCHEMA.name)))?;
        rule::settings(&message, open)
    }
}

/// Decodes base64.
fn binary_of(encoded: &str) -> Result<Vec<u8>, Failure> {
    let binary = BASE64.decode(encoded).map_err(|error| {
        Failure::call(format!("after {BASE64_PREFIX}: {error}; expected base64 of the binary form"))
    })?;
    if binary.len() > PARAMETER_CONFIG_BYTES_MAX {
        let found = binary.len();
        return Err(Failure::call(format!(
            "after {BASE64_PREFIX}: configuration of {found} bytes; expected at most {PARAMETER_CONFIG_BYTES_MAX}"
        )));
    }
    Ok(binary)
}

/// Whether a text may contain the byte outside of its strings.
fn is_of_text(byte: u8) -> bool {
    !byte.is_ascii_control() || matches!(byte, b'\t' | b'\n' | b'\r')
}

/// Opens a rule's file and returns its text.
pub type OpenRule<'a> = &'a dyn Fn(&str) -> Result<String, Failure>;

/// The opener of a server, which refuses: a trainer's path is not valid on the server's host.
fn no_files(path: &str) -> Result<String, Failure> {
    Err(Failure::call(format!("rule_file is {path:?}, and only a trainer opens it; expected the text itself as rule")))
}

/// Checked configuration of one parameter, in the catalogue's form.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterConfig {
    /// The update rule; it has passed [`Rule::validate`] when this came from [`decode`](Self::decode).
    pub rule: Rule,
    /// The settings of a sparse parameter.
    pub sparse: Option<SparseSettings>,
    /// Trainers without whose gradients a round is complete: the slowest ones of each round.
    pub backup_trainers: u32,
}

impl ParameterConfig {
    /// The configuration of a dense parameter whose rounds wait for every trainer.
    #[must_use]
    pub fn of(rule: Rule) -> Self {
        Self { rule, sparse: None, backup_trainers: 0 }
    }

    /// The binary form of the same message, every value written out. The same rule gives the same bytes, and
    /// [`decode`](Self::decode) turns the bytes of a valid rule back into an equal value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.message().encode_to_vec()
    }

    /// The same message in its text form, which [`OptimizerSettings::from_text`] reads as the same rule.
    #[must_use]
    pub fn to_text(&self) -> String {
        written::text(&self.message())
    }

    fn message(&self) -> OptimizerConfig {
        let sparse = self.sparse.as_ref().map(sparse::message);
        let backup_trainers = Some(self.backup_trainers).filter(|trainers| 0 < *trainers);
        OptimizerConfig { sparse, backup_trainers, ..rule::message(&self.rule) }
    }

    /// Reads the output of [`encode`](Self::encode), and refuses a missing or invalid rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        let settings = OptimizerSettings::from_bytes(bytes)?;
        let rule = settings.rule.ok_or_else(|| {
            Failure::call(format!(
                "{}: found no rule in {} bytes; expected one",
                OptimizerConfig::SCHEMA.name,
                bytes.len()
            ))
        })?;
        Ok(Self { rule, sparse: settings.sparse, backup_trainers: settings.backup_trainers })
    }
}
