//! Pushes and sets of rows: their checks, and contributions in parts.
//!
//! A contribution to a bucket may exceed one payload. Its parts are gathered beside the round and enter it together, so
//! a round holds whole contributions only. Every part but the one with the highest number is acknowledged once
//! journalled; that one is answered like an undivided contribution, so a trainer that is ahead waits.

use std::sync::Arc;
use std::time::Duration;

use super::bucket::{AbandonedContribution, Bucket, GatherOutcome};
use super::call::CallId;
use super::context::{Context, Origin};
use super::contribution::{Contribution, RowsLease};
use super::decided::RoundsRecord;
use super::frames::Admitted;
use super::group::SlotIndex;
use super::reply::Refusal;
use super::serving::Serving;
use super::states::state_of;
use super::verdict::PushVerdict;
use crate::port::Kernels;
use crate::wire::{Entry, ErrorCode, Flags, Frame, Kind, RowsPart};

impl Serving {
    /// Checks the row payloads of a received frame, and reserves room for new rows.
    pub(super) fn check_rows<'a>(
        &mut self,
        frame: &Frame,
        payloads: impl Iterator<Item = &'a [u8]>,
        origin: Origin,
    ) -> Result<(), Refusal> {
        if !self.table.has_rows {
            return Ok(());
        }
        let progress = state_of(frame)?.filter(|about| about.state.is_none()).map(|about| about.updates);
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (entry, payload) in entries.zip(payloads) {
            let Some(slot_index) = self.table.slot_index(entry.id).filter(|_| self.table.is_of_rows(entry)) else {
                continue;
            };
            if frame.head.kind == Kind::Push {
                // Checked before room is reserved: a restart would not reserve it.
                self.check_given_up(slot_index, frame, entry, payload)?;
            }
            let name = self.table.held(entry.id).name().to_owned();
            let chunk = &mut self.table.chunks[slot_index];
            let is_known = origin.is_before_restored(chunk);
            let room = &mut self.rows_room;
            let bucket = chunk.bucket_mut().expect("it is of rows");
            let checked = match frame.head.kind {
                Kind::Push if is_known => bucket.check(entry, payload),
                Kind::Push => bucket.reserve(room, entry, payload),
                Kind::Pull if frame.head.flags.contains(Flags::LIST) => Bucket::check_list(payload),
                Kind::Pull => bucket.check_ids(payload),
                Kind::Set if let Some(updates) = progress => Bucket::check_rates(payload, updates),
                Kind::Set if is_known => bucket.check(entry, payload),
                Kind::Set => bucket.reserve(room, entry, payload),
                _ => Ok(()),
            };
            checked.map_err(|failure| Refusal::invalid(format!("parameter \"{name}\": {failure}")))?;
        }
        Ok(())
    }

    /// Replays the updates that rows of a set missed, before it is journalled; refuses it as busy when that takes
    /// several turns. No value depends on it.
    pub(super) fn settle_set<'a>(
        &mut self,
        frame: &Frame,
        payloads: impl Iterator<Item = &'a [u8]>,
        kernels: &mut dyn Kernels,
        mut left: u64,
    ) -> Result<(), Refusal> {
        if frame.head.kind != Kind::Set || !self.table.has_rows {
            return Ok(());
        }
        let is_progress = state_of(frame)?.is_some_and(|about| about.state.is_none());
        let mut payloads = payloads;
        for entry in &frame.entries {
            let payload = (entry.bytes > 0).then(|| payloads.next().expect("there is one for every entry with bytes"));
            let Some(slot_index) = self.table.slot_index(entry.id) else { continue };
            let Some(bucket) = self.table.chunks[slot_index].bucket_mut() else { continue };
            let settled = match payload {
                _ if is_progress => Ok(bucket.settle_all(&mut self.rows_room, kernels, &mut left)),
                Some(payload) => bucket.settle_set(&mut self.rows_room, kernels, payload, &mut left),
                None => Ok(true),
            };
            if !settled.map_err(|failure| Refusal::invalid(failure.to_string()))? {
                let text = "the rows that are set are getting the updates that they missed";
                return Err(Refusal::new(ErrorCode::Busy, format!("{}: {text}", self.table.bucket_text(slot_index))));
            }
        }
        Ok(())
    }

    /// Refuses parts that follow dropped ones, before they are journalled: a restart still has the dropped parts and
    /// would combine them.
    fn check_given_up(
        &self,
        slot_index: SlotIndex,
        frame: &Frame,
        entry: &Entry,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let bucket = self.table.chunks[slot_index].bucket().expect("it is of rows");
        // An unreadable payload is refused by the next check.
        let Ok((part, _)) = RowsPart::decode(payload) else { return Ok(()) };
        if !bucket.is_given_up(part, frame.head.trainer, CallId::of(&frame.head))
            || !matches!(self.verdict(slot_index, &frame.head, entry.round), Ok(PushVerdict::New))
        {
            return Ok(());
        }
        let text =
            format!("{}: earlier parts of these rows were dropped, push them anew", self.table.bucket_text(slot_index));
        Err(Refusal::new(ErrorCode::Deadline, text))
    }

    /// Applies a push to a bucket.
    pub(super) fn push_rows(&mut self, cx: &mut Context<'_>, admitted: Admitted, mut one: Contribution) {
        let Some(lease) = one.gradient.take() else {
            self.push_whole(cx, admitted, one);
            return;
        };
        let (part, _) = RowsPart::decode(&lease.bytes()[..one.bytes as usize]).expect("the payload was checked");
        let rows = RowsLease { lease, bytes: one.bytes, element_type: one.element_type };
        one.is_early_part = part.index + 1 < part.count;
        if !self.is_awaited_part(cx, admitted, &one) {
            self.push_entry(cx, admitted, one);
        } else if part.count == 1 {
            one.rows.push(rows);
            self.push_whole(cx, admitted.as_new(), one);
        } else {
            self.gather(cx, admitted.as_new(), part, rows, one);
        }
    }

    /// Applies an undivided contribution. Drops the sender's partial contributions of this and earlier calls, which
    /// would hold the journal forever.
    fn push_whole(&mut self, cx: &mut Context<'_>, admitted: Admitted, one: Contribution) {
        let slot_index = admitted.slot_index;
        if !cx.is_before_restored(&self.table.chunks[slot_index])
            && let Some(bucket) = self.table.chunks[slot_index].bucket_mut()
        {
            bucket.forget(one.trainer, |call| call <= one.sending.call);
        }
        self.push_entry(cx, admitted, one);
    }

    /// Drops contributions whose parts are missing for `limit`, and logs their trainers.
    pub(super) fn give_up_gathered(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, limit: Duration) {
        let Some(bucket) = self.table.chunks[slot_index].bucket_mut() else { return };
        for AbandonedContribution { trainer, call, there, count, closing } in
            bucket.give_up(|since| since + limit <= cx.now)
        {
            let entry = self.table.chunks[slot_index].open_entry();
            let record = RoundsRecord::dropped(entry, self.table.generation, trainer, call);
            // Without the record a restart drops them when their time is up again.
            let _ = cx.journal.append(&record, std::iter::empty());
            let text = format!(
                "{}: {there} of {count} parts of the rows of trainer {trainer} arrived, and no other for {:.1} s; they \
                 were dropped",
                self.table.bucket_text(slot_index),
                limit.as_secs_f64()
            );
            tracing::warn!("{text}");
            if let Some((Some(peer), head)) = closing {
                cx.replies.error(peer, &head, &Refusal::new(ErrorCode::Deadline, text));
            }
        }
    }

    /// Whether a part belongs to a contribution that has not entered yet.
    fn is_awaited_part(&self, cx: &Context<'_>, admitted: Admitted, one: &Contribution) -> bool {
        let slot_index = admitted.slot_index;
        if cx.is_before_restored(&self.table.chunks[slot_index]) {
            return false;
        }
        admitted.is_new || matches!(self.verdict(slot_index, &one.sending.head, one.round), Ok(PushVerdict::New))
    }

    fn gather(
        &mut self,
        cx: &mut Context<'_>,
        admitted: Admitted,
        part: RowsPart,
        rows: RowsLease,
        mut one: Contribution,
    ) {
        let slot_index = admitted.slot_index;
        let chunk = &mut self.table.chunks[slot_index];
        let answer = chunk.version_entry();
        let bucket = chunk.bucket_mut().expect("rows are pushed to a bucket");
        if one.is_early_part {
            cx.replies.done(one.sending.peer, &one.sending.head, answer);
        }
        match bucket.gather(part, rows, &one, cx.now) {
            GatherOutcome::Some => self.waits.note(slot_index, &mut self.table.chunks[slot_index]),
            GatherOutcome::All { parts, closing } => {
                let sending = Arc::make_mut(&mut one.sending);
                (sending.peer, sending.head) = closing.unwrap_or((sending.peer, sending.head));
                one.rows = parts;
                one.is_early_part = false;
                self.push_entry(cx, admitted, one);
            }
        }
    }
}
