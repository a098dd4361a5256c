//! Schema of the message: fields by name, number and kind. The text parser and the check of the binary form use it.

use crate::error::Failure;

/// A message, with its name in Paddle's file or in this project.
#[derive(Debug)]
pub(super) struct Schema {
    pub(super) name: &'static str,
    pub(super) fields: &'static [Field],
}

#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) number: u32,
    pub(super) kind: FieldKind,
    /// Whether it may be given more than once.
    pub(super) is_repeated: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum FieldKind {
    Double,
    Bool,
    Uint32,
    Uint64,
    Text,
    Enumeration(&'static [(&'static str, u32)]),
    Message(&'static Schema),
}

/// The encoding of a field's value in the binary form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum WireType {
    Varint = 0,
    EightBytes = 1,
    Delimited = 2,
}

const fn field(name: &'static str, number: u32, kind: FieldKind) -> Field {
    Field { name, number, kind, is_repeated: false }
}

const fn repeated(name: &'static str, number: u32, kind: FieldKind) -> Field {
    Field { name, number, kind, is_repeated: true }
}

pub(super) static OPTIMIZER_CONFIG: Schema = Schema {
    name: "OptimizerConfig",
    fields: &[
        field("optimizer", 1, FieldKind::Enumeration(&[("SGD", 1), ("Adadelta", 2), ("Adagrad", 3), ("Adam", 4)])),
        field("sgd", 3, FieldKind::Message(&SGD)),
        field("adadelta", 4, FieldKind::Message(&ADADELTA)),
        field("adagrad", 5, FieldKind::Message(&ADAGRAD)),
        field("adam", 6, FieldKind::Message(&ADAM)),
        field("lr_policy", 11, FieldKind::Enumeration(&LR_POLICIES)),
        field("const_lr", 12, FieldKind::Message(&CONST_LR)),
        field("linear_lr", 13, FieldKind::Message(&DECAYING_LR)),
        field("clip_norm", 101, FieldKind::Double),
        field("clip_value", 102, FieldKind::Double),
        field("l1", 1001, FieldKind::Double),
        field("l2", 1002, FieldKind::Double),
        field("regularizer", 1003, FieldKind::Enumeration(&[("Proximal", 0), ("Coupled", 1), ("Decoupled", 2)])),
        field("rate_scale", 1004, FieldKind::Double),
        field("algorithm", 1005, FieldKind::Text),
        field("rmsprop", 1006, FieldKind::Message(&RMSPROP)),
        field("adamw", 1007, FieldKind::Message(&ADAM)),
        field("ftrl", 1008, FieldKind::Message(&FTRL)),
        field("poly_lr", 1009, FieldKind::Message(&DECAYING_LR)),
        field("exp_lr", 1010, FieldKind::Message(&DECAYING_LR)),
        field("disc_exp_lr", 1011, FieldKind::Message(&DECAYING_LR)),
        field("mode", 1012, FieldKind::Enumeration(&[("Sync", 0), ("Async", 1), ("Staleness", 2), ("Delta", 3)])),
        field("staleness_bound", 1013, FieldKind::Uint32),
        field("merge", 1014, FieldKind::Enumeration(&[("Mean", 0), ("Sum", 1)])),
        field("rule", 1015, FieldKind::Text),
        field("rule_file", 1016, FieldKind::Text),
        repeated("rule_set", 1017, FieldKind::Message(&RULE_SETTING)),
        field("home", 1018, FieldKind::Uint32),
        field("sender", 1019, FieldKind::Uint32),
        field("stage", 1020, FieldKind::Text),
        field("total_part", 1021, FieldKind::Enumeration(&[("Share", 1), ("Total", 2)])),
        field("sparse", 1100, FieldKind::Message(&SPARSE)),
    ],
};

static LR_POLICIES: [(&str, u32); 5] = [("Const", 0), ("Linear", 1), ("Poly", 1000), ("Exp", 1001), ("DiscExp", 1002)];

