//! Calls that editions 2 and 3 share: initialisation with a configuration, and a fetch of several parameters.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use pserver_core::config::OptimizerSettings;
use pserver_core::error::Failure;

use super::allocation;
use super::checked::{Call, TensorClaim};
use super::guard::guard;
use super::handles::Handle;
use super::places::{Asked, Places};
use super::staged::Staged;
use super::sys::{ClientHandle, Gradient, Parameter};
use pserver_client::GradientSlice;

/// @brief Begins to initialise the parameters on the servers. Every trainer calls it; one is chosen, the others wait
/// until the parameters are there and fetch them with paddle_get_params. When the chosen one dies, another is.
///
/// @param pserver_config_proto how the servers optimise: protobuf's text format, such as "optimizer: SGD const_lr {
/// learning_rate: 0.1 }", or "base64:" and the binary form in base64. NULL means the servers' own settings.
/// @return 1 if this trainer is chosen, 0 if the parameters are initialised, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_begin_init_params(client: *mut ClientHandle, pserver_config_proto: *const c_char) -> c_int {
    guard("paddle_begin_init_params", -1, |call| begin(client, &call.settings(pserver_config_proto)?))
}

/// @brief paddle_begin_init_params with the configuration in protobuf's binary form.
///
/// @param config the bytes; they may hold zeros. Not read when config_len is 0.
/// @param config_len their number, at most 65536.
/// @return as paddle_begin_init_params.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_begin_init_params_n(
    client: *mut ClientHandle,
    config: *const c_void,
    config_len: usize,
) -> c_int {
    guard("paddle_begin_init_params_n", -1, |call| {
        begin(client, &call.settings_bytes(config, i64::try_from(config_len).unwrap_or(i64::MAX))?)
    })
}

/// @brief Tells the servers that every parameter is declared: the other trainers may go on.
///
/// @return 0 if successful, otherwise -1: also when it was called before. After a failure the initialisation begins
/// again with paddle_begin_init_params, or the program ends and is started again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_finish_init_params(client: *mut ClientHandle) -> c_int {
    guard("paddle_finish_init_params", -1, |_| Handle::of_pointer(client).find()?.client.finish_init().map(|()| 0))
}

/// @brief Fetches parameters. In sync mode they have every gradient in them that this trainer has sent, and so those
/// of all trainers' same steps. In other modes, and for a reader in any mode, parts of a parameter may be of different
/// updates. It waits until the parameters are initialised.
///
/// Of each dst[i] the caller sets content and content_len, the room at content in bytes. With content NULL the
/// library allocates, and paddle_parameter_release frees. On success it sets name (to names[i], the same pointer),
/// element_type, content_len (the parameter's length) and, if it was NULL, content. On failure it sets none of these;
/// what lies at content is then unspecified.
///
/// A float32 parameter comes as halves where dst[i].element_type is PADDLE_ELEMENT_TYPE_FLOAT16 or
/// PADDLE_ELEMENT_TYPE_BFLOAT16 before the call and content has room for exactly half the parameter's bytes: each
/// element is rounded once, to the nearest, of two equally near to the even one; beyond the largest it is infinite, and
/// a NaN stays one. The server's value stays as it is. A half of a parameter of another type is refused.
/// Where content is NULL or has room for the whole, element_type is only replaced, whatever it was.
///
/// @param names the names of the parameters, each once.
/// @param dst as many places.
/// @param len the length of both arrays.
/// @return 0 if successful, otherwise -1: also when a room is too small, two of them overlap, or a parameter is not had
/// as a half.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_params(
    client: *mut ClientHandle,
    names: *mut *const c_char,
    dst: *mut Parameter,
    len: c_int,
) -> c_int {
    guard("paddle_get_params", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let texts = call.names(names, len)?;
        let mut staged = Staged::default();
        let wanted = staged.wanted(&session.client, call.array(dst.cast_const(), len, "dst")?)?;
        let asked = asked(&wanted, &texts)?;
        if texts.is_empty() {
            return Ok(0);
        }
        let mut places = Places::measure(&session.client, &asked, &[])?;
        session.client.pull(&mut places.wanted())?;
        staged.store()?;
        let pointers = call.array(names, len, "names")?;
        fill(call, dst, pointers.iter().map(|pointer| pointer.cast_mut()), places, &staged);
        Ok(0)
    })
}

