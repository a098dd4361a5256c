//! Update rules: what a server does to a gradient, as text that a user reads and writes. `docs/RULES.md` is the
//! language.
//!
//! ```
//! use pserver_core::rule::{Settings, Written};
//!
//! let text = "param mu in [0, 1) = 0.9; state m = 0; m = mu*m + g; w = w - lr*m";
//! let rule = Written::new(text, &Settings::from([("mu".to_owned(), 0.5)]))?;
//! assert_eq!(rule.states()[0].name, "m");
//! assert_eq!(rule.lower()?.states().len(), 1);
//! # Ok::<(), pserver_core::error::Failure>(())
//! ```
//!
//! A text is read ([`syntax`]), checked with the values of its parameters ([`Written`]), and lowered once ([`lower()`])
//! to the straight-line code that kernels run ([`ssa`]). Two things say what is right: [`Written::interpret`], which
//! runs the text in binary64, and [`reference`], which runs the code with exactly the bits that every kernel must give.
//! Whoever generates code asks [`uses`] who needs which value.
//!
//! Not here: which rule a parameter has, and what stands around it ([`crate::optim`]); how a configuration names it
//! ([`crate::config`]); code that runs it fast (`kernels`).

mod code;
mod elementary;
mod interpret;
mod lexer;
mod lower;
mod parser;
mod print;
pub mod reference;
pub mod ssa;
pub mod syntax;
#[cfg(test)]
mod tests;
pub mod uses;
mod written;

pub use interpret::Given;
pub use lower::lower;
pub use written::{Settings, State, Written};
