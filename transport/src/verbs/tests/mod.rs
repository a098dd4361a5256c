//! What verbs promise beyond what every transport does, over the device in process and, where there is one, over a real
//! one.

mod copies;
mod failures;
mod fallback;
mod foe;
mod real;
pub(super) mod stage;
