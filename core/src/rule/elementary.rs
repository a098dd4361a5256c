//! Elementary functions without an instruction, computed in binary64 by sums, products and quotients only. So every
//! machine gives the same bits, and so does a kernel with the same steps (`kernels/cu/elementary.cu`).
//!
//! Tests compare the functions with the system's: the results differ by at most one ulp, those of `expm1` and the
//! hyperbolic tangent by three.
//!
//! Formulas: `e^x = 2^k e^r` with `r = x - k log 2` in two parts (Cody and Waite, 1980) and the series of `e^r`; `log
//! (1 + f) = 2 artanh s` with `s = f / (2 + f)` and its series; sums and products in two parts after Dekker (1971).

/// `log 2` in two parts. The first has few enough bits that its product with an exponent is exact.
const LOG_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LOG_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
const INVERSE_LOG_2: f64 = std::f64::consts::LOG2_E;

/// Above this `e^x` is infinite.
const EXPONENT_MAX: f64 = 710.0;
/// Below this `e^x` is zero.
const EXPONENT_MIN: f64 = -746.0;

/// The terms of `(e^r - 1 - r - r^2 / 2) / r^3` with even powers of `r`, the last first: `1 / 13!` to `1 / 3!`.
const EXPONENTIAL_EVEN: [f64; 6] =
    [1.0 / 6_227_020_800.0, 1.0 / 39_916_800.0, 1.0 / 362_880.0, 1.0 / 5_040.0, 1.0 / 120.0, 1.0 / 6.0];
/// The terms with odd powers of `r`, the last first: `1 / 14!` to `1 / 4!`.
const EXPONENTIAL_ODD: [f64; 6] =
    [1.0 / 87_178_291_200.0, 1.0 / 479_001_600.0, 1.0 / 3_628_800.0, 1.0 / 40_320.0, 1.0 / 720.0, 1.0 / 24.0];

/// The terms of `((2 artanh s / s - 2) / s^2 - 2 / 3) / s^2` with even powers of `s^2`, the last first.
const LOGARITHM_EVEN: [f64; 6] = [2.0 / 25.0, 2.0 / 21.0, 2.0 / 17.0, 2.0 / 13.0, 2.0 / 9.0, 2.0 / 5.0];
/// The terms with odd powers of `s^2`, the last first.
const LOGARITHM_ODD: [f64; 5] = [2.0 / 23.0, 2.0 / 19.0, 2.0 / 15.0, 2.0 / 11.0, 2.0 / 7.0];
const TWO_THIRDS_HIGH: f64 = 2.0 / 3.0;
/// The difference between two thirds and the high part.
const TWO_THIRDS_LOW: f64 = f64::from_bits(0x3c85_5555_5555_5555);

/// Adding and subtracting this rounds a small number to the nearest integer.
const WHOLE: f64 = 6_755_399_441_055_744.0;

/// Splits a number into two halves of its bits, so that products of the halves are exact.
const SPLIT: f64 = 134_217_729.0;

/// `e^x`
pub(super) fn exponential(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    exponential_of(x, 0.0)
}

/// `e^(x + low)`, where `low` is less than an ulp of `x`.
fn exponential_of(x: f64, low: f64) -> f64 {
    if EXPONENT_MAX < x {
        return f64::INFINITY;
    }
    if x < EXPONENT_MIN {
        return 0.0;
    }
    let (exponent, rest, lost) = reduced(x, low);
    // One, the remainder and half its square are added in two parts, so that only the last sum is rounded.
    let (square, square_lost) = times(rest, rest);
    let (sum, sum_lost) = larger_plus(1.0, rest);
    let (total, total_lost) = larger_plus(sum, 0.5 * square);
    let cube = rest * square * exponential_series(rest, square);
    let small = total_lost + sum_lost + (0.5 * square_lost + lost + cube);
    scaled(total + small, exponent)
}

