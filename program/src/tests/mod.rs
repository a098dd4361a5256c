//! Properties of programs.

mod casts;
mod forms;
mod gradients;
mod networks;
mod positions;
mod random;
mod refusals;
mod training;
