//! See the workspace ARCHITECTURE page.
