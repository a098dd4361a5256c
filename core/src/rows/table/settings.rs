//! Settings of a table.

use std::sync::Arc;

use crate::error::Failure;
use crate::optim::Prepared;
use crate::rows::{Initializer, RowLayout};

/// How updates that a row has missed are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CatchUp {
    /// A row sees all of them before it is read or updated again, so that the table equals a dense parameter to the
    /// bit.
    #[default]
    Exact,
    /// A row gets only the updates that it is part of. Momentum does not move idle rows, means do not fade, and only
    /// touched rows decay, as in many other parameter servers.
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

/// Everything that defines a table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableSettings {
    /// The layout of its rows; the type is a parameter's.
    pub layout: RowLayout,
    /// The update rule, checked and lowered.
    pub rule: Arc<Prepared>,
    /// The initial values of a row.
    pub initializer: Initializer,
    /// The seed, which with the id determines the initial values on every server and after every restart.
    pub seed: u64,
    /// The id under which row 0 is initialised, because the table may be some rows of a larger one.
    pub first: u64,
    /// How updates that a row has missed are handled.
    pub catch_up: CatchUp,
}

impl TableSettings {
    /// Writes the initial values of row `id`.
    ///
    /// # Panics
    /// When `row` is not one row long.
    pub fn begin(&self, id: u64, row: &mut [u8]) {
        self.initializer.fill(self.seed, self.first.wrapping_add(id), self.layout, row);
    }

    /// Refuses an inconsistent combination.
    ///
    /// # Errors
    /// When the rule or the initializer does not go with the type, and when the rule needs the norm of the whole
    /// gradient; names the found value.
    pub fn validate(&self) -> Result<(), Failure> {
        let element_type = self.layout.element_type();
        self.rule.rule().validate_for(element_type)?;
        self.initializer.validate_for(element_type)?;
        match self.rule.rule().clip_norm {
            None => Ok(()),
            Some(norm) => Err(Failure::call(format!(
                "clip_norm is {norm} for a parameter of rows, whose whole gradient no server has; expected none, \
                 or clip_value"
            ))),
        }
    }
}
