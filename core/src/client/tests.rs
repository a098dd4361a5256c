//! A client between a caller that lends memory and a transport that may fail at any moment. Every test ends inside
//! [`lend`], which aborts the process when a loan has not been returned.

use std::time::Duration;

use prost::Message;

use super::{Client, ClientOutput, ConnectionChange, Identity, LaneId, Refused, RequestBody, ValueSum};
use crate::checksum::checksum;
use crate::dtype::ElementType::{self, Bfloat16, Float16, Float32};
use crate::dtype::Half;
use crate::ids::{
    ChunkId, ChunkIndex, Epoch, Generation, Incarnation, ParameterIndex, PeerId, Round, Term, Ticket, TrainerId,
    Version,
};
use crate::memory::{Buffer, LoanBook, lend};
use crate::port::{Event, Incoming, Outgoing, Payloads, ReceiveBuffers, Submit};
use crate::time::Now;
use crate::wire::{Address, Entry, ErrorCode, ErrorMessage, Frame, Head, Kind, Role, WelcomeMessage};

/// A client with one lane, and a transport that keeps submitted work until the test completes it.
struct Setup {
    client: Client,
    now: Now,
    lane: LaneId,
    peers: u64,
    peer: Option<PeerId>,
    /// Frames that were submitted and whose parcels are still with the transport.
    sending: Vec<(Ticket, Frame, Payloads)>,
    /// Receive buffers of answers that came with the requests.
    posted: Vec<(Ticket, ReceiveBuffers)>,
    log: Vec<String>,
    /// The address that was connected to last.
    dialled: String,
}

/// Memory that a device can register.
fn registered(bytes: usize) -> Buffer {
    let mut buffer = Buffer::new(bytes).expect("this system shares memory");
    buffer.fill(9);
    buffer
}

fn id(chunk: u64) -> ChunkId {
    ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(chunk) }
}

impl Setup {
    fn new() -> Self {
        let stranger = Identity::stranger(Role::Trainer, "host".into(), 1);
        let identity = Identity {
            trainer: TrainerId(3),
            incarnation: Incarnation(2),
            epoch: Epoch(7),
            generation: Generation(1),
            ..stranger
        };
        let mut client = Client::new(identity);
        let lane = client.add_lane(Address::parse("loopback://there:1").expect("valid"), 1, "shard 0".into());
        Self {
            client,
            now: Now(0),
            lane,
            peers: 0,
            peer: None,
            sending: Vec::new(),
            posted: Vec::new(),
            log: Vec::new(),
            dialled: String::new(),
        }
    }

    fn connected() -> Self {
        let mut setup = Self::new();
        setup.drive();
        setup
    }

    fn drive(&mut self) {
        let mut out = ClientOutput::default();
        self.client.drive(self.now, &mut out);
        self.outputs(out);
    }

    fn wait(&mut self, millis: u64) {
        self.now = self.now + Duration::from_millis(millis);
        if self.client.deadline().is_some_and(|deadline| deadline <= self.now) {
            self.drive();
        }
    }

    fn outputs(&mut self, mut out: ClientOutput) {
        for change in std::mem::take(&mut out.connections) {
            match change {
                ConnectionChange::Connect { lane, address } => {
                    self.dialled = address.to_string();
                    self.peers += 1;
                    let peer = PeerId(self.peers);
                    self.peer = Some(peer);
                    self.client.connecting(lane, peer, &mut out);
                }
                ConnectionChange::Close(_) => self.log.push("close".into()),
            }
        }
        for work in out.work {
            match work {
                Submit::Send { ticket, frame, body, .. } => {
                    self.log.push(format!("{:?} {ticket}", frame.head.kind).to_lowercase());
                    self.sending.push((ticket, frame, body));
                }
                Submit::PostAnswer { request, into, .. } => {
                    self.log.push(format!("buffers of {request}"));
                    self.posted.push((request, into));
                }
                Submit::PostReceive { .. } => panic!("nothing has begun to arrive"),
            }
        }
    }

    fn event(&mut self, event: Event) {
        let mut out = ClientOutput::default();
        self.client.handle(self.now, event, &mut out);
        self.outputs(out);
    }

    fn peer(&self) -> PeerId {
        self.peer.expect("it is connected")
    }

    fn welcome(&mut self) {
        self.welcome_of(Term(0));
    }

    /// The leader of this term welcomes the client.
    fn welcome_of(&mut self, term: Term) {
        let frame = Frame::with_control(Head { term, ..Head::new(Kind::Welcome) }, &WelcomeMessage::default());
        self.event(Event::Received { peer: self.peer(), frame, body: ReceiveBuffers::new() });
    }

    /// The transport has sent everything.
    fn sent(&mut self) {
        for (ticket, _, body) in std::mem::take(&mut self.sending) {
            self.event(Event::Sent { peer: self.peer(), ticket, body });
        }
    }

