//! The coordinator: one initialiser at a time, ranks, servers, and what a restart keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message;

use crate::config::{OptimizerSettings, ParameterConfig};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{Epoch, Generation, Incarnation, MapVersion, NO_TRAINER, PeerId, ServerIndex, Ticket, TrainerId};
use crate::partition::{Catalogue, Declaration, Name, ShardMap, ShardPlace, Topology};
use crate::port::{Event, ReceiveBuffers, Submit};
use crate::server::{Coordinator, CoordinatorOptions, CoordinatorOutput, OperatorSettings, ServerOutput};
use crate::time::Now;
use crate::wire::answer::Answer;
use crate::wire::request::{Commit, Request};
use crate::wire::{
    CatalogueRequest, ControlAnswer, ControlRequest, ErrorMessage, Frame, Head, HeldShardMessage, HelloMessage,
    JobMessage, JoinRequest, Joined, Kind, MoveRequest, RegisterRequest, ServerEntry, ShardMessage,
};

const JOB: JobMessage = JobMessage { mode: 0, staleness: 0, merge: 0, trainers: 3, chunk_bytes: 4096 };

/// A connection, and the identity that its process claims.
#[derive(Clone, Copy)]
struct Caller {
    peer: PeerId,
    trainer: TrainerId,
    incarnation: Incarnation,
    /// The number of its process.
    process: u32,
}

struct Desk {
    coordinator: Coordinator,
    now: Now,
    peers: u64,
    callers: BTreeMap<String, Caller>,
    answers: Vec<String>,
    kept: Vec<u8>,
}

fn options() -> CoordinatorOptions {
    let (lease, grace) = (Duration::from_secs(20), Duration::from_secs(2));
    CoordinatorOptions {
        epoch: Epoch(7),
        servers: 2,
        job: JOB,
        default_config: sgd(0.1),
        given: OperatorSettings::default(),
        lease,
        grace,
        watches: true,
        takes_nonfinite: false,
        model_dir: String::new(),
    }
}

/// The encoded configuration of SGD with a constant learning rate.
fn sgd(rate: f64) -> Vec<u8> {
    config(&format!("optimizer: SGD const_lr {{ learning_rate: {rate} }}"))
}

fn config(text: &str) -> Vec<u8> {
    let rule = OptimizerSettings::from_text(text).expect("valid").rule.expect("it has one");
    ParameterConfig::of(rule).encode()
}

/// The pages of a catalogue of two parameters, each a page of its own.
fn pages() -> Vec<Vec<u8>> {
    let topology = Topology::new(vec![1, 2]).expect("valid");
    let mut catalogue = Catalogue::new(topology, 4096).expect("valid");
    for name in ["w", "x"] {
        let declaration = Declaration {
            name: Name::new(name.as_bytes()).expect("valid"),
            element_type: ElementType::Float32,
            bytes: 8,
            shape: vec![2],
            whole: false,
            config: Vec::new(),
            buckets: None,
            owner: (name == "x").then_some(ServerIndex(1)),
            sender: (name == "x").then_some(TrainerId(0)),
            total_part: None,
            hosted: None,
        };
        catalogue.declare(declaration).expect("valid");
    }
    catalogue.pages(1).iter().map(Message::encode_to_vec).collect()
}

impl Desk {
    fn new(recalled: Option<&[u8]>) -> Self {
        let coordinator = Coordinator::new(options(), recalled).expect("it starts");
        let kept = recalled.map(<[u8]>::to_vec).unwrap_or_default();
        Self { coordinator, now: Now(0), peers: 0, callers: BTreeMap::new(), answers: Vec::new(), kept }
    }

    fn event(&mut self, event: Event) {
        let mut out = Vec::new();
        self.coordinator.handle(self.now, event, &mut out);
        self.outputs(out);
    }

    fn outputs(&mut self, out: Vec<CoordinatorOutput>) {
        for output in out {
            match output {
                CoordinatorOutput::Session(ServerOutput::Submit(Submit::Send { peer, frame, .. })) => {
                    self.note(peer, &frame)
                }
                CoordinatorOutput::Session(ServerOutput::Submit(Submit::PostReceive { .. })) => {}
                CoordinatorOutput::Session(ServerOutput::Submit(Submit::PostAnswer { .. })) => {
                    panic!("a server asks nothing")
                }
                CoordinatorOutput::Session(ServerOutput::Close(peer)) => {
                    let text = format!("{} closed", self.name(peer));
                    self.answers.push(text);
                }
                CoordinatorOutput::Keep(bytes) => self.kept = bytes,
                CoordinatorOutput::Map(map) => self.answers.push(format!("map {}", shown(&map))),
                CoordinatorOutput::Save { path, .. } => self.answers.push(format!("save {path}")),
            }
        }
    }

    fn name(&self, peer: PeerId) -> String {
        self.callers.iter().find(|(_, caller)| caller.peer == peer).map_or("?".into(), |(name, _)| name.clone())
    }