/// `k`, `r` and the rounding error of `r`, where `x + low = k log 2 + r` and `r` is at most half of `log 2`.
fn reduced(x: f64, low: f64) -> (i64, f64, f64) {
    let moved = x * INVERSE_LOG_2 + WHOLE;
    let whole = moved - WHOLE;
    let high = x - whole * LOG_2_HIGH;
    let low = whole * LOG_2_LOW - low;
    let rest = high - low;
    (moved.to_bits().cast_signed() - WHOLE.to_bits().cast_signed(), rest, (high - rest) - low)
}

fn exponential_series(x: f64, square: f64) -> f64 {
    series(EXPONENTIAL_EVEN, square) + x * series(EXPONENTIAL_ODD, square)
}

fn logarithm_series(x: f64) -> f64 {
    let square = x * x;
    series(LOGARITHM_EVEN, square) + x * series(LOGARITHM_ODD, square)
}

fn series<const TERMS: usize>(terms: [f64; TERMS], x: f64) -> f64 {
    let mut sum = terms[0];
    for term in &terms[1..] {
        sum = sum * x + term;
    }
    sum
}

/// `x 2^k`, rounded once: beyond an exponent's range it takes two steps, of which the first is exact.
fn scaled(x: f64, exponent: i64) -> f64 {
    if (-1022..=1023).contains(&exponent) {
        return x * power_of_two(exponent);
    }
    let half = exponent >> 1;
    x * power_of_two(half) * power_of_two(exponent - half)
}

/// For -1022 to 1023.
fn power_of_two(exponent: i64) -> f64 {
    f64::from_bits(((exponent + 1023) << 52).cast_unsigned())
}

/// `e^x - 1`
pub(super) fn exponential_minus_one(x: f64) -> f64 {
    if x.is_nan() || x.abs() < 1e-17 {
        return x;
    }
    if EXPONENT_MAX < x {
        return f64::INFINITY;
    }
    if x < -50.0 {
        return -1.0;
    }
    let (exponent, rest, lost) = reduced(x, 0.0);
    let square = rest * rest;
    let above_one = rest + (square * (0.5 + rest * exponential_series(rest, square)) + lost);
    if exponent == 0 {
        return above_one;
    }
    let one = if 60 < exponent { 1.0 } else { 1.0 - power_of_two(-exponent) };
    scaled(one + above_one, exponent)
}

/// The natural logarithm.
pub(super) fn logarithm(x: f64) -> f64 {
    if x.is_nan() || x == f64::INFINITY {
        return x;
    }
    if x <= 0.0 {
        return if x == 0.0 { f64::NEG_INFINITY } else { f64::NAN };
    }
    logarithm_in_two(x).0
}

/// `log(1 + x)`
pub(super) fn logarithm_one_plus(x: f64) -> f64 {
    if x.is_nan() || x == f64::INFINITY || x.abs() < 1e-17 {
        return x;
    }
    if x <= -1.0 {
        return if x == -1.0 { f64::NEG_INFINITY } else { f64::NAN };
    }
    if -0.25 < x && x < 0.375 {
        return logarithm_of(0.0, x, 0.0);
    }
    let sum = 1.0 + x;
    let lost = if 1.0 <= x { 1.0 - (sum - x) } else { x - (sum - 1.0) };
    let (exponent, fraction) = parts(sum);
    logarithm_of(exponent, fraction, lost / sum)
}

/// `k` and `f`, where `x = 2^k (1 + f)` and `1 + f` is between the roots of a half and of two. `x` is positive and
/// finite.
fn parts(x: f64) -> (f64, f64) {
    const ROOT_OF_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    const ONE: u64 = 0x3ff0_0000_0000_0000;
    let is_small = x < f64::MIN_POSITIVE;
    let bits = if is_small { x * power_of_two(54) } else { x }.to_bits() + (ONE - ROOT_OF_HALF);
    let exponent = (bits >> 52).cast_signed() as f64 - if is_small { 1077.0 } else { 1023.0 };
    (exponent, f64::from_bits((bits & ((1 << 52) - 1)) + ROOT_OF_HALF) - 1.0)
}

