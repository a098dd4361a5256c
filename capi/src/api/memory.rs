//! Transfers without copies in editions 2 and 3: registered buffers for gradients, and views of parameters.

use std::ffi::{c_char, c_double, c_int, c_void};
use std::ptr;

use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;

use super::checked::{Call, at_least_one, element_type, long};
use super::guard::guard;
use super::handles::{Handle, find_view, give_view, take_view};
use super::staged::Staged;
use super::sys::{ClientHandle, ElementTypeNumber, NamedTensor, ViewHandle};
use super::tensors::{half, rate, refuse_ids};
use pserver_client::{Client, TransferPath, View};

/// @brief Allocates page-aligned, zeroed memory for gradients. A gradient in it at a multiple of 64 bytes that is sent
/// with paddle_push_pull, paddle_push_pull_start or paddle_transfer_view is read in place by servers of this machine
/// that are reached through shared memory. Everywhere else it is ordinary memory.
///
/// One buffer is for many gradients: of those beyond some 900 a server that is sent from all of them is sent copies.
///
/// It is the client's: a call of another client copies. A child of fork shares its pages, so only the parent writes.
///
/// @param bytes how many, at least 1.
/// @return the memory, which paddle_buffer_free frees, or the release of the client; NULL when there is none.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_buffer_alloc(client: *mut ClientHandle, bytes: usize) -> *mut c_void {
    guard("paddle_buffer_alloc", ptr::null_mut(), |_| {
        let session = Handle::of_pointer(client).find()?;
        let buffer = session.client.buffer(bytes)?;
        let start = buffer.start().cast::<c_void>();
        session.buffers().insert(start.addr(), buffer);
        Ok(start)
    })
}

/// @brief Frees what paddle_buffer_alloc gave. NULL is nothing to free.
///
/// It is refused while a call of this client is within it: one that another thread is inside, or one that was started
/// and not waited for, whether it reads from the buffer or writes to it. For a call of another client, or one that has
/// only just been entered, it is as with free(): the caller sees to it that none uses the memory.
///
/// @return 0 if successful, otherwise -1: when such a call uses it, when it is no buffer of this client, or when it was
/// freed already.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_buffer_free(client: *mut ClientHandle, buffer: *mut c_void) -> c_int {
    guard("paddle_buffer_free", -1, |_| {
        let session = Handle::of_pointer(client).find()?;
        if buffer.is_null() {
            return Ok(0);
        }
        let mut buffers = session.buffers();
        let found = buffers
            .remove(&buffer.addr())
            .ok_or_else(|| Failure::call(format!("{buffer:p} is no buffer of this client, or it was freed already")))?;
        session.client.free(found).map(|()| 0).map_err(|(found, failure)| {
            buffers.insert(buffer.addr(), found);
            failure
        })
    })
}

/// @brief Says that the caller will send from this memory, or fetch into it, again and again. Each transport uses that
/// as it can. Over verbs the network card reads gradients and writes values in place, without a copy; memory that the
/// card refuses (the limit of locked memory, pages that cannot be written) is copied, and so is memory that CUDA
/// manages. Over shared memory ordinary memory is still copied, since no other process can map it, and over TCP
/// nothing changes. So the call is always allowed.
///
/// The memory stays, mapped as it is, until paddle_unregister_buffer, which is refused while a call uses it, or the
/// release of the client. If memory is freed earlier, the card still uses its pages, which are no longer the program's:
/// gradients are stale and values are lost without an error. The same holds for memory that the parent writes after a
/// fork where the kernel (before 5.12) or libibverbs (before 35) does not copy a card's pages for the child; there the
/// child may also be without pages that such memory begins and ends in.
///
/// Memory of a CUDA device is recognised, if this process has loaded the driver, and from then on may stand wherever a
/// call takes a content: it is read before it is sent, and written after it was fetched, through as much pinned memory
/// of the host. Work queued on the device's default stream before the call is complete by then; the caller waits
/// for other streams. Such memory is in one call at a time. Without this call it is no content: reading it ends the
/// program.
///
/// @param memory the caller's memory, which stays until paddle_unregister_buffer or the release of the client.
/// @param bytes how many, at least 1.
/// @return 0 if successful, otherwise -1: when some of it is registered already, or lies in a buffer; when it is
/// neither the host's nor a device's, or not all of it is; or when the host has no pages for that of a device.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_register_buffer(client: *mut ClientHandle, memory: *mut c_void, bytes: usize) -> c_int {
    guard("paddle_register_buffer", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        call.aligned(memory.cast::<u8>().cast_const(), "memory")?;
        session.client.register(memory.expose_provenance(), bytes, None).map(|()| 0)
    })
}

