//! Conversion between the message and a rule.

use std::sync::Arc;

use crate::error::Failure;
use crate::ids::{ServerIndex, TrainerId};
use crate::limits::{SERVERS_MAX, TRAINERS_MAX};
use crate::optim::{Algorithm, Prepared, Range, Regularizer, Rule, Schedule, library};
use crate::partition::TotalPart;
use crate::rule::{CheckedRule, RuleSettings};
use crate::text::suggestion;

use super::message::{
    AdadeltaConfig, AdagradConfig, AdamConfig, ConstLrConfig, DecayingLrConfig, FtrlConfig, LrPolicy, MergeKind,
    ModeKind, OptimizerConfig, OptimizerKind, RegularizerKind, RmsPropConfig, RuleSetting, SgdConfig,
};
use super::{Merge, Mode, OpenRule, OptimizerSettings, sparse};

/// Reads a message whose fields and enumerators the schema has checked.
pub(super) fn settings(message: &OptimizerConfig, open: OpenRule<'_>) -> Result<OptimizerSettings, Failure> {
    let job_only = OptimizerConfig {
        mode: message.mode,
        staleness_bound: message.staleness_bound,
        merge: message.merge,
        sparse: message.sparse,
        home: message.home,
        sender: message.sender,
        total_part: message.total_part,
        backup_trainers: message.backup_trainers,
        ..OptimizerConfig::default()
    };
    let rule = if *message == job_only { None } else { Some(rule(message, open)?) };
    let merge = message.merge.map(|_| match message.merge() {
        MergeKind::Mean => Merge::Mean,
        MergeKind::Sum => Merge::Sum,
    });
    let sparse = message.sparse.as_ref().map(sparse::settings).transpose()?;
    let owner = message.home.map(owner).transpose()?;
    let sender = message.sender.map(sender).transpose()?;
    let total_part = message.total_part.and_then(|part| TotalPart::from_number(u32::try_from(part).ok()?));
    let backup_trainers = message.backup_trainers.map_or(Ok(0), backup_trainers)?;
    let mode = mode(message)?;
    let hosted = None;
    Ok(OptimizerSettings { rule, mode, merge, sparse, owner, sender, total_part, backup_trainers, hosted })
}

/// A server's index. The catalogue checks whether the job has such a server.
fn owner(number: u32) -> Result<ServerIndex, Failure> {
    let narrow = u16::try_from(number).ok().filter(|number| *number < SERVERS_MAX);
    narrow
        .map(ServerIndex)
        .ok_or_else(|| Failure::call(format!("home is {number}; expected a server below {SERVERS_MAX}")))
}

/// A trainer's rank. Servers check whether the job has such a trainer.
fn sender(rank: u32) -> Result<TrainerId, Failure> {
    let known = Some(rank).filter(|rank| *rank < TRAINERS_MAX).map(TrainerId);
    known.ok_or_else(|| Failure::call(format!("sender is {rank}; expected a trainer below {TRAINERS_MAX}")))
}

/// The trainers that a round does not wait for. Servers check whether the job has more.
fn backup_trainers(found: u32) -> Result<u32, Failure> {
    let known = Some(found).filter(|found| *found < TRAINERS_MAX);
    known.ok_or_else(|| Failure::call(format!("backup_trainers is {found}; expected fewer than {TRAINERS_MAX}")))
}

/// The message that [`settings`] reads as this rule, with every value written out.
pub(super) fn message(rule: &Rule) -> OptimizerConfig {
    let mut message = OptimizerConfig {
        l1: Some(rule.l1),
        l2: Some(rule.l2),
        rate_scale: Some(rule.rate_scale),
        clip_norm: rule.clip_norm,
        clip_value: rule.clip_value,
        stage: rule.stage.as_ref().map(|stage| stage.text().to_owned()),
        ..OptimizerConfig::default()
    };
    message.set_regularizer(match rule.regularizer {
        Regularizer::Proximal => RegularizerKind::Proximal,
        Regularizer::Coupled => RegularizerKind::Coupled,
        Regularizer::Decoupled => RegularizerKind::Decoupled,
    });
    write_algorithm(&mut message, &rule.algorithm);
    write_schedule(&mut message, &rule.schedule);
    message
}

