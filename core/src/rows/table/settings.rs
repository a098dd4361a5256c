//! What a table is made of.

use std::sync::Arc;

use crate::error::Failure;
use crate::optim::Prepared;
use crate::rows::{Initializer, RowLayout};

/// What becomes of the updates that a row has missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CatchUp {
    /// A row sees them all before it is read or updated again, so that the table is a dense parameter to the bit.
    #[default]
    Exact,
    /// A row sees only the updates that it is in. Momentum then does not carry a row on, means do not fade, and nothing
    /// decays but what is touched; as many other servers do it.
    Lazy,
}

impl CatchUp {
    /// Its name, as configuration writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Lazy => "lazy",
        }
    }
}

/// What a table is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct TableSettings {
    /// What its rows have in common; the type is a parameter's.
    pub layout: RowLayout,
    /// What an update does, checked and lowered.
    pub rule: Arc<Prepared>,
    /// What a row is before anybody touches it.
    pub initializer: Initializer,
    /// With the id it decides the initial values; the same on every server and after every restart.
    pub seed: u64,
    /// The number that row 0 begins as: the table may be some rows of a larger one.
    pub first: u64,
    /// What becomes of the updates that a row has missed.
    pub catch_up: CatchUp,
}

impl TableSettings {
    /// Writes the row `id` as it is before anybody touches it.
    ///
    /// # Panics
    /// When `row` is not one row long.
    pub fn begin(&self, id: u64, row: &mut [u8]) {
        self.initializer.fill(self.seed, self.first.wrapping_add(id), self.layout, row);
    }

    /// Refuses what does not go together.
    ///
    /// # Errors
    /// When the rule or the initializer does not go with the type, and when the rule needs the norm of the whole
    /// gradient; names what was found.
    pub fn validate(&self) -> Result<(), Failure> {
        let element_type = self.layout.element_type();
        self.rule.rule().validate_for(element_type)?;
        self.initializer.validate_for(element_type)?;
        match self.rule.rule().clip_norm {
            None => Ok(()),
            Some(norm) => Err(Failure::call(format!(
                "clip_norm is {norm} for a parameter of rows, of whose gradient no server sees the whole; expected \
                 none, or clip_value"
            ))),
        }
    }
}
