//! Programs that are divided: what runs where, what it costs, and that all parts together do what the whole does.

mod columns;
mod costs;
mod division;
mod equality;
mod networks;
mod placing;
mod refusals;
mod wire;
