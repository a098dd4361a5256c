//! Parameters that are updated by rows, of all editions.

use std::ffi::{c_char, c_int};

use pserver_core::error::Failure;

use super::batch::init;
use super::checked::{Call, Room, TensorClaim, element_type};
use super::guard::guard;
use super::handles::Handle;
use super::places::CallExtents;
use super::staged::{As, Staged};
use super::sys::{ClientHandle, ElementTypeNumber, Rows};
use pserver_client::{CallNumber, Client, DestinationRows, GradientRows, GradientSlice};

/// @brief Declares a sparse parameter: a table of rows that is sent and fetched by rows, with paddle_send_rows and
/// paddle_get_rows. A row is there once somebody has sent a gradient for it; before that it reads as it was declared to
/// begin. It is part of the initialisation, as paddle_init_param is, which declares one with a whole matrix of content.
///
/// @param name its name.
/// @param element_type the type of its elements.
/// @param param_config_proto its optimizer and the form of its rows: "sparse { height: 1000000 width: 64 uniform {
/// low: -0.1 high: 0.1 } }" with ids below height, or "sparse { width: 64 rows: 1000000 }" with any ids, and at most so
/// many rows.
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
        let grads = call.claims(grads, len, "grads")?;
        RowRequest::of(call, &session.client, (&grads, &[]), &mut Staged::default())?.make(&session.client, None)?;
        Ok(0)
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
        let (dst, mut staged) = (call.claims(dst, len, "dst")?, Staged::default());
        RowRequest::of(call, &session.client, (&[], &dst), &mut staged)?.make(&session.client, None)?;
        staged.store().map(|()| 0)
    })
}

/// Rows that one call sends, and rows that it fetches.
pub(super) struct RowRequest<'call> {
    given: Vec<GradientRows<'call>>,
    wanted: Vec<WantedRows<'call>>,
}

struct WantedRows<'call> {
    name: &'call str,
    ids: &'call [u64],
    /// The caller's buffer for the values; none for a call without rows.
    room: Option<Room>,
}

impl<'call> RowRequest<'call> {
    /// Checks the caller's descriptions of the rows to send and of the rows to fetch.
    pub(super) fn of(
        call: &'call Call,
        client: &Client,
        (grads, dst): (&[TensorClaim], &[TensorClaim]),
        staged: &mut Staged,
    ) -> Result<Self, Failure> {
        let given = |(index, claim): (usize, &TensorClaim)| {
            let content = staged.sent_from(client, claim.content, claim.content_len, As::Rows)?;
            given(call, &TensorClaim { content, ..*claim }, &format!("grads[{index}]"))
        };
        let given = grads.iter().enumerate().map(given).collect::<Result<Vec<_>, _>>()?;
        staged.settle()?;
        let wanted = |(index, claim): (usize, &TensorClaim)| {
            let content = staged.wanted_at(client, claim.content, claim.content_len)?;
            let wanted = wanted(call, &TensorClaim { content, ..*claim }, &format!("dst[{index}]"))?;
            Ok((wanted, claim.element_type))
        };
        let checked = dst.iter().enumerate().map(wanted).collect::<Result<Vec<_>, Failure>>()?;
        let (mut extents, mut wanted) = (CallExtents::default(), Vec::with_capacity(checked.len()));
        for (rows, number) in checked {
            let (found, expected) = (element_type(number, rows.name)?, client.describe(rows.name)?.element_type);
            if found != expected {
                let text = format!("parameter \"{}\": element type {found}; expected {expected}", rows.name);
                return Err(Failure::call(text));
            }
            extents.read(rows.name, rows.ids);
            rows.room.iter().for_each(|room| extents.written(rows.name, room.start.addr().get(), room.bytes));
            wanted.push(rows);
        }
        for rows in &given {
            extents.read(rows.name, rows.ids);
            extents.read(rows.name, rows.values);
        }
        extents.refuse_overlaps()?;
        Ok(Self { given, wanted })
    }

    /// Makes the call.
    pub(super) fn make(mut self, client: &Client, rate: Option<f64>) -> Result<(), Failure> {
        let wanted = self.wanted.iter_mut().map(|WantedRows { name, ids, room }| {
            let values = room.as_mut().map_or(&mut [][..], |room| room.bytes_mut(room.bytes));
            DestinationRows { name, ids, values }
        });
        let mut wanted: Vec<_> = wanted.collect();
        match (self.given.is_empty(), wanted.is_empty()) {
            (false, true) => client.push_rows(&self.given, rate),
            (false, false) => client.push_pull_rows(&self.given, rate, &mut wanted),
            (true, _) => client.pull_rows(&mut wanted),
        }
    }
}

impl RowRequest<'static> {
    /// Starts the call; the caller waits for it later.
    pub(super) fn start(self, client: &Client, rate: Option<f64>) -> Result<CallNumber, Failure> {
        let wanted = self.wanted.into_iter().map(|WantedRows { name, ids, room }| {
            let values = room.map_or(&mut [][..], |room| room.lent(room.bytes));
            DestinationRows { name, ids, values }
        });
        let wanted: Vec<_> = wanted.collect();
        match (self.given.is_empty(), wanted.is_empty()) {
            (false, true) => client.start_push_rows(&self.given, rate),
            (false, false) => client.start_push_pull_rows(&self.given, rate, wanted),
            (true, _) => client.start_pull_rows(wanted),
        }
    }
}

/// Values to send: of rows, or of a whole tensor if there are no ids.
pub(super) fn rows_to_set<'call>(
    call: &'call Call,
    client: &Client,
    claim: TensorClaim,
    what: &str,
    staged: &mut Staged,
) -> Result<GradientRows<'call>, Failure> {
    let content = staged.sent_from(client, claim.content, claim.content_len, As::Value)?;
    staged.settle()?;
    given(call, &TensorClaim { content, ..claim }, what)
}

fn given<'call>(call: &'call Call, claim: &TensorClaim, what: &str) -> Result<GradientRows<'call>, Failure> {
    let name = call.name(claim.name, &format!("{what}.name"))?;
    let element_type = element_type(claim.element_type, name)?;
    let ids = call.array(claim.ids, claim.ids_len, &format!("parameter \"{name}\": ids"))?;
    let what = format!("parameter \"{name}\": content");
    let values = call.array(claim.content.cast::<u8>().cast_const(), claim.content_len, &what)?;
    Ok(GradientRows { name, element_type, ids, values })
}

fn wanted<'call>(call: &'call Call, claim: &TensorClaim, what: &str) -> Result<WantedRows<'call>, Failure> {
    let name = call.name(claim.name, &format!("{what}.name"))?;
    let ids = call.array(claim.ids, claim.ids_len, &format!("parameter \"{name}\": ids"))?;
    let room = Room::of(claim.content, claim.content_len, name)?;
    if room.is_none() && claim.content_len != 0 {
        return Err(Failure::call(format!("parameter \"{name}\": content is NULL; expected a pointer")));
    }
    Ok(WantedRows { name, ids, room })
}
