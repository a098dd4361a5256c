//! Catalogue on the wire: pages of declarations, and the digest by which two sides compare their catalogues.

use prost::Message;

use super::buckets::Buckets;
use super::catalogue::Catalogue;
use super::declaration::{Declaration, Hosted, Name, TotalPart};
use super::topology::Topology;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ServerIndex, TrainerId};
use crate::limits::{SERVERS_MAX, SHARDS_MAX, TRAINERS_MAX};

/// One declaration on the wire, unchecked until [`Catalogue::from_pages`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeclarationMessage {
    /// The name. Its bytes are checked to be UTF-8 by [`Name::new`], whose error is better than the decoder's.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// The number of the element type.
    #[prost(uint32, tag = "2")]
    pub element_type: u32,
    /// The length in bytes.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// The shape in elements per dimension.
    #[prost(uint64, repeated, tag = "4")]
    pub shape: Vec<u64>,
    /// Whether one shard keeps every chunk.
    #[prost(bool, tag = "5")]
    pub whole: bool,
    /// The encoded configuration.
    #[prost(bytes = "vec", tag = "6")]
    pub config: Vec<u8>,
    /// The number of buckets of its rows; zero when it is not updated by rows.
    #[prost(uint32, tag = "7")]
    pub buckets: u32,
    /// The number of rows in all buckets together, at most.
    #[prost(uint64, tag = "8")]
    pub rows: u64,
    /// The server that keeps every chunk, if one was requested.
    #[prost(uint32, optional, tag = "9")]
    pub home: Option<u32>,
    /// The only trainer that sends to it, if one was specified.
    #[prost(uint32, optional, tag = "10")]
    pub sender: Option<u32>,
    /// Its part in the total that a parameter before it reads: 0 none, 1 share, 2 total.
    #[prost(uint32, tag = "11")]
    pub total_part: u32,
    /// Its place in a hosted program: 0 none, 1 the program, 2 a part of it.
    #[prost(uint32, tag = "12")]
    pub hosted: u32,
}

/// Consecutive declarations of a catalogue, with the inputs of placement. Every page repeats the facts of the whole, so
/// that a page of another catalogue and a lost page are detected.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CataloguePage {
    /// The shards of each server.
    #[prost(uint32, repeated, tag = "1")]
    pub shards: Vec<u32>,
    /// The chunk size in bytes.
    #[prost(uint32, tag = "2")]
    pub chunk_bytes: u32,
    /// How many parameters the catalogue has.
    #[prost(uint32, tag = "3")]
    pub total: u32,
    /// The number of the first declaration of this page.
    #[prost(uint32, tag = "4")]
    pub first: u32,
    /// The declarations, in order.
    #[prost(message, repeated, tag = "5")]
    pub declarations: Vec<DeclarationMessage>,
}

impl Catalogue {
    /// The catalogue in pages of at most `bytes_max` encoded bytes each, in order; at least one. A page holds at
    /// least one declaration, so it is larger when `bytes_max` is smaller than a declaration; with
    /// [`FRAME_CONTROL_BYTES_MAX`](crate::limits::FRAME_CONTROL_BYTES_MAX) it never is.
    #[must_use]
    pub fn pages(&self, bytes_max: u32) -> Vec<CataloguePage> {
        let empty = self.page_without_declarations();
        // The number of the first declaration is at most five bytes and its tag; zero is not encoded at all.
        let empty_bytes = empty.encoded_len() + 6;
        let mut pages = vec![empty.clone()];
        let mut bytes = empty_bytes;
        for (index, parameter) in (0..).zip(self.iter()) {
            let message = DeclarationMessage::from(parameter.declaration());
            let length = message.encoded_len();
            // A message in a list costs its tag and its length besides.
            let cost = 1 + prost::length_delimiter_len(length) + length;
            let full = bytes + cost > bytes_max as usize;
            if full && pages.last().is_some_and(|page| !page.declarations.is_empty()) {
                pages.push(CataloguePage { first: index, ..empty.clone() });
                bytes = empty_bytes;
            }
            bytes += cost;
            pages.last_mut().expect("there is always a page").declarations.push(message);
        }
        pages
    }

    /// The catalogue that these pages describe. Every bound is checked, by [`Catalogue::declare`].
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no page, when a page does not follow the previous one or has other facts, when
    /// pages are missing at the end, and when a declaration is refused.
    pub fn from_pages(pages: impl IntoIterator<Item = CataloguePage>) -> Result<Self, Failure> {
        let mut pages = pages.into_iter().peekable();
        let first = pages.peek().ok_or_else(|| Failure::call("catalogue of no pages; expected at least one"))?;
        let (shards, total) = (first.shards.clone(), first.total);
        let mut catalogue = Self::new(topology(&shards)?, first.chunk_bytes)?;
        for page in pages {
            if page.shards != shards || page.chunk_bytes != catalogue.chunk_bytes() || page.total != total {
                return Err(Failure::Call(format!("catalogue page at {}: from another catalogue", page.first)));
            }
            if page.first as usize != catalogue.len() {
                let (found, expected) = (page.first, catalogue.len());
                return Err(Failure::Call(format!("catalogue page at {found}; expected the one at {expected}")));
            }
            for message in page.declarations {
                catalogue.declare(Declaration::try_from(message)?)?;
            }
        }
        if catalogue.len() != total as usize {
            return Err(Failure::Call(format!("catalogue of {} parameters; expected {total}", catalogue.len())));
        }
        Ok(catalogue)
    }

