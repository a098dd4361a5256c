//! Calls with lengths of 64 bits in editions 2 and 3. Each takes tensors or rows, and sends, fetches or does both.

use std::ffi::{c_char, c_double, c_int};
use std::ptr;

use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;

use super::batch::init;
use super::checked::{self, Call, Room, TensorClaim, at_least_one, element_type, long};
use super::guard::guard;
use super::handles::Handle;
use super::places::CallExtents;
use super::rows::{RowRequest, rows_to_set};
use super::session::Session;
use super::staged::Staged;
use super::started::give_started;
use super::sys::{CallHandle, ClientHandle, NamedTensor};
use pserver_client::{CallNumber, Client, DestinationSlice, Extent, GivenValue, GradientSlice, check_half};

/// @brief paddle_init_param of a parameter of any length, with a shape. It may also be a sparse one, with a whole
/// matrix of content.
///
/// @param value the parameter, without ids; the caller's memory is not used after the call.
/// @param shape the dimensions in elements, the slowest first; their product is the number of elements.
/// @param dimensions how many there are, at most 64; with 0 the parameter is a vector.
/// @param param_config_proto how this parameter is optimised; NULL means what paddle_begin_init_params was given.
/// @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
/// paddle_begin_init_params, or the program ends and is started again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_init_tensor(
    client: *mut ClientHandle,
    value: *const NamedTensor,
    shape: *const u64,
    dimensions: usize,
    param_config_proto: *const c_char,
) -> c_int {
    guard("paddle_init_tensor", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let claim = call.array(value, 1, "value")?[0];
        let shape = call.shape(shape, long(dimensions))?;
        let settings = call.settings(param_config_proto)?;
        let mut staged = Staged::default();
        init(client, &whole(call, &session.client, claim.into(), "value", &mut staged)?, shape, &settings)
    })
}

/// @brief Sends gradients, fetches parameters, or both: tensors of any length, or rows of sparse parameters. A call
/// that failed may be repeated: no gradient is applied twice.
///
/// With grads and dst it sends gradients and fetches the same parameters with these gradients in them, in one call;
/// the rows that it fetches may differ from the rows that it sends; mostly they are those of the next step. Everything
/// is checked before anything is sent.
///
/// @param grads the gradients; NULL sends none. Each has its parameter's type, or float16 or bfloat16 for a parameter
/// of float32 or float64. Rows may repeat, and are summed; in sync mode a trainer without rows passes ids_len 0.
/// @param dst the places, of which only the contents are written to; NULL fetches nothing. With grads they are of the
/// same parameters in the same order. Each has its parameter's type and exactly its length, or float16 or bfloat16 and
/// half the length where the parameter is float32. Rows have their table's type.
/// @param len the length of grads and of dst, at least 1. They are all dense, or all sparse.
/// @param learning_rate used for these gradients instead of the configured one: finite, not negative. NULL leaves it.
/// @return 0 if successful, otherwise -1; then tensors of dst are unspecified, and rows as they were.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_transfer(
    client: *mut ClientHandle,
    grads: *const NamedTensor,
    dst: *const NamedTensor,
    len: usize,
    learning_rate: *const c_double,
) -> c_int {
    guard("paddle_transfer", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let rate = rate(call, grads, learning_rate)?;
        let mut staged = Staged::default();
        match TransferRequest::of(call, &session, (grads, dst), len, &mut staged)? {
            TransferRequest::Dense(request) => request.make(&session.client, rate),
            TransferRequest::Rows(request) => request.make(&session.client, rate),
        }?;
        staged.store().map(|()| 0)
    })
}

/// @brief Starts paddle_transfer and returns while it goes on. Calls about one parameter are carried out in the order
/// of their starts, others overlap; parameters that were declared earlier go first.
///
/// The contents of grads and of dst are the library's until paddle_wait for this call, or the release of the client,
/// has returned: grads must stay as they are, and dst may not be touched. Rows that are sent are copied, so that their
/// contents are the caller's again after the start. The arrays, the names and the ids are not used after the start.
///
/// @return the call, which paddle_wait frees; otherwise NULL, and then nothing is started.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_transfer_start(
    client: *mut ClientHandle,
    grads: *const NamedTensor,
    dst: *const NamedTensor,
    len: usize,
    learning_rate: *const c_double,
) -> *mut CallHandle {
    guard("paddle_transfer_start", ptr::null_mut(), |call| {
        let session = Handle::of_pointer(client).find()?;
        let rate = rate(call, grads, learning_rate)?;
        let mut staged = Staged::default();
        let number = match TransferRequest::of(Call::lasting(), &session, (grads, dst), len, &mut staged)? {
            TransferRequest::Dense(request) => request.start(&session.client, rate),
            TransferRequest::Rows(request) => request.start(&session.client, rate),
        }?;
        Ok(give_started(&session, number, staged))
    })
}

