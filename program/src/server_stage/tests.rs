//! Server stages: their texts, and ops that cannot be part of a stage.

use super::{server_stages, with_update};
use crate::transpile::{Cluster, CostModel, ParameterServer, Transpiler};
use crate::{Graph, Program};
use pserver_core::config::OptimizerSettings;
use pserver_core::optim::{Prepared, Step};
use pserver_core::port::Formula;

/// A program with the gradients `v@gradient` and `w@gradient`, and these optimizer lines.
fn program(lines: &str) -> Graph {
    let program: Program = format!(
        "block 0 {{
            data x: float32[batch, 4]
            parameter v: float32[4, 3]
            parameter w: float32[4, 3]
            state v@count: int64[]
            state w@count: int64[]
            initialise v = fill(value=1.0)
            initialise w = fill(value=1.0)
            initialise v@count = fill(value=0.0)
            initialise w@count = fill(value=0.0)
            forward one = matmul(x, v)
            forward other = matmul(x, w)
            backward v@gradient = matmul(x, other, transpose_left=true)
            backward w@gradient = matmul(x, one, transpose_left=true)
            {lines}
        }}"
    )
    .parse()
    .unwrap_or_else(|failure| panic!("{failure}\n{lines}"));
    Graph::new(program).unwrap_or_else(|failure| panic!("{failure}\n{lines}"))
}

/// The stages of the only server's part.
fn stages(lines: &str) -> Result<Vec<String>, String> {
    let cluster = Cluster { trainers: 2, servers: 1 };
    let parts = ParameterServer::default().transpile(&program(lines), cluster, &CostModel::default());
    let parts = parts.unwrap_or_else(|failure| panic!("{failure}\n{lines}"));
    let stages = server_stages(&parts[1].graph).map_err(|failure| failure.to_string())?;
    let text = |config: &String| {
        let rule = OptimizerSettings::from_text(config).expect("it is a configuration").rule.expect("it has a rule");
        rule.stage.map_or(String::new(), |stage| stage.text().to_owned())
    };
    Ok(stages.iter().map(|stage| text(&stage.config)).collect())
}

const UPDATE: &str = "optimize w, w@count = update(w, g, w@count, config=\"const_lr { learning_rate: 0.1 }\")";

fn check(lines: &str, expected: &str) {
    let expected: String = expected.lines().map(|line| format!("{}\n", line.trim())).collect();
    assert_eq!(stages(lines), Ok(vec![expected]), "{lines}");
}

#[test]
fn ops_before_and_after_an_update_are_statements_around_it() {
    check(
        &format!(
            "temporary limit: float32[]
             state w@average: float32[4, 3]
             initialise w@average = fill(value=0.5)
             optimize half = scale(w@gradient, factor=0.5)
             optimize limit = fill(value=1.0)
             optimize g = min(half, limit)
             {UPDATE}
             optimize old = scale(w@average, factor=0.5)
             optimize far = sub(w, w@gradient)
             optimize w@average = add(old, far)"
        ),
        "state average = 0.5
         let merged = g
         let value_1 = merged * 0.5
         let value_2 = min(value_1, 1.0)
         g = value_2
         update
         let value_5 = average * 0.5
         let value_6 = w - merged
         let value_7 = value_5 + value_6
         average = value_7",
    );
}

#[test]
fn a_bound_of_the_norm_is_of_the_updates_gradient_alone() {
    check(
        "optimize w, w@count = update(w, w@gradient, w@count, config=\"const_lr { learning_rate: 0.1 } clip_norm: 2\")
         optimize w = sub(w, w@gradient)",
        "let merged = g
         g = g * select(norm(g) > 2.0, 2.0 / norm(g), 1)
         update
         let value_3 = w - merged
         w = value_3",
    );
}

#[test]
fn an_update_alone_has_no_stage() {
    assert_eq!(stages(&UPDATE.replace(", g,", ", w@gradient,")), Ok(vec![String::new()]));
}

