//! Code generator from a rule's straight-line code to CUDA C++, one operation per line.
//!
//! The output is a structure template over the parameter's type, so binary32 and binary64 share one source. Its
//! constructor reads the scalars that the rule uses, and `run` computes one element. Numbers are scalars, so rules that
//! differ only in numbers share one source; its digest, the key, identifies the kernel.

use std::fmt::Write;

use pserver_core::dtype::ElementType;
use pserver_core::limits::STATES_MAX;
use pserver_core::rule::ssa::{
    Binary, Comparison, Lowered, RuleFunction, RuleOp, ScalarId, Unary, ValueId, round_to_binary32,
};
use pserver_core::rule::uses::{UpdatedTensor, Uses, outputs};

use super::arguments::ElementKind;

/// Hexadecimal digits of a key.
const KEY_DIGITS: usize = 16;
/// The most operations and states of a small rule.
const SMALL: (usize, usize) = (32, 2);
/// The structure's name in the text that the key is computed from.
const NAMELESS: &str = "Rule";

/// A rule's source code, and what a launch of it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emitted {
    key: String,
    text: String,
    used: Vec<ScalarId>,
    /// Whether a thread needs few registers for it.
    is_small: bool,
}

impl Emitted {
    /// Generates the source of this code.
    #[must_use]
    pub fn of(code: &Lowered) -> Self {
        let uses = Uses::of(code);
        let used = used_scalars(code, &uses);
        let nameless = structure(code, &uses, &used);
        let key = blake3::hash(nameless.as_bytes()).to_hex()[..KEY_DIGITS].to_owned();
        let text = nameless.replace(NAMELESS, &structure_name(&key));
        let is_small = is_small(code, &uses);
        Self { key, text, used, is_small }
    }

    /// Identifies the kernel: rules with one key differ only in the values of their scalars.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The source of the structure.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The scalars that a launch takes, in order.
    #[must_use]
    pub fn used(&self) -> &[ScalarId] {
        &self.used
    }

    /// The name of the kernel that updates a tensor of this type.
    ///
    /// # Panics
    /// When the type is not f32 or f64.
    #[must_use]
    pub fn update_entry(&self, element_type: ElementType) -> String {
        format!("pserver_update_{}_{}", float_suffix(element_type), self.key)
    }

    /// The name of the kernel that updates rows of this type.
    ///
    /// # Panics
    /// When the type is not f32 or f64.
    #[must_use]
    pub fn rows_entry(&self, element_type: ElementType) -> String {
        format!("pserver_rows_{}_{}", float_suffix(element_type), self.key)
    }

    /// Writes the used scalars of one update in the layout of a launch, replacing the content of `into`. `scalars` is
    /// the result of [`Lowered::evaluate`].
    ///
    /// # Panics
    /// When the type is not f32 or f64, or the scalars are another rule's.
    pub fn pack(&self, element_type: ElementType, scalars: &[f64], into: &mut Vec<u8>) {
        into.clear();
        let used = self.used.iter().map(|scalar| scalars[scalar.index()]);
        match element_type {
            ElementType::Float32 => used.for_each(|scalar| into.extend(round_to_binary32(scalar).to_le_bytes())),
            ElementType::Float64 => used.for_each(|scalar| into.extend(scalar.to_le_bytes())),
            other => panic!("a rule was let through for {other}; expected float32 or float64"),
        }
    }

    /// The kernel that updates a tensor of one type.
    pub(super) fn update_kernel(&self, element_type: ElementType) -> String {
        self.kernel(element_type, &self.update_entry(element_type), "UpdateArguments", "update_all")
    }

    /// The kernel that updates rows of one type.
    pub(super) fn rows_kernel(&self, element_type: ElementType) -> String {
        self.kernel(element_type, &self.rows_entry(element_type), "RowsArguments", "rows_all")
    }

    /// A small rule in binary32 gets four blocks of 256 threads on a multiprocessor: 64 registers per thread, and
    /// enough threads in flight to hide loads even with one gradient. Other rules get two blocks and 128 registers, so
    /// that they spill none.
    fn kernel(&self, element_type: ElementType, name: &str, arguments: &str, body: &str) -> String {
        let is_single = element_type == ElementType::Float32;
        let real = if is_single { "float" } else { "double" };
        let blocks = if is_single && self.is_small { 4 } else { 2 };
        let rule = format!("{}<{real}>", structure_name(&self.key));
        format!(
            "extern \"C\" __global__ void __launch_bounds__(256, {blocks})\n\
             {name}(const __grid_constant__ {arguments} a) {{\n    {body}<{rule}>(a);\n}}\n"
        )
    }
}

/// Whether 64 registers per thread are enough in binary32.
fn is_small(code: &Lowered, uses: &Uses) -> bool {
    let used = || code.ops().iter().enumerate().filter(|(place, _)| !uses.is_unused(*place)).map(|(_, op)| op);
    let calls = used().any(|op| matches!(op, RuleOp::Call(..) | RuleOp::Power(..)));
    !calls && used().count() <= SMALL.0 && code.states().len() <= SMALL.1
}

fn structure_name(key: &str) -> String {
    format!("{NAMELESS}_{key}")
}

fn float_suffix(element_type: ElementType) -> &'static str {
    assert!(
        matches!(element_type, ElementType::Float32 | ElementType::Float64),
        "a rule was let through for {element_type}; expected float32 or float64"
    );
    ElementKind::of(element_type).suffix().expect("a float of this size is a parameter's type")
}

