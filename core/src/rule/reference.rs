//! Reference interpreter of straight-line code, one element after another: every kernel must give its bits.

use crate::dtype::ElementType;

use super::ssa::{Binary, Comparison, Lowered, RuleFunction, RuleOp, Unary, power, round_to_binary32};

/// A piece of a parameter and of its states, which an update changes in place. Bytes are little endian and may lie at
/// any address.
pub struct ParameterPiece<'a> {
    /// The type of parameter and states.
    pub element_type: ElementType,
    /// The parameter's elements.
    pub parameter: &'a mut [u8],
    /// As many elements of each state, in the order of the rule's states.
    pub states: &'a mut [&'a mut [u8]],
}

/// Updates a piece of a parameter by the merged gradient, which is of the same type.
///
/// # Panics
///
/// When a length, the type, the scalars or the number of states do not fit: callers check them before.
pub fn update(code: &Lowered, scalars: &[f64], piece: ParameterPiece<'_>, sum: &[u8]) {
    match piece.element_type {
        ElementType::Float32 => update_piece::<f32, 4>(code, scalars, piece, sum),
        ElementType::Float64 => update_piece::<f64, 8>(code, scalars, piece, sum),
        other => panic!("found a rule for a parameter of type {other}; expected float32 or float64"),
    }
}

fn update_piece<E: RuleReal<Bytes = [u8; BYTES]>, const BYTES: usize>(
    code: &Lowered,
    scalars: &[f64],
    piece: ParameterPiece<'_>,
    sum: &[u8],
) {
    let ParameterPiece { parameter, states, .. } = piece;
    assert_eq!(states.len(), code.states().len(), "the states of this rule");
    let (weights, _) = parameter.as_chunks_mut::<BYTES>();
    let (sums, _) = sum.as_chunks::<BYTES>();
    assert_eq!(weights.len(), sums.len(), "a gradient is as long as its parameter");
    let mut states: Vec<_> = states.iter_mut().map(|state| state.as_chunks_mut::<BYTES>().0).collect();
    let mut machine = ElementMachine::new(code);
    let mut values = vec![E::ZERO; states.len()];
    for (index, (weight, sum)) in weights.iter_mut().zip(sums).enumerate() {
        for (value, state) in values.iter_mut().zip(&states) {
            *value = E::of_bytes(state[index]);
        }
        *weight = machine.update(code, scalars, E::of_bytes(*weight), E::of_bytes(*sum), &mut values).to_bytes();
        for (value, state) in values.iter().zip(&mut states) {
            state[index] = value.to_bytes();
        }
    }
}

/// A type of parameters that rules work on.
pub trait RuleReal: Copy + PartialOrd + private::Sealed {
    /// An element in memory.
    type Bytes: Copy;

