//! Import of training programs of PaddlePaddle 2: its main and startup program (`ProgramDesc` in protobuf) become one
//! program of ours.
//!
//! The forward part is mapped op by op; the backward part is dropped, and [`append_backward`] writes ours; of the
//! optimizer part come the rule of each parameter, its L2 penalty and the clipping of gradients by their global norm;
//! of the startup program initial values, the learning rate and the states' first values. Anything else is refused by
//! op and variable. `docs/PROGRAMS.md` has the table.
//!
//! Read in this order: `message.rs` (what is read of Paddle's messages), `forward.rs`, `gradients.rs`, `optimizer.rs`,
//! `startup.rs`.

mod clip;
mod forward;
mod gradients;
mod message;
mod optimizer;
mod paddle_op;
mod paddle_variables;
mod startup;

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_RULES_MAX;

use crate::backward::{ParameterGradient, append_backward};
use crate::block::Program;
use crate::graph::Graph;
use crate::op::{Op, OpKind, OpRole};
use crate::optimizer::append_optimizer;
use crate::variable::{Purpose, Variable};

use forward::ForwardPart;
use optimizer::{OptimizerPart, PaddleUpdate, PaddleUpdates};
use paddle_op::{PaddleOp, PaddleRole};
use paddle_variables::PaddleVariables;
use startup::StartupValues;

/// A program of Paddle's as one of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct PaddleImport {
    /// The program, with gradients and optimizer.
    pub program: Program,
    /// The variable that holds the loss.
    pub loss: String,
    /// A line for each thing that was mapped, dropped or chosen, with the reason.
    pub report: Vec<String>,
}

/// Makes a program of Paddle's main and startup program, given as `ProgramDesc` in protobuf's binary form.
///
/// # Errors
/// When the bytes are no such messages, or anything in them has no counterpart; names the program, the op by index and
/// kind, the variable, what was found and what was expected.
pub fn import_paddle(main: &[u8], startup: &[u8]) -> Result<PaddleImport, Failure> {
    import_paddle_given(main, startup, |_| false)
}

/// As [`import_paddle`]; an op [`given`](OpKind::Given) fills each parameter for which there is a value of its name, in
/// place of the startup program's op.
///
/// # Errors
/// As [`import_paddle`].
pub fn import_paddle_given(
    main: &[u8],
    startup: &[u8],
    has_value: impl Fn(&str) -> bool,
) -> Result<PaddleImport, Failure> {
    let (main, startup) = (message::decode("main", main)?, message::decode("startup", startup)?);
    let variables = PaddleVariables::new(&main.variables)?;
    let startup = StartupValues::new(&startup)?;
    let parts = PaddleParts::new(PaddleOp::all("main", &main.ops))?;
    let mut report = Vec::new();

    let loss = gradients::loss(&parts.backward)?;
    let mut forward = ForwardPart::new(&variables, &parts.forward)?;
    gradients::check_ops(&parts.forward, &parts.backward)?;
    gradients::check_ways(&parts.forward, &parts.backward, &variables, loss)?;
    let gradients = gradients::parameters(&parts.backward, &variables)?;
    let PaddleUpdates { updates, dropped } = OptimizerPart::read(&parts.optimize, &gradients, &variables, &startup)?;
    let parameters = parameters(&variables, &parts.forward, &updates)?;
    parts.check_order(&variables)?;
    parts.check_paddings(&updates)?;
    forward.check(&parameters)?;

    report.extend(forward.counts().into_iter().map(|(kind, count)| format!("mapped: {count} {kind}")));
    parts.report(&mut report)?;
    report.extend(dropped.iter().map(|name| format!("dropped: variable {name:?}, a state that our rule keeps itself")));
    let mut program = forward.into_program();
    let given: BTreeSet<&str> =
        parameters.iter().map(|parameter| parameter.name.as_str()).filter(|name| has_value(name)).collect();
    initialise(&mut program, &parameters, (&startup, &given), &mut report)?;
    let gradients = append_backward(&mut program, loss)?;
    optimize(&mut program, &updates, gradients, &mut report)?;
    Ok(PaddleImport { program, loss: loss.to_owned(), report })
}

