//! To be written.
pub mod storage;
