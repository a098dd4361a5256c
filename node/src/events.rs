//! The last events of this process's log, for the status of a server.
//!
//! The program's subscriber adds them ([`note`]); a process without one has none.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Events that are kept.
const KEPT: usize = 50;
/// Characters of an event that are kept.
const CHARACTERS_MAX: usize = 300;

static RECENT: Mutex<VecDeque<LogEvent>> = Mutex::new(VecDeque::new());

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogEvent {
    /// Its time, since 1970.
    pub unix_seconds: f64,
    /// `ERROR`, `WARN` or `INFO`.
    pub level: String,
    /// Its text, perhaps shortened.
    pub text: String,
}

/// Adds an event.
pub fn note(level: &str, text: &str) {
    let text = text.chars().take(CHARACTERS_MAX).collect();
    let event = LogEvent { unix_seconds: unix_seconds(SystemTime::now()), level: level.to_owned(), text };
    let mut recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    if recent.len() == KEPT {
        recent.pop_front();
    }
    recent.push_back(event);
}

/// The last events, the newest last.
#[must_use]
pub fn recent() -> Vec<LogEvent> {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}

/// Seconds since 1970.
pub(crate) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_events_are_kept_and_shortened() {
        let long = "x".repeat(1000);
        (0..60).for_each(|number| note("INFO", &format!("{number} {long}")));
        let recent = recent();
        assert_eq!(recent.len(), KEPT);
        assert!(recent[0].text.starts_with("10 ") && recent[KEPT - 1].text.starts_with("59 "));
        assert!(recent.iter().all(|event| event.text.chars().count() == CHARACTERS_MAX));
    }
}
