//! Random programs to be divided: layers and tables of very different sizes, with a rule for each parameter.

use anyhow::Result;
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;
use pserver_program::transpile::Cluster;
use pserver_program::{Builder, Dim, Graph, Symbol, append_backward, append_optimizer};

/// The last rule needs a norm of the whole gradient: its parameters cannot be cut, and have no rows.
const RULES: [&str; 4] = [
    "const_lr { learning_rate: 0.01 }",
    "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }",
    "optimizer: Adagrad adagrad { epsilon: 1e-6 } const_lr { learning_rate: 0.01 }",
    "const_lr { learning_rate: 0.01 } clip_norm: 0.5",
];
const WIDTHS: [u64; 6] = [8, 32, 64, 128, 512, 1024];
const UNIFORM: Initializer = Initializer::Uniform { low: -0.1, high: 0.1 };

/// A program, and the job that it is divided for.
pub(crate) struct RandomProgram {
    pub(crate) graph: Graph,
    pub(crate) cluster: Cluster,
    /// Examples of a trainer's step.
    pub(crate) batch: u64,
}

impl RandomProgram {
    /// The program of a seed, for at most so many trainers and servers.
    pub(crate) fn new(seed: u64, trainers_max: u64, servers_max: u64) -> Result<Self> {
        let prng = &mut Prng(seed);
        let mut count = |most: u64| u32::try_from(1 + prng.below(most));
        let cluster = Cluster { trainers: count(trainers_max)?, servers: count(servers_max)? };
        let batch = prng.choose(&[8, 32, 128]);
        Ok(Self { graph: graph(prng)?, cluster, batch })
    }
}

fn graph(prng: &mut Prng) -> Result<Graph> {
    let p = Builder::new();
    let label = p.data("label", Int64, [Dim::Batch]);
    let mut width = prng.choose(&WIDTHS);
    let mut h = p.data("x", Float32, [Dim::Batch, Dim::Fixed(width)]);
    for number in 0..prng.below(4) {
        let (rows, columns) = (10 * prng.choose(&[10, 1000, 10_000]), prng.choose(&[4, 16, 64]));
        h = p.concat(&[h, pooled(&p, number, rows, columns, 1 + prng.below(8))], 1);
        width += columns;
    }
    for layer in 0..1 + prng.below(5) {
        let next = prng.choose(&WIDTHS);
        let weight = p.parameter(&format!("w{layer}"), Float32, &[width, next], UNIFORM, layer);
        h = p.matmul(h, weight);
        if prng.below(2) == 0 {
            h = p.add(h, p.parameter(&format!("b{layer}"), Float32, &[next], Initializer::Zeros, 0));
        }
        h = p.relu(h);
        width = next;
    }
    let (losses, _) = p.softmax_with_cross_entropy(h, label);
    p.named("loss", p.mean(losses));
    let mut program = p.finish()?.into_program();
    let gradients = append_backward(&mut program, "loss")?;
    let rule = prng.index(RULES.len());
    for gradient in gradients {
        // Most parameters have the same rule.
        let own = if prng.below(4) == 0 { prng.index(RULES.len()) } else { rule };
        let is_table = gradient.parameter.starts_with("table");
        let rules = if is_table { &RULES[..3] } else { &RULES[..] };
        append_optimizer(&mut program, rules[own % rules.len()], &[gradient])?;
    }
    Ok(Graph::new(program)?)
}

/// The sum of the rows of some ids.
fn pooled(p: &Builder, number: u64, rows: u64, columns: u64, ids: u64) -> Symbol {
    let table = p.parameter(&format!("table{number}"), Float32, &[rows, columns], UNIFORM, 100 + number);
    let ids = p.data(&format!("ids{number}"), Int64, [Dim::Batch, Dim::Fixed(ids)]);
    p.reduce_sum(p.lookup_table(table, ids), 1)
}