fn mode(message: &OptimizerConfig) -> Result<Option<Mode>, Failure> {
    let mode = message.mode.map(|_| message.mode());
    match (mode, message.staleness_bound) {
        (Some(ModeKind::Staleness), Some(0)) => Err(Failure::call(
            "staleness_bound is 0, with which no trainer can begin; expected 1 or more, or mode: Sync",
        )),
        (Some(ModeKind::Staleness), Some(bound)) => Ok(Some(Mode::Staleness { bound })),
        (Some(ModeKind::Staleness), None) => {
            Err(Failure::call("mode is Staleness and staleness_bound is not given; expected the bound in steps"))
        }
        (_, Some(bound)) => Err(Failure::call(format!("staleness_bound is {bound}; expected mode: Staleness with it"))),
        (Some(ModeKind::Sync), None) => Ok(Some(Mode::Sync)),
        (Some(ModeKind::Async), None) => Ok(Some(Mode::Async)),
        (Some(ModeKind::Delta), None) => Ok(Some(Mode::Delta)),
        (None, None) => Ok(None),
    }
}

fn rule(message: &OptimizerConfig, open: OpenRule<'_>) -> Result<Rule, Failure> {
    let (algorithm, decay) = algorithm(message, open)?;
    Range::NotNegative.check(&format!("{}.decay", message_name(&algorithm)), decay)?;
    let regularizer = match (message.regularizer.map(|_| message.regularizer()), &algorithm) {
        (Some(RegularizerKind::Proximal), _) => Regularizer::Proximal,
        (Some(RegularizerKind::Coupled), _) => Regularizer::Coupled,
        (Some(RegularizerKind::Decoupled), _) => Regularizer::Decoupled,
        (None, _) if decay == 0.0 || message.l2.is_some() => Regularizer::Proximal,
        // Paddle kept the decay in the velocity, which is what coupled means.
        (None, Algorithm::Momentum { .. }) => Regularizer::Coupled,
        (None, _) => Regularizer::Decoupled,
    };
    let rule = Rule {
        algorithm,
        l1: message.l1(),
        l2: message.l2.unwrap_or(decay),
        regularizer,
        clip_norm: message.clip_norm.filter(|clip| *clip != 0.0),
        clip_value: message.clip_value.filter(|clip| *clip != 0.0),
        schedule: schedule(message)?,
        rate_scale: message.rate_scale(),
        stage: message.stage.as_deref().map(stage).transpose()?,
    };
    Prepared::new(rule).map(Prepared::into_rule)
}

fn stage(text: &str) -> Result<Arc<CheckedRule>, Failure> {
    CheckedRule::stage(text).map(Arc::new).map_err(|failure| Failure::call(format!("stage: {failure}")))
}

/// The algorithm, and the `decay` within its message.
fn algorithm(message: &OptimizerConfig, open: OpenRule<'_>) -> Result<(Algorithm, f64), Failure> {
    let (algorithm, decay) = match (&message.algorithm, message.optimizer) {
        _ if message.rule.is_some() || message.rule_file.is_some() => (written(message, open)?, 0.0),
        (Some(name), Some(_)) => {
            return Err(Failure::call(format!(
                "optimizer and algorithm {name:?} are both given; expected one of the two"
            )));
        }
        (Some(name), None) => our_algorithm(message, name)?,
        (None, _) => paddle_algorithm(message)?,
    };
    let given = [
        ("sgd", message.sgd.is_some()),
        ("adadelta", message.adadelta.is_some()),
        ("adagrad", message.adagrad.is_some()),
        ("adam", message.adam.is_some()),
        ("rmsprop", message.rmsprop.is_some()),
        ("adamw", message.adamw.is_some()),
        ("ftrl", message.ftrl.is_some()),
    ];
    refuse_unused("algorithm", message_name(&algorithm), &given)?;
    if let (false, Some(set)) = (matches!(algorithm, Algorithm::Custom(_)), message.rule_set.first()) {
        let key = set.key();
        return Err(Failure::call(format!("rule_set names {key:?} and there is no rule; expected rule or rule_file")));
    }
    Ok((algorithm, decay))
}