    fn note(&mut self, peer: PeerId, frame: &Frame) {
        let name = self.name(peer);
        let message = ControlAnswer::decode(frame.control.as_slice()).unwrap_or_default();
        let ends_by_itself = message.ends_by_itself;
        let text = match frame.head.kind {
            Kind::Welcome => return,
            Kind::Error | Kind::Refused => {
                let message = ErrorMessage::decode(frame.control.as_slice()).expect("it parses");
                format!("{:?}: {}", message.code(), message.text)
            }
            _ => match message.answer.expect("there") {
                Answer::Done(_) => "done".into(),
                Answer::Granted(generation) => format!("granted {generation}"),
                Answer::Initialised(done) => format!("initialised {} pages {}", done.generation, done.pages),
                Answer::Page(page) => format!("page of {} bytes", page.len()),
                Answer::Waiting(text) if ends_by_itself => format!("{text}, which ends by itself"),
                Answer::Waiting(text) => text,
                Answer::Saved(saved) => format!("saved {}", saved.path),
                Answer::Map(map) => format!("map {}", shown(&map.map().expect("it is whole"))),
                Answer::Checkpointed(taken) => format!("checkpoint {}", taken.number),
                Answer::Joined(joined) => {
                    let caller = self.callers.get_mut(&name).expect("known");
                    caller.trainer = TrainerId(joined.trainer);
                    caller.incarnation = Incarnation(joined.incarnation);
                    let Joined { trainer, incarnation, epoch, run, .. } = joined;
                    format!("joined {trainer}.{incarnation} epoch {epoch} run {run}")
                }
            },
        };
        self.answers.push(format!("{name} {text}"));
    }

    /// Connects as another process of this name.
    fn dial(&mut self, name: &str) {
        let process = u32::try_from(self.peers + 1).expect("a test has few connections");
        self.connect(name, process);
    }

    fn connect(&mut self, name: &str, process: u32) {
        self.peers += 1;
        let peer = PeerId(self.peers);
        let stranger = Caller { peer, trainer: NO_TRAINER, incarnation: Incarnation(0), process };
        let known = self.callers.entry(name.to_owned()).and_modify(|one| (one.peer, one.process) = (peer, process));
        let caller = *known.or_insert(stranger);
        self.event(Event::Accepted { peer, origin: name.to_owned(), transport: String::new() });
        let head = Head { trainer: caller.trainer, incarnation: caller.incarnation, ..Head::new(Kind::Hello) };
        let frame = Frame::with_control(
            head,
            &HelloMessage { host: "h".into(), process, absence_millis: Some(10_000), ..HelloMessage::default() },
        );
        self.event(Event::Received { peer, frame, body: ReceiveBuffers::new() });
    }

    fn ask(&mut self, name: &str, request: Request) {
        self.ask_with_generation(name, 0, request);
    }

    /// Sends a request under this generation.
    fn ask_with_generation(&mut self, name: &str, generation: u32, request: Request) {
        if !self.callers.contains_key(name) {
            self.dial(name);
        }
        let caller = self.callers[name];
        let head = Head {
            trainer: caller.trainer,
            incarnation: caller.incarnation,
            request: Ticket(1),
            generation: Generation(generation),
            ..Head::new(Kind::Control)
        };
        let frame = Frame::with_control(head, &ControlRequest { request: Some(request) });
        self.event(Event::Received { peer: caller.peer, frame, body: ReceiveBuffers::new() });
    }

    fn wait(&mut self, millis: u32) {
        self.now = self.now + Duration::from_millis(millis.into());
        let mut out = Vec::new();
        if self.coordinator.deadline().is_some_and(|deadline| deadline <= self.now) {
            self.coordinator.expire(self.now, &mut out);
        }
        self.outputs(out);
    }

    /// The server of the coordinator holds these shards.
    fn hold(&mut self, version: u32, words: &[&str]) {
        let held: Vec<_> = words.iter().filter_map(|word| held(word)).collect();
        let mut out = Vec::new();
        self.coordinator.note_held(ServerIndex(0), Some(MapVersion(version.into())), &held, &mut out);
        self.outputs(out);
    }

