//! Networks to divide.

use crate::transpile::{CostModel, ProcessRates};
use crate::{
    Builder, Dim, Elements, Graph, Program, Symbol, Tensor, VariableValue, WindowSteps, append_backward,
    append_optimizer,
};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;

pub(super) const SGD: &str = "const_lr { learning_rate: 0.5 }";
pub(super) const ADAM: &str = "optimizer: Adam adam { } const_lr { learning_rate: 0.25 }";
/// An optimizer that needs the norm of the whole gradient.
pub(super) const CLIPPED: &str = "const_lr { learning_rate: 0.5 } clip_norm: 0.5";
const RULES: [&str; 12] = [
    CLIPPED,
    SGD,
    ADAM,
    "sgd { momentum: 0.9 } const_lr { learning_rate: 0.25 } l2: 0.01",
    "sgd { momentum: 0.9 nesterov: true } const_lr { learning_rate: 0.25 }",
    "optimizer: Adagrad adagrad { epsilon: 1e-6 } const_lr { learning_rate: 0.25 } l1: 0.001",
    "optimizer: Adadelta adadelta { } const_lr { learning_rate: 0.25 }",
    "algorithm: 'rmsprop' rmsprop { momentum: 0.5 } const_lr { learning_rate: 0.25 }",
    "algorithm: 'adamw' adamw { } const_lr { learning_rate: 0.25 } l2: 0.01",
    "algorithm: 'ftrl' ftrl { beta: 1 } const_lr { learning_rate: 0.25 } l1: 0.001",
    "algorithm: 'lion' const_lr { learning_rate: 0.25 }",
    "rule: 'state m = 0.5\\n' 'm = 0.5*m + g\\n' 'w -= lr*m/n' const_lr { learning_rate: 0.25 }",
];

const UNIFORM: Initializer = Initializer::Uniform { low: -0.5, high: 0.5 };
const GAUSSIAN: Initializer = Initializer::Gaussian { mean: 0.0, deviation: 0.5 };

/// A cost model in which cuts of this many bytes pay off: messages and ops are free, and so is a trainer's memory.
pub(super) fn cutting(chunk_bytes: u32) -> CostModel {
    let server = ProcessRates { message_seconds: 0.0, op_seconds: 0.0, row_seconds: 0.0, ..ProcessRates::default() };
    let trainer = ProcessRates { flops_per_second: 1e30, memory_bytes_per_second: 1e30, ..server };
    CostModel { trainer, server, chunk_bytes, ..CostModel::default() }
}

pub(super) fn graph(program: Program) -> Graph {
    Graph::new(program).expect("the test's program is valid")
}

/// With gradients, and one rule for all parameters.
pub(super) fn trained(builder: Builder, config: &str) -> Graph {
    let mut program = builder.finish().expect("the test's network is valid").into_program();
    let gradients = append_backward(&mut program, "loss").expect("the network has gradients");
    append_optimizer(&mut program, config, &gradients).expect("the rule fits");
    graph(program)
}

/// `loss = mean(cross entropy(tanh(x a + b) c, label))`
pub(super) fn two_layers(config: &str) -> Graph {
    let p = Builder::new();
    let x = p.data("x", Float32, [Dim::Batch, Dim::Fixed(6)]);
    let label = p.data("label", Int64, [Dim::Batch]);
    let (a, b) = (p.parameter("a", Float32, &[6, 8], UNIFORM, 1), p.parameter("b", Float32, &[8], UNIFORM, 2));
    let c = p.parameter("c", Float32, &[8, 4], GAUSSIAN, 3);
    let scores = p.matmul(p.tanh(p.add(p.matmul(x, a), b)), c);
    let (losses, _) = p.softmax_with_cross_entropy(scores, label);
    p.named("loss", p.mean(losses));
    trained(p, config)
}

