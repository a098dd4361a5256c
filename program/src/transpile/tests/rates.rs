//! Rates as text.

use crate::transpile::{CostModel, MachineRates, ProcessRates};

#[test]
fn rates_are_written_and_read_again() {
    let process = ProcessRates { message_seconds: 1.25e-5, flops_per_second: 3.5e10, ..ProcessRates::default() };
    let rates = MachineRates { process, shared_cores: 2, crowding_seconds: 2.5e-5 };
    assert_eq!(rates.to_string().parse::<MachineRates>().expect("it is right"), rates);
    let found: MachineRates = "# measured\n\n op_seconds=2e-6\nshared_cores = 4".parse().expect("it is right");
    let process = ProcessRates { op_seconds: 2e-6, ..ProcessRates::default() };
    assert_eq!(found.model(), CostModel { trainer: process, server: process, shared_cores: 4, ..CostModel::default() });
}

#[test]
fn rates_that_are_none_are_named() {
    for (text, expected) in [
        ("op_seconds 2", "line 1: found \"op_seconds 2\"; expected a rate and its number"),
        ("\nspeed = 2", "line 2: found \"speed = 2\"; expected a rate"),
        ("shared_cores = 0.5", "line 1: found \"shared_cores = 0.5\"; expected a rate"),
        ("flops_per_second = 0", "trainer.flops_per_second is 0; expected a rate above zero"),
    ] {
        let found = text.parse::<MachineRates>().expect_err("it is none").to_string();
        assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
    }
}