    /// The transport has sent everything, and still reads some payloads in place.
    fn transmitted(&mut self) {
        for ticket in self.sending.iter().map(|(ticket, ..)| *ticket).collect::<Vec<_>>() {
            self.event(Event::Transmitted { peer: self.peer(), ticket });
        }
    }

    /// The connection ends; a payload may be received in part.
    fn gone(&mut self, unfilled: ReceiveBuffers) {
        let unsent = std::mem::take(&mut self.sending).into_iter().map(|(ticket, _, body)| (ticket, body)).collect();
        self.event(Event::Gone { peer: self.peer(), reason: "cut".into(), unsent, unfilled });
    }

    fn ask(&mut self, kind: Kind, chunks: &[u64], body: RequestBody) -> Ticket {
        let entries = chunks.iter().map(|chunk| Entry::bare(id(*chunk), Round(1), Float32)).collect();
        let frame = Frame { entries, ..Frame::bare(Head::new(kind)) };
        let mut out = ClientOutput::default();
        let ticket = self.client.ask(self.lane, frame, body, &mut out);
        self.outputs(out);
        self.drive();
        ticket
    }

    /// Asks with one entry of so many bytes.
    fn ask_sized(&mut self, bytes: u32, body: RequestBody) -> Ticket {
        let entry = Entry { bytes, ..Entry::bare(id(0), Round(1), Float32) };
        let frame = Frame { entries: vec![entry].into(), ..Frame::bare(Head::new(Kind::Push)) };
        let mut out = ClientOutput::default();
        let ticket = self.client.ask(self.lane, frame, body, &mut out);
        self.outputs(out);
        self.drive();
        ticket
    }

    fn cancel(&mut self, ticket: Ticket) {
        let mut out = ClientOutput::default();
        let refused = Refused::new(ErrorCode::Deadline, "too late");
        self.client.cancel(&[ticket], &refused, &mut out);
        self.outputs(out);
    }

    fn done(&mut self, ticket: Ticket, chunks: &[(u64, u64)]) {
        let head = Head { request: ticket, ..Head::new(Kind::Done) };
        let entries = chunks.iter().map(|(chunk, round)| Entry::bare(id(*chunk), Round(*round), Float32)).collect();
        let frame = Frame { entries, ..Frame::bare(head) };
        self.event(Event::Received { peer: self.peer(), frame, body: ReceiveBuffers::new() });
    }

    fn error(&mut self, ticket: Ticket, kind: Kind, code: ErrorCode) {
        let message = ErrorMessage { code: code.into(), text: format!("{code:?}"), ..ErrorMessage::default() };
        let frame = Frame::with_control(Head { request: ticket, ..Head::new(kind) }, &message);
        self.event(Event::Received { peer: self.peer(), frame, body: ReceiveBuffers::new() });
    }

    /// Values begin to arrive; returns the frame and the receive buffers, filled with the chunk's number.
    fn begin_values(&mut self, ticket: Ticket, values: &[(u64, u32)]) -> (Frame, ReceiveBuffers) {
        self.begin_values_of(Float32, ticket, values)
    }

    fn begin_values_of(&mut self, of: ElementType, ticket: Ticket, values: &[(u64, u32)]) -> (Frame, ReceiveBuffers) {
        let head = Head { request: ticket, ..Head::new(Kind::Value) };
        let entry = |(chunk, bytes): &(u64, u32)| Entry { bytes: *bytes, ..Entry::bare(id(*chunk), Round(5), of) };
        let frame = Frame { entries: values.iter().map(entry).collect(), ..Frame::bare(head) };
        let mut out = ClientOutput::default();
        self.client.handle(self.now, Event::Head { peer: self.peer(), frame: frame.clone() }, &mut out);
        let Some(Submit::PostReceive { mut into, .. }) = out.work.pop_back() else { panic!("a head has places") };
        assert_eq!(into.len(), values.iter().filter(|(_, bytes)| *bytes > 0).count());
        for (place, (chunk, _)) in into.iter_mut().zip(values.iter().filter(|(_, bytes)| *bytes > 0)) {
            place.bytes_mut().fill(u8::try_from(*chunk).expect("small"));
        }
        (frame, into)
    }

    fn values(&mut self, ticket: Ticket, values: &[(u64, u32)]) {
        let (frame, body) = self.begin_values(ticket, values);
        self.event(Event::Received { peer: self.peer(), frame, body });
    }

    /// A connection that takes the buffers of answers with the requests.
    fn welcome_to_answers(&mut self) {
        self.event(Event::TakesAnswers { peer: self.peer() });
        self.welcome();
    }

