//! Readers of programs, given almost valid and invalid input, in a bounded run. The functions are those of the fuzz
//! targets in `core/fuzz`.

#[path = "../../core/tests/random/mod.rs"]
mod random;
mod reading;

use pserver_program::Program;

const PROGRAM: &str = include_str!("../../docs/programs/example.program");
const FLOW: &str =
    "block 0 { parameter w: float32[8] state q: queue(float32[8], 4) communication loop_forever(block=1) }
    block 1 in 0 { temporary g: float32[8] communication g, s = recv(channel=\"w\\u{41}\")
    communication m = gradient_accumulator(g, s, count=4, staleness=0) communication enqueue(q, m)
    communication n = string_accumulator(s, count=4) communication send(w, n, channel=\"w\", to=senders) }";

/// Valid inputs of each function.
fn examples(name: &str) -> Vec<Vec<u8>> {
    let encoded = |text: &str| text.parse::<Program>().expect("it is a program").encode();
    let examples = [PROGRAM, FLOW].into_iter();
    match name {
        "program_text" => examples.map(|text| text.as_bytes().to_vec()).collect(),
        "program_bytes" => examples.map(encoded).collect(),
        other => panic!("no examples of {other}"),
    }
}

#[test]
fn whatever_comes_is_read_or_refused() {
    random::run_all(&reading::ALL, examples);
}
