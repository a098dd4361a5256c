//! Properties of programs.

mod casts;
mod forms;
mod gradients;
mod networks;
mod random;
mod refusals;
mod training;