/// The rule of the message: its text, or the text of its file.
fn written(message: &OptimizerConfig, open: OpenRule<'_>) -> Result<Algorithm, Failure> {
    if message.optimizer.is_some() || message.algorithm.is_some() {
        return Err(Failure::call("a rule is given and an optimizer or an algorithm too; expected one of them"));
    }
    let text = match (&message.rule, &message.rule_file) {
        (Some(_), Some(path)) => {
            return Err(Failure::call(format!("rule and rule_file {path:?} are both given; expected one of them")));
        }
        (Some(text), None) => text.clone(),
        (None, Some(path)) => open(path)?,
        (None, None) => unreachable!("the caller found a rule or a rule_file"),
    };
    named(message.rule_file.as_deref().unwrap_or("rule"), &text, message)
}

/// A rule from its text, with the parameter values of the message; `subject` names the rule in errors.
fn named(subject: &str, text: &str, message: &OptimizerConfig) -> Result<Algorithm, Failure> {
    let mut settings = RuleSettings::new();
    for set in &message.rule_set {
        let RuleSetting { key: Some(key), value: Some(value) } = set else {
            return Err(Failure::call(
                "rule_set has no key or no value; expected rule_set { key: \"...\" value: ... }",
            ));
        };
        if settings.insert(key.clone(), *value).is_some() {
            return Err(Failure::call(format!("rule_set gives {key:?} twice; expected it once")));
        }
    }
    let written =
        CheckedRule::new(text, &settings).map_err(|failure| Failure::call(format!("{subject}: {failure}")))?;
    Ok(Algorithm::Custom(Arc::new(written)))
}

fn paddle_algorithm(message: &OptimizerConfig) -> Result<(Algorithm, f64), Failure> {
    match message.optimizer() {
        OptimizerKind::Sgd => {
            let sgd = message.sgd.unwrap_or_default();
            let algorithm = match sgd.momentum() {
                0.0 => Algorithm::Sgd,
                momentum => Algorithm::Momentum { momentum, nesterov: sgd.nesterov() },
            };
            Ok((algorithm, sgd.decay()))
        }
        OptimizerKind::Adadelta => {
            let config = needed("optimizer: Adadelta", "adadelta", message.adadelta)?;
            Ok((Algorithm::Adadelta { rho: config.rho(), epsilon: config.epsilon() }, config.decay()))
        }
        OptimizerKind::Adagrad => {
            let config = needed("optimizer: Adagrad", "adagrad", message.adagrad)?;
            Ok((Algorithm::Adagrad { epsilon: config.epsilon() }, config.decay()))
        }
        OptimizerKind::Adam => {
            let config = needed("optimizer: Adam", "adam", message.adam)?;
            let (beta1, beta2, epsilon) = (config.beta_1(), config.beta_2(), config.epsilon());
            Ok((Algorithm::Adam { beta1, beta2, epsilon }, config.decay()))
        }
    }
}

/// The algorithms that have no number in Paddle's enumeration and are no texts.
const OURS: [&str; 5] = ["add", "sum", "rmsprop", "adamw", "ftrl"];

fn our_algorithm(message: &OptimizerConfig, name: &str) -> Result<(Algorithm, f64), Failure> {
    match name {
        "add" => Ok((Algorithm::Add, 0.0)),
        "sum" => Ok((Algorithm::Sum, 0.0)),
        "rmsprop" => {
            let config = needed("algorithm: \"rmsprop\"", "rmsprop", message.rmsprop)?;
            let (rho, epsilon, momentum) = (config.rho(), config.epsilon(), config.momentum());
            Ok((Algorithm::RmsProp { rho, epsilon, momentum }, 0.0))
        }
        "adamw" => {
            let config = needed("algorithm: \"adamw\"", "adamw", message.adamw)?;
            let (beta1, beta2, epsilon) = (config.beta_1(), config.beta_2(), config.epsilon());
            Ok((Algorithm::AdamW { beta1, beta2, epsilon }, config.decay()))
        }
        "ftrl" => {
            let config = needed("algorithm: \"ftrl\"", "ftrl", message.ftrl)?;
            let (learning_rate_power, beta) = (config.learning_rate_power(), config.beta());
            Ok((Algorithm::Ftrl { learning_rate_power, beta }, 0.0))
        }
        _ => match library::text(name) {
            Some(text) => Ok((named(name, text, message)?, 0.0)),
            None => Err(Failure::call(format!(
                "algorithm {name:?} is not known; expected one of {}, {}, or instead of it \
                 optimizer: SGD, Adadelta, Adagrad or Adam, or rule with a rule's text{}",
                OURS.join(", "),
                library::names(),
                remedy(name).unwrap_or_else(|| suggestion(name, OURS.into_iter().chain(library::names().split(", "))))
            ))),
        },
    }
}