    /// From memory, little endian.
    fn of_bytes(bytes: Self::Bytes) -> Self;
    /// To memory, little endian.
    fn to_bytes(self) -> Self::Bytes;
    /// Zero.
    const ZERO: Self;
    /// A scalar as an element's operation uses it.
    fn of_scalar(scalar: f64) -> Self;
    /// The nearest.
    fn nearest(value: f64) -> Self;
    /// Exactly.
    fn widen(self) -> f64;
    /// As [`Unary`] says, in this type.
    fn unary(self, unary: Unary) -> Self;
    /// As [`Binary`] says, in this type.
    fn binary(self, binary: Binary, right: Self) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

macro_rules! real {
    ($type:ty, $of_scalar:expr, $nearest:expr) => {
        impl RuleReal for $type {
            type Bytes = [u8; size_of::<$type>()];
            const ZERO: Self = 0.0;

            fn of_bytes(bytes: Self::Bytes) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn to_bytes(self) -> Self::Bytes {
                self.to_le_bytes()
            }

            fn of_scalar(scalar: f64) -> Self {
                $of_scalar(scalar)
            }

            fn nearest(value: f64) -> Self {
                $nearest(value)
            }

            fn widen(self) -> f64 {
                self.into()
            }

            fn unary(self, unary: Unary) -> Self {
                match unary {
                    Unary::Negate => -self,
                    Unary::Absolute => self.abs(),
                    Unary::SquareRoot => self.sqrt(),
                    Unary::Sign if self.abs() > 0.0 => Self::copysign(1.0, self),
                    Unary::Sign => self,
                    Unary::Floor => self.floor(),
                }
            }

            fn binary(self, binary: Binary, right: Self) -> Self {
                match binary {
                    Binary::Add => self + right,
                    Binary::Subtract => self - right,
                    Binary::Multiply => self * right,
                    Binary::Divide => self / right,
                    Binary::Minimum if right < self => right,
                    Binary::Maximum if right > self => right,
                    Binary::Minimum | Binary::Maximum => self,
                    Binary::CopySign => self.copysign(right),
                }
            }
        }
    };
}

real!(f32, round_to_binary32, nearest_binary32);
real!(f64, std::convert::identity, std::convert::identity);

/// Values of one element while its code runs; kept from element to element.
pub struct ElementMachine<E> {
    reals: Vec<E>,
    masks: Vec<bool>,
}

impl<E: RuleReal> ElementMachine<E> {
    /// For this code.
    #[must_use]
    pub fn new(lowered: &Lowered) -> Self {
        Self { reals: vec![E::ZERO; lowered.ops().len()], masks: vec![false; lowered.ops().len()] }
    }

    /// Updates one element: gives the new weight and replaces the states. `scalars` is what [`Lowered::evaluate`] gave.
    ///
    /// # Panics
    ///
    /// When the code, the scalars and the states are not of one rule.
    pub fn update(&mut self, lowered: &Lowered, scalars: &[f64], weight: E, gradient: E, states: &mut [E]) -> E {
        for (place, op) in lowered.ops().iter().enumerate() {
            match *op {
                RuleOp::Weight => self.reals[place] = weight,
                RuleOp::Gradient => self.reals[place] = gradient,
                RuleOp::State(state) => self.reals[place] = states[state.index()],
                RuleOp::Scalar(scalar) => self.reals[place] = E::of_scalar(scalars[scalar.index()]),
                RuleOp::Unary(unary, operand) => self.reals[place] = self.reals[operand.index()].unary(unary),
                RuleOp::Binary(binary, left, right) => {
                    self.reals[place] = self.reals[left.index()].binary(binary, self.reals[right.index()]);
                }
                RuleOp::Compare(comparison, left, right) => {
                    self.masks[place] = holds(comparison, self.reals[left.index()], self.reals[right.index()]);
                }
                RuleOp::Not(operand) => self.masks[place] = !self.masks[operand.index()],
                RuleOp::And(left, right) => self.masks[place] = self.masks[left.index()] && self.masks[right.index()],
                RuleOp::Or(left, right) => self.masks[place] = self.masks[left.index()] || self.masks[right.index()],
                RuleOp::Select { mask, then, otherwise } => {
                    let chosen = if self.masks[mask.index()] { then } else { otherwise };
                    self.reals[place] = self.reals[chosen.index()];
                }
                RuleOp::Call(function, operand) => self.reals[place] = call(function, self.reals[operand.index()]),
                RuleOp::Power(base, exponent) => {
                    let value = power(self.reals[base.index()].widen(), self.reals[exponent.index()].widen());
                    self.reals[place] = E::nearest(value);
                }
            }
        }
        for (state, result) in states.iter_mut().zip(lowered.states()) {
            *state = self.reals[result.value.index()];
        }
        self.reals[lowered.weight().index()]
    }
}

fn holds<E: RuleReal>(comparison: Comparison, left: E, right: E) -> bool {
    match comparison {
        Comparison::Less => left < right,
        Comparison::LessOrEqual => left <= right,
        Comparison::Equal => left == right,
    }
}

fn call<E: RuleReal>(function: RuleFunction, operand: E) -> E {
    E::nearest(function.of(operand.widen()))
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
fn nearest_binary32(value: f64) -> f32 {
    value as f32
}
