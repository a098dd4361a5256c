//! Scripts: a line is what happens, an arrow, and every answer that follows.
//!
//! ```text
//! push 0 1 w=1 x=2,3     trainer 0 pushes for round 1; w is the first chunk of parameter w, w.1 the second
//! push+ 0 1 w=1          the same, and wants the value; push*0.5 sends the rate 0.5,
//!                        push*a:0.5 the setting a
//! push 0 1 w=none         trainer 0 has no gradient for w; void 0 1 w=none: the round is no update
//! mend 0 1 w=2            trainer 0 pushes other gradients under the number of its last call
//! again 0                trainer 0 sends its last push, set or leave once more
//! redial 0, reborn 0     trainer 0 connects again, as the same incarnation or as the next one
//! run 2                  trainers that connect from now on take part in the job's second run
//! gone 0, ask 0          the connection of trainer 0 ends; it asks what its calls wait for
//! pull 0 2 w             trainer 0 wants version 2 at least
//! pull 0 2 w/b, push+ 0 1 w/h=1    the same, and wants the value as bfloat16, as binary16
//! pull+ 0 2 w             the same, and wants the value of its step
//! set 0 w=1, leave 0, wait 60000, show w, hold, release
//! starve, spare w w      every free lease is taken; one for each of these chunks is returned
//! feed                   taken leases and held payloads are returned, and the shard gets an event
//! late, turn, finish     from now on an accelerator works only in the turns it is given: one, or all that it needs
//! ```
//!
//! Numbers are uniform or listed; `1h` is binary16 and `1b` bfloat16, also in answers. In what is expected `*` stands
//! for anything, and ` & ` joins answers.

use std::collections::BTreeMap;
use std::time::Duration;

use half::{bf16, f16};
use prost::Message;

use super::stage::{Answer, Parcel, Plan, Stage, contents, id};
use crate::dtype::{ElementType, Half};
use crate::ids::{ChunkId, Incarnation, Round};
use crate::port::{Event, Plain, Simulated};
use crate::wire::request::Request;
use crate::wire::{
    self, ControlAnswer, ControlRequest, Entry, ErrorMessage, Flags, Frame, Head, Kind, PushMessage, SettingMessage,
};

/// Runs a script on a shard that serves, and on one whose chunks live on an accelerator.
pub(super) fn check(plan: Plan, script: &str) {
    Script::new(Stage::serving(plan.clone())).run(script);
    let accelerator = Simulated::new(Plain, u64::MAX, 1);
    Script::new(Stage::empty(plan).with_accelerator(accelerator).initialised()).run(script);
}

pub(super) struct Script {
    pub(super) stage: Stage,
    pub(super) last: BTreeMap<u32, Parcel>,
}

impl Script {
    pub(super) fn new(stage: Stage) -> Self {
        Self { stage, last: BTreeMap::new() }
    }

