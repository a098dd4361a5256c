//! Trainers against a server in this process, and children that behave worse than any.

mod children;
mod learning;