    /// The transport fills the buffers of these entries of a request, and returns the others if it is the last answer.
    fn fill(&mut self, ticket: Ticket, chunks: &[(u64, usize)], is_last: bool) {
        let at = self.posted.iter().position(|(one, _)| *one == ticket).expect("its buffers were posted");
        let (_, into) = self.posted.remove(at);
        let mut into: Vec<_> = into.into_iter().map(Some).collect();
        let mut body = ReceiveBuffers::new();
        let head = Head { request: ticket, ..Head::new(Kind::Value) };
        let mut frame = Frame::bare(head);
        for (chunk, index) in chunks {
            let mut place = into[*index].take().expect("it is filled once");
            place.bytes_mut().fill(u8::try_from(*chunk).expect("small"));
            frame.entries.push(Entry { bytes: place.len(), ..Entry::bare(id(*chunk), Round(5), Float32) });
            body.push(place);
        }
        self.event(Event::Received { peer: self.peer(), frame, body });
        let left: ReceiveBuffers = into.into_iter().flatten().collect();
        if is_last && !left.is_empty() {
            self.event(Event::AnswerReturned { peer: self.peer(), request: ticket, into: left });
        } else if !is_last {
            self.posted.push((ticket, left));
        }
    }

    /// The transport returns the buffers of answers that have not arrived.
    fn return_posted(&mut self) {
        for (request, into) in std::mem::take(&mut self.posted) {
            self.event(Event::AnswerReturned { peer: self.peer(), request, into });
        }
    }

    fn log(&mut self) -> String {
        std::mem::take(&mut self.log).join(", ")
    }

    fn versions(&mut self, ticket: Ticket) -> Option<Vec<u64>> {
        let finished = self.client.take(ticket)?.expect("it was answered");
        Some(finished.versions.into_iter().map(|Version(version)| version).collect())
    }
}

#[test]
fn requests_are_sent_again_in_order_after_a_reconnect() {
    let gradient = [1; 8];
    lend(|book| {
        let mut setup = Setup::connected();
        assert_eq!(setup.log(), "", "a lane connects when it is used");
        let push = |setup: &mut Setup| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            setup.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() })
        };
        let (first, second) = (push(&mut setup), push(&mut setup));
        assert_eq!(setup.log(), "hello 0", "nothing goes before the welcome");
        setup.welcome();
        let third = push(&mut setup);
        assert_eq!(setup.log(), "push 1, push 2, push 3");
        setup.gone(ReceiveBuffers::new());
        setup.wait(19);
        assert_eq!(setup.log(), "");
        setup.wait(1);
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 1, push 2, push 3");
        setup.done(second, &[(0, 2)]);
        assert_eq!(setup.versions(second), None, "its payload is still with the transport");
        setup.sent();
        assert_eq!(setup.versions(second), Some(vec![2]));
        setup.gone(ReceiveBuffers::new());
        setup.wait(1000);
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 1, push 3");
        setup.sent();
        setup.done(third, &[(0, 3)]);
        setup.done(first, &[(0, 1)]);
        assert_eq!((setup.versions(first), setup.versions(third)), (Some(vec![1]), Some(vec![3])));
        assert!(!setup.client.is_busy());
    });
}

/// The connection ends before the transport gets the frames that the welcome released.
#[test]
fn frames_submitted_to_a_closed_connection_are_sent_on_the_next() {
    let (gradient, mut value) = ([1; 8], [0; 4]);
    lend(|book| {
        let mut setup = Setup::connected();
        let payload = vec![Outgoing::Loan(book.read(&gradient))];
        let push = setup.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
        let into = vec![Incoming::Loan(book.write(&mut value))];
        let pull = setup.ask(Kind::Pull, &[1], RequestBody { into: into.into(), ..RequestBody::default() });
        setup.welcome();
        let (_, places) = setup.begin_values(pull, &[(1, 4)]);
        let (late, former) = (std::mem::take(&mut setup.sending), setup.peer());
        setup.gone(ReceiveBuffers::new());
        let unsent = late.into_iter().map(|(ticket, _, body)| (ticket, body)).collect();
        setup.event(Event::Gone { peer: former, reason: "the connection is over".into(), unsent, unfilled: places });
        setup.wait(20);
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 1, pull 2, hello 0, push 1, pull 2");
        setup.sent();
        setup.done(push, &[(0, 1)]);
        setup.values(pull, &[(1, 4)]);
        assert_eq!((setup.versions(push), setup.versions(pull)), (Some(vec![1]), Some(vec![5])));
    });
    assert_eq!(value, [1; 4]);
}

