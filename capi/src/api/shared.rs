//! Functions that all editions of `paddle_pserver.h` share.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use pserver_core::error::Failure;

use super::allocation;
use super::guard::{guard, last, last_code, meaning};
use super::handles::{Handle, give_pointer};
use super::session::Session;
use super::sys::ClientHandle;

/// @brief The call has a fault: made again, it fails again.
pub const PADDLE_ERROR_REFUSED: c_int = 1;
/// @brief The parameters are not initialised.
pub const PADDLE_ERROR_NOT_INITIALISED: c_int = 2;
/// @brief The call reached its deadline.
pub const PADDLE_ERROR_TIMEOUT: c_int = 3;
/// @brief The servers gave up waiting for trainers, which paddle_last_error names.
pub const PADDLE_ERROR_MISSING_TRAINERS: c_int = 4;
/// @brief A server is gone.
pub const PADDLE_ERROR_SERVER_LOST: c_int = 5;
/// @brief The program cancelled the call.
pub const PADDLE_ERROR_CANCELLED: c_int = 6;
/// @brief A bug in this library, to be reported.
pub const PADDLE_ERROR_INTERNAL: c_int = 7;

/// @brief Makes a client of the parameter servers. It finds server 0 and its own rank by the environment
/// (docs/CAPI.md says in which order), and connects with its first call.
///
/// @return the client, which paddle_pserver_client_release releases; NULL when a setting is wrong.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_new_pserver_client() -> *mut ClientHandle {
    guard("paddle_new_pserver_client", ptr::null_mut(), |_| Ok(give_pointer(Session::open("", true)?)))
}

/// @brief Makes a client with options that win over the environment.
///
/// @param options name=value pairs with spaces between: coordinator=tcp://host:port (server 0), trainer=3 (the
/// rank), deadline=30s (of each call; ms, s, m or h), reader=yes (only fetches). NULL gives none.
/// @return the client, which paddle_pserver_client_release releases; NULL when a setting is wrong.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_new_pserver_client_with(options: *const c_char) -> *mut ClientHandle {
    guard("paddle_new_pserver_client_with", ptr::null_mut(), |call| {
        let options = if options.is_null() { "" } else { call.options(options, "options")? };
        Ok(give_pointer(Session::open(options, true)?))
    })
}

/// @brief Releases a client: closes its connections once no call of another thread uses them.
///
/// It does not wait, and does not leave the job: the servers go on waiting for this trainer's gradients until
/// another process takes its rank. A trainer that is finished calls paddle_leave first. NULL is nothing to release.
/// With a pointer that is no client the call changes only paddle_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_pserver_client_release(client: *mut ClientHandle) {
    if client.is_null() {
        return;
    }
    guard("paddle_pserver_client_release", (), |_| Handle::of_pointer(client).release());
}

/// @brief Ends every call of this client that is under way in any thread, also those that were started alone: each
/// returns -1 (a started one from paddle_wait) within 100 ms, and paddle_last_error says that it was cancelled.
///
/// It may be called from a signal handler and from any thread. It returns at once and does not wait for the calls to
/// end. A cancelled call ends like one whose deadline has passed: its memory is the caller's again, and the call may be
/// repeated, because no gradient is applied twice. A call that begins after this one has begun is not affected.
///
/// @return 0; -1 when there is no such client, and paddle_last_error is as it was.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_cancel(client: *mut ClientHandle) -> c_int {
    // Not in `guard`, which allocates: a signal handler may not.
    if Handle::of_pointer(client).cancel() { 0 } else { -1 }
}

/// @brief Saves all parameters as one model, on the machine of server 0. In mode sync it is of the step that the
/// calling trainer sent last, and a reader saves one only when no trainer is connected; in other modes its parts may be
/// of different updates.
///
/// @param path where, below the server's model directory.
/// @return 0 if successful, otherwise -1. A model that is there already is replaced only by a whole one.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_save_model(client: *mut ClientHandle, path: *const c_char) -> c_int {
    guard("paddle_save_model", -1, |call| {
        Handle::of_pointer(client).find()?.client.save_model(call.path(path)?).map(|_| 0)
    })
}

/// @brief Replaces the values of parameters by those of a safetensors file, such as a saved model, in a job that runs.
/// Other parameters stay, and so do the optimizers' states. The other trainers should wait meanwhile.
///
/// @param path a file on this machine. Every tensor has the name, type and shape of a parameter; of a table it is the
/// whole matrix, or its rows and ids as paddle_save_model writes them.
/// @return 0 if successful, otherwise -1. Everything is checked before any value is replaced; a call that failed for
/// another reason than PADDLE_ERROR_REFUSED may be made again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_load_model(client: *mut ClientHandle, path: *const c_char) -> c_int {
    guard("paddle_load_model", -1, |call| {
        Handle::of_pointer(client).find()?.client.load_file(Path::new(call.path(path)?)).map(|_| 0)
    })
}

