use super::CpuArithmetic;
use crate::conformance;

#[test]
fn the_cpu_keeps_what_arithmetic_promises() {
    conformance::check(&mut CpuArithmetic::default());
}

#[test]
fn the_oracle_keeps_what_arithmetic_promises() {
    conformance::check(&mut crate::PlainArithmetic);
}

#[test]
#[should_panic(expected = "matmul")]
fn a_wrong_product_is_found() {
    conformance::check(&mut conformance::FaultyArithmetic::default());
}