/// @brief Sends gradients and fetches the same parameters, with these gradients in them, in one round trip: in less
/// time than paddle_send_grads and paddle_get_params.
///
/// @param grads the gradients.
/// @param dst a place for each gradient's parameter, as for paddle_get_params, also where it is to come as halves; its
/// name becomes the gradient's.
/// @param len the length of both arrays, at least 1.
/// @return 0 if successful, otherwise -1: also when memory of dst overlaps that of a gradient.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_push_pull(
    client: *mut ClientHandle,
    grads: *const Gradient,
    dst: *mut Parameter,
    len: c_int,
) -> c_int {
    guard("paddle_push_pull", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let mut staged = Staged::default();
        let given = staged.gradients(call, &session.client, &call.claims(grads, len, "grads")?)?;
        let names: Vec<&str> = given.iter().map(|one| one.name).collect();
        let wanted = staged.wanted(&session.client, call.array(dst.cast_const(), len, "dst")?)?;
        let asked = asked(&wanted, &names)?;
        let mut places = Places::measure(&session.client, &asked, &given)?;
        session.client.push_pull(&given, None, &mut places.wanted())?;
        staged.store()?;
        let pointers = call.array(grads, len, "grads")?;
        fill(call, dst, pointers.iter().map(|gradient| gradient.name), places, &staged);
        Ok(0)
    })
}

/// @brief Frees the content that the library allocated for a parameter, and sets content to NULL and content_len to
/// 0. The name stays the caller's. Content that is NULL is nothing to free.
///
/// @return 0 if successful, otherwise -1: when the content was not allocated by this library.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_parameter_release(param: *mut Parameter) -> c_int {
    guard("paddle_parameter_release", -1, |call| {
        let found = call.array(param, 1, "param")?[0];
        allocation::take_back(found.content)?;
        call.write(param, Parameter { content: ptr::null_mut(), content_len: 0, ..found });
        Ok(0)
    })
}

pub(super) fn begin(client: *mut ClientHandle, settings: &OptimizerSettings) -> Result<c_int, Failure> {
    let session = Handle::of_pointer(client).find()?;
    session.client.begin_init(settings).map(c_int::from)
}

/// Initialises one parameter; an empty shape means that the caller gave none.
pub(super) fn init(
    client: *mut ClientHandle,
    given: &GradientSlice<'_>,
    shape: &[u64],
    settings: &OptimizerSettings,
) -> Result<c_int, Failure> {
    let session = Handle::of_pointer(client).find()?;
    session.client.init_param(given.name, given.element_type, shape, given.content, settings).map(|()| 0)
}

/// Initialises one parameter as the caller describes it; its content may lie on a device.
pub(super) fn init_claimed(
    call: &Call,
    client: *mut ClientHandle,
    claim: impl Into<TensorClaim>,
    shape: &[u64],
    settings: &OptimizerSettings,
) -> Result<c_int, Failure> {
    let session = Handle::of_pointer(client).find()?;
    let mut staged = Staged::default();
    init(client, &staged.value(call, &session.client, claim, "params")?, shape, settings)
}

/// The destination of each parameter that the caller fetches.
pub(super) fn asked<'call>(claims: &[TensorClaim], names: &[&'call str]) -> Result<Vec<Asked<'call>>, Failure> {
    names.iter().zip(claims).map(|(name, claim)| Asked::of(name, claim)).collect()
}

/// Writes the outputs of a call that succeeded.
pub(super) fn fill(
    call: &Call,
    dst: *mut Parameter,
    names: impl Iterator<Item = *mut c_char>,
    places: Places<'_>,
    staged: &Staged,
) {
    for (index, (name, filled)) in names.zip(places.hand_over()).enumerate() {
        let parameter = Parameter {
            name,
            element_type: filled.element_type,
            content: staged.callers(filled.content),
            content_len: filled.content_len,
        };
        call.write(dst.wrapping_add(index), parameter);
    }
}
