//! The subcommands, one a file.

pub(crate) mod ceiling;
pub(crate) mod pushpull;