    pub(super) fn run(&mut self, script: &str) {
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (command, expected) = line.split_once("->").unwrap_or((line, ""));
            self.stage.answers.clear();
            let shown = self.step(command.trim());
            let found: Vec<String> = self.stage.answers.iter().map(|one| self.words(one)).chain(shown).collect();
            let found = found.join(" & ");
            assert!(is_like(&found, expected.trim()), "{line}\nfound: {found}\nafter the script:\n{script}");
        }
    }

    fn step(&mut self, command: &str) -> Vec<String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u32>().ok()).expect("a number");
        match words[0] {
            "again" => {
                let parcel = self.last[&number(1)].clone();
                self.stage.deliver(number(1), &parcel);
            }
            "redial" => self.connect(number(1), 0),
            "reborn" => self.connect(number(1), 1),
            "run" => self.stage.run = number(1),
            "gone" => {
                let peer = self.stage.actors[&number(1)].peer;
                let (unsent, unfilled) = (Vec::new(), Vec::new());
                self.stage.event(Event::Gone { peer, reason: "cut".into(), unsent, unfilled: unfilled.into() });
            }
            "ask" => {
                let head = self.stage.head(Kind::Control, number(1));
                let message = ControlRequest { request: Some(Request::Waiting(true)) };
                let frame = Frame::with_control(head, &message);
                self.stage.deliver(number(1), &Parcel { frame, body: Vec::new() });
            }
            "pull" => self.pull(Flags::default(), number(1), number(2).into(), &words[3..]),
            "pull+" => self.pull(Flags::OF_STEP, number(1), number(2).into(), &words[3..]),
            "set" => {
                let head = self.stage.call(Kind::Set, number(1));
                let entries = words[2..].iter().map(|word| self.payload(word, 0)).collect();
                self.send(number(1), Parcel::new(head, entries));
            }
            "leave" => {
                let head = self.stage.call(Kind::Leave, number(1));
                self.send(number(1), Parcel { frame: Frame::bare(head), body: Vec::new() });
            }
            "wait" => self.stage.wait(Duration::from_millis(number(1).into())),
            "hold" => self.stage.holds = true,
            "release" => self.stage.release(),
            "starve" => self.stage.starve(),
            "spare" => words[1..].iter().for_each(|word| self.spare(word)),
            "feed" => self.stage.feed(),
            "late" => self.stage.is_late = true,
            "turn" => {
                self.stage.turn();
            }
            "finish" => self.stage.finish_work(),
            "show" => return words[1..].iter().map(|word| self.show(word)).collect(),
            push => self.push(push, number(1), number(2).into(), &words[3..]),
        }
        Vec::new()
    }

    fn spare(&mut self, word: &str) {
        let chunk = self.chunk(word);
        let held = self.stage.plan.chunks().into_iter().find(|(one, _)| *one == chunk);
        self.stage.spare(held.expect("it is planned").1);
    }

    fn connect(&mut self, trainer: u32, newer: u32) {
        let incarnation = Incarnation(self.stage.actors[&trainer].incarnation.0 + newer);
        self.stage.connect(trainer, incarnation);
        self.stage.answers.clear();
    }

    fn pull(&mut self, flags: Flags, trainer: u32, version: u64, words: &[&str]) {
        let head = Head { flags, ..self.stage.head(Kind::Pull, trainer) };
        let bare = |id| Entry::bare(id, Round(version), ElementType::Float32);
        let entries = words.iter().map(|word| Entry { half: half(word), ..bare(self.chunk(word)) }).collect();
        let frame = Frame { entries, ..Frame::bare(head) };
        self.stage.deliver(trainer, &Parcel { frame, body: Vec::new() });
    }

    fn push(&mut self, command: &str, trainer: u32, round: u64, words: &[&str]) {
        let mut parts = command.split('*');
        let command = parts.next().expect("it is never empty");
        let (settings, rates): (Vec<&str>, Vec<&str>) = parts.partition(|part| part.contains(':'));
        let rate = rates.first().map(|rate| rate.parse().expect("a rate"));
        let settings = settings.into_iter().map(setting).collect();
        let mut head = match command {
            "mend" => self.stage.head(Kind::Push, trainer),
            "push" | "push+" | "void" => self.stage.call(Kind::Push, trainer),
            other => panic!("{other} is no command"),
        };
        if command == "push+" {
            head.flags = Flags::WANT_VALUE;
        }
        let entries = words.iter().map(|word| self.payload(word, round)).collect();
        let message = PushMessage { rate, is_void: command == "void", settings, is_pass: false };
        let mut parcel = Parcel::new(head, entries).carrying(&message);
        parcel.frame.entries.iter_mut().zip(words).for_each(|(entry, word)| entry.half = half(word));
        self.send(trainer, parcel);
    }

    fn send(&mut self, trainer: u32, parcel: Parcel) {
        self.stage.deliver(trainer, &parcel);
        self.last.insert(trainer, parcel);
    }

    fn chunk(&self, word: &str) -> ChunkId {
        let word = word.split('/').next().expect("it is never empty");
        let (name, chunk) = word.split_once('.').unwrap_or((word, "0"));
        let parameters = &self.stage.plan.parameters;
        let parameter = parameters.iter().position(|one| one.name == name).unwrap_or(99);
        id(u32::try_from(parameter).expect("few"), chunk.parse().expect("a chunk's number"))
    }

    fn payload(&self, word: &str, round: u64) -> (ChunkId, u64, ElementType, Vec<u8>) {
        let (chunk, numbers) = word.split_once('=').expect("a chunk and its numbers");
        let chunk = self.chunk(chunk);
        let plan = &self.stage.plan;
        let held = plan.chunks().into_iter().find(|(one, _)| *one == chunk);
        let own = plan.parameters.get(chunk.parameter.0 as usize).map_or(ElementType::Float32, |one| one.element_type);
        if numbers == "none" {
            return (chunk, round, own, Vec::new());
        }
        let (numbers, element_type) = match numbers.as_bytes()[numbers.len() - 1] {
            b'h' => (numbers.trim_end_matches('h'), ElementType::Float16),
            b'b' => (numbers.trim_end_matches('b'), ElementType::Bfloat16),
            b'd' => (numbers.trim_end_matches('d'), ElementType::Float64),
            _ => (numbers, own),
        };
        let elements = held.map_or(1, |(_, bytes)| u64::from(bytes) / own.bytes());
        (chunk, round, element_type, encode(element_type, numbers, elements))
    }

    fn show(&self, word: &str) -> String {
        let chunk = self.chunk(word);
        let contents = contents(&self.stage.shard);
        let (_, version, value, _) = contents.iter().find(|(id, ..)| *id == chunk).expect("the shard holds it");
        format!("{word}@{version}={}", numbers(self.stage.plan.element_type(chunk), value))
    }

    fn words(&self, answer: &Answer) -> String {
        let head = &answer.frame.head;
        let kind = format!("{:?}", head.kind).to_lowercase();
        if matches!(head.kind, Kind::Error | Kind::Refused) {
            let message = ErrorMessage::decode(answer.frame.control.as_slice()).expect("it parses");
            return format!("{} {kind} {:?}: {}", head.trainer, message.code(), message.text);
        }
        if head.kind == Kind::Answer {
            let message = ControlAnswer::decode(answer.frame.control.as_slice()).expect("it parses");
            let Some(wire::answer::Answer::Waiting(text)) = message.answer else {
                panic!("another question was asked")
            };
            return format!("{} {text}", head.trainer).trim_end().to_owned();
        }
        let mut body = answer.body.iter();
        let entries = answer.frame.entries.iter().map(|entry| {
            let value = (entry.bytes > 0).then(|| body.next().expect("a payload for every length"));
            let value = value.map_or(String::new(), |value| format!("={}", numbers(entry.element_type, value)));
            format!(" {}@{}{value}", self.stage.plan.words(entry.id), entry.round)
        });
        format!("{} {kind}{}", head.trainer, entries.collect::<String>())
    }
}

