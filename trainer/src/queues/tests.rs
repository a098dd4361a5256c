use std::thread;

use pserver_client::ClientOptions;
use pserver_core::wire::Address;
use pserver_node::Server;
use pserver_node::settings::Settings;
use pserver_program::{Elements, Program};
use pserver_transport::loopback::Hub;

use super::*;

const SERVER: &str = "loopback://server-0:1";

/// Trainer 0 sends x to trainer 1 through server 0.
const SENDS: &str = "data x: float32[batch, 2]\n communication send(x, channel=\"x\", to=server:0)";
const RECEIVES: &str = "temporary x: float32[batch, 2]\n communication x = recv(channel=\"x\")";
const QUEUE: &str = "communication x = recv(channel=\"x\")
    communication enqueue(q, x)
    communication i = dequeue(q, min_count=1)
    communication send(i, channel=\"x\", to=trainer:1)";

fn part(peer: ProgramPeer, text: &str) -> ProgramPart {
    let (program, positions) = Program::read(text, None).expect("it is a program");
    ProgramPart { peers: vec![peer], graph: Graph::located(program, positions).expect("it is right") }
}

fn server_part(capacity: u64, ops: &str) -> ProgramPart {
    let text = format!(
        "block 0 {{\n state q: queue(float32[batch, 2], {capacity})\n communication loop_forever(block=1)\n}}\n\
         block 1 in 0 {{\n temporary x: float32[batch, 2]\n temporary i: float32[batch, 2]\n {ops}\n}}"
    );
    part(ProgramPeer::Server(0), &text)
}

fn trainer_part(trainer: u32, ops: &str) -> ProgramPart {
    part(ProgramPeer::Trainer(trainer), &format!("block 0 {{\n {ops}\n}}"))
}

fn parts() -> [ProgramPart; 3] {
    [trainer_part(0, SENDS), trainer_part(1, RECEIVES), server_part(1, QUEUE)]
}

fn server_queues(parts: &[ProgramPart]) -> Result<Vec<ServerQueue>, Failure> {
    let of_server = parts.iter().find(|part| part.peers == [ProgramPeer::Server(0)]).expect("there is a server");
    queues_of(parts, &of_server.graph, 0)
}

/// An item of a batch of three.
fn item(number: f32) -> Tensor {
    Tensor::new([3, 2], Elements::Float32(vec![number; 6]))
}

/// A job with one server, which has the queue for a batch of three.
struct QueueJob {
    hub: Hub,
    server: Server,
    queues: Vec<ServerQueue>,
}

impl QueueJob {
    fn start() -> Self {
        let hub = Hub::default();
        let words = format!("--bind {SERVER} --trainers 2 --shards 2");
        let settings = Settings::of_words(words.split_whitespace()).expect("they are settings");
        let server = Server::start_within(settings, &hub).expect("nobody else has its name");
        let queues = server_queues(&parts()).expect("the transpiler writes such queues");
        let job = Self { hub, server, queues };
        let client = job.client(0);
        assert!(client.begin_init(&OptimizerSettings::default()).expect("the job is there"), "one trainer asks");
        job.queues[0].declare(&client, Some(3)).expect("the queue is new");
        client.finish_init().expect("all of it is there");
        job
    }

    fn client(&self, trainer: u32) -> Client {
        let coordinator = Address::parse(SERVER).expect("it is an address");
        let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(coordinator) };
        Client::within(options, &self.hub).expect("the hub has room")
    }

    /// A trainer with its ends of the queue.
    fn ends(&self, trainer: u32) -> (Client, Result<QueueEnds, Failure>) {
        let client = self.client(trainer);
        let ends = QueueEnds::of(&client, &parts()[trainer as usize].graph, &self.queues);
        (client, ends)
    }

    fn stop(self) {
        self.server.stop().expect("it ends well");
    }
}

fn received(ends: &mut QueueEnds, client: &Client, room: Option<Tensor>) -> Tensor {
    let (from, item) = ends.receive(client, "x", room).expect("an item comes").expect("x is a queue");
    assert_eq!(from, ProgramPeer::Server(0));
    item
}

