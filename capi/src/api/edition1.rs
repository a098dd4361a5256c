//! Edition 1: one parameter per call. Calls carry no lengths, so the caller declares the length of each parameter.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use pserver_core::config::OptimizerSettings;
use pserver_core::error::Failure;

use super::batch::begin;
use super::checked::{Call, TensorClaim, element_type, length, long};
use super::guard::guard;
use super::handles::Handle;
use super::places::{Asked, Places};
use super::session::Session;
use super::staged::{As, Staged};
use super::sys::{ClientHandle, Parameter};
use pserver_client::GradientSlice;

/// @brief Says how long a parameter is, as no other call of this edition does. It is a matter of this client alone:
/// nothing is sent. The calls below that take content need it first; calling it again replaces the length.
///
/// @param content_len the length of the parameter in bytes.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_declare_param(
    client: *mut ClientHandle,
    name: *const c_char,
    element_type: c_int,
    content_len: c_int,
) -> c_int {
    guard("paddle_declare_param", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        let element_type = self::element_type(element_type, name)?;
        session.declare(name, element_type, length(content_len, name, element_type)?);
        Ok(0)
    })
}

/// @brief Begins to initialise the parameters on the servers. Every trainer calls it; one is chosen, the others wait
/// until the parameters are there and fetch them with paddle_get_param. When the chosen one dies, another is.
///
/// @return 1 if this trainer is chosen, 0 if the parameters are initialised, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_begin_init_param(client: *mut ClientHandle) -> c_int {
    guard("paddle_begin_init_param", -1, |_| begin(client, &OptimizerSettings::default()))
}

/// @brief Sends the initial value of a parameter that paddle_declare_param has declared.
///
/// @param content the elements; the caller's memory is not used after the call.
/// @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
/// paddle_begin_init_param, or the program ends and is started again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param_e1(
    client: *mut ClientHandle,
    name: *const c_char,
    element_type: c_int,
    content: *const c_void,
) -> c_int {
    guard("paddle_init_param", -1, |call| {
        let claim = claim(name, element_type, content);
        let (session, given, _staged) = given(call, client, claim, As::Value)?;
        let settings = OptimizerSettings::default();
        session.client.init_param(given.name, given.element_type, &[], given.content, &settings).map(|()| 0)
    })
}

/// @brief Tells the servers that every parameter is declared: the other trainers may go on.
///
/// @return 0 if successful, otherwise -1: also when it was called before.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_finish_init_param(client: *mut ClientHandle) -> c_int {
    guard("paddle_finish_init_param", -1, |_| Handle::of_pointer(client).find()?.client.finish_init().map(|()| 0))
}

/// @brief Sends a gradient to the servers. It returns when every server has it for good. A call that failed may be
/// repeated: no gradient is applied twice.
///
/// @param content the elements, as long as paddle_declare_param has said.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_send_grad(
    client: *mut ClientHandle,
    name: *const c_char,
    element_type: c_int,
    content: *const c_void,
) -> c_int {
    guard("paddle_send_grad", -1, |call| {
        let claim = claim(name, element_type, content);
        let (session, given, _staged) = given(call, client, claim, As::Gradient(element_type))?;
        session.client.push(&[given], None).map(|()| 0)
    })
}

/// @brief Replaces a parameter by the value given. Its optimizer keeps its state and its count of updates.
///
/// @param content the elements, as long as paddle_declare_param has said.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_set_param(
    client: *mut ClientHandle,
    name: *const c_char,
    element_type: c_int,
    content: *const c_void,
) -> c_int {
    guard("paddle_set_param", -1, |call| {
        let claim = claim(name, element_type, content);
        let (session, given, _staged) = given(call, client, claim, As::Value)?;
        session.client.set(&[given]).map(|()| 0)
    })
}

/// @brief Fetches a parameter into memory that the library allocates. It needs no paddle_declare_param.
///
/// @param dst becomes the memory, which paddle_free frees.
/// @param dst_len becomes its length in bytes.
/// @return 0 if successful, otherwise -1; then neither is set.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_param(
    client: *mut ClientHandle,
    name: *const c_char,
    dst: *mut *mut c_void,
    dst_len: *mut c_int,
) -> c_int {
    guard("paddle_get_param", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let name = call.name(name, "name")?;
        call.aligned(dst, "dst")?;
        call.aligned(dst_len, "dst_len")?;
        let mut places = Places::measure(&session.client, &[Asked::whole(name, None)], &[])?;
        session.client.pull(&mut places.wanted())?;
        for filled in places.hand_over() {
            call.write(dst, filled.content);
            call.write(dst_len, filled.content_len);
        }
        Ok(0)
    })
}

/// A parameter as later editions have it, without its length.
fn claim(name: *const c_char, element_type: c_int, content: *const c_void) -> Parameter {
    Parameter { name: name.cast_mut(), element_type, content: content.cast_mut(), content_len: 0 }
}

/// The client, and the content with the length that was declared.
fn given<'call>(
    call: &'call Call,
    client: *mut ClientHandle,
    claim: Parameter,
    read: As,
) -> Result<(Arc<Session>, GradientSlice<'call>, Staged), Failure> {
    let session = Handle::of_pointer(client).find()?;
    let name = call.name(claim.name, "name")?;
    let bytes = session.declared(name, element_type(claim.element_type, name)?)?;
    let (content_len, mut staged) = (long(bytes), Staged::default());
    let content = staged.sent_from(&session.client, claim.content, content_len, read)?;
    staged.settle()?;
    let given = call.parameter(&TensorClaim { content, content_len, ..claim.into() }, "parameter")?;
    Ok((session, given, staged))
}
