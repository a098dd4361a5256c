//! Edition go: the interface that Paddle shipped. Clients are numbers from 0, arrays hold pointers, and the caller owns
//! all memory.

use std::ffi::{c_char, c_int, c_longlong, c_uchar, c_void};

use pserver_core::config::OptimizerSettings;
use pserver_core::error::Failure;

use super::checked::{Call, Room, TensorClaim, at_least_one};
use super::guard::guard;
use super::handles::{Handle, give_number};
use super::places::{Asked, Places};
use super::session::Session;
use super::staged::Staged;
use super::sys::{ElementTypeNumber, Parameter};

/// Go's int in C.
pub type GoInt = c_longlong;

/// A client's number, from 0.
pub type GoClient = c_int;

/// One named tensor, or the gradient of one.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GoParameter {
    /// 1 to 1024 bytes of UTF-8 without control characters, then a NUL.
    pub name: *mut c_char,
    /// The type of the elements.
    pub element_type: ElementTypeNumber,
    /// The elements, in the byte order of this machine.
    pub content: *mut c_uchar,
    /// The length of content in bytes.
    pub content_len: c_int,
}

/// A gradient looks like its parameter.
pub type GoGradient = GoParameter;

/// @brief Makes a client of the parameter servers. Settings that addrs leaves out come from the environment
/// (docs/CAPI.md).
///
/// @param addrs "host:port,host:port"; the first is server 0, which knows the others.
/// @param selected whether this client offers to initialise the parameters; the servers choose one of those.
/// @return the client, from 0; -1 when the addresses or a setting are wrong.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_new_pserver_client_go(addrs: *mut c_char, selected: GoInt) -> GoClient {
    guard("paddle_new_pserver_client", -1, |call| {
        let addresses = call.options(addrs, "addrs")?;
        let first = addresses.split(',').next().unwrap_or_default().trim();
        if first.is_empty() || first.contains(char::is_whitespace) {
            return Err(Failure::call(format!(
                "addrs: \"{addresses}\"; expected host:port,host:port with server 0 first"
            )));
        }
        give_number(Session::open(&format!("coordinator={first}"), selected != 0)?)
    })
}

/// @brief Not there yet: servers are not found through etcd.
///
/// @return -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_new_etcd_pserver_client(etcd_endpoints: *mut c_char) -> GoClient {
    guard("paddle_new_etcd_pserver_client", -1, |call| {
        let endpoints = call.options(etcd_endpoints, "etcd_endpoints")?;
        Err(Failure::call(format!(
            "etcd ({endpoints}) is not available yet; expected paddle_new_pserver_client(\"host:port\", 1) with the \
             address of server 0, which also elects the trainer that initialises"
        )))
    })
}

/// @brief Releases a client: closes its connections once no call of another thread uses them. With a number that is no
/// client's the call changes only paddle_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_pserver_client_release_go(client: GoClient) {
    guard("paddle_pserver_client_release", (), |_| Handle::Number(client).release());
}

/// @brief Begins to initialise the parameters on the servers. A client made with selected 0 gets 0 at once; of the
/// others one is chosen, and the rest wait until the parameters are there. paddle_get_params waits for them, too.
///
/// @return 1 if this trainer is chosen, 0 if not, PSERVER_ERROR on failure.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_begin_init_params_go(client: GoClient) -> c_int {
    guard("paddle_begin_init_params", -1, |_| {
        let session = Handle::Number(client).find()?;
        if session.offers { session.client.begin_init(&OptimizerSettings::default()).map(c_int::from) } else { Ok(0) }
    })
}

/// @brief Declares a parameter and sends its initial value.
///
/// @param param the parameter; the caller's memory is not used after the call.
/// @param param_config an OptimizerConfig in protobuf's binary form. Zeros after the last field are ignored.
/// @param config_len its length in bytes, at most 65536; 0 means the servers' own settings.
/// @return PSERVER_OK or PSERVER_ERROR.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_param_go(
    client: GoClient,
    param: GoParameter,
    param_config: *mut c_void,
    config_len: c_int,
) -> c_int {
    guard("paddle_init_param", -1, |call| {
        let session = Handle::Number(client).find()?;
        let claim = plain(param);
        let mut staged = Staged::default();
        let given = staged.value(call, &session.client, claim, "param")?;
        let settings = call.settings_bytes(param_config, i64::from(config_len))?;
        session.client.init_param(given.name, given.element_type, &[], given.content, &settings).map(|()| 0)
    })
}

/// @brief Tells the servers that every parameter is declared: the other trainers may go on.
///
/// @return PSERVER_OK or PSERVER_ERROR.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_finish_init_params_go(client: GoClient) -> c_int {
    guard("paddle_finish_init_params", -1, |_| Handle::Number(client).find()?.client.finish_init().map(|()| 0))
}