/// @brief Takes a checkpoint of all parameters now, and returns when it is on the disks of all servers. Training may go
/// on meanwhile.
///
/// @param version becomes the fewest updates that a part of a parameter had when the checkpoint began; or NULL.
/// @return 0 if successful, otherwise -1: also when a server has no checkpoint directory.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_checkpoint(client: *mut ClientHandle, version: *mut u64) -> c_int {
    guard("paddle_checkpoint", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        if !version.is_null() {
            call.aligned(version.cast_const(), "version")?;
        }
        let taken = session.client.checkpoint()?;
        if !version.is_null() {
            call.write(version, taken.version.0);
        }
        Ok(0)
    })
}

/// @brief Tells the servers that this trainer is finished, so that the others do not wait for it any more.
///
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_leave(client: *mut ClientHandle) -> c_int {
    guard("paddle_leave", -1, |_| Handle::of_pointer(client).find()?.client.leave().map(|()| 0))
}

/// @brief Finds the step at which a new process of a trainer continues, in mode sync: the smallest number of updates
/// over the parameters that get a gradient in each step. A new job has 0. A parameter more than two updates behind the
/// others, such as one that is never sent, is left out.
///
/// A trainer calls this after the initialisation and before its first gradient, and begins its loop there. Its next
/// gradients are those of that step; where the earlier process had sent one, the servers acknowledge the new one and do
/// not apply it. A step count that the program keeps elsewhere, also in a parameter, may be one step off.
///
/// @param rounds becomes the number of the step, from 0.
/// @return 0 if successful, otherwise -1: also in other modes, which have no common steps.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_resume_rounds(client: *mut ClientHandle, rounds: *mut u64) -> c_int {
    guard("paddle_resume_rounds", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        call.aligned(rounds.cast_const(), "rounds")?;
        call.write(rounds, session.client.resume_rounds()?);
        Ok(0)
    })
}

/// @brief This trainer's rank, from 0. It joins the job if no call has done so yet.
///
/// @return the rank, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_trainer_id(client: *mut ClientHandle) -> c_int {
    guard("paddle_trainer_id", -1, |_| {
        let trainer = Handle::of_pointer(client).find()?.client.trainer()?;
        // A reader has no rank.
        Ok(c_int::try_from(trainer).unwrap_or(-1))
    })
}

/// @brief The number of trainers of the job. It joins the job if no call has done so yet.
///
/// @return the number, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_trainers(client: *mut ClientHandle) -> c_int {
    guard("paddle_trainers", -1, |_| count(Handle::of_pointer(client).find()?.client.trainers()?))
}

/// @brief The number of servers of the job. It joins the job if no call has done so yet.
///
/// @return the number, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_servers(client: *mut ClientHandle) -> c_int {
    guard("paddle_servers", -1, |_| count(Handle::of_pointer(client).find()?.client.servers()?))
}

/// A number of processes, of which there are a few thousand at most.
fn count(number: u32) -> Result<c_int, Failure> {
    c_int::try_from(number).map_err(|_| Failure::call(format!("{number} processes; expected at most {}", c_int::MAX)))
}

/// @brief Frees memory that this library allocated for its caller. NULL is nothing to free.
///
/// Freeing anything else, or twice, changes only paddle_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_free(memory: *mut c_void) {
    guard("paddle_free", (), |_| allocation::take_back(memory));
}

/// @brief The error of this thread's last failing call: the argument, the value found, the value expected.
///
/// @return the text, which ends with a NUL and is the library's; empty if no call of this thread has failed. It
/// stays as it is until the thread's next failing call, or its end.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_last_error() -> *const c_char {
    last()
}

/// @brief The error of this thread's last failing call as a number, for programs.
///
/// @return one of PADDLE_ERROR_...; 0 if no call of this thread has failed.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_last_error_code() -> c_int {
    last_code()
}

/// @brief What a returned status means in general. paddle_last_error says what happened.
///
/// @return a text that ends with a NUL and lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_strerror(status: c_int) -> *const c_char {
    meaning(status).as_ptr()
}

/// @brief The library's version, such as "0.1.0".
///
/// @return a text that ends with a NUL and lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
