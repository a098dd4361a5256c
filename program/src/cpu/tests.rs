use super::CpuArithmetic;
use crate::conformance;

#[test]
fn the_cpu_arithmetic_passes_the_conformance_suite() {
    conformance::check(&mut CpuArithmetic::default());
}

#[test]
fn the_oracle_passes_the_conformance_suite() {
    conformance::check(&mut crate::PlainArithmetic);
}

#[test]
#[should_panic(expected = "matmul")]
fn a_wrong_product_fails_the_suite() {
    conformance::check(&mut conformance::FaultyArithmetic::default());
}
