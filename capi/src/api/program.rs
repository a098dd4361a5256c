//! Programs that a client trains, in all editions of `paddle_pserver.h`.

use std::ffi::{c_char, c_double, c_int};
use std::ptr;
use std::sync::{MutexGuard, PoisonError};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::Tensor;

use super::allocation::Allocation;
use super::checked::{Call, Room, TensorClaim, element_type, long};
use super::guard::guard;
use super::handles::{Handle, find_program, give_program, take_program};
use super::loaded::LoadedProgram;
use super::sys::{ClientHandle, NamedTensor, ProgramHandle};
use super::tensors::refuse_ids;

/// @brief Loads a program (docs/PROGRAMS.md), adds its gradients and its optimizer, divides it among the trainers and
/// the servers of the client's job in mode sync, and initialises the parameters if no other trainer does. Every trainer
/// of the job loads the same program with the same arguments.
///
/// @param program the text, or without a brace in it the path of a file with the text, or with protobuf.
/// @param loss the name of the loss, a scalar; NULL means "loss".
/// @param config the optimizer, in the text forms of paddle_begin_init_params; NULL for a program that has its own.
/// @param batch rows of a step of all trainers together, at least 1: by them the placement on servers is estimated.
/// @return the program, which paddle_program_release frees, or the release of the client; otherwise NULL.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_load(
    client: *mut ClientHandle,
    program: *const c_char,
    loss: *const c_char,
    config: *const c_char,
    batch: c_int,
) -> *mut ProgramHandle {
    guard("paddle_program_load", ptr::null_mut(), |call| {
        let session = Handle::of_pointer(client).find()?;
        let text = call.program(program)?;
        let loss = if loss.is_null() { "loss" } else { call.name(loss, "loss")? };
        let config = call.settings_text(config)?;
        let rows = usize::try_from(batch).ok().filter(|rows| *rows > 0);
        let rows = rows.ok_or_else(|| Failure::call(format!("batch: {batch} rows; expected at least 1")))?;
        let loaded = LoadedProgram::load(&session.client, text, (loss, config), rows)?;
        Ok(give_program(&session, loaded))
    })
}

/// @brief The number of steps that the job had when the program was loaded: 0 for a new job. A trainer that takes the
/// place of a killed one goes on with the step after them.
///
/// @return the number, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_steps_before(program: *const ProgramHandle) -> i64 {
    guard("paddle_program_steps_before", -1, |_| {
        with(program, |program| Ok(i64::try_from(program.steps_before()).unwrap_or(i64::MAX)))
    })
}

/// @brief Sets data for the next step. Data that is not set again keeps its value.
///
/// @param data of each its name, its type, which is the declared one, and its content in host memory: whole rows of
/// this trainer's part of the batch, without ids. The caller's memory is not used after the call.
/// @param len how many, at least 1.
/// @return 0 if successful, otherwise -1, and then nothing is set: also when the last step has failed and is to be
/// repeated.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_feed(program: *mut ProgramHandle, data: *const NamedTensor, len: usize) -> c_int {
    guard("paddle_program_feed", -1, |call| {
        with(program, |program| {
            let claims = call.claims(data, long(len), "data")?.into_iter().enumerate();
            let given = claims.map(|(index, claim)| {
                let one = call.parameter(&claim, &format!("data[{index}]"))?;
                refuse_ids(&claim, one.name).map(|()| one)
            });
            program.feed(&given.collect::<Result<Vec<_>, _>>()?).map(|()| 0)
        })
    })
}

/// @brief One step: receives the parameters, computes the loss and the gradients of the data, and sends the gradients.
/// It returns when the servers have them; in mode sync they wait for every trainer's.
///
/// @return 0 if successful, otherwise -1. The same step may then be made again: no gradient is applied twice.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_step(program: *mut ProgramHandle) -> c_int {
    guard("paddle_program_step", -1, |_| with(program, |program| program.step().map(|()| 0)))
}

/// @brief Reads a scalar of the last step, such as the loss, on this trainer's part of the batch.
///
/// @param value becomes the scalar.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_value(
    program: *mut ProgramHandle,
    name: *const c_char,
    value: *mut c_double,
) -> c_int {
    guard("paddle_program_value", -1, |call| {
        with(program, |program| {
            let name = call.name(name, "name")?;
            call.aligned(value.cast_const(), "value")?;
            call.write(value, program.scalar(name)?);
            Ok(0)
        })
    })
}

/// @brief Fetches a parameter whole, as the servers have it after the last step, or another variable as this trainer
/// has computed it.
///
/// @param dst its name and its place in host memory, without ids: element_type and content_len are exactly the
/// variable's, and nothing but the content is written. With content NULL the library allocates: on success
/// element_type, content and content_len are set, and paddle_free frees content.
/// @return 0 if successful, otherwise -1, and then nothing is written.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_fetch(program: *mut ProgramHandle, dst: *mut NamedTensor) -> c_int {
    guard("paddle_program_fetch", -1, |call| {
        let given = call.array(dst.cast_const(), 1, "dst")?[0];
        let claim = TensorClaim::from(given);
        let name = call.name(claim.name, "dst.name")?;
        refuse_ids(&claim, name)?;
        let room = match Room::of(claim.content, claim.content_len, name)? {
            Some(room) => Some((room, element_type(claim.element_type, name)?)),
            None => None,
        };
        let tensor = with(program, |program| program.value(name))?;
        match room {
            Some((room, found)) => fill(&tensor, name, room, found)?,
            None => call.write(dst, allocated(&tensor, given)?),
        }
        Ok(0)
    })
}

/// @brief Saves all parameters as one safetensors file of this machine, whole or not at all.
///
/// @param path the file, which ends in .safetensors.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_save(program: *mut ProgramHandle, path: *const c_char) -> c_int {
    guard("paddle_program_save", -1, |call| with(program, |program| program.save(call.path(path)?).map(|()| 0)))
}

/// @brief Releases a program; the parameters stay on the servers. NULL is nothing to release.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_program_release(program: *mut ProgramHandle) {
    if program.is_null() {
        return;
    }
    guard("paddle_program_release", (), |_: &Call| take_program(program));
}

/// Runs the body on the program of a handle. Calls on one program are serialised.
fn with<T>(
    program: *const ProgramHandle,
    body: impl FnOnce(&mut LoadedProgram) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let found = find_program(program)?;
    let mut program: MutexGuard<'_, LoadedProgram> = found.lock().unwrap_or_else(PoisonError::into_inner);
    body(&mut program)
}

/// Writes a value to the caller's buffer, which has the type and the length of the value.
fn fill(tensor: &Tensor, name: &str, mut room: Room, found: ElementType) -> Result<(), Failure> {
    let (bytes, expected) = (tensor.bytes(), tensor.elements().element_type());
    if (found, room.bytes) != (expected, bytes.len()) {
        let (given, needed) = (room.bytes, bytes.len());
        return Err(Failure::call(format!(
            "{name:?}: a destination of {given} bytes of {found}; expected {needed} bytes of {expected}"
        )));
    }
    room.bytes_mut(bytes.len()).copy_from_slice(bytes);
    Ok(())
}

/// The caller's description of a value, with its content in memory that becomes the caller's.
fn allocated(tensor: &Tensor, given: NamedTensor) -> Result<NamedTensor, Failure> {
    let (bytes, element_type) = (tensor.bytes(), c_int::from(tensor.elements().element_type().number()));
    let content = Allocation::of(bytes)?.give();
    Ok(NamedTensor { element_type, content, content_len: bytes.len(), ..given })
}
