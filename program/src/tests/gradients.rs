//! Gradients agree with finite differences.

use proptest::prelude::{ProptestConfig, any, proptest};

use crate::{
    Builder, Dim, Elements, Graph, PlainArithmetic, PlainRun, Program, Symbol, Tensor, VariableValue, WindowSteps,
    append_backward,
};
use pserver_core::dtype::ElementType;
use pserver_core::port::Plain;
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;

use super::random::{F64, ids, signed, tensor};

const UNIFORM: Initializer = Initializer::Uniform { low: -1.0, high: 1.0 };
const BATCH: u64 = 5;

fn parameter(p: &Builder, name: &str, shape: &[u64]) -> Symbol {
    p.parameter(name, F64, shape, UNIFORM, name.bytes().map(u64::from).sum())
}

/// Data of the shape that `y` has, so that every element of `y` has a slope of its own.
fn weighed(p: &Builder, y: Symbol, shape: &[u64]) -> Symbol {
    let dims: Vec<Dim> = shape.iter().map(|length| Dim::Fixed(*length)).collect();
    let weights = p.data(&format!("weights of {}", p.name(y)), F64, dims);
    p.mean(p.mul(y, weights))
}

/// Sets every data variable to values of its facts; ids and labels are below `bound`.
fn feed(run: &mut PlainRun<'_>, graph: &Graph, prng: &mut Prng, bound: u64) {
    for variable in graph.variables().iter().filter(|variable| variable.purpose == crate::Purpose::Data) {
        let crate::VariableFacts::Dense { element_type, shape } = &variable.facts else { panic!("dense data only") };
        let shape: Vec<u64> = shape
            .iter()
            .map(|dim| match dim {
                Dim::Fixed(length) => *length,
                Dim::Batch => BATCH,
            })
            .collect();
        let value = if *element_type == ElementType::Int64 { ids(prng, &shape, bound) } else { tensor(prng, &shape) };
        run.set(&variable.name, value).unwrap();
    }
}

fn floats(value: &VariableValue) -> Vec<f64> {
    match value {
        VariableValue::Dense(tensor) => match tensor.elements() {
            Elements::Float64(values) => values.clone(),
            Elements::Float32(values) => values.iter().map(|value| f64::from(*value)).collect(),
            other => panic!("{}", other.element_type()),
        },
        VariableValue::SelectedRows(rows) => {
            let layout = rows.view().layout();
            let width = layout.width() as usize;
            let mut dense = vec![0.0; usize::try_from(layout.height().bound()).unwrap() * width];
            for (id, row) in rows.view().iter() {
                for (place, bytes) in row.chunks_exact(8).enumerate() {
                    dense[usize::try_from(id).unwrap() * width + place] +=
                        f64::from_le_bytes(bytes.try_into().unwrap());
                }
            }
            dense
        }
        VariableValue::Strings(_) => panic!("strings have no slope"),
    }
}

/// Checks every element of every gradient against a symmetric difference of the loss.
fn check_program(name: &str, mut program: Program, seed: u64) {
    const STEP: f64 = 1.0 / 1_048_576.0;
    let gradients = append_backward(&mut program, "loss").unwrap_or_else(|failure| panic!("{name}: {failure}"));
    let graph = Graph::new(program).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    feed(&mut run, &graph, &mut Prng(seed), 4);
    run.step().unwrap();
    let slopes: Vec<_> = gradients.iter().map(|found| floats(run.value(&found.gradient).unwrap())).collect();
    for (found, slopes) in gradients.into_iter().zip(slopes) {
        let start = run.value(&found.parameter).unwrap().tensor().clone();
        let values = floats(&start.clone().into());
        assert_eq!(slopes.len(), values.len());
        for place in 0..values.len() {
            let mut loss = |shift: f64| {
                let mut moved = values.clone();
                moved[place] += shift;
                run.set(&found.parameter, Tensor::new(start.shape(), Elements::Float64(moved))).unwrap();
                run.step().unwrap();
                floats(run.value("loss").unwrap())[0]
            };
            let difference = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            let slope = slopes[place];
            // binary64 keeps a loss near one to 2e-16, which the step turns into 2e-10.
            assert!(
                (slope - difference).abs() <= 1e-8 * (1.0 + slope.abs()),
                "{name}, seed {seed}: {}[{place}] has {slope}, the difference is {difference}",
                found.gradient
            );
        }
        run.set(&found.parameter, start).unwrap();
    }
}