/// A convolution and pools over images, a normalised layer, and dropout.
pub(super) fn convolutional(config: &str) -> Graph {
    let p = Builder::new();
    let x = p.data("x", Float32, [Dim::Batch, Dim::Fixed(2), Dim::Fixed(6), Dim::Fixed(6)]);
    let (label, step) = (p.data("label", Int64, [Dim::Batch]), p.data("step", Int64, []));
    let filter = p.parameter("filter", Float32, &[4, 2, 3, 3], UNIFORM, 1);
    let (scale, bias) =
        (p.parameter("scale", Float32, &[4], UNIFORM, 2), p.parameter("bias", Float32, &[4], UNIFORM, 3));
    let steps = |stride, padding| WindowSteps { stride: [stride; 2], padding: [padding; 2] };
    let images = p.max_pool2d(p.tanh(p.conv2d(x, filter, steps(1, 1))), [2, 2], steps(2, 0));
    let means = p.reduce_sum(p.reduce_sum(p.avg_pool2d(images, [3, 3], steps(1, 0)), 3), 2);
    let scores = p.dropout(p.gelu(p.layer_norm(means, scale, bias, 0.01), false), step, 0.25, 5);
    let (losses, _) = p.softmax_with_cross_entropy(scores, label);
    p.named("loss", p.mean(losses));
    trained(p, config)
}

/// An embedding of `rows` rows, 4,096 of them for each example, and layers of `layer_rows` rows, of which only sizes
/// matter.
pub(super) fn unbalanced(rows: u64, layers: u64, layer_rows: u64) -> Graph {
    const WIDTH: u64 = 64;
    let p = Builder::new();
    let ids = p.data("ids", Int64, [Dim::Batch, Dim::Fixed(4096)]);
    let table = p.parameter("embedding", Float32, &[rows, WIDTH], UNIFORM, 0);
    let mut h = p.reduce_sum(p.lookup_table(table, ids), 1);
    for layer in 0..layers {
        let up = p.parameter(&format!("layer{layer}"), Float32, &[layer_rows, WIDTH], UNIFORM, layer + 1);
        let wide = p.matmul_transposed(h, false, up, true);
        h = p.matmul(wide, up);
    }
    p.named("loss", p.mean(h));
    trained(p, SGD)
}

/// A network of a few layers, with or without an embedding, and a rule for each parameter.
pub(super) fn random(prng: &mut Prng, may_embed: bool) -> Graph {
    let p = Builder::new();
    let label = p.data("label", Int64, [Dim::Batch]);
    let mut width = 1 + prng.below(7);
    let mut h = if prng.below(2) == 0 || !may_embed {
        p.data("x", Float32, [Dim::Batch, Dim::Fixed(width)])
    } else {
        let ids = p.data("ids", Int64, [Dim::Batch]);
        let height = 3 + prng.below(9);
        let table = p.parameter("table", Float32, &[height, width], UNIFORM, prng.next());
        let h = p.lookup_table(table, ids);
        match prng.below(3) {
            0 => h,
            1 => p.add(h, p.lookup_table(table, derived(&p, p.cast(ids, Float32), height))),
            // Ids that are computed from the first rows.
            _ => p.add(h, p.lookup_table(table, derived(&p, p.scale(p.reduce_sum(h, 1), 40.0), height))),
        }
    };
    for layer in 0..1 + prng.below(3) {
        let next = 1 + prng.below(7);
        h = dense(&p, prng, h, layer, [width, next]);
        width = next;
        if prng.below(3) == 0 {
            // A parameter that is used twice, and both results side by side.
            let shared = p.parameter(&format!("s{layer}"), Float32, &[width, width], UNIFORM, prng.next());
            let once = p.matmul(h, shared);
            h = p.concat(&[p.matmul(once, shared), h], 1);
            width *= 2;
        }
    }
    let (losses, _) = p.softmax_with_cross_entropy(h, label);
    p.named("loss", p.mean(losses));
    let mut program = p.finish().expect("the network is valid").into_program();
    let gradients = append_backward(&mut program, "loss").expect("the network has gradients");
    for gradient in gradients {
        let is_table = gradient.parameter == "table";
        // Rows do not go with a norm of the whole.
        let rule = prng.choose(if is_table { &RULES[1..] } else { &RULES });
        append_optimizer(&mut program, rule, &[gradient]).expect("the rule fits");
    }
    graph(program)
}