/// @brief Says that memory of another device of this trainer is a replica of memory that paddle_register_buffer
/// registered. A gradient that is sent from that memory is then the sum of it and of its replicas, in the order in
/// which they were added, reckoned on its device: what the network moves and the servers add is one gradient, however
/// many devices the trainer has. Halves are summed in binary32 and rounded once. A value that is fetched into that
/// memory is written to all replicas too; a value that is sent (paddle_init_param) is the memory's own.
///
/// The first sum takes 4 MiB of the first device for each replica, and 12 MiB more, 64 MiB at most, which all memory of
/// that device shares. Work queued on the devices' default streams before a call is complete by then, and no copy
/// of the call is in flight when it returns. Gradients of rows cannot be summed so: the ids are not given.
///
/// @param memory where memory of a device begins that was registered.
/// @param replica memory of another device, as a rule, and as long. It stays until paddle_unregister_buffer(memory).
/// @param bytes how many.
/// @return 0 if successful, otherwise -1: when no memory of a device that begins there is registered, or a call uses it
/// that is not over; when the replica is not on a device, is not as long, or shares bytes with other memory that the
/// client knows; when it is the 64th.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_register_replica(
    client: *mut ClientHandle,
    memory: *mut c_void,
    replica: *mut c_void,
    bytes: usize,
) -> c_int {
    guard("paddle_register_replica", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        call.aligned(replica.cast::<u8>().cast_const(), "replica")?;
        session.client.register_replica(memory.addr(), replica.addr(), bytes).map(|()| 0)
    })
}

/// @brief Takes paddle_register_buffer back. Afterwards no network card reads or writes the memory, which may be freed.
///
/// @return 0 if successful, otherwise -1: when no memory that begins there is registered; when a call uses it that is
/// not over, or not waited for; or when a card does not let go of it, and then it must stay until the program ends.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_unregister_buffer(client: *mut ClientHandle, memory: *mut c_void) -> c_int {
    guard("paddle_unregister_buffer", -1, |_| {
        Handle::of_pointer(client).find()?.client.unregister(memory.addr()).map(|()| 0)
    })
}

/// @brief Says how a content at an address gets to a server of this machine through shared memory.
///
/// A buffer stops being read in place when a call failed while a server that was not reached any more may still have
/// read it: the caller may write it again at once, and it is copied from then on.
///
/// @return 1 if it is read where it is, 0 if it is copied, -1 if this client does not know the address.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_buffer_path(client: *mut ClientHandle, memory: *const c_void) -> c_int {
    guard("paddle_buffer_path", -1, |_| match Handle::of_pointer(client).find()?.client.path(memory.addr()) {
        Some(TransferPath::InPlace) => Ok(1),
        Some(TransferPath::Copied) => Ok(0),
        None => Err(Failure::call(format!("{memory:p} lies in no buffer and no registered memory of this client"))),
    })
}

/// @brief Fetches parameters without copying them, if the servers are reached through shared memory: the view has them
/// where the servers wrote them. Over TCP it is a copy, and everything else is the same.
///
/// A view does not change, whatever others send meanwhile. In mode sync a trainer's view is of the step that it sent
/// last. In other modes, and a reader's in any mode, it may have pieces of different updates. As long as there is one
/// of a parameter, this client does not fetch that parameter again.
///
/// @param names the names of the parameters, each once.
/// @param len how many, at least 1.
/// @param out becomes the view, which paddle_view_release frees, or the release of the client.
/// @return 0 if successful, otherwise -1: also when there is a view of one of the parameters.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_params_view(
    client: *mut ClientHandle,
    names: *mut *const c_char,
    len: c_int,
    out: *mut *mut ViewHandle,
) -> c_int {
    guard("paddle_get_params_view", -1, |call| {
        view(call, client, out, |client| client.pull_view(&call.names(names, at_least_one(len, "names")?)?))
    })
}

/// @brief paddle_get_params_view of values that come as halves: float32 parameters in half the bytes, rounded as
/// paddle_get_params does.
///
/// @param element_types the type of each value: the parameter's own type, or PADDLE_ELEMENT_TYPE_FLOAT16 or
/// PADDLE_ELEMENT_TYPE_BFLOAT16 of a float32 parameter.
/// @return as paddle_get_params_view: -1 also when a parameter cannot come in its type.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_params_view_as(
    client: *mut ClientHandle,
    names: *mut *const c_char,
    element_types: *const ElementTypeNumber,
    len: c_int,
    out: *mut *mut ViewHandle,
) -> c_int {
    guard("paddle_get_params_view_as", -1, |call| {
        view(call, client, out, |client| {
            let names = call.names(names, at_least_one(len, "names")?)?;
            let halves = halves(client, &names, call.array(element_types, len, "element_types")?)?;
            client.pull_view_as(&names.into_iter().zip(halves).collect::<Vec<_>>())
        })
    })
}

