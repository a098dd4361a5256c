//! Calls of clients: results of each call, alone and concurrent with others, and its outcome.

#[path = "../cluster/mod.rs"]
mod cluster;

mod async_calls;
mod call_ends;
mod cancel;
mod halves;
mod in_place;
mod large;
mod row_calls;
mod row_state_calls;
mod rows;
mod state_calls;
mod turns;
mod within;
