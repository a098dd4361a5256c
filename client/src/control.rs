//! Answers to control requests.

use prost::Message;
use pserver_core::error::Failure;
use pserver_core::wire::ControlAnswer;
use pserver_core::wire::answer::Answer;

/// The coordinator's answer in a control frame.
///
/// # Errors
///
/// The control frame is no answer.
pub fn answer(control: &[u8]) -> Result<Answer, Failure> {
    let answer = ControlAnswer::decode(control)
        .map_err(|error| Failure::call(format!("the coordinator's answer does not parse: {error}")))?;
    answer.answer.ok_or_else(|| Failure::call("the coordinator's answer is empty"))
}

/// The error of an answer that the request does not have.
#[must_use]
pub fn unexpected(answer: &Answer) -> Failure {
    Failure::call(format!("the coordinator's answer does not belong to the request: {answer:?}"))
}
