//! The optimizer part: the rule of each parameter, and what is done to its gradient before.

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;

use super::paddle_op::PaddleOp;
use super::paddle_variables::PaddleVariables;
use super::startup::{StartupValues, constant};

/// The update of one parameter.
#[derive(Clone, Debug)]
pub(super) struct PaddleUpdate {
    pub(super) parameter: String,
    /// `OptimizerConfig` in protobuf's text form.
    pub(super) config: String,
    /// The largest norm of all clipped gradients together.
    pub(super) clip: Option<f64>,
}

/// The value of a variable of the optimizer part.
#[derive(Clone, Debug, PartialEq)]
enum Quantity<'a> {
    Gradient {
        parameter: &'a str,
        clip: Option<f64>,
        l2: Option<f64>,
    },
    /// An L2 penalty's gradient.
    Penalty {
        parameter: &'a str,
        factor: f64,
    },
    Constant(f64),
    /// A learning rate times a parameter's own factor.
    Rate(f64),
    /// The sum of the squares of these parameters' gradients.
    SquaredNorm(BTreeSet<&'a str>),
    Norm(BTreeSet<&'a str>),
    /// The norm, or the limit where that is larger.
    Divisor {
        limit: f64,
        of: BTreeSet<&'a str>,
    },
    /// The limit over the divisor.
    Clip {
        limit: f64,
        of: BTreeSet<&'a str>,
    },
}

/// The optimizer part while it is read.
pub(super) struct OptimizerPart<'a> {
    variables: &'a PaddleVariables<'a>,
    startup: &'a StartupValues<'a>,
    quantities: BTreeMap<&'a str, Quantity<'a>>,
    updates: Vec<PaddleUpdate>,
    /// Parameters of each clipped norm, to be compared with those that are clipped.
    clipped: Vec<BTreeSet<&'a str>>,
    /// Variables of Paddle's that have no counterpart.
    dropped: Vec<&'a str>,
}

/// The updates, and the variables that are not needed for them.
pub(super) struct PaddleUpdates<'a> {
    pub(super) updates: Vec<PaddleUpdate>,
    pub(super) dropped: Vec<&'a str>,
}

impl<'a> OptimizerPart<'a> {
    /// Reads ops of the role 2 in order.
    ///
    /// # Errors
    /// Names the op that has no counterpart, or the variable or attribute that prevents it.
    pub(super) fn read(
        ops: &[PaddleOp<'a>],
        gradients: &BTreeMap<&'a str, &'a str>,
        variables: &'a PaddleVariables<'a>,
        startup: &'a StartupValues<'a>,
    ) -> Result<PaddleUpdates<'a>, Failure> {
        let quantities = gradients
            .iter()
            .map(|(gradient, parameter)| (*gradient, Quantity::Gradient { parameter, clip: None, l2: None }))
            .collect();
        let (updates, clipped, dropped) = (Vec::new(), Vec::new(), Vec::new());
        let mut part = Self { variables, startup, quantities, updates, clipped, dropped };
        for op in ops {
            match op.kind() {
                "sgd" | "momentum" | "adagrad" | "adam" | "adamw" => part.update(op)?,
                _ => part.quantity(op)?,
            }
        }
        part.check_clipped()?;
        Ok(PaddleUpdates { updates: part.updates, dropped: part.dropped })
    }

    /// A norm of gradients is known here only as that of all gradients that it clips.
    fn check_clipped(&self) -> Result<(), Failure> {
        let clipped: BTreeSet<&str> = self
            .updates
            .iter()
            .filter(|update| update.clip.is_some())
            .map(|update| update.parameter.as_str())
            .collect();
        if self.clipped.len() > 1 {
            return Err(Failure::call("main program: found gradients clipped by several norms; expected one"));
        }
        match self.clipped.iter().find(|of| **of != clipped) {
            Some(of) => Err(Failure::call(format!(
                "main program: found gradients of {clipped:?} clipped by the norm of those of {of:?}; expected one \
                 norm, of all gradients that are clipped"
            ))),
            None => Ok(()),
        }
    }

