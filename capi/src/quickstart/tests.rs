//! Servers in memory that behave as the real ones promise, and children that behave worse.

mod children;
mod learning;
