//! The sessions of a server, played against by peers whose frames are built by hand.

mod coordinating;
mod device;
mod frames;
mod grouped_update;
mod half_precision;
mod initialisation;
mod joins;
mod long;
mod lost_host;
mod modes;
mod nonfinite;
mod one_by_one;
mod presence;
mod queues;
mod receives;
mod restart;
mod rounds;
mod rows;
mod runs;
mod script;
mod settings;
mod stage;
mod stalled;
mod totals;
mod waiting;
mod watch;
