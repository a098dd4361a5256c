//! Checked rule: its syntax tree and the values of its parameters.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Failure;

use super::lower::{Lowering, RuleSettings};
use super::ssa::Lowered;
use super::syntax::Syntax;

/// A checked rule: its text parses, its names are defined, its parameters are within their ranges, it assigns the
/// parameter `w`, and it is within the limits.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRule {
    text: String,
    settings: RuleSettings,
    syntax: Syntax,
    parameters: BTreeMap<String, f64>,
    states: Vec<RuleState>,
    has_reductions: bool,
}

/// A state tensor that a rule declares.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleState {
    /// As the text writes it.
    pub name: String,
    /// Every element before the first update.
    pub initial: f64,
}

impl CheckedRule {
    /// Parses and checks a rule. A setting is for a parameter that the text declares, or for a name that it uses
    /// without a declaration.
    ///
    /// The error has the line, the column and the reason.
    pub fn new(text: &str, settings: &RuleSettings) -> Result<Self, Failure> {
        let written = Self::piece(text, settings)?;
        let mut lowering = Lowering::new();
        lowering.add(&written.syntax, &written.settings)?;
        if !lowering.assigns_weight() {
            return Err(Failure::call("the rule never assigns w; expected a statement such as w -= lr * g"));
        }
        Ok(written)
    }

    /// As [`new`](Self::new), for a text that is lowered before or after another one and need not assign `w`.
    pub(crate) fn piece(text: &str, settings: &RuleSettings) -> Result<Self, Failure> {
        let syntax = Syntax::parse(text)?;
        let mut written = Self {
            text: text.to_owned(),
            settings: settings.clone(),
            syntax,
            parameters: BTreeMap::new(),
            states: Vec::new(),
            has_reductions: false,
        };
        let mut lowering = Lowering::new();
        let names = lowering.add(&written.syntax, &written.settings)?;
        refuse_unused(settings, &names)?;
        written.parameters = names;
        let code = lowering.finish();
        written.has_reductions = !code.reductions().is_empty();
        written.states =
            code.states().iter().map(|state| RuleState { name: state.name.clone(), initial: state.initial }).collect();
        Ok(written)
    }

    /// The code of this rule alone.
    ///
    /// # Errors
    /// As those of [`lower`](lower()).
    pub fn lower(&self) -> Result<Lowered, Failure> {
        lower(&[self])
    }

    /// The text of the rule.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The values that were set.
    #[must_use]
    pub fn settings(&self) -> &RuleSettings {
        &self.settings
    }

    /// Every parameter's value, set or default.
    #[must_use]
    pub fn parameters(&self) -> &BTreeMap<String, f64> {
        &self.parameters
    }

    /// The states, in the order in which they are declared.
    #[must_use]
    pub fn states(&self) -> &[RuleState] {
        &self.states
    }

    /// Whether it reduces: `sum` and `norm` need all elements of the parameter.
    #[must_use]
    pub fn has_reductions(&self) -> bool {
        self.has_reductions
    }

    /// The syntax tree.
    #[must_use]
    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }
}

/// The code of some rules, one after another, as one. Each has names of its own; `w` and `g` go from one to the next.
///
/// # Errors
/// When they are longer together than a rule may be, or have two states of one name.
pub fn lower(pieces: &[&CheckedRule]) -> Result<Lowered, Failure> {
    let mut lowering = Lowering::new();
    for piece in pieces {
        lowering.add(&piece.syntax, &piece.settings)?;
    }
    Ok(lowering.finish())
}

/// Refuses a setting that the rule does not read, because the user expects an effect.
fn refuse_unused(settings: &RuleSettings, parameters: &BTreeMap<String, f64>) -> Result<(), Failure> {
    let Some(name) = settings.keys().find(|name| !parameters.contains_key(*name)) else {
        return Ok(());
    };
    let known: BTreeSet<&str> = parameters.keys().map(String::as_str).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.into_iter().collect::<Vec<_>>().join(", ") };
    Err(Failure::call(format!("{name:?} is set, and the rule has no such parameter; expected one of: {known}")))
}
