//! Text form of programs, for people.
//!
//! ```text
//! program = block*
//! block   = "block" number ["in" number] "{" (variable | op)* "}"
//! variable = purpose name ":" facts
//! op      = role [name ("," name)* "="] kind "(" [argument ("," argument)*] ")"
//! argument = name | name "=" value
//! facts   = type "[" [dim ("," dim)*] "]" | "rows" "(" type "," number "," number ")"
//!         | "queue" "(" facts "," number ")" | "strings"
//! value   = "true" | "false" | number | text | word | word ":" number | "[" [number ("," number)*] "]"
//! ```
//!
//! A name is bare when it begins with a letter or `_` and goes on with letters, digits and `_ . / @ -`; any other is in
//! quotes. `#` starts a comment. Declarations and ops may be mixed; a printed program has declarations first.

mod parser;
mod positions;
mod print;

use std::fmt;
use std::str::FromStr;

use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_BYTES_MAX;

use super::block::Program;

pub use positions::ProgramPositions;

/// Prints the text form, which reads back as an equal program.
impl fmt::Display for Program {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        print::program(self, formatter)
    }
}

/// Reads the text form. The program is unchecked until a [`Graph`](super::Graph) is made of it.
///
/// The error has the line and the column, what was found and what was expected.
impl FromStr for Program {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        Self::read(text, None).map(|(program, _)| program)
    }
}

impl Program {
    /// Reads the text form of a file, and where everything is in it, for the errors of
    /// [`Graph::located`](super::Graph::located). Without a file's name errors have the line and the column only.
    ///
    /// # Errors
    /// When the text is no program; with the position, the found and the expected word.
    pub fn read(text: &str, file: Option<&str>) -> Result<(Self, ProgramPositions), Failure> {
        if text.len() > PROGRAM_BYTES_MAX {
            let (found, file) = (text.len(), file.map_or_else(String::new, |file| format!("{file}: ")));
            let expected = format!("expected at most {PROGRAM_BYTES_MAX}");
            return Err(Failure::call(format!("{file}the program has {found} bytes; {expected}")));
        }
        parser::program(text, file)
    }
}