    fn step(&mut self, command: &str) {
        let words: Vec<&str> = command.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u32>().ok());
        match words[0] {
            "servers" => {
                self.ask("s0", Request::Register(register(&words, 0, 1)));
                self.ask("s1", Request::Register(register(&words, 1, 2)));
                self.answers.clear();
            }
            "register" => {
                let register = register(&words, number(2).expect("n"), number(3).expect("n"));
                self.ask(words[1], Request::Register(register));
            }
            // A server at an address of its own name.
            "register-at" => {
                let mut register = register(&words, number(2).expect("n"), 2);
                register.entry.iter_mut().for_each(|entry| entry.address = format!("tcp://{}:1", words[1]));
                self.ask(words[1], Request::Register(register));
            }
            "move" => {
                let seen = words.iter().find_map(|word| word.strip_prefix("seen=")?.parse().ok());
                let seen = seen.unwrap_or(self.coordinator.map().version().0);
                let order = MoveRequest { shard: Some(named(words[2])), to: number(3).expect("a server"), seen };
                self.ask(words[1], Request::Move(order));
            }
            "map" => self.ask(words[1], Request::Watch(number(2).expect("a version").into())),
            "held" => self.hold(number(1).expect("a version"), &words[2..]),
            "dial" => self.dial(words[1]),
            "redial" => self.connect(words[1], self.callers[words[1]].process),
            "gone" => {
                let peer = self.callers[words[1]].peer;
                self.event(Event::Gone {
                    peer,
                    reason: "cut".into(),
                    unsent: Vec::new(),
                    unfilled: ReceiveBuffers::new(),
                });
            }
            "join" => self.ask(words[1], Request::Join(JoinRequest { trainer: number(2), incarnation: 0 })),
            "begin" => self.ask(words[1], Request::Begin(true)),
            "watch" => self.ask_with_generation(words[1], number(2).unwrap_or(0), Request::Begin(false)),
            "resign" => self.ask_with_generation(words[1], number(2).expect("a generation"), Request::Resign(true)),
            "beat" => self.ask(words[1], Request::Heartbeat(true)),
            "ask" => self.ask(words[1], Request::Waiting(true)),
            "release" => self.ask(words[1], Request::Release(true)),
            "leave" => self.ask(words[1], Request::Leave(true)),
            "page" => self.ask(words[1], Request::Catalogue(CatalogueRequest { page: number(2).expect("n") })),
            "save" => self.ask(words[1], Request::Save(words[2].to_owned())),
            "commit" => {
                let page = number(3).expect("a page") as usize;
                let last = page + 1 == pages().len();
                let generation = number(2).expect("a generation");
                let commit =
                    Commit { generation, page: pages()[page].clone(), last, job: Some(JOB), default_config: sgd(0.1) };
                self.ask(words[1], Request::Commit(commit));
            }
            "wait" => self.wait(number(1).expect("a time")),
            "restart" => {
                let (mut callers, peers) = (std::mem::take(&mut self.callers), self.peers);
                callers.retain(|name, _| !name.starts_with('s'));
                *self = Self { callers, peers, ..Self::new(Some(&self.kept)) };
            }
            other => panic!("{other} is no command"),
        }
    }
}

/// The registration of a server that these words describe.
fn register(words: &[&str], server: u32, shards: u32) -> RegisterRequest {
    let keeps_journal = !words.contains(&"diskless");
    RegisterRequest {
        server,
        entry: Some(ServerEntry { address: format!("tcp://s{server}:1"), shards, keeps_journal }),
        renews: words.contains(&"again"),
        status: Vec::new(),
        servers: words.iter().find_map(|word| word.strip_prefix("of=")?.parse().ok()),
        holds: words.iter().filter_map(|word| held(word)).collect(),
        map_version: words.iter().find_map(|word| word.strip_prefix("map=")?.parse().ok()),
        start: words.iter().find_map(|word| word.strip_prefix("start=")?.parse().ok()).unwrap_or(0),
    }
}

/// The name of a shard, such as `0.1`.
fn named(word: &str) -> ShardMessage {
    let (server, shard) = word.split_once('.').expect("a server and a shard");
    ShardMessage { server: server.parse().expect("a number"), shard: shard.parse().expect("a number") }
}

/// `holds=0.1`, or `holds=0.1+` for a shard that is served, or `fails=0.1`.
fn held(word: &str) -> Option<HeldShardMessage> {
    if let Some(word) = word.strip_prefix("fails=") {
        return Some(HeldShardMessage { shard: Some(named(word)), serves: false, failure: Some("no".into()) });
    }
    let word = word.strip_prefix("holds=")?;
    let shard = named(word.trim_end_matches('+'));
    Some(HeldShardMessage { shard: Some(shard), serves: word.ends_with('+'), failure: None })
}

fn shown(map: &ShardMap) -> String {
    let places = map.moved().map(|(shard, ShardPlace { server, term, next, .. })| {
        let next = next.map_or(String::new(), |next| format!(" to {next}"));
        format!(" {}.{} at {server} term {term}{next}", shard.server, shard.shard)
    });
    format!("{}:{}", map.version(), places.collect::<String>())
}

/// Runs lines of `command -> answers`; what is expected is the beginning of each answer.
fn check(script: &str) {
    let mut desk = Desk::new(None);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (command, expected) = line.split_once("->").unwrap_or((line, ""));
        desk.answers.clear();
        desk.step(command.trim());
        let expected: Vec<&str> = expected.split('&').map(str::trim).filter(|one| !one.is_empty()).collect();
        let fits = expected.len() == desk.answers.len()
            && expected.iter().zip(&desk.answers).all(|(expected, found)| found.starts_with(expected));
        assert!(fits, "{line}\nfound: {:?}\nin:\n{script}", desk.answers);
    }
}

const START: &str = "servers\n join a -> a joined 0.1 epoch 7\n join b -> b joined 1.1\n join c -> c joined 2.1\n";

fn check_started(script: &str) {
    check(&format!("{START}{script}"));
}

