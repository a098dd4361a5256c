//! Values of a stage: their text, and whether they differ from element to element.

use pserver_core::dtype::ElementType;

use crate::op::OpKind;

/// Where a value is the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum StageValueKind {
    /// One for each element of the parameter.
    Element,
    /// One for all elements.
    Scalar,
    /// As [`Scalar`](Self::Scalar), and known.
    Constant(f64),
    /// The count of updates: an exact integer.
    Count,
}

/// A variable's value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StageValue {
    /// An atom of the language of rules: a name, a number or an expression in parentheses.
    pub(super) text: String,
    pub(super) kind: StageValueKind,
    pub(super) element_type: ElementType,
}

impl StageValue {
    pub(super) fn element(text: &str, element_type: ElementType) -> Self {
        Self { text: text.to_owned(), kind: StageValueKind::Element, element_type }
    }

    /// The count of updates, before or after this one.
    pub(super) fn count(text: &str) -> Self {
        Self { text: text.to_owned(), kind: StageValueKind::Count, element_type: ElementType::Int64 }
    }

    /// A number in an element type, as arithmetic in that type has it.
    pub(super) fn constant(given: f64, element_type: ElementType) -> Result<Self, String> {
        let value = nearest(given, element_type);
        let is_small = element_type == ElementType::Float32 && value != 0.0 && value.abs() < f32::MIN_POSITIVE.into();
        if !value.is_finite() || is_small {
            return Err(format!("found the number {given:e} of {element_type}; expected zero or a normal number"));
        }
        let text = if value.is_sign_negative() { format!("({value:?})") } else { format!("{value:?}") };
        Ok(Self { text, kind: StageValueKind::Constant(value), element_type })
    }

    fn known(&self) -> Option<f64> {
        if let StageValueKind::Constant(value) = self.kind { Some(value) } else { None }
    }

    pub(super) fn is_element(&self) -> bool {
        self.kind == StageValueKind::Element
    }
}

/// A value and its text that is not rounded yet: numbers for all elements are computed in binary64.
pub(super) fn rounded(text: String, is_element: bool, element_type: ElementType) -> String {
    if is_element || element_type != ElementType::Float32 { text } else { format!("single({text})") }
}

/// The expression of an op with one operand; none for another op.
pub(super) fn unary(kind: &OpKind, x: &StageValue) -> Option<String> {
    let x = &x.text;
    Some(match kind {
        OpKind::Sqrt => format!("sqrt({x})"),
        OpKind::Exp => format!("exp({x})"),
        OpKind::Log => format!("log({x})"),
        OpKind::Tanh => format!("tanh({x})"),
        OpKind::Abs => format!("abs({x})"),
        OpKind::Sign => format!("select({x} > 0, 1, select({x} < 0, -1, select({x} == 0, 0, {x})))"),
        OpKind::Relu => format!("select({x} > 0, {x}, 0)"),
        _ => return None,
    })
}

/// The expression of an op with two operands; none for another op.
pub(super) fn binary(kind: &OpKind, a: &StageValue, b: &StageValue) -> Result<Option<String>, String> {
    let (x, y) = (&a.text, &b.text);
    Ok(Some(match kind {
        OpKind::Add | OpKind::Sum => format!("{x} + {y}"),
        OpKind::Sub => format!("{x} - {y}"),
        OpKind::Mul | OpKind::Scale { .. } => format!("{x} * {y}"),
        OpKind::Div => format!("{x} / {y}"),
        OpKind::Greater => format!("select({x} > {y}, 1, 0)"),
        OpKind::Max => chosen("max", ">", a, b),
        OpKind::Min => chosen("min", "<", a, b),
        OpKind::Pow if a.is_element() && matches!(b.known(), Some(1.0 | 2.0 | 0.5)) => {
            return Err("found the exponent 1, 2 or 0.5; expected mul or sqrt, whose bits are known".to_owned());
        }
        OpKind::Pow => format!("pow({x}, {y})"),
        _ => return Ok(None),
    }))
}

/// The larger or smaller operand: `a` where the relation chooses it or it is no number, else `b`. A rule's function is
/// shorter, and says the same where one operand is a known number, except of two zeros.
fn chosen(function: &str, relation: &str, a: &StageValue, b: &StageValue) -> String {
    let (x, y) = (&a.text, &b.text);
    match (a.known(), b.known()) {
        (Some(_), _) => format!("{function}({y}, {x})"),
        (_, Some(known)) if known != 0.0 => format!("{function}({x}, {y})"),
        _ => format!("select({x} {relation} {y} or {x} != {x}, {x}, {y})"),
    }
}

/// The nearest number of a float type.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
fn nearest(value: f64, element_type: ElementType) -> f64 {
    if element_type == ElementType::Float32 { f64::from(value as f32) } else { value }
}