fn check(name: &str, build: impl Fn(&Builder) -> Symbol) {
    for seed in 0..3 {
        let p = Builder::new();
        let loss = build(&p);
        p.named("loss", loss);
        let graph = p.finish().unwrap_or_else(|failure| panic!("{name}: {failure}"));
        check_program(name, graph.into_program(), seed);
    }
}

#[test]
fn the_gradients_of_products_agree_with_differences() {
    for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
        check(&format!("matmul {left} {right}"), |p| {
            let a = parameter(p, "a", if left { &[3, 2] } else { &[2, 3] });
            let b = parameter(p, "b", if right { &[4, 3] } else { &[3, 4] });
            weighed(p, p.matmul_transposed(a, left, b, right), &[2, 4])
        });
    }
    let away = |p: &Builder, name, shape: &[u64]| p.exp(parameter(p, name, shape));
    let pairs: [(&str, Pair, bool); 7] = [
        ("add", Builder::add, false),
        ("mul", Builder::mul, false),
        ("sub", Builder::sub, false),
        ("max", Builder::max, false),
        ("min", Builder::min, false),
        ("div", Builder::div, true),
        ("pow", Builder::pow, true),
    ];
    for (name, pair, is_positive) in pairs {
        for (left, right) in BROADCAST {
            check(&format!("{name} {left:?} {right:?}"), |p| {
                let made =
                    if is_positive { away } else { |p: &Builder, name, shape: &[u64]| parameter(p, name, shape) };
                weighed(p, pair(p, made(p, "a", left), made(p, "b", right)), &[2, 3])
            });
        }
    }
    check("scale", |p| weighed(p, p.scale(parameter(p, "a", &[2, 3]), -2.5), &[2, 3]));
    check("a batch's product", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(3)]);
        p.mean(p.tanh(p.add(p.matmul(x, parameter(p, "w", &[3, 2])), parameter(p, "b", &[2]))))
    });
}

/// A method of the builder for an op of two operands.
type Pair = fn(&Builder, Symbol, Symbol) -> Symbol;

/// Shapes whose broadcast is `[2, 3]`.
const BROADCAST: [(&[u64], &[u64]); 10] = [
    (&[2, 3], &[2, 3]),
    (&[2, 3], &[3]),
    (&[2, 3], &[1, 3]),
    (&[2, 3], &[2, 1]),
    (&[2, 3], &[1]),
    (&[2, 3], &[]),
    (&[3], &[2, 3]),
    (&[], &[2, 3]),
    (&[2, 1], &[1, 3]),
    (&[2, 1], &[3]),
];

#[test]
fn a_gradient_goes_to_one_of_the_operands_and_only_where_it_is_needed() {
    let fixed = |p: &Builder| p.data("x", F64, [Dim::Batch, Dim::Fixed(3)]);
    for (name, pair) in
        [("sub", Builder::sub as Pair), ("div", Builder::div), ("max", Builder::max), ("min", Builder::min)]
    {
        check(&format!("{name} of data"), |p| p.mean(pair(p, fixed(p), parameter(p, "a", &[3]))));
        check(&format!("{name} by data"), |p| p.mean(pair(p, parameter(p, "a", &[3]), fixed(p))));
    }
    check("a power of a negative number", |p| {
        let three = p.scale(p.sign(p.exp(parameter(p, "a", &[2]))), 3.0);
        weighed(p, p.pow(parameter(p, "b", &[2]), three), &[2])
    });
}