#[test]
fn one_trainer_is_elected_initialiser_and_the_others_learn_the_end() {
    check_started(
        "begin b -> b granted 1
         begin a ->
         begin c ->
         watch r ->
         page a 0 -> a NotInitialised
         commit b 1 0 -> b done
         commit b 1 1 -> b done & a initialised 1 pages 2 & c initialised 1 pages 2 & r initialised 1
         begin c -> c initialised 1 pages 2
         page a 1 -> a page of
         page a 2 -> a Invalid: page 2 of a catalogue of 2 pages",
    );
}

#[test]
fn a_silent_initialiser_loses_its_lease() {
    check_started(
        "begin a -> a granted 1
         begin b ->
         wait 19999 ->
         wait 1 -> b granted 2
         commit a 1 0 -> a InitialisationLost: generation 1 was superseded
         commit a 2 0 -> a InitialisationLost
         commit b 2 0 -> b done
         commit b 2 1 -> b done",
    );
}

#[test]
fn an_initialiser_that_watches_its_own_generation_is_replaced_at_once() {
    check_started(
        "begin a -> a granted 1
         begin b ->
         watch b 1 ->
         watch a ->
         watch a 1 -> b granted 2
         watch a 1 ->
         commit a 1 0 -> a InitialisationLost
         commit b 2 0 -> b done
         commit b 2 1 -> b done & b initialised 2 & a initialised 2 & a initialised 2 & a initialised 2",
    );
}

#[test]
fn an_initialiser_that_resigns_is_answered_and_replaced_at_once() {
    check_started(
        "begin a -> a granted 1
         begin b ->
         resign b 1 -> b done
         resign a 7 -> a done
         resign a 1 -> b granted 2 & a done
         resign a 1 -> a done
         commit a 1 0 -> a InitialisationLost
         commit b 2 0 -> b done
         commit b 2 1 -> b done
         resign b 2 -> b done
         begin a -> a initialised 2",
    );
}

#[test]
fn heartbeats_renew_the_initialisers_lease() {
    check_started(
        "begin a -> a granted 1
         begin b ->
         wait 15000 ->
         beat a -> a done
         wait 15000 ->
         beat a -> a done
         wait 20000 -> b granted 2",
    );
}

#[test]
fn a_closed_connection_shortens_the_initialisers_lease() {
    check_started("begin a -> a granted 1\n begin b ->\n gone a ->\n wait 4999 ->\n wait 1 -> b granted 2");
    check_started(
        "begin a -> a granted 1\n begin b ->\n gone a ->\n dial a ->\n wait 19999 ->\n wait 1 -> b granted 2",
    );
    check_started("begin a -> a granted 1\n begin b ->\n dial a ->\n begin a -> a granted 2\n commit a 1 0 -> a Init");
}

#[test]
fn a_request_on_a_new_connection_replaces_the_one_on_the_old_connection() {
    check_started("begin a -> a granted 1\n begin b ->\n dial b ->\n begin b ->\n wait 20000 -> b granted 2");
}

#[test]
fn a_page_that_is_sent_twice_counts_once() {
    check_started(
        "begin a -> a granted 1
         commit a 1 0 -> a done
         dial a ->
         commit a 1 0 -> a done
         commit a 1 1 -> a done
         commit a 1 1 -> a done
         begin b -> b initialised 1 pages 2",
    );
    check_started("begin a -> a granted 1\n commit a 1 1 -> a InitialisationLost");
}

#[test]
fn ranks_are_requested_or_assigned() {
    check(
        "servers
         join a 2 -> a joined 2.1
         join b -> b joined 0.1
         join c -> c joined 1.1
         join d ->
         wait 1999 ->
         wait 1 -> d Invalid: all 3 ranks of this job are taken by trainers that are \
connected (0: host h, pid 4; 1: host h, pid 5; 2: host h, pid 3); start the servers with --trainers 4
         join d 3 -> d Invalid: trainer 3: this job has 3 trainers, numbered from 0
         join d 2 -> d joined 2.2
         beat a -> a Fenced: trainer 2 incarnation 1 was superseded by incarnation 2
         leave a -> a Fenced
         dial a -> a Fenced & a closed
         leave b -> b done
         join e -> e joined 0.2
         leave r -> r Invalid: only a trainer or server can leave",
    );
}

#[test]
fn a_join_waits_for_all_servers() {
    check(
        "join a ->
         register s0 0 1 -> s0 joined
         join b ->
         register s2 2 1 -> s2 Invalid: server index 2: this job has 2 servers, numbered from 0
         register s1 1 2 of=3 -> s1 Invalid: server 1 is started with servers = 3, and server 0 with servers = 2
         register s1 1 2 of=2 -> s1 joined & a joined 0.1 & b joined 1.1
         register s1 1 3 -> s1 Invalid: server 1 had 2 shards and comes back with 3
         register s1 1 2 -> s1 joined",
    );
}

#[test]
fn a_restart_keeps_epoch_incarnations_and_catalogue() {
    check_started(
        "begin a -> a granted 1
         commit a 1 0 -> a done
         restart
         dial a ->
         servers
         commit a 1 1 -> a InitialisationLost
         begin a -> a granted 2
         commit a 2 0 -> a done
         commit a 2 1 -> a done
         leave b ->
         dial b
         leave b -> b done
         restart
         servers
         dial c
         join c 2 -> c joined 2.2 epoch 7
         register s1 1 5 -> s1 Invalid: server 1 had 2 shards and comes back with 5
         join d -> d joined 1.2
         begin d -> d initialised 2 pages 2
         page d 0 -> d page of",
    );
}

