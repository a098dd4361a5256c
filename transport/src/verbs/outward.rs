//! Frames on their way out of one connection.
//!
//! The connecting side writes, where a long payload stands in its frame, where it is: in a buffer, or in staging. The
//! frame's parcels are back when the other side says that it has read them. The accepting side writes nothing there:
//! the frame waits, behind those before it, until the other side says where its payloads go, and then they are
//! written.

use std::collections::VecDeque;
use std::sync::Arc;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Lease;
use pserver_core::port::{Event, Outgoing};
use pserver_core::wire::{Flags, Frame};

use super::flights::Source;
use super::letters::{PLACE_BYTES, Place};
use super::mail::Mail;
use super::provider::{Act, FarPlace};
use super::registry::Counters;
use super::staging::Staging;
use super::{Ended, INLINE_BYTES_MAX, MESSAGES, Side};
use crate::payload::seal;

/// A head that was longer is not kept for the next one.
const HEAD_BYTES_KEPT: usize = 256 * 1024;

/// A frame's parcels, for whoever submitted it.
type Parcels = (Ticket, Vec<Outgoing>);

/// The frames that have not left yet, and those whose payloads have not.
pub(super) struct Outward {
    side: Side,
    is_checked: bool,
    queue: VecDeque<Shipment>,
    /// Frames of the connecting side whose payloads the other side reads, in order.
    lent: VecDeque<Lent>,
    /// Frames of the accepting side that wait to learn where their payloads go, in order; then those that are written.
    offered: VecDeque<Offered>,
    written: VecDeque<Parcels>,
    /// Frames whose last write was posted: the number that goes with it.
    numbers: u32,
    staging: Staging,
    counters: Arc<Counters>,
    spare: Spare,
}

/// Memory of frames that have left, for those that come: nothing is allocated for a frame like one before.
#[derive(Default)]
struct Spare {
    heads: Vec<Vec<u8>>,
    staged: Vec<Vec<Lease>>,
    offers: Vec<(Vec<usize>, VecDeque<Place>)>,
}

struct Shipment {
    ticket: Ticket,
    head: Vec<u8>,
    body: Vec<Outgoing>,
    /// What goes next: zero is the head, `k` is payload `k - 1`.
    slice: usize,
    /// Bytes of it that have left.
    offset: usize,
    /// Long payloads, and of these the copies.
    long: usize,
    staged: Vec<Lease>,
}

struct Lent {
    /// None when all of them were copied, and were given back.
    parcels: Option<Parcels>,
    /// It is held, and given back when it was read.
    staged: Vec<Lease>,
}

struct Offered {
    parcels: Parcels,
    /// The long payloads: which of the body.
    long: Vec<usize>,
    places: VecDeque<Place>,
    /// How many were asked for, and how many were written.
    granted: usize,
    written: usize,
}

/// How far writing came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// Everything.
    All,
    /// Until the other side says something.
    Full,
    /// There is more, but others wait.
    Turn,
}

impl Outward {
    pub(super) fn new(side: Side, is_checked: bool, staging: Staging, counters: &Arc<Counters>) -> Self {
        Self {
            side,
            is_checked,
            queue: VecDeque::new(),
            lent: VecDeque::new(),
            offered: VecDeque::new(),
            written: VecDeque::new(),
            numbers: 0,
            staging,
            counters: Arc::clone(counters),
            spare: Spare::default(),
        }
    }