/// `k log 2 + log(1 + f) + lost`
fn logarithm_of(exponent: f64, fraction: f64, lost: f64) -> f64 {
    let share = fraction / (2.0 + fraction);
    let square = share * share;
    let rest = square * (TWO_THIRDS_HIGH + square * logarithm_series(square));
    let half = 0.5 * fraction * fraction;
    let low = share * (half + rest) + (exponent * LOG_2_LOW + lost);
    exponent * LOG_2_HIGH - ((half - low) - fraction)
}

/// The hyperbolic tangent.
pub(super) fn hyperbolic_tangent(x: f64) -> f64 {
    let magnitude = x.abs();
    if x.is_nan() || magnitude < 1e-9 {
        return x;
    }
    let value = if 22.0 < magnitude {
        1.0
    } else if 1.0 <= magnitude {
        1.0 - 2.0 / (exponential_minus_one(2.0 * magnitude) + 2.0)
    } else {
        let below = exponential_minus_one(-2.0 * magnitude);
        -below / (below + 2.0)
    };
    value.copysign(x)
}

/// `x^y`, with C's results for zero, infinity and NaN.
pub(super) fn power(x: f64, y: f64) -> f64 {
    if y == 0.0 || x == 1.0 {
        return 1.0;
    }
    if x.is_nan() || y.is_nan() {
        return f64::NAN;
    }
    let magnitude = x.abs();
    if y.is_infinite() {
        let grows = (1.0 < magnitude) == (0.0 < y);
        return if magnitude == 1.0 { 1.0 } else { vast(grows, 1.0) };
    }
    let sign = if x.is_sign_negative() && is_odd(y) { -1.0 } else { 1.0 };
    if magnitude == 0.0 || magnitude == f64::INFINITY {
        return vast((magnitude == 0.0) == (y < 0.0), sign);
    }
    if x < 0.0 && y.floor() != y {
        return f64::NAN;
    }
    if magnitude == 1.0 {
        return sign;
    }
    let (high, low) = logarithm_in_two(magnitude);
    let rough = y * high;
    if !(EXPONENT_MIN..=EXPONENT_MAX).contains(&rough) {
        return vast(0.0 < rough, sign);
    }
    let (product, lost) = times(y, high);
    exponential_of(product, lost + y * low) * sign
}

fn is_odd(y: f64) -> bool {
    let half = 0.5 * y;
    y.floor() == y && half.floor() != half
}

fn vast(is_infinite: bool, sign: f64) -> f64 {
    (if is_infinite { f64::INFINITY } else { 0.0 }) * sign
}

/// The logarithm of a positive finite number, in two parts, with a relative error of about 2^-65.
fn logarithm_in_two(x: f64) -> (f64, f64) {
    let (exponent, fraction) = parts(x);
    let divisor = 2.0 + fraction;
    let divisor_low = fraction - (divisor - 2.0);
    let inverse = 1.0 / divisor;
    let share = fraction * inverse;
    let (product, lost) = times(share, divisor);
    let share_low = (((fraction - product) - lost) - share * divisor_low) * inverse;
    let (square, lost) = times(share, share);
    let square_low = lost + 2.0 * share * share_low;
    let (factor, lost) = larger_plus(TWO_THIRDS_HIGH, square * logarithm_series(square));
    let factor_low = lost + TWO_THIRDS_LOW;
    let (product, lost) = times(square, factor);
    let product_low = lost + (square * factor_low + square_low * factor);
    let (cubic, lost) = times(share, product);
    let cubic_low = lost + (share * product_low + share_low * product);
    let (high, lost) = larger_plus(2.0 * share, cubic);
    let low = lost + (2.0 * share_low + cubic_low);
    if exponent == 0.0 {
        return larger_plus(high, low);
    }
    // An exponent that is not zero weighs more than the logarithm of a fraction.
    let (total, lost) = larger_plus(exponent * LOG_2_HIGH, high);
    larger_plus(total, lost + (exponent * LOG_2_LOW + low))
}

/// A sum and its rounding error, when the first operand is not smaller than the second.
fn larger_plus(larger: f64, smaller: f64) -> (f64, f64) {
    let sum = larger + smaller;
    (sum, smaller - (sum - larger))
}

