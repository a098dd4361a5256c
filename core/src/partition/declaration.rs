//! Declaration of a parameter, and its checks.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use super::buckets::Buckets;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkId, ParameterIndex, ServerIndex, TrainerId};
use crate::limits::{BUCKETS_MAX, DIMENSIONS_MAX, NAME_BYTES_MAX, PARAMETER_BYTES_MAX, PARAMETER_CONFIG_BYTES_MAX};

/// A parameter's name: 1 to [`NAME_BYTES_MAX`] bytes of UTF-8 without control characters. Clones share the text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

/// One parameter as declared. [`Catalogue::declare`](super::Catalogue::declare) checks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Its name, which no other parameter has.
    pub name: Name,
    /// The type of its elements; not a half.
    pub element_type: ElementType,
    /// Its length: a multiple of the element's, at least one element, at most [`PARAMETER_BYTES_MAX`].
    pub bytes: u64,
    /// Its shape in elements per dimension, row-major. The catalogue replaces an empty shape by one dimension of all
    /// elements.
    pub shape: Vec<u64>,
    /// Whether one shard keeps every chunk, because the parameter's rule is not element-wise.
    pub whole: bool,
    /// Its encoded configuration, opaque here; at most [`PARAMETER_CONFIG_BYTES_MAX`] bytes.
    pub config: Vec<u8>,
    /// Distribution of its rows, if it is updated by rows; its chunks are then buckets of rows.
    pub buckets: Option<Buckets>,
    /// The server that keeps every chunk, if one was requested; below the number of servers.
    pub owner: Option<ServerIndex>,
    /// The only trainer that sends to it, if one was specified: a round is one gradient of this trainer. Dense
    /// parameters only.
    pub sender: Option<TrainerId>,
    /// Its part in the total that the parameter before it reads, if it has one.
    pub total_part: Option<TotalPart>,
    /// Its place in a program that its server hosts, if it has one.
    pub hosted: Option<Hosted>,
}

/// The place of a parameter in a hosted program, which the executor runs on a shard. The program is declared first, as
/// a parameter whose value is its binary form, then its variables and ends of channels; all are on one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosted {
    /// The program.
    Program,
    /// A variable that the program keeps, or an end of one of its channels: with a sender what this trainer sends,
    /// without one what the server computes.
    Part,
}

impl Hosted {
    /// Its number in messages.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Program => 1,
            Self::Part => 2,
        }
    }

    /// The place with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Program),
            2 => Some(Self::Part),
            _ => None,
        }
    }
}

/// The part of a parameter in a number that trainers make of several parameters. The parameter that reads the number is
/// declared first, then its share, then its total, each one float64; all are on one shard. For a table they have a
/// number for each bucket, on its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TotalPart {
    /// A number that its server computes of the parameter before it in every round: version `n` is of round `n`.
    Share,
    /// A number that trainers send: the first one of a round completes it, and others are duplicates.
    Total,
}

impl TotalPart {
    /// Bytes of a number.
    pub const NUMBER_BYTES: u32 = 8;

    /// Its number in messages.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Share => 1,
            Self::Total => 2,
        }
    }

    /// The part with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Share),
            2 => Some(Self::Total),
            _ => None,
        }
    }

    /// The chunk of the part whose number a chunk reads: the first one of a whole parameter, or a bucket.
    #[must_use]
    pub fn of(self, reader: ChunkId) -> ChunkId {
        ChunkId { parameter: ParameterIndex(reader.parameter.0.saturating_add(self.number())), ..reader }
    }

    /// The index of the parameter that reads the number, where the part has this index.
    #[must_use]
    pub fn reader(self, index: ParameterIndex) -> Option<ParameterIndex> {
        index.0.checked_sub(self.number()).map(ParameterIndex)
    }
}