#[test]
fn another_number_of_servers_is_refused() {
    let mut desk = Desk::new(None);
    desk.step("servers");
    for command in ["join a", "begin a", "commit a 1 0", "commit a 1 1"] {
        desk.step(command);
    }
    assert_eq!(desk.coordinator.generation(), Generation(1));
    let refused = Coordinator::new(CoordinatorOptions { servers: 3, ..options() }, Some(&desk.kept)).err();
    let text = refused.expect("it is refused").to_string();
    let words =
        ["servers = 3 (default): ", "initialised on 2 servers", "expected servers = 2, or another checkpoint_dir"];
    words.iter().for_each(|word| assert!(text.contains(word), "{text}"));
}

/// With a reused incarnation, shards take the gradients of a new process for resends of an earlier one.
#[test]
fn no_incarnation_is_given_twice_after_a_start_with_another_number_of_trainers() {
    let mut desk = Desk::new(None);
    desk.step("servers");
    for command in ["join a", "join b 1", "begin a", "commit a 1 0", "commit a 1 1"] {
        desk.step(command);
    }
    for trainers in [1, 4] {
        let options = CoordinatorOptions { job: JobMessage { trainers, ..JOB }, ..options() };
        let coordinator = Coordinator::new(options, Some(&desk.kept)).expect("it starts");
        desk = Desk { coordinator, ..Desk::new(Some(&desk.kept)) };
        desk.step("servers");
        assert_eq!(desk.coordinator.members().len(), 3, "the job was begun with 3 trainers");
        desk.step("join c 0");
    }
    let mut desk = Desk::new(Some(&desk.kept));
    desk.step("servers");
    desk.step("join d 1");
    assert_eq!(desk.coordinator.members()[0].incarnation, Incarnation(3));
    assert_eq!(desk.coordinator.members()[1].incarnation, Incarnation(2));
}

#[test]
fn a_rank_is_free_when_its_connection_has_been_closed_for_the_grace_time() {
    check_started(
        "gone b ->
         join d ->
         wait 1999 ->
         wait 1 -> d joined 1.2
         dial b -> b Fenced: trainer 1 incarnation 1 was superseded by incarnation 2 (host h, pid 6) & b closed",
    );
    // A trainer that asks first waits for the trainer that ends after it.
    check_started("join d ->\n wait 1000 ->\n gone a ->\n wait 1999 ->\n wait 1 -> d joined 0.2");
    check_started("join d ->\n wait 1000 ->\n leave a -> a done & d joined 0.2");
    check_started("release c -> c done\n join d -> d joined 2.2");
}

#[test]
fn a_trainer_that_connects_again_keeps_its_rank() {
    check_started("gone b ->\n wait 1999 ->\n dial b ->\n join d ->\n wait 2000 -> d Invalid: all 3 ranks");
    check_started("gone b ->\n wait 60000 ->\n dial b ->\n beat b -> b done\n leave b -> b done");
    // A second connection is enough.
    check_started("dial b ->\n join d ->\n wait 2000 -> d Invalid");
}

#[test]
fn the_trainers_of_an_earlier_coordinator_have_the_grace_time() {
    check_started(
        "restart
         servers
         dial a ->
         join d ->
         wait 1999 ->
         dial c ->
         wait 1 -> d joined 1.2
         join e ->
         wait 2000 -> e Invalid: all 3 ranks",
    );
}

#[test]
fn a_connected_server_keeps_its_index() {
    check_started(
        "register-at x 1 ->
         wait 1999 ->
         wait 1 -> x Invalid: server 1 of this job is at tcp://s1:1 (host h, pid 2) and is \
connected: the one at tcp://x:1 cannot take its place
         register s1 1 2 again -> s1 joined
         register-at x 1 again -> x Fenced: server 1 of this job is now at tcp://s1:1
         register-at x 0 -> x Invalid: server 0 had 1 shards",
    );
}

#[test]
fn a_reader_saves_a_model_when_no_trainer_is_connected() {
    check_started(
        "save r m -> r Invalid: a model that a reader saves while trainers train may have parameters of different
         save a m -> save m
         leave a -> a done
         leave b -> b done
         save r m -> r Invalid
         gone c ->
         save r m -> save m",
    );
}

#[test]
fn a_server_that_does_not_renew_is_reported_silent_once() {
    let mut desk = Desk::new(None);
    desk.dial("s0");
    desk.dial("s1");
    desk.step("servers");
    let silent = |desk: &Desk| -> Vec<u64> {
        let servers = desk.coordinator.report(desk.now).servers;
        servers.iter().map(|server| server.silent_milliseconds).collect()
    };
    desk.step("wait 9000");
    assert_eq!(silent(&desk), [9000, 9000]);
    desk.step("register s0 0 1 again");
    assert_eq!(silent(&desk), [0, 9000]);
    assert_eq!(desk.coordinator.deadline(), Some(desk.now + Duration::from_secs(1)));
    desk.step("wait 1000");
    assert_eq!(desk.coordinator.deadline(), Some(desk.now + Duration::from_secs(9)), "it was said of server 1");
    desk.step("register s1 1 2 again");
    assert_eq!(silent(&desk), [1000, 0]);
}