/// A product and its rounding error.
fn times(a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    let (a_high, b_high) = (cut(a), cut(b));
    let (a_low, b_low) = (a - a_high, b - b_high);
    (product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low)
}

fn cut(x: f64) -> f64 {
    let moved = SPLIT * x;
    moved - (moved - x)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The largest difference from the system's functions, in ulps of the latter. The error of `expm1` here is two ulps
    /// between a half and twice `log 2`, where the subtraction of 1 cancels most bits. The error of the system's
    /// hyperbolic tangent is two ulps, that of its other functions one.
    const ULPS: f64 = 1.0;
    const ULPS_OF_DIFFERENCES: f64 = 3.0;

    fn near(found: f64, expected: f64, case: &str) {
        let is_difference = case.starts_with("tanh") || case.starts_with("expm1");
        let ulps = if is_difference { ULPS_OF_DIFFERENCES } else { ULPS };
        let ulp = expected.abs().min(f64::MAX.next_down()).next_up() - expected.abs().min(f64::MAX.next_down());
        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(same || (found - expected).abs() <= ulps * ulp, "{case}: {found:e}, expected {expected:e}");
    }

    fn check(x: f64) {
        near(exponential(x), x.exp(), &format!("exp {x:e}"));
        near(exponential_minus_one(x), x.exp_m1(), &format!("expm1 {x:e}"));
        near(logarithm(x), x.ln(), &format!("log {x:e}"));
        near(logarithm_one_plus(x), x.ln_1p(), &format!("log1p {x:e}"));
        near(hyperbolic_tangent(x), x.tanh(), &format!("tanh {x:e}"));
    }

    const SPECIAL: [f64; 25] = [
        0.0,
        1.0,
        2.0,
        3.0,
        0.5,
        1.5,
        1e-300,
        5e-324,
        1e300,
        f64::MAX,
        f64::MIN_POSITIVE,
        f64::INFINITY,
        f64::NAN,
        709.7,
        709.79,
        710.5,
        745.1,
        745.2,
        1e-20,
        1e-9,
        22.5,
        0.999_999_999_999_999_9,
        1.000_000_000_000_000_2,
        9_007_199_254_740_991.0,
        9_007_199_254_740_993.0,
    ];

    #[test]
    fn special_values_give_the_results_of_the_systems_functions() {
        for x in SPECIAL.into_iter().flat_map(|x| [x, -x]) {
            check(x);
            for y in SPECIAL.into_iter().flat_map(|y| [y, -y]) {
                near(power(x, y), x.powf(y), &format!("{x:e} ^ {y:e}"));
            }
        }
    }

    /// Adam divides by `1 - beta^n`, which has a thousand times the relative error of the power. The system's power is
    /// nearly always the nearest number, so agreement shows that the power here is, too.
    #[test]
    fn the_powers_of_a_decay_are_the_nearest_numbers() {
        let differ = |beta: f64| (1_i32..2000).filter(move |n| power(beta, (*n).into()) != beta.powf((*n).into()));
        for beta in [0.9, 0.99, 0.999, 0.9999] {
            let found: Vec<i32> = differ(beta).collect();
            assert!(found.len() < 60, "{beta}: {found:?}");
        }
    }

    #[test]
    fn cancellation_by_one_stays_within_the_bound_of_differences() {
        check(0.365_139_054_896_418);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_function_is_within_an_ulp_or_so_of_the_systems(scale in -20_i32..11, x in -1.0_f64..1.0) {
            check(x * 2.0_f64.powi(scale));
        }

        #[test]
        fn a_power_is_within_an_ulp_or_so_of_the_systems(
            scale in -1000_i32..1000, x in 0.5_f64..1.0, near_one in any::<bool>(), target in -745.0_f64..710.0
        ) {
            let base = if near_one { 1.0 + (x - 0.75) * 2.0_f64.powi(scale % 50) } else { x * 2.0_f64.powi(scale) };
            let exponent = target / base.abs().ln();
            near(power(base, exponent), base.powf(exponent), &format!("{base:e} ^ {exponent:e}"));
            near(power(base, target.round()), base.powf(target.round()), &format!("{base:e} ^ {target:.0}"));
        }
    }
}
