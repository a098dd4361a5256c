//! The transports of this process's connections, read from their log events.
//!
//! The code that opens a connection logs an event with the field `carried_by` (`tcp`, `shm` or `verbs`), or with
//! `not_by` for a transport that failed. A subscriber keeps both, with their texts.

use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::job::{TransportName, word};

/// The distinct events of connections, in the order of their first occurrence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heard {
    /// The transport that carries the bytes.
    ways: Vec<String>,
    /// How that came.
    words: Vec<String>,
}

/// The transport that carried the bytes, and the reason for the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Carried {
    pub(crate) by: String,
    pub(crate) reason: String,
}

/// The field of an event: the transport that carries a connection, or one that was rejected.
const FIELDS: [&str; 2] = ["carried_by", "not_by"];

static HEARD: Mutex<Heard> = Mutex::new(Heard { ways: Vec::new(), words: Vec::new() });

/// Hears every connection that this process makes from now on.
pub(crate) fn listen() {
    let says = filter_fn(|metadata| FIELDS.iter().any(|field| metadata.fields().field(field).is_some()));
    // A process has one subscriber. Where there is one already, it hears for all.
    let _ = tracing_subscriber::registry().with(Ear.with_filter(says)).try_init();
}

/// The events recorded so far.
pub(crate) fn heard() -> Heard {
    HEARD.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Heard {
    /// Adds the events of another process.
    pub(crate) fn add(&mut self, other: Self) {
        let all = [(&mut self.ways, other.ways), (&mut self.words, other.words)];
        for (known, new) in all {
            let new: Vec<_> = new.into_iter().filter(|one| !known.contains(one)).collect();
            known.extend(new);
        }
    }
}

impl Carried {
    /// The transport used where `asked` was requested. A connection logs it only if it differs.
    pub(crate) fn of(asked: TransportName, heard: &Heard) -> Self {
        let asked = word(asked);
        let by = if heard.ways.is_empty() { asked.clone() } else { heard.ways.join(" and ") };
        let chosen = std::iter::once(format!("--transport {asked}"));
        Self { by, reason: chosen.chain(heard.words.iter().cloned()).collect::<Vec<_>>().join("; ") }
    }

    /// The transport that it was; none where connections went different ways.
    pub(crate) fn transport(&self) -> Option<TransportName> {
        TransportName::from_str(&self.by, false).ok()
    }
}

/// Keeps what is said.
struct Ear;

/// One event's fields.
#[derive(Default)]
struct EventFields {
    way: Option<String>,
    words: String,
}

impl<S: Subscriber> Layer<S> for Ear {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut said = EventFields::default();
        event.record(&mut said);
        let heard = Heard { ways: Vec::from_iter(said.way), words: vec![said.words] };
        HEARD.lock().unwrap_or_else(PoisonError::into_inner).add(heard);
    }
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "carried_by" {
            self.way = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.words = format!("{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(ways: &[&str], words: &[&str]) -> Heard {
        let owned = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
        Heard { ways: owned(ways), words: owned(words) }
    }

    #[test]
    fn the_chosen_transport_is_reported_with_its_reason() {
        let check = |asked, all: &[Heard], by: &str, reason: &str| {
            let mut whole = Heard::default();
            all.iter().for_each(|one| whole.add(one.clone()));
            let carried = Carried::of(asked, &whole);
            assert_eq!((carried.by.as_str(), carried.reason.as_str()), (by, reason));
            assert_eq!(carried.transport().map(word), (!by.contains(' ')).then(|| by.to_owned()));
        };
        check(TransportName::Tcp, &[], "tcp", "--transport tcp");
        let shared = heard(&["shm"], &["connected through shared memory"]);
        let reason = "--transport auto; connected through shared memory";
        check(TransportName::Auto, &[shared.clone(), shared.clone()], "shm", reason);
        let far = heard(&["tcp"], &["no shared memory: it is elsewhere", "connected over TCP; no verbs: no device"]);
        let reason = "--transport auto; no shared memory: it is elsewhere; connected over TCP; no verbs: no device";
        check(TransportName::Auto, std::slice::from_ref(&far), "tcp", reason);
        let reason = "--transport auto; connected through shared memory; no shared memory: it is elsewhere; \
                      connected over TCP; no verbs: no device";
        check(TransportName::Auto, &[shared, far], "shm and tcp", reason);
    }

    #[test]
    fn only_connection_events_are_recorded() {
        listen();
        tracing::info!(address = "here", carried_by = "shm", "connected {}", "somehow");
        tracing::info!(not_by = "verbs", "no verbs");
        tracing::info!(way = "tcp", "something else");
        assert_eq!(super::heard(), heard(&["shm"], &["connected somehow", "no verbs"]));
    }
}