#[test]
fn a_scalar_that_two_parameters_read_does_not_join_their_stages() {
    let update = |name: &str| {
        format!(
            "optimize {name}@g = mul({name}@gradient, factor)
             optimize {name}, {name}@count = update({name}, {name}@g, {name}@count, config=\"optimizer: SGD\")"
        )
    };
    let lines =
        format!("state factor: float32[]\ninitialise factor = fill(value=0.25)\n{}\n{}", update("v"), update("w"));
    let text = "let value_0 = g * 0.25\ng = value_0\nupdate\n".to_owned();
    assert_eq!(stages(&lines), Ok(vec![text.clone(), text]));
}

#[test]
fn an_op_that_no_server_stage_can_run_is_refused_by_name() {
    let refuse = |lines: &str, expected: &str| {
        let text = stages(lines).expect_err(lines);
        assert!(text.contains(expected), "{lines}: {text}");
    };
    let before = |op: &str| format!("{op}\n{UPDATE}");
    refuse(&before("optimize g = softmax(w@gradient)"), "softmax: found softmax, which has no form in a stage");
    refuse(
        &before(
            "optimize t = transpose(w@gradient, axes=[1, 0])
             optimize g = reshape(t, shape=[4, 3])",
        ),
        "transpose: found transpose, which has no form in a stage",
    );
    refuse(
        &before("optimize row = reduce_sum(w@gradient, axes=[0])\noptimize g = div(w@gradient, row)"),
        "reduce_sum: found reduce_sum over some dimensions",
    );
    refuse(
        &before("temporary two: float32[]\noptimize two = fill(value=2.0)\noptimize g = pow(w@gradient, two)"),
        "pow: found the exponent 1, 2 or 0.5; expected mul or sqrt",
    );
    refuse(
        &before("temporary zero: float32[]\noptimize zero = fill(value=0.0)\noptimize g = div(w@gradient, zero)"),
        "div: line 1, column 17: expected a divisor that is not zero",
    );
    refuse(
        &before(
            "temporary twice: float64[4, 3]
             optimize wide = cast(w@gradient, to=float64)
             optimize twice = add(wide, wide)
             optimize g = cast(twice, to=float32)",
        ),
        "cast: found a cast of float32 to float64; expected every tensor in one type",
    );
    refuse(&before("optimize g = scale(w@gradient, factor=1e-40)"), "scale: found the number 1e-40 of float32");
    refuse(
        &before(
            "state w@rate: float32[]
             initialise w@rate = fill(value=1.0)
             optimize w@rate = scale(w@rate, factor=0.5)
             optimize g = mul(w@gradient, w@rate)",
        ),
        "scale: found the state \"w@rate\", which is float32[]; expected the facts of its parameter",
    );
    refuse(
        &before(
            "state w@noise: float32[4, 3]
             initialise w@noise = uniform(low=0.0, high=1.0, seed=1)
             optimize g = mul(w@gradient, w@noise)",
        ),
        "mul: found \"w@noise\" initialised by no fill",
    );
    refuse(
        &format!(
            "optimize g = mul(w@gradient, v@gradient)
             optimize v, v@count = update(v, v@gradient, v@count, config=\"optimizer: SGD\")\n{UPDATE}"
        ),
        "expected variables of one parameter",
    );
    refuse(
        &before("optimize g = scale(w@gradient, factor=0.5)").replace("0.1 }", "0.1 } stage: 'update'"),
        "found ops around an update whose config has a stage",
    );
}

/// The code of a rule's update, as kernels run it.
fn code(config: &str) -> String {
    let rule = OptimizerSettings::from_text(config).expect("it is a configuration").rule.expect("it has a rule");
    let (rule, mut scalars) = (Prepared::new(rule).expect("it is a rule"), Vec::new());
    let Formula::Rule { code, .. } = rule.formula(&Step::FIRST, &mut scalars) else { panic!("{config} has no code") };
    format!("{:?}", code.ops())
}

#[test]
fn an_optimizer_in_ops_has_the_code_of_its_text() {
    let lines = "state w@speed: float32[4, 3]
        initialise w@speed = fill(value=0.0)
        optimize kept = scale(w@speed, factor=0.9)
        optimize w@speed = add(kept, w@gradient)
        optimize move = scale(w@speed, factor=0.1)
        optimize w = sub(w, move)";
    let cluster = Cluster { trainers: 2, servers: 1 };
    let parts = ParameterServer::default().transpile(&program(lines), cluster, &CostModel::default());
    let component = with_update(&parts.expect("it can be divided")[1].graph).expect("it is an optimizer");
    let stages = server_stages(&component).expect("it has a stage");
    assert_eq!(code(&stages[0].config), code("rule: 'state m = 0; m = 0.9*m + g; w -= 0.1*m'"));
}
