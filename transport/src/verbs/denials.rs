//! Addresses at which verbs failed, where connections with a choice use TCP for a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long verbs are not tried again at first, at an address or for a connection over TCP (`network::upgrade`).
pub(crate) const RETRY_FIRST: Duration = Duration::from_secs(2);
/// How long they are not tried again at most.
const RETRY_LONGEST: Duration = Duration::from_secs(64);
/// An address without a failure for so long begins anew.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(128);

/// The time after a further failure.
pub(crate) fn longer(period: Duration) -> Duration {
    (2 * period).min(RETRY_LONGEST)
}

/// Failures by address; the entry without an address is for connections that this side accepts.
#[derive(Default)]
pub(super) struct Denials(BTreeMap<Option<String>, Denial>);

struct Denial {
    until: Instant,
    period: Duration,
    reason: String,
}

impl Denials {
    /// Denies verbs at an address, and returns for how long.
    pub(super) fn deny(&mut self, now: Instant, place: Option<String>, reason: &str) -> Duration {
        self.0.retain(|_, denial| now < denial.until + FORGOTTEN_AFTER);
        let period = match self.0.get(&place) {
            None => RETRY_FIRST,
            // Connections that were begun together fail together.
            Some(denial) if now < denial.until => denial.period,
            Some(denial) => longer(denial.period),
        };
        self.0.insert(place, Denial { until: now + period, period, reason: reason.to_owned() });
        period
    }

    /// The failure for which verbs are denied at an address.
    pub(super) fn reason(&self, now: Instant, place: Option<&str>) -> Option<&str> {
        let denial = self.0.get(&place.map(str::to_owned)).filter(|denial| now < denial.until)?;
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
        check(&denials, RETRY_FIRST, Some("a:1"), None);
        check(&denials, RETRY_FIRST, Some("b:1"), Some("no memory"));
        let later = RETRY_FIRST + second + FORGOTTEN_AFTER;
        denials.deny(began + later, None, "the card has failed");
        check(&denials, later, None, Some("the card has failed"));
        assert_eq!(denials.0.len(), 1, "what is over for long is forgotten");
    }

    #[test]
    fn the_delay_doubles_with_each_further_failure() {
        let (mut now, mut denials) = (Instant::now(), Denials::default());
        let mut fails = |now| denials.deny(now, None, "no answer").as_secs();
        for seconds in [2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(fails(now), seconds);
            assert_eq!(fails(now), seconds, "another connection of the same time");
            now += Duration::from_secs(seconds);
        }
        assert_eq!(fails(now + FORGOTTEN_AFTER), 2);
    }
}
