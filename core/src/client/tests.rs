//! A client between a caller that lends and a transport that may fail at any moment. Every test ends inside
//! [`lend`], which aborts the process when a loan has not come home.

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

/// A client and a transport that keeps what it is given until the script says otherwise.
struct Line {
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

/// Memory that a device can be told of.
fn registered(bytes: usize) -> Buffer {
    let mut buffer = Buffer::new(bytes).expect("this system shares memory");
    buffer.fill(9);
    buffer
}

fn id(chunk: u64) -> ChunkId {
    ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(chunk) }
}

impl Line {
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
        let mut line = Self::new();
        line.drive();
        line
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

    /// The transport has sent everything, and some of it is still read where it is.
    fn transmitted(&mut self) {
        for ticket in self.sending.iter().map(|(ticket, ..)| *ticket).collect::<Vec<_>>() {
            self.event(Event::Transmitted { peer: self.peer(), ticket });
        }
    }

    /// The connection ends, with a payload half landed or not.
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

    /// Values begin to arrive; gives the frame and the places, filled with the chunk's number.
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

    /// The transport returns the buffers of answers that have not come.
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
        let mut line = Line::connected();
        assert_eq!(line.log(), "", "a lane connects when it is used");
        let push = |line: &mut Line| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            line.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() })
        };
        let (first, second) = (push(&mut line), push(&mut line));
        assert_eq!(line.log(), "hello 0", "nothing goes before the welcome");
        line.welcome();
        let third = push(&mut line);
        assert_eq!(line.log(), "push 1, push 2, push 3");
        line.gone(ReceiveBuffers::new());
        line.wait(19);
        assert_eq!(line.log(), "");
        line.wait(1);
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 1, push 2, push 3");
        line.done(second, &[(0, 2)]);
        assert_eq!(line.versions(second), None, "its payload is still with the transport");
        line.sent();
        assert_eq!(line.versions(second), Some(vec![2]));
        line.gone(ReceiveBuffers::new());
        line.wait(1000);
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 1, push 3");
        line.sent();
        line.done(third, &[(0, 3)]);
        line.done(first, &[(0, 1)]);
        assert_eq!((line.versions(first), line.versions(third)), (Some(vec![1]), Some(vec![3])));
        assert!(!line.client.is_busy());
    });
}

/// The transport learns of the end before it was given what the welcome set free.
#[test]
fn what_was_handed_to_a_connection_that_had_just_ended_goes_out_with_the_next() {
    let (gradient, mut value) = ([1; 8], [0; 4]);
    lend(|book| {
        let mut line = Line::connected();
        let payload = vec![Outgoing::Loan(book.read(&gradient))];
        let push = line.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
        let into = vec![Incoming::Loan(book.write(&mut value))];
        let pull = line.ask(Kind::Pull, &[1], RequestBody { into: into.into(), ..RequestBody::default() });
        line.welcome();
        let (_, places) = line.begin_values(pull, &[(1, 4)]);
        let (late, former) = (std::mem::take(&mut line.sending), line.peer());
        line.gone(ReceiveBuffers::new());
        let unsent = late.into_iter().map(|(ticket, _, body)| (ticket, body)).collect();
        line.event(Event::Gone { peer: former, reason: "the connection is over".into(), unsent, unfilled: places });
        line.wait(20);
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 1, pull 2, hello 0, push 1, pull 2");
        line.sent();
        line.done(push, &[(0, 1)]);
        line.values(pull, &[(1, 4)]);
        assert_eq!((line.versions(push), line.versions(pull)), (Some(vec![1]), Some(vec![5])));
    });
    assert_eq!(value, [1; 4]);
}

