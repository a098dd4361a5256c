#![no_main]

#[path = "../../tests/reading/mod.rs"]
#[allow(dead_code, reason = "this target calls one of them")]
mod reading;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    reading::coordinator_file(bytes);
});