/// A hint for names that other frameworks use for an optimizer, as the end of an error.
pub(super) fn remedy(name: &str) -> Option<String> {
    let asked = match name.to_ascii_lowercase().as_str() {
        "nesterov" | "nag" => "optimizer: SGD sgd { momentum: 0.9 nesterov: true }",
        "momentum" => "optimizer: SGD sgd { momentum: 0.9 }",
        "sgd" => "optimizer: SGD",
        "adam" => "optimizer: Adam adam { }",
        "adagrad" => "optimizer: Adagrad adagrad { }",
        "adadelta" => "optimizer: Adadelta adadelta { }",
        "adamw" => "algorithm: 'adamw' adamw { }",
        "rmsprop" => "algorithm: 'rmsprop' rmsprop { }",
        "ftrl" => "algorithm: 'ftrl' ftrl { }",
        "lamb" => "algorithm: 'lamb'",
        "lars" => "algorithm: 'lars'",
        "lion" => "algorithm: 'lion'",
        _ => return None,
    };
    Some(format!("; {name} is {asked}"))
}

fn schedule(message: &OptimizerConfig) -> Result<Schedule, Failure> {
    let (chosen, schedule) = match message.lr_policy() {
        LrPolicy::Const => {
            let rate = message.const_lr.unwrap_or_default().learning_rate();
            ("const_lr", Schedule::Const { rate })
        }
        LrPolicy::Linear => {
            let (rate, a, b) = decaying("lr_policy: Linear", "linear_lr", message.linear_lr)?;
            ("linear_lr", Schedule::Linear { rate, a, b })
        }
        LrPolicy::Poly => {
            let (rate, a, b) = decaying("lr_policy: Poly", "poly_lr", message.poly_lr)?;
            ("poly_lr", Schedule::Poly { rate, a, b })
        }
        LrPolicy::Exp => {
            let (rate, a, b) = decaying("lr_policy: Exp", "exp_lr", message.exp_lr)?;
            ("exp_lr", Schedule::Exp { rate, a, b })
        }
        LrPolicy::DiscExp => {
            let (rate, a, b) = decaying("lr_policy: DiscExp", "disc_exp_lr", message.disc_exp_lr)?;
            ("disc_exp_lr", Schedule::DiscExp { rate, a, b })
        }
    };
    let given = [
        ("const_lr", message.const_lr.is_some()),
        ("linear_lr", message.linear_lr.is_some()),
        ("poly_lr", message.poly_lr.is_some()),
        ("exp_lr", message.exp_lr.is_some()),
        ("disc_exp_lr", message.disc_exp_lr.is_some()),
    ];
    refuse_unused("lr_policy", chosen, &given)?;
    Ok(schedule)
}

/// The learning rate, `a` and `b`.
fn decaying(subject: &str, name: &str, config: Option<DecayingLrConfig>) -> Result<(f64, f64, f64), Failure> {
    let config = needed(subject, name, config)?;
    Ok((config.learning_rate(), config.lr_decay_a(), config.lr_decay_b()))
}

/// Requires the message of the chosen algorithm or schedule, even if empty: Paddle's implicit defaults are easily
/// overlooked.
fn needed<T>(subject: &str, name: &str, config: Option<T>) -> Result<T, Failure> {
    config.ok_or_else(|| {
        Failure::call(format!("{subject} is given without {name}; expected {name} {{ ... }}, which may be empty"))
    })
}

