//! Updates of chunks that step together, because their rule needs the norm of the whole gradient.
//!
//! ```text
//! sums       of every chunk, and of each its sums of squares
//! norm       of the squares of all chunks, in their order
//! updates    of every chunk, with the numbers that the norm gives
//! values     all in place at once
//! ```
//!
//! On the processor that is one call. Chunks that live on a device make their sums there, and come back for the norm;
//! their updates are done there, and come back for the values. So the update of a parameter is called three times:
//! `update` is ready when all of its chunks are where the next step begins. Some of the chunks may be the processor's:
//! their sums are made with the others' and their updates when all others are over. Room for every value is taken
//! before anything begins, so that what has begun comes to its end.

use super::chunk::Chunk;
use super::device::{Doing, Summed};
use super::reply::{Behind, Refusal};
use super::serving::{Context, Lack, Serving};
use crate::error::Failure;
use crate::ids::{TrainerId, Version};
use crate::limits::COMES_FIRST;
use crate::memory::Lease;
use crate::optim::{Formula, Step, square_sums};
use crate::port::{Work, squares_bytes};
use crate::program::executor::Pace;
use crate::time::Now;
use crate::wire::{ErrorCode, Head};

/// The update of chunks that step together, while a device does a part of it.
pub(super) struct Underway {
    /// Pieces of work without which the next step cannot begin.
    pub(super) awaited: usize,
    /// Of the whole gradient, once all sums are there.
    norm: Option<f64>,
    /// For the values of chunks that are the processor's.
    room: Vec<Lease>,
}

impl Serving {
    /// The chunks that step together with one, in their order.
    pub(super) fn together(&self, place: usize) -> &[usize] {
        let chunk = &self.table.chunks[place];
        let held = self.table.held(chunk.id);
        if chunk.rule.rule().is_element_wise() {
            let own = held.group.chunks.binary_search_by_key(&chunk.id, |other| self.table.chunks[*other].id);
            std::slice::from_ref(&held.group.chunks[own.expect("it is one of them")])
        } else {
            &held.group.chunks
        }
    }

    /// Updates all chunks of a parameter together, once the whole gradient is there. False when a device has yet to do
    /// something, or when there is no lease for one of them, and it will be tried again.
    pub(super) fn apply_group(&mut self, cx: &mut Context<'_>, places: &[usize]) -> bool {
        let has_seat = places.iter().any(|place| self.table.chunks[*place].seat.is_some());
        // Those on a device are where the next step begins, all of them.
        match self.underway(places) {
            None if has_seat => {
                self.begin_sums(cx, places);
                false
            }
            Some(underway) if underway.norm.is_none() => self.begin_updates(cx, places) && self.end_updates(cx, places),
            _ => self.end_updates(cx, places),
        }
    }

    fn underway(&mut self, places: &[usize]) -> &mut Option<Box<Underway>> {
        let id = self.table.chunks[places[0]].id;
        let held = self.table.parameters.get_mut(&id.parameter).expect("the chunk's parameter is held");
        &mut held.group.underway
    }

    /// Sums the gradients of every chunk.
    fn begin_sums(&mut self, cx: &mut Context<'_>, places: &[usize]) {
        let Ok(mut leases) = self.room_for_values(cx, places) else {
            self.stall(places[0], Lack::Memory);
            return;
        };
        let mut underway = Underway { awaited: 0, norm: None, room: Vec::new() };
        for (place, lease) in places.iter().zip(leases.drain(..)) {
            let chunk = &mut self.table.chunks[*place];
            let Some(seat) = &mut chunk.seat else {
                underway.room.push(lease);
                continue;
            };
            seat.doing = Doing::Summing;
            let gradients = chunk.round.lend(chunk.element_type, chunk.bytes);
            cx.device().push(Work::Sum { slot: seat.slot, gradients, squares: lease });
            underway.awaited += 1;
        }
        *self.underway(places) = Some(Box::new(underway));
    }

    /// A lease for the next value of every chunk, and on the processor the sum of its gradients; or nothing is taken.
    fn room_for_values(&mut self, cx: &mut Context<'_>, places: &[usize]) -> Result<Vec<Lease>, Failure> {
        let lease = |place: &usize| {
            let chunk = &mut self.table.chunks[*place];
            if chunk.seat.is_none() {
                chunk.fold_all(cx)?;
            }
            cx.pool.take(chunk.bytes.max(squares_bytes(chunk.bytes)))
        };
        places.iter().map(lease).collect()
    }

    /// Updates the chunks that live on the device; whether that is over at once.
    fn begin_updates(&mut self, cx: &mut Context<'_>, places: &[usize]) -> bool {
        let norm = self.norm(places);
        let mut awaited = 0;
        for place in places {
            let scale = self.scale(*place);
            let chunk = &mut self.table.chunks[*place];
            let step = Step { version: Version(0), rate: chunk.round.rate(), norm: Some(norm), scale };
            awaited += usize::from(chunk.begin_update_of_sum(cx, &step));
        }
        let underway = self.underway(places).as_mut().expect("it has begun");
        (underway.norm, underway.awaited) = (Some(norm), awaited);
        awaited == 0
    }

