//! See the workspace ARCHITECTURE page.

pub mod quickstart;
pub mod settings;