#[test]
fn several_answers_are_received_at_once() {
    let mut values = [[0; 4]; 3];
    lend(|book| {
        let mut setup = Setup::connected();
        let [one, two, three] = values.each_mut().map(|value| Incoming::Loan(book.write(value)));
        let body = |into| RequestBody { into, ..RequestBody::default() };
        let pair = setup.ask(Kind::Pull, &[1, 2], body(vec![one, two].into()));
        let other = setup.ask(Kind::Pull, &[3], body(vec![three].into()));
        setup.welcome();
        setup.sent();
        let cut = [setup.begin_values(pair, &[(2, 4)]), setup.begin_values(other, &[(3, 4)])];
        setup.gone(cut.into_iter().flat_map(|(_, places)| places).collect());
        setup.wait(20);
        setup.welcome();
        setup.sent();
        let asked = [(pair, (2, 4)), (other, (3, 4)), (pair, (2, 4)), (pair, (1, 4))];
        let landing = asked.map(|(ticket, value)| setup.begin_values(ticket, &[value]));
        assert!(matches!(landing[2].1[..], [Incoming::Discard { .. }]), "the place for it is out");
        // An answer without receive buffers arrives between answers with some.
        setup.done(pair, &[(9, 9)]);
        for (at, (frame, body)) in landing.into_iter().enumerate() {
            assert!(setup.client.is_busy(), "before answer {at}");
            setup.event(Event::Received { peer: setup.peer(), frame, body });
        }
        assert_eq!((setup.versions(pair), setup.versions(other)), (Some(vec![5, 5]), Some(vec![5])));
    });
    assert_eq!(values, [[1; 4], [2; 4], [3; 4]]);
}

#[test]
fn entries_count_once_for_any_number_of_answers() {
    let mut setup = Setup::connected();
    let ticket = setup.ask(Kind::Set, &[0, 1, 0], RequestBody::default());
    setup.welcome();
    setup.sent();
    setup.done(ticket, &[(1, 4)]);
    setup.done(ticket, &[(1, 9), (7, 1)]);
    setup.gone(ReceiveBuffers::new());
    setup.wait(20);
    setup.welcome();
    setup.sent();
    setup.done(ticket, &[(1, 4), (0, 5)]);
    assert_eq!(setup.versions(ticket), None);
    setup.done(ticket, &[(0, 5)]);
    assert_eq!(setup.versions(ticket), Some(vec![5, 4, 5]), "each of two entries of one chunk has its answer");
}

/// Both half-precision types have one length. A value of the wrong type is discarded, and its entry stays open.
#[test]
fn a_value_of_another_half_precision_type_is_discarded() {
    for (half, wrong, right) in [(Half::Bfloat16, Float16, Bfloat16), (Half::Float16, Bfloat16, Float16)] {
        let mut value = [9; 4];
        lend(|book| {
            let mut setup = Setup::connected();
            let entry = Entry { half: Some(half), ..Entry::bare(id(1), Round(1), Float32) };
            let frame = Frame { entries: vec![entry].into(), ..Frame::bare(Head::new(Kind::Pull)) };
            let into = vec![Incoming::Loan(book.write(&mut value))];
            let mut out = ClientOutput::default();
            let ticket = setup.client.ask(
                setup.lane,
                frame,
                RequestBody { into: into.into(), ..RequestBody::default() },
                &mut out,
            );
            setup.outputs(out);
            setup.drive();
            setup.welcome();
            setup.sent();
            for of in [wrong, Float32] {
                let (frame, body) = setup.begin_values_of(of, ticket, &[(1, 4)]);
                assert!(matches!(body[..], [Incoming::Discard { .. }]), "{of} for {half}");
                setup.event(Event::Received { peer: setup.peer(), frame, body });
                assert_eq!(setup.versions(ticket), None, "{of} for {half}: it stays open");
            }
            let (frame, body) = setup.begin_values_of(right, ticket, &[(1, 4)]);
            setup.event(Event::Received { peer: setup.peer(), frame, body });
            assert_eq!(setup.versions(ticket), Some(vec![5]));
        });
        assert_eq!(value, [1; 4]);
    }
}

