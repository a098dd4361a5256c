//! A row table on one core beside a plain array that is walked in the same order.

mod draw;
mod local;
mod straight;

pub(crate) use draw::Distribution;
pub(crate) use local::{Local, Plan, Times};