/// @brief Replaces values of dense parameters, and rows of tables, of any length. Other rows stay, and so do the
/// optimizers' states and counts of updates. The other trainers should wait meanwhile.
///
/// @param values the parameters, each once; of rows each id once.
/// @param len their number, at least 1.
/// @return 0 if successful, otherwise -1. Everything is checked before any value is replaced; a call that failed for
/// another reason than PADDLE_ERROR_REFUSED may be made again.
#[unsafe(no_mangle)]
pub extern "C" fn paddle_set_tensors(client: *mut ClientHandle, values: *const NamedTensor, len: usize) -> c_int {
    guard("paddle_set_tensors", -1, |call| {
        let session = Handle::of_pointer(client).find()?;
        let claims = call.claims(values, long(len), "values")?;
        let (mut staged, mut whole_tensors, mut rows) = (Staged::default(), Vec::new(), Vec::new());
        for (index, claim) in claims.into_iter().enumerate() {
            let what = format!("values[{index}]");
            let facts = session.client.describe(call.name(claim.name, &format!("{what}.name"))?)?;
            if facts.is_sparse {
                rows.push(rows_to_set(call, &session.client, claim, &what, &mut staged)?);
            } else {
                whole_tensors.push((whole(call, &session.client, claim, &what, &mut staged)?, facts.shape));
            }
        }
        let values = whole_tensors.iter().map(|(GradientSlice { name, element_type, content }, shape)| GivenValue {
            name,
            element_type: *element_type,
            shape,
            content,
        });
        session.client.load_with_rows(&values.collect::<Vec<_>>(), &rows).map(|()| 0)
    })
}

/// Dense parameters or rows that one call sends and fetches.
enum TransferRequest<'call> {
    Dense(DenseRequest<'call>),
    Rows(RowRequest<'call>),
}

/// Dense parameters that one call sends gradients of, and those that it fetches.
struct DenseRequest<'call> {
    given: Vec<GradientSlice<'call>>,
    wanted: Vec<WantedTensor<'call>>,
}

struct WantedTensor<'call> {
    name: &'call str,
    room: Room,
    half: Option<Half>,
}

impl<'call> TransferRequest<'call> {
    /// Checks the caller's descriptions. The first parameter decides whether the call is about rows.
    fn of(
        call: &'call Call,
        session: &Session,
        (grads, dst): (*const NamedTensor, *const NamedTensor),
        len: usize,
        staged: &mut Staged,
    ) -> Result<Self, Failure> {
        if grads.is_null() && dst.is_null() {
            return Err(Failure::call("grads and dst are NULL; expected gradients to send, or places to fetch to"));
        }
        at_least_one(long(len), if grads.is_null() { "dst" } else { "grads" })?;
        let claims = |pointer: *const NamedTensor, what: &str| {
            if pointer.is_null() { Ok(Vec::new()) } else { call.claims(pointer, long(len), what) }
        };
        let (grads, dst) = (claims(grads, "grads")?, claims(dst, "dst")?);
        let (first, what) = if grads.is_empty() { (&dst[0], "dst[0].name") } else { (&grads[0], "grads[0].name") };
        if session.client.describe(call.name(first.name, what)?)?.is_sparse {
            return RowRequest::of(call, &session.client, (&grads, &dst), staged).map(Self::Rows);
        }
        DenseRequest::of(call, &session.client, (&grads, &dst), staged).map(Self::Dense)
    }
}