/// @brief Sends gradients to the servers. It returns when every server has them for good.
///
/// @param grads pointers to the gradients, of each parameter at most one.
/// @param total their number, at least 1.
/// @return PSERVER_OK or PSERVER_ERROR.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_send_grads_go(client: GoClient, grads: *mut *mut GoGradient, total: c_int) -> c_int {
    guard("paddle_send_grads", -1, |call| {
        let session = Handle::Number(client).find()?;
        let claims = claims(call, grads, at_least_one(total, "grads")?, "grads")?;
        let mut staged = Staged::default();
        session.client.push(&staged.gradients(call, &session.client, &claims)?, None).map(|()| 0)
    })
}

/// @brief Fetches parameters into the caller's memory. It waits until the parameters are initialised.
///
/// @param dst pointers to parameters of which name, content and content_len are set; content_len is the parameter's
/// length. On success element_type is set.
/// @param total their number.
/// @return PSERVER_OK or PSERVER_ERROR.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_params_go(client: GoClient, dst: *mut *mut GoParameter, total: c_int) -> c_int {
    guard("paddle_get_params", -1, |call| {
        let session = Handle::Number(client).find()?;
        let claims = claims(call, dst, total, "dst")?;
        if claims.is_empty() {
            return Ok(0);
        }
        let mut staged = Staged::default();
        let wanted = staged.wanted(&session.client, &claims)?;
        let rooms: Vec<_> = wanted.iter().enumerate().map(|one| room(call, one)).collect::<Result<_, _>>()?;
        let mut places = Places::measure(&session.client, &rooms, &[])?;
        places.refuse_inexact()?;
        session.client.pull(&mut places.wanted())?;
        staged.store()?;
        let pointers = call.array(dst, total, "dst")?;
        for (pointer, (claim, filled)) in pointers.iter().zip(claims.iter().zip(places.hand_over())) {
            let (element_type, content_len) = (filled.element_type, filled.content_len);
            let content = staged.callers(filled.content).cast();
            let name = claim.name.cast_mut();
            call.write(*pointer, GoParameter { name, element_type, content, content_len });
        }
        Ok(0)
    })
}

/// @brief Ends every call of this client that is under way in any thread: each returns -1 within 100 ms, and
/// paddle_last_error says that it was cancelled. It may be called from a signal handler and from any thread, and
/// returns at once. A cancelled call may be made again; one that begins later is not affected.
///
/// @return PSERVER_OK; PSERVER_ERROR when there is no such client, and paddle_last_error is as it was.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_cancel_go(client: GoClient) -> c_int {
    // Not in `guard`, which allocates: a signal handler may not.
    if Handle::Number(client).cancel() { 0 } else { -1 }
}

/// @brief Saves all parameters as one model, on the machine of server 0. In mode sync it is of the step that the
/// calling trainer sent last, and a reader saves one only when no trainer is connected; in other modes its parts may be
/// of different updates.
///
/// @param path where, below the server's model directory.
/// @return PSERVER_OK or PSERVER_ERROR.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_save_model_go(client: GoClient, path: *mut c_char) -> c_int {
    guard("paddle_save_model", -1, |call| Handle::Number(client).find()?.client.save_model(call.path(path)?).map(|_| 0))
}

/// The elements of an array of pointers.
fn claims(
    call: &Call,
    array: *mut *mut GoParameter,
    total: impl Into<i64>,
    what: &str,
) -> Result<Vec<TensorClaim>, Failure> {
    let pointers = call.array(array.cast_const(), total, what)?.iter().enumerate();
    let claim = |(index, pointer): (usize, &*mut GoParameter)| {
        Ok(plain(call.array(*pointer, 1, &format!("{what}[{index}]"))?[0]))
    };
    pointers.map(claim).collect()
}

/// The caller's memory for one parameter, which this edition never allocates.
fn room<'call>(call: &'call Call, (index, claim): (usize, &TensorClaim)) -> Result<Asked<'call>, Failure> {
    let name = call.name(claim.name, &format!("dst[{index}]->name"))?;
    let room = Room::of(claim.content, claim.content_len, name)?;
    if room.is_none() {
        return Err(Failure::call(format!("parameter \"{name}\": content is NULL; expected the caller's memory")));
    }
    Ok(Asked::whole(name, room))
}

fn plain(parameter: GoParameter) -> TensorClaim {
    let GoParameter { name, element_type, content, content_len } = parameter;
    Parameter { name, element_type, content: content.cast(), content_len }.into()
}
