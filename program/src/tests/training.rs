//! Optimizers as part of a program.

use crate::{
    Builder, Dim, Elements, Graph, Op, OpKind, OpRole, ParameterGradient, PlainArithmetic, PlainRun, Program, Purpose,
    Tensor, append_backward, append_optimizer,
};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::port::Plain;
use pserver_core::rows::Initializer;

const MOMENTUM: &str = "sgd { momentum: 0.9 } const_lr { learning_rate: 0.5 }";
/// A rule with a state that does not start at zero.
const LEAKY: &str = r#"rule: "state m = 2; m = 0.5*m + g; w = w - lr*m" const_lr { learning_rate: 0.25 }"#;

/// A table whose rows, looked up by `ids`, are trained to zero.
fn table() -> (Program, Vec<ParameterGradient>) {
    let p = Builder::new();
    let ids = p.data("ids", Int64, [Dim::Batch]);
    let uniform = Initializer::Uniform { low: -1.0, high: 1.0 };
    let found = p.lookup_table(p.parameter("table", Float32, &[6, 3], uniform, 1), ids);
    p.named("loss", p.mean(p.mul(found, found)));
    let mut program = p.finish().unwrap().into_program();
    let gradients = append_backward(&mut program, "loss").unwrap();
    (program, gradients)
}

fn ids(values: &[i64]) -> Tensor {
    Tensor::new([values.len() as u64], Elements::Int64(values.to_vec()))
}

/// The variables' values after some steps over several batches of ids.
fn train(program: Program, wanted: &[&str]) -> Vec<Tensor> {
    let graph = Graph::new(program).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    for batch in [&[0, 5, 0, 0][..], &[2], &[5, 2, 4], &[1, 1]] {
        run.set("ids", ids(batch)).unwrap();
        run.step().unwrap();
    }
    wanted.iter().map(|name| run.value(name).unwrap().tensor().clone()).collect()
}

#[test]
fn an_optimizer_is_labelled_and_its_states_are_declared_and_filled() {
    let (mut program, gradients) = table();
    append_optimizer(&mut program, LEAKY, &gradients).unwrap();
    let block = &program.blocks[0];
    let updates: Vec<&Op> = block.ops.iter().filter(|op| op.role == OpRole::Optimize).collect();
    assert_eq!(updates.len(), 1);
    assert_eq!(updates[0].inputs, ["table", "table@gradient", "table@count", "table@state.m"]);
    assert_eq!(updates[0].outputs, ["table", "table@count", "table@state.m"]);
    let states: Vec<String> = block
        .variables
        .iter()
        .filter(|variable| variable.purpose == Purpose::State)
        .map(|variable| format!("{}: {}", variable.name, variable.facts))
        .collect();
    assert_eq!(states, ["table@count: int64[]", "table@state.m: float32[6, 3]"]);
    let filled: Vec<(&OpKind, &str)> = block
        .ops
        .iter()
        .filter(|op| op.role == OpRole::Initialise)
        .map(|op| (&op.kind, op.outputs[0].as_str()))
        .collect();
    assert_eq!(
        filled[1..],
        [(&OpKind::Fill { value: 0.0 }, "table@count"), (&OpKind::Fill { value: 2.0 }, "table@state.m")]
    );
    assert_eq!(program.to_string().parse::<Program>().unwrap(), program);
}

#[test]
fn a_state_may_be_called_what_a_program_calls_its_own_variables() {
    for state in ["count", "gradient", "sender", "senders"] {
        let config = LEAKY.replace("m = ", &format!("{state} = ")).replace("*m", &format!("*{state}"));
        let (mut program, gradients) = table();
        append_optimizer(&mut program, &config, &gradients).unwrap_or_else(|failure| panic!("{state}: {failure}"));
        let (mut usual, gradients) = table();
        append_optimizer(&mut usual, LEAKY, &gradients).unwrap();
        let trained = train(program, &["table", "table@count", &format!("table@state.{state}")]);
        assert_eq!(trained, train(usual, &["table", "table@count", "table@state.m"]), "{state}");
    }
}

#[test]
fn every_update_is_counted() {
    let (mut program, gradients) = table();
    append_optimizer(&mut program, MOMENTUM, &gradients).unwrap();
    assert_eq!(train(program, &["table@count"]), [Tensor::new([], Elements::Int64(vec![4]))]);
}