/// The ops of a main program by their roles.
struct PaddleParts<'a> {
    forward: Vec<PaddleOp<'a>>,
    backward: Vec<PaddleOp<'a>>,
    optimize: Vec<PaddleOp<'a>>,
    /// Constants that no op of the forward part reads.
    unread: Vec<PaddleOp<'a>>,
}

impl<'a> PaddleParts<'a> {
    fn new(ops: Vec<PaddleOp<'a>>) -> Result<Self, Failure> {
        let mut parts = Self { forward: Vec::new(), backward: Vec::new(), optimize: Vec::new(), unread: Vec::new() };
        for op in ops {
            let part = match op.role()? {
                PaddleRole::Forward => &mut parts.forward,
                PaddleRole::Backward | PaddleRole::LossGradient => &mut parts.backward,
                PaddleRole::Optimize => &mut parts.optimize,
            };
            part.push(op);
        }
        let read: BTreeSet<&str> = parts.forward.iter().flat_map(PaddleOp::all_inputs).collect();
        let is_unread =
            |op: &PaddleOp<'_>| op.kind() == "fill_constant" && !op.all_outputs().any(|name| read.contains(name));
        (parts.unread, parts.forward) = parts.forward.into_iter().partition(is_unread);
        Ok(parts)
    }

    /// Refuses an op after the optimizer that reads a parameter as it is updated: ours compute before.
    fn check_order(&self, variables: &PaddleVariables<'_>) -> Result<(), Failure> {
        let Some(first) = self.optimize.first() else { return Ok(()) };
        for op in self.forward.iter().filter(|op| op.place > first.place) {
            if let Some(name) = op.all_inputs().find(|name| variables.is_parameter(name)) {
                return Err(op.refuse(format!("found parameter {name:?} read after its update; expected it before")));
            }
        }
        Ok(())
    }

    /// Refuses a norm that counts the gradient of a padding, which ours does not have.
    fn check_paddings(&self, updates: &[PaddleUpdate]) -> Result<(), Failure> {
        for (op, padding) in self.trained_paddings()? {
            let table = op.input("W")?;
            if updates.iter().any(|update| update.parameter == table && update.clip.is_some()) {
                return Err(op.refuse(format!(
                    "found padding_idx {padding} with is_sparse true and {table:?} clipped by a norm, to which Paddle \
                     adds the padding's gradient; expected is_sparse false"
                )));
            }
        }
        Ok(())
    }

    /// The lookups whose row for the padding Paddle trains, and its number.
    fn trained_paddings(&self) -> Result<Vec<(&PaddleOp<'a>, i64)>, Failure> {
        let mut found = Vec::new();
        for op in self.forward.iter().filter(|op| op.kind() == "lookup_table_v2") {
            let padding = op.int("padding_idx", -1)?;
            if padding >= 0 && op.boolean("is_sparse", false)? {
                found.push((op, padding));
            }
        }
        Ok(found)
    }

    fn report(&self, report: &mut Vec<String>) -> Result<(), Failure> {
        let count = self.backward.len();
        report.push(format!("dropped: {count} ops of the backward part; append_backward writes ours"));
        let unread = self.unread.iter();
        report.extend(unread.map(|op| format!("dropped: op {} {}, whose value no op reads", op.place, op.kind())));
        for (op, padding) in self.trained_paddings()? {
            let table = op.input("W")?;
            report.push(format!(
                "differs: row {padding} of {table:?}, the padding's, which no lookup reads: Paddle trains it"
            ));
        }
        let dropouts = self.forward.iter().filter(|op| op.kind() == "dropout");
        report.extend(
            dropouts.map(|op| {
                format!("differs: the elements that op {} drops; the share of them does not differ", op.place)
            }),
        );
        Ok(())
    }
}

