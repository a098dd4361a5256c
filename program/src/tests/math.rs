//! Values of mathematical ops against numbers that are known.

use crate::{Elements, Graph, PlainArithmetic, PlainRun, Tensor};
use pserver_core::port::Plain;

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// Runs one op on data `a` and `b` and compares its output: equal, or both NaN.
fn check(op: &str, a: (&[u64], &[f64]), b: (&[u64], &[f64]), expected: (&[u64], &[f64])) {
    let text = format!("block 0 {{ data a: float64{:?} data b: float64{:?} forward y = {op} }}", a.0, b.0);
    let graph = Graph::new(text.parse().unwrap()).unwrap_or_else(|failure| panic!("{text}: {failure}"));
    let (mut arithmetic, mut kernels) = (PlainArithmetic, Plain);
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).unwrap();
    for (name, (shape, values)) in [("a", a), ("b", b)] {
        run.set(name, Tensor::new(shape, Elements::Float64(values.to_vec()))).unwrap();
    }
    run.step().unwrap();
    let found = run.value("y").unwrap().tensor();
    let wanted = Tensor::new(expected.0, Elements::Float64(expected.1.to_vec()));
    assert_eq!(format!("{found:?}"), format!("{wanted:?}"), "{text}");
}

#[test]
fn functions_of_two_operands_have_known_values() {
    let (a, b) = ([3.0, -2.0, 0.0, NAN, 5.0], [2.0, 4.0, 0.0, 1.0, NAN]);
    let table: [(&str, [f64; 5]); 8] = [
        ("add", [5.0, 2.0, 0.0, NAN, NAN]),
        ("sub", [1.0, -6.0, 0.0, NAN, NAN]),
        ("mul", [6.0, -8.0, 0.0, NAN, NAN]),
        ("div", [1.5, -0.5, NAN, NAN, NAN]),
        ("max", [3.0, 4.0, 0.0, NAN, NAN]),
        ("min", [2.0, -2.0, 0.0, NAN, NAN]),
        ("pow", [9.0, 16.0, 1.0, NAN, NAN]),
        ("greater", [1.0, 0.0, 0.0, 0.0, 0.0]),
    ];
    for (op, expected) in table {
        check(&format!("{op}(a, b)"), (&[5], &a), (&[5], &b), (&[5], &expected));
    }
}

#[test]
fn either_operand_repeats() {
    let (row, column) = ((&[3_u64][..], &[1.0, 2.0, 3.0][..]), (&[2_u64, 1][..], &[10.0, 20.0][..]));
    check("sub(a, b)", row, column, (&[2, 3], &[-9.0, -8.0, -7.0, -19.0, -18.0, -17.0]));
    check("sub(a, b)", column, row, (&[2, 3], &[9.0, 8.0, 7.0, 19.0, 18.0, 17.0]));
    check("div(a, b)", (&[], &[6.0]), row, (&[3], &[6.0, 3.0, 2.0]));
    let both = (&[2_u64, 2, 2][..], &[-9.0, -8.0, -19.0, -18.0, -7.0, -6.0, -17.0, -16.0][..]);
    check("sub(a, b)", (&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]), (&[2, 1], &[10.0, 20.0]), both);
}

#[test]
fn functions_of_one_operand_have_known_values() {
    let a = [4.0, 0.0, -1.0, NAN, INF];
    let table: [(&str, [f64; 5]); 5] = [
        ("sqrt", [2.0, 0.0, NAN, NAN, INF]),
        ("exp", [4.0_f64.exp(), 1.0, (-1.0_f64).exp(), NAN, INF]),
        ("log", [4.0_f64.ln(), -INF, NAN, NAN, INF]),
        ("abs", [4.0, 0.0, 1.0, NAN, INF]),
        ("sign", [1.0, 0.0, -1.0, NAN, 1.0]),
    ];
    for (op, expected) in table {
        check(&format!("{op}(a)"), (&[5], &a), (&[], &[0.0]), (&[5], &expected));
    }
}

#[test]
fn reductions_and_other_shapes_have_known_values() {
    let a: Vec<f64> = (0..12).map(f64::from).collect();
    let a = (&[2_u64, 3, 2][..], &a[..]);
    let none = (&[][..], &[0.0][..]);
    check("reduce_sum(a, axis=1)", a, none, (&[2, 2], &[6.0, 9.0, 24.0, 27.0]));
    check("reduce_sum(a, axes=[2, 0], keep=true)", a, none, (&[1, 3, 1], &[14.0, 22.0, 30.0]));
    check("reduce_sum(a)", a, none, (&[], &[66.0]));
    check("mean(a, axes=[0, 1])", a, none, (&[2], &[5.0, 6.0]));
    check("mean(a, keep=true)", a, none, (&[1, 1, 1], &[5.5]));
    check("reshape(a, shape=[0, 4])", a, none, (&[3, 4], a.1));
    let turned = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0];
    check("transpose(a, axes=[2, 0, 1])", a, none, (&[2, 2, 3], &turned));
    let swapped = [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 6.0, 8.0, 10.0, 7.0, 9.0, 11.0];
    check("transpose(a, axes=[0, 2, 1])", a, none, (&[2, 2, 3], &swapped));
}

#[test]
fn a_softmax_is_of_the_last_dimension_and_does_not_overflow() {
    let none = (&[][..], &[0.0][..]);
    let scores = (&[3_u64, 2][..], &[0.0, 0.0, 1000.0, 0.0, -1e300, 1e300][..]);
    check("softmax(a)", scores, none, (&[3, 2], &[0.5, 0.5, 1.0, 0.0, 0.0, 1.0]));
    let half = -std::f64::consts::LN_2;
    check("log_softmax(a)", scores, none, (&[3, 2], &[half, half, 0.0, -1000.0, -2e300, 0.0]));
}