/// Ids of a table that are computed from one number for each example.
fn derived(p: &Builder, x: Symbol, height: u64) -> Symbol {
    let fraction = p.sigmoid(p.scale(x, 0.3));
    p.cast(p.scale(fraction, height as f64 - 0.01), Int64)
}

fn dense(p: &Builder, prng: &mut Prng, h: Symbol, layer: u64, [width, next]: [u64; 2]) -> Symbol {
    let weight =
        p.parameter(&format!("w{layer}"), Float32, &[width, next], prng.choose(&[UNIFORM, GAUSSIAN]), prng.next());
    let mut h = p.matmul(h, weight);
    if prng.below(2) == 0 {
        let bias = p.parameter(&format!("b{layer}"), Float32, &[next], prng.choose(&[UNIFORM, Initializer::Zeros]), 9);
        h = p.add(h, bias);
    }
    match prng.below(4) {
        0 => p.relu(h),
        1 => p.sigmoid(h),
        2 => p.tanh(h),
        _ => h,
    }
}

/// A batch for any of these networks.
pub(super) fn batch(graph: &Graph, prng: &mut Prng) -> Vec<(String, VariableValue)> {
    let examples = usize::try_from(1 + prng.below(5)).expect("few examples");
    let mut fed = Vec::new();
    for variable in graph.variables().iter().filter(|known| known.purpose == crate::Purpose::Data) {
        let crate::VariableFacts::Dense { shape, .. } = &variable.facts else { panic!("data are dense") };
        let value = match &shape[..] {
            [] => Tensor::new([], Elements::Int64(vec![i64::try_from(prng.below(100)).expect("small")])),
            [_, example @ ..] if !example.is_empty() => {
                let mut shape = vec![examples as u64];
                shape.extend(example.iter().map(|dim| match dim {
                    Dim::Fixed(length) => *length,
                    Dim::Batch => panic!("one dimension is the batch"),
                }));
                let elements = (0..shape.iter().product()).map(|_| real(prng)).collect();
                Tensor::new(shape, Elements::Float32(elements))
            }
            _ => {
                let end = if variable.name == "ids" { height(graph) } else { classes(graph) };
                let numbers = (0..examples).map(|_| i64::try_from(prng.below(end)).expect("small"));
                Tensor::new([examples as u64], Elements::Int64(numbers.collect()))
            }
        };
        fed.push((variable.name.clone(), value.into()));
    }
    fed
}

fn height(graph: &Graph) -> u64 {
    let facts = graph.facts("table").or_else(|| graph.facts("embedding")).expect("ids are for a table");
    first(facts)
}

fn classes(graph: &Graph) -> u64 {
    let ops = &graph.program().blocks[0].ops;
    let loss = ops.iter().find(|op| op.kind.name() == "softmax_with_cross_entropy").expect("labels are for a loss");
    let crate::VariableFacts::Dense { shape, .. } = graph.facts(&loss.inputs[0]).expect("it has facts") else {
        panic!("scores are dense")
    };
    let Dim::Fixed(classes) = shape[1] else { panic!("classes are known") };
    classes
}

fn first(facts: &crate::VariableFacts) -> u64 {
    match facts {
        crate::VariableFacts::Dense { shape, .. } => match shape[0] {
            Dim::Fixed(length) => length,
            Dim::Batch => panic!("a parameter has no batch"),
        },
        _ => panic!("a parameter is dense"),
    }
}

/// In [-1, 1), a multiple of 1/128.
fn real(prng: &mut Prng) -> f32 {
    f32::from(i8::from_le_bytes([prng.next().to_le_bytes()[0]])) / 128.0
}