/// The parameters that the forward part reads, each of which is updated.
fn parameters(
    variables: &PaddleVariables<'_>,
    forward: &[PaddleOp<'_>],
    updates: &[PaddleUpdate],
) -> Result<Vec<Variable>, Failure> {
    let updated: BTreeSet<&str> = updates.iter().map(|update| update.parameter.as_str()).collect();
    let read: BTreeSet<&str> = forward.iter().flat_map(PaddleOp::all_inputs).collect();
    let mut parameters = Vec::new();
    for variable in variables.all().filter(|variable| read.contains(variable.name.as_str())) {
        let name = variable.name.clone();
        if variable.is_parameter && updated.contains(name.as_str()) {
            parameters.push(Variable { facts: variables.facts(&name)?, name, purpose: Purpose::Parameter });
        } else if variable.is_parameter {
            return Err(paddle_variables::refuse(&name, "found no op that updates this parameter; expected one"));
        } else if variable.is_persistable {
            let expected = "expected parameters only to be kept from run to run";
            return Err(paddle_variables::refuse(
                &name,
                format!("found a persistable variable in the network; {expected}"),
            ));
        }
    }
    Ok(parameters)
}

/// Puts the initialisers of parameters before everything else.
fn initialise(
    program: &mut Program,
    parameters: &[Variable],
    (startup, given): (&StartupValues<'_>, &BTreeSet<&str>),
    report: &mut Vec<String>,
) -> Result<(), Failure> {
    let mut ops = Vec::new();
    for Variable { name, facts, .. } in parameters {
        let (_, shape) = facts
            .fixed_dense()
            .ok_or_else(|| paddle_variables::refuse(name, "found dimension -1; expected a parameter's to be fixed"))?;
        let (kind, seed) = match given.contains(name.as_str()) {
            true => (OpKind::Given { name: name.clone(), first: 0 }, None),
            false => startup.initializer(name, &shape)?,
        };
        if let OpKind::Given { .. } = kind {
            report.push(format!("given: the values of {name:?}"));
        } else if let Some(seed) = seed {
            report.push(format!(
                "chosen: seed {seed} for the random values of {name:?}, because Paddle's seed is 0, a new one every run"
            ));
        } else if !matches!(kind, OpKind::Fill { .. }) {
            report.push(format!("differs: random values of {name:?}; generators differ, distributions do not"));
        }
        ops.push(Op { kind, inputs: Vec::new(), outputs: vec![name.clone()], role: OpRole::Initialise });
    }
    program.blocks[0].ops.splice(0..0, ops);
    Ok(())
}

/// Appends the updates, those of one rule together.
fn optimize(
    program: &mut Program,
    updates: &[PaddleUpdate],
    mut gradients: Vec<ParameterGradient>,
    report: &mut Vec<String>,
) -> Result<(), Failure> {
    let rules: BTreeMap<&str, &PaddleUpdate> =
        updates.iter().map(|update| (update.parameter.as_str(), update)).collect();
    let limit_of = |gradient: &ParameterGradient| rules.get(gradient.parameter.as_str()).and_then(|update| update.clip);
    gradients.sort_by_key(|gradient| limit_of(gradient).is_none());
    let clipped = gradients.iter().filter(|gradient| limit_of(gradient).is_some()).count();
    let clipped = &mut gradients[..clipped];
    if let Some(limit) = clipped.first().and_then(limit_of) {
        clip::append_clipping(program, limit, clipped)?;
        let count = clipped.len();
        report.push(format!("mapped: clipping of {count} gradients by their norm {limit}"));
    }
    let mut by_rule: BTreeMap<&str, Vec<ParameterGradient>> = BTreeMap::new();
    for gradient in gradients {
        let update = rules.get(gradient.parameter.as_str()).ok_or_else(|| {
            paddle_variables::refuse(&gradient.parameter, "found no op that updates this parameter; expected one")
        })?;
        by_rule.entry(update.config.as_str()).or_default().push(gradient);
    }
    if by_rule.len() > PROGRAM_RULES_MAX {
        let found = by_rule.len();
        return Err(Failure::call(format!("main program: found {found} rules; expected at most {PROGRAM_RULES_MAX}")));
    }
    for (config, gradients) in by_rule {
        append_optimizer(program, config, &gradients)?;
        report.push(format!("rule of {} parameters: {config}", gradients.len()));
    }
    *program = Graph::new(std::mem::take(program))?.into_program();
    Ok(())
}
