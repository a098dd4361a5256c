//! One function for each reader of programs: no input makes it panic, and a program that is read, written and read
//! again is the same. A random run (`nonsense.rs`) and the fuzz targets (`core/fuzz`) call the same functions.
//!
//! Each function returns whether the bytes were read, so that a run can check that some inputs were accepted.

use pserver_program::{Graph, Program, import_paddle};

/// A function of this module.
pub(crate) type Reading = fn(&[u8]) -> bool;

/// All of them, by the names of the fuzz targets.
#[allow(dead_code, reason = "a fuzz target calls one of them by its name")]
pub(crate) const ALL: [(&str, Reading); 3] =
    [("program_text", program_text), ("program_bytes", program_bytes), ("paddle_program", paddle_program)];

/// A program as text.
pub(crate) fn program_text(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    text.parse::<Program>().is_ok_and(|program| check_program(&program))
}

/// A program as a message.
pub(crate) fn program_bytes(bytes: &[u8]) -> bool {
    Program::decode(bytes).is_ok_and(|program| check_program(&program))
}

/// A main and a startup program of Paddle's: the length of the first in four bytes, little endian, and both.
pub(crate) fn paddle_program(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return false };
    let Some((main, startup)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else { return false };
    import_paddle(main, startup).is_ok_and(|import| check_program(&import.program))
}

/// Texts are compared, because NaN is not equal to itself.
fn check_program(program: &Program) -> bool {
    let text = program.to_string();
    let again: Program = text.parse().unwrap_or_else(|failure| panic!("{failure}, in what was printed:\n{text}"));
    assert_eq!(again.to_string(), text);
    let decoded = Program::decode(&program.encode()).expect("what was encoded is read");
    assert_eq!(decoded.to_string(), text);
    Graph::new(again).is_ok()
}