#[test]
fn selected_rows_update_as_the_whole_gradient_does() {
    for config in [MOMENTUM, LEAKY, "optimizer: Adam adam {} l2: 0.1 const_lr { learning_rate: 0.1 }"] {
        let (mut rows, gradients) = table();
        let mut whole = rows.clone();
        append_optimizer(&mut rows, config, &gradients).unwrap();

        // A dense tensor of zeros beside the rows makes their sum dense.
        let zeros = OpKind::Fill { value: 0.0 };
        let block = &mut whole.blocks[0];
        let facts = crate::VariableFacts::fixed(Float32, &[6, 3]);
        block.variables.push(crate::Variable { name: "zeros".into(), facts, purpose: Purpose::Temporary });
        for (kind, inputs, output) in
            [(zeros, vec![], "zeros"), (OpKind::Sum, vec!["zeros", "table@gradient"], "whole")]
        {
            let inputs = inputs.into_iter().map(str::to_owned).collect();
            block.ops.push(Op { kind, inputs, outputs: vec![output.into()], role: OpRole::Backward });
        }
        let gradients = [ParameterGradient { parameter: "table".into(), gradient: "whole".into() }];
        append_optimizer(&mut whole, config, &gradients).unwrap();
        assert_eq!(train(rows, &["table"]), train(whole, &["table"]), "{config}");
    }
}

#[test]
fn an_invalid_optimizer_call_is_refused_and_changes_nothing() {
    let (program, gradients) = table();
    let other = |parameter: &str, gradient: &str| {
        vec![ParameterGradient { parameter: parameter.to_owned(), gradient: gradient.to_owned() }]
    };
    let table = [
        ("optimizer: Sdg", gradients.clone(), "in its config, line 1, column 12"),
        (MOMENTUM, other("tabel", "table@gradient"), "found no parameter \"tabel\""),
        (MOMENTUM, other("table", "nothing"), "update: found no variable \"nothing\""),
        (
            MOMENTUM,
            other("table", "loss"),
            "update: input 2 \"loss\" is float32[]; expected a gradient for float32[6, 3]",
        ),
        (
            "clip_norm: 1",
            gradients.clone(),
            "expected a dense gradient, because clip_norm, sum or norm needs the whole one",
        ),
    ];
    for (config, gradients, expected) in table {
        let mut changed = program.clone();
        let failure = append_optimizer(&mut changed, config, &gradients).unwrap_err().to_string();
        assert!(failure.contains(expected), "{failure}");
        assert_eq!(changed, program);
    }
}

#[test]
fn rows_of_a_tensor_are_filled_as_in_the_whole() {
    for kind in ["uniform(low=-1, high=1, seed=9", "gaussian(mean=2, deviation=0.5, seed=9"] {
        let text = format!(
            "block 0 {{ state whole: float32[7, 3] state piece: float32[2, 3]
             initialise whole = {kind}) initialise piece = {kind}, first=4) }}"
        );
        let graph = Graph::new(text.parse().unwrap()).unwrap();
        let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
        let run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
        let bytes = |name| run.value(name).unwrap().tensor().bytes().to_vec();
        assert_eq!(bytes("piece"), bytes("whole")[4 * 12..6 * 12]);
        assert_ne!(bytes("piece"), bytes("whole")[..2 * 12]);
    }
}

#[test]
fn any_kind_of_gradient_can_be_read_after_its_update() {
    let config = "config=\"optimizer: SGD const_lr { learning_rate: 0.25 }\"";
    let text = format!(
        "block 0 {{ data g: float32[2] parameter w: float32[2] parameter v: float32[2]
         state w@count: int64[] state v@count: int64[]
         initialise w = fill(value=4.0) initialise v = fill(value=4.0)
         initialise w@count = fill(value=0.0) initialise v@count = fill(value=0.0)
         optimize w, w@count = update(w, g, w@count, {config})
         optimize v, v@count = update(v, v, v@count, {config}) }}"
    );
    let graph = Graph::new(text.parse().unwrap()).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    let floats = |run: &PlainRun<'_>, name| match run.value(name).unwrap().tensor().elements() {
        Elements::Float32(values) => values.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(run.step().unwrap_err().to_string(), "block 0, op 4 update: found no value in data \"g\"");
    assert_eq!(floats(&run, "w"), [4.0; 2], "what cannot be updated is as it was");
    run.set("g", Tensor::new([2], Elements::Float32(vec![1.0, 2.0]))).unwrap();
    for (w, v) in [([3.75, 3.5], 3.0), ([3.5, 3.0], 2.25)] {
        run.step().unwrap();
        assert_eq!((floats(&run, "w"), floats(&run, "v")), (w.to_vec(), vec![v; 2]));
        assert_eq!(floats(&run, "g"), [1.0, 2.0]);
    }
}
