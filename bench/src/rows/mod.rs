//! A row table on one core beside a plain array that is walked in the same order, and rows over the network beside a
//! baseline server of rows.

mod baseline;
mod draw;
mod local;
mod network;
mod table_server;

pub(crate) use draw::Distribution;
pub(crate) use local::{BatchTimes, Local, TablePlan};
pub(crate) use network::{NetworkPlan, NetworkTimes};
