//! Initial values of rows: a pure function of the seed, the row's id and the element's index. They do not depend on the
//! order of accesses, on the server, or on restarts.
//!
//! Only additions, products, quotients and roots of binary64 are used, which every machine rounds alike; a logarithm of
//! the system's library may differ in its last bit between machines.

use crate::dtype::ElementType;
use crate::error::Failure;
pub(super) use crate::prng::mix;

use super::layout::{RowLayout, element_bytes};

/// The distribution of the initial values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Initializer {
    /// Zero everywhere.
    #[default]
    Zeros,
    /// The same value everywhere, rounded to the parameter's type. An integer's must be whole and in its range.
    Constant(f64),
    /// Evenly distributed from `low` up to, but without, `high`; rounding to the parameter's type may give `high`.
    /// For floats.
    Uniform {
        /// The least value.
        low: f64,
        /// The bound of the values.
        high: f64,
    },
    /// Normally distributed. For floats.
    Gaussian {
        /// The mean.
        mean: f64,
        /// Its standard deviation, zero or above.
        deviation: f64,
    },
}

impl Initializer {
    /// Its name, as configuration and errors write it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Constant(_) => "constant",
            Self::Uniform { .. } => "uniform",
            Self::Gaussian { .. } => "gaussian",
        }
    }

    /// Refuses numbers that are not finite or not in order, or do not fit the layout's type.
    ///
    /// # Errors
    /// Names the number, the found and the expected value.
    pub fn validate_for(&self, element_type: ElementType) -> Result<(), Failure> {
        let refuse = |text: String| Err(Failure::call(format!("initializer {}: {text}", self.name())));
        if !element_type.is_parameter_type() {
            return refuse(format!("rows of type {element_type}, which is for gradients; expected a parameter's type"));
        }
        let is_finite = |value: f64| match element_type {
            ElementType::Float32 => value.abs() <= f64::from(f32::MAX),
            _ => value.is_finite(),
        };
        match *self {
            Self::Zeros => Ok(()),
            Self::Constant(value) if !is_finite(value) => refuse(format!("{value}; expected a finite {element_type}")),
            Self::Constant(value) if !element_type.is_float() && !fits(element_type, value) => {
                refuse(format!("{value}; expected a whole number that {element_type} has"))
            }
            Self::Constant(_) => Ok(()),
            _ if !element_type.is_float() => {
                refuse(format!("rows of type {element_type}; expected float32 or float64"))
            }
            Self::Uniform { low, high } if !(is_finite(low) && is_finite(high) && low <= high) => {
                refuse(format!("from {low} to {high}; expected finite numbers in order"))
            }
            // No value is further than nine deviations from the mean.
            Self::Gaussian { mean, deviation } if !(0.0 <= deviation && is_finite(mean.abs() + 9.0 * deviation)) => {
                refuse(format!("mean {mean}, deviation {deviation}; expected finite values, the second not negative"))
            }
            Self::Uniform { .. } | Self::Gaussian { .. } => Ok(()),
        }
    }

    /// Whether the values depend on the seed.
    #[must_use]
    pub fn is_random(&self) -> bool {
        matches!(self, Self::Uniform { .. } | Self::Gaussian { .. })
    }

    /// Writes the initial values of row `id`.
    ///
    /// # Panics
    /// When `row` is not one row long.
    pub fn fill(&self, seed: u64, id: u64, layout: RowLayout, row: &mut [u8]) {
        assert_eq!(row.len(), layout.row_bytes(), "a row of its layout");
        let element_type = layout.element_type();
        let elements = (0_u64..).zip(row.chunks_exact_mut(element_bytes(element_type)));
        match *self {
            Self::Zeros => row.fill(0),
            Self::Constant(value) => elements.for_each(|(_, element)| write(element_type, value, element)),
            Self::Uniform { low, high } => elements.for_each(|(place, element)| {
                let share = fraction(random(seed, id, place));
                // Two products, because the difference of two finite numbers may be infinite.
                write(element_type, low * (1.0 - share) + high * share, element);
            }),
            Self::Gaussian { mean, deviation } => elements.for_each(|(place, element)| {
                let value = mean + deviation * quantile(fraction(random(seed, id, place)));
                write(element_type, value, element);
            }),
        }
    }
}

/// The seed of a parameter that was given none.
#[must_use]
pub fn seed_of(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    u64::from_le_bytes(*digest.as_bytes().first_chunk().expect("a digest has 32 bytes"))
}

/// Whether an integer type has this number.
fn fits(element_type: ElementType, value: f64) -> bool {
    let (low, bound) = match element_type {
        ElementType::Int32 => (-2_f64.powi(31), 2_f64.powi(31)),
        ElementType::Uint32 => (0.0, 2_f64.powi(32)),
        ElementType::Int64 => (-2_f64.powi(63), 2_f64.powi(63)),
        ElementType::Uint64 => (0.0, 2_f64.powi(64)),
        _ => return true,
    };
    value.fract() == 0.0 && low <= value && value < bound
}

