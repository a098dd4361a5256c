//! The message itself: Paddle's `OptimizerConfig` (proto2, package `paddle`), and our fields from number 1000 up.
//!
//! Numbers below 1000 are Paddle's and never change. [`super::schema`] says the same once more, with the names; a test
//! holds the two together.

/// All settings of an optimizer.
// tidy: allow fields: the message's layout; Paddle's numbers and names are fixed.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct OptimizerConfig {
    #[prost(enumeration = "OptimizerKind", optional, tag = "1")]
    pub(super) optimizer: Option<i32>,
    #[prost(message, optional, tag = "3")]
    pub(super) sgd: Option<SgdConfig>,
    #[prost(message, optional, tag = "4")]
    pub(super) adadelta: Option<AdadeltaConfig>,
    #[prost(message, optional, tag = "5")]
    pub(super) adagrad: Option<AdagradConfig>,
    #[prost(message, optional, tag = "6")]
    pub(super) adam: Option<AdamConfig>,
    #[prost(enumeration = "LrPolicy", optional, tag = "11")]
    pub(super) lr_policy: Option<i32>,
    #[prost(message, optional, tag = "12")]
    pub(super) const_lr: Option<ConstLrConfig>,
    #[prost(message, optional, tag = "13")]
    pub(super) linear_lr: Option<DecayingLrConfig>,
    #[prost(double, optional, tag = "101")]
    pub(super) clip_norm: Option<f64>,
    #[prost(double, optional, tag = "102")]
    pub(super) clip_value: Option<f64>,

    #[prost(double, optional, tag = "1001")]
    pub(super) l1: Option<f64>,
    #[prost(double, optional, tag = "1002")]
    pub(super) l2: Option<f64>,
    #[prost(enumeration = "RegularizerKind", optional, tag = "1003")]
    pub(super) regularizer: Option<i32>,
    #[prost(double, optional, tag = "1004", default = "1.0")]
    pub(super) rate_scale: Option<f64>,
    /// An algorithm that Paddle's enumeration lacks: `rmsprop`, `adamw`, `ftrl`, `add`, `sum`, or the name of a shipped
    /// rule.
    #[prost(string, optional, tag = "1005")]
    pub(super) algorithm: Option<String>,
    #[prost(message, optional, tag = "1006")]
    pub(super) rmsprop: Option<RmsPropConfig>,
    #[prost(message, optional, tag = "1007")]
    pub(super) adamw: Option<AdamConfig>,
    #[prost(message, optional, tag = "1008")]
    pub(super) ftrl: Option<FtrlConfig>,
    #[prost(message, optional, tag = "1009")]
    pub(super) poly_lr: Option<DecayingLrConfig>,
    #[prost(message, optional, tag = "1010")]
    pub(super) exp_lr: Option<DecayingLrConfig>,
    #[prost(message, optional, tag = "1011")]
    pub(super) disc_exp_lr: Option<DecayingLrConfig>,
    #[prost(enumeration = "ModeKind", optional, tag = "1012")]
    pub(super) mode: Option<i32>,
    #[prost(uint32, optional, tag = "1013")]
    pub(super) staleness_bound: Option<u32>,
    #[prost(enumeration = "MergeKind", optional, tag = "1014")]
    pub(super) merge: Option<i32>,
    /// A rule's text.
    #[prost(string, optional, tag = "1015")]
    pub(super) rule: Option<String>,
    /// The path of a file with a rule's text, on the trainer's host.
    #[prost(string, optional, tag = "1016")]
    pub(super) rule_file: Option<String>,
    #[prost(message, repeated, tag = "1017")]
    pub(super) rule_set: Vec<RuleSetting>,
    /// The server that holds the whole parameter.
    #[prost(uint32, optional, tag = "1018")]
    pub(super) owner: Option<u32>,
    /// The only trainer that sends to the parameter.
    #[prost(uint32, optional, tag = "1019")]
    pub(super) sender: Option<u32>,
    /// The parameter's part in the total that a parameter before it reads.
    #[prost(enumeration = "TotalPartKind", optional, tag = "1021")]
    pub(super) total_part: Option<i32>,
    /// A stage's text.
    #[prost(string, optional, tag = "1020")]
    pub(super) stage: Option<String>,
    #[prost(message, optional, tag = "1100")]
    pub(super) sparse: Option<SparseConfig>,
}

/// The value of one of a rule's parameters.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RuleSetting {
    #[prost(string, optional, tag = "1")]
    pub(super) key: Option<String>,
    #[prost(double, optional, tag = "2")]
    pub(super) value: Option<f64>,
}