    fn known(&self, op: &PaddleOp<'a>, name: &str) -> Result<Quantity<'a>, Failure> {
        let known = self.quantities.get(name).cloned();
        known
            .ok_or_else(|| op.refuse(format!("found input {name:?}; expected a gradient, or what is computed of some")))
    }

    /// An op between gradients and updates: a regularizer's or clipping's.
    fn quantity(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let quantity = match op.kind() {
            "scale" => self.scaled(op)?,
            "fill_constant" => Some(Quantity::Constant(constant(op)?)),
            // Of a sparse lookup's gradient: its rows, each once, and these as a tensor.
            "merge_selected_rows" | "get_tensor_from_selected_rows" => match self.known(op, op.input("X")?)? {
                gradient @ Quantity::Gradient { .. } => Some(gradient),
                _ => None,
            },
            "squared_l2_norm" => match self.known(op, op.input("X")?)? {
                Quantity::Gradient { parameter, clip: None, l2: None } if !self.variables.is_rows(op.input("X")?) => {
                    Some(Quantity::SquaredNorm(BTreeSet::from([parameter])))
                }
                _ => None,
            },
            "sqrt" => match self.known(op, op.input("X")?)? {
                Quantity::SquaredNorm(of) => Some(Quantity::Norm(of)),
                _ => None,
            },
            "sum" => self.sum(op)?,
            "elementwise_max" | "elementwise_div" | "elementwise_mul" => {
                let (x, y) = (self.known(op, op.input("X")?)?, self.known(op, op.input("Y")?)?);
                self.pair(op.kind(), x, y)
            }
            _ => None,
        };
        let quantity = quantity.ok_or_else(|| {
            op.refuse(
                "found an op of the optimizer part that is not mapped; expected sgd, momentum, adagrad, adam, adamw, \
                 an L2 regularizer or clipping of gradients by their global norm",
            )
        })?;
        self.quantities.insert(op.output("Out")?, quantity);
        Ok(())
    }

    /// The gradient of a penalty, or a learning rate of some parameters.
    fn scaled(&self, op: &PaddleOp<'a>) -> Result<Option<Quantity<'a>>, Failure> {
        op.check_slots(&["X"])?;
        op.check_float("bias", 0.0)?;
        let x = op.input("X")?;
        let factor = op.float("scale", 1.0)?;
        if self.variables.is_parameter(x) {
            return Ok(Some(Quantity::Penalty { parameter: x, factor }));
        }
        if self.quantities.contains_key(x) {
            return Ok(None);
        }
        // As in Paddle, the product is one of binary32.
        let product = |rate: f64| super::paddle_op::shortest(narrow(rate) * narrow(factor));
        self.startup.constant(x).map(|rate| Some(Quantity::Rate(product(rate))))
    }

    /// Of a gradient and its penalty, or of squared norms.
    fn sum(&self, op: &PaddleOp<'a>) -> Result<Option<Quantity<'a>>, Failure> {
        let terms = op.inputs("X").iter().map(|name| self.known(op, name)).collect::<Result<Vec<_>, _>>()?;
        if let [Quantity::Gradient { parameter, clip, l2: None }, Quantity::Penalty { parameter: of, factor }] =
            &terms[..]
        {
            return Ok((parameter == of).then_some(Quantity::Gradient { parameter, clip: *clip, l2: Some(*factor) }));
        }
        let mut all = BTreeSet::new();
        for term in &terms {
            let Quantity::SquaredNorm(of) = term else { return Ok(None) };
            if of.iter().any(|parameter| !all.insert(*parameter)) {
                return Ok(None);
            }
        }
        Ok((!all.is_empty()).then_some(Quantity::SquaredNorm(all)))
    }

    fn pair(&mut self, kind: &str, x: Quantity<'a>, y: Quantity<'a>) -> Option<Quantity<'a>> {
        match (kind, x, y) {
            ("elementwise_max", Quantity::Constant(limit), Quantity::Norm(of)) if limit > 0.0 => {
                Some(Quantity::Divisor { limit, of })
            }
            ("elementwise_div", Quantity::Constant(found), Quantity::Divisor { limit, of })
                if found.to_bits() == limit.to_bits() =>
            {
                self.clipped.push(of.clone());
                Some(Quantity::Clip { limit, of })
            }
            (
                "elementwise_mul",
                Quantity::Gradient { parameter, clip: None, l2: None },
                Quantity::Clip { limit, of },
            ) => of.contains(parameter).then_some(Quantity::Gradient { parameter, clip: Some(limit), l2: None }),
            _ => None,
        }
    }

    fn update(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        let parameter = op.input("Param")?;
        let gradient = op.input("Grad")?;
        let Quantity::Gradient { parameter: of, clip, l2 } = self.known(op, gradient)? else {
            return Err(op.refuse(format!("found {gradient:?} as the gradient of {parameter:?}; expected a gradient")));
        };
        if of != parameter || op.output("ParamOut")? != parameter {
            return Err(op.refuse(format!("found the gradient of {of:?} for {parameter:?}; expected its own")));
        }
        if self.updates.iter().any(|update| update.parameter == parameter) {
            return Err(op.refuse(format!("found a second update of {parameter:?}; expected one")));
        }
        op.check_booleans(&[("multi_precision", false)])?;
        let rate = op.input("LearningRate")?;
        let rate = match self.quantities.get(rate) {
            Some(Quantity::Rate(rate)) => *rate,
            _ => self.startup.constant(rate)?,
        };
        let (algorithm, own) = self.algorithm(op)?;
        let penalty = match (own, l2) {
            (Some(_), Some(_)) => return Err(op.refuse("found two penalties of one parameter; expected one")),
            (own, l2) => own.or_else(|| l2.map(|factor| format!(" l2: {factor:?} regularizer: Coupled"))),
        };
        let config = format!("{algorithm}{} const_lr {{ learning_rate: {rate:?} }}", penalty.unwrap_or_default());
        self.updates.push(PaddleUpdate { parameter: parameter.to_owned(), config, clip });
        Ok(())
    }

    /// The algorithm of an update, and its own penalty.
    fn algorithm(&mut self, op: &PaddleOp<'a>) -> Result<(String, Option<String>), Failure> {
        match op.kind() {
            "sgd" => {
                op.check_slots(&["Param", "Grad", "LearningRate"])?;
                Ok(("optimizer: SGD".to_owned(), None))
            }
            "momentum" => self.momentum(op),
            "adagrad" => {
                op.check_slots(&["Param", "Grad", "LearningRate", "Moment"])?;
                let moment = op.input("Moment")?;
                let begin = self.startup.constant(moment)?;
                self.dropped.push(moment);
                let epsilon = op.float("epsilon", 1e-6)?;
                let update = format!("w -= lr * g / (sqrt(square_sum) + {epsilon:?})");
                Ok((format!("rule: \"state square_sum = {begin:?}; square_sum += g * g; {update}\""), None))
            }
            _ => self.adam(op),
        }
    }

    fn momentum(&mut self, op: &PaddleOp<'a>) -> Result<(String, Option<String>), Failure> {
        op.check_slots(&["Param", "Grad", "LearningRate", "Velocity"])?;
        op.check_float("rescale_grad", 1.0)?;
        self.state(op, "Velocity", 0.0)?;
        let (mu, is_nesterov) = (op.float("mu", 0.9)?, op.boolean("use_nesterov", false)?);
        let nesterov = if is_nesterov { " nesterov: true" } else { "" };
        let penalty = match op.text("regularization_method") {
            "" => None,
            "l2_decay" => {
                let factor = op.float("regularization_coeff", 0.0)?;
                Some(format!(" l2: {factor:?} regularizer: Coupled"))
            }
            other => return Err(op.refuse(format!("found regularization_method {other:?}; expected \"l2_decay\""))),
        };
        Ok((format!("optimizer: SGD sgd {{ momentum: {mu:?}{nesterov} }}"), penalty))
    }

    fn adam(&mut self, op: &PaddleOp<'a>) -> Result<(String, Option<String>), Failure> {
        let states = ["Moment1", "Moment2", "Beta1Pow", "Beta2Pow"];
        op.check_slots(&[["Param", "Grad", "LearningRate"].as_slice(), &states].concat())?;
        let gradient = op.input("Grad")?;
        if op.boolean("lazy_mode", false)? && self.variables.is_rows(gradient) {
            let expected = "expected false, because the op update moves every row's moments";
            return Err(op.refuse(format!("found lazy_mode true with selected rows in {gradient:?}; {expected}")));
        }
        let (beta_1, beta_2) = (op.float("beta1", 0.9)?, op.float("beta2", 0.999)?);
        for (slot, begin) in states.into_iter().zip([0.0, 0.0, beta_1, beta_2]) {
            self.state(op, slot, begin)?;
        }
        let epsilon = op.float("epsilon", 1e-8)?;
        let moments = format!("{{ beta_1: {beta_1:?} beta_2: {beta_2:?} epsilon: {epsilon:?} }}");
        if op.kind() == "adam" || !op.boolean("with_decay", false)? {
            return Ok((format!("optimizer: Adam adam {moments}"), None));
        }
        op.check_float("lr_ratio", 1.0)?;
        let penalty = format!(" l2: {:?} regularizer: Decoupled", op.float("coeff", 0.01)?);
        Ok((format!("algorithm: \"adamw\" adamw {moments}"), Some(penalty)))
    }

    /// A state that begins with a value that the rule implies.
    fn state(&mut self, op: &PaddleOp<'a>, slot: &str, expected: f64) -> Result<(), Failure> {
        let variable = op.input(slot)?;
        let found = self.startup.constant(variable)?;
        if found.to_bits() != expected.to_bits() {
            return Err(op.refuse(format!("found {variable:?} to begin with {found}; expected {expected}")));
        }
        self.dropped.push(variable);
        Ok(())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "Paddle's learning rates are in binary32")]
fn narrow(value: f64) -> f32 {
    value as f32
}
