//! Programs that a server compiles from a job's settings.

use super::{compile, compile_program, program_of};
use crate::transpile::{Cluster, CostModel, ParameterServer, Transpiler};
use crate::{Block, Builder, Dim, Graph, OpKind, Program, ProgramPeer, append_backward, append_optimizer};
use pserver_core::accumulator::AccumulatorPace::{Any, Bounded, Rounds};
use pserver_core::config::{Merge, Mode, OptimizerSettings, ParameterConfig};
use pserver_core::dtype::ElementType::{self, Float32, Int64};
use pserver_core::limits::{NAME_BYTES_MAX, RULE_NAME_BYTES_MAX};
use pserver_core::optim::{Algorithm, Prepared, Rule};
use pserver_core::partition::{Buckets, Declaration, Name};
use pserver_core::port::{Flow, FlowSource, Stage};
use pserver_core::rows::Initializer;

const TRAINERS: u32 = 3;

/// A parameter as a job of three trainers declares it.
struct ParameterOfJob {
    mode: Mode,
    merge: Merge,
    declaration: Declaration,
    rule: Prepared,
}

impl ParameterOfJob {
    /// A parameter of 8 elements, or a table of 60 rows of 3.
    fn new(mode: Mode, merge: Merge, name: &str, element_type: ElementType, config: &str) -> Self {
        let settings = OptimizerSettings::from_text(config).expect("the test's configuration is valid");
        let rule = match mode {
            Mode::Delta => Rule { algorithm: Algorithm::Add, ..Rule::default() },
            _ => settings.rule.expect("the test's configuration has a rule"),
        };
        let shape = if settings.sparse.is_some() { vec![60, 3] } else { vec![8] };
        let declaration = Declaration {
            name: Name::new(name.as_bytes()).expect("the test's name is valid"),
            element_type,
            bytes: shape.iter().product::<u64>() * element_type.bytes(),
            shape,
            whole: !rule.is_element_wise(),
            config: Vec::new(),
            buckets: settings.sparse.map(|_| Buckets { rows: 60, count: 1 }),
            owner: None,
            sender: None,
            total_part: None,
            hosted: None,
        };
        Self { mode, merge, declaration, rule: Prepared::new(rule).expect("the test's rule is valid") }
    }

    fn source(&self) -> FlowSource<'_> {
        let Self { mode, merge, ref declaration, ref rule } = *self;
        FlowSource { mode, merge, trainers: TRAINERS, backup_trainers: 0, declaration, rule }
    }

    fn program(&self) -> Program {
        program_of(self.source()).expect("its layout is valid")
    }
}

/// The ops of the loop, one a line, without their roles.
fn check(mode: Mode, merge: Merge, element_type: ElementType, config: &str, expected: &str) {
    let program = ParameterOfJob::new(mode, merge, "w", element_type, config).program();
    let text = program.to_string();
    assert_eq!(text.parse::<Program>().expect("it reads back"), program);
    Graph::new(program).expect("it is a program that can run");
    let body = text.split_once("block 1 in 0").expect("there is a loop").1;
    let ops: Vec<&str> = body.lines().map(str::trim).filter(|line| line.contains('(')).collect();
    let ops: Vec<&str> = ops.iter().filter_map(|line| line.split_once(' ').map(|(_, op)| op)).collect();
    let expected: Vec<&str> = expected.lines().map(str::trim).collect();
    assert_eq!(ops, expected, "{text}");
}

/// The learning rate in every rule of these tests.
const RATE: &str = "lr_policy: Const const_lr { learning_rate: 1.0 }";
const USUAL: &str = "l1: 0.0 l2: 0.0 regularizer: Proximal rate_scale: 1.0";

#[test]
fn the_mode_follows_from_the_attributes_of_the_ops() {
    let sgd = format!("optimizer: SGD {RATE} {USUAL}");
    let program = |accumulator: &str, count: u32| {
        format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, {accumulator})
             w@senders = string_accumulator(w@sender, count={count})
             w, w@count = update(w, w@merged, w@count, config=\"{sgd}\")
             send(w, w@senders, channel=\"w\", to=senders)"
        )
    };
    let rounds = Mode::Sync;
    for (mode, merge, accumulator, count) in [
        (rounds, Merge::Mean, "count=3, staleness=0", 3),
        (rounds, Merge::Sum, "count=3, merge=sum, staleness=0", 3),
        (Mode::Async, Merge::Mean, "count=1, merge=sum", 1),
        (Mode::Staleness { bound: 2 }, Merge::Mean, "count=1, merge=sum, staleness=2", 1),
    ] {
        check(mode, merge, Float32, "optimizer: SGD", &program(accumulator, count));
    }
}