#[test]
fn values_are_received_into_their_buffers() {
    let mut memory = [9u8; 12];
    let (first, rest) = memory.split_at_mut(4);
    let (second, third) = rest.split_at_mut(4);
    lend(|book| {
        let mut setup = Setup::connected();
        let into = [first, second, third].into_iter().map(|place| Incoming::Loan(book.write(place))).collect();
        let ticket = setup.ask(Kind::Pull, &[1, 2, 3], RequestBody { into, ..RequestBody::default() });
        setup.welcome();
        setup.sent();
        setup.values(ticket, &[(3, 4)]);
        setup.done(ticket, &[(1, 1)]);
        setup.values(ticket, &[(2, 8)]);
        assert_eq!(setup.versions(ticket), None, "an acknowledgement is no value, nor is one that does not fit");
        let (_, unfilled) = setup.begin_values(ticket, &[(1, 4), (3, 4), (8, 4)]);
        setup.gone(unfilled);
        setup.wait(20);
        setup.welcome();
        setup.sent();
        setup.values(ticket, &[(1, 4), (2, 4), (3, 4)]);
        assert_eq!(setup.versions(ticket), Some(vec![5, 5, 5]));
        setup.values(ticket, &[(1, 4)]);
    });
    assert_eq!(memory, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
}

#[test]
fn answer_buffers_are_posted_with_the_request_if_the_connection_takes_them() {
    let mut memory = registered(12);
    let (mut summed, mut unregistered) = ([9u8; 4], [9u8; 4]);
    let mapping = memory.mapping().clone();
    lend(|book| {
        let mut setup = Setup::connected();
        let into = memory.chunks_mut(4).map(|place| Incoming::Loan(book.write(place).within(&mapping))).collect();
        let ticket = setup.ask(Kind::Pull, &[1, 2, 3], RequestBody { into, ..RequestBody::default() });
        let into = [Incoming::Loan(book.write(&mut summed))].into();
        let other = setup.ask(Kind::Pull, &[4], RequestBody { into, sums: true, ..RequestBody::default() });
        let into = [Incoming::Loan(book.write(&mut unregistered))].into();
        let third = setup.ask(Kind::Pull, &[6], RequestBody { into, ..RequestBody::default() });
        setup.welcome_to_answers();
        assert_eq!(setup.log(), "hello 0, buffers of 1, pull 1, pull 2, pull 3", "of registered memory");
        setup.sent();
        // An answer into posted buffers arrives during an answer into buffers of its head.
        let (frame, body) = setup.begin_values(other, &[(4, 4)]);
        setup.fill(ticket, &[(3, 2)], false);
        setup.event(Event::Received { peer: setup.peer(), frame, body });
        assert_eq!((setup.versions(ticket), setup.versions(other)), (None, Some(vec![5])));
        setup.values(third, &[(6, 4)]);
        assert_eq!(setup.versions(third), Some(vec![5]));
        // The server refuses the rest as busy and the buffers return: the request is resent for its open entries.
        setup.error(ticket, Kind::Error, ErrorCode::Busy);
        setup.return_posted();
        setup.wait(20);
        assert_eq!(setup.log(), "pull 1", "a value is not received twice into one buffer");
        setup.sent();
        setup.values(ticket, &[(1, 4), (2, 4)]);
        assert_eq!(setup.versions(ticket), Some(vec![5; 3]));
    });
    assert_eq!(memory[..], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
    assert_eq!((summed, unregistered), ([4; 4], [6; 4]));
}

#[test]
fn a_lost_connection_returns_answer_buffers_and_the_next_gets_them_if_it_takes_them() {
    let (mut memory, mut summed) = (registered(8), [9u8; 4]);
    let mapping = memory.mapping().clone();
    lend(|book| {
        let mut setup = Setup::connected();
        let into = memory.chunks_mut(4).map(|place| Incoming::Loan(book.write(place).within(&mapping))).collect();
        let ticket = setup.ask(Kind::Pull, &[1, 2], RequestBody { into, ..RequestBody::default() });
        for (takes_answers, expected) in [
            (true, "hello 0, buffers of 1, pull 1"),
            (true, "hello 0, buffers of 1, pull 1"),
            (false, "hello 0, pull 1"),
            (true, "hello 0, buffers of 1, pull 1"),
        ] {
            if takes_answers {
                setup.welcome_to_answers();
            } else {
                setup.welcome();
            }
            assert_eq!(setup.log(), expected);
            if setup.client.deadline().is_none() && setup.peers < 4 {
                setup.return_posted();
                setup.gone(ReceiveBuffers::new());
                setup.wait(1000);
            }
        }
        setup.sent();
        // An answer without the value of an entry returns the entry's buffer, and the entry stays open.
        setup.fill(ticket, &[(2, 1)], true);
        assert_eq!(setup.versions(ticket), None);
        let into = [Incoming::Loan(book.write(&mut summed))].into();
        let other = setup.ask(Kind::Pull, &[3], RequestBody { into, sums: true, ..RequestBody::default() });
        setup.sent();
        let (first, second) = (setup.begin_values(ticket, &[(1, 4)]), setup.begin_values(other, &[(3, 4)]));
        for (frame, body) in [first, second] {
            setup.event(Event::Received { peer: setup.peer(), frame, body });
        }
        assert_eq!((setup.versions(ticket), setup.versions(other)), (Some(vec![5, 5]), Some(vec![5])));
    });
    assert_eq!((&memory[..], summed), (&[1, 1, 1, 1, 2, 2, 2, 2][..], [3; 4]));
}

/// A pull of chunk 1 that was sent with the buffer of its answer.
fn posted<'env>(book: &LoanBook<'env>, memory: &'env mut Buffer) -> (Setup, Ticket) {
    let mapping = memory.mapping().clone();
    let mut setup = Setup::connected();
    let into = [Incoming::Loan(book.write(memory).within(&mapping))].into();
    let ticket = setup.ask(Kind::Pull, &[1], RequestBody { into, ..RequestBody::default() });
    setup.welcome_to_answers();
    setup.sent();
    setup.log();
    (setup, ticket)
}

#[test]
fn a_cancelled_request_ends_once_its_answer_buffers_are_returned() {
    let mut memory = registered(4);
    lend(|book| {
        let (mut setup, ticket) = posted(book, &mut memory);
        setup.cancel(ticket);
        assert_eq!(setup.log(), "close", "the peer may write the buffer as long as it is connected");
        assert!(setup.client.take(ticket).is_none(), "the transport has its buffer");
        setup.return_posted();
        assert!(setup.client.take(ticket).is_some_and(|end| end.is_err()));
        setup.gone(ReceiveBuffers::new());
        assert!(!setup.client.is_busy());
    });
}

/// Parts of the first attempt's answer may still arrive. Neither side may take them for the retry's answer.
#[test]
fn a_request_refused_as_busy_posts_no_answer_buffers_on_this_connection() {
    let mut memory = registered(4);
    lend(|book| {
        let (mut setup, ticket) = posted(book, &mut memory);
        setup.error(ticket, Kind::Error, ErrorCode::Busy);
        setup.return_posted();
        setup.wait(20);
        assert_eq!(setup.log(), "pull 1");
        setup.gone(ReceiveBuffers::new());
        setup.wait(1000);
        setup.welcome_to_answers();
        assert_eq!(setup.log(), "hello 0, buffers of 1, pull 1");
        setup.sent();
        setup.fill(ticket, &[(1, 0)], true);
        assert_eq!(setup.versions(ticket), Some(vec![5]));
    });
    assert_eq!(memory[..], [1; 4]);
}

#[test]
fn value_checksums_are_those_of_complete_values() {
    let mut memory = [7u8; 8];
    lend(|book| {
        let (first, second) = memory.split_at_mut(4);
        let mut setup = Setup::connected();
        let into = [first, second].into_iter().map(|place| Incoming::Loan(book.write(place))).collect();
        let body = RequestBody { into, sums: true, ..RequestBody::default() };
        let ticket = setup.ask(Kind::Pull, &[1, 2], body);
        setup.welcome();
        setup.sent();
        setup.values(ticket, &[(2, 4)]);
        // Half of the other value has arrived when the connection ends.
        let (_, mut torn) = setup.begin_values(ticket, &[(1, 4)]);
        torn[0].bytes_mut()[..2].fill(9);
        setup.gone(torn);
        setup.wait(20);
        setup.welcome();
        setup.sent();
        setup.values(ticket, &[(1, 4), (2, 4)]);
        let finished = setup.client.take(ticket).expect("it is over").expect("it was answered");
        assert_eq!(finished.sums, [[1; 4], [2; 4]].map(|value| ValueSum { sum: checksum(&value), bytes: 4 }));
    });
}

/// The wire format refuses such a frame. If a transport delivers it, only its own request fails.
#[test]
fn a_refusal_with_a_payload_returns_the_receive_buffer() {
    for kind in [Kind::Error, Kind::Refused, Kind::Welcome] {
        let mut value = [0; 4];
        lend(|book| {
            let mut setup = Setup::connected();
            let into = vec![Incoming::Loan(book.write(&mut value))];
            let ticket = setup.ask(Kind::Pull, &[1], RequestBody { into: into.into(), ..RequestBody::default() });
            setup.welcome();
            setup.sent();
            let (frame, body) = setup.begin_values(ticket, &[(1, 4)]);
            let message =
                ErrorMessage { code: ErrorCode::Invalid.into(), text: "no".into(), ..ErrorMessage::default() };
            let head = Head { kind, ..frame.head };
            let frame = Frame { head, control: message.encode_to_vec(), ..frame };
            setup.event(Event::Received { peer: setup.peer(), frame, body });
            if kind != Kind::Error {
                setup.cancel(ticket);
                setup.gone(ReceiveBuffers::new());
            }
            assert!(setup.client.take(ticket).is_some_and(|end| end.is_err()), "{kind:?}: its place is at home");
            assert!(!setup.client.is_busy());
        });
    }
}

#[test]
fn an_unknown_connection_gets_one_discarding_buffer_per_payload() {
    let mut setup = Setup::connected();
    setup.ask(Kind::Pull, &[1], RequestBody::default());
    setup.welcome();
    setup.gone(ReceiveBuffers::new());
    let (_, places) = setup.begin_values(Ticket(1), &[(1, 0), (2, 4)]);
    assert!(matches!(places[..], [Incoming::Discard { bytes: 4 }]));
}

#[test]
fn a_busy_server_is_asked_again_after_a_pause() {
    let mut setup = Setup::connected();
    let ticket = setup.ask(Kind::Push, &[0], RequestBody::default());
    setup.welcome();
    setup.sent();
    setup.log();
    setup.error(ticket, Kind::Error, ErrorCode::Busy);
    assert_eq!(setup.client.deadline(), Some(Now(20)));
    setup.wait(19);
    assert_eq!(setup.log(), "");
    setup.wait(1);
    assert_eq!(setup.log(), "push 1");
    assert_eq!(setup.client.deadline(), None);
    setup.sent();
    setup.error(ticket, Kind::Error, ErrorCode::Busy);
    setup.gone(ReceiveBuffers::new());
    setup.wait(30);
    setup.log();
    assert_eq!(setup.client.deadline(), None, "a request that waits for a connection does not ask to be driven");
    setup.welcome();
    setup.sent();
    setup.done(ticket, &[(0, 1)]);
    assert_eq!(setup.versions(ticket), Some(vec![1]));
}

#[test]
fn fenced_and_unauthenticated_are_permanent_and_other_refusals_are_retried() {
    let gradient = [1; 8];
    for code in [ErrorCode::Fenced, ErrorCode::Unauthenticated] {
        lend(|book| {
            let mut setup = Setup::connected();
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            let ticket = setup.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
            setup.error(Ticket(0), Kind::Refused, ErrorCode::Invalid);
            setup.gone(ReceiveBuffers::new());
            let text = setup.client.outstanding(&[ticket]);
            assert!(text.contains("shard 0 at loopback://there:1: 1 requests without an answer"), "{text}");
            assert!(text.contains("Invalid"), "{text}");
            setup.wait(20);
            assert_eq!(setup.log(), "hello 0, close, hello 0");
            setup.error(Ticket(0), Kind::Refused, code);
            setup.gone(ReceiveBuffers::new());
            let refused = setup.client.take(ticket).expect("it is over").expect_err("it was refused");
            assert_eq!(refused.code, code);
            assert!(!setup.client.is_busy());
        });
    }
}

#[test]
fn a_refused_request_ends_once_its_payload_is_returned() {
    let gradient = [1; 8];
    lend(|book| {
        let mut setup = Setup::connected();
        let payload = vec![Outgoing::Loan(book.read(&gradient))];
        let ticket = setup.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
        setup.welcome();
        setup.error(ticket, Kind::Error, ErrorCode::Invalid);
        assert!(setup.client.take(ticket).is_none());
        setup.gone(ReceiveBuffers::new());
        assert_eq!(setup.client.take(ticket).expect("it is over").expect_err("refused").code, ErrorCode::Invalid);
        assert!(!setup.client.is_busy());
    });
}

#[test]
fn a_cancelled_request_returns_its_buffers_and_the_others_are_resent() {
    let gradient = [1; 8];
    let mut value = [0; 4];
    lend(|book| {
        let mut setup = Setup::connected();
        let payload = || vec![Outgoing::Loan(book.read(&gradient))];
        let into = vec![Incoming::Loan(book.write(&mut value))];
        let first = setup.ask(
            Kind::Push,
            &[0],
            RequestBody { payload: payload().into(), into: into.into(), ..RequestBody::default() },
        );
        let second = setup.ask(Kind::Push, &[1], RequestBody { payload: payload().into(), ..RequestBody::default() });
        setup.welcome();
        setup.sent();
        let (_, unfilled) = setup.begin_values(first, &[(0, 4)]);
        setup.log();
        setup.cancel(first);
        assert_eq!(setup.log(), "close");
        assert!(setup.client.take(first).is_none(), "its place is with the transport");
        setup.gone(unfilled);
        assert_eq!(setup.client.take(first).expect("it is over").expect_err("cancelled").code, ErrorCode::Deadline);
        setup.wait(20);
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 2");
        setup.sent();
        setup.cancel(second);
        assert_eq!(setup.log(), "", "what is at home ends at once, and its connection goes on");
        assert!(setup.client.take(second).is_some() && !setup.client.is_busy());
    });
}

#[test]
fn the_most_urgent_request_is_sent_first() {
    let gradient = vec![1; 1 << 20];
    lend(|book| {
        let mut setup = Setup::connected();
        let ask = |setup: &mut Setup, priority| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            setup.ask_sized(1 << 20, RequestBody { payload: payload.into(), priority, ..RequestBody::default() })
        };
        let mut tickets = [7, 7, 7, 7].map(|priority| ask(&mut setup, priority)).to_vec();
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 1, push 2", "no more than the transport needs");
        tickets.extend([3, 5].map(|priority| ask(&mut setup, priority)));
        setup.sent();
        assert_eq!(setup.log(), "push 5, push 6", "what was asked last overtakes what waits");
        setup.gone(ReceiveBuffers::new());
        setup.wait(20);
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 5, push 6", "also after a reconnect");
        setup.sent();
        assert_eq!(setup.log(), "push 1, push 2");
        setup.sent();
        setup.sent();
        assert_eq!(setup.log(), "push 3, push 4");
        tickets.into_iter().for_each(|ticket| setup.done(ticket, &[(0, 1)]));
        assert!(!setup.client.is_busy());
    });
}

