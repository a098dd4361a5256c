//! A program from a text is refused with the position of the op or the declaration that is wrong.

use crate::{Graph, Program, append_backward};

/// A program of which line 7 is one more op or declaration, in column 5.
fn network(line: &str) -> String {
    format!(
        "block 0 {{
    data x: float32[batch, 64]
    data label: int64[batch]
    parameter w: float32[64, 10]
    parameter b: float32[10]
    initialise w = fill(value=0.5)
    {line}
}}
"
    )
}

fn refusal(text: &str, file: Option<&str>) -> String {
    let checked = Program::read(text, file).and_then(|(program, positions)| Graph::located(program, positions));
    checked.and_then(|graph| graph.check_initialised()).expect_err(text).to_string()
}

#[test]
fn every_refusal_has_file_line_and_column() {
    let op = |line: &str, expected: &str| assert_eq!(refusal(&network(line), Some("net.program")), expected);
    op(
        "forward y = matmul(w, w)",
        "net.program:7:5: block 0, op 1 matmul: input 2 \"w\" is float32[64, 10]; expected float32[10, 10], to be \
         multiplied with float32[64, 10]",
    );
    op("forward y = matmul(x)", "net.program:7:5: block 0, op 1 matmul: found 1 inputs; expected 2");
    op("forward y, z = matmul(x, w)", "net.program:7:5: block 0, op 1 matmul: found 2 outputs; expected 1");
    op(
        "forward y = add(x, b)",
        "net.program:7:5: block 0, op 1 add: input 2 \"b\" is float32[10]; expected float32, and the last \
         dimensions of float32[batch, 64], where either may be 1",
    );
    op(
        "forward y = relu(z)",
        "net.program:7:5: block 0, op 1 relu: found no variable \"z\"; expected a declared one, or one that an op \
         before writes",
    );
    op(
        "forward y = relu(label)",
        "net.program:7:5: block 0, op 1 relu: input 1 \"label\" is int64[batch]; expected float32 or float64",
    );
    op(
        "forward x = relu(w)",
        "net.program:7:5: block 0, op 1 relu: found data \"x\" as an output; expected another variable, because data \
         is only fed",
    );
    op(
        "forward y = relu(x) forward y = relu(x)",
        "net.program:7:25: block 0, op 2 relu: found a second op that writes temporary \"y\"; expected one",
    );
    op(
        "forward b = relu(w)",
        "net.program:7:5: block 0, op 1 relu: output \"b\" is declared float32[10]; expected float32[64, 10], which \
         the op gives",
    );
    op(
        "forward y = scale(x, factor=NaN)",
        "net.program:7:5: block 0, op 1 scale: found factor NaN; expected a finite number",
    );
    op(
        "forward y = reduce_sum(x, axis=2)",
        "net.program:7:5: block 0, op 1 reduce_sum: input 1 \"x\" is float32[batch, 64]; expected a dimension 2, \
         counted from zero",
    );
    op(
        "forward y = concat(x, x, axis=0)",
        "net.program:7:5: block 0, op 1 concat: input 1 \"x\" is float32[batch, 64]; expected dimension 0 to be fixed, \
         because pieces are put together there",
    );
    op(
        "# a comment\n\n  forward y = relu(z)",
        "net.program:9:3: block 0, op 1 relu: found no variable \"z\"; expected a declared one, or one that an op \
         before writes",
    );
    op(
        "forward l, l = softmax_with_cross_entropy(x, label)",
        "net.program:7:5: block 0, op 1 softmax_with_cross_entropy: found output \"l\" twice; expected each once",
    );
    op(
        "communication loop_forever(block=1)",
        "net.program:7:5: block 0, op 1 loop_forever: found block 1; expected one below 1",
    );
}

#[test]
fn declarations_and_blocks_have_positions_too() {
    let line = |line: &str, expected: &str| assert_eq!(refusal(&network(line), Some("net.program")), expected);
    line(
        "temporary y: float32[8] data x: float32[]",
        "net.program:7:29: block 0, variable \"x\": found this name in block 0 as well; expected each name once",
    );
    line(
        "parameter p: float32[batch]",
        "net.program:7:5: block 0, variable \"p\": parameter is float32[batch]; expected a parameter to be dense, of \
         fixed dimensions",
    );
    line(
        "data d: queue(float32[2], 3)",
        "net.program:7:5: block 0, variable \"d\": data is queue(float32[2], 3); expected a queue to be a state",
    );
    line(
        "state s: float32[0]",
        "net.program:7:5: block 0, variable \"s\": is float32[0]; found a dimension of 0; expected 1 or more",
    );
    line(
        "forward y = matmul(x, w)",
        "net.program:5:5: block 0, variable \"b\": found no initialise op that writes it; expected one, such as \
         uniform or fill",
    );
    let text = |text: &str, expected: &str| assert_eq!(refusal(text, Some("net.program")), expected);
    text(
        "block 0 { }\n  block 1 in 0 { }",
        "net.program:2:3: block 1: found no op that runs it; expected one in its parent",
    );
    text("block 0 { }\nblock 1 { }", "net.program:2:1: block 1: found parent none; expected a block before it, 0 to 0");
    text(
        "block 0 { communication loop_forever(block=1) }\nblock 1 in 0 { forward y = relu(x) }",
        "net.program:2:16: block 1, op 0 relu: found no variable \"x\"; expected a declared one, or one that an op \
         before writes",
    );
    text("block 0 {\n  forward y = relu(x\n}", "net.program:3:1: found '}'; expected ',', '=' or ')'");
    text("block 0 {\n  data \"x", "net.program:2:8: found a text without a closing quote; expected one on its line");
    text("", "the program has 0 blocks; expected 1 to 64");
}

#[test]
fn a_text_without_a_file_has_line_and_column_only() {
    let text = "block 0 {\n    forward y = matmul(x)\n}";
    assert!(refusal(text, None).starts_with("line 2, column 5: block 0, op 0 matmul: found no variable"));
    assert!(refusal("block 0", None).starts_with("line 1, column 8: found the end; expected '{'"));
}

#[test]
fn positions_stay_beside_a_program_that_is_appended_to() {
    let forward = network("initialise b = fill(value=0.0) forward loss = mean(x)").replace("mean(x)", "mean(w)");
    let (mut program, positions) = Program::read(&forward, Some("net.program")).expect("it is a program");
    append_backward(&mut program, "loss").expect("it has a gradient");
    let graph = Graph::located(program.clone(), positions.clone()).expect("it is valid");
    assert_eq!(graph, Graph::new(program.clone()).expect("it is valid"), "positions are not in the equality");
    assert_eq!(graph.label(0, 2), "net.program:7:36: block 0, op 2 mean");
    assert_eq!(graph.label(0, 3), "block 0, op 3 fill", "what was appended has no position");
}