/// Refuses a message that the choice leaves without effect: it would train with other settings than written.
fn refuse_unused(choice: &str, chosen: &str, given: &[(&str, bool)]) -> Result<(), Failure> {
    match given.iter().find(|(name, given)| *given && *name != chosen) {
        Some((name, _)) => Err(Failure::call(format!(
            "{name} is given and the {choice} is that of {chosen}; expected {chosen} {{ ... }} alone"
        ))),
        None => Ok(()),
    }
}

/// The field with the settings of the algorithm.
fn message_name(algorithm: &Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Momentum { .. } => "sgd",
        Algorithm::Custom(_) => "rule",
        other => other.name(),
    }
}

fn write_algorithm(message: &mut OptimizerConfig, algorithm: &Algorithm) {
    match *algorithm {
        Algorithm::Custom(ref written) => {
            message.rule = Some(written.text().to_owned());
            let set = |(key, value): (&String, &f64)| RuleSetting { key: Some(key.clone()), value: Some(*value) };
            message.rule_set = written.settings().iter().map(set).collect();
        }
        Algorithm::Add | Algorithm::Sum => message.algorithm = Some(algorithm.name().to_owned()),
        Algorithm::Sgd => message.set_optimizer(OptimizerKind::Sgd),
        Algorithm::Momentum { momentum, nesterov } => {
            message.set_optimizer(OptimizerKind::Sgd);
            message.sgd = Some(SgdConfig { momentum: Some(momentum), nesterov: Some(nesterov), decay: None });
        }
        Algorithm::Adagrad { epsilon } => {
            message.set_optimizer(OptimizerKind::Adagrad);
            message.adagrad = Some(AdagradConfig { epsilon: Some(epsilon), decay: None });
        }
        Algorithm::Adadelta { rho, epsilon } => {
            message.set_optimizer(OptimizerKind::Adadelta);
            message.adadelta = Some(AdadeltaConfig { rho: Some(rho), epsilon: Some(epsilon), decay: None });
        }
        Algorithm::RmsProp { rho, epsilon, momentum } => {
            message.algorithm = Some("rmsprop".to_owned());
            message.rmsprop = Some(RmsPropConfig { rho: Some(rho), epsilon: Some(epsilon), momentum: Some(momentum) });
        }
        Algorithm::Adam { beta1, beta2, epsilon } => {
            message.set_optimizer(OptimizerKind::Adam);
            message.adam = Some(adam_config(beta1, beta2, epsilon));
        }
        Algorithm::AdamW { beta1, beta2, epsilon } => {
            message.algorithm = Some("adamw".to_owned());
            message.adamw = Some(adam_config(beta1, beta2, epsilon));
        }
        Algorithm::Ftrl { learning_rate_power, beta } => {
            message.algorithm = Some("ftrl".to_owned());
            message.ftrl = Some(FtrlConfig { learning_rate_power: Some(learning_rate_power), beta: Some(beta) });
        }
    }
}

fn adam_config(beta1: f64, beta2: f64, epsilon: f64) -> AdamConfig {
    AdamConfig { beta_1: Some(beta1), beta_2: Some(beta2), epsilon: Some(epsilon), decay: None }
}

fn write_schedule(message: &mut OptimizerConfig, schedule: &Schedule) {
    let config =
        |rate, a, b| Some(DecayingLrConfig { learning_rate: Some(rate), lr_decay_a: Some(a), lr_decay_b: Some(b) });
    match *schedule {
        Schedule::Const { rate } => {
            message.set_lr_policy(LrPolicy::Const);
            message.const_lr = Some(ConstLrConfig { learning_rate: Some(rate) });
        }
        Schedule::Linear { rate, a, b } => {
            message.set_lr_policy(LrPolicy::Linear);
            message.linear_lr = config(rate, a, b);
        }
        Schedule::Poly { rate, a, b } => {
            message.set_lr_policy(LrPolicy::Poly);
            message.poly_lr = config(rate, a, b);
        }
        Schedule::Exp { rate, a, b } => {
            message.set_lr_policy(LrPolicy::Exp);
            message.exp_lr = config(rate, a, b);
        }
        Schedule::DiscExp { rate, a, b } => {
            message.set_lr_policy(LrPolicy::DiscExp);
            message.disc_exp_lr = config(rate, a, b);
        }
    }
}
