//! Checked rule: its syntax tree and the values of its parameters.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Failure;

use super::lower::{Lowering, RulePiece, RuleSettings};
use super::ssa::Lowered;
use super::syntax::{StatementKind, Syntax};
use super::tunable::TunableNames;

/// A checked rule: its text parses, its names are defined, its parameters are within their ranges, it assigns the
/// parameter `w`, and it is within the limits.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRule {
    text: String,
    settings: RuleSettings,
    syntax: Syntax,
    tunables: TunableNames,
    parameters: BTreeMap<String, f64>,
    states: Vec<RuleState>,
    has_reductions: bool,
    has_total: bool,
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
        let written = Self::piece(text, settings, TunableNames::All)?;
        let mut lowering = Lowering::new();
        lowering.add(written.rule_piece(), None)?;
        if !lowering.assigns_weight() {
            return Err(Failure::call("the rule never assigns w; expected a statement such as w -= lr * g"));
        }
        Ok(written)
    }

    /// As [`new`](Self::new), for a text that is lowered before or after another one and need not assign `w`, and of
    /// which these parameters are tunable.
    pub(crate) fn piece(text: &str, settings: &RuleSettings, tunables: TunableNames) -> Result<Self, Failure> {
        Self::around(text, settings, tunables, None)
    }

    /// A stage: statements before and after a rule, in whose place it has `update`. It may also assign `lr`.
    ///
    /// ```
    /// use pserver_core::rule::CheckedRule;
    ///
    /// let stage = CheckedRule::stage("state mean = 0; g = min(g, 1); update; mean = 0.9*mean + 0.1*w")?;
    /// assert_eq!(stage.states()[0].name, "mean");
    /// # Ok::<(), pserver_core::error::Failure>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), when `update` is not there once, and when a state is declared after it.
    pub fn stage(text: &str) -> Result<Self, Failure> {
        // A rule that reads everything that a stage may assign, so that nothing of the stage is left out.
        let inner = Self::piece("w -= lr * g", &RuleSettings::new(), TunableNames::NONE)?;
        let stage = Self::around(text, &RuleSettings::new(), TunableNames::NONE, Some(&[inner.rule_piece()]))?;
        let updates = stage.syntax.statements.iter().filter(|one| one.kind == StatementKind::Update).count();
        if updates != 1 {
            return Err(Failure::call(format!("found update {updates} times; expected it once")));
        }
        let mut after = stage.syntax.statements.iter().skip_while(|one| one.kind != StatementKind::Update);
        if let Some(late) = after.find(|one| matches!(one.kind, StatementKind::State(_))) {
            return Err(late.position.refuse("expected every state of a stage before its update, found one after it"));
        }
        Ok(stage)
    }

    fn around(
        text: &str,
        settings: &RuleSettings,
        tunables: TunableNames,
        inner: Option<&[RulePiece<'_>]>,
    ) -> Result<Self, Failure> {
        let syntax = Syntax::parse(text)?;
        let mut written = Self {
            text: text.to_owned(),
            settings: settings.clone(),
            syntax,
            tunables,
            parameters: BTreeMap::new(),
            states: Vec::new(),
            has_reductions: false,
            has_total: false,
        };
        let mut lowering = Lowering::new();
        let names = lowering.add(written.rule_piece(), inner)?;
        refuse_unused(settings, &names)?;
        written.parameters = names;
        let code = lowering.finish();
        written.has_reductions = !code.reductions().is_empty();
        written.has_total = code.total().is_some();
        written.states =
            code.states().iter().map(|state| RuleState { name: state.name.clone(), initial: state.initial }).collect();
        Ok(written)
    }

    /// The code of this rule alone.
    ///
    /// # Errors
    /// As those of [`lower`](lower()).
    pub fn lower(&self) -> Result<Lowered, Failure> {
        lower(None, &[self])
    }

    fn rule_piece(&self) -> RulePiece<'_> {
        RulePiece { syntax: &self.syntax, settings: &self.settings, tunables: self.tunables }
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

    /// Whether it reads a number of several parameters: `total`.
    #[must_use]
    pub fn has_total(&self) -> bool {
        self.has_total
    }

    /// Whether it is a stage that multiplies the gradient by a number of the total of gradients, and does nothing else:
    /// rows can be updated by it apart from each other, and a gradient of zero stays one whatever the total is.
    #[must_use]
    pub fn scales_by_total(&self) -> bool {
        self.has_total && self.syntax.scales_gradient_by_total()
    }

    /// The syntax tree.
    #[must_use]
    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }
}

/// The code of some rules, one after another, as one, within a stage if there is one. Each has names of its own; `w`,
/// `g` and `lr` go from one to the next.
///
/// # Errors
/// When they are longer together than a rule may be, or have two states of one name.
pub fn lower(stage: Option<&CheckedRule>, pieces: &[&CheckedRule]) -> Result<Lowered, Failure> {
    let mut lowering = Lowering::new();
    let pieces: Vec<RulePiece<'_>> = pieces.iter().map(|piece| piece.rule_piece()).collect();
    match stage {
        Some(stage) => drop(lowering.add(stage.rule_piece(), Some(&pieces))?),
        None => pieces.iter().try_for_each(|piece| lowering.add(*piece, None).map(drop))?,
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