#[test]
fn a_restarted_server_is_accepted_at_once_and_another_after_the_grace_time() {
    check_started("gone s1 ->\n dial s1 ->\n register s1 1 2 -> s1 joined");
    check_started("gone s1 ->\n register-at x 1 ->\n wait 1999 ->\n wait 1 -> x joined");
    check_started("register-at x 1 ->\n wait 1000 ->\n gone s1 ->\n wait 1999 ->\n wait 1 -> x joined");
    // The old server reconnects before the new one takes its index.
    check_started("gone s1 ->\n register-at x 1 ->\n wait 10 ->\n dial s1 ->\n register s1 1 2 again -> s1 joined");
    // A server that ends in order gives its slot to any other at once, also to one that waits.
    check_started("leave s1 -> s1 done\n gone s1 ->\n register-at x 1 -> x joined");
    check_started(
        "register-at x 1 ->\n leave s1 -> s1 done & x joined\n gone s1 ->\n register-at x 1 again -> x joined",
    );
    // The new process is here before the end of the old one's connection is known.
    check_started("dial s1 ->\n register s1 1 2 ->\n wait 1999 ->\n wait 1 -> s1 Invalid: server 1 of this job is at");
}

#[test]
fn the_servers_of_an_earlier_coordinator_have_the_grace_time() {
    check_started(
        "restart
         register s0 0 1 -> s0 joined
         register-at x 1 ->
         wait 1000 ->
         register s1 1 2 again -> s1 joined
         wait 1000 -> x Invalid: server 1 of this job is at tcp://s1:1",
    );
    check_started("restart\n register s0 0 1 -> s0 joined\n register-at x 1 ->\n wait 2000 -> x joined");
}

#[test]
fn a_join_waits_for_servers_up_to_its_limit_and_names_the_absent_ones() {
    check(
        "register s0 0 1 -> s0 joined
         join a ->
         ask a -> a server 1 of 2 has not registered with server 0
         wait 9999 ->
         wait 1 -> a Deadline: server 1 of 2 has not registered with server 0 for 10.0 s: start it
         ask a -> a
         join a ->
         register s1 1 2 -> s1 joined & a joined 0.1
         begin a -> a granted 1
         join b -> b joined 1.1
         begin b ->
         ask b -> b trainer 0 (host h, pid 2) initialises the parameters",
    );
}

/// Starts with an initialised job of 3 trainers whose ranks 0 and 1 have joined, and of which these have left.
fn resumed(left: &[&str], job: JobMessage, given: &'static str, default_config: Vec<u8>) -> Result<Desk, Failure> {
    let mut desk = Desk::new(None);
    desk.step("servers");
    for command in ["join a", "join b", "begin a", "commit a 1 0", "commit a 1 1"] {
        desk.step(command);
    }
    left.iter().for_each(|one| desk.step(&format!("leave {one}")));
    let shown = [(given, format!("{given} = 7 (from --{given})"))];
    let options = CoordinatorOptions { job, default_config, given: OperatorSettings(shown.into()), ..options() };
    let coordinator = Coordinator::new(options, Some(&desk.kept))?;
    Ok(Desk { coordinator, ..Desk::new(Some(&desk.kept)) })
}

/// The table of a restarted server 0: the effect of each setting that the operator has changed.
#[test]
fn a_changed_setting_of_a_kept_job_takes_effect_or_refuses_the_start() {
    let everybody = ["a", "b"];
    let check = |left: &[&str], job: JobMessage, given: &'static str, optimizer: &str, expected: &[&str]| {
        let failure = resumed(left, job, given, config(optimizer)).err();
        let text = failure.map_or(String::new(), |failure| failure.to_string());
        assert_eq!(text.is_empty(), expected.is_empty(), "{given}: {text}");
        for part in expected {
            assert!(text.contains(part) && text.contains(&format!("{given} = 7 (from --{given})")), "{given}: {text}");
        }
    };
    let same = "optimizer: SGD const_lr { learning_rate: 0.1 }";
    check(&everybody, JobMessage { mode: 1, ..JOB }, "mode", same, &["mode sync, which stays", "expected the same"]);
    check(&everybody, JobMessage { mode: 2, staleness: 3, ..JOB }, "staleness", same, &["mode sync, which stays"]);
    check(&everybody, JobMessage { merge: 1, ..JOB }, "merge", same, &["merge mean, which stays"]);
    check(&everybody, JobMessage { chunk_bytes: 8192, ..JOB }, "chunk_bytes", same, &["chunks of 4096 bytes"]);
    check(&everybody, JOB, "optimizer", "optimizer: SGD const_lr { learning_rate: 0.5 }", &[]);
    let adam = "optimizer: Adam adam { } const_lr { learning_rate: 0.1 }";
    check(&everybody, JOB, "optimizer", adam, &["was initialised with the optimizer", "SGD"]);
    check(&everybody, JobMessage { trainers: 4, ..JOB }, "trainers", same, &[]);
    check(&["a"], JobMessage { trainers: 4, ..JOB }, "trainers", same, &["3 trainers, and trainer 1 has not left"]);
    // A setting left at its default does not count as changed.
    check(&["a"], JobMessage { trainers: 1, mode: 1, merge: 1, ..JOB }, "shards", adam, &[]);
}