#[test]
fn several_answers_land_at_once() {
    let mut values = [[0; 4]; 3];
    lend(|book| {
        let mut line = Line::connected();
        let [one, two, three] = values.each_mut().map(|value| Incoming::Loan(book.write(value)));
        let body = |into| RequestBody { into, ..RequestBody::default() };
        let pair = line.ask(Kind::Pull, &[1, 2], body(vec![one, two].into()));
        let other = line.ask(Kind::Pull, &[3], body(vec![three].into()));
        line.welcome();
        line.sent();
        let cut = [line.begin_values(pair, &[(2, 4)]), line.begin_values(other, &[(3, 4)])];
        line.gone(cut.into_iter().flat_map(|(_, places)| places).collect());
        line.wait(20);
        line.welcome();
        line.sent();
        let asked = [(pair, (2, 4)), (other, (3, 4)), (pair, (2, 4)), (pair, (1, 4))];
        let landing = asked.map(|(ticket, value)| line.begin_values(ticket, &[value]));
        assert!(matches!(landing[2].1[..], [Incoming::Discard { .. }]), "the place for it is out");
        // It has no places, and comes between those that have.
        line.done(pair, &[(9, 9)]);
        for (at, (frame, body)) in landing.into_iter().enumerate() {
            assert!(line.client.is_busy(), "before answer {at}");
            line.event(Event::Received { peer: line.peer(), frame, body });
        }
        assert_eq!((line.versions(pair), line.versions(other)), (Some(vec![5, 5]), Some(vec![5])));
    });
    assert_eq!(values, [[1; 4], [2; 4], [3; 4]]);
}

#[test]
fn entries_count_once_however_often_they_are_answered() {
    let mut line = Line::connected();
    let ticket = line.ask(Kind::Set, &[0, 1, 0], RequestBody::default());
    line.welcome();
    line.sent();
    line.done(ticket, &[(1, 4)]);
    line.done(ticket, &[(1, 9), (7, 1)]);
    line.gone(ReceiveBuffers::new());
    line.wait(20);
    line.welcome();
    line.sent();
    line.done(ticket, &[(1, 4), (0, 5)]);
    assert_eq!(line.versions(ticket), None);
    line.done(ticket, &[(0, 5)]);
    assert_eq!(line.versions(ticket), Some(vec![5, 4, 5]), "each of two entries of one chunk has its answer");
}

/// Halves of two types are of one length: one that was not asked for is kept nowhere, and the entry stays open.
#[test]
fn a_value_of_another_half_is_not_the_one_that_was_asked_for() {
    for (half, wrong, right) in [(Half::Bfloat16, Float16, Bfloat16), (Half::Float16, Bfloat16, Float16)] {
        let mut value = [9; 4];
        lend(|book| {
            let mut line = Line::connected();
            let entry = Entry { half: Some(half), ..Entry::bare(id(1), Round(1), Float32) };
            let frame = Frame { entries: vec![entry].into(), ..Frame::bare(Head::new(Kind::Pull)) };
            let into = vec![Incoming::Loan(book.write(&mut value))];
            let mut out = ClientOutput::default();
            let ticket = line.client.ask(
                line.lane,
                frame,
                RequestBody { into: into.into(), ..RequestBody::default() },
                &mut out,
            );
            line.outputs(out);
            line.drive();
            line.welcome();
            line.sent();
            for of in [wrong, Float32] {
                let (frame, body) = line.begin_values_of(of, ticket, &[(1, 4)]);
                assert!(matches!(body[..], [Incoming::Discard { .. }]), "{of} for {half}");
                line.event(Event::Received { peer: line.peer(), frame, body });
                assert_eq!(line.versions(ticket), None, "{of} for {half}: it stays open");
            }
            let (frame, body) = line.begin_values_of(right, ticket, &[(1, 4)]);
            line.event(Event::Received { peer: line.peer(), frame, body });
            assert_eq!(line.versions(ticket), Some(vec![5]));
        });
        assert_eq!(value, [1; 4]);
    }
}