    /// Frames that have not left, or whose payloads have not.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.lent.len() + self.offered.len() + self.written.len()
    }

    /// Adds a frame to the end.
    pub(super) fn push(&mut self, ticket: Ticket, mut frame: Frame, body: Vec<Outgoing>) {
        if self.is_checked {
            seal(&mut frame, &body);
        } else if !body.is_empty() {
            // The card checks every packet.
            frame.head.flags = frame.head.flags.with(Flags::UNCHECKED);
        }
        let (mut head, staged) =
            (self.spare.heads.pop().unwrap_or_default(), self.spare.staged.pop().unwrap_or_default());
        frame.encode_into(&mut head);
        self.queue.push_back(Shipment { ticket, head, body, slice: 0, offset: 0, long: 0, staged });
    }

    /// Writes until nothing is left, nothing more fits, or `bytes_max` bytes were moved.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        mail: &mut Mail,
        bytes_max: usize,
        events: &mut Vec<Event>,
    ) -> Result<Written, Ended> {
        let mut moved = 0;
        self.write_granted(mail)?;
        while let Some(first) = self.queue.front_mut() {
            if moved >= bytes_max {
                return Ok(Written::Turn);
            }
            let Some(bytes) = first.step(self.side, mail, &mut self.staging, &self.counters)? else {
                return Ok(Written::Full);
            };
            moved += bytes;
            if first.slice > first.body.len() {
                self.finish(peer, events);
            }
        }
        Ok(Written::All)
    }

    /// The first frame has left, but perhaps for its long payloads.
    fn finish(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let Shipment { ticket, head, body, long, staged, .. } = self.queue.pop_front().expect("the caller looked");
        if head.capacity() <= HEAD_BYTES_KEPT {
            self.spare.heads.push(head);
        }
        if long == 0 {
            events.push(Event::Sent { peer, ticket, body });
            self.spare.staged.push(staged);
        } else if self.side == Side::Accepting {
            let (mut long, places) = self.spare.offers.pop().unwrap_or_default();
            long.extend((0..body.len()).filter(|index| body[*index].len() > INLINE_BYTES_MAX));
            self.offered.push_back(Offered { parcels: (ticket, body), long, places, granted: 0, written: 0 });
            self.spare.staged.push(staged);
        } else if long == staged.len() {
            events.push(Event::Sent { peer, ticket, body });
            self.lent.push_back(Lent { parcels: None, staged });
        } else {
            events.push(Event::Left { peer, ticket });
            self.lent.push_back(Lent { parcels: Some((ticket, body)), staged });
        }
    }

    /// The other side has read the payloads of so many frames.
    pub(super) fn taken(&mut self, peer: PeerId, frames: u16, events: &mut Vec<Event>) -> Result<(), Ended> {
        for _ in 0..frames {
            let lent = self.lent.pop_front();
            let lent =
                lent.ok_or_else(|| Ended::Broken("a payload was read that was not there to be read".to_owned()))?;
            events.extend(lent.parcels.map(|(ticket, body)| Event::Sent { peer, ticket, body }));
            let mut staged = lent.staged;
            staged.clear();
            self.spare.staged.push(staged);
        }
        Ok(())
    }

    /// The other side says where payloads go.
    pub(super) fn granted(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        let (places, rest) = bytes.as_chunks::<PLACE_BYTES>();
        if !rest.is_empty() || self.side == Side::Connecting {
            return Err(Ended::Broken(format!("{} bytes of places, which nobody asked for", bytes.len())));
        }
        for place in places.iter().map(Place::decode) {
            let waits = self.offered.iter_mut().find(|offered| offered.granted < offered.long.len());
            let Some(offered) = waits else {
                return Err(Ended::Broken("a place for a payload that was not offered".to_owned()));
            };
            let expected = offered.parcels.1[offered.long[offered.granted]].len();
            if place.bytes != 0 && place.bytes != expected {
                return Err(Ended::Broken(format!("a place of {} bytes for a payload of {expected}", place.bytes)));
            }
            offered.granted += 1;
            offered.places.push_back(place);
        }
        Ok(())
    }

    /// Writes what has a place, as far as there is room for work.
    fn write_granted(&mut self, mail: &mut Mail) -> Result<(), Ended> {
        while let Some(first) = self.offered.front_mut() {
            while let Some(place) = first.places.front().copied() {
                let is_last = first.written + 1 == first.long.len();
                if place.bytes == 0 && !is_last {
                    first.places.pop_front();
                    first.written += 1;
                    continue;
                }
                if mail.flights.room() <= MESSAGES as usize {
                    return Ok(());
                }
                let payload = &first.parcels.1[first.long[first.written]];
                let (source, key) = if place.bytes == 0 {
                    (Source::Nothing, 0)
                } else {
                    match source(payload, &mut self.staging, &self.counters)? {
                        Some(source) => source,
                        None => return Ok(()),
                    }
                };
                if is_last && !mail.take_note() {
                    return Ok(());
                }
                let number = is_last.then_some(self.numbers);
                let far = if place.bytes == 0 { FarPlace { address: 0, key: 0 } } else { place.far };
                mail.flights.write(Act::Write(far, number), source, key, is_last);
                self.counters.moved(place.bytes as usize);
                first.places.pop_front();
                first.written += 1;
            }
            if first.written < first.long.len() {
                return Ok(());
            }
            self.numbers = self.numbers.wrapping_add(1);
            let Offered { parcels, mut long, places, .. } = self.offered.pop_front().expect("it was just looked at");
            self.written.push_back(parcels);
            long.clear();
            self.spare.offers.push((long, places));
        }
        Ok(())
    }

    /// The last payload of the frame that was written first is there.
    pub(super) fn arrived(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let (ticket, body) = self.written.pop_front().expect("one last write of each frame was posted");
        events.push(Event::Sent { peer, ticket, body });
    }

    /// Gives back the frames that have not begun to leave.
    pub(super) fn take_unbegun(&mut self) -> Vec<Parcels> {
        let begun = self.queue.front().is_some_and(|first| first.slice > 0 || first.offset > 0);
        self.queue.drain(usize::from(begun)..).map(|shipment| (shipment.ticket, shipment.body)).collect()
    }

    /// Deregisters what the other side was told of; whether it cannot reach it any more.
    pub(super) fn end_memory(&self) -> bool {
        self.staging.registry().end()
    }

    /// Gives back every frame that has not left whole, or is still read or written. The pair is closed.
    pub(super) fn take_all(&mut self) -> Vec<Parcels> {
        let lent = self.lent.drain(..).filter_map(|lent| lent.parcels);
        let offered = self.offered.drain(..).map(|offered| offered.parcels);
        let queued = self.queue.drain(..).map(|shipment| (shipment.ticket, shipment.body));
        lent.chain(self.written.drain(..)).chain(offered).chain(queued).collect()
    }
}

