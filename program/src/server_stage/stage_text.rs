//! Writer of a stage's text, op after op.

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::dtype::ElementType;
use pserver_core::limits::RULE_NAME_BYTES_MAX;
use pserver_core::rule::CheckedRule;

use crate::graph::{Node, VariableIndex};
use crate::op::OpKind;
use crate::variable::{Dim, Purpose, VariableFacts};

use super::stage_value::{StageValue, StageValueKind, binary, rounded, unary};
use super::{CheckedStage, PartOps, StageOp, StageTotal};

/// Ops that have a form in a stage, for errors.
const EXPECTED: &str = "scale, add, sub, mul, div, max, min, pow, greater, sum, sqrt, exp, log, tanh, abs, sign, relu, \
                        cast, reshape, fill, or reduce_sum or mean over everything";
/// Names that a text has already.
const TAKEN: [&str; 14] =
    ["w", "g", "lr", "n", "merged", "update", "param", "state", "let", "in", "and", "or", "not", "inf"];
/// Prefix of the names of temporaries.
const TEMPORARY: &str = "value_";

/// A stage while its text is written.
pub(super) struct StageText<'p, 'g> {
    part: &'p PartOps<'g>,
    update: StageOp<'g>,
    merged: VariableIndex,
    total: Option<&'p StageTotal>,
    element_type: ElementType,
    shape: &'g [Dim],
    /// Each with the op that it is of.
    declarations: Vec<(String, StageOp<'g>)>,
    statements: Vec<(String, StageOp<'g>)>,
    values: BTreeMap<VariableIndex, StageValue>,
    states: Vec<(VariableIndex, f64)>,
    taken: BTreeSet<String>,
}

impl<'p, 'g> StageText<'p, 'g> {
    pub(super) fn new(
        part: &'p PartOps<'g>,
        update: StageOp<'g>,
        merged: VariableIndex,
        total: Option<&'p StageTotal>,
    ) -> Result<Self, pserver_core::error::Failure> {
        let node = update.node;
        let VariableFacts::Dense { element_type, shape } = &part.graph.variable(node.inputs[0]).facts else {
            unreachable!("a parameter is dense")
        };
        let rule = node.rule.as_ref().expect("an update has a rule");
        let taken = TAKEN.into_iter().chain(rule.rule().states()).map(str::to_owned).collect();
        let mut text = Self {
            part,
            update,
            merged,
            total,
            element_type: *element_type,
            shape,
            declarations: Vec::new(),
            statements: Vec::new(),
            values: BTreeMap::new(),
            states: Vec::new(),
            taken,
        };
        let mut merged_value = StageValue::element("g", text.element_type);
        if part.is_read_after(update, merged) {
            text.statements.push(("let merged = g".to_owned(), update));
            "merged".clone_into(&mut merged_value.text);
        }
        text.values.insert(merged, merged_value);
        text.values.insert(node.inputs[0], StageValue::element("w", text.element_type));
        text.values.insert(node.inputs[2], StageValue::count("(n - 1)"));
        Ok(text)
    }

    /// The states that it declares, with their initial values.
    pub(super) fn states(&self) -> Vec<(VariableIndex, f64)> {
        self.states.clone()
    }

    /// The checked text, or the op of the first line that is refused.
    pub(super) fn checked(&self) -> CheckedStage<'g> {
        let lines: Vec<&(String, StageOp<'g>)> = self.declarations.iter().chain(&self.statements).collect();
        let text = |count: usize| {
            let mut text: String = lines[..count].iter().map(|(line, _)| format!("{line}\n")).collect();
            if !lines[..count].iter().any(|(line, _)| line == "update") {
                text.push_str("update\n");
            }
            CheckedRule::stage(&text)
        };
        text(lines.len()).map_err(|failure| {
            let first = (1..lines.len()).find_map(|count| Some((lines[count - 1].1, text(count).err()?)));
            first.unwrap_or((self.update, failure))
        })
    }

    /// Writes one op of the role `optimize`.
    pub(super) fn op(&mut self, op: StageOp<'g>) -> Result<(), String> {
        if op.node.rule.is_some() {
            return self.update(op);
        }
        let inputs = op.node.inputs.iter().map(|input| self.value(*input, op));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let facts = &self.part.graph.variable(op.node.outputs[0]).facts;
        let element_type = facts.element_type().ok_or_else(|| format!("found {facts}; expected a tensor"))?;
        let output = self.computed(op, &inputs, element_type)?;
        self.assign(op, op.node.outputs[0], output)
    }

    /// Statements that prepare the gradient and the rate, then the update.
    fn update(&mut self, op: StageOp<'g>) -> Result<(), String> {
        let node = op.node;
        let rule = node.rule.as_ref().expect("an update has a rule").rule();
        if node.inputs[1] != self.merged {
            let gradient = self.value(node.inputs[1], op)?;
            self.statements.push((format!("g = {}", gradient.text), op));
        }
        // A rule's own bound of the norm is of the gradient before the stage.
        if let Some(clip) = rule.clip_norm {
            self.statements.push((format!("g = g * select(norm(g) > {clip:?}, {clip:?} / norm(g), 1)"), op));
        }
        if let Some(rate) = node.inputs.get(node.outputs.len() + 1) {
            let rate = self.value(*rate, op)?;
            if rate.is_element() {
                return Err("found a rate for each element; expected one number for all".to_owned());
            }
            self.statements.push((format!("lr = {} * {:?}", rate.text, rule.rate_scale), op));
        }
        self.statements.push(("update".to_owned(), op));
        self.values.insert(node.inputs[2], StageValue::count("n"));
        Ok(())
    }

    /// The value of an op's input, which it may declare.
    fn value(&mut self, index: VariableIndex, reader: StageOp<'g>) -> Result<StageValue, String> {
        if let Some(value) = self.values.get(&index) {
            return Ok(value.clone());
        }
        if let Some(total) = self.total.filter(|total| total.number == index) {
            return self.total(total, reader);
        }
        let variable = self.part.graph.variable(index);
        let name = &variable.name;
        if !variable.purpose.is_persistable() {
            let writer = self.part.writer(index).ok_or_else(|| format!("found nothing that writes {name:?}"))?;
            // An op that reads only constants belongs to every reader.
            self.op(writer)?;
            return self.values.get(&index).cloned().ok_or_else(|| format!("found no value of {name:?}"));
        }
        let fill = self.part.fills.get(&index).copied();
        let VariableFacts::Dense { element_type, shape } = &variable.facts else {
            return Err(format!("found {name:?}, which is {}; expected a tensor", variable.facts));
        };
        let fill = fill
            .ok_or_else(|| format!("found {name:?} initialised by no fill; expected one number as its first value"))?;
        if !self.part.written.contains(&index) {
            return StageValue::constant(fill, *element_type);
        }
        if self.update.node.outputs.contains(&index) || variable.purpose != Purpose::State {
            return Err(format!("found {name:?}, which its rule keeps; expected a state of its own"));
        }
        if *element_type != self.element_type || *shape != self.shape {
            return Err(format!(
                "found the state {name:?}, which is {}; expected the facts of its parameter",
                variable.facts
            ));
        }
        let own = self.state_name(name);
        self.declarations.push((format!("state {own} = {}", StageValue::constant(fill, *element_type)?.text), reader));
        self.states.push((index, fill));
        let value = StageValue::element(&own, *element_type);
        self.values.insert(index, value.clone());
        Ok(value)
    }

    /// The number that trainers make of several parameters' numbers.
    fn total(&mut self, total: &StageTotal, reader: StageOp<'g>) -> Result<StageValue, String> {
        let share = match &total.share {
            Some((share, _)) => self.values.get(share).map(|value| value.text.clone()).ok_or_else(|| {
                let name = &self.part.graph.variable(*share).name;
                format!(
                    "found a number of several parameters read before {name:?}, of which it is made; expected it after"
                )
            })?,
            None => "0.0".to_owned(),
        };
        let VariableFacts::Dense { element_type, .. } = self.part.graph.variable(total.number).facts else {
            return Err("found a total that is no number; expected one".to_owned());
        };
        let value = self.temporary(reader, format!("total({share})"), false, element_type);
        self.values.insert(total.number, value.clone());
        Ok(value)
    }

    /// The part of a state's name that tells it from others of its parameter, as rules write names.
    fn state_name(&mut self, variable: &str) -> String {
        let own = variable.split('@').nth(1).filter(|own| !own.is_empty()).unwrap_or(variable);
        let letters = own.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' });
        let mut name: String = letters.take(RULE_NAME_BYTES_MAX - 8).collect();
        if name.starts_with(|first: char| first.is_ascii_digit()) || name.starts_with(TEMPORARY) {
            name.insert_str(0, "state_");
        }
        let first = name.clone();
        let mut next = 1;
        while !self.taken.insert(name.clone()) {
            name = format!("{first}_{next}");
            next += 1;
        }
        name
    }

    fn computed(
        &mut self,
        op: StageOp<'g>,
        inputs: &[StageValue],
        element_type: ElementType,
    ) -> Result<StageValue, String> {
        let node = op.node;
        match (&node.kind, inputs) {
            (OpKind::Fill { value }, _) => StageValue::constant(*value, element_type),
            (OpKind::Cast { .. }, [x]) => self.cast(op, x, element_type),
            (OpKind::Reshape { .. }, [x]) => Ok(x.clone()),
            (OpKind::ReduceSum { axes, .. } | OpKind::Mean { axes, .. }, [x]) => self.reduction(op, x, axes),
            (OpKind::Scale { factor }, [x]) => {
                let factor = StageValue::constant(*factor, element_type)?;
                self.pair(op, x, &factor)
            }
            (OpKind::Sum, [first, rest @ ..]) => {
                let rows = node.inputs.iter().map(|input| &self.part.graph.variable(*input).facts);
                if rows.filter(|facts| matches!(facts, VariableFacts::SelectedRows { .. })).count() > 1 {
                    return Err("found selected rows twice; expected them once, beside dense tensors".to_owned());
                }
                rest.iter().try_fold(first.clone(), |total, next| self.pair(op, &total, next))
            }
            (_, [x]) => {
                let text = unary(&node.kind, x).ok_or_else(|| unknown(node))?;
                Ok(self.temporary(op, text, x.is_element(), element_type))
            }
            (_, [a, b]) => self.pair(op, a, b),
            _ => Err(unknown(node)),
        }
    }

    /// Rounds a number for all elements; an element keeps its type.
    fn cast(&mut self, op: StageOp<'g>, x: &StageValue, to: ElementType) -> Result<StageValue, String> {
        match x.kind {
            _ if !matches!(to, ElementType::Float32 | ElementType::Float64) => {
                Err(format!("found a cast to {to}; expected float32 or float64"))
            }
            StageValueKind::Element if to == x.element_type => Ok(x.clone()),
            StageValueKind::Element => {
                Err(format!("found a cast of {} to {to}; expected every tensor in one type", x.element_type))
            }
            StageValueKind::Constant(value) => StageValue::constant(value, to),
            StageValueKind::Scalar | StageValueKind::Count => Ok(self.temporary(op, x.text.clone(), false, to)),
        }
    }

    /// A number of all elements.
    fn reduction(&mut self, op: StageOp<'g>, x: &StageValue, axes: &[u32]) -> Result<StageValue, String> {
        let VariableFacts::Dense { shape, .. } = &self.part.graph.variable(op.node.inputs[0]).facts else {
            return Err(format!("found {} of selected rows; expected a dense tensor", op.node.kind.name()));
        };
        if !x.is_element() || !(axes.is_empty() || axes.len() == shape.len()) {
            let name = op.node.kind.name();
            return Err(format!(
                "found {name} over some dimensions, or of a constant; expected one over a whole tensor"
            ));
        }
        let sum = self.temporary(op, format!("sum({})", x.text), false, x.element_type);
        if matches!(op.node.kind, OpKind::ReduceSum { .. }) {
            return Ok(sum);
        }
        let lengths = shape.iter().map(|dim| if let Dim::Fixed(length) = dim { *length as f64 } else { 1.0 });
        let count = StageValue::constant(lengths.product(), x.element_type)?;
        Ok(self.temporary(op, format!("{} / {}", sum.text, count.text), false, x.element_type))
    }

    fn pair(&mut self, op: StageOp<'g>, a: &StageValue, b: &StageValue) -> Result<StageValue, String> {
        let text = binary(&op.node.kind, a, b)?.ok_or_else(|| unknown(op.node))?;
        if a.element_type != b.element_type || a.kind == StageValueKind::Count {
            return Err(format!("found {} and {}; expected floats of one type", a.element_type, b.element_type));
        }
        Ok(self.temporary(op, text, a.is_element() || b.is_element(), a.element_type))
    }

    /// Names a value.
    fn temporary(&mut self, op: StageOp<'g>, text: String, is_element: bool, element_type: ElementType) -> StageValue {
        let name = format!("{TEMPORARY}{}", self.statements.len());
        self.statements.push((format!("let {name} = {}", rounded(text, is_element, element_type)), op));
        let kind = if is_element { StageValueKind::Element } else { StageValueKind::Scalar };
        StageValue { text: name, kind, element_type }
    }

    /// Gives a variable its value.
    fn assign(&mut self, op: StageOp<'g>, output: VariableIndex, value: StageValue) -> Result<(), String> {
        let variable = self.part.graph.variable(output);
        if value.is_element() && !self.is_like_parameter(&variable.facts) {
            let name = &variable.name;
            return Err(format!("found {name:?}, which is {}; expected the shape of its parameter", variable.facts));
        }
        if !variable.purpose.is_persistable() {
            // The value of a state or of the parameter may change before it is read.
            let value = match value.kind {
                StageValueKind::Element if !value.text.starts_with(TEMPORARY) => {
                    self.temporary(op, value.text, true, value.element_type)
                }
                _ => value,
            };
            self.values.insert(output, value);
            return Ok(());
        }
        let target = self.value(output, op)?;
        if !target.is_element() {
            let name = &variable.name;
            return Err(format!("found {name:?} written by an op; expected only update to count"));
        }
        self.statements.push((format!("{} = {}", target.text, value.text), op));
        Ok(())
    }

    fn is_like_parameter(&self, facts: &VariableFacts) -> bool {
        match facts {
            VariableFacts::Dense { element_type, shape } => *element_type == self.element_type && *shape == self.shape,
            VariableFacts::SelectedRows { element_type, height, width } => {
                *element_type == self.element_type && [Dim::Fixed(*height), Dim::Fixed(*width)] == *self.shape
            }
            VariableFacts::Queue { .. } | VariableFacts::Strings => false,
        }
    }
}

fn unknown(node: &Node) -> String {
    format!("found {}, which has no form in a stage; expected {EXPECTED}", node.kind.name())
}
