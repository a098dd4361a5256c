//! Numbers of several parameters: trainers make them, and all parts together compute the same as the whole program.

use crate::transpile::{Cluster, CostModel, ParameterServer, ProgramPart, Transpiler};
use crate::{Graph, Program, append_backward};
use pserver_core::config::{Merge, Mode};
use pserver_core::prng::Prng;

use super::networks::batch;
use super::wire::{Feeds, Job, plainly};

/// A program of the parameters `p0` to `p4`, with their gradients and these optimizer lines.
fn program(lines: &str) -> Graph {
    let numbers = 0..5;
    let parameters: String = numbers
        .clone()
        .map(|n| {
            format!(
                "parameter p{n}: float32[2, 3]\nstate p{n}@count: int64[]\n\
                 initialise p{n} = uniform(low=-1.0, high=1.0, seed={n})\ninitialise p{n}@count = fill(value=0.0)\n\
                 forward y{n} = matmul(x, p{n})\n"
            )
        })
        .collect();
    let forward = format!(
        "block 0 {{\ndata x: float32[batch, 2]\n{parameters}forward all = sum(y0, y1, y2, y3, y4)\n\
         forward squares = mul(all, y0)\nforward loss = mean(squares)\n}}"
    );
    let mut program: Program = forward.parse().unwrap_or_else(|failure| panic!("{failure}\n{forward}"));
    append_backward(&mut program, "loss").expect("it has gradients");
    let text = program.to_string();
    let body = text.trim_end().strip_suffix('}').expect("it ends with a brace");
    let text = format!("{body}\n{lines}\n}}");
    Graph::new(text.parse().unwrap_or_else(|failure| panic!("{failure}\n{text}"))).expect("it is a program")
}

fn update(n: u32, gradient: &str) -> String {
    format!(
        "optimize p{n}, p{n}@count = update(p{n}, {gradient}, p{n}@count,\n\
         config=\"const_lr {{ learning_rate: 0.5 }}\")\n"
    )
}

fn share(n: u32) -> String {
    format!("optimize q{n} = mul(p{n}@gradient, p{n}@gradient)\noptimize h{n} = reduce_sum(q{n})\n")
}

/// Clipping of some parameters by the norm of all their gradients.
fn clipped(name: &str, numbers: &[u32]) -> String {
    let shares: String = numbers.iter().map(|n| share(*n)).collect();
    let sum: Vec<String> = numbers.iter().map(|n| format!("h{n}")).collect();
    let factor = format!(
        "temporary {name}@limit: float32[]\noptimize {name}@sum = sum({})\noptimize {name}@norm = sqrt({name}@sum)\n\
         optimize {name}@limit = fill(value=0.1)\noptimize {name}@divisor = max({name}@limit, {name}@norm)\n\
         optimize {name}@factor = div({name}@limit, {name}@divisor)\n",
        sum.join(", ")
    );
    let update =
        |n: &u32| format!("optimize c{n} = mul(p{n}@gradient, {name}@factor)\n{}", update(*n, &format!("c{n}")));
    format!("{shares}{factor}{}", numbers.iter().map(update).collect::<String>())
}

fn divided(graph: &Graph, trainers: u32, servers: u32, mode: Mode) -> Result<Vec<ProgramPart>, String> {
    let transpiler = ParameterServer { mode, merge: Merge::Mean, ..ParameterServer::default() };
    let parts = transpiler.transpile(graph, Cluster { trainers, servers }, &CostModel::default());
    parts.map_err(|failure| failure.to_string())
}

fn parts(graph: &Graph, trainers: u32, servers: u32) -> Vec<ProgramPart> {
    divided(graph, trainers, servers, Mode::Sync).expect("the program can be divided")
}

#[test]
fn two_norms_and_a_parameter_in_none_have_the_bits_of_one_process() {
    let graph = program(&format!("{}{}{}", clipped("n", &[0, 3]), clipped("m", &[1, 2]), update(4, "p4@gradient")));
    let prng = &mut Prng(7);
    let feeds = |trainers: u32, prng: &mut Prng| -> Feeds {
        (0..trainers).map(|_| (0..3).map(|_| batch(&graph, prng)).collect()).collect()
    };
    let alone = feeds(1, prng);
    for servers in 1..5 {
        let job = Job::run(&parts(&graph, 1, servers), &alone, prng);
        assert_eq!(job.kept(), plainly(&graph, &alone[0]), "{servers} servers");
    }
    assert_ne!(plainly(&graph, &alone[0])["p0"], plainly(&graph, &[])["p0"]);
    let many = feeds(4, prng);
    let one = Job::run(&parts(&graph, 4, 1), &many, prng).kept();
    assert_eq!(Job::run(&parts(&graph, 4, 3), &many, prng).kept(), one);
}

#[test]
fn parameters_of_one_norm_are_on_several_servers() {
    let graph = program(&format!("{}{}", clipped("n", &[0, 1, 2, 3]), update(4, "p4@gradient")));
    let parts = parts(&graph, 2, 2);
    let texts: Vec<String> = parts.iter().map(|part| part.graph.program().to_string()).collect();
    for server in &texts[1..] {
        assert!(server.matches("@share\", to=senders)").count() >= 1 && !server.contains("sqrt"), "{server}");
    }
    assert_eq!(texts[0].matches("@share\")").count(), 4, "{}", texts[0]);
    assert_eq!(texts[0].matches("send(n@factor").count(), 4, "{}", texts[0]);
}

#[test]
fn numbers_that_servers_cannot_represent_are_refused_by_their_op() {
    let refuse = |lines: &str, mode: Mode, expected: &str| {
        let text = divided(&program(lines), 2, 2, mode).expect_err(lines);
        assert!(text.contains(expected), "{lines}: {text}");
    };
    let rest = [2, 3, 4].map(|n| update(n, &format!("p{n}@gradient"))).concat();
    let two = format!("{}{rest}", clipped("n", &[0, 1]));
    let expected = "sum: found a number of several parameters in mode Async; expected mode Sync, in which all";
    refuse(&two, Mode::Async, expected);
    refuse(&two, Mode::Staleness { bound: 2 }, "sum: found a number of several parameters in mode Staleness");
}

/// Numbers that trainers cannot make join their parameters, which are one group on one server then.
#[test]
fn numbers_that_trainers_cannot_make_join_their_parameters() {
    let rest = [2, 3, 4].map(|n| update(n, &format!("p{n}@gradient"))).concat();
    let two = format!("{}{rest}", clipped("n", &[0, 1]));
    let both = format!("{two}optimize other = add(h0, h1)\noptimize p0 = mul(p0, other)\n");
    let read = two.replace("mul(p1@gradient, n@factor)", "scale(p1@gradient, factor=0.5)");
    let shares = two.replace("sum(h0, h1)", "sum(h0, h1, r1)").replace(
        "optimize h1 = reduce_sum(q1)\n",
        "optimize h1 = reduce_sum(q1)\noptimize r1 = reduce_sum(p1@gradient)\n",
    );
    for lines in [both, read, shares] {
        let parts = parts(&program(&lines), 2, 2);
        let has = |part: &ProgramPart, name: &str| part.graph.find(name).is_some();
        let owners: Vec<bool> = parts[1..].iter().map(|part| has(part, "p0")).collect();
        assert_eq!(owners, parts[1..].iter().map(|part| has(part, "p1")).collect::<Vec<_>>(), "{lines}");
        assert!(!parts[0].graph.program().to_string().contains("@share"), "{lines}");
    }
}