#[test]
fn differences_are_scaled_and_added() {
    let add = format!("{RATE} {USUAL} algorithm: \\\"add\\\"");
    let program = |gradient: &str, scale: &str| {
        format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, count=1, merge=sum)
             w@senders = string_accumulator(w@sender, count=1){scale}
             w, w@count = update(w, {gradient}, w@count, config=\"{add}\")
             send(w, w@senders, channel=\"w\", to=senders)"
        )
    };
    let scale = "\nw@scaled = scale(w@merged, factor=0.3333333333333333)";
    let adam = "optimizer: Adam adam {}";
    check(Mode::Delta, Merge::Mean, Float32, adam, &program("w@scaled", scale));
    check(Mode::Delta, Merge::Sum, Float32, adam, &program("w@merged", ""));
    check(Mode::Delta, Merge::Mean, Int64, "algorithm: \"add\"", &program("w@merged", ""));
}

#[test]
fn a_state_may_be_called_what_a_program_calls_its_own_variables() {
    for state in ["count", "gradient", "sender", "merged", "senders", "scaled"] {
        let config = format!("rule: \"state {state} = 0; {state} = {state} + g; w = w - lr*{state}\" {RATE}").leak();
        let update = format!(
            "w, w@count, w@state.{state} = update(w, w@merged, w@count, w@state.{state}, config=\"{RATE} {USUAL} rule: \
             \\\"state {state} = 0; {state} = {state} + g; w = w - lr*{state}\\\"\")"
        );
        let expected = format!(
            "w@gradient, w@sender = recv(channel=\"w\")
             w@merged = gradient_accumulator(w@gradient, w@sender, count=1, merge=sum)
             w@senders = string_accumulator(w@sender, count=1)
             {update}
             send(w, w@senders, channel=\"w\", to=senders)"
        );
        check(Mode::Async, Merge::Mean, Float32, config, &expected);
    }
}

#[test]
fn every_name_that_a_parameter_may_have_leaves_room_for_those_of_its_program() {
    let state = "s".repeat(RULE_NAME_BYTES_MAX);
    let config = format!("rule: \"state {state} = 0; {state} = g; w = w - lr*{state}\" {RATE}").leak();
    for length in [1, NAME_BYTES_MAX - 72, NAME_BYTES_MAX - 71, NAME_BYTES_MAX - 70, NAME_BYTES_MAX - 9, NAME_BYTES_MAX]
    {
        let name = &*"n".repeat(length).leak();
        let program = ParameterOfJob::new(Mode::Sync, Merge::Mean, name, Float32, config).program();
        let graph = Graph::new(program).unwrap_or_else(|failure| panic!("{length}: {failure}"));
        assert!(graph.find(name).is_some(), "{length}");
    }
}

#[test]
fn a_compiled_program_has_the_pace_and_the_scale_of_its_ops() {
    let sums = |pace, factor| (pace, Merge::Sum, factor);
    for (mode, merge, element_type, (pace, merged, factor)) in [
        (Mode::Sync, Merge::Mean, Float32, (Rounds, Merge::Mean, 1.0)),
        (Mode::Sync, Merge::Mean, Int64, sums(Rounds, 1.0)),
        (Mode::Sync, Merge::Sum, Float32, sums(Rounds, 1.0)),
        (Mode::Async, Merge::Mean, Float32, sums(Any, 1.0)),
        (Mode::Staleness { bound: 2 }, Merge::Mean, Float32, sums(Bounded(2), 1.0)),
        (Mode::Delta, Merge::Mean, Float32, sums(Any, 1.0 / 3.0)),
        (Mode::Delta, Merge::Mean, Int64, sums(Any, 1.0)),
        (Mode::Delta, Merge::Sum, Float32, sums(Any, 1.0)),
    ] {
        let config = if element_type == Float32 { "optimizer: Adam adam {}" } else { "algorithm: \"add\"" };
        let parameter = ParameterOfJob::new(mode, merge, "w", element_type, config);
        let count = if pace == Rounds { TRAINERS } else { 1 };
        let expected = Flow { pace, count, stage: Stage { merge: merged, factor } };
        assert_eq!(compile(parameter.source()), Ok(expected), "{mode:?}, {merge:?}, {element_type}");
        let without_one = compile(FlowSource { backup_trainers: 1, ..parameter.source() }).expect("it compiles");
        assert_eq!(without_one, Flow { count: count.saturating_sub(1).max(1), ..expected });
    }
}

/// A shard may have the table alone, without a dense parameter of the same kind.
#[test]
fn a_table_is_clipped_by_a_total_and_by_no_norm_of_its_own() {
    let compiled = |text: &str| {
        let config = format!("optimizer: SGD {RATE} {USUAL} sparse {{ height: 60 width: 3 buckets: 1 }} {text}");
        compile(ParameterOfJob::new(Mode::Sync, Merge::Sum, "w", Float32, &config).source())
    };
    let flow =
        compiled("stage: 'g = g * min(1 / (total(sum(g * g)) + 1e-6), 1); update'").expect("a total scales rows");
    assert_eq!(flow.pace, Rounds);
    let text = compiled("stage: 'g = g * total(sum(g * w)); update'").expect_err("rows lack w").to_string();
    assert!(text.contains("expected a dense gradient"), "{text}");
}

#[test]
fn a_program_of_another_form_is_refused_with_its_ops() {
    let program = ParameterOfJob::new(Mode::Delta, Merge::Mean, "w", Float32, "optimizer: SGD").program();
    for (without, ops) in [
        (1, "recv, string_accumulator, scale, update, send"),
        (4, "recv, gradient_accumulator, string_accumulator, scale, send"),
    ] {
        let mut other = program.clone();
        other.blocks[1].ops.remove(without);
        // A program that lacks an op may be malformed as well; both are errors of the compilation.
        let text = compile_program(other).expect_err("it lacks an op").to_string();
        assert!(text.contains(ops) || text.contains("w@"), "{text}");
    }
    let mut twice = program;
    let scale = twice.blocks[1].ops[3].clone();
    let mut again = scale.clone();
    (again.inputs, again.outputs) = (scale.outputs, vec!["w@twice".to_owned()]);
    twice.blocks[1].ops.insert(4, again);
    "w@twice".clone_into(&mut twice.blocks[1].ops[5].inputs[1]);
    let text = compile_program(twice).expect_err("it scales twice").to_string();
    assert!(text.contains("scale, scale, update, send; expected recv"), "{text}");
}

/// A program with one parameter `w`: a table of 60 rows when `is_table`, otherwise 8 numbers.
fn network(is_table: bool, config: &str) -> Graph {
    let p = Builder::new();
    let w = p.parameter("w", Float32, if is_table { &[60, 3] } else { &[8, 1] }, Initializer::Zeros, 0);
    let read = match is_table {
        true => p.lookup_table(w, p.data("ids", Int64, [Dim::Batch])),
        false => p.matmul(p.data("x", Float32, [Dim::Batch, Dim::Fixed(8)]), w),
    };
    p.named("loss", p.mean(read));
    let mut program = p.finish().expect("it fits").into_program();
    let gradients = append_backward(&mut program, "loss").expect("it has gradients");
    append_optimizer(&mut program, config, &gradients).expect("it has updates");
    Graph::new(program).expect("it is a program")
}

/// The ops of a block, with configurations written out.
fn turn(block: &Block) -> Vec<String> {
    let mut ops = block.ops.clone();
    for op in &mut ops {
        if let OpKind::Update { config } = &mut op.kind {
            let settings = OptimizerSettings::from_text(config).expect("it is a configuration");
            let rule = settings.rule.expect("it has a rule");
            *config = ParameterConfig::of(rule).to_text();
        }
    }
    ops.iter().map(|op| format!("{op:?}")).collect()
}

/// The transpiler's server part equals the program that a server of such a job builds.
fn check_alike(mode: Mode, merge: Merge, rule: &str, is_table: bool) {
    let parts = ParameterServer { mode, merge, ..ParameterServer::default() }
        .transpile(&network(is_table, rule), Cluster { trainers: 3, servers: 1 }, &CostModel::default())
        .expect("it can be divided");
    let written = parts.iter().find(|part| part.peers == [ProgramPeer::Server(0)]).expect("there is a server");
    let written = &written.graph.program().blocks[1];
    let sparse = if is_table { "sparse { height: 60 width: 3 buckets: 1 }" } else { "" };
    let config: &str = format!("{rule} {sparse}").leak();
    let made = ParameterOfJob::new(mode, merge, "w", Float32, config).program();
    assert_eq!(turn(written), turn(&made.blocks[1]), "{mode:?} {merge:?} {config}");
    let facts = |block: &Block| block.variables.iter().map(|one| one.facts.to_string()).collect::<Vec<_>>();
    assert!(!is_table || facts(written) == facts(&made.blocks[1]), "{:?}", facts(written));
}

#[test]
fn servers_compile_the_programs_of_the_transpiler() {
    let rules = [
        "optimizer: SGD",
        "sgd { momentum: 0.9 nesterov: true } const_lr { learning_rate: 0.1 } l2: 0.01",
        "optimizer: Adadelta adadelta { }",
        "optimizer: Adagrad adagrad { }",
        "optimizer: Adam adam { } lr_policy: Linear linear_lr { learning_rate: 0.1 lr_decay_a: 0.01 lr_decay_b: 0.1 }",
        "algorithm: \"rmsprop\" rmsprop { momentum: 0.5 }",
        "algorithm: \"ftrl\" ftrl { }",
        "rule: 'state m = 0.5; m = b*m + g; w -= lr*m' rule_set { key: 'b' value: 0.9 }",
    ];
    for mode in [Mode::Sync, Mode::Async, Mode::Staleness { bound: 1 }, Mode::Staleness { bound: 9 }] {
        for merge in [Merge::Mean, Merge::Sum] {
            rules.iter().for_each(|rule| check_alike(mode, merge, rule, false));
            rules.iter().for_each(|rule| check_alike(mode, merge, rule, true));
            check_alike(mode, merge, "optimizer: SGD clip_norm: 2.0", false);
        }
    }
}