/// The scalars that element operations use, once each, in order of first use.
fn used_scalars(code: &Lowered, uses: &Uses) -> Vec<ScalarId> {
    let mut used = Vec::new();
    for (place, op) in code.ops().iter().enumerate() {
        if let RuleOp::Scalar(scalar) = op
            && !uses.is_unused(place)
            && !used.contains(scalar)
        {
            used.push(*scalar);
        }
    }
    used
}

fn structure(code: &Lowered, uses: &Uses, used: &[ScalarId]) -> String {
    let mut text = format!("template <typename Real> struct {NAMELESS} {{\n    typedef Real T;\n");
    let written = outputs(code).fold(0_u32, |bits, output| bits | 1 << tensor_bit(output.tensor));
    line(&mut text, 1, format_args!("enum {{ STATES = {}, WRITTEN = {written} }};", code.states().len()));
    for place in 0..used.len() {
        line(&mut text, 1, format_args!("Real c{place};"));
    }
    line(&mut text, 1, format_args!("template <typename Numbers>"));
    line(&mut text, 1, format_args!("__device__ __forceinline__ explicit {NAMELESS}(const Numbers& numbers) {{"));
    for place in 0..used.len() {
        line(&mut text, 2, format_args!("c{place} = numbers({place});"));
    }
    line(&mut text, 1, format_args!("}}"));
    line(&mut text, 1, format_args!("__device__ __forceinline__ void run(Real& w, Real* s, Real g) const {{"));
    for (place, op) in code.ops().iter().enumerate().filter(|(place, _)| !uses.is_unused(*place)) {
        let (defined, expression) = (ValueName(place), expression(*op, used));
        let kind = if op.is_mask() { "bool" } else { "Real" };
        line(&mut text, 2, format_args!("const {kind} {defined} = {expression};"));
    }
    for output in outputs(code) {
        let value = ValueName(output.value.index());
        match output.tensor {
            UpdatedTensor::State(state) => line(&mut text, 2, format_args!("s[{state}] = {value};")),
            UpdatedTensor::Weight => line(&mut text, 2, format_args!("w = {value};")),
        }
    }
    text.push_str("    }\n};\n");
    text
}

fn line(text: &mut String, depth: usize, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{:1$}{content}", "", depth * 4).expect("a string takes everything");
}

const fn tensor_bit(tensor: UpdatedTensor) -> usize {
    match tensor {
        UpdatedTensor::State(state) => state,
        UpdatedTensor::Weight => STATES_MAX,
    }
}

/// A value's name in the text.
struct ValueName(usize);

impl std::fmt::Display for ValueName {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "v{}", self.0)
    }
}

fn expression(op: RuleOp, used: &[ScalarId]) -> String {
    let name = |value: ValueId| ValueName(value.index());
    match op {
        RuleOp::Weight => "w".to_owned(),
        RuleOp::Gradient => "g".to_owned(),
        RuleOp::State(state) => format!("s[{}]", state.index()),
        RuleOp::Scalar(scalar) => {
            let place = used.iter().position(|known| *known == scalar).expect("what is used was collected");
            format!("c{place}")
        }
        RuleOp::Unary(unary, operand) => unary_call(unary, &name(operand)),
        RuleOp::Binary(binary, left, right) => format!("{}({}, {})", binary_name(binary), name(left), name(right)),
        RuleOp::Compare(comparison, left, right) => format!("{} {} {}", name(left), relation(comparison), name(right)),
        RuleOp::Not(operand) => format!("!{}", name(operand)),
        RuleOp::And(left, right) => format!("{} && {}", name(left), name(right)),
        RuleOp::Or(left, right) => format!("{} || {}", name(left), name(right)),
        RuleOp::Select { mask, then, otherwise } => format!("{} ? {} : {}", name(mask), name(then), name(otherwise)),
        RuleOp::Call(function, operand) => {
            format!("Nearest<Real>::of({}(wide({})))", function_name(function), name(operand))
        }
        RuleOp::Power(base, exponent) => {
            format!("Nearest<Real>::of(power(wide({}), wide({})))", name(base), name(exponent))
        }
    }
}

fn unary_call(unary: Unary, operand: &ValueName) -> String {
    match unary {
        Unary::Negate => format!("-{operand}"),
        Unary::Absolute => format!("absolute({operand})"),
        Unary::SquareRoot => format!("root({operand})"),
        Unary::Sign => format!("sign({operand})"),
        Unary::Floor => format!("floored({operand})"),
    }
}

const fn binary_name(binary: Binary) -> &'static str {
    match binary {
        Binary::Add => "plus",
        Binary::Subtract => "minus",
        Binary::Multiply => "times",
        Binary::Divide => "divided",
        Binary::Minimum => "minimum",
        Binary::Maximum => "maximum",
        Binary::CopySign => "copy_sign",
    }
}

const fn relation(comparison: Comparison) -> &'static str {
    match comparison {
        Comparison::Less => "<",
        Comparison::LessOrEqual => "<=",
        Comparison::Equal => "==",
    }
}

const fn function_name(function: RuleFunction) -> &'static str {
    match function {
        RuleFunction::Exponential => "exponential",
        RuleFunction::ExponentialMinusOne => "exponential_minus_one",
        RuleFunction::Logarithm => "logarithm",
        RuleFunction::LogarithmOnePlus => "logarithm_one_plus",
        RuleFunction::HyperbolicTangent => "hyperbolic_tangent",
    }
}