#[test]
fn items_come_in_their_order_and_wait_for_no_reader() {
    let job = QueueJob::start();
    let (sender, sent) = job.ends(0);
    let (reader, got) = job.ends(1);
    let (mut sent, mut got) = (sent.expect("nobody has sent"), got.expect("nobody has sent"));
    assert!(sent.is_sent("x") && !got.is_sent("x") && !got.is_empty());
    assert!(got.receive(&reader, "y", None).expect("it is no failure").is_none(), "another channel is no queue");
    thread::scope(|scope| {
        // The reader waits before the item is sent.
        let first = scope.spawn(|| received(&mut got, &reader, None));
        sent.send(&sender, "x", &item(1.0)).expect("the server takes it");
        assert_eq!(first.join().expect("it ends"), item(1.0));
    });
    sent.send(&sender, "x", &item(2.0)).expect("the server takes it");
    assert_eq!(received(&mut got, &reader, Some(item(0.0))), item(2.0), "room that fits is used");
    // A queue holds one item, so the reader has missed the third.
    sent.send(&sender, "x", &item(3.0)).expect("the server takes it");
    sent.send(&sender, "x", &item(4.0)).expect("the server takes it");
    let missed = got.receive(&reader, "x", None).expect_err("it has overwritten it").to_string();
    assert!(missed.contains("queue \"x\": found item 4; expected 3, which it has overwritten"), "{missed}");
    job.stop();
}

#[test]
fn an_item_of_another_shape_and_a_used_queue_are_refused() {
    let job = QueueJob::start();
    let (sender, sent) = job.ends(0);
    let mut sent = sent.expect("nobody has sent");
    let wide = Tensor::new([1, 2], Elements::Float32(vec![1.0; 2]));
    let refused = sent.send(&sender, "x", &wide).expect_err("it is too short").to_string();
    assert!(refused.contains("queue \"x\": found an item of [1, 2]; expected [3, 2]"), "{refused}");
    let facts = VariableFacts::Dense { element_type: ElementType::Float32, shape: vec![Dim::Batch, Dim::Fixed(2)] };
    sent.check_batch(&facts, &item(0.0)).expect("a batch of three");
    let refused = sent.check_batch(&facts, &wide).expect_err("a batch of one").to_string();
    assert!(refused.contains("found a batch of 1; expected 3"), "{refused}");
    sent.send(&sender, "x", &item(1.0)).expect("the server takes it");
    // A reader may join after the first item; its sender may not rejoin.
    let (_, reader) = job.ends(1);
    reader.expect("one item may be there");
    let (_, again) = job.ends(0);
    let refused = again.err().expect("a trainer's parameters are lost with it").to_string();
    assert!(refused.contains("queue \"x\": found 1 items sent; expected a new job"), "{refused}");
    job.stop();
}

#[test]
fn a_queue_program_of_another_structure_is_refused() {
    let check = |parts: &[ProgramPart], expected: &str| {
        let refused = server_queues(parts).expect_err("it is another form").to_string();
        assert!(refused.contains(expected), "found {refused}\nexpected {expected}");
    };
    let [sends, receives, queue] = parts();
    check(&[sends.clone(), receives.clone(), server_part(2, QUEUE)], "queue \"q\": found a capacity of 2; expected 1");
    check(&[receives.clone(), queue.clone()], "found 0 trainers that send to channel \"x\"; expected one");
    let both = ProgramPart { peers: vec![ProgramPeer::Trainer(0), ProgramPeer::Trainer(1)], ..sends.clone() };
    check(&[both, queue], "found 2 trainers that send to channel \"x\"; expected one");
    let unread = QUEUE.lines().take(2).collect::<Vec<_>>().join("\n");
    check(&[sends.clone(), server_part(1, &unread)], "found 1 enqueue and 0 dequeue; expected recv, enqueue, dequeue");
    let elsewhere = QUEUE.replace("send(i, channel=\"x\"", "send(i, channel=\"y\"");
    check(&[sends, server_part(1, &elsewhere)], "found send of its item; expected recv, enqueue, dequeue");
}
