//! The message itself: Paddle's `OptimizerConfig` (proto2, package `paddle`), and our fields from number 1000 up.
//!
//! Numbers below 1000 are Paddle's and never change. Each message is declared once, for its encoding and for the
//! [schema](super::schema) that its text form and its check use.

use super::schema::{Described, Enumerated, Field, FieldKind, Schema, number};

/// Declares a message: a struct for prost, and its schema, which has the same fields in the same order.
macro_rules! message {
    (
        $(#[doc = $doc:tt])*
        #[derive($($derive:path),*)]
        struct $name:ident, $text:literal {
            $(
                $(#[doc = $field_doc:tt])*
                $label:ident $kind:ident $(($of:ident))? $field:ident: $type:ty = $tag:tt $(or $default:tt)?;
            )*
        }
    ) => {
        $(#[doc = $doc])*
        #[derive($($derive),*)]
        pub(super) struct $name {
            $(
                $(#[doc = $field_doc])*
                #[prost($kind $(($of))?, $label, tag = $tag $(, default = $default)?)]
                pub(super) $field: label!($label $type),
            )*
        }

        impl $name {
            pub(super) const SCHEMA: Schema = Schema {
                name: $text,
                fields: &[$(Field {
                    name: stringify!($field),
                    number: number($tag),
                    kind: kind!($kind $($of)?, $type),
                    is_repeated: label!($label),
                }),*],
            };
        }

        impl Described for $name {
            const KIND: FieldKind = FieldKind::Message(&Self::SCHEMA);
        }
    };
}

/// The type of a field with this label, and whether it may be given more than once.
macro_rules! label {
    (optional) => { false };
    (repeated) => { true };
    (optional $type:ty) => { Option<$type> };
    (repeated $type:ty) => { Vec<$type> };
}

macro_rules! kind {
    (enumeration $of:ident, $type:ty) => {
        FieldKind::Enumeration(<$of as Enumerated>::VALUES)
    };
    ($kind:ident, $type:ty) => {
        <$type as Described>::KIND
    };
}

/// Declares an enumeration, with the names of its values in the text form.
macro_rules! enumeration {
    ($(#[doc = $doc:tt])* enum $name:ident { $($value:ident $text:literal = $number:literal,)* }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
        #[repr(i32)]
        pub(super) enum $name {
            $($value = $number,)*
        }

        impl Enumerated for $name {
            const VALUES: &'static [(&'static str, u32)] = &[$(($text, $number)),*];
        }
    };
}

message! {
    /// All settings of an optimizer.
    // tidy: allow fields: the message's layout; Paddle's numbers and names are fixed.
    #[derive(Clone, PartialEq, prost::Message)]
    struct OptimizerConfig, "OptimizerConfig" {
        optional enumeration(OptimizerKind) optimizer: i32 = "1";
        optional message sgd: SgdConfig = "3";
        optional message adadelta: AdadeltaConfig = "4";
        optional message adagrad: AdagradConfig = "5";
        optional message adam: AdamConfig = "6";
        optional enumeration(LrPolicy) lr_policy: i32 = "11";
        optional message const_lr: ConstLrConfig = "12";
        optional message linear_lr: DecayingLrConfig = "13";
        optional double clip_norm: f64 = "101";
        optional double clip_value: f64 = "102";

        optional double l1: f64 = "1001";
        optional double l2: f64 = "1002";
        optional enumeration(RegularizerKind) regularizer: i32 = "1003";
        optional double rate_scale: f64 = "1004" or "1.0";
        /// An algorithm that Paddle's enumeration lacks: `rmsprop`, `adamw`, `ftrl`, `add`, `sum`, or the name of a
        /// shipped rule.
        optional string algorithm: String = "1005";
        optional message rmsprop: RmsPropConfig = "1006";
        optional message adamw: AdamConfig = "1007";
        optional message ftrl: FtrlConfig = "1008";
        optional message poly_lr: DecayingLrConfig = "1009";
        optional message exp_lr: DecayingLrConfig = "1010";
        optional message disc_exp_lr: DecayingLrConfig = "1011";
        optional enumeration(ModeKind) mode: i32 = "1012";
        optional uint32 staleness_bound: u32 = "1013";
        optional enumeration(MergeKind) merge: i32 = "1014";
        /// A rule's text.
        optional string rule: String = "1015";
        /// The path of a file with a rule's text, on the trainer's host.
        optional string rule_file: String = "1016";
        repeated message rule_set: RuleSetting = "1017";
        /// The server that holds the whole parameter.
        optional uint32 home: u32 = "1018";
        /// The only trainer that sends to the parameter.
        optional uint32 sender: u32 = "1019";
        /// A stage's text.
        optional string stage: String = "1020";
        /// The parameter's part in the total that a parameter before it reads.
        optional enumeration(TotalPartKind) total_part: i32 = "1021";
        /// Trainers without whose gradients a round is complete.
        optional uint32 backup_trainers: u32 = "1022";
        optional message sparse: SparseConfig = "1100";
    }
}

message! {
    /// The value of one of a rule's parameters.
    #[derive(Clone, PartialEq, prost::Message)]
    struct RuleSetting, "RuleSetting" {
        optional string key: String = "1";
        optional double value: f64 = "2";
    }
}

message! {
    /// The settings of a sparse parameter.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct SparseConfig, "SparseConfig" {
        optional uint64 height: u64 = "1";
        optional uint32 width: u32 = "2";
        optional uint64 rows: u64 = "3";
        optional uint32 buckets: u32 = "4";
        optional bool lazy: bool = "5";
        optional uint64 seed: u64 = "6";
        optional message constant: ConstantConfig = "7";
        optional message uniform: UniformConfig = "8";
        optional message gaussian: GaussianConfig = "9";
        optional uint64 first: u64 = "10";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct ConstantConfig, "ConstantConfig" {
        optional double value: f64 = "1";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct UniformConfig, "UniformConfig" {
        optional double low: f64 = "1" or "-1.0";
        optional double high: f64 = "2" or "1.0";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct GaussianConfig, "GaussianConfig" {
        optional double mean: f64 = "1";
        optional double deviation: f64 = "2" or "1.0";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct SgdConfig, "SGDConfig" {
        optional double momentum: f64 = "21" or "0.0";
        optional double decay: f64 = "23" or "0.0";
        optional bool nesterov: bool = "24" or "false";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct AdadeltaConfig, "AdadeltaConfig" {
        optional double epsilon: f64 = "31" or "1e-5";
        optional double decay: f64 = "32" or "0.0";
        optional double rho: f64 = "33" or "0.90";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct AdagradConfig, "AdagradConfig" {
        optional double epsilon: f64 = "41" or "1e-5";
        optional double decay: f64 = "42" or "0.0";
    }
}

message! {
    /// Settings of Adam and AdamW. Paddle gave the first three no defaults, so they were zero and Adam divided by zero;
    /// ours are the usual ones.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct AdamConfig, "AdamConfig" {
        optional double beta_1: f64 = "41" or "0.9";
        optional double beta_2: f64 = "42" or "0.999";
        optional double epsilon: f64 = "43" or "1e-8";
        optional double decay: f64 = "44" or "0.0";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct RmsPropConfig, "RmsPropConfig" {
        optional double rho: f64 = "1" or "0.9";
        optional double epsilon: f64 = "2" or "1e-5";
        optional double momentum: f64 = "3" or "0.0";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct FtrlConfig, "FtrlConfig" {
        optional double learning_rate_power: f64 = "1" or "-0.5";
        optional double beta: f64 = "2" or "0.0";
    }
}

message! {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct ConstLrConfig, "ConstLrConfig" {
        optional double learning_rate: f64 = "1" or "1.0";
    }
}

message! {
    /// Paddle's `LinearLrConfig`, which serves our other schedules as well.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    struct DecayingLrConfig, "LinearLrConfig" {
        optional double learning_rate: f64 = "1" or "1.0";
        optional double lr_decay_a: f64 = "2";
        optional double lr_decay_b: f64 = "3";
    }
}

enumeration! {
    enum OptimizerKind {
        Sgd "SGD" = 1,
        Adadelta "Adadelta" = 2,
        Adagrad "Adagrad" = 3,
        Adam "Adam" = 4,
    }
}

enumeration! {
    enum LrPolicy {
        Const "Const" = 0,
        Linear "Linear" = 1,
        Poly "Poly" = 1000,
        Exp "Exp" = 1001,
        DiscExp "DiscExp" = 1002,
    }
}

enumeration! {
    enum RegularizerKind {
        Proximal "Proximal" = 0,
        Coupled "Coupled" = 1,
        Decoupled "Decoupled" = 2,
    }
}

enumeration! {
    enum ModeKind {
        Sync "Sync" = 0,
        Async "Async" = 1,
        Staleness "Staleness" = 2,
        Delta "Delta" = 3,
    }
}

enumeration! {
    enum MergeKind {
        Mean "Mean" = 0,
        Sum "Sum" = 1,
    }
}

enumeration! {
    /// Mirrors `partition::TotalPart`.
    enum TotalPartKind {
        Share "Share" = 1,
        Total "Total" = 2,
    }
}