#[test]
fn another_number_of_trainers_applies_to_the_next_run() {
    let job = JobMessage { trainers: 4, ..JOB };
    let mut desk = resumed(&["a", "b"], job, "trainers", sgd(0.1)).expect("everybody has left");
    desk.step("servers");
    desk.step("join d 3");
    assert_eq!(desk.answers, ["d joined 3.1 epoch 7 run 2"]);
    assert_eq!(desk.coordinator.report(desk.now).job.trainers, 4);
    // A rank that the job had before goes on with its incarnations.
    let mut desk = resumed(&["a", "b"], JobMessage { trainers: 1, ..JOB }, "trainers", sgd(0.1)).expect("as above");
    let options = CoordinatorOptions { job: JobMessage { trainers: 2, ..JOB }, ..options() };
    let given = OperatorSettings([("trainers", "trainers = 2".to_owned())].into());
    let kept = desk.coordinator.kept();
    desk = Desk {
        coordinator: Coordinator::new(CoordinatorOptions { given, ..options }, Some(&kept)).expect("it starts"),
        ..Desk::new(Some(&kept))
    };
    desk.step("servers");
    desk.step("join e 1");
    assert_eq!(desk.answers, ["e joined 1.2 epoch 7 run 2"]);
}

#[test]
fn a_trainer_waits_for_an_initialiser_as_long_as_its_lease_lasts() {
    check_started(
        "begin a -> a granted 1
         begin b ->
         ask b -> b trainer 0 (host h, pid 3) initialises the parameters and has not finished, which ends by itself
         wait 19000 ->
         beat a -> a done
         wait 19000 ->
         ask b -> b trainer 0 (host h, pid 3) initialises the parameters and has not finished, which ends by itself
         wait 1000 -> b granted 2",
    );
}

/// The parameters are initialised, and an operator has a connection.
const SERVING: &str = "begin a -> a granted 1\n commit a 1 0 -> a done\n commit a 1 1 -> a done\n";

#[test]
fn a_shard_moves_once_its_leader_releases_it_and_the_move_ends_once_it_is_served() {
    check_started(&format!(
        "move op 1.1 0 -> op NotInitialised
         {SERVING}
         move op 0.1 1 -> op Invalid: a move of a shard that this job does not have
         move op 0.0 7 -> op Invalid: a move to server 7, which this job does not have
         map s1 0 ->
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0 & s1 map 1: 1.1 at 1 term 1 to 0
         map s1 1 ->
         register s1 1 2 again map=0 holds=1.0+ -> s1 joined
         register s1 1 2 again map=1 holds=1.0+ holds=1.1+ -> s1 joined
         held 1 holds=0.0+ ->
         register s1 1 2 again map=1 holds=1.0+ -> map 2: 1.1 at 0 term 2 & s1 map 2: 1.1 at 0 term 2 & s1 joined
         held 2 holds=0.0+ holds=1.1 ->
         held 2 holds=0.0+ holds=1.1+ -> op done
         restart
         move new 1.1 1 -> new Busy: server 0, 1 of 2 has not registered
         servers
         map s1 0 -> s1 map 2: 1.1 at 0 term 2"
    ));
}

const FAILED: &str = "server 1 cannot take server 0 shard 0 up";
const ABSENT: &str = "server 1 is not connected: server 0 shard 0 stays at server 0";
const OVERTAKEN: &str = "server 1 shard 1 was sent elsewhere, or stayed: server 1 leads it, not server 0";

#[test]
fn a_move_replaced_by_a_later_order_ends_with_an_error() {
    check_started(&format!(
        "{SERVING}
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0
         move op2 1.1 1 -> map 2: 1.1 at 1 term 1 & op Invalid: {OVERTAKEN}
         register s1 1 2 again map=2 holds=1.0+ holds=1.1+ -> op2 done & s1 joined
         move op 1.0 1 -> op done"
    ));
}

#[test]
fn shards_without_files_do_not_move_and_a_restarted_server_has_released_its_shards() {
    check_started(&format!(
        "{SERVING}
         register s1 1 2 again diskless -> s1 joined
         move op 1.1 0 -> op Invalid: server 1 keeps no journal
         move op 0.0 1 -> op Invalid: server 1 keeps no journal
         register s1 1 2 again -> s1 joined
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0
         register s1 1 2 -> s1 joined
         gone s1 ->
         register t1 1 2 -> map 2: 1.1 at 0 term 2 & t1 joined
         move op 1.0 0 -> map 3: 1.0 at 1 term 1 to 0 1.1 at 0 term 2
         held 3 holds=0.0+ holds=1.1+ -> op done
         register t1 1 2 again map=3 holds=1.0+ -> t1 joined"
    ));
}