/// The gradient of the mean of the built expression with respect to the parameter `x`, which has one value.
fn slope_at(value: f64, build: impl Fn(&Builder, Symbol) -> Symbol) -> f64 {
    let p = Builder::new();
    let x = p.parameter("x", F64, &[1], Initializer::Constant(value), 0);
    p.named("loss", p.mean(build(&p, x)));
    let mut program = p.finish().unwrap().into_program();
    let gradients = append_backward(&mut program, "loss").unwrap();
    let graph = Graph::new(program).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    run.step().unwrap();
    floats(run.value(&gradients[0].gradient).unwrap())[0]
}

#[test]
fn a_slope_where_there_is_a_kink_is_as_documented() {
    let one = |p: &Builder, x| p.exp(p.scale(x, 0.0));
    assert_eq!(slope_at(0.0, |p, x| p.abs(x)), 0.0);
    assert_eq!(slope_at(-2.0, |p, x| p.abs(x)), -1.0);
    assert_eq!(slope_at(0.0, |p, x| p.max(x, p.scale(x, 5.0))), 5.0, "the second of equals");
    assert_eq!(slope_at(0.0, |p, x| p.min(x, p.scale(x, 5.0))), 5.0, "the second of equals");
    assert_eq!(slope_at(0.0, |p, x| p.pow(x, p.scale(one(p, x), 2.0))), 0.0);
    assert_eq!(slope_at(0.0, |p, x| p.pow(x, one(p, x))), 1.0);
    assert_eq!(slope_at(0.0, |p, x| p.pow(x, x)), 0.0, "zero where the exponent or the base is");
}

