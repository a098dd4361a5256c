//! Properties of programs.

mod casts;
mod forms;
mod gradients;
mod random;
mod refusals;
mod training;