#[test]
fn lent_payloads_do_not_delay_later_sends_and_are_waited_for() {
    let gradient = vec![1; 1 << 20];
    lend(|book| {
        let mut setup = Setup::connected();
        let ask = |setup: &mut Setup| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            setup.ask_sized(1 << 20, RequestBody { payload: payload.into(), ..RequestBody::default() })
        };
        let tickets = [(); 5].map(|()| ask(&mut setup));
        setup.welcome();
        assert_eq!(setup.log(), "hello 0, push 1, push 2");
        setup.transmitted();
        assert_eq!(setup.log(), "push 3, push 4", "though nothing of the first two is back");
        setup.transmitted();
        assert_eq!(setup.log(), "push 5", "and each has left once");
        for ticket in tickets {
            setup.done(ticket, &[(0, 1)]);
            assert!(setup.client.take(ticket).is_none(), "it is answered, and still lent");
        }
        setup.sent();
        assert!(tickets.iter().all(|ticket| setup.client.take(*ticket).is_some_and(|end| end.is_ok())));
    });
}

#[test]
fn an_address_that_cannot_be_reached_is_named() {
    let mut setup = Setup::new();
    let mut out = ClientOutput::default();
    let ticket = setup.client.ask(setup.lane, Frame::bare(Head::new(Kind::Leave)), RequestBody::default(), &mut out);
    setup.client.drive(setup.now, &mut out);
    assert!(matches!(out.connections[..], [ConnectionChange::Connect { .. }]));
    setup.client.unreachable(setup.now, setup.lane, &crate::error::Failure::call("no such host"));
    assert!(setup.client.outstanding(&[ticket]).ends_with("(not connected, no such host)"));
    assert_eq!(setup.client.deadline(), Some(Now(20)));
    setup.cancel(ticket);
    assert!(!setup.client.is_busy());
}

