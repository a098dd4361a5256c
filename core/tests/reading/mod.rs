//! One function for each reader of outside bytes: no input makes it panic, and a value that is read, written and read
//! again is the same. A random run (`nonsense.rs`) and the fuzz targets (`core/fuzz`) call the same
//! functions.
//!
//! Each function returns whether the bytes were accepted, so that a run can check that not all inputs are refused.

mod files;

pub(crate) use files::{coordinator_file, journal, manifest};
use prost::Message;
use pserver_core::checksum::checksum;
use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::ids::{ChunkIndex, ServerIndex};
use pserver_core::partition::{Catalogue, CataloguePage};
use pserver_core::rule::syntax::Syntax;
use pserver_core::rule::{CheckedRule, RuleSettings};
use pserver_core::wire::{Frame, HEADER_BYTES, Head, Kind, Prefix};

/// A function of this module.
pub(crate) type Reading = fn(&[u8]) -> bool;

/// All of them, by the names of the fuzz targets.
#[allow(dead_code, reason = "a fuzz target calls one of them by its name")]
pub(crate) const ALL: [(&str, Reading); 8] = [
    ("rule_text", rule_text),
    ("config_text", config_text),
    ("config_bytes", config_bytes),
    ("wire_frame", wire_frame),
    ("catalogue_page", catalogue_page),
    ("coordinator_file", coordinator_file),
    ("manifest", manifest),
    ("journal", journal),
];

/// An update rule.
pub(crate) fn rule_text(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    if let Ok(syntax) = Syntax::parse(text) {
        let printed = syntax.to_string();
        let again =
            Syntax::parse(&printed).unwrap_or_else(|failure| panic!("{failure}, in what was printed:\n{printed}"));
        assert_eq!(again.to_string(), printed);
    }
    CheckedRule::new(text, &RuleSettings::new()).is_ok_and(|rule| rule.lower().is_ok())
}

/// A configuration as text.
pub(crate) fn config_text(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    OptimizerSettings::from_text(text).is_ok_and(check_settings)
}

/// A configuration as a message.
pub(crate) fn config_bytes(bytes: &[u8]) -> bool {
    OptimizerSettings::from_bytes(bytes).is_ok_and(check_settings)
}

fn check_settings(settings: OptimizerSettings) -> bool {
    if let Some(rule) = settings.rule {
        let config = ParameterConfig { sparse: settings.sparse, ..ParameterConfig::of(rule) };
        assert_eq!(ParameterConfig::decode(&config.encode()).as_ref(), Ok(&config));
        let text = OptimizerSettings::from_text(&config.to_text()).expect("what was printed is read");
        assert_eq!(text.rule.as_ref(), Some(&config.rule));
    }
    true
}

/// A frame without its payloads: once as given, and once with correct checksums, so that its contents are read too.
pub(crate) fn wire_frame(bytes: &[u8]) -> bool {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return false };
    let mut header = *header;
    let as_it_came = read_frame(&header, rest);
    let valid = Frame::bare(Head::new(Kind::Hello)).encode();
    // The magic number and the version.
    header[..5].copy_from_slice(&valid[..5]);
    header[56..60].copy_from_slice(&checksum(rest).to_le_bytes());
    let sum = checksum(&header[..60]);
    header[60..].copy_from_slice(&sum.to_le_bytes());
    read_frame(&header, rest) || as_it_came
}

fn read_frame(header: &[u8; HEADER_BYTES], rest: &[u8]) -> bool {
    let Ok(prefix) = Prefix::decode(header) else { return false };
    if prefix.rest_bytes() != rest.len() {
        return false;
    }
    let Ok(frame) = prefix.finish(rest) else { return false };
    assert_eq!(frame.encode(), [header.as_slice(), rest].concat(), "a frame is written as it was read");
    true
}

/// A catalogue of one page.
pub(crate) fn catalogue_page(bytes: &[u8]) -> bool {
    let Ok(page) = CataloguePage::decode(bytes) else { return false };
    let Ok(catalogue) = Catalogue::from_pages([page]) else { return false };
    let again = Catalogue::from_pages(catalogue.pages(64)).expect("its own pages are read");
    assert_eq!(again.digest(), catalogue.digest());
    for (one, other) in catalogue.iter().zip(again.iter()) {
        let last = ChunkIndex(one.chunk_count() - 1);
        assert_eq!(
            (one.shard_of(ChunkIndex(0)), one.shard_of(last)),
            (other.shard_of(ChunkIndex(0)), other.shard_of(last))
        );
        assert!(one.declaration().owner.is_none_or(|owner| one.shard_of(last).server == owner), "an owner is kept");
    }
    let servers = (0..catalogue.topology().servers()).map(ServerIndex);
    let held: u128 = servers.map(|server| u128::from(catalogue.bytes_on(server))).sum();
    assert!(held >= u128::from(catalogue.bytes()), "no byte is without a server");
    true
}
