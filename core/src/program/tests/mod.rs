//! What programs promise.

mod casts;
mod forms;
mod gradients;
mod luck;
mod refusals;
mod training;
