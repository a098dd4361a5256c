//! Tests that run only on request.

/// Whether a test runs its whole size.
pub(crate) fn is_full() -> bool {
    is_set("PSERVER_FULL")
}

pub(crate) fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|text| text == "1")
}
