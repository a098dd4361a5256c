//! Send side of a TCP connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Stretch;
use pserver_core::port::{Event, Payloads};
use pserver_core::wire::{Flags, Frame};
use smallvec::SmallVec;

use super::checks::{ChecksumDecision, ChecksumPolicy};
use super::{IoProgress, SLICES_MAX};
use crate::payload::{held_bytes, write_checksums};
use crate::tls::TcpChannel;
use crate::turn_budget::TURN_BYTES;

/// Bytes that one call writes if so many are queued. Sealing more would wait for the socket anyway.
const CALL_BYTES: usize = 512 * 1024;
/// Memory of sent heads that a connection keeps: at most so many, and none that is longer.
const HEADS_KEPT: usize = 8;
const HEAD_BYTES_KEPT: usize = 4096;

/// The queue of frames to send, and the position of the next byte.
pub(super) struct TcpWriter {
    checking: ChecksumDecision,
    /// Frames that were not sent whole, in order.
    pub(super) queue: VecDeque<TcpQueuedFrame>,
    /// Frames at the front of the queue that are sealed.
    sealed: usize,
    /// The next slice of the first frame: zero is its head, `k` is payload `k - 1`.
    slice: usize,
    /// Bytes of that slice that were sent.
    offset: usize,
    /// Memory of sent heads.
    recycled: Vec<Vec<u8>>,
}

/// The slices of a system call.
type GatheredSlices<'a> = SmallVec<[IoSlice<'a>; 8]>;

/// A frame, with payloads in their owners' memory.
pub(super) struct TcpQueuedFrame {
    /// None for a refusal, which the transport itself sends.
    ticket: Option<Ticket>,
    /// Bytes of the frame, as [`held_bytes`] counts.
    held: u64,
    frame: Frame,
    /// The encoded head of a sealed frame. Sealing happens just before sending, so that a payload is in cache when the
    /// system copies it, and no frame waits for the checksums of later ones.
    head: Vec<u8>,
    body: Payloads,
}

impl TcpQueuedFrame {
    /// A frame that is not sealed.
    pub(super) fn new(ticket: Option<Ticket>, frame: Frame, body: Payloads) -> Self {
        Self { ticket, held: held_bytes(&frame, &body), frame, head: Vec::new(), body }
    }

    fn slices(&self) -> usize {
        1 + self.body.len()
    }

    fn bytes(&self, slice: usize) -> &[u8] {
        match slice {
            0 => &self.head,
            payload => self.body[payload - 1].bytes(),
        }
    }

    /// Appends its slices from `from` on, as far as one call takes them.
    fn gather<'a>(&'a self, from: usize, slices: &mut GatheredSlices<'a>) {
        if from == 0 && slices.len() < SLICES_MAX {
            slices.push(IoSlice::new(&self.head));
        }
        let mut stretch: Option<Stretch<'a>> = None;
        for parcel in &self.body[from.saturating_sub(1)..] {
            if let Some(stretch) = &mut stretch
                && parcel.goes_on(stretch)
                && let Some(last) = slices.last_mut()
            {
                *last = IoSlice::new(stretch.bytes());
                continue;
            }
            if slices.len() == SLICES_MAX {
                return;
            }
            stretch = parcel.stretch();
            slices.push(IoSlice::new(parcel.bytes()));
        }
    }

    fn length(&self) -> usize {
        self.head.len() + self.body.iter().map(|parcel| parcel.len() as usize).sum::<usize>()
    }

    fn seal(&mut self, checks: bool, insists: bool) {
        if insists {
            self.frame.head.flags = self.frame.head.flags.with(Flags::WANT_CHECKS);
        }
        if checks {
            write_checksums(&mut self.frame, &self.body);
        } else if !self.body.is_empty() {
            self.frame.head.flags = self.frame.head.flags.with(Flags::UNCHECKED);
        }
        self.frame.encode_into(&mut self.head);
    }
}

impl TcpWriter {
    pub(super) fn new(checks: ChecksumPolicy) -> Self {
        Self {
            checking: ChecksumDecision::new(checks),
            queue: VecDeque::new(),
            sealed: 0,
            slice: 0,
            offset: 0,
            recycled: Vec::new(),
        }
    }

    /// The peer requires checksums in frames that are not sealed yet.
    pub(super) fn follow_peer(&mut self) {
        self.checking.follow_peer();
    }

    /// Bytes that the queue holds.
    pub(super) fn held(&self) -> u64 {
        self.queue.iter().map(|frame| frame.held).sum()
    }

