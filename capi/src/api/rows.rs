//! Parameters that are updated by rows, of all editions.

use std::ffi::{c_char, c_int, c_void};

use pserver_core::error::Failure;

use super::batch::init;
use super::checked::{Call, Room, at_least_one, element_type};
use super::guard::guard;
use super::handles::Handle;
use super::places::refuse_overlapping_rows;
use super::staged::{As, Staged};
use super::sys::{ClientHandle, ElementTypeNumber, Rows};
use pserver_client::{DestinationRows, GradientRows, GradientSlice};

/// @brief Declares a sparse parameter: a table of rows that is sent and fetched by rows, with paddle_send_rows and
/// paddle_get_rows. A row is there once somebody has sent a gradient for it; before that it reads as it was declared to
/// begin. It is part of the initialisation, as paddle_init_param is, which declares one with a whole matrix of content.
///
/// @param name its name.
/// @param element_type the type of its elements.
/// @param param_config_proto how it is optimised, and what its rows are: "sparse { height: 1000000 width: 64 uniform {
/// low: -0.1 high: 0.1 } }" with ids below height, or "sparse { width: 64 rows: 1000000 }" with any ids, of which so
/// many may come to be.
/// @return 0 if successful, otherwise -1.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_rows(
    client: *mut ClientHandle,
    name: *const c_char,
    element_type: ElementTypeNumber,
    param_config_proto: *const c_char,
) -> c_int {
    guard("paddle_init_rows", -1, |call| {
        let name = call.name(name, "name")?;
        let element_type = self::element_type(element_type, name)?;
        let settings = call.settings(param_config_proto)?;
        if settings.sparse.is_none() {
            return Err(Failure::call(format!(
                "parameter \"{name}\": its configuration describes no rows; expected sparse {{ ... }} in it"
            )));
        }
        init(client, &GradientSlice { name, element_type, content: &[] }, &[], &settings)
    })
}

/// @brief Sends rows of gradients (or of differences, where the job optimises on the client). Rows may repeat, and are
/// summed. It returns when every server has them for good. In sync mode this trainer takes part in the round of all
/// rows of these parameters: one that has none to send passes ids_len 0. A call that failed may be repeated: no
/// gradient is applied twice.
///
/// @param grads the rows, of each parameter in one entry.
/// @param len the number of entries, at least 1.
/// @return 0 if successful, otherwise -1: also when more rows would come to be than were declared.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_send_rows(client: *mut ClientHandle, grads: *const Rows, len: c_int) -> c_int {
    guard("paddle_send_rows", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let claims = call.array(grads, at_least_one(len, "grads")?, "grads")?.iter().enumerate();
        let mut staged = Staged::default();
        let given = claims.map(|(index, claim)| {
            let content = staged.sent_from(&session.client, claim.content, claim.content_len, As::Rows)?;
            given(call, &Rows { content, ..*claim }, &format!("grads[{index}]"))
        });
        session.client.push_rows(&given.collect::<Result<Vec<_>, _>>()?, None).map(|()| 0)
    })
}

/// @brief Fetches rows by their ids, which may repeat. In sync mode they have every gradient in them that this trainer
/// has sent, and so those of all trainers' same steps. Nothing is sent for rows that are not asked for.
///
/// @param dst the rows: name, element_type, ids and ids_len say which, and content is the caller's place for exactly
/// content_len bytes, row after row in the order of the ids. Only what lies at content is written to.
/// @param len the number of entries, at least 1.
/// @return 0 if successful, otherwise -1, and then nothing is written.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_get_rows(client: *mut ClientHandle, dst: *const Rows, len: c_int) -> c_int {
    guard("paddle_get_rows", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let claims = call.array(dst, at_least_one(len, "dst")?, "dst")?.iter().enumerate();
        let mut staged = Staged::default();
        let rooms = claims.map(|(index, claim)| {
            let content = staged.wanted_at(&session.client, claim.content, claim.content_len)?;
            wanted(call, claim, content, &format!("dst[{index}]"))
        });
        let mut rooms = rooms.collect::<Result<Vec<_>, _>>()?;
        for (name, claim, ..) in &rooms {
            let (found, expected) =
                (element_type(claim.element_type, name)?, session.client.describe(name)?.element_type);
            if found != expected {
                return Err(Failure::call(format!("parameter \"{name}\": element type {found}; expected {expected}")));
            }
        }
        refuse_overlapping_rows(rooms.iter().map(|(name, _, ids, room)| (*name, *ids, room.as_ref())))?;
        let wanted = rooms.iter_mut().map(|(name, _, ids, room)| {
            let values = room.as_mut().map_or(&mut [][..], |room| room.bytes_mut(room.bytes));
            DestinationRows { name, ids, values }
        });
        session.client.pull_rows(&mut wanted.collect::<Vec<_>>())?;
        staged.store().map(|()| 0)
    })
}

fn given<'call>(call: &'call Call, claim: &Rows, what: &str) -> Result<GradientRows<'call>, Failure> {
    let name = call.name(claim.name, &format!("{what}.name"))?;
    let element_type = element_type(claim.element_type, name)?;
    let ids = call.array(claim.ids, claim.ids_len, &format!("parameter \"{name}\": ids"))?;
    let what = format!("parameter \"{name}\": content");
    let values = call.array(claim.content.cast::<u8>().cast_const(), claim.content_len, &what)?;
    Ok(GradientRows { name, element_type, ids, values })
}

/// The caller's request for rows of one parameter.
type Claimed<'call> = (&'call str, &'call Rows, &'call [u64], Option<Room>);

fn wanted<'call>(
    call: &'call Call,
    claim: &'call Rows,
    content: *mut c_void,
    what: &str,
) -> Result<Claimed<'call>, Failure> {
    let name = call.name(claim.name, &format!("{what}.name"))?;
    let ids = call.array(claim.ids, claim.ids_len, &format!("parameter \"{name}\": ids"))?;
    let room = Room::of(content, claim.content_len, name)?;
    if room.is_none() && claim.content_len != 0 {
        return Err(Failure::call(format!("parameter \"{name}\": content is NULL; expected a pointer")));
    }
    Ok((name, claim, ids, room))
}
