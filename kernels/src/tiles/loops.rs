//! One loop for each operation. Masks are ones and zeros in slots of reals.

use pserver_core::rule::ssa::{Binary, Comparison, RuleFunction, RuleOp, Unary, ValueId, power};

use crate::cpu::element::KernelReal;

/// Fills `to` with the result of an operation that is computed, not loaded.
#[inline(always)]
pub(super) fn operation<'a, E: KernelReal + 'a>(op: RuleOp, to: &mut [E], of: impl Fn(ValueId) -> &'a [E]) {
    let mask = |holds: bool| if holds { E::ONE } else { E::ZERO };
    match op {
        RuleOp::Weight | RuleOp::Gradient | RuleOp::State(_) | RuleOp::Scalar(_) => {}
        RuleOp::Unary(op, operand) => unary(op, to, of(operand)),
        RuleOp::Binary(op, left, right) => binary(op, to, of(left), of(right)),
        RuleOp::Compare(Comparison::Less, left, right) => {
            two(to, of(left), of(right), |left, right| mask(left < right))
        }
        RuleOp::Compare(Comparison::LessOrEqual, left, right) => {
            two(to, of(left), of(right), |left, right| mask(left <= right));
        }
        RuleOp::Compare(Comparison::Equal, left, right) => {
            two(to, of(left), of(right), |left, right| mask(left == right))
        }
        RuleOp::Not(operand) => one(to, of(operand), |held| mask(held == E::ZERO)),
        RuleOp::And(left, right) => {
            two(to, of(left), of(right), |left, right| if left == E::ZERO { left } else { right })
        }
        RuleOp::Or(left, right) => {
            two(to, of(left), of(right), |left, right| if left == E::ZERO { right } else { left })
        }
        RuleOp::Select { mask, then, otherwise } => select(to, of(mask), of(then), of(otherwise)),
        RuleOp::Call(function, operand) => call(function, to, of(operand)),
        RuleOp::Power(base, exponent) => {
            two(to, of(base), of(exponent), |base, exponent| E::nearest(power(base.widen(), exponent.widen())))
        }
    }
}

#[inline(always)]
fn unary<E: KernelReal>(op: Unary, to: &mut [E], operand: &[E]) {
    match op {
        Unary::Negate => one(to, operand, |value| -value),
        Unary::Absolute => one(to, operand, E::abs),
        Unary::SquareRoot => one(to, operand, E::sqrt),
        Unary::Sign => one(to, operand, |value| if value.abs() > E::ZERO { E::ONE.copysign(value) } else { value }),
        Unary::Floor => one(to, operand, E::floor),
    }
}

#[inline(always)]
fn binary<E: KernelReal>(op: Binary, to: &mut [E], left: &[E], right: &[E]) {
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
fn select<E: KernelReal>(to: &mut [E], mask: &[E], then: &[E], otherwise: &[E]) {
    for (((to, &mask), &then), &otherwise) in to.iter_mut().zip(mask).zip(then).zip(otherwise) {
        *to = if mask == E::ZERO { otherwise } else { then };
    }
}

#[inline(always)]
fn call<E: KernelReal>(function: RuleFunction, to: &mut [E], operand: &[E]) {
    one(to, operand, |value| E::nearest(function.of(value.widen())));
}

#[inline(always)]
fn one<E: KernelReal>(to: &mut [E], operand: &[E], of: impl Fn(E) -> E) {
    for (to, &operand) in to.iter_mut().zip(operand) {
        *to = of(operand);
    }
}

#[inline(always)]
fn two<E: KernelReal>(to: &mut [E], left: &[E], right: &[E], of: impl Fn(E, E) -> E) {
    for ((to, &left), &right) in to.iter_mut().zip(left).zip(right) {
        *to = of(left, right);
    }
}