#[test]
fn a_shard_stays_if_its_next_leader_is_gone_and_goes_back_once_if_that_one_cannot_take_it_up() {
    check_started(&format!(
        "{SERVING}
         move op 0.0 1 -> map 1: 0.0 at 0 term 1 to 1
         ask op -> op server 0 has not released server 0 shard 0
         gone s1 ->
         held 1 -> map 2: 0.0 at 0 term 1 & op Invalid: {ABSENT}
         move op2 0.0 1 -> op2 Busy: a move to server 1, which is not connected
         held 2 holds=0.0+ ->
         register t1 1 2 -> t1 joined
         move op 0.0 1 -> map 3: 0.0 at 0 term 1 to 1
         held 3 -> map 4: 0.0 at 1 term 2
         ask op -> op server 1 has not taken server 0 shard 0 up
         register t1 1 2 again map=4 fails=0.0 -> map 5: 0.0 at 1 term 2 to 0 & op Invalid: {FAILED}: no & t1 joined
         register t1 1 2 again map=5 -> map 6: 0.0 at 0 term 3 & t1 joined
         held 6 fails=0.0 ->
         held 6 holds=0.0+ ->"
    ));
}

#[test]
fn a_return_that_is_disturbed_is_ordered_again() {
    // The former leader ends in the return, an operator orders the shard there again, and the coordinator restarts.
    check_started(&format!(
        "{SERVING}
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0
         register s1 1 2 again map=1 holds=1.0+ -> map 2: 1.1 at 0 term 2 & s1 joined
         held 2 fails=1.1 -> map 3: 1.1 at 0 term 2 to 1 & op Invalid: server 0 cannot take server 1 shard 1 up: no
         gone s1 ->
         held 3 -> map 4: 1.1 at 0 term 2
         held 4 fails=1.1 ->
         register t1 1 2 -> map 5: 1.1 at 0 term 2 to 1 & t1 joined
         move op2 1.1 0 -> map 6: 1.1 at 0 term 2
         held 6 fails=1.1 -> map 7: 1.1 at 0 term 2 to 1 & op2 Invalid: server 0 cannot take server 1 shard 1 up: no
         restart
         held 7 ->
         register u1 1 2 -> map 8: 1.1 at 1 term 3 & u1 joined
         register u1 1 2 again map=8 fails=1.1 -> u1 joined"
    ));
}

#[test]
fn a_shard_that_was_served_once_does_not_go_back() {
    check_started(&format!(
        "{SERVING}
         move op 0.0 1 -> map 1: 0.0 at 0 term 1 to 1
         held 1 -> map 2: 0.0 at 1 term 2
         register s1 1 2 again map=2 holds=0.0+ -> op done & s1 joined
         register s1 1 2 again map=2 fails=0.0 -> s1 joined
         restart
         servers
         register s1 1 2 again map=2 fails=0.0 -> s1 joined"
    ));
}

#[test]
fn an_order_that_comes_again_changes_no_later_one() {
    check_started(&format!(
        "{SERVING}
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0
         move again 1.1 0 seen=0 ->
         register s1 1 2 again map=1 holds=1.0+ -> map 2: 1.1 at 0 term 2 & s1 joined
         held 2 holds=1.1+ -> op done & again done
         move op2 1.1 1 -> map 3: 1.1 at 0 term 2 to 1
         move op 1.1 0 seen=0 -> op Invalid: server 1 shard 1 was sent elsewhere
         move op3 1.1 1 seen=0 ->"
    ));
}

#[test]
fn a_report_says_nothing_about_later_orders_and_counts_for_earlier_ones() {
    check_started(&format!(
        "{SERVING}
         held 0 holds=0.0+ ->
         move op 0.0 1 -> map 1: 0.0 at 0 term 1 to 1
         move op2 0.0 0 -> map 2: 0.0 at 0 term 1 & op Invalid: server 0 shard 0 was sent elsewhere
         held 1 ->
         held 2 holds=0.0+ -> op2 done
         move op 0.0 1 -> map 3: 0.0 at 0 term 1 to 1
         move op2 1.0 0 -> map 4: 0.0 at 0 term 1 to 1 1.0 at 1 term 1 to 0
         held 4 -> map 5: 0.0 at 1 term 2 1.0 at 1 term 1 to 0
         register s1 1 2 again map=4 -> map 6: 0.0 at 1 term 2 1.0 at 0 term 2 & s1 joined"
    ));
}

#[test]
fn a_restarted_container_is_another_process() {
    check_started(&format!(
        "{SERVING}
         move op 1.1 0 -> map 1: 1.1 at 1 term 1 to 0
         gone s1 ->
         redial s1 ->
         register s1 1 2 -> s1 joined
         gone s1 ->
         redial s1 ->
         register s1 1 2 start=1 -> map 2: 1.1 at 0 term 2 & s1 joined"
    ));
}
