//! What programs promise.

mod gradients;
mod luck;
mod refusals;
