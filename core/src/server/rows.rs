//! What serving does otherwise for buckets: contributions that come in parts, budgets, and answers by rows.
//!
//! A contribution to a bucket may be longer than a payload. Its parts are gathered beside the round, and enter it as
//! one contribution when the last is there, so that a round knows nothing of parts. Every part but the one with the
//! highest number is acknowledged as it comes, because it is in the journal; that one is answered as a contribution
//! without parts would be, and so makes a trainer wait that is ahead.

use std::sync::Arc;
use std::time::Duration;

use super::bucket::{Bucket, Gathered, GivenUp, RowsLease, RowsPlan, RowsRoom};
use super::chunk::{Chunk, Content, Mark, Waiter};
use super::reply::Refusal;
use super::round::Contribution;
use super::serving::{Context, Serving, Verdict, version_entry};
use crate::error::Failure;
use crate::ids::{Incarnation, PeerId, TrainerId, Version};
use crate::memory::Value;
use crate::optim::{Prepared, Step};
use crate::port::Kernels;
use crate::rows::Reading;
use crate::wire::{Entry, ErrorCode, Flags, Frame, Head, Kind, RowsPart};

/// A pull of rows, as far as it is answered. One whose rows have missed much is answered in several turns, and says the
/// version at which it began: each row is of that one or a later one.
pub(super) struct RowsPull {
    place: usize,
    waiter: Waiter,
    entry: Entry,
    value: Value,
    reading: Reading,
}

impl Serving {
    /// Whether there is a bucket.
    pub(super) fn has_rows(&self) -> bool {
        self.table.has_rows
    }

    /// Whether the payload of an entry is rows or their ids.
    pub(super) fn is_of_rows(&self, entry: &Entry) -> bool {
        self.has_rows() && self.table.place(entry.id).is_some_and(|place| self.table.chunks[place].bucket().is_some())
    }

