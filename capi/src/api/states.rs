//! The list of a job's parameters, and the optimizer's state of each, of editions 2 and 3.

use std::ffi::{CString, c_char, c_int};

use pserver_core::error::Failure;

use super::allocation::Allocation;
use super::checked::{Call, long};
use super::guard::guard;
use super::handles::Handle;
use super::staged::Staged;
use super::sys::{ClientHandle, NamedTensor, ParameterListing};
use super::tensors::whole;
use pserver_client::{ListedParameter, StateSlice, StateTensor};

/// @brief Lists the parameters of the job in the order of their declaration. It waits until they are initialised.
///
/// @param params becomes an array, which paddle_free frees with all that it points to.
/// @param len becomes its length, which may be 0.
/// @return 0 if successful, otherwise -1. Versions are asked for one after the other, so they need not be of one
/// moment.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_list_params(
    client: *mut ClientHandle,
    params: *mut *mut ParameterListing,
    len: *mut usize,
) -> c_int {
    guard("paddle_list_params", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        call.aligned(params.cast_const(), "params")?;
        call.aligned(len.cast_const(), "len")?;
        let listed = session.client.parameters()?;
        give(call, listed, (params, len), listing)
    })
}

/// @brief Fetches the optimizer's state of a dense parameter, all of it after the same updates. In sync mode it has
/// every gradient in it that this trainer has sent.
///
/// @param name the parameter's name.
/// @param states becomes an array of the tensors that its optimizer keeps, each with its name in the update rule, the
/// parameter's type and the parameter's length. paddle_free frees it with all that it points to.
/// @param len becomes its length: 0 where the optimizer keeps none.
/// @param updates becomes the number of updates that the state has seen; the learning rate's schedule, and Adam's
/// correction of its means, go on from there.
/// @return 0 if successful, otherwise -1: also when other trainers' gradients change the state all the time.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_state(
    client: *mut ClientHandle,
    name: *const c_char,
    states: *mut *mut NamedTensor,
    len: *mut usize,
    updates: *mut u64,
) -> c_int {
    guard("paddle_get_state", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        call.aligned(states.cast_const(), "states")?;
        call.aligned(len.cast_const(), "len")?;
        call.aligned(updates.cast_const(), "updates")?;
        let state = session.client.optimizer_state(name)?;
        let number = c_int::from(state.element_type.number());
        give(call, state.tensors, (states, len), |kept, StateTensor { name, content }| {
            let name = kept.keep(text(name)?);
            let content_len = content.len();
            let content = kept.keep(Allocation::of(&content)?);
            Ok(NamedTensor { name, element_type: number, content, content_len, ids: std::ptr::null(), ids_len: 0 })
        })?;
        call.write(updates, state.updates);
        Ok(0)
    })
}

/// @brief Replaces the optimizer's state of a dense parameter, whose value stays. The other trainers should wait
/// meanwhile.
///
/// @param name the parameter's name.
/// @param states every tensor that its optimizer keeps, as paddle_get_state gives them, in any order.
/// @param len how many; 0 where the optimizer keeps none.
/// @param updates the number of updates that they have seen.
/// @return 0 if successful, otherwise -1. A wrong state changes nothing; a call that failed for another reason than
/// PADDLE_ERROR_REFUSED may be made again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_set_state(
    client: *mut ClientHandle,
    name: *const c_char,
    states: *const NamedTensor,
    len: usize,
    updates: u64,
) -> c_int {
    guard("paddle_set_state", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        let expected = session.client.describe(name)?.element_type;
        let mut staged = Staged::default();
        let claims = call.array(states, long(len), "states")?.iter().enumerate();
        let state = |(index, claim): (usize, &NamedTensor)| {
            let given = whole(call, &session.client, *claim, &format!("states[{index}]"), &mut staged)?;
            let (of, found) = (given.name, given.element_type);
            if found == expected {
                return Ok(StateSlice { name: of, content: given.content });
            }
            Err(Failure::call(format!("parameter \"{name}\": state \"{of}\" of {found}; expected {expected}")))
        };
        let slices = claims.map(state).collect::<Result<Vec<_>, _>>()?;
        session.client.set_optimizer_state(name, &slices, updates).map(|()| 0)
    })
}

/// Gives the caller an array with what `made` makes of each, and all that its elements point to.
fn give<T, C: Copy>(
    call: &Call,
    all: Vec<T>,
    (out, len): (*mut *mut C, *mut usize),
    made: impl Fn(&mut Allocation, T) -> Result<C, Failure>,
) -> Result<c_int, Failure> {
    let mut parts = Allocation::zeroed(1)?;
    let array = all.into_iter().map(|one| made(&mut parts, one)).collect::<Result<Vec<C>, _>>()?;
    let mut given = Allocation::of(&array)?;
    given.keep::<u8>(parts);
    call.write(out, given.give().cast());
    call.write(len, array.len());
    Ok(0)
}

fn listing(kept: &mut Allocation, one: ListedParameter) -> Result<ParameterListing, Failure> {
    Ok(ParameterListing {
        name: kept.keep(text(one.name)?),
        element_type: c_int::from(one.facts.element_type.number()),
        is_sparse: c_int::from(one.facts.is_sparse),
        content_len: one.facts.bytes,
        shape: kept.keep(Allocation::of(&one.facts.shape)?),
        dimensions: one.facts.shape.len(),
        version: one.version.0,
    })
}

/// A text with a NUL.
fn text(text: String) -> Result<Allocation, Failure> {
    Allocation::of(CString::new(text).expect("a name has no NUL").as_bytes_with_nul())
}
