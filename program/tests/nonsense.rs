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

/// Programs that Paddle wrote, as `reading::paddle_program` takes them.
const PADDLE: [(&[u8], &[u8]); 6] = [
    (include_bytes!("paddle/fc_sgd.main.pb"), include_bytes!("paddle/fc_sgd.startup.pb")),
    (include_bytes!("paddle/fc_adam_l2.main.pb"), include_bytes!("paddle/fc_adam_l2.startup.pb")),
    (include_bytes!("paddle/shapes.main.pb"), include_bytes!("paddle/shapes.startup.pb")),
    (include_bytes!("paddle/lenet.main.pb"), include_bytes!("paddle/lenet.startup.pb")),
    (include_bytes!("paddle/parts.main.pb"), include_bytes!("paddle/parts.startup.pb")),
    (include_bytes!("paddle/wide_deep.main.pb"), include_bytes!("paddle/wide_deep.startup.pb")),
];

/// Valid inputs of each function.
fn examples(name: &str) -> Vec<Vec<u8>> {
    let encoded = |text: &str| text.parse::<Program>().expect("it is a program").encode();
    let examples = [PROGRAM, FLOW].into_iter();
    match name {
        "program_text" => examples.map(|text| text.as_bytes().to_vec()).collect(),
        "program_bytes" => examples.map(encoded).collect(),
        "paddle_program" => PADDLE
            .iter()
            .map(|(main, startup)| {
                [&u32::try_from(main.len()).expect("it is short").to_le_bytes(), *main, *startup].concat()
            })
            .collect(),
        other => panic!("no examples of {other}"),
    }
}

#[test]
fn random_input_is_parsed_or_refused() {
    random::run_all(&reading::ALL, examples);
}
