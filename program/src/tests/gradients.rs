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
    for shape in [&[2, 3][..], &[3], &[1, 3], &[2, 1], &[1], &[]] {
        check(&format!("add {shape:?}"), |p| {
            weighed(p, p.add(parameter(p, "a", &[2, 3]), parameter(p, "b", shape)), &[2, 3])
        });
        check(&format!("mul {shape:?}"), |p| {
            weighed(p, p.mul(parameter(p, "a", &[2, 3]), parameter(p, "b", shape)), &[2, 3])
        });
    }
    check("scale", |p| weighed(p, p.scale(parameter(p, "a", &[2, 3]), -2.5), &[2, 3]));
    check("a batch's product", |p| {
        let x = p.data("x", F64, [Dim::Batch, Dim::Fixed(3)]);
        p.mean(p.tanh(p.add(p.matmul(x, parameter(p, "w", &[3, 2])), parameter(p, "b", &[2]))))
    });
}

#[test]
fn the_gradients_of_functions_agree_with_differences() {
    check("relu", |p| weighed(p, p.relu(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("sigmoid", |p| weighed(p, p.sigmoid(parameter(p, "a", &[3, 5])), &[3, 5]));
    check("tanh", |p| weighed(p, p.tanh(parameter(p, "a", &[3, 5])), &[3, 5]));
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
fn the_gradients_of_what_arranges_agree_with_differences() {
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
        made.push(match prng.below(10) {
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

#[test]
fn what_has_no_gradient_is_refused() {
    let table: [(&str, Loss, &str); 5] = [
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
