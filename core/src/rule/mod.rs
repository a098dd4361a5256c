//! Update rules: the computation of a server on a gradient, as text that users write. `docs/RULES.md` specifies the
//! language.
//!
//! ```
//! use pserver_core::rule::{CheckedRule, RuleSettings};
//!
//! let text = "param mu in [0, 1) = 0.9; state m = 0; m = mu*m + g; w = w - lr*m";
//! let rule = CheckedRule::new(text, &RuleSettings::from([("mu".to_owned(), 0.5)]))?;
//! assert_eq!(rule.states()[0].name, "m");
//! assert_eq!(rule.lower()?.states().len(), 1);
//! # Ok::<(), pserver_core::error::Failure>(())
//! ```
//!
//! A text is parsed ([`syntax`]), checked with the values of its parameters ([`CheckedRule`]), and lowered once
//! ([`lower()`]) to the straight-line code that kernels run ([`ssa`]). There are two references:
//! [`CheckedRule::interpret`] runs the text in binary64, and [`mod@reference`] runs the code with exactly the bits that
//! every kernel must give. Code generators find the uses of each value in [`uses`].
//! A step may carry other values of a rule's [`Tunable`] numbers.
//!
//! Not here: which rule a parameter has, and the steps around it ([`crate::optim`]); rules in a configuration
//! ([`crate::config`]); code that runs it fast (`kernels`).

mod checked;
mod code;
mod elementary;
mod interpret;
mod interval;
mod lower;
mod parser;
mod print;
pub mod reference;
pub mod ssa;
pub mod syntax;
#[cfg(test)]
mod tests;
mod tunable;
pub mod uses;

pub use checked::{CheckedRule, RuleState, lower};
pub use interpret::UpdateInputs;
pub use interval::Interval;
pub use lower::RuleSettings;
pub(crate) use tunable::TunableNames;
pub use tunable::{StepSettings, Tunable, TunableId};