#[test]
fn a_server_that_does_not_answer_may_be_at_another_address() {
    let there = Address::parse("loopback://there:1").expect("valid");
    let elsewhere = Address::parse("loopback://elsewhere:1").expect("valid");
    let mut setup = Setup::connected();
    let ticket = setup.ask(Kind::Push, &[0], RequestBody::default());
    setup.welcome();
    setup.gone(ReceiveBuffers::new());
    for _ in 0..3 {
        assert!(!setup.client.needs_address(), "the first attempts may fail");
        setup.wait(1000);
        setup.gone(ReceiveBuffers::new());
    }
    assert!(setup.client.needs_address());
    setup.client.move_lane(setup.lane, there, Term(0));
    assert!(setup.client.needs_address(), "nothing is new");
    setup.client.move_lane(setup.lane, elsewhere, Term(0));
    assert!(!setup.client.needs_address());
    assert_eq!(setup.dialled, "loopback://there:1");
    setup.wait(0);
    assert_eq!(setup.dialled, "loopback://elsewhere:1", "without another pause");
    setup.welcome();
    setup.sent();
    setup.done(ticket, &[(0, 1)]);
    assert_eq!(setup.versions(ticket), Some(vec![1]));
}

#[test]
fn a_server_that_does_not_lead_the_shard_is_left_at_once() {
    let elsewhere = Address::parse("loopback://elsewhere:1").expect("valid");
    let mut setup = Setup::connected();
    let ticket = setup.ask(Kind::Push, &[0], RequestBody::default());
    setup.error(Ticket(0), Kind::Refused, ErrorCode::Moved);
    assert!(setup.log.contains(&"close".to_owned()) && setup.client.has_moved() && setup.client.needs_address());
    setup.gone(ReceiveBuffers::new());
    setup.client.move_lane(setup.lane, elsewhere, Term(2));
    assert!(!setup.client.has_moved());
    setup.wait(0);
    let hello = |setup: &Setup| setup.sending.last().expect("a hello is sent").1.head.term;
    assert_eq!((setup.dialled.as_str(), hello(&setup)), ("loopback://elsewhere:1", Term(2)));
    // A former leader that has not noticed welcomes the client.
    setup.welcome_of(Term(1));
    assert!(setup.client.has_moved() && setup.client.is_busy());
    setup.gone(ReceiveBuffers::new());
    setup.wait(1000);
    setup.welcome_of(Term(3));
    assert!(!setup.client.has_moved());
    assert_eq!(hello(&setup), Term(3), "the frames are of the leader's term");
    setup.sent();
    setup.done(ticket, &[(0, 1)]);
    assert_eq!(setup.versions(ticket), Some(vec![1]));
    // The client knows of a later leader, and is still connected to this one.
    setup.client.move_lane(setup.lane, Address::parse("loopback://third:1").expect("valid"), Term(4));
    setup.ask(Kind::Push, &[0], RequestBody::default());
    assert_eq!(hello(&setup), Term(3));
}

#[test]
fn an_answer_without_entries_carries_its_message() {
    let mut setup = Setup::connected();
    let ticket = setup.ask(Kind::Control, &[], RequestBody::default());
    setup.welcome();
    setup.sent();
    let message = ErrorMessage { code: 0, text: "hello".into(), trainers: vec![3] };
    let frame = Frame::with_control(Head { request: ticket, ..Head::new(Kind::Answer) }, &message);
    setup.event(Event::Received { peer: setup.peer(), frame, body: ReceiveBuffers::new() });
    let finished = setup.client.take(ticket).expect("it is over").expect("it was answered");
    assert_eq!(ErrorMessage::decode(finished.control.as_slice()).expect("it parses"), message);
}
