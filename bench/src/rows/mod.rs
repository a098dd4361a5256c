//! A row table on one core beside a plain array that is walked in the same order, and rows over the network beside a
//! baseline server that moves the same bytes.

mod baseline;
mod draw;
mod local;
mod network;

pub(crate) use draw::Distribution;
pub(crate) use local::{BatchTimes, Local, TablePlan};
pub(crate) use network::{NetworkPlan, NetworkTimes};
