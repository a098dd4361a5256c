//! Programs that run: what each flow op promises, trainers and servers joined by a wire, and random schedules.

mod failures;
mod flow;
mod joined;
mod plans;
mod rows;
mod schedules;
mod stage;
mod words;