impl<'call> DenseRequest<'call> {
    fn of(
        call: &'call Call,
        client: &Client,
        (grads, dst): (&[TensorClaim], &[TensorClaim]),
        staged: &mut Staged,
    ) -> Result<Self, Failure> {
        let given = staged.gradients(call, client, grads)?;
        let wanted = staged.wanted(client, dst)?;
        let place = |(index, claim): (usize, &TensorClaim)| WantedTensor::of(call, claim, index);
        let mut wanted = wanted.iter().enumerate().map(place).collect::<Result<Vec<_>, _>>()?;
        let named = grads.iter().zip(given.iter().map(|one| one.name));
        let named = named.chain(dst.iter().zip(wanted.iter().map(|one| one.name)));
        named.into_iter().try_for_each(|(claim, name)| refuse_ids(claim, name))?;
        let mut extents = CallExtents::default();
        given.iter().for_each(|one| extents.read(one.name, one.content));
        wanted.iter().for_each(|one| extents.written(one.name, one.room.start.addr().get(), one.room.bytes));
        extents.refuse_overlaps()?;
        let names: Vec<&str> = wanted.iter().map(|one| one.name).collect();
        for ((one, claim), (declared, _)) in wanted.iter_mut().zip(dst).zip(client.measure(&names)?) {
            one.half = half(one.name, element_type(claim.element_type, one.name)?, declared)?;
        }
        Ok(Self { given, wanted })
    }

    /// Makes the call.
    fn make(mut self, client: &Client, rate: Option<f64>) -> Result<(), Failure> {
        let sent = self.given.iter().map(|one| Extent::of(one.content));
        let places = self.wanted.iter().map(|one| Extent::new(one.room.start.addr().get(), one.room.bytes));
        let _memory = client.hold(sent.chain(places));
        let wanted = self.wanted.iter_mut().map(|WantedTensor { name, room, half }| {
            let content = room.bytes_mut(room.bytes);
            DestinationSlice { name, content, half: *half }
        });
        let mut wanted: Vec<_> = wanted.collect();
        match (self.given.is_empty(), wanted.is_empty()) {
            (false, true) => client.push(&self.given, rate),
            (false, false) => client.push_pull(&self.given, rate, &mut wanted),
            (true, _) => client.pull(&mut wanted),
        }
    }
}

impl DenseRequest<'static> {
    /// Starts the call; the caller waits for it later.
    fn start(self, client: &Client, rate: Option<f64>) -> Result<CallNumber, Failure> {
        let wanted = self.wanted.into_iter().map(|WantedTensor { name, room, half }| {
            let content = room.lent(room.bytes);
            DestinationSlice { name, content, half }
        });
        let wanted: Vec<_> = wanted.collect();
        match (self.given.is_empty(), wanted.is_empty()) {
            (false, true) => client.start_push(&self.given, rate),
            (false, false) => client.start_push_pull(&self.given, rate, wanted),
            (true, _) => client.start_pull(wanted),
        }
    }
}

impl<'call> WantedTensor<'call> {
    fn of(call: &'call Call, claim: &TensorClaim, index: usize) -> Result<Self, Failure> {
        let name = call.name(claim.name, &format!("dst[{index}].name"))?;
        let room = Room::of(claim.content, claim.content_len, name)?;
        let room = room.ok_or_else(|| {
            Failure::call(format!("parameter \"{name}\": content is NULL; expected the caller's memory"))
        })?;
        Ok(Self { name, room, half: None })
    }
}

/// The half-precision type in which values are returned, if it is not the parameter's own type.
pub(super) fn half(name: &str, found: ElementType, declared: ElementType) -> Result<Option<Half>, Failure> {
    match Half::of(found) {
        _ if found == declared => Ok(None),
        Some(half) => check_half(name, declared, Some(half)).map(|()| Some(half)),
        None => Err(Failure::call(format!("parameter \"{name}\": its value as {found}; expected {declared}"))),
    }
}

/// The learning rate of a call; none where the caller keeps the configured rate.
pub(super) fn rate(call: &Call, grads: *const NamedTensor, pointer: *const c_double) -> Result<Option<f64>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    let rate = checked::rate(call.array(pointer, 1, "learning_rate")?[0])?;
    if grads.is_null() {
        return Err(Failure::call(format!("learning rate {rate} without grads; expected gradients, or NULL")));
    }
    Ok(Some(rate))
}

/// A checked value of a whole tensor, ready to send.
fn whole<'call>(
    call: &'call Call,
    client: &Client,
    claim: TensorClaim,
    what: &str,
    staged: &mut Staged,
) -> Result<GradientSlice<'call>, Failure> {
    let value = staged.value(call, client, claim, what)?;
    refuse_ids(&claim, value.name).map(|()| value)
}

/// Refuses rows in a call about whole tensors.
pub(super) fn refuse_ids(claim: &TensorClaim, name: &str) -> Result<(), Failure> {
    if claim.ids_len == 0 {
        return Ok(());
    }
    let count = claim.ids_len;
    Err(Failure::call(format!("\"{name}\": {count} ids of rows in a call about whole tensors; expected none")))
}