    /// Updates the chunks that are the processor's, and puts every value in its place.
    fn end_updates(&mut self, cx: &mut Context<'_>, places: &[usize]) -> bool {
        let underway = self.underway(places).take();
        let norm = match underway {
            // What was taken for the values is free again, for them.
            Some(underway) => underway.norm.expect("the updates have begun"),
            None => {
                // The room for every new version is there before the first of them is made: all close or none.
                for place in places {
                    let chunk = &mut self.table.chunks[*place];
                    if chunk.make_writable(cx.pool).and_then(|()| chunk.fold_all(cx)).is_err() {
                        self.stall(places[0], Lack::Memory);
                        return false;
                    }
                }
                self.norm(places)
            }
        };
        for place in places {
            let applied = self.apply(cx, *place, Some(norm));
            assert!(applied, "there is room for every value of the group");
        }
        let id = self.table.chunks[places[0]].id;
        let held = self.table.parameters.get_mut(&id.parameter).expect("the chunk's parameter is held");
        held.group.owner = None;
        true
    }

    /// The norm of the whole merged gradient, whose sums are there: one total of all blocks, in their order.
    fn norm(&self, places: &[usize]) -> f64 {
        let mut total = 0.0;
        for place in places {
            self.table.chunks[*place].squares(&mut |block| total += block);
        }
        total.sqrt() * self.scale(places[0])
    }

    /// Notes that chunks of which each gradient is a round of its own wait for a device with a whole one. Who goes next
    /// may depend on what is over.
    pub(super) fn note_awaited(&mut self, pace: Pace, places: &[usize]) {
        let is_whole = pace == Pace::Any && places.iter().all(|place| self.is_complete(pace, *place));
        if is_whole && !self.table.chunks[places[0]].rule.rule().is_element_wise() {
            self.stalled.entry(places[0]).or_insert(Lack::Device);
        }
    }

    /// A trainer was refused something behind which no gradient may go, while a device worked: none enters before it
    /// has come again.
    pub(super) fn note_refused(&mut self, now: Now, trainer: TrainerId) {
        self.first = Some((trainer, now + COMES_FIRST));
    }

    /// A trainer's departure, value or return got in.
    pub(super) fn note_let_in(&mut self, trainer: TrainerId) {
        self.first = self.first.filter(|(first, _)| *first != trainer);
    }

    /// Waits no longer for who was refused and has not come again.
    pub(super) fn forget_refused(&mut self, now: Now) {
        self.first = self.first.filter(|(_, until)| now < *until);
    }

    /// Refuses a gradient that a device would work on while somebody else's departure, value or return comes first:
    /// with new gradients always ahead, a device would never be done.
    pub(super) fn check_first(&self, place: usize, head: &Head) -> Result<(), Refusal> {
        let Some((first, _)) = self.first.filter(|_| !self.comes_back(head)) else { return Ok(()) };
        let chunk = &self.table.chunks[place];
        let is_whole = !chunk.rule.rule().is_element_wise() && self.programs.of(place).pace == Pace::Any;
        if !is_whole || self.together(place).iter().all(|place| self.table.chunks[*place].seat.is_none()) {
            return Ok(());
        }
        let name = self.table.held(chunk.id).name();
        let text =
            format!("parameter \"{name}\" chunk {}: what trainer {first} was refused comes first", chunk.id.chunk);
        Err(Refusal::new(ErrorCode::Busy, text).behind(Some(Behind::Others)))
    }

    /// Whether a gradient of an earlier life of a trainer waits for its turn in one of the chunks that step together.
    pub(super) fn is_earlier_life_ahead(&self, place: usize, head: &Head) -> bool {
        let ahead = |place: &usize| self.table.chunks[*place].round.ahead(head.trainer);
        self.together(place).iter().filter_map(ahead).any(|one| one.sending.call.incarnation < head.incarnation)
    }

    /// Work of a chunk is over; whether that of others is awaited before their next step can begin.
    pub(super) fn note_over(&mut self, place: usize, was_awaited: bool) -> bool {
        let chunk = &self.table.chunks[place];
        if chunk.rule.rule().is_element_wise() {
            return false;
        }
        let is_over = was_awaited && !chunk.is_awaited();
        let Some(underway) = self.underway(&[place]) else { return false };
        underway.awaited -= usize::from(is_over);
        0 < underway.awaited
    }
}

impl Chunk {
    fn fold_all(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        self.round.fold_all(cx.kernels, cx.pool, self.element_type, self.bytes)
    }

    /// The sums of squares of its sum.
    fn squares(&self, out: &mut impl FnMut(f64)) {
        let Some(seat) = &self.seat else {
            let sum = self.round.gradients(self.element_type, self.bytes);
            return square_sums(self.element_type, sum[0].bytes, out);
        };
        let Doing::Summed(summed) = &seat.doing else { panic!("every sum is there when the norm is asked for") };
        let squares = &summed.into.bytes()[..squares_bytes(self.bytes) as usize];
        squares.as_chunks().0.iter().for_each(|block| out(f64::from_le_bytes(*block)));
    }

    /// Begins the update of a chunk whose sum is on the device; whether the device does it.
    fn begin_update_of_sum(&mut self, cx: &mut Context<'_>, step: &Step) -> bool {
        let version = Version(self.version.0 + 1);
        let Some(seat) = &mut self.seat else { return false };
        let Doing::Summed(summed) = std::mem::take(&mut seat.doing) else { panic!("its sum is there") };
        let mut numbers = Vec::new();
        let formula = self.rule.formula(&Step { version, ..*step }, &mut numbers);
        assert!(matches!(formula, Formula::Rule { .. }), "what is exact needs no norm");
        let (slot, leaves) = (seat.slot, seat.leaves);
        let Summed { gradients, into } = *summed;
        let work = Work::Update { slot, numbers, gradients, is_summed: true, into };
        if leaves {
            self.come_home(cx.kernels, Some(work));
        } else {
            seat.doing = Doing::Updating;
            cx.device().push(work);
        }
        !leaves
    }
}
