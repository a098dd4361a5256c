//! The lists of a job's parameters and rows, and the optimizer's state of both, of editions 2 and 3.

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::allocation::Allocation;
use super::checked::{self, Call, long};
use super::guard::guard;
use super::handles::Handle;
use super::rows::rows_to_set;
use super::staged::Staged;
use super::sys::{ClientHandle, NamedTensor, ParameterListing, RateChange, StateArrays};
use pserver_client::{ListedParameter, StateSlice, StateTensor, TableProgress};

/// The learning rate of a change back to the configured one.
const CONFIGURED_RATE: f64 = -1.0;

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

/// @brief Lists the ids of a table's rows that somebody has sent a gradient for, ascending.
///
/// @param ids becomes an array, which paddle_free frees.
/// @param len becomes its length, which may be 0.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_list_rows(
    client: *mut ClientHandle,
    name: *const c_char,
    ids: *mut *mut u64,
    len: *mut usize,
) -> c_int {
    guard("paddle_list_rows", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        call.aligned(ids.cast_const(), "ids")?;
        call.aligned(len.cast_const(), "len")?;
        let listed = session.client.list_rows(name)?;
        give(call, listed, (ids, len), |_, id| Ok(id))
    })
}

/// @brief Fetches the optimizer's state of a dense parameter, or of rows, all of it after the same updates. In sync
/// mode it has every gradient in it that this trainer has sent. A table that is larger than the memory goes out by
/// parts of paddle_list_rows; parts with equal updates belong together.
///
/// @param name the parameter's name.
/// @param ids which rows of a table; NULL for a dense parameter.
/// @param ids_len how many ids there are.
/// @return the state, which paddle_free frees with all that it points to. Otherwise NULL: also when other trainers'
/// gradients change it all the time.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_state(
    client: *mut ClientHandle,
    name: *const c_char,
    ids: *const u64,
    ids_len: usize,
) -> *mut StateArrays {
    guard("paddle_get_state", ptr::null_mut(), |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        let ids = call.array(ids, long(ids_len), "ids")?;
        if session.client.describe(name)?.is_sparse {
            let state = session.client.row_states(name, ids)?;
            return given(state.tensors, state.element_type, ids, &state.progress);
        }
        if !ids.is_empty() {
            let count = ids.len();
            return Err(Failure::call(format!(
                "parameter \"{name}\": {count} ids; expected none, as it is not sparse"
            )));
        }
        let state = session.client.optimizer_state(name)?;
        given(state.tensors, state.element_type, ids, &TableProgress { updates: state.updates, rates: Vec::new() })
    })
}

/// @brief Replaces the optimizer's state of a dense parameter, or of rows; values stay, and so do other rows. The
/// other trainers should wait meanwhile.
///
/// @param name the parameter's name.
/// @param state the state: every tensor that the optimizer keeps, in any order.
/// @param is_last 1; or 0 for a part of a table's rows that others follow: with the last one the updates and the rates
/// are set.
/// @return 0 if successful, otherwise -1. A wrong state changes nothing; a call that failed for another reason than
/// PADDLE_ERROR_REFUSED may be made again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_set_state(
    client: *mut ClientHandle,
    name: *const c_char,
    state: *const StateArrays,
    is_last: c_int,
) -> c_int {
    guard("paddle_set_state", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        let state = call.array(state, 1, "state")?[0];
        let facts = session.client.describe(name)?;
        let (mut staged, mut ids, mut slices) = (Staged::default(), None, Vec::new());
        let tensors = call.array(state.tensors, long(state.tensors_len), "tensors")?;
        for (index, claim) in tensors.iter().enumerate() {
            let given = rows_to_set(call, &session.client, (*claim).into(), &format!("tensors[{index}]"), &mut staged)?;
            let (of, found, expected) = (given.name, given.element_type, facts.element_type);
            let refuse = |text: String| Err(Failure::call(format!("parameter \"{name}\": state \"{of}\" {text}")));
            if found != expected {
                return refuse(format!("of {found}; expected {expected}"));
            }
            if ids.is_some_and(|ids| ids != given.ids) || !(facts.is_sparse || given.ids.is_empty()) {
                return refuse(format!("with {} ids; expected those of the first state, of a table", given.ids.len()));
            }
            ids = Some(given.ids);
            slices.push(StateSlice { name: of, content: given.values });
        }
        let progress = TableProgress { updates: state.updates, rates: rates(call, &state)? };
        if facts.is_sparse {
            let progress = (is_last != 0).then_some(&progress);
            return session.client.set_row_states(name, ids.unwrap_or_default(), &slices, progress).map(|()| 0);
        }
        if is_last == 0 || !progress.rates.is_empty() {
            let text = "expected is_last 1 and no rates, as it is not sparse";
            return Err(Failure::call(format!("parameter \"{name}\": a part of a table's state; {text}")));
        }
        session.client.set_optimizer_state(name, &slices, progress.updates).map(|()| 0)
    })
}

/// An optimizer state in memory that becomes the caller's.
fn given(
    tensors: Vec<StateTensor>,
    element_type: ElementType,
    ids: &[u64],
    progress: &TableProgress,
) -> Result<*mut StateArrays, Failure> {
    let mut kept = Allocation::zeroed(1)?;
    let tensors_len = tensors.len();
    let ids_len = ids.len();
    let ids: *const u64 = if ids.is_empty() { ptr::null() } else { kept.keep(Allocation::of(ids)?) };
    let element_type = c_int::from(element_type.number());
    let tensor = |StateTensor { name, content }| {
        let (name, content_len) = (kept.keep(text(name)?), content.len());
        let content = kept.keep(Allocation::of(&content)?);
        Ok(NamedTensor { name, element_type, content, content_len, ids, ids_len })
    };
    let tensors = tensors.into_iter().map(tensor).collect::<Result<Vec<_>, Failure>>()?;
    let change = |(update, rate): &(u64, Option<f64>)| RateChange {
        update: *update,
        learning_rate: rate.unwrap_or(CONFIGURED_RATE),
    };
    let rates: Vec<RateChange> = progress.rates.iter().map(change).collect();
    let state = StateArrays {
        tensors: kept.keep(Allocation::of(&tensors)?),
        tensors_len,
        updates: progress.updates,
        rates: kept.keep(Allocation::of(&rates)?),
        rates_len: rates.len(),
    };
    let mut state = Allocation::of(&[state])?;
    state.keep::<u8>(kept);
    Ok(state.give().cast())
}

/// The changes of the learning rate that the caller gives.
fn rates(call: &Call, state: &StateArrays) -> Result<Vec<(u64, Option<f64>)>, Failure> {
    let changes = call.array(state.rates, long(state.rates_len), "rates")?;
    let rate = |change: &RateChange| {
        let is_configured = change.learning_rate < 0.0;
        let rate = if is_configured { None } else { Some(checked::rate(change.learning_rate)?) };
        Ok((change.update, rate))
    };
    changes.iter().map(rate).collect()
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