static SGD: Schema = Schema {
    name: "SGDConfig",
    fields: &[
        field("momentum", 21, FieldKind::Double),
        field("decay", 23, FieldKind::Double),
        field("nesterov", 24, FieldKind::Bool),
    ],
};

static ADADELTA: Schema = Schema {
    name: "AdadeltaConfig",
    fields: &[
        field("epsilon", 31, FieldKind::Double),
        field("decay", 32, FieldKind::Double),
        field("rho", 33, FieldKind::Double),
    ],
};

static ADAGRAD: Schema = Schema {
    name: "AdagradConfig",
    fields: &[field("epsilon", 41, FieldKind::Double), field("decay", 42, FieldKind::Double)],
};

static ADAM: Schema = Schema {
    name: "AdamConfig",
    fields: &[
        field("beta_1", 41, FieldKind::Double),
        field("beta_2", 42, FieldKind::Double),
        field("epsilon", 43, FieldKind::Double),
        field("decay", 44, FieldKind::Double),
    ],
};

static RMSPROP: Schema = Schema {
    name: "RmsPropConfig",
    fields: &[
        field("rho", 1, FieldKind::Double),
        field("epsilon", 2, FieldKind::Double),
        field("momentum", 3, FieldKind::Double),
    ],
};

static FTRL: Schema = Schema {
    name: "FtrlConfig",
    fields: &[field("learning_rate_power", 1, FieldKind::Double), field("beta", 2, FieldKind::Double)],
};

static RULE_SETTING: Schema =
    Schema { name: "RuleSetting", fields: &[field("key", 1, FieldKind::Text), field("value", 2, FieldKind::Double)] };

static CONST_LR: Schema = Schema { name: "ConstLrConfig", fields: &[field("learning_rate", 1, FieldKind::Double)] };

static DECAYING_LR: Schema = Schema {
    name: "LinearLrConfig",
    fields: &[
        field("learning_rate", 1, FieldKind::Double),
        field("lr_decay_a", 2, FieldKind::Double),
        field("lr_decay_b", 3, FieldKind::Double),
    ],
};

static SPARSE: Schema = Schema {
    name: "SparseConfig",
    fields: &[
        field("height", 1, FieldKind::Uint64),
        field("width", 2, FieldKind::Uint32),
        field("rows", 3, FieldKind::Uint64),
        field("buckets", 4, FieldKind::Uint32),
        field("lazy", 5, FieldKind::Bool),
        field("seed", 6, FieldKind::Uint64),
        field("constant", 7, FieldKind::Message(&CONSTANT)),
        field("uniform", 8, FieldKind::Message(&UNIFORM)),
        field("gaussian", 9, FieldKind::Message(&GAUSSIAN)),
        field("first", 10, FieldKind::Uint64),
    ],
};

static CONSTANT: Schema = Schema { name: "ConstantConfig", fields: &[field("value", 1, FieldKind::Double)] };

static UNIFORM: Schema = Schema {
    name: "UniformConfig",
    fields: &[field("low", 1, FieldKind::Double), field("high", 2, FieldKind::Double)],
};

static GAUSSIAN: Schema = Schema {
    name: "GaussianConfig",
    fields: &[field("mean", 1, FieldKind::Double), field("deviation", 2, FieldKind::Double)],
};

impl FieldKind {
    pub(super) const fn wire_type(self) -> WireType {
        match self {
            Self::Double => WireType::EightBytes,
            Self::Bool | Self::Uint32 | Self::Uint64 | Self::Enumeration(_) => WireType::Varint,
            Self::Text | Self::Message(_) => WireType::Delimited,
        }
    }
}

impl Field {
    /// The number and wire type, which precede the value.
    pub(super) const fn key(&self) -> u64 {
        (self.number as u64) << 3 | self.kind.wire_type() as u64
    }
}

impl Schema {
    /// The names of its fields, for errors about an unknown one.
    pub(super) fn names(&self) -> String {
        self.fields.iter().map(|field| field.name).collect::<Vec<_>>().join(", ")
    }
}

