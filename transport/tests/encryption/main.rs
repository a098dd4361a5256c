//! Tests of encryption from outside: attacks that are refused, files that change under load, and new keys.

mod attacks;
mod authority;
mod changes;
mod proxy;
mod target;
