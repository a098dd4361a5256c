//! Addresses at which verbs failed, where connections with a choice use TCP for a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long verbs are not tried again at an address. A connection over TCP stays on TCP for its lifetime.
pub(super) const DENIED_FOR: Duration = Duration::from_secs(60);

/// Failures by address; the entry without an address is for connections that this side accepts.
#[derive(Default)]
pub(super) struct Denials(BTreeMap<Option<String>, Denial>);

struct Denial {
    until: Instant,
    reason: String,
}

impl Denials {
    pub(super) fn deny(&mut self, now: Instant, place: Option<String>, reason: &str) {
        self.0.retain(|_, denial| denial.until > now);
        self.0.insert(place, Denial { until: now + DENIED_FOR, reason: reason.to_owned() });
    }

    /// The failure for which verbs are denied at an address.
    pub(super) fn reason(&self, now: Instant, place: Option<&str>) -> Option<&str> {
        let denial = self.0.get(&place.map(str::to_owned)).filter(|denial| denial.until > now)?;
        Some(&denial.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_are_denied_where_they_failed_and_for_a_while() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut denials = Denials::default();
        denials.deny(began, Some("a:1".to_owned()), "no answer");
        denials.deny(began + second, Some("b:1".to_owned()), "no memory");
        let check = |denials: &Denials, after: Duration, place: Option<&str>, expected: Option<&str>| {
            assert_eq!(denials.reason(began + after, place), expected, "{place:?} after {after:?}");
        };
        check(&denials, second, Some("a:1"), Some("no answer"));
        check(&denials, second, Some("a:2"), None);
        check(&denials, second, None, None);
        check(&denials, DENIED_FOR, Some("a:1"), None);
        check(&denials, DENIED_FOR, Some("b:1"), Some("no memory"));
        denials.deny(began + DENIED_FOR, None, "the card has failed");
        check(&denials, DENIED_FOR, None, Some("the card has failed"));
        assert_eq!(denials.0.len(), 2, "what is over is forgotten");
    }
}