#[test]
fn values_land_in_their_places() {
    let mut memory = [9u8; 12];
    let (first, rest) = memory.split_at_mut(4);
    let (second, third) = rest.split_at_mut(4);
    lend(|book| {
        let mut line = Line::connected();
        let into = [first, second, third].into_iter().map(|place| Incoming::Loan(book.write(place))).collect();
        let ticket = line.ask(Kind::Pull, &[1, 2, 3], RequestBody { into, ..RequestBody::default() });
        line.welcome();
        line.sent();
        line.values(ticket, &[(3, 4)]);
        line.done(ticket, &[(1, 1)]);
        line.values(ticket, &[(2, 8)]);
        assert_eq!(line.versions(ticket), None, "an acknowledgement is no value, nor is one that does not fit");
        let (_, unfilled) = line.begin_values(ticket, &[(1, 4), (3, 4), (8, 4)]);
        line.gone(unfilled);
        line.wait(20);
        line.welcome();
        line.sent();
        line.values(ticket, &[(1, 4), (2, 4), (3, 4)]);
        assert_eq!(line.versions(ticket), Some(vec![5, 5, 5]));
        line.values(ticket, &[(1, 4)]);
    });
    assert_eq!(memory, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
}

#[test]
fn buffers_of_an_answer_go_with_the_request_where_the_connection_takes_them() {
    let mut memory = registered(12);
    let (mut summed, mut unregistered) = ([9u8; 4], [9u8; 4]);
    let mapping = memory.mapping().clone();
    lend(|book| {
        let mut line = Line::connected();
        let into = memory.chunks_mut(4).map(|place| Incoming::Loan(book.write(place).within(&mapping))).collect();
        let ticket = line.ask(Kind::Pull, &[1, 2, 3], RequestBody { into, ..RequestBody::default() });
        let into = [Incoming::Loan(book.write(&mut summed))].into();
        let other = line.ask(Kind::Pull, &[4], RequestBody { into, sums: true, ..RequestBody::default() });
        let into = [Incoming::Loan(book.write(&mut unregistered))].into();
        let third = line.ask(Kind::Pull, &[6], RequestBody { into, ..RequestBody::default() });
        line.welcome_to_answers();
        assert_eq!(line.log(), "hello 0, buffers of 1, pull 1, pull 2, pull 3", "of registered memory");
        line.sent();
        // Each kind of answer beside the other.
        let (frame, body) = line.begin_values(other, &[(4, 4)]);
        line.fill(ticket, &[(3, 2)], false);
        line.event(Event::Received { peer: line.peer(), frame, body });
        assert_eq!((line.versions(ticket), line.versions(other)), (None, Some(vec![5])));
        line.values(third, &[(6, 4)]);
        assert_eq!(line.versions(third), Some(vec![5]));
        // The server is busy with the rest, whose buffers come back: it is asked again, for what is open.
        line.error(ticket, Kind::Error, ErrorCode::Busy);
        line.return_posted();
        line.wait(20);
        assert_eq!(line.log(), "pull 1", "a value is not received twice into one buffer");
        line.sent();
        line.values(ticket, &[(1, 4), (2, 4)]);
        assert_eq!(line.versions(ticket), Some(vec![5; 3]));
    });
    assert_eq!(memory[..], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
    assert_eq!((summed, unregistered), ([4; 4], [6; 4]));
}

#[test]
fn a_lost_connection_returns_the_buffers_of_answers_and_the_next_one_gets_them_if_it_takes_them() {
    let (mut memory, mut summed) = (registered(8), [9u8; 4]);
    let mapping = memory.mapping().clone();
    lend(|book| {
        let mut line = Line::connected();
        let into = memory.chunks_mut(4).map(|place| Incoming::Loan(book.write(place).within(&mapping))).collect();
        let ticket = line.ask(Kind::Pull, &[1, 2], RequestBody { into, ..RequestBody::default() });
        for (takes_answers, expected) in [
            (true, "hello 0, buffers of 1, pull 1"),
            (true, "hello 0, buffers of 1, pull 1"),
            (false, "hello 0, pull 1"),
            (true, "hello 0, buffers of 1, pull 1"),
        ] {
            if takes_answers {
                line.welcome_to_answers();
            } else {
                line.welcome();
            }
            assert_eq!(line.log(), expected);
            if line.client.deadline().is_none() && line.peers < 4 {
                line.return_posted();
                line.gone(ReceiveBuffers::new());
                line.wait(1000);
            }
        }
        line.sent();
        // A value that is none: its buffer comes back, and the entry stays open.
        line.fill(ticket, &[(2, 1)], true);
        assert_eq!(line.versions(ticket), None);
        let into = [Incoming::Loan(book.write(&mut summed))].into();
        let other = line.ask(Kind::Pull, &[3], RequestBody { into, sums: true, ..RequestBody::default() });
        line.sent();
        let (first, second) = (line.begin_values(ticket, &[(1, 4)]), line.begin_values(other, &[(3, 4)]));
        for (frame, body) in [first, second] {
            line.event(Event::Received { peer: line.peer(), frame, body });
        }
        assert_eq!((line.versions(ticket), line.versions(other)), (Some(vec![5, 5]), Some(vec![5])));
    });
    assert_eq!((&memory[..], summed), (&[1, 1, 1, 1, 2, 2, 2, 2][..], [3; 4]));
}

/// A pull of chunk 1 that was sent with the buffer of its answer.
fn posted<'env>(book: &LoanBook<'env>, memory: &'env mut Buffer) -> (Line, Ticket) {
    let mapping = memory.mapping().clone();
    let mut line = Line::connected();
    let into = [Incoming::Loan(book.write(memory).within(&mapping))].into();
    let ticket = line.ask(Kind::Pull, &[1], RequestBody { into, ..RequestBody::default() });
    line.welcome_to_answers();
    line.sent();
    line.log();
    (line, ticket)
}

#[test]
fn a_cancelled_request_ends_when_the_connection_has_returned_the_buffers_of_its_answer() {
    let mut memory = registered(4);
    lend(|book| {
        let (mut line, ticket) = posted(book, &mut memory);
        line.cancel(ticket);
        assert_eq!(line.log(), "close", "the peer may write the buffer as long as it is connected");
        assert!(line.client.take(ticket).is_none(), "the transport has its buffer");
        line.return_posted();
        assert!(line.client.take(ticket).is_some_and(|end| end.is_err()));
        line.gone(ReceiveBuffers::new());
        assert!(!line.client.is_busy());
    });
}

/// Parts of the answer to the request as it was sent before may come: no side may take them for the later one's.
#[test]
fn a_request_that_found_a_busy_server_has_no_posted_answer_on_this_connection() {
    let mut memory = registered(4);
    lend(|book| {
        let (mut line, ticket) = posted(book, &mut memory);
        line.error(ticket, Kind::Error, ErrorCode::Busy);
        line.return_posted();
        line.wait(20);
        assert_eq!(line.log(), "pull 1");
        line.gone(ReceiveBuffers::new());
        line.wait(1000);
        line.welcome_to_answers();
        assert_eq!(line.log(), "hello 0, buffers of 1, pull 1");
        line.sent();
        line.fill(ticket, &[(1, 0)], true);
        assert_eq!(line.versions(ticket), Some(vec![5]));
    });
    assert_eq!(memory[..], [1; 4]);
}

#[test]
fn values_are_summed_when_they_are_whole() {
    let mut memory = [7u8; 8];
    lend(|book| {
        let (first, second) = memory.split_at_mut(4);
        let mut line = Line::connected();
        let into = [first, second].into_iter().map(|place| Incoming::Loan(book.write(place))).collect();
        let body = RequestBody { into, sums: true, ..RequestBody::default() };
        let ticket = line.ask(Kind::Pull, &[1, 2], body);
        line.welcome();
        line.sent();
        line.values(ticket, &[(2, 4)]);
        // Half of the other value has come when the connection ends.
        let (_, mut torn) = line.begin_values(ticket, &[(1, 4)]);
        torn[0].bytes_mut()[..2].fill(9);
        line.gone(torn);
        line.wait(20);
        line.welcome();
        line.sent();
        line.values(ticket, &[(1, 4), (2, 4)]);
        let finished = line.client.take(ticket).expect("it is over").expect("it was answered");
        assert_eq!(finished.sums, [[1; 4], [2; 4]].map(|value| ValueSum { sum: checksum(&value), bytes: 4 }));
    });
}

/// The wire refuses such a frame; a transport that lets it through takes nothing down with it.
#[test]
fn a_refusal_with_a_payload_gives_the_place_back() {
    for kind in [Kind::Error, Kind::Refused, Kind::Welcome] {
        let mut value = [0; 4];
        lend(|book| {
            let mut line = Line::connected();
            let into = vec![Incoming::Loan(book.write(&mut value))];
            let ticket = line.ask(Kind::Pull, &[1], RequestBody { into: into.into(), ..RequestBody::default() });
            line.welcome();
            line.sent();
            let (frame, body) = line.begin_values(ticket, &[(1, 4)]);
            let message =
                ErrorMessage { code: ErrorCode::Invalid.into(), text: "no".into(), ..ErrorMessage::default() };
            let head = Head { kind, ..frame.head };
            let frame = Frame { head, control: message.encode_to_vec(), ..frame };
            line.event(Event::Received { peer: line.peer(), frame, body });
            if kind != Kind::Error {
                line.cancel(ticket);
                line.gone(ReceiveBuffers::new());
            }
            assert!(line.client.take(ticket).is_some_and(|end| end.is_err()), "{kind:?}: its place is at home");
            assert!(!line.client.is_busy());
        });
    }
}

#[test]
fn a_stranger_gives_one_place_for_each_payload() {
    let mut line = Line::connected();
    line.ask(Kind::Pull, &[1], RequestBody::default());
    line.welcome();
    line.gone(ReceiveBuffers::new());
    let (_, places) = line.begin_values(Ticket(1), &[(1, 0), (2, 4)]);
    assert!(matches!(places[..], [Incoming::Discard { bytes: 4 }]));
}

#[test]
fn a_busy_server_is_asked_again_after_a_pause() {
    let mut line = Line::connected();
    let ticket = line.ask(Kind::Push, &[0], RequestBody::default());
    line.welcome();
    line.sent();
    line.log();
    line.error(ticket, Kind::Error, ErrorCode::Busy);
    assert_eq!(line.client.deadline(), Some(Now(20)));
    line.wait(19);
    assert_eq!(line.log(), "");
    line.wait(1);
    assert_eq!(line.log(), "push 1");
    assert_eq!(line.client.deadline(), None);
    line.sent();
    line.error(ticket, Kind::Error, ErrorCode::Busy);
    line.gone(ReceiveBuffers::new());
    line.wait(30);
    line.log();
    assert_eq!(line.client.deadline(), None, "a request that waits for a connection does not ask to be driven");
    line.welcome();
    line.sent();
    line.done(ticket, &[(0, 1)]);
    assert_eq!(line.versions(ticket), Some(vec![1]));
}

#[test]
fn who_is_superseded_or_a_stranger_is_told_and_who_is_refused_otherwise_tries_again() {
    let gradient = [1; 8];
    for code in [ErrorCode::Fenced, ErrorCode::Unauthenticated] {
        lend(|book| {
            let mut line = Line::connected();
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            let ticket = line.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
            line.error(Ticket(0), Kind::Refused, ErrorCode::Invalid);
            line.gone(ReceiveBuffers::new());
            let text = line.client.outstanding(&[ticket]);
            assert!(text.contains("shard 0 at loopback://there:1: 1 requests without an answer"), "{text}");
            assert!(text.contains("Invalid"), "{text}");
            line.wait(20);
            assert_eq!(line.log(), "hello 0, close, hello 0");
            line.error(Ticket(0), Kind::Refused, code);
            line.gone(ReceiveBuffers::new());
            let refused = line.client.take(ticket).expect("it is over").expect_err("it was refused");
            assert_eq!(refused.code, code);
            assert!(!line.client.is_busy());
        });
    }
}

#[test]
fn a_refused_request_ends_when_its_payload_is_home() {
    let gradient = [1; 8];
    lend(|book| {
        let mut line = Line::connected();
        let payload = vec![Outgoing::Loan(book.read(&gradient))];
        let ticket = line.ask(Kind::Push, &[0], RequestBody { payload: payload.into(), ..RequestBody::default() });
        line.welcome();
        line.error(ticket, Kind::Error, ErrorCode::Invalid);
        assert!(line.client.take(ticket).is_none());
        line.gone(ReceiveBuffers::new());
        assert_eq!(line.client.take(ticket).expect("it is over").expect_err("refused").code, ErrorCode::Invalid);
        assert!(!line.client.is_busy());
    });
}

#[test]
fn what_is_cancelled_comes_home_and_the_rest_is_sent_again() {
    let gradient = [1; 8];
    let mut value = [0; 4];
    lend(|book| {
        let mut line = Line::connected();
        let payload = || vec![Outgoing::Loan(book.read(&gradient))];
        let into = vec![Incoming::Loan(book.write(&mut value))];
        let first = line.ask(
            Kind::Push,
            &[0],
            RequestBody { payload: payload().into(), into: into.into(), ..RequestBody::default() },
        );
        let second = line.ask(Kind::Push, &[1], RequestBody { payload: payload().into(), ..RequestBody::default() });
        line.welcome();
        line.sent();
        let (_, unfilled) = line.begin_values(first, &[(0, 4)]);
        line.log();
        line.cancel(first);
        assert_eq!(line.log(), "close");
        assert!(line.client.take(first).is_none(), "its place is with the transport");
        line.gone(unfilled);
        assert_eq!(line.client.take(first).expect("it is over").expect_err("cancelled").code, ErrorCode::Deadline);
        line.wait(20);
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 2");
        line.sent();
        line.cancel(second);
        assert_eq!(line.log(), "", "what is at home ends at once, and its connection goes on");
        assert!(line.client.take(second).is_some() && !line.client.is_busy());
    });
}

#[test]
fn the_most_urgent_leaves_first() {
    let gradient = vec![1; 1 << 20];
    lend(|book| {
        let mut line = Line::connected();
        let ask = |line: &mut Line, priority| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            line.ask_sized(1 << 20, RequestBody { payload: payload.into(), priority, ..RequestBody::default() })
        };
        let mut tickets = [7, 7, 7, 7].map(|priority| ask(&mut line, priority)).to_vec();
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 1, push 2", "no more than the transport needs");
        tickets.extend([3, 5].map(|priority| ask(&mut line, priority)));
        line.sent();
        assert_eq!(line.log(), "push 5, push 6", "what was asked last overtakes what waits");
        line.gone(ReceiveBuffers::new());
        line.wait(20);
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 5, push 6", "also after a reconnect");
        line.sent();
        assert_eq!(line.log(), "push 1, push 2");
        line.sent();
        line.sent();
        assert_eq!(line.log(), "push 3, push 4");
        tickets.into_iter().for_each(|ticket| line.done(ticket, &[(0, 1)]));
        assert!(!line.client.is_busy());
    });
}

