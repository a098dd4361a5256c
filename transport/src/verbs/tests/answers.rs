//! Tests of answers whose receive buffers are posted with the requests.

use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, PeerId, Round, Ticket};
use pserver_core::memory::{Buffer, lend};
use pserver_core::port::{Incoming, Outgoing, Payloads, ReceiveBuffers, Submit};
use pserver_core::wire::{Entry, Frame, Head, Kind};

use super::fixtures::ends;
use super::hostile_client::TestRng;
use crate::conformance::rig::{ConformanceRig, SeenEvent, bytes};
use crate::network::NetworkOptions;
use crate::verbs::answers::NAMED_MAX;
use crate::verbs::software_device::{DeviceCounts, SoftwareDevice};
use crate::verbs::{VerbsDevice, VerbsDevices};

/// Lengths of values; 8,192 bytes are the longest that come in messages.
const LENGTHS: [usize; 6] = [64, 8192, 8193, 40_000, 100, 262_144];
/// The content of a buffer before a value arrives.
const POISON: u8 = 0xa5;

/// A request whose answer has buffers, and the expected end of each buffer.
struct Asked {
    ticket: Ticket,
    ids: Vec<ChunkId>,
    lengths: Vec<usize>,
    /// The value that each buffer must hold.
    expected: Vec<Option<Vec<u8>>>,
    /// Lengths of the buffers that must be returned without a value.
    unused: Vec<u32>,
}

