#![no_main]

#[path = "../../../program/tests/reading/mod.rs"]
#[allow(dead_code, reason = "this target calls one of them")]
mod reading;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    reading::paddle_program(bytes);
});
