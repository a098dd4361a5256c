//! Policy for gradients with NaN or infinite elements, applied before a gradient enters journal or round.
//!
//! A frame is accepted or refused as a whole. Other frames of the push may be accepted by then: the client repeats a
//! failed push under the same sequence, so they are acknowledged as duplicates and the corrected gradient completes the
//! push. A skipped gradient is zeroed before it is journalled, so replay applies the same.

use super::frames::Admitted;
use super::group::SlotIndex;
use super::options::NonFinite;
use super::reply::Refusal;
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::memory::Lease;
use crate::optim::{first_nonfinite, real_at};
use crate::port::Incoming;
use crate::wire::{Entry, ErrorCode, Flags, Frame, Kind, RowsPart};

/// Bytes of a row's id in a payload.
const ID_BYTES: usize = size_of::<u64>();

impl Shard {
    /// Applies the policy to a received push. A gradient in its sender's memory is checked in place, and one that the
    /// transport has checked is not checked again.
    pub(super) fn screen(
        &mut self,
        frame: &Frame,
        admitted: &[Admitted],
        body: &mut [Incoming],
    ) -> Result<(), Refusal> {
        let setting = self.options.nonfinite;
        let is_known = setting == NonFinite::Accept || frame.head.flags.contains(Flags::FINITE);
        if frame.head.kind != Kind::Push || is_known {
            return Ok(());
        }
        let Phase::Serving(serving) = &self.phase else { return Ok(()) };
        let with_payload = frame.entries.iter().zip(admitted).filter(|(entry, _)| entry.bytes > 0);
        for ((entry, admitted), payload) in with_payload.zip(body) {
            let values = serving.values_from(entry, admitted.slot_index);
            // A payload too short for rows is refused by the next check.
            let Some(bytes) = payload.bytes().get(values..).filter(|_| entry.element_type.is_float()) else { continue };
            let Some(at) = first_nonfinite(entry.element_type, bytes) else { continue };
            let found = serving.nonfinite_text(frame, entry, admitted.slot_index, payload.bytes(), at);
            if setting == NonFinite::Refuse {
                let remedy = "push a corrected gradient (a smaller learning rate or clip_norm keeps a training from \
                              diverging), or serve with --nonfinite skip or accept";
                return Err(Refusal::invalid(format!("{found}; expected finite numbers: {remedy}")));
            }
            clear(payload, values, |bytes| self.pool.take(bytes))
                .map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
            self.skipped += 1;
            self.counters.zeroed.set(self.skipped);
            tracing::warn!("{found}; the gradient counts as zeros ({} such gradients on this shard)", self.skipped);
        }
        Ok(())
    }
}

impl Serving {
    /// Offset of the gradient's elements in a payload: after the ids where it is rows.
    fn values_from(&self, entry: &Entry, slot_index: SlotIndex) -> usize {
        let chunk = &self.table.chunks[slot_index];
        if chunk.bucket().is_none() {
            return 0;
        }
        let row = self.row_bytes(entry, slot_index);
        let rows = (entry.bytes as usize).saturating_sub(RowsPart::BYTES) / (ID_BYTES + row);
        RowsPart::BYTES + rows * ID_BYTES
    }

    /// Bytes of the values of a row in a payload.
    fn row_bytes(&self, entry: &Entry, slot_index: SlotIndex) -> usize {
        let held = self.table.held(self.table.chunks[slot_index].id);
        let width = held.rows.as_ref().map_or(1, |plan| plan.layout.width());
        width as usize * element_bytes(entry.element_type)
    }

    /// Describes a non-finite element: trainer, parameter, element (from 0) and value.
    fn nonfinite_text(&self, frame: &Frame, entry: &Entry, slot_index: SlotIndex, payload: &[u8], at: usize) -> String {
        let (trainer, name) = (frame.head.trainer, self.table.held(entry.id).name());
        let values = self.values_from(entry, slot_index);
        let value = real_at(entry.element_type, &payload[values..], at).unwrap_or(f64::NAN);
        let element_type = entry.element_type;
        if self.table.chunks[slot_index].bucket().is_none() {
            let chunk = entry.id.chunk;
            return format!(
                "the gradient of trainer {trainer} for parameter \"{name}\" has {value} ({element_type}) as element \
                 {at} of chunk {chunk}"
            );
        }
        let width = self.row_bytes(entry, slot_index) / element_bytes(element_type);
        let id = &payload[RowsPart::BYTES + at / width * ID_BYTES..][..ID_BYTES];
        let row = u64::from_le_bytes(id.try_into().expect("an id has 8 bytes"));
        format!(
            "the gradient of trainer {trainer} for parameter \"{name}\" has {value} ({element_type}) as element {} of \
             row {row}",
            at % width
        )
    }
}

fn element_bytes(element_type: ElementType) -> usize {
    usize::try_from(element_type.bytes()).expect("an element has few bytes")
}

/// Zeroes the elements of a gradient; a gradient in its sender's memory is replaced by a zeroed copy in a lease of
/// `take`.
fn clear(
    payload: &mut Incoming,
    values: usize,
    take: impl FnOnce(u32) -> Result<Lease, Failure>,
) -> Result<(), Failure> {
    if let Incoming::Chunk { lease, bytes } = payload
        && lease.is_foreign()
    {
        let mut own = take(*bytes)?;
        own.bytes_mut()[..values].copy_from_slice(&lease.bytes()[..values]);
        *lease = own;
    }
    payload.bytes_mut()[values..].fill(0);
    Ok(())
}
