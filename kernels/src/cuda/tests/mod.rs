//! Tests of the driver side over a driver without a device (`kernels/cu/standin`).

mod lanes;
mod open;
mod standin;
