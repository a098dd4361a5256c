//! One loop for each operation. Masks are ones and zeros in slots of reals.

use pserver_core::rule::ssa::{Binary, Comparison, Function, Op, Unary, ValueId, power};

use crate::cpu::element::Real;

/// Fills `to` with what the operation defines, where that is computed and not loaded.
#[inline(always)]
pub(super) fn operation<'a, E: Real + 'a>(op: Op, to: &mut [E], of: impl Fn(ValueId) -> &'a [E]) {
    let mask = |holds: bool| if holds { E::ONE } else { E::ZERO };
    match op {
        Op::Weight | Op::Gradient | Op::State(_) | Op::Scalar(_) => {}
        Op::Unary(op, operand) => unary(op, to, of(operand)),
        Op::Binary(op, left, right) => binary(op, to, of(left), of(right)),
        Op::Compare(Comparison::Less, left, right) => two(to, of(left), of(right), |left, right| mask(left < right)),
        Op::Compare(Comparison::LessOrEqual, left, right) => {
            two(to, of(left), of(right), |left, right| mask(left <= right));
        }
        Op::Compare(Comparison::Equal, left, right) => two(to, of(left), of(right), |left, right| mask(left == right)),
        Op::Not(operand) => one(to, of(operand), |held| mask(held == E::ZERO)),
        Op::And(left, right) => two(to, of(left), of(right), |left, right| if left == E::ZERO { left } else { right }),
        Op::Or(left, right) => two(to, of(left), of(right), |left, right| if left == E::ZERO { right } else { left }),
        Op::Select { mask, then, otherwise } => select(to, of(mask), of(then), of(otherwise)),
        Op::Call(function, operand) => call(function, to, of(operand)),
        Op::Power(base, exponent) => {
            two(to, of(base), of(exponent), |base, exponent| E::nearest(power(base.widen(), exponent.widen())))
        }
    }
}

#[inline(always)]
fn unary<E: Real>(op: Unary, to: &mut [E], operand: &[E]) {
    match op {
        Unary::Negate => one(to, operand, |value| -value),
        Unary::Absolute => one(to, operand, E::abs),
        Unary::SquareRoot => one(to, operand, E::sqrt),
        Unary::Sign => one(to, operand, |value| if value.abs() > E::ZERO { E::ONE.copysign(value) } else { value }),
        Unary::Floor => one(to, operand, E::floor),
    }
}

#[inline(always)]
fn binary<E: Real>(op: Binary, to: &mut [E], left: &[E], right: &[E]) {
    match op {
        Binary::Add => two(to, left, right, |left, right| left + right),
        Binary::Subtract => two(to, left, right, |left, right| left - right),
        Binary::Multiply => two(to, left, right, |left, right| left * right),
        Binary::Divide => two(to, left, right, |left, right| left / right),
        Binary::Minimum => two(to, left, right, |left, right| if right < left { right } else { left }),
        Binary::Maximum => two(to, left, right, |left, right| if right > left { right } else { left }),
        Binary::CopySign => two(to, left, right, E::copysign),
    }
}

#[inline(always)]
fn select<E: Real>(to: &mut [E], mask: &[E], then: &[E], otherwise: &[E]) {
    for (((to, &mask), &then), &otherwise) in to.iter_mut().zip(mask).zip(then).zip(otherwise) {
        *to = if mask == E::ZERO { otherwise } else { then };
    }
}

#[inline(always)]
fn call<E: Real>(function: Function, to: &mut [E], operand: &[E]) {
    one(to, operand, |value| E::nearest(function.of(value.widen())));
}

#[inline(always)]
fn one<E: Real>(to: &mut [E], operand: &[E], of: impl Fn(E) -> E) {
    for (to, &operand) in to.iter_mut().zip(operand) {
        *to = of(operand);
    }
}

#[inline(always)]
fn two<E: Real>(to: &mut [E], left: &[E], right: &[E], of: impl Fn(E, E) -> E) {
    for ((to, &left), &right) in to.iter_mut().zip(left).zip(right) {
        *to = of(left, right);
    }
}
