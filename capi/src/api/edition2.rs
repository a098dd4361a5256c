//! Edition 2: one configuration for all parameters, a learning rate with the gradients, and setting.

use std::ffi::{c_double, c_int};

use pserver_core::config::OptimizerSettings;

use super::batch::init_claimed;
use super::checked;
use super::guard::guard;
use super::handles::Handle;
use super::staged::Staged;
use super::sys::{ClientHandle, Gradient, Parameter};

/// @brief Declares a parameter and sends its initial value, as a vector. It is optimised as
/// paddle_begin_init_params said.
///
/// @param params the parameter; the caller's memory is not used after the call.
/// @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
/// paddle_begin_init_params, or the program ends and is started again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param_e2(client: *mut ClientHandle, params: Parameter) -> c_int {
    guard("paddle_init_param", -1, |call| init_claimed(call, client, params, &[], &OptimizerSettings::default()))
}

/// @brief Sends gradients to the servers. It returns when every server has them for good. A call that failed may be
/// repeated: no gradient is applied twice.
///
/// A gradient's type is its parameter's, or float16 or bfloat16 for a parameter of float32 or float64.
///
/// @param grads the gradients, of each parameter at most one.
/// @param total their number, at least 1.
/// @param learning_rate used for these gradients instead of the configured one; finite, not negative.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_send_grads_e2(
    client: *mut ClientHandle,
    grads: *const Gradient,
    total: c_int,
    learning_rate: c_double,
) -> c_int {
    guard("paddle_send_grads", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let rate = checked::rate(learning_rate)?;
        let mut staged = Staged::default();
        let gradients = staged.gradients(call, &session.client, &call.claims(grads, total, "grads")?)?;
        session.client.push(&gradients, Some(rate)).map(|()| 0)
    })
}

/// @brief Replaces parameters by the values given. Optimizers keep their state and their count of updates.
///
/// @param params the parameters, each once.
/// @param total their number, at least 1.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_set_params(client: *mut ClientHandle, params: *const Parameter, total: c_int) -> c_int {
    guard("paddle_set_params", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let mut staged = Staged::default();
        let claims = call.claims(params, total, "params")?.into_iter().enumerate();
        let values = claims.map(|(index, one)| staged.value(call, &session.client, one, &format!("params[{index}]")));
        session.client.set(&values.collect::<Result<Vec<_>, _>>()?).map(|()| 0)
    })
}