#[expect(clippy::cast_possible_truncation, reason = "floats round to the nearest; integers were checked to fit")]
#[expect(clippy::cast_sign_loss, reason = "an unsigned type's value was checked not to be negative")]
fn write(element_type: ElementType, value: f64, element: &mut [u8]) {
    match element_type {
        ElementType::Int32 => element.copy_from_slice(&(value as i32).to_le_bytes()),
        ElementType::Uint32 => element.copy_from_slice(&(value as u32).to_le_bytes()),
        ElementType::Int64 => element.copy_from_slice(&(value as i64).to_le_bytes()),
        ElementType::Uint64 => element.copy_from_slice(&(value as u64).to_le_bytes()),
        ElementType::Float32 => element.copy_from_slice(&(value as f32).to_le_bytes()),
        ElementType::Float64 => element.copy_from_slice(&value.to_le_bytes()),
        ElementType::Float16 | ElementType::Bfloat16 => panic!("rows of type {element_type} were let through"),
    }
}

/// 64 bits for an element, statistically independent of those of other elements.
fn random(seed: u64, id: u64, place: u64) -> u64 {
    mix(mix(mix(seed).wrapping_add(id)).wrapping_add(place))
}

/// A number above zero and below one, from the upper 52 bits; all are equally likely.
fn fraction(bits: u64) -> f64 {
    ((bits >> 12) as f64 + 0.5) * 2.0_f64.powi(-52)
}

/// The normal distribution's quantile: how many deviations above the mean the share `p` of all values is below.
/// Algorithm AS 241, PPND16 (Wichura, "The percentage points of the normal distribution", 1988); its error is about one
/// part in 10^16.
fn quantile(p: f64) -> f64 {
    let centred = p - 0.5;
    if centred.abs() <= 0.425 {
        let r = 0.180_625 - centred * centred;
        return centred * ratio(r, &CENTRE);
    }
    let tail = if centred < 0.0 { p } else { 1.0 - p };
    let r = (-logarithm(tail)).sqrt();
    let distance = if r <= 5.0 { ratio(r - 1.6, &MIDDLE) } else { ratio(r - 5.0, &FAR) };
    distance.copysign(centred)
}

/// A quotient of two polynomials; the coefficients rise.
fn ratio(x: f64, [above, below]: &[[f64; 8]; 2]) -> f64 {
    let value = |coefficients: &[f64; 8]| coefficients.iter().rev().fold(0.0, |sum, term| sum * x + term);
    value(above) / value(below)
}

/// The natural logarithm of a positive, normal number, to about one part in 10^15: with `m` in [1/sqrt 2, sqrt 2) it is
/// `e ln 2 + 2 artanh((m - 1) / (m + 1))`, and the series of artanh is short there.
fn logarithm(value: f64) -> f64 {
    let bits = value.to_bits();
    let shifted = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let exponent = shifted.cast_signed() >> 52;
    let mantissa = f64::from_bits(bits.wrapping_sub((exponent << 52).cast_unsigned()));
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, term| sum * square + 1.0 / f64::from(2 * term + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Where `|p - 1/2|` is at most 0.425.
const CENTRE: [[f64; 8]; 2] = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];
/// Where the tail is at least `e^-25`.
const MIDDLE: [[f64; 8]; 2] = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];
/// Beyond.
const FAR: [[f64; 8]; 2] = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        0.001_242_660_947_388_078_4,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_888,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        7.868_691_311_456_133e-4,
        1.846_318_317_510_054_7e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

#[cfg(test)]
mod tests {
    use super::{logarithm, quantile};

    #[test]
    fn the_logarithm_is_that_of_the_library() {
        for exponent in -60..4 {
            for step in 0..97 {
                let value = 2.0_f64.powi(exponent) * (1.0 + f64::from(step) / 97.0);
                let error = (logarithm(value) - value.ln()).abs();
                assert!(error <= 4e-16 * value.ln().abs().max(1.0), "{value}: {error}");
            }
        }
    }

    #[test]
    fn quantiles_are_those_of_the_tables() {
        let table = [
            (0.5, 0.0),
            (0.6, 0.253_347_103_135_799_7),
            (0.975, 1.959_963_984_540_054),
            (0.99, 2.326_347_874_040_841),
            (0.999, 3.090_232_306_167_813_5),
            (1e-5, -4.264_890_793_922_825_6),
            (1e-10, -6.361_340_902_404_057_5),
            (1e-15, -7.941_345_326_170_998),
        ];
        for (p, expected) in table {
            let found = quantile(p);
            assert!((found - expected).abs() < 1e-13, "{p}: {found} for {expected}");
        }
    }
}