    /// Checks what a frame brings for buckets, once it is here: that it is rows, and that there is room for those that
    /// are new.
    pub(super) fn check_rows<'a>(
        &mut self,
        frame: &Frame,
        payloads: impl Iterator<Item = &'a [u8]>,
        position: u64,
    ) -> Result<(), Refusal> {
        if !self.has_rows() {
            return Ok(());
        }
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (entry, payload) in entries.zip(payloads) {
            let Some(place) = self.table.place(entry.id).filter(|_| self.is_of_rows(entry)) else { continue };
            if frame.head.kind == Kind::Push {
                // Before there is room for its rows: a restart would not make it.
                self.check_given_up(place, frame, entry, payload)?;
            }
            let name = self.table.held(entry.id).name().to_owned();
            let chunk = &mut self.table.chunks[place];
            let is_known = chunk.is_before_restored(position);
            let room = &mut self.rows_room;
            let bucket = chunk.bucket_mut().expect("it is of rows");
            let checked = match frame.head.kind {
                Kind::Push if is_known => bucket.check(entry, payload),
                Kind::Push => bucket.reserve(room, entry, payload),
                Kind::Pull if frame.head.flags.contains(Flags::LIST) => Bucket::check_list(payload),
                Kind::Pull => bucket.check_ids(payload),
                _ => Ok(()),
            };
            checked.map_err(|failure| Refusal::invalid(format!("parameter \"{name}\": {failure}")))?;
        }
        Ok(())
    }

    /// What follows parts that were dropped is refused before it is in the journal: a restart, which has not dropped
    /// them, would put all together.
    fn check_given_up(&self, place: usize, frame: &Frame, entry: &Entry, payload: &[u8]) -> Result<(), Refusal> {
        let bucket = self.table.chunks[place].bucket().expect("it is of rows");
        // What cannot be read is refused with its reason next.
        let Ok((part, _)) = RowsPart::decode(payload) else { return Ok(()) };
        if !bucket.is_given_up(part, frame.head.trainer, Mark::of(&frame.head))
            || !matches!(self.verdict(place, &frame.head, entry), Ok(Verdict::New))
        {
            return Ok(());
        }
        let text = format!("{}: earlier parts of these rows were dropped, push them anew", self.bucket_text(place));
        Err(Refusal::new(ErrorCode::Deadline, text))
    }

    /// A push of rows is not answered with a value: which rows would that be?
    pub(super) fn check_rows_wish(&self, place: usize, head: &Head) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[place];
        if chunk.bucket().is_none() || !head.flags.contains(Flags::WANT_VALUE) {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        Err(Refusal::invalid(format!("parameter \"{name}\" is sparse: a push of rows cannot ask for the value")))
    }

    /// Only a bucket is asked for rows, and only another chunk for halves.
    pub(super) fn check_wishes(&self, frame: &Frame, places: &[usize]) -> Result<(), Refusal> {
        for (entry, place) in frame.entries.iter().zip(places) {
            self.check_half(*place, entry)?;
            if entry.bytes > 0 && self.table.chunks[*place].bucket().is_none() {
                let name = self.table.held(entry.id).name();
                return Err(Refusal::invalid(format!("parameter \"{name}\" is not sparse: it has no rows to ask for")));
            }
        }
        Ok(())
    }

    /// Takes in what a push brings to a bucket.
    pub(super) fn push_rows(&mut self, cx: &mut Context<'_>, place: usize, entry: &Entry, mut one: Contribution) {
        let Some(lease) = one.gradient.take() else {
            self.push_whole(cx, place, entry, one);
            return;
        };
        let (part, _) = RowsPart::decode(&lease.bytes()[..entry.bytes as usize]).expect("the payload was checked");
        let rows = RowsLease { lease, bytes: entry.bytes, element_type: entry.element_type, position: cx.position };
        one.is_early_part = part.index + 1 < part.count;
        if !self.is_wanted(cx, place, &one, entry) {
            self.push_entry(cx, place, entry, one);
        } else if part.count == 1 {
            one.rows.push(rows);
            self.push_whole(cx, place, entry, one);
        } else {
            self.gather(cx, place, entry, part, rows, one);
        }
    }

    /// Takes in a contribution that has no parts. Parts of this call or an earlier one were given up by their sender,
    /// and would be kept, with the journal from there on, for good.
    fn push_whole(&mut self, cx: &mut Context<'_>, place: usize, entry: &Entry, one: Contribution) {
        if !self.is_before_restored(cx, place)
            && let Some(bucket) = self.table.chunks[place].bucket_mut()
        {
            bucket.forget(one.trainer, |call| call <= one.sending.call);
        }
        self.push_entry(cx, place, entry, one);
    }

    /// Forgets what earlier lives of a trainer began, of which nothing more will be taken.
    pub(super) fn forget_earlier_lives(&mut self, trainer: TrainerId, incarnation: Incarnation) {
        for bucket in self.table.chunks.iter_mut().filter_map(Chunk::bucket_mut) {
            bucket.forget(trainer, |call| call.incarnation < incarnation);
        }
    }

    /// Forgets the parts of a trainer that will not send the rest.
    pub(super) fn forget_gathered(&mut self, position: u64, trainer: TrainerId) {
        for chunk in self.table.chunks.iter_mut().filter(|chunk| !chunk.is_before_restored(position)) {
            if let Some(bucket) = chunk.bucket_mut() {
                bucket.forget(trainer, |_| true);
            }
        }
    }

    /// Drops contributions of which parts have been missing for `limit`, and names whose they are.
    pub(super) fn give_up_gathered(&mut self, cx: &mut Context<'_>, place: usize, limit: Duration) {
        let Some(bucket) = self.table.chunks[place].bucket_mut() else { return };
        for GivenUp { trainer, there, count, closing, .. } in bucket.give_up(|since| since + limit <= cx.now) {
            let text = format!(
                "{}: {there} of {count} parts of the rows of trainer {trainer} came, and no other for {:.1} s; they \
                 were dropped",
                self.bucket_text(place),
                limit.as_secs_f64()
            );
            tracing::warn!("{text}");
            if let Some((peer, head)) = closing {
                cx.replies.error(peer, &head, &Refusal::new(ErrorCode::Deadline, text));
            }
        }
    }

    fn bucket_text(&self, place: usize) -> String {
        let id = self.table.chunks[place].id;
        format!("parameter \"{}\" bucket {}", self.table.held(id).name(), id.chunk)
    }

    /// Answers with rows, or with ids of rows that are there.
    pub(super) fn answer_rows(&mut self, cx: &mut Context<'_>, place: usize, waiter: Waiter) {
        let chunk = &self.table.chunks[place];
        let entry = version_entry(chunk);
        let bucket = chunk.bucket().expect("a wish for rows is one to a bucket");
        let wish = waiter.wish.as_ref().expect("who asks a bucket says for what");
        let is_list = waiter.head.flags.contains(Flags::LIST);
        let begun = if is_list { bucket.list(cx.pool, wish) } else { bucket.begin_read(cx.pool, wish) };
        match begun {
            Ok(Some(value)) => {
                let entry = Entry { bytes: value.len(), ..entry };
                let pull = RowsPull { place, waiter, entry, value, reading: Reading::default() };
                if is_list { pull.answer(cx) } else { self.read_on(cx, pull) }
            }
            Ok(None) => cx.replies.nothing(waiter.peer, &waiter.head, entry),
            Err(failure) => {
                let refusal = Refusal::new(ErrorCode::Busy, failure.to_string());
                cx.replies.error(waiter.peer, &waiter.head, &refusal);
            }
        }
    }

    /// Goes on with a pull. If it is not over it waits for its next turn, behind the others.
    fn read_on(&mut self, cx: &mut Context<'_>, mut pull: RowsPull) {
        let RowsPull { place, waiter, value, reading, .. } = &mut pull;
        let bucket = self.table.chunks[*place].bucket_mut().expect("a wish for rows is one to a bucket");
        let wish = waiter.wish.as_ref().expect("who asks a bucket says for what");
        if bucket.read(&mut self.rows_room, cx.kernels, wish, reading, value, &mut cx.left) {
            pull.answer(cx);
        } else {
            self.slow_pulls.push_back(pull);
        }
    }

    /// Goes on with the pulls that take more than a turn; whether there were any.
    pub(super) fn read_on_slow(&mut self, cx: &mut Context<'_>) -> bool {
        let count = self.slow_pulls.len();
        for _ in 0..count {
            if cx.left == 0 {
                break;
            }
            let pull = self.slow_pulls.pop_front().expect("they were counted");
            self.read_on(cx, pull);
        }
        count > 0
    }

    /// Gives up the pulls of somebody who is gone.
    pub(super) fn forget_pulls(&mut self, peer: PeerId) {
        self.slow_pulls.retain(|pull| pull.waiter.peer != peer);
    }

    /// Whether a part belongs to a contribution that is still to come.
    fn is_wanted(&self, cx: &Context<'_>, place: usize, one: &Contribution, entry: &Entry) -> bool {
        let chunk = &self.table.chunks[place];
        if self.is_before_restored(cx, place) {
            let is_there = chunk.round.open().any(|open| (open.trainer, open.call) == (one.trainer, one.sending.call));
            return !is_there && chunk.open_in_checkpoint(&one.sending.head).is_some();
        }
        matches!(self.verdict(place, &one.sending.head, entry), Ok(Verdict::New))
    }

    fn gather(
        &mut self,
        cx: &mut Context<'_>,
        place: usize,
        entry: &Entry,
        part: RowsPart,
        rows: RowsLease,
        mut one: Contribution,
    ) {
        let chunk = &mut self.table.chunks[place];
        let answer = version_entry(chunk);
        let bucket = chunk.bucket_mut().expect("rows are pushed to a bucket");
        if one.is_early_part {
            cx.replies.done(one.sending.peer, &one.sending.head, answer);
        }
        match bucket.gather(part, rows, &one, cx.now) {
            Gathered::Some => self.note_waits(place),
            Gathered::All { parts, closing } => {
                let sending = Arc::make_mut(&mut one.sending);
                sending.position = parts.iter().map(|part| part.position).min().unwrap_or(sending.position);
                (sending.peer, sending.head) = closing.unwrap_or((sending.peer, sending.head));
                one.rows = parts;
                one.is_early_part = false;
                self.push_entry(cx, place, entry, one);
            }
        }
    }
}

impl RowsPull {
    fn answer(self, cx: &mut Context<'_>) {
        cx.replies.value(self.waiter.peer, &self.waiter.head, self.entry, Arc::new(self.value));
    }
}

impl Chunk {
    /// Turns the contributions of the round into the next version of a bucket; false when it takes another turn.
    pub(super) fn update_rows(
        &mut self,
        room: &mut RowsRoom,
        kernels: &mut dyn Kernels,
        step: &Step,
        left: &mut u64,
    ) -> Result<bool, Failure> {
        let step = Step { version: Version(self.version.0 + 1), ..*step };
        let Content::Rows(bucket) = &mut self.content else { panic!("rows go to a bucket") };
        let is_over = bucket.update(room, kernels, &step, self.round.rows(), left)?;
        if is_over {
            self.version = step.version;
        }
        Ok(is_over)
    }

    /// Goes on under another rule, before the first update.
    pub(super) fn follow(&mut self, rule: &Arc<Prepared>, plan: Option<&RowsPlan>) -> Result<(), Failure> {
        self.rule = Arc::clone(rule);
        if let (Some(bucket), Some(plan)) = (self.bucket_mut(), plan) {
            bucket.follow(rule, plan)?;
        }
        Ok(())
    }
}
