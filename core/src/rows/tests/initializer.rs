use crate::dtype::ElementType;
use crate::rows::Initializer;

use super::{floats, layout};

fn row(initializer: Initializer, seed: u64, id: u64, width: u32) -> Vec<f32> {
    let layout = layout(ElementType::Float32, width);
    let mut row = vec![0xff; layout.row_bytes()];
    initializer.fill(seed, id, layout, &mut row);
    floats(&row)
}

fn wide(initializer: Initializer) -> Vec<f64> {
    let layout = layout(ElementType::Float64, 8000);
    let mut row = vec![0; layout.row_bytes()];
    (0..25)
        .flat_map(|id| {
            initializer.fill(7, id, layout, &mut row);
            row.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect::<Vec<_>>()
        })
        .collect()
}

const GAUSSIAN: Initializer = Initializer::Gaussian { mean: 1.0, deviation: 2.0 };
const UNIFORM: Initializer = Initializer::Uniform { low: -1.0, high: 3.0 };

#[test]
fn values_are_the_same_on_every_machine() {
    assert_eq!(row(Initializer::Zeros, 1, 2, 3), [0.0; 3]);
    assert_eq!(row(Initializer::Constant(0.1), 1, 2, 3), [0.1; 3]);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    // Computed independently with the same formulas. The values must never change: saved tables hold only the touched
    // rows.
    assert_eq!(bits(row(UNIFORM, 1, 2, 3)), UNIFORM_BITS);
    assert_eq!(bits(row(GAUSSIAN, 1, 2, 3)), GAUSSIAN_BITS);
}

const UNIFORM_BITS: [u32; 3] = [1_076_268_656, 3_209_426_807, 1_066_895_488];
const GAUSSIAN_BITS: [u32; 3] = [1_080_327_220, 3_222_374_826, 1_067_290_464];

#[test]
fn seed_row_and_element_each_change_the_value() {
    for initializer in [UNIFORM, GAUSSIAN] {
        let here = row(initializer, 1, 2, 3);
        assert_eq!(row(initializer, 1, 2, 3), here);
        assert_ne!(row(initializer, 2, 2, 3), here);
        assert_ne!(row(initializer, 1, 3, 3), here);
        assert_ne!(here[0], here[1]);
        // A row is not its neighbour shifted.
        assert!(row(initializer, 1, 3, 3).iter().all(|value| !here.contains(value)));
    }
}

fn moments(values: &[f64]) -> [f64; 3] {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let tail = values.iter().filter(|value| (*value - mean).abs() > 3.0 * variance.sqrt()).count() as f64 / count;
    [mean, variance, tail]
}

#[test]
fn distributions_have_their_moments() {
    // 200,000 values: the standard errors of the means are 0.0026 and 0.0045.
    let values = wide(UNIFORM);
    let [mean, variance, tail] = moments(&values);
    assert!((mean - 1.0).abs() < 0.013 && (variance - 16.0 / 12.0).abs() < 0.02, "{mean} {variance}");
    assert!(tail == 0.0 && values.iter().all(|value| (-1.0..3.0).contains(value)));
    let [mean, variance, tail] = moments(&wide(GAUSSIAN));
    assert!((mean - 1.0).abs() < 0.023 && (variance - 4.0).abs() < 0.07, "{mean} {variance}");
    assert!((tail - 0.0027).abs() < 0.0006, "{tail}");
}

#[test]
fn invalid_initializers_are_refused_by_name() {
    let check = |initializer: Initializer, element_type: ElementType, expected: &str| {
        let refusal = initializer.validate_for(element_type).expect_err("it cannot be").to_string();
        assert_eq!(refusal, format!("initializer {}: {expected}", initializer.name()));
    };
    let float = ElementType::Float32;
    check(Initializer::Constant(f64::NAN), float, "NaN; expected a finite float32");
    check(Initializer::Constant(1e39), float, &format!("{}; expected a finite float32", 1e39));
    check(Initializer::Constant(0.5), ElementType::Int32, "0.5; expected a whole number that int32 has");
    check(Initializer::Constant(-1.0), ElementType::Uint64, "-1; expected a whole number that uint64 has");
    check(UNIFORM, ElementType::Int32, "rows of type int32; expected float32 or float64");
    let backwards = Initializer::Uniform { low: 1.0, high: 0.0 };
    check(backwards, float, "from 1 to 0; expected finite numbers in order");
    let narrow = Initializer::Gaussian { mean: 0.0, deviation: -1.0 };
    check(narrow, float, "mean 0, deviation -1; expected finite values, the second not negative");
    let half = "rows of type float16, which is for gradients; expected a parameter's type";
    check(Initializer::Zeros, ElementType::Float16, half);
    assert!(Initializer::Constant(-3.0).validate_for(ElementType::Int32).is_ok());
}