/// The settings of a sparse parameter.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct SparseConfig {
    #[prost(uint64, optional, tag = "1")]
    pub(super) height: Option<u64>,
    #[prost(uint32, optional, tag = "2")]
    pub(super) width: Option<u32>,
    #[prost(uint64, optional, tag = "3")]
    pub(super) rows: Option<u64>,
    #[prost(uint32, optional, tag = "4")]
    pub(super) buckets: Option<u32>,
    #[prost(bool, optional, tag = "5")]
    pub(super) lazy: Option<bool>,
    #[prost(uint64, optional, tag = "6")]
    pub(super) seed: Option<u64>,
    #[prost(message, optional, tag = "7")]
    pub(super) constant: Option<ConstantConfig>,
    #[prost(message, optional, tag = "8")]
    pub(super) uniform: Option<UniformConfig>,
    #[prost(message, optional, tag = "9")]
    pub(super) gaussian: Option<GaussianConfig>,
    #[prost(uint64, optional, tag = "10")]
    pub(super) first: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct ConstantConfig {
    #[prost(double, optional, tag = "1")]
    pub(super) value: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct UniformConfig {
    #[prost(double, optional, tag = "1", default = "-1.0")]
    pub(super) low: Option<f64>,
    #[prost(double, optional, tag = "2", default = "1.0")]
    pub(super) high: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct GaussianConfig {
    #[prost(double, optional, tag = "1")]
    pub(super) mean: Option<f64>,
    #[prost(double, optional, tag = "2", default = "1.0")]
    pub(super) deviation: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct SgdConfig {
    #[prost(double, optional, tag = "21", default = "0.0")]
    pub(super) momentum: Option<f64>,
    #[prost(double, optional, tag = "23", default = "0.0")]
    pub(super) decay: Option<f64>,
    #[prost(bool, optional, tag = "24", default = "false")]
    pub(super) nesterov: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct AdadeltaConfig {
    #[prost(double, optional, tag = "31", default = "1e-5")]
    pub(super) epsilon: Option<f64>,
    #[prost(double, optional, tag = "32", default = "0.0")]
    pub(super) decay: Option<f64>,
    #[prost(double, optional, tag = "33", default = "0.90")]
    pub(super) rho: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct AdagradConfig {
    #[prost(double, optional, tag = "41", default = "1e-5")]
    pub(super) epsilon: Option<f64>,
    #[prost(double, optional, tag = "42", default = "0.0")]
    pub(super) decay: Option<f64>,
}

/// Settings of Adam and AdamW. Paddle gave the first three no defaults, so they were zero and Adam divided by zero;
/// ours are the usual ones.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct AdamConfig {
    #[prost(double, optional, tag = "41", default = "0.9")]
    pub(super) beta_1: Option<f64>,
    #[prost(double, optional, tag = "42", default = "0.999")]
    pub(super) beta_2: Option<f64>,
    #[prost(double, optional, tag = "43", default = "1e-8")]
    pub(super) epsilon: Option<f64>,
    #[prost(double, optional, tag = "44", default = "0.0")]
    pub(super) decay: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct RmsPropConfig {
    #[prost(double, optional, tag = "1", default = "0.9")]
    pub(super) rho: Option<f64>,
    #[prost(double, optional, tag = "2", default = "1e-5")]
    pub(super) epsilon: Option<f64>,
    #[prost(double, optional, tag = "3", default = "0.0")]
    pub(super) momentum: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct FtrlConfig {
    #[prost(double, optional, tag = "1", default = "-0.5")]
    pub(super) learning_rate_power: Option<f64>,
    #[prost(double, optional, tag = "2", default = "0.0")]
    pub(super) beta: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct ConstLrConfig {
    #[prost(double, optional, tag = "1", default = "1.0")]
    pub(super) learning_rate: Option<f64>,
}

/// Paddle's `LinearLrConfig`, which serves our other schedules as well.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct DecayingLrConfig {
    #[prost(double, optional, tag = "1", default = "1.0")]
    pub(super) learning_rate: Option<f64>,
    #[prost(double, optional, tag = "2")]
    pub(super) lr_decay_a: Option<f64>,
    #[prost(double, optional, tag = "3")]
    pub(super) lr_decay_b: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum OptimizerKind {
    Sgd = 1,
    Adadelta = 2,
    Adagrad = 3,
    Adam = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum LrPolicy {
    Const = 0,
    Linear = 1,
    Poly = 1000,
    Exp = 1001,
    DiscExp = 1002,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum RegularizerKind {
    Proximal = 0,
    Coupled = 1,
    Decoupled = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum ModeKind {
    Sync = 0,
    Async = 1,
    Staleness = 2,
    Delta = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum MergeKind {
    Mean = 0,
    Sum = 1,
}

/// Mirrors `partition::TotalPart`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(super) enum TotalPartKind {
    Share = 1,
    Total = 2,
}
