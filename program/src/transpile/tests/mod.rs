//! Divided programs: assignment, cost, and equality of all parts together with the whole.

mod columns;
mod costs;
mod division;
mod equality;
mod given;
mod memory;
mod networks;
mod pictures;
mod placing;
mod rates;
mod refusals;
mod totals;
mod wire;
