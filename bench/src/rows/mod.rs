//! A row table on one core beside a plain array that is walked in the same order, and rows over the network beside a
//! straight server that moves the same bytes.

mod draw;
mod local;
mod network;
mod straight;

pub(crate) use draw::Distribution;
pub(crate) use local::{Local, Plan, Times};
pub(crate) use network::{Network, NetworkPlan};