/// @brief Sends gradients of any length as paddle_transfer does, and fetches the same parameters, with these gradients
/// in them, as paddle_get_params_view does.
///
/// @param grads the gradients of dense parameters, as for paddle_transfer.
/// @param element_types the type of each fetched value, as for paddle_get_params_view_as; NULL for the parameters' own
/// types.
/// @param len how many gradients, at least 1.
/// @param learning_rate as for paddle_transfer.
/// @return the view of the gradients' parameters, in the same order, which paddle_view_release frees, or the release of
/// the client; otherwise NULL: also when there is a view of one of the parameters.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_transfer_view(
    client: *mut ClientHandle,
    grads: *const NamedTensor,
    element_types: *const ElementTypeNumber,
    len: usize,
    learning_rate: *const c_double,
) -> *mut ViewHandle {
    guard("paddle_transfer_view", ptr::null_mut(), |call| {
        let session = Handle::of_pointer(client).find()?;
        let claims = call.claims(grads, long(len), "grads")?;
        let rate = rate(call, grads, learning_rate)?;
        let mut staged = Staged::default();
        let given = staged.gradients(call, &session.client, &claims)?;
        claims.iter().zip(&given).try_for_each(|(claim, one)| refuse_ids(claim, one.name))?;
        let halves = if element_types.is_null() {
            vec![None; given.len()]
        } else {
            let names: Vec<&str> = given.iter().map(|one| one.name).collect();
            halves(&session.client, &names, call.array(element_types, long(len), "element_types")?)?
        };
        Ok(give_view(&session, session.client.push_pull_view_as(&given, rate, &halves)?))
    })
}

/// @brief How many pieces a parameter of a view has: servers keep it in several. In order they are the parameter.
///
/// @param index which parameter, from 0, in the order in which they were asked for.
/// @return the number of pieces, at least 1; otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_view_pieces(view: *const ViewHandle, index: c_int) -> c_int {
    guard("paddle_view_pieces", -1, |_| {
        let count = find_view(view, |view| parameter(view, index).map(|index| view.pieces(index).len()))?;
        c_int::try_from(count).map_err(|_| Failure::call(format!("there are {count} pieces, which no int holds")))
    })
}

/// @brief Where a piece of a parameter is.
///
/// @param index which parameter, from 0.
/// @param piece which of its pieces, from 0.
/// @param content becomes the address of its first element; it is read-only, and valid until the view is released.
/// @param bytes becomes its length.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_view_piece(
    view: *const ViewHandle,
    index: c_int,
    piece: c_int,
    content: *mut *const c_void,
    bytes: *mut usize,
) -> c_int {
    guard("paddle_view_piece", -1, |call| {
        call.aligned(content.cast_const(), "content")?;
        call.aligned(bytes.cast_const(), "bytes")?;
        let (start, length) = find_view(view, |view| {
            let mut pieces = view.pieces(parameter(view, index)?);
            let count = pieces.len();
            let found = usize::try_from(piece).ok().and_then(|piece| pieces.nth(piece));
            let found = found.ok_or_else(|| Failure::call(format!("piece {piece}; expected one of {count} from 0")))?;
            Ok((found.as_ptr(), found.len()))
        })?;
        call.write(content, start.cast());
        call.write(bytes, length);
        Ok(0)
    })
}

/// @brief Releases a view: the program reads none of its pieces any more. The servers get their memory back.
///
/// @return 0 if successful, otherwise -1: when it was released already, and when the connection to a server ended while
/// the view was held, so that the values that were read of it may be of a later version. It is released in any case.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_view_release(view: *mut ViewHandle) -> c_int {
    guard("paddle_view_release", -1, |_| take_view(view)?.release().map(|()| 0))
}

/// Gives the caller the view that `fetch` fetches.
fn view(
    call: &Call,
    client: *mut ClientHandle,
    out: *mut *mut ViewHandle,
    fetch: impl FnOnce(&Client) -> Result<View, Failure>,
) -> Result<c_int, Failure> {
    let session = Handle::of_pointer(client).find()?;
    call.aligned(out.cast_const(), "out")?;
    let view = fetch(&session.client)?;
    call.write(out, give_view(&session, view));
    Ok(0)
}

/// The half-precision type in which values are returned, if it is not the parameter's own type.
fn halves(client: &Client, names: &[&str], numbers: &[ElementTypeNumber]) -> Result<Vec<Option<Half>>, Failure> {
    let half = |((name, number), (declared, _)): ((&&str, &ElementTypeNumber), (ElementType, u64))| {
        half(name, element_type(*number, name)?, declared)
    };
    names.iter().zip(numbers).zip(client.measure(names)?).map(half).collect()
}

fn parameter(view: &View, index: c_int) -> Result<usize, Failure> {
    let count = view.len();
    let found = usize::try_from(index).ok().filter(|index| *index < count);
    found.ok_or_else(|| Failure::call(format!("parameter {index} of the view; expected one of {count} from 0")))
}