#[test]
fn the_gradients_of_functions_agree_with_differences() {
    check("relu", |p| weighed(p, p.relu(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("sigmoid", |p| weighed(p, p.sigmoid(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("tanh", |p| weighed(p, p.tanh(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("softmax", |p| weighed(p, p.softmax(parameter(p, "a", &[2, 3, 4])), &[2, 3, 4]));
    check("log_softmax", |p| weighed(p, p.log_softmax(parameter(p, "a", &[2, 3, 4])), &[2, 3, 4]));
    check("softmax of a batch", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(3)]);
        p.mean(p.tanh(p.log_softmax(p.softmax(p.mul(x, parameter(p, "a", &[3]))))))
    });
    check("exp", |p| weighed(p, p.exp(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("log", |p| weighed(p, p.log(p.exp(parameter(p, "a", &[3, 5]))), &[3, 5]));
    check("log of a sum", |p| {
        let sum = p.add(p.exp(parameter(p, "a", &[3, 5])), p.sigmoid(parameter(p, "b", &[5])));
        weighed(p, p.log(sum), &[3, 5])
    });
    check("sqrt", |p| weighed(p, p.sqrt(p.exp(parameter(p, "a", &[3, 5]))), &[3, 5]));
    check("abs", |p| weighed(p, p.abs(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("mean", |p| p.mean(parameter(p, "a", &[3, 5])));
    check("cast there and back", |p| weighed(p, p.cast(p.cast(parameter(p, "a", &[4]), F64), F64), &[4]));
    check("softmax_with_cross_entropy", |p| {
        let label = p.data("label", ElementType::Int64, [Dim::Fixed(3)]);
        let scores = p.scale(parameter(p, "scores", &[3, 4]), 3.0);
        weighed(p, p.softmax_with_cross_entropy(scores, label).0, &[3])
    });
    check("sigmoid_cross_entropy", |p| {
        let label = p.data("label", F64, [Dim::Fixed(3), Dim::Fixed(4)]);
        weighed(p, p.sigmoid_cross_entropy(parameter(p, "scores", &[3, 4]), label), &[3, 4])
    });
}

#[test]
fn the_gradients_of_layout_ops_agree_with_differences() {
    check("sum", |p| {
        let (a, b) = (parameter(p, "a", &[2, 3]), parameter(p, "b", &[2, 3]));
        weighed(p, p.sum(&[a, b, a]), &[2, 3])
    });
    for axis in 0..3 {
        check(&format!("reduce_sum {axis}"), |p| {
            let mut shape = vec![2, 3, 4];
            shape.remove(axis as usize);
            weighed(p, p.reduce_sum(parameter(p, "a", &[2, 3, 4]), axis), &shape)
        });
        check(&format!("concat {axis}"), |p| {
            let (mut other, mut whole) = (vec![2, 3, 4], vec![2, 3, 4]);
            (other[axis as usize], whole[axis as usize]) = (2, whole[axis as usize] + 2);
            let (a, b) = (parameter(p, "a", &[2, 3, 4]), parameter(p, "b", &other));
            weighed(p, p.concat(&[a, b], axis), &whole)
        });
        check(&format!("split {axis}"), |p| {
            let mut shape = [2, 3, 4];
            shape[axis as usize] = 5;
            let [one, _, other] = p.split(parameter(p, "a", &shape), axis, [2, 1, 2]);
            shape[axis as usize] = 2;
            weighed(p, p.mul(one, p.tanh(other)), &shape)
        });
    }
    for (axes, shape, kept) in [
        (&[0, 1][..], &[4][..], &[1, 1, 4][..]),
        (&[2, 0], &[3], &[1, 3, 1]),
        (&[1], &[2, 4], &[2, 1, 4]),
        (&[], &[], &[1, 1, 1]),
    ] {
        for (keep, shape) in [(false, shape), (true, kept)] {
            check(&format!("reduce_sum {axes:?} {keep}"), |p| {
                weighed(p, p.reduce_sum_over(parameter(p, "a", &[2, 3, 4]), axes, keep), shape)
            });
            check(&format!("mean {axes:?} {keep}"), |p| {
                weighed(p, p.mean_over(parameter(p, "a", &[2, 3, 4]), axes, keep), shape)
            });
        }
    }
    check("a mean over the batch", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(3)]);
        p.mean(p.tanh(p.mean_over(p.tanh(p.mul(x, parameter(p, "a", &[3]))), &[0], false)))
    });
    check("reshape", |p| weighed(p, p.reshape(parameter(p, "a", &[2, 3, 4]), &[6, 0]), &[6, 4]));
    check("reshape of a batch", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(6)]);
        let y = p.reshape(p.mul(x, parameter(p, "a", &[6])), &[0, 2, 3]);
        p.mean(p.tanh(p.mul(y, parameter(p, "b", &[2, 1]))))
    });
    check("transpose", |p| weighed(p, p.transpose(parameter(p, "a", &[2, 3, 4]), &[2, 0, 1]), &[4, 2, 3]));
    check("lookup_table", |p| {
        let ids = p.data("ids", ElementType::Int64, [Dim::Batch, Dim::Fixed(2)]);
        p.mean(p.tanh(p.lookup_table(parameter(p, "table", &[4, 3]), ids)))
    });
    check("a table that is looked up in twice", |p| {
        let (ids, others) =
            (p.data("ids", ElementType::Int64, [Dim::Batch]), p.data("others", ElementType::Int64, [Dim::Batch]));
        let table = parameter(p, "table", &[4, 3]);
        p.mean(p.mul(p.lookup_table(table, ids), p.lookup_table(table, others)))
    });
    check("a table that is multiplied with as well", |p| {
        let ids = p.data("ids", ElementType::Int64, [Dim::Batch]);
        let table = parameter(p, "table", &[4, 3]);
        p.mean(p.tanh(p.matmul_transposed(p.lookup_table(table, ids), false, table, true)))
    });
}

#[test]
fn the_gradients_of_networks_agree_with_differences() {
    for approximate in [false, true] {
        check(&format!("gelu {approximate}"), |p| {
            weighed(p, p.gelu(p.scale(parameter(p, "a", &[3, 5]), 3.0), approximate), &[3, 5])
        });
    }
    check("layer_norm", |p| {
        let [x, scale, bias] =
            [("x", &[2, 3, 5][..]), ("scale", &[5]), ("bias", &[5])].map(|(n, s)| parameter(p, n, s));
        weighed(p, p.layer_norm(x, scale, bias, 0.01), &[2, 3, 5])
    });
    for axis in 0..3 {
        check(&format!("slice {axis}"), |p| {
            let mut shape = [2, 3, 4];
            shape[axis as usize] = 5;
            let y = p.slice(parameter(p, "a", &shape), axis, 1, 3);
            shape[axis as usize] = 2;
            weighed(p, y, &shape)
        });
    }
    check("gather", |p| {
        let ids = p.data("ids", ElementType::Int64, [Dim::Batch]);
        p.mean(p.tanh(p.gather(parameter(p, "a", &[4, 3, 2]), ids)))
    });
    check("dropout", |p| {
        let step = p.data("step", ElementType::Int64, []);
        weighed(p, p.dropout(parameter(p, "a", &[6, 5]), step, 0.4, 3), &[6, 5])
    });
    check("a scale alone", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(5)]);
        p.mean(p.tanh(p.layer_norm(x, parameter(p, "scale", &[5]), p.data("bias", F64, [Dim::Fixed(5)]), 0.01)))
    });
    // The steps are 0 or above, and below zero.
    for (name, factor) in [("batch_norm", 3.0), ("batch_norm of predictions", -3.0)] {
        check(name, |p| {
            let [x, scale, bias] =
                [("x", &[3, 2, 4][..]), ("scale", &[2]), ("bias", &[2])].map(|(n, s)| parameter(p, n, s));
            let [mean, variance] = ["mean", "variance"].map(|name| p.data(name, F64, [Dim::Fixed(2)]));
            let step = p.cast(p.scale(p.exp(p.data("step", F64, [])), factor), ElementType::Int64);
            weighed(p, p.batch_norm(x, [scale, bias, mean, p.exp(variance)], step, 0.01)[0], &[3, 2, 4])
        });
    }
    check("padding", |p| {
        let ids = p.data("ids", ElementType::Int64, [Dim::Batch, Dim::Fixed(2)]);
        let [rows] = p.op(crate::OpKind::LookupTable { padding: Some(2) }, &[parameter(p, "table", &[4, 3]), ids]);
        p.mean(p.tanh(rows))
    });
}

#[test]
fn the_gradients_of_windows_agree_with_differences() {
    let steps = [([1, 1], [0, 0]), ([2, 1], [1, 0]), ([1, 3], [0, 2]), ([3, 2], [1, 1])];
    for steps in steps.map(|(stride, padding)| WindowSteps { stride, padding }) {
        let places = |size: [u64; 2]| steps.over([4, 5], size).map(|axis| axis.places().unwrap());
        check(&format!("conv2d {steps:?}"), |p| {
            let (x, filter) = (parameter(p, "x", &[2, 2, 4, 5]), parameter(p, "filter", &[3, 2, 2, 3]));
            let [rows, columns] = places([2, 3]);
            weighed(p, p.conv2d(x, filter, steps), &[2, 3, rows, columns])
        });
        for (name, pool) in [("max", Builder::max_pool2d as Pool), ("avg", Builder::avg_pool2d)] {
            check(&format!("{name}_pool2d {steps:?}"), |p| {
                let [rows, columns] = places([2, 3]);
                weighed(p, pool(p, parameter(p, "x", &[2, 2, 4, 5]), [2, 3], steps), &[2, 2, rows, columns])
            });
        }
    }
}

type Pool = fn(&Builder, Symbol, [u32; 2], WindowSteps) -> Symbol;

#[test]
fn a_table_gets_back_a_row_for_every_id_even_twice() {
    let p = Builder::new();
    let ids = p.data("ids", ElementType::Int64, [Dim::Batch]);
    p.named("loss", p.mean(p.lookup_table(parameter(&p, "table", &[4, 1]), ids)));
    let mut program = p.finish().unwrap().into_program();
    let gradients = append_backward(&mut program, "loss").unwrap();
    let graph = Graph::new(program).unwrap();
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    run.set("ids", Tensor::new([4], Elements::Int64(vec![3, 0, 3, 3]))).unwrap();
    run.step().unwrap();
    let rows = run.value(&gradients[0].gradient).unwrap().rows();
    assert_eq!(rows.view().ids().iter().collect::<Vec<_>>(), [3, 0, 3, 3]);
    run.set("ids", Tensor::new([1], Elements::Int64(vec![4]))).unwrap();
    let failure = run.step().unwrap_err().to_string();
    assert!(failure.contains("lookup_table: id 4 at place 0; expected 0 to 3"), "{failure}");
}

/// Ops chosen at random over matrices of `[3, 3]`; every result is used at the end. Values stay within one, so
/// that a difference is not far from a slope.
fn random_program(prng: &mut Prng) -> Program {
    let p = Builder::new();
    let mut made: Vec<Symbol> = ["a", "b", "c"].iter().map(|name| parameter(&p, name, &[3, 3])).collect();
    let row = parameter(&p, "row", &[3]);
    for _ in 0..1 + prng.below(8) {
        let (x, y) = (made[prng.index(made.len())], made[prng.index(made.len())]);
        made.push(match prng.below(23) {
            0 => p.scale(p.matmul_transposed(x, prng.below(2) == 0, y, prng.below(2) == 0), 0.3),
            1 => p.scale(p.add(x, y), 0.5),
            2 => p.scale(p.add(x, row), 0.5),
            3 => p.mul(x, y),
            4 => p.mul(x, row),
            5 => p.tanh(x),
            6 => p.sigmoid(x),
            7 => p.scale(p.sum(&[x, y, x]), 0.3),
            8 => {
                let [left, right] = p.split(x, 1, [1, 2]);
                p.concat(&[right, left], 1)
            }
            9 => p.scale(p.sub(row, y), 0.5),
            10 => p.scale(p.div(x, p.exp(y)), 0.3),
            11 => p.scale(p.exp(x), 0.3),
            12 => p.scale(p.sqrt(p.exp(x)), 0.5),
            13 => p.scale(p.log(p.add(p.exp(x), p.exp(row))), 0.5),
            14 => p.scale(p.pow(p.exp(x), y), 0.3),
            15 => p.gelu(x, prng.below(2) == 0),
            16 => p.scale(p.layer_norm(x, row, row, 0.5), 0.5),
            17 => p.concat(&[p.slice(x, 0, 1, 3), p.slice(y, 0, 0, 1)], 0),
            18 => p.softmax(x),
            19 => p.scale(p.log_softmax(x), 0.3),
            20 => p.transpose(p.reshape(p.transpose(p.reshape(x, &[1, 0]), &[1, 0]), &[3, 3]), &[1, 0]),
            21 => p.sub(x, p.mean_over(x, &[1], true)),
            _ => p.scale(x, signed(prng)),
        });
    }
    let bounded: Vec<Symbol> = made.iter().map(|x| p.tanh(*x)).collect();
    p.named("loss", p.mean(p.sum(&bounded)));
    p.finish().unwrap().into_program()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_gradients_of_random_programs_agree_with_differences(seed in any::<u64>()) {
        check_program("random", random_program(&mut Prng(seed)), seed);
    }
}

/// Writes a loss.
type Loss = fn(&Builder) -> Symbol;

/// A `batch_norm` of a parameter.
fn normalised(p: &Builder, mean: Symbol) -> [Symbol; 3] {
    let [scale, bias, variance] = ["scale", "bias", "variance"].map(|name| p.data(name, F64, [Dim::Fixed(3)]));
    p.batch_norm(parameter(p, "a", &[4, 3]), [scale, bias, mean, variance], p.data("step", ElementType::Int64, []), 0.1)
}

#[test]
fn a_parameter_that_an_op_updates_already_gets_no_gradient() {
    let mut program: Program = "block 0 {
        data x: float32[batch, 3]
        data step: int64[]
        parameter w: float32[3]
        parameter mean: float32[3]
        state mean@count: int64[]
        initialise w = fill(value=1.0)
        initialise mean = fill(value=0.0)
        initialise mean@count = fill(value=0.0)
        forward zeros = scale(w, factor=0.0)
        forward y, seen, variance = batch_norm(x, w, zeros, mean, w, step, epsilon=0.01)
        forward loss = mean(y)
        optimize mean, mean@count = update(mean, seen, mean@count, config=\"rule: 'w = 0.9*w + 0.1*g'\")
    }"
    .parse()
    .unwrap();
    // `w` as a variance for predictions is refused, and `mean` is not trained.
    let refused = append_backward(&mut program, "loss").unwrap_err().to_string();
    assert!(refused.contains("found \"w\", which is trained"), "{refused}");
    let op = program.blocks[0].ops.iter_mut().find(|op| op.inputs.len() == 6).unwrap();
    op.inputs[4] = "mean".to_owned();
    let gradients = append_backward(&mut program, "loss").unwrap();
    assert_eq!(gradients.iter().map(|found| found.parameter.as_str()).collect::<Vec<_>>(), ["w"]);
    assert_eq!(program.blocks[0].ops.last().unwrap().role, crate::OpRole::Optimize, "its update comes last");
}

#[test]
fn a_loss_without_a_gradient_is_refused() {
    let table: [(&str, Loss, &str); 7] = [
        ("no parameter", |p| p.mean(p.data("x", F64, [Dim::Batch])), "depends on no parameter"),
        ("no scalar", |p| p.tanh(parameter(p, "a", &[2])), "the loss \"loss\" is float64[2]; expected a scalar"),
        (
            "through probabilities",
            |p| {
                let label = p.data("label", ElementType::Int64, [Dim::Fixed(3)]);
                p.mean(p.softmax_with_cross_entropy(parameter(p, "a", &[3, 4]), label).1)
            },
            "op 1 softmax_with_cross_entropy: found probabilities",
        ),
        (
            "through a batch's mean",
            |p| p.mean(normalised(p, p.data("mean", F64, [Dim::Fixed(3)]))[1]),
            "op 1 batch_norm: found a loss that depends on a batch's mean or variance",
        ),
        (
            "to a mean for predictions",
            |p| p.mean(normalised(p, parameter(p, "kept", &[3]))[0]),
            "op 2 batch_norm: found \"kept\", which is trained, as a mean or variance for predictions",
        ),
        (
            "to a label",
            |p| p.mean(p.sigmoid_cross_entropy(parameter(p, "a", &[3]), parameter(p, "b", &[3]))),
            "op 2 sigmoid_cross_entropy: found label \"b\"",
        ),
        (
            "twice",
            |p| {
                let [slope] = p.op(crate::OpKind::TanhGradient, &[parameter(p, "a", &[3]); 2]);
                p.mean(slope)
            },
            "op 1 tanh_gradient: found tanh_gradient between the loss and a parameter",
        ),
    ];
    for (name, build, expected) in table {
        let p = Builder::new();
        let loss = build(&p);
        p.named("loss", loss);
        let mut program = p.finish().unwrap().into_program();
        let before = program.clone();
        let failure = append_backward(&mut program, "loss").unwrap_err().to_string();
        assert!(failure.contains(expected), "{name}: {failure}");
        assert_eq!(program, before, "{name}");
    }
}