    /// Writes until the queue is empty and sent, the socket is full, or the budget is spent. Each system call is a
    /// vectored write, of several frames when they are small.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        channel: &mut TcpChannel,
        events: &mut Vec<Event>,
    ) -> io::Result<IoProgress> {
        let mut written = 0;
        while !self.queue.is_empty() || channel.has_unsent() {
            if written >= TURN_BYTES {
                return Ok(IoProgress::BudgetSpent);
            }
            let checks = self.checking.is_on(channel);
            self.seal(checks);
            let slices = self.gather();
            let (sent, outcome) = channel.send(&slices);
            drop(slices);
            written += sent;
            self.consume(sent, peer, events);
            match outcome {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(IoProgress::Blocked),
                Err(error) => return Err(error),
            }
        }
        Ok(IoProgress::Idle)
    }

    /// Returns the frames of which nothing was sent.
    pub(super) fn take_unbegun(&mut self) -> Vec<(Ticket, Payloads)> {
        let begun = usize::from(self.slice > 0 || self.offset > 0);
        self.sealed = begun;
        returned_bodies(self.queue.drain(begun..))
    }

    /// Returns every frame that was not sent whole.
    pub(super) fn take_all(&mut self) -> Vec<(Ticket, Payloads)> {
        (self.slice, self.offset, self.sealed) = (0, 0, 0);
        returned_bodies(self.queue.drain(..))
    }

    /// Seals as many frames as one call should write.
    fn seal(&mut self, checks: bool) {
        let insists = self.checking.insists();
        let mut bytes =
            self.queue.iter().take(self.sealed).map(TcpQueuedFrame::length).sum::<usize>() - self.sent_bytes();
        while bytes < CALL_BYTES
            && let Some(next) = self.queue.get_mut(self.sealed)
        {
            next.head = self.recycled.pop().unwrap_or_default();
            next.seal(checks, insists);
            bytes += next.length();
            self.sealed += 1;
        }
    }

    /// Bytes of the first frame that were sent.
    fn sent_bytes(&self) -> usize {
        let first = self.queue.front().into_iter();
        self.offset + first.flat_map(|first| (0..self.slice).map(|slice| first.bytes(slice).len())).sum::<usize>()
    }

    /// The next slices to send. Adjacent small chunks form one slice: a slice costs the system as much as copying some
    /// hundred bytes.
    fn gather(&self) -> GatheredSlices<'_> {
        let sealed = || self.queue.iter().take(self.sealed);
        let count: usize = sealed().map(TcpQueuedFrame::slices).sum();
        let mut slices = GatheredSlices::with_capacity(count.min(SLICES_MAX));
        let mut skipped = self.slice;
        for frame in sealed() {
            frame.gather(std::mem::take(&mut skipped), &mut slices);
        }
        if let Some(first) = slices.first_mut() {
            first.advance(self.offset);
        }
        slices
    }

    fn consume(&mut self, mut bytes: usize, peer: PeerId, events: &mut Vec<Event>) {
        // Only sealed frames have a length.
        while self.sealed > 0
            && let Some(first) = self.queue.front()
        {
            let left = first.bytes(self.slice).len() - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            (self.slice, self.offset) = (self.slice + 1, 0);
            if self.slice == first.slices() {
                self.slice = 0;
                self.sealed -= 1;
                let TcpQueuedFrame { ticket, head, body, .. } = self.queue.pop_front().expect("it was just looked at");
                if head.capacity() <= HEAD_BYTES_KEPT && self.recycled.len() < HEADS_KEPT {
                    self.recycled.push(head);
                }
                events.extend(ticket.map(|ticket| Event::Sent { peer, ticket, body }));
            }
        }
    }
}

fn returned_bodies(shipments: impl Iterator<Item = TcpQueuedFrame>) -> Vec<(Ticket, Payloads)> {
    shipments.filter_map(|frame| frame.ticket.map(|ticket| (ticket, frame.body))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pserver_core::memory::{Arena, Budget, Lease, Value};
    use pserver_core::port::Outgoing;
    use pserver_core::wire::{Head, Kind};

    use super::*;

    /// Checks the slices of a frame with values of 64 bytes in these slots, when `offset` bytes of slice `slice` were
    /// sent.
    fn check(slots: &[usize], (slice, offset): (usize, usize), expected: &[usize]) {
        let mut budget = Budget::new();
        budget.line("test", 64, 8);
        let mut leases: Vec<Option<Lease>> = Vec::new();
        let arena = Arena::new(&budget).expect("it is small");
        arena.take_many(64, 8, &mut |lease| leases.push(Some(lease))).expect("there are eight");
        let value = |slot: &usize| {
            let mut lease = leases[*slot].take().expect("it is named once");
            lease.bytes_mut().fill(u8::try_from(*slot).expect("there are eight"));
            Outgoing::Value(Arc::new(Value::new(lease, 64)))
        };
        let body: Payloads = slots.iter().map(value).collect();
        let frame = Frame::bare(Head::new(Kind::Value));
        let head = frame.encode();
        let all: Vec<&[u8]> = std::iter::once(&head[..]).chain(body.iter().map(Outgoing::bytes)).collect();
        let left = [&all[slice][offset..], &all[slice + 1..].concat()].concat();
        let frame = TcpQueuedFrame { head: head.clone(), ..TcpQueuedFrame::new(None, frame, body) };
        let mut writer = TcpWriter::new(ChecksumPolicy::BetweenHosts);
        (writer.sealed, writer.slice, writer.offset) = (1, slice, offset);
        writer.queue.push_back(frame);
        let slices = writer.gather();
        assert_eq!(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>(), expected);
        assert_eq!(slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>(), left);
    }

    #[test]
    fn adjacent_values_are_written_as_one_slice() {
        let head = Frame::bare(Head::new(Kind::Value)).encode().len();
        check(&[0, 1, 2], (0, 0), &[head, 192]);
        check(&[0, 1, 2], (0, 5), &[head - 5, 192]);
        check(&[0, 1, 2], (2, 60), &[68]);
        check(&[1, 0, 2, 3], (0, 0), &[head, 64, 64, 128]);
        check(&[1, 0, 2, 3], (1, 1), &[63, 64, 128]);
    }
}