/// The requested half-precision type.
fn half(word: &str) -> Option<Half> {
    let (_, wanted) = word.split('=').next().expect("it is never empty").split_once('/')?;
    match wanted {
        "h" => Some(Half::Float16),
        "b" => Some(Half::Bfloat16),
        other => panic!("{other} is no half"),
    }
}

/// Whether `found` is `expected`, where each `*` stands for anything.
fn is_like(found: &str, expected: &str) -> bool {
    let mut parts = expected.split('*');
    let first = parts.next().expect("there is always one");
    let Some(mut rest) = found.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    for (index, part) in parts.iter().enumerate() {
        if index + 1 == parts.len() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

fn encode(element_type: ElementType, text: &str, elements: u64) -> Vec<u8> {
    let listed: Vec<&str> = text.split(',').collect();
    let count = if listed.len() == 1 { usize::try_from(elements).expect("few") } else { listed.len() };
    let one = |text: &&str| -> Vec<u8> {
        let real: f64 = text.parse().expect("a number");
        match element_type {
            ElementType::Float32 => text.parse::<f32>().expect("a number").to_le_bytes().to_vec(),
            ElementType::Float64 => real.to_le_bytes().to_vec(),
            ElementType::Float16 => f16::from_f64(real).to_le_bytes().to_vec(),
            ElementType::Bfloat16 => bf16::from_f64(real).to_le_bytes().to_vec(),
            ElementType::Int32 => text.parse::<i32>().expect("a number").to_le_bytes().to_vec(),
            ElementType::Uint32 => text.parse::<u32>().expect("a number").to_le_bytes().to_vec(),
            ElementType::Int64 => text.parse::<i64>().expect("a number").to_le_bytes().to_vec(),
            ElementType::Uint64 => text.parse::<u64>().expect("a number").to_le_bytes().to_vec(),
        }
    };
    listed.iter().cycle().take(count).flat_map(one).collect()
}

fn numbers(element_type: ElementType, bytes: &[u8]) -> String {
    let width = usize::try_from(element_type.bytes()).expect("small");
    let one = |bytes: &[u8]| match element_type {
        ElementType::Float32 => f32::from_le_bytes(bytes.try_into().expect("4 bytes")).to_string(),
        ElementType::Float64 => f64::from_le_bytes(bytes.try_into().expect("8 bytes")).to_string(),
        ElementType::Int32 => i32::from_le_bytes(bytes.try_into().expect("4 bytes")).to_string(),
        ElementType::Uint32 => u32::from_le_bytes(bytes.try_into().expect("4 bytes")).to_string(),
        ElementType::Int64 => i64::from_le_bytes(bytes.try_into().expect("8 bytes")).to_string(),
        ElementType::Uint64 => u64::from_le_bytes(bytes.try_into().expect("8 bytes")).to_string(),
        ElementType::Float16 => format!("{}h", f16::from_le_bytes(bytes.try_into().expect("2 bytes"))),
        ElementType::Bfloat16 => format!("{}b", bf16::from_le_bytes(bytes.try_into().expect("2 bytes"))),
    };
    let mut all: Vec<String> = bytes.chunks_exact(width).map(one).collect();
    if all.iter().all(|number| *number == all[0]) {
        all.truncate(1);
    }
    all.join(",")
}

/// `name:value`
fn setting(text: &str) -> SettingMessage {
    let (name, value) = text.split_once(':').expect("a name and a value");
    SettingMessage { name: name.to_owned(), value: value.parse().expect("a number") }
}
