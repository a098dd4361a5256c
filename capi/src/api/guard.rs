//! Boundary to C: failures and panics of a call become a status, a code and a text of the thread.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pserver_core::error::{CallEnd, Failure};

use super::checked::Call;
use pserver_client::{CallScope, reason};

thread_local! {
    /// The text of this thread's last failure.
    static LAST: RefCell<CString> = RefCell::default();
    /// The code of this thread's last failure.
    static LAST_CODE: Cell<c_int> = const { Cell::new(0) };
}

/// The code of a call that panicked.
const INTERNAL: c_int = 7;

/// Runs the body of the C function `called`. When it fails or panics, keeps the text and returns `on_failure`.
pub(super) fn guard<T>(called: &str, on_failure: T, body: impl FnOnce(&Call) -> Result<T, Failure>) -> T {
    let _call = CallScope::begin();
    // A client whose call panicked is still whole: its locks ignore poison.
    let (code, text) = match catch_unwind(AssertUnwindSafe(|| body(&Call::begin()))) {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => (code_of(&failure.end()), format!("{called}: {failure}")),
        Err(panic) => {
            let reason = reason(panic.as_ref());
            (INTERNAL, format!("{called}: a bug in libpaddle_pserver, please report it: {reason}"))
        }
    };
    note(code, &text);
    on_failure
}

/// The text of this thread's last failure, which stays valid until the next failure of the thread.
pub(super) fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The code of this thread's last failure; 0 before the first failure.
pub(super) fn last_code() -> c_int {
    LAST_CODE.try_with(Cell::get).unwrap_or(0)
}

/// The code of an end, as `paddle_pserver.h` has it.
fn code_of(end: &CallEnd) -> c_int {
    match end {
        CallEnd::Refused => 1,
        CallEnd::NotInitialised => 2,
        CallEnd::Timeout => 3,
        CallEnd::MissingTrainers(_) => 4,
        CallEnd::ServerLost => 5,
        CallEnd::Cancelled => 6,
    }
}

fn note(code: c_int, text: &str) {
    // The thread-local storage of a thread that is ending is gone, so the text is dropped.
    let _ = LAST_CODE.try_with(|last| last.set(code));
    let printable: Vec<u8> = text.bytes().map(|byte| if byte == 0 { b'?' } else { byte }).collect();
    let text = CString::new(printable).unwrap_or_default();
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// The meaning of a status, without the reason.
pub(super) fn meaning(status: i32) -> &'static CStr {
    match status {
        0 => c"success",
        1 => c"this trainer was chosen to initialise the parameters",
        -1 => c"failure; paddle_last_error says why",
        _ => c"no status of this library",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: impl FnOnce(&Call) -> Result<i32, Failure>, status: i32, code: i32, text: &str) {
        assert_eq!((guard("paddle_test", -1, body), last_code()), (status, code));
        // SAFETY: the text was made by `note` and this thread makes no other before the assertion is over.
        let last = unsafe { CStr::from_ptr(last()) };
        assert_eq!(last.to_str(), Ok(text));
    }

    #[test]
    fn failures_and_panics_become_a_status_and_a_text() {
        check(|_| Ok(1), 1, 0, "");
        check(|_| Err(Failure::call("no")), -1, 1, "paddle_test: no");
        check(|_| Ok(0), 0, 1, "paddle_test: no");
        check(|_| Err(Failure::ended(CallEnd::Timeout, "a\0b")), -1, 3, "paddle_test: a?b");
        check(|_| Err(Failure::ended(CallEnd::MissingTrainers(vec![1]), "b")), -1, 4, "paddle_test: b");
        check(
            |_| panic!("at the disco"),
            -1,
            7,
            "paddle_test: a bug in libpaddle_pserver, please report it: at the disco",
        );
        check(|_| panic!("{}", 7), -1, 7, "paddle_test: a bug in libpaddle_pserver, please report it: 7");
    }
}
