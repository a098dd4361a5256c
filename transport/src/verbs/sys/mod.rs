//! libibverbs as C sees it: [`Verbs`] has the exported functions, and here are those that C has in its headers.
//!
//! Not here: any check. `bindings.rs` is generated (`cargo ci verbs-bindings`) and holds the layouts to what the
//! headers of rdma-core 44 say, which later versions keep.

use std::ffi::c_int;
use std::ptr;

mod bindings;

pub(crate) use bindings::*;

/// Returned where the provider lacks a function, and C would call a null pointer.
const NOT_SUPPORTED: c_int = 95;

/// Hands a list of work, linked by `next`, to a queue pair; 0, or an error number and the first that was not taken.
///
/// # Safety
/// `queue_pair` is open; what `work` and its scatter entries point to is valid for the call, and a buffer that is not
/// inline stays so until its completion was polled.
pub(crate) unsafe fn post_send(queue_pair: *mut ibv_qp, work: *mut ibv_send_wr) -> (c_int, *mut ibv_send_wr) {
    // SAFETY: the caller vouches for the queue pair, whose context lives as long as it does.
    let context = unsafe { (*queue_pair).context };
    let mut refused = ptr::null_mut();
    // SAFETY: the context of an open queue pair is an open device's.
    let Some(post) = (unsafe { (*context).ops.post_send }) else { return (NOT_SUPPORTED, work) };
    // SAFETY: the caller vouches for the work; `refused` outlives the call.
    let error = unsafe { post(queue_pair, work, &mut refused) };
    (error, refused)
}

/// Hands a list of buffers to a queue pair, which has no shared receive queue; as [`post_send`].
///
/// # Safety
/// As [`post_send`].
pub(crate) unsafe fn post_recv(queue_pair: *mut ibv_qp, work: *mut ibv_recv_wr) -> (c_int, *mut ibv_recv_wr) {
    // SAFETY: the caller vouches for the queue pair, whose context lives as long as it does.
    let context = unsafe { (*queue_pair).context };
    let mut refused = ptr::null_mut();
    // SAFETY: the context of an open queue pair is an open device's.
    let Some(post) = (unsafe { (*context).ops.post_recv }) else { return (NOT_SUPPORTED, work) };
    // SAFETY: the caller vouches for the work; `refused` outlives the call.
    let error = unsafe { post(queue_pair, work, &mut refused) };
    (error, refused)
}

/// Takes up to `done.len()` completions; how many there were, or a negative number when the queue is lost.
///
/// # Safety
/// `queue` is open.
pub(crate) unsafe fn poll_cq(queue: *mut ibv_cq, done: &mut [ibv_wc]) -> c_int {
    // SAFETY: the caller vouches for the queue, whose context lives as long as it does.
    let context = unsafe { (*queue).context };
    // SAFETY: the context of an open queue is an open device's.
    let Some(poll) = (unsafe { (*context).ops.poll_cq }) else { return -NOT_SUPPORTED };
    let room = c_int::try_from(done.len()).unwrap_or(c_int::MAX);
    // SAFETY: at least `room` completions fit into `done`.
    unsafe { poll(queue, room, done.as_mut_ptr()) }
}

/// Asks for one event on the queue's channel when the next completion arrives; 0, or an error number.
///
/// # Safety
/// `queue` is open.
pub(crate) unsafe fn req_notify_cq(queue: *mut ibv_cq, only_solicited: bool) -> c_int {
    // SAFETY: the caller vouches for the queue, whose context lives as long as it does.
    let context = unsafe { (*queue).context };
    // SAFETY: the context of an open queue is an open device's.
    let Some(request) = (unsafe { (*context).ops.req_notify_cq }) else { return NOT_SUPPORTED };
    // SAFETY: the caller vouches for the queue.
    unsafe { request(queue, c_int::from(only_solicited)) }
}