#[test]
fn what_is_lent_keeps_nothing_from_leaving_and_is_waited_for() {
    let gradient = vec![1; 1 << 20];
    lend(|book| {
        let mut line = Line::connected();
        let ask = |line: &mut Line| {
            let payload = vec![Outgoing::Loan(book.read(&gradient))];
            line.ask_sized(1 << 20, RequestBody { payload: payload.into(), ..RequestBody::default() })
        };
        let tickets = [(); 5].map(|()| ask(&mut line));
        line.welcome();
        assert_eq!(line.log(), "hello 0, push 1, push 2");
        line.transmitted();
        assert_eq!(line.log(), "push 3, push 4", "though nothing of the first two is back");
        line.transmitted();
        assert_eq!(line.log(), "push 5", "and each has left once");
        for ticket in tickets {
            line.done(ticket, &[(0, 1)]);
            assert!(line.client.take(ticket).is_none(), "it is answered, and still lent");
        }
        line.sent();
        assert!(tickets.iter().all(|ticket| line.client.take(*ticket).is_some_and(|end| end.is_ok())));
    });
}

#[test]
fn an_address_that_cannot_be_reached_is_named() {
    let mut line = Line::new();
    let mut out = ClientOutput::default();
    let ticket = line.client.ask(line.lane, Frame::bare(Head::new(Kind::Leave)), RequestBody::default(), &mut out);
    line.client.drive(line.now, &mut out);
    assert!(matches!(out.connections[..], [ConnectionChange::Connect { .. }]));
    line.client.unreachable(line.now, line.lane, &crate::error::Failure::call("no such host"));
    assert!(line.client.outstanding(&[ticket]).ends_with("(not connected, no such host)"));
    assert_eq!(line.client.deadline(), Some(Now(20)));
    line.cancel(ticket);
    assert!(!line.client.is_busy());
}

