//! The sessions of a server, played against by peers whose frames are built by hand.

mod coordinating;
mod device;
mod gate;
mod halves;
mod in_step;
mod landings;
mod long;
mod modes;
mod one_by_one;
mod programs;
mod restart;
mod rounds;
mod rows;
mod script;
mod stage;
mod stalled;
mod whole;
