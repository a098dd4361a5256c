//! Asynchronous calls of editions 2 and 3: one function starts a call, another waits for it.

use std::ffi::c_int;
use std::sync::Arc;

use super::batch::{asked, fill};
use super::checked::Call;
use super::guard::guard;
use super::handles::{Handle, find_call, give_call, take_call};
use super::places::Places;
use super::session::Session;
use super::staged::Staged;
use super::sys::{CallHandle, ClientHandle, Gradient, Parameter};
use pserver_client::CallNumber;

/// @brief Starts paddle_push_pull and returns while it goes on. Calls about one parameter are carried out in the
/// order of their starts, others overlap; parameters that were declared earlier go first.
///
/// The contents of grads and of dst are the library's until paddle_wait for this call, or the release of the client,
/// has returned: grads must stay as they are, and dst may not be touched. The arrays and the names are not used after
/// the start. Every dst[i].content is the caller's, not NULL. Of dst[i], name, element_type and content_len are set
/// now; the content is there after paddle_wait.
///
/// @param grads the gradients, as for paddle_push_pull.
/// @param dst a place for each gradient's parameter, as for paddle_get_params, also where it is to come as halves.
/// @param len the length of both arrays, at least 1.
/// @param out becomes the call, which paddle_wait frees.
/// @return 0 if the call is on its way, otherwise -1, and then nothing is started.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_push_pull_start(
    client: *mut ClientHandle,
    grads: *const Gradient,
    dst: *mut Parameter,
    len: c_int,
    out: *mut *mut CallHandle,
) -> c_int {
    guard("paddle_push_pull_start", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        call.aligned(out.cast_const(), "out")?;
        let mut staged = Staged::default();
        let given = staged.gradients(Call::lasting(), &session.client, &call.claims(grads, len, "grads")?)?;
        let names: Vec<&str> = given.iter().map(|one| one.name).collect();
        let wanted = staged.wanted(&session.client, call.array(dst.cast_const(), len, "dst")?)?;
        let places = Places::measure(&session.client, &asked(&wanted, &names)?, &given)?;
        let number = session.client.start_push_pull(&given, None, places.lent()?)?;
        let pointers = call.array(grads, len, "grads")?;
        fill(call, dst, pointers.iter().map(|gradient| gradient.name), places, &staged);
        call.write(out, give_started(&session, number, staged));
        Ok(0)
    })
}

/// @brief Waits until a call that was started is over, and frees it, whether it failed or not. Its deadline counts
/// from the start.
///
/// @return 0 if the call was successful, otherwise -1: also when it was waited for before, or when an earlier call
/// about one of its parameters failed. The same call may then be made again: no gradient is applied twice.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_wait(call: *mut CallHandle) -> c_int {
    guard("paddle_wait", -1, |_| {
        let (session, number) = take_call(call)?;
        let waited = session.client.wait(number);
        let staged = session.staged().remove(&number);
        waited.and_then(|()| staged.map_or(Ok(0), |mut staged| staged.store().map(|()| 0)))
    })
}

/// @brief Says whether a call that was started is over, without waiting for it. paddle_wait is needed still.
///
/// @param done becomes 1 if the call is over, well or not, otherwise 0.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_test(call: *mut CallHandle, done: *mut c_int) -> c_int {
    guard("paddle_test", -1, |now| {
        let (session, number) = find_call(call)?;
        now.aligned(done.cast_const(), "done")?;
        now.write(done, c_int::from(session.client.is_over(number)?));
        Ok(0)
    })
}

/// Gives a started call its handle, and keeps its contents on a device until the caller waits for it.
pub(super) fn give_started(session: &Arc<Session>, number: CallNumber, staged: Staged) -> *mut CallHandle {
    if !staged.is_empty() {
        session.staged().insert(number, staged);
    }
    give_call(session, number)
}
