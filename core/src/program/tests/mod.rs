//! What programs promise.

mod forms;
mod gradients;
mod luck;
mod refusals;
