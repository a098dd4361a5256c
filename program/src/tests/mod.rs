//! Properties of programs.

mod casts;
mod forms;
mod given;
mod gradients;
mod math;
mod networks;
mod positions;
mod random;
mod refusals;
mod training;
