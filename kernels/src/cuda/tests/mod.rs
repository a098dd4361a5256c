//! Tests of the driver side over a driver without a device (`kernels/cu/standin`).

mod accelerator;
mod device;
mod foreign;
mod job;
mod open;
mod replicas;
mod rules;
mod standin;
mod streams;