/// The names of an enumeration, for errors about an unknown one.
pub(super) fn enumerators(values: &[(&str, u32)]) -> String {
    values.iter().map(|(name, number)| format!("{name} ({number})")).collect::<Vec<_>>().join(", ")
}

/// Checks the binary form of `schema`: every field known, of its wire type, complete, and within its enumeration.
///
/// Returns the part before the first zero tag. Protobuf has no tag of zero, so the rest is padding: Paddle's C client
/// passes its buffer's capacity as the length.
pub(super) fn checked<'a>(schema: &'static Schema, bytes: &'a [u8]) -> Result<&'a [u8], Failure> {
    if let [0, ..] = bytes {
        let (name, found) = (schema.name, bytes.len());
        return Err(Failure::call(format!(
            "{name}: {found} bytes that begin with a zero, and no field does; expected a field, or a length of 0"
        )));
    }
    let mut rest = bytes;
    while rest.first().is_some_and(|byte| *byte != 0) {
        check_field(schema, schema.name, &mut rest)?;
    }
    Ok(&bytes[..bytes.len() - rest.len()])
}

fn check_field(schema: &'static Schema, path: &str, rest: &mut &[u8]) -> Result<(), Failure> {
    let key = take_varint(rest, path)?;
    let Some(field) = schema.fields.iter().find(|field| u64::from(field.number) == key >> 3) else {
        return Err(Failure::call(format!(
            "{path}: field number {} is not known; expected one of {}",
            key >> 3,
            schema.names()
        )));
    };
    if field.key() != key {
        return Err(Failure::call(format!(
            "{path}.{}: the wire type is {}; expected {}",
            field.name,
            key & 7,
            field.kind.wire_type() as u8
        )));
    }
    check_value(field.kind, &format!("{path}.{}", field.name), rest)
}

fn check_value(kind: FieldKind, path: &str, rest: &mut &[u8]) -> Result<(), Failure> {
    match kind {
        FieldKind::Double => take(rest, 8, path).map(drop),
        FieldKind::Bool | FieldKind::Uint64 => take_varint(rest, path).map(drop),
        FieldKind::Uint32 => {
            let value = take_varint(rest, path)?;
            u32::try_from(value)
                .map(drop)
                .map_err(|_| Failure::call(format!("{path} is {value}; expected at most {}", u32::MAX)))
        }
        FieldKind::Enumeration(values) => {
            let value = take_varint(rest, path)?;
            match values.iter().any(|(_, number)| u64::from(*number) == value) {
                true => Ok(()),
                false => Err(Failure::call(format!("{path} is {value}; expected one of {}", enumerators(values)))),
            }
        }
        FieldKind::Text | FieldKind::Message(_) => {
            let length = take_varint(rest, path)?;
            let mut inner = take(rest, length, path)?;
            while let (FieldKind::Message(schema), false) = (kind, inner.is_empty()) {
                check_field(schema, path, &mut inner)?;
            }
            Ok(())
        }
    }
}

fn take<'a>(rest: &mut &'a [u8], length: u64, path: &str) -> Result<&'a [u8], Failure> {
    let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
    let Some((taken, left)) = split else {
        return Err(Failure::call(format!("{path}: cut short; expected {length} bytes, found {}", rest.len())));
    };
    *rest = left;
    Ok(taken)
}

/// Takes a varint: groups of seven bits, the lowest first, each but the last with its top bit set.
fn take_varint(rest: &mut &[u8], path: &str) -> Result<u64, Failure> {
    let mut value = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let [byte, left @ ..] = rest else {
            return Err(Failure::call(format!("{path}: cut short within a number")));
        };
        *rest = left;
        let group = u64::from(byte & 0x7f);
        if group << shift >> shift != group {
            break;
        }
        value |= group << shift;
        if *byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Failure::call(format!("{path}: a number is longer than 64 bits")))
}
