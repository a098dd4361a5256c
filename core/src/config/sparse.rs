//! Settings of sparse parameters: the number of rows, their initial values and their distribution.

use crate::error::Failure;
use crate::limits::BUCKETS_MAX;
use crate::optim::Range;
use crate::partition::Declaration;
use crate::rows::{CatchUp, Height, Initializer, ROW_IDS_MAX, RowLayout};

use super::message::{ConstantConfig, GaussianConfig, SparseConfig, UniformConfig};

/// A parameter that is updated by rows: a table from ids to rows of one width. A row exists after the first push to it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SparseSettings {
    /// The exclusive bound of ids; none allows every id up to [`ROW_IDS_MAX`].
    pub height: Option<u64>,
    /// Elements of a row; none takes it from the shape.
    pub width: Option<u32>,
    /// The most rows that may exist; none means `height`.
    pub rows: Option<u64>,
    /// The number of buckets; none derives it from the number of servers.
    pub buckets: Option<u32>,
    /// Whether rows without a gradient skip an update instead of replaying it later.
    pub lazy: bool,
    /// The seed of the rows' initial values; none: a declared parameter gets one by its name.
    pub seed: Option<u64>,
    /// The number of row 0 in the initializer, so that a parameter of some rows has their initial values in the whole.
    pub first: u64,
    /// The initializer of a row.
    pub initializer: Initializer,
}

impl SparseSettings {
    /// How updates that a row has missed are handled.
    #[must_use]
    pub const fn catch_up(&self) -> CatchUp {
        if self.lazy { CatchUp::Lazy } else { CatchUp::Exact }
    }
}

/// The common properties of the rows of a declared parameter; none where it is dense.
///
/// # Errors
/// When its shape is not that of rows.
pub fn row_layout(declaration: &Declaration) -> Result<Option<RowLayout>, Failure> {
    let name = declaration.name.as_str();
    if declaration.buckets.is_none() {
        return Ok(None);
    }
    let named = |failure: Failure| Failure::call(format!("parameter \"{name}\": {failure}"));
    let [height, width] = declaration.shape[..] else {
        let found = &declaration.shape;
        return Err(named(Failure::call(format!("shape {found:?} of rows; expected height and width"))));
    };
    let height = if height == 0 { Height::Unbounded } else { Height::Rows(height) };
    let width = u32::try_from(width).unwrap_or(u32::MAX);
    RowLayout::new(declaration.element_type, width, height).map(Some).map_err(named)
}

/// Reads a message whose fields the schema has checked.
pub(super) fn settings(message: &SparseConfig) -> Result<SparseSettings, Failure> {
    let positive = |name: &str, value: Option<u64>, most: u64| match value {
        Some(found) if found > most => Err(Failure::call(format!("sparse.{name} is {found}; expected at most {most}"))),
        _ => Ok(value.filter(|value| *value > 0)),
    };
    let narrow = |value: Option<u64>| value.map(|value| u32::try_from(value).expect("it was compared with its limit"));
    let settings = SparseSettings {
        height: positive("height", message.height, ROW_IDS_MAX)?,
        width: message.width.filter(|width| *width > 0),
        rows: positive("rows", message.rows, ROW_IDS_MAX)?,
        buckets: narrow(positive("buckets", message.buckets.map(u64::from), BUCKETS_MAX.into())?),
        lazy: message.lazy(),
        seed: message.seed,
        first: message.first(),
        initializer: initializer(message)?,
    };
    if settings.height.is_none() && settings.rows.is_none() {
        return Err(Failure::call(
            "sparse: neither height nor rows is given; expected one of them, to bound the memory",
        ));
    }
    Ok(settings)
}

/// The message that [`settings`] reads as these settings.
pub(super) fn message(settings: &SparseSettings) -> SparseConfig {
    let mut message = SparseConfig {
        height: settings.height,
        width: settings.width,
        rows: settings.rows,
        buckets: settings.buckets,
        lazy: Some(settings.lazy),
        seed: settings.seed,
        first: (settings.first > 0).then_some(settings.first),
        ..SparseConfig::default()
    };
    match settings.initializer {
        Initializer::Zeros => message.constant = None,
        Initializer::Constant(value) => message.constant = Some(ConstantConfig { value: Some(value) }),
        Initializer::Uniform { low, high } => {
            message.uniform = Some(UniformConfig { low: Some(low), high: Some(high) });
        }
        Initializer::Gaussian { mean, deviation } => {
            message.gaussian = Some(GaussianConfig { mean: Some(mean), deviation: Some(deviation) });
        }
    }
    message
}

fn initializer(message: &SparseConfig) -> Result<Initializer, Failure> {
    let finite = |name: &str, value: f64| match value.is_finite() {
        true => Ok(value),
        false => Err(Failure::call(format!("sparse.{name} is {value}; expected a finite number"))),
    };
    match (message.constant, message.uniform, message.gaussian) {
        (None, None, None) => Ok(Initializer::default()),
        (Some(one), None, None) => Ok(Initializer::Constant(finite("constant.value", one.value())?)),
        (None, Some(one), None) => {
            let (low, high) = (finite("uniform.low", one.low())?, finite("uniform.high", one.high())?);
            if low > high {
                return Err(Failure::call(format!(
                    "sparse.uniform.low is {low}; expected at most high, which is {high}"
                )));
            }
            Ok(Initializer::Uniform { low, high })
        }
        (None, None, Some(one)) => {
            let (mean, deviation) = (finite("gaussian.mean", one.mean())?, one.deviation());
            Range::NotNegative.check("sparse.gaussian.deviation", deviation)?;
            Ok(Initializer::Gaussian { mean, deviation })
        }
        _ => Err(Failure::call("sparse: more than one of constant, uniform and gaussian; expected one")),
    }
}