impl Name {
    /// Checks a name that a peer or a caller gave.
    ///
    /// # Errors
    /// [`Failure::Call`] when it is empty, too long, not UTF-8, or has a control character (a NUL, say); it says
    /// which, and shows the beginning of the name.
    pub fn new(bytes: &[u8]) -> Result<Self, Failure> {
        let refused = |why: String| Failure::Call(format!("parameter name {}: {why}", quoted(bytes)));
        if bytes.is_empty() {
            return Err(refused("empty; expected at least one character".to_owned()));
        }
        if bytes.len() > NAME_BYTES_MAX {
            return Err(refused(format!("{} bytes; expected at most {NAME_BYTES_MAX}", bytes.len())));
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|error| refused(format!("not UTF-8 at byte {}; expected UTF-8", error.valid_up_to())))?;
        if let Some((at, found)) = text.char_indices().find(|(_, found)| found.is_control()) {
            let found = found.escape_unicode();
            return Err(refused(format!("control character {found} at byte {at}; expected none")));
        }
        Ok(Self(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text in quotes for a message, at most 40 characters of it.
    pub(super) fn quoted(&self) -> String {
        quoted(self.0.as_bytes())
    }
}

impl Declaration {
    /// How many elements it has.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.bytes / self.element_type.bytes()
    }

    /// Checks the declaration without regard to other parameters, and fills in its shape.
    pub(super) fn checked(mut self) -> Result<Self, Failure> {
        if let Some(why) = self.fault() {
            return Err(Failure::Call(format!("parameter {}: {why}", self.name.quoted())));
        }
        if self.shape.is_empty() {
            self.shape = vec![self.elements()];
        }
        self.shape.shrink_to_fit();
        self.config.shrink_to_fit();
        Ok(self)
    }

    fn fault(&self) -> Option<String> {
        let (bytes, kind, element) = (self.bytes, self.element_type, self.element_type.bytes());
        if !kind.is_parameter_type() {
            return Some(format!("element type {kind}; expected a type of 32 or 64 bits (halves are for gradients)"));
        }
        if bytes == 0 {
            return Some("length 0 bytes; expected at least one element".to_owned());
        }
        if bytes > PARAMETER_BYTES_MAX {
            return Some(format!("length {bytes} bytes; expected at most {PARAMETER_BYTES_MAX}"));
        }
        if !bytes.is_multiple_of(element) {
            return Some(format!("length {bytes} bytes; expected a multiple of {element} ({kind})"));
        }
        let config = self.config.len();
        if config > PARAMETER_CONFIG_BYTES_MAX {
            return Some(format!("configuration of {config} bytes; expected at most {PARAMETER_CONFIG_BYTES_MAX}"));
        }
        if self.total_part.is_some() && (kind != ElementType::Float64 || self.whole || self.sender.is_some()) {
            return Some(format!("part of a total with {bytes} bytes of {kind}; expected float64 and no sender"));
        }
        if self.hosted.is_some() && (self.total_part.is_some() || self.buckets.is_some() || !self.whole) {
            return Some("of a hosted program; expected dense, on one shard and no part of a total".to_owned());
        }
        if self.hosted == Some(Hosted::Program) && (kind != ElementType::Uint32 || self.sender.is_some()) {
            return Some(format!("a hosted program of {kind}; expected uint32 and no sender"));
        }
        match self.buckets {
            Some(_) if self.total_part.is_some() => Some("sparse part of a total; expected a dense one".to_owned()),
            Some(_) if self.sender.is_some() => Some("sparse with one sender; expected a dense parameter".to_owned()),
            Some(buckets) => self.buckets_fault(buckets),
            None => self.shape_fault(),
        }
    }

    fn buckets_fault(&self, Buckets { rows, count }: Buckets) -> Option<String> {
        let [height, width] = self.shape[..] else {
            return Some(format!("shape {:?} of a sparse parameter; expected height and width", self.shape));
        };
        if rows == 0 || (height > 0 && height < rows) {
            return Some(format!("{rows} rows of a height of {height}; expected 1 to {height}"));
        }
        if !(1..=BUCKETS_MAX).contains(&count) {
            return Some(format!("{count} buckets; expected 1 to {BUCKETS_MAX}"));
        }
        let expected = width.checked_mul(rows).and_then(|elements| elements.checked_mul(self.element_type.bytes()));
        if expected != Some(self.bytes) {
            return Some(format!("length {} bytes; expected {rows} rows of {width} elements", self.bytes));
        }
        if self.whole {
            return Some("sparse with a rule that needs the whole gradient; expected an element-wise rule".to_owned());
        }
        let most = u64::from(u32::MAX);
        let each = self.bytes.div_ceil(count.into());
        (each > most).then(|| format!("{count} buckets of {each} bytes each; expected more buckets of at most {most}"))
    }

    fn shape_fault(&self) -> Option<String> {
        let dimensions = self.shape.len();
        if dimensions > DIMENSIONS_MAX {
            return Some(format!("shape of {dimensions} dimensions; expected at most {DIMENSIONS_MAX}"));
        }
        let product = self.shape.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension));
        let fits = dimensions == 0 || product == Some(self.elements());
        (!fits).then(|| format!("shape {:?}; expected a product of {} elements", self.shape, self.elements()))
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", &*self.0)
    }
}

/// The beginning of an unchecked name, in quotes, with escapes for unprintable characters.
fn quoted(bytes: &[u8]) -> String {
    const CHARACTERS_SHOWN: usize = 40;
    // A character has at most four bytes, so this prefix holds all that is shown and bounds the work.
    let prefix = &bytes[..bytes.len().min(4 * (CHARACTERS_SHOWN + 1))];
    let text = String::from_utf8_lossy(prefix);
    let shown: String = text.chars().take(CHARACTERS_SHOWN).collect();
    let more = if shown.len() < text.len() { "..." } else { "" };
    format!("{shown:?}{more}")
}