    /// The BLAKE3 digest of the inputs of placement and of every declaration, in order. Equal digests mean equal
    /// catalogues, whatever pages they were sent in.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.page_without_declarations().encode_length_delimited_to_vec());
        for parameter in self.iter() {
            hasher.update(&DeclarationMessage::from(parameter.declaration()).encode_length_delimited_to_vec());
        }
        hasher.finalize().into()
    }

    fn page_without_declarations(&self) -> CataloguePage {
        let servers = (0..self.topology().servers()).map(ServerIndex);
        CataloguePage {
            shards: servers.filter_map(|server| self.topology().shards(server)).map(u32::from).collect(),
            chunk_bytes: self.chunk_bytes(),
            total: u32::try_from(self.len()).expect("checked against PARAMETERS_MAX"),
            first: 0,
            declarations: Vec::new(),
        }
    }
}

impl From<&Declaration> for DeclarationMessage {
    fn from(declaration: &Declaration) -> Self {
        Self {
            name: declaration.name.as_str().into(),
            element_type: declaration.element_type.number().into(),
            bytes: declaration.bytes,
            shape: declaration.shape.clone(),
            whole: declaration.whole,
            config: declaration.config.clone(),
            buckets: declaration.buckets.map_or(0, |buckets| buckets.count),
            rows: declaration.buckets.map_or(0, |buckets| buckets.rows),
            home: declaration.owner.map(|home| home.0.into()),
            sender: declaration.sender.map(|sender| sender.0),
            total_part: declaration.total_part.map_or(0, TotalPart::number),
            hosted: declaration.hosted.map_or(0, Hosted::number),
        }
    }
}

/// Checks the name and that the element type exists; the rest is checked by [`Catalogue::declare`].
impl TryFrom<DeclarationMessage> for Declaration {
    type Error = Failure;

    fn try_from(message: DeclarationMessage) -> Result<Self, Failure> {
        let name = Name::new(&message.name)?;
        let element_type = ElementType::from_number(message.element_type.into()).ok_or_else(|| {
            let (quoted, found) = (name.quoted(), message.element_type);
            Failure::Call(format!("parameter {quoted}: element type number {found}; expected 0 to 5"))
        })?;
        let owner = message.home.map(|owner| {
            let quoted = name.quoted();
            let narrow = u16::try_from(owner).map(ServerIndex);
            narrow.map_err(|_| {
                Failure::Call(format!(
                    "parameter {quoted}: its home is server {owner}; expected one below {SERVERS_MAX}"
                ))
            })
        });
        let owner = owner.transpose()?;
        let DeclarationMessage { bytes, shape, whole, config, rows, .. } = message;
        let buckets = (message.buckets > 0).then_some(Buckets { rows, count: message.buckets });
        let sender = message.sender.map(|sender| {
            let known = Some(sender).filter(|sender| *sender < TRAINERS_MAX).map(TrainerId);
            known.ok_or_else(|| {
                let quoted = name.quoted();
                Failure::Call(format!("parameter {quoted}: its sender is {sender}; expected one below {TRAINERS_MAX}"))
            })
        });
        let sender = sender.transpose()?;
        let total_part = match (message.total_part, TotalPart::from_number(message.total_part)) {
            (0, _) => None,
            (_, Some(part)) => Some(part),
            (found, None) => {
                let quoted = name.quoted();
                return Err(Failure::Call(format!("parameter {quoted}: part {found} of a total; expected 0 to 2")));
            }
        };
        let hosted = match (message.hosted, Hosted::from_number(message.hosted)) {
            (0, _) => None,
            (_, Some(hosted)) => Some(hosted),
            (found, None) => {
                let quoted = name.quoted();
                return Err(Failure::Call(format!(
                    "parameter {quoted}: place {found} in a hosted program; expected 0 to 2"
                )));
            }
        };
        Ok(Self { name, element_type, bytes, shape, whole, config, buckets, owner, sender, total_part, hosted })
    }
}

fn topology(shards: &[u32]) -> Result<Topology, Failure> {
    let narrow = |count: &u32| {
        u16::try_from(*count)
            .map_err(|_| Failure::Call(format!("a server of {count} shards; expected at most {SHARDS_MAX}")))
    };
    Topology::new(shards.iter().map(narrow).collect::<Result<_, _>>()?)
}
