//! Texts for the completion status of failed work requests.

use std::fmt;

/// The status of a failed work request, as libibverbs numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompletionStatus(pub(crate) u32);

/// By status: libibverbs' name, and the meaning here.
const TEXTS: [(&str, &str); 24] = [
    ("success", "nothing failed"),
    ("local length error", "a message is longer than the room that was made for it"),
    ("local queue pair operation error", "the queue pair does not allow the work request"),
    ("local end-to-end context error", "the end-to-end context is not valid"),
    ("local protection error", "memory of this side is not registered for the operation"),
    ("work request flushed", "the queue pair had failed before"),
    ("memory window bind error", "a memory window cannot be bound"),
    ("bad response", "the other side's card sent an unexpected response"),
    ("local access error", "the other side wrote with a number to memory that it may not write"),
    ("remote invalid request", "the other side's card does not accept the request"),
    ("remote access error", "the other side named memory that is not registered for this connection"),
    ("remote operation error", "the other side's card could not finish the request"),
    ("transport retry counter exceeded", "the other side's card does not answer"),
    ("receiver-not-ready retry counter exceeded", "the other side posted no receive for the message"),
    ("local reliable-datagram domain error", "the reliable-datagram domain is not valid"),
    ("remote invalid reliable-datagram request", "the reliable-datagram request is not valid"),
    ("remote aborted", "the other side's card aborted the request"),
    ("invalid end-to-end context number", "the end-to-end context number is not valid"),
    ("invalid end-to-end context state", "the end-to-end context is in a state without it"),
    ("fatal error", "the card has failed"),
    ("response timeout", "the answer did not come in time"),
    ("general error", "the card gives no cause"),
    ("tag matching error", "a tag does not match"),
    ("tag matching rendezvous incomplete", "a tagged message did not arrive whole"),
];

impl CompletionStatus {
    pub(crate) const LOCAL_LENGTH: Self = Self(1);
    pub(crate) const LOCAL_PROTECTION: Self = Self(4);
    pub(crate) const FLUSHED: Self = Self(5);
    pub(crate) const REMOTE_REQUEST: Self = Self(9);
    pub(crate) const REMOTE_ACCESS: Self = Self(10);
    pub(crate) const NO_ANSWER: Self = Self(12);
    pub(crate) const RECEIVER_NOT_READY: Self = Self(13);

    /// Whether the peer violated the protocol.
    pub(crate) fn is_peers_fault(self) -> bool {
        matches!(self, Self::REMOTE_ACCESS | Self::REMOTE_REQUEST | Self::LOCAL_LENGTH | Self::RECEIVER_NOT_READY)
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = usize::try_from(self.0).ok().and_then(|number| TEXTS.get(number));
        match text {
            Some((name, meaning)) => write!(formatter, "{name} ({}): {meaning}", self.0),
            None => write!(formatter, "completion status {}, which libibverbs 55 does not have", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CompletionStatus, TEXTS};

    #[test]
    fn every_status_has_a_text_of_its_own() {
        let texts: std::collections::BTreeSet<_> = (0..25).map(|number| CompletionStatus(number).to_string()).collect();
        assert_eq!(texts.len(), TEXTS.len() + 1, "no two are the same");
        assert!(texts.iter().all(|text| text.contains(": ") || text.contains("does not have")));
        assert_eq!(
            CompletionStatus(10).to_string(),
            "remote access error (10): the other side named memory that is not registered for this connection"
        );
        assert_eq!(CompletionStatus(24).to_string(), "completion status 24, which libibverbs 55 does not have");
    }
}