/// What a payload is written from: itself where it lies in memory that can be registered, else a copy.
fn source(payload: &Outgoing, staging: &mut Staging, counters: &Counters) -> Result<Option<(Source, u32)>, Ended> {
    if let Outgoing::Value(value) = payload
        && let Some(key) = staging.registry().key_of(value.lease())?
    {
        return Ok(Some((Source::Value(Arc::clone(value)), key)));
    }
    let Some(lease) = staged(payload, staging, counters)? else { return Ok(None) };
    let key = staging.registry().own_key_of(&lease)?;
    Ok(Some((Source::Staged(lease), key)))
}

/// The other side's key for a payload that it can read itself; nothing when there must be a copy.
fn in_place(payload: &Outgoing, staging: &Staging) -> Result<Option<u32>, Ended> {
    let Outgoing::Loan(loan) = payload else { return Ok(None) };
    let Some((memory, offset)) = loan.mapped() else { return Ok(None) };
    Ok(staging.registry().far_key_within(memory, offset)?)
}

fn staged(payload: &Outgoing, staging: &mut Staging, counters: &Counters) -> Result<Option<Lease>, Ended> {
    let Some(mut lease) = staging.take(payload.len())? else { return Ok(None) };
    lease.bytes_mut().copy_from_slice(payload.bytes());
    counters.copied(payload.len() as usize);
    Ok(Some(lease))
}

impl Shipment {
    /// The next slice, or as much of it as fits; the bytes moved, or nothing when nothing fits.
    fn step(
        &mut self,
        side: Side,
        mail: &mut Mail,
        staging: &mut Staging,
        counters: &Counters,
    ) -> Result<Option<usize>, Ended> {
        if self.slice > 0 && self.body[self.slice - 1].len() > INLINE_BYTES_MAX {
            return self.refer(mail, staging, counters);
        }
        let bytes = match self.slice {
            0 => &self.head,
            payload => self.body[payload - 1].bytes(),
        };
        let (whole, moved) = (bytes.len(), mail.put(&bytes[self.offset..]));
        self.offset += moved;
        if self.slice > 0 {
            counters.copied(moved);
        }
        if self.offset == whole {
            (self.slice, self.offset) = (self.slice + 1, 0);
            if side == Side::Accepting {
                self.pass_long();
            }
            return Ok(Some(moved));
        }
        Ok((moved > 0).then_some(moved))
    }

    /// The accepting side puts nothing where long payloads stand. They leave with what is before them: the other side
    /// knows from the last message of a frame that the frame is offered.
    fn pass_long(&mut self) {
        while self.body.get(self.slice - 1).is_some_and(|payload| payload.len() > INLINE_BYTES_MAX) {
            (self.long, self.slice) = (self.long + 1, self.slice + 1);
        }
    }

    /// Where the connecting side has a payload that does not travel in messages.
    fn refer(&mut self, mail: &mut Mail, staging: &mut Staging, counters: &Counters) -> Result<Option<usize>, Ended> {
        let mut moved = 0;
        if !mail.has_room(PLACE_BYTES) {
            return Ok(None);
        }
        let payload = &self.body[self.slice - 1];
        let (address, key) = match in_place(payload, staging)? {
            Some(key) => (payload.bytes().as_ptr().expose_provenance(), key),
            None => {
                let Some(lease) = staged(payload, staging, counters)? else { return Ok(None) };
                moved = payload.len() as usize;
                let key = staging.registry().far_key_of(&lease)?;
                let address = lease.bytes().as_ptr().expose_provenance();
                self.staged.push(lease);
                (address, key)
            }
        };
        let place = Place { far: FarPlace { address: address as u64, key }, bytes: payload.len() };
        let put = mail.put(&place.encode());
        assert_eq!(put, PLACE_BYTES, "there was room for it");
        self.long += 1;
        self.slice += 1;
        Ok(Some(moved))
    }
}