#[test]
fn a_server_that_does_not_answer_may_be_at_another_address() {
    let there = Address::parse("loopback://there:1").expect("valid");
    let elsewhere = Address::parse("loopback://elsewhere:1").expect("valid");
    let mut line = Line::connected();
    let ticket = line.ask(Kind::Push, &[0], RequestBody::default());
    line.welcome();
    line.gone(ReceiveBuffers::new());
    for _ in 0..3 {
        assert!(!line.client.is_astray(), "the first attempts may fail");
        line.wait(1000);
        line.gone(ReceiveBuffers::new());
    }
    assert!(line.client.is_astray());
    line.client.move_lane(line.lane, there, Term(0));
    assert!(line.client.is_astray(), "nothing is new");
    line.client.move_lane(line.lane, elsewhere, Term(0));
    assert!(!line.client.is_astray());
    assert_eq!(line.dialled, "loopback://there:1");
    line.wait(0);
    assert_eq!(line.dialled, "loopback://elsewhere:1", "without another pause");
    line.welcome();
    line.sent();
    line.done(ticket, &[(0, 1)]);
    assert_eq!(line.versions(ticket), Some(vec![1]));
}

#[test]
fn a_server_that_does_not_lead_the_shard_is_left_at_once() {
    let elsewhere = Address::parse("loopback://elsewhere:1").expect("valid");
    let mut line = Line::connected();
    let ticket = line.ask(Kind::Push, &[0], RequestBody::default());
    line.error(Ticket(0), Kind::Refused, ErrorCode::Moved);
    assert!(line.log.contains(&"close".to_owned()) && line.client.has_moved() && line.client.is_astray());
    line.gone(ReceiveBuffers::new());
    line.client.move_lane(line.lane, elsewhere, Term(2));
    assert!(!line.client.has_moved());
    line.wait(0);
    let hello = |line: &Line| line.sending.last().expect("a hello is sent").1.head.term;
    assert_eq!((line.dialled.as_str(), hello(&line)), ("loopback://elsewhere:1", Term(2)));
    // A former leader that has not noticed welcomes the client.
    line.welcome_of(Term(1));
    assert!(line.client.has_moved() && line.client.is_busy());
    line.gone(ReceiveBuffers::new());
    line.wait(1000);
    line.welcome_of(Term(3));
    assert!(!line.client.has_moved());
    assert_eq!(hello(&line), Term(3), "the frames are of the leader's term");
    line.sent();
    line.done(ticket, &[(0, 1)]);
    assert_eq!(line.versions(ticket), Some(vec![1]));
    // It knows of another leader, and is still connected to this one.
    line.client.move_lane(line.lane, Address::parse("loopback://third:1").expect("valid"), Term(4));
    line.ask(Kind::Push, &[0], RequestBody::default());
    assert_eq!(hello(&line), Term(3));
}

#[test]
fn an_answer_without_entries_brings_its_message() {
    let mut line = Line::connected();
    let ticket = line.ask(Kind::Control, &[], RequestBody::default());
    line.welcome();
    line.sent();
    let message = ErrorMessage { code: 0, text: "hello".into(), trainers: vec![3] };
    let frame = Frame::with_control(Head { request: ticket, ..Head::new(Kind::Answer) }, &message);
    line.event(Event::Received { peer: line.peer(), frame, body: ReceiveBuffers::new() });
    let finished = line.client.take(ticket).expect("it is over").expect("it was answered");
    assert_eq!(ErrorMessage::decode(finished.control.as_slice()).expect("it parses"), message);
}