fn software_rig() -> (ConformanceRig, Arc<SoftwareDevice>) {
    let software_device = Arc::new(SoftwareDevice::new());
    let devices = VerbsDevices::This(VerbsDevice(Arc::clone(&software_device) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    (ConformanceRig::new(ends("verbs://127.0.0.1:0", &options)), software_device)
}

fn chunk(number: usize) -> ChunkId {
    ChunkId { parameter: ParameterIndex(1), chunk: ChunkIndex(number as u64) }
}

fn shuffled(count: usize, numbers: &mut TestRng) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    for at in (1..count).rev() {
        order.swap(at, numbers.below(at + 1));
    }
    order
}

/// A pull of these chunks.
fn pull(ticket: Ticket, ids: &[ChunkId]) -> Frame {
    let entries = ids.iter().map(|id| Entry::bare(*id, Round(0), ElementType::Float32)).collect();
    Frame { entries, ..Frame::bare(Head { request: ticket, ..Head::new(Kind::Pull) }) }
}

/// Submits a request, with these buffers for its answer.
fn ask(rig: &mut ConformanceRig, near: PeerId, frame: &Frame, into: ReceiveBuffers) {
    rig.near.receives_out += into.len();
    rig.near.queue.push_back(Submit::PostAnswer { peer: near, request: frame.head.request, into });
    rig.near.send(near, frame, Payloads::new());
}

/// Sends an answer with these values; an empty one is none.
fn answer(rig: &mut ConformanceRig, far: PeerId, (request, kind): (Ticket, Kind), values: &[(ChunkId, Vec<u8>)]) {
    let mut frame = Frame::bare(Head { request, ..Head::new(kind) });
    let mut body = Payloads::new();
    for (id, value) in values {
        let float = ElementType::Float32;
        frame.entries.push(match value.is_empty() {
            true => Entry::bare(*id, Round(1), float),
            false => Entry::with_payload(*id, Round(1), float, value),
        });
        body.extend((!value.is_empty()).then(|| Outgoing::Value(rig.far.lease(value))));
    }
    rig.far.send(far, &frame, body);
}

impl Asked {
    /// A request of some chunks, one of them perhaps twice.
    fn random(ticket: u64, numbers: &mut TestRng) -> Self {
        let count = 1 + numbers.below(5);
        let ids: Vec<_> = (0..count).map(|_| chunk(numbers.below(4))).collect();
        let lengths: Vec<_> = (0..count).map(|_| LENGTHS[numbers.below(LENGTHS.len())]).collect();
        Self { ticket: Ticket(ticket), ids, lengths, expected: vec![None; count], unused: Vec::new() }
    }

    fn length(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Answers in one to three frames, in any order of the entries, and records the end of each buffer. Some
    /// values are empty or of another length, and some requests end with a refusal.
    fn answer(&mut self, rig: &mut ConformanceRig, far: PeerId, numbers: &mut TestRng) {
        let order = shuffled(self.ids.len(), numbers);
        let frames = 1 + numbers.below(3);
        let is_refused = numbers.below(5) == 0;
        for (number, part) in order.chunks(order.len().div_ceil(frames)).enumerate() {
            if is_refused && number > 0 {
                break;
            }
            // An acknowledgement comes before the value and changes nothing.
            if numbers.below(4) == 0 {
                answer(rig, far, (self.ticket, Kind::Done), &[(self.ids[part[0]], Vec::new())]);
            }
            let mut values = Vec::new();
            for at in part {
                let length = match numbers.below(8) {
                    0 => 0,
                    1 => LENGTHS[numbers.below(LENGTHS.len())],
                    _ => self.lengths[*at],
                };
                values.push((self.ids[*at], bytes(length, numbers.next())));
            }
            for (id, value) in values.iter().filter(|(_, value)| !value.is_empty()) {
                let is_match = |at: &usize| {
                    self.ids[*at] == *id && self.lengths[*at] == value.len() && self.expected[*at].is_none()
                };
                if let Some(at) = (0..self.ids.len()).find(is_match) {
                    self.expected[at] = Some(value.clone());
                }
            }
            answer(rig, far, (self.ticket, Kind::Value), &values);
        }
        if is_refused {
            answer(rig, far, (self.ticket, Kind::Error), &[]);
        }
        let unused = self.expected.iter().zip(&self.lengths).filter(|(value, _)| value.is_none());
        self.unused = unused.map(|(_, length)| u32::try_from(*length).expect("a chunk")).collect();
    }
}

/// Checks the memory of a request's buffers, and that buffers without a value were returned.
fn check(asked: &Asked, memory: &[u8], seen: &[SeenEvent]) {
    let mut rest = memory;
    for (at, (value, length)) in asked.expected.iter().zip(&asked.lengths).enumerate() {
        let (found, after) = rest.split_at(*length);
        rest = after;
        let is_right = match value {
            Some(value) => found == value,
            None => found.iter().all(|byte| *byte == POISON),
        };
        assert!(is_right, "{:?}: buffer {at} of {length} bytes is wrong; of {:?}", asked.ticket, asked.lengths);
    }
    let returned: Vec<_> = seen
        .iter()
        .filter_map(|one| match one {
            SeenEvent::AnswerReturned(_, ticket, lengths) if *ticket == asked.ticket => Some(lengths.clone()),
            _ => None,
        })
        .collect();
    let expected: Vec<_> = Some(asked.unused.clone()).filter(|unused| !unused.is_empty()).into_iter().collect();
    assert_eq!(returned, expected, "{:?} of {:?}", asked.ticket, asked.lengths);
}

/// Requests of registered and of other memory, answered in every way that a server may answer.
pub(super) fn answer_in_every_way(rig: &mut ConformanceRig, seed: u64) {
    let (near, far) = rig.connect();
    rig.until("answers are taken", |rig| rig.near.seen.contains(&SeenEvent::TakesAnswers(near)));
    let mut numbers = TestRng(seed);
    let mut all: Vec<_> = (0..24).map(|ticket| Asked::random(ticket + 1, &mut numbers)).collect();
    let mut memory: Vec<_> = all
        .iter()
        .map(|asked| {
            let mut buffer = Buffer::new(asked.length()).expect("this system shares memory");
            buffer.fill(POISON);
            (buffer, numbers.below(3) > 0)
        })
        .collect();
    lend(|book| {
        for (asked, (buffer, is_registered)) in all.iter().zip(&mut memory) {
            let mapping = buffer.mapping().clone();
            let mut rest: &mut [u8] = buffer;
            let mut into = ReceiveBuffers::new();
            for length in &asked.lengths {
                let (one, after) = std::mem::take(&mut rest).split_at_mut(*length);
                rest = after;
                let loan = book.write(one);
                into.push(Incoming::Loan(if *is_registered { loan.within(&mapping) } else { loan }));
            }
            ask(rig, near, &pull(asked.ticket, &asked.ids), into);
        }
        let count = all.len();
        rig.until("the requests are there", |rig| rig.far.landed().count() == 1 + count);
        for at in shuffled(count, &mut numbers) {
            all[at].answer(rig, far, &mut numbers);
        }
        rig.until("all buffers are back", |rig| rig.near.receives_out + rig.far.sends_out == 0);
    });
    for (asked, (buffer, _)) in all.iter().zip(&memory) {
        check(asked, buffer, &rig.near.seen);
    }
}

#[test]
fn every_value_fills_its_buffer_and_every_other_buffer_is_returned() {
    for seed in 0..48 {
        let (mut rig, _) = software_rig();
        answer_in_every_way(&mut rig, seed);
    }
}

/// The connection ends when an answer has begun: before a grant was answered, or behind one that was not.
#[test]
fn buffers_of_a_partly_received_answer_are_returned_with_their_request() {
    for is_registered in [false, true] {
        let (mut rig, _) = software_rig();
        let (near, far) = rig.connect();
        rig.until("answers are taken", |rig| rig.near.seen.contains(&SeenEvent::TakesAnswers(near)));
        let lengths = [40_000, 262_144, 64, 8193];
        let ids: Vec<_> = (0..lengths.len()).map(chunk).collect();
        let mut buffer = Buffer::new(lengths.iter().sum()).expect("this system shares memory");
        let mapping = buffer.mapping().clone();
        lend(|book| {
            let mut rest: &mut [u8] = &mut buffer;
            let mut into = ReceiveBuffers::new();
            for length in lengths {
                let (one, after) = std::mem::take(&mut rest).split_at_mut(length);
                rest = after;
                let loan = book.write(one);
                into.push(Incoming::Loan(if is_registered { loan.within(&mapping) } else { loan }));
            }
            ask(&mut rig, near, &pull(Ticket(1), &ids), into);
            rig.until("the request is there", |rig| rig.far.landed().count() == 2);
            if is_registered {
                // Behind an answer whose buffers are posted after its head, and then never filled.
                rig.near.held.insert(near);
                answer(&mut rig, far, (Ticket(9), Kind::Value), &[(chunk(9), bytes(9000, 9))]);
            }
            // In another order than the request's, and without the first.
            let values = [3, 2, 1].map(|at| (ids[at], bytes(lengths[at], at as u64)));
            answer(&mut rig, far, (Ticket(1), Kind::Value), &values);
            if is_registered {
                rig.until("its head is there", |rig| rig.near.waiting.contains_key(&near));
                let lease = rig.near.arena.take(9000).expect("a slot");
                rig.near.land(near, [Incoming::Chunk { lease, bytes: 9000 }].into());
            }
            // The trainer's next messages do not arrive any more.
            for _ in 0..3 {
                if !is_registered {
                    rig.far.step();
                }
            }
            rig.near.step();
            rig.near.step();
            rig.far.transport = None;
            rig.until("it is known", |rig| rig.near.gone(near).is_some());
            assert_eq!(rig.near.receives_out, 0, "all buffers are back");
        });
        let all = lengths.iter().map(|length| u32::try_from(*length).expect("a chunk")).collect();
        assert!(rig.near.seen.contains(&SeenEvent::AnswerReturned(near, Ticket(1), all)), "{:?}", rig.near.seen);
    }
}

/// A gradient there and a value back, each of 256 KiB in registered memory: neither side sends a further request.
#[test]
fn a_frame_and_its_answer_take_two_messages_three_doorbells_and_five_completions() {
    const LENGTH: usize = 256 * 1024;
    let (mut rig, software_device) = software_rig();
    let (near, far) = rig.connect();
    rig.until("answers are taken", |rig| rig.near.seen.contains(&SeenEvent::TakesAnswers(near)));
    let gradient = Buffer::new(LENGTH).expect("this system shares memory");
    let mut parameter = Buffer::new(LENGTH).expect("this system shares memory");
    let (from, to) = (gradient.mapping().clone(), parameter.mapping().clone());
    // More rounds than destinations may be named at once.
    for round in 0..2 * NAMED_MAX as u64 {
        software_device.take_counts();
        let value = bytes(LENGTH, round);
        lend(|book| {
            let head = Head { request: Ticket(round + 1), ..Head::new(Kind::Push) };
            let entry = Entry::with_payload(chunk(0), Round(1), ElementType::Float32, &gradient);
            let frame = Frame { entries: [entry].into(), ..Frame::bare(head) };
            let into = [Incoming::Loan(book.write(&mut parameter).within(&to))].into();
            rig.near.receives_out += 1;
            rig.near.queue.push_back(Submit::PostAnswer { peer: near, request: head.request, into });
            rig.near.send(near, &frame, [Outgoing::Loan(book.read(&gradient).within(&from))].into());
            let known = rig.far.landed().count();
            rig.until("the gradient is there", |rig| rig.far.landed().count() > known);
            answer(&mut rig, far, (head.request, Kind::Value), &[(chunk(0), value.clone())]);
            let out = |rig: &ConformanceRig| rig.near.sends_out + rig.near.receives_out + rig.far.sends_out;
            rig.until("the value is back", |rig| out(rig) == 0);
        });
        rig.settle();
        assert!(parameter[..] == value[..], "round {round}: the value");
        let DeviceCounts { messages, doorbells, completions } = software_device.take_counts();
        assert_eq!((messages, doorbells, completions), (2, 3, 5), "round {round}: SENDs, doorbells, completions");
    }
}
