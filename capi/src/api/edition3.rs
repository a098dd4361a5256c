//! Edition 3: a configuration for each parameter, and gradients without a rate.

use std::ffi::{c_char, c_int, c_void};

use super::batch::init_claimed;
use super::guard::guard;
use super::handles::Handle;
use super::staged::Staged;
use super::sys::{ClientHandle, Gradient, Parameter};

/// @brief Declares a parameter and sends its initial value, as a vector.
///
/// @param param the parameter; the caller's memory is not used after the call.
/// @param param_config_proto the optimizer of this parameter, in the forms of paddle_begin_init_params; NULL means the
/// configuration that was given there.
/// @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
/// paddle_begin_init_params, or the program ends and is started again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param(
    client: *mut ClientHandle,
    params: Parameter,
    param_config_proto: *const c_char,
) -> c_int {
    guard("paddle_init_param", -1, |call| init_claimed(call, client, params, &[], &call.settings(param_config_proto)?))
}

/// @brief paddle_init_param with the configuration in protobuf's binary form.
///
/// @param config the bytes; they may hold zeros. Not read when config_len is 0.
/// @param config_len their number, at most 65536.
/// @return as paddle_init_param.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param_n(
    client: *mut ClientHandle,
    params: Parameter,
    config: *const c_void,
    config_len: usize,
) -> c_int {
    guard("paddle_init_param_n", -1, |call| {
        let settings = call.settings_bytes(config, i64::try_from(config_len).unwrap_or(i64::MAX))?;
        init_claimed(call, client, params, &[], &settings)
    })
}

/// @brief paddle_init_param with a shape, which a saved model then has.
///
/// @param shape the dimensions in elements, the slowest first; their product is the number of elements.
/// @param dimensions how many there are, at most 64; with 0 the parameter is a vector.
/// @return as paddle_init_param.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param_shaped(
    client: *mut ClientHandle,
    params: Parameter,
    shape: *const u64,
    dimensions: c_int,
    param_config_proto: *const c_char,
) -> c_int {
    guard("paddle_init_param_shaped", -1, |call| {
        let settings = call.settings(param_config_proto)?;
        init_claimed(call, client, params, call.shape(shape, dimensions)?, &settings)
    })
}

/// @brief Sends gradients (or differences, where the job optimises on the client) to the servers. It returns when
/// every server has them for good. A call that failed may be repeated: no gradient is applied twice.
///
/// A gradient's type is its parameter's, or float16 or bfloat16 for a parameter of float32 or float64.
///
/// @param grads the gradients, of each parameter at most one.
/// @param len their number, at least 1.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_send_grads(client: *mut ClientHandle, grads: *const Gradient, len: c_int) -> c_int {
    guard("paddle_send_grads", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let mut staged = Staged::default();
        let gradients = staged.gradients(call, &session.client, &call.claims(grads, len, "grads")?)?;
        session.client.push(&gradients, None).map(|()| 0)
    })
}
