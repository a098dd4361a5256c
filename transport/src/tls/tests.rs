//! Tests of encryption.
