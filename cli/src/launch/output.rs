//! Output of a job: whole lines, each with the name of its part, in colour on a terminal.

use std::io::{self, ErrorKind, IsTerminal, Write};

/// Colours of names, in the order of parts: those that are legible on light and dark.
const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// Where the lines of parts go.
pub(super) struct LaunchOutput {
    /// Whether standard output and standard error show colours.
    has_colours: [bool; 2],
    /// Why the first line was lost that a stream did not take, such as a file on a full disk.
    lost: Option<io::Error>,
}

impl LaunchOutput {
    /// Colours where a stream is a terminal, unless `NO_COLOR` is set and not empty.
    pub(super) fn new() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|text| !text.is_empty());
        let terminals = [io::stdout().is_terminal(), io::stderr().is_terminal()];
        Self { has_colours: terminals.map(|terminal| terminal && !refused), lost: None }
    }

    /// Why output was lost.
    pub(super) fn take_lost(&mut self) -> Option<io::Error> {
        self.lost.take()
    }

    /// Writes a line of a part. Parts do not end because a disk is full: that is noted, and a later line may be
    /// written.
    ///
    /// # Errors
    /// The reader of the stream is gone.
    pub(super) fn line(&mut self, name: &str, colour: usize, is_error: bool, text: &str) -> io::Result<()> {
        let line = named_line(name, self.has_colours[usize::from(is_error)].then_some(colour), text);
        let written = if is_error {
            io::stderr().lock().write_all(line.as_bytes())
        } else {
            let mut output = io::stdout().lock();
            output.write_all(line.as_bytes()).and_then(|()| output.flush())
        };
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                self.lost.get_or_insert(error);
                Ok(())
            }
            other => other,
        }
    }
}

fn named_line(name: &str, colour: Option<usize>, text: &str) -> String {
    let text = text.trim_end_matches('\r');
    match colour {
        Some(colour) => format!("\x1b[{}m[{name}]\x1b[0m {text}\n", COLOURS[colour % COLOURS.len()]),
        None => format!("[{name}] {text}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::named_line;

    #[test]
    fn a_line_has_its_name_and_on_a_terminal_a_colour() {
        assert_eq!(named_line("trainer 0", None, "loss 0.1\r"), "[trainer 0] loss 0.1\n");
        assert_eq!(named_line("trainer 7", Some(7), "loss"), "\x1b[33m[trainer 7]\x1b[0m loss\n");
    }
}
