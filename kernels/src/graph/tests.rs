use super::{CpuArithmetic, conformance};

#[test]
fn the_cpu_keeps_what_arithmetic_promises() {
    conformance::check(&mut CpuArithmetic::default());
}

#[test]
fn the_oracle_keeps_what_arithmetic_promises() {
    conformance::check(&mut pserver_core::program::PlainArithmetic);
}

#[test]
#[should_panic(expected = "matmul")]
fn a_wrong_product_is_found() {
    conformance::check(&mut conformance::FaultyArithmetic::default());
}
