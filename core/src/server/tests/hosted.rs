//! A program that a shard hosts: when it takes items and gives them, and what a refusal leaves. The program here is no
//! executor: its value depends on the order of all that it takes.

use std::collections::VecDeque;

use prost::Message;

use super::script::{Script, check};
use super::stage::{Plan, Stage};
use crate::config::{Merge, Mode};
use crate::dtype::ElementType::{Float32, Int64, Uint32};
use crate::error::Failure;
use crate::ids::TrainerId;
use crate::partition::Hosted;
use crate::port::{EndKind, HostedProgram, ProgramEnd};
use crate::time::Now;

/// Elements of an item and of the value: two chunks.
const ELEMENTS: u64 = 1026;
/// An item with this first element is refused by the program.
const BAD: f32 = 666.0;

const SUM: &str = "algorithm: 'sum'";
const SENDERS: [&str; 3] = ["algorithm: 'sum' sender: 0", "algorithm: 'sum' sender: 1", "algorithm: 'sum' sender: 2"];
const INPUTS: [&str; 3] = ["i0", "i1", "i2"];
const OUTPUTS: [&str; 3] = ["o0", "o1", "o2"];
const STEPS: [&str; 3] = ["s0", "s1", "s2"];

/// The job with a program behind its parameters: the program `p`, its value `k`, and for each trainer what it sends
/// (`i0`), what it receives (`o0`) and the steps that it has ended (`s0`).
pub(super) fn with_program(plan: Plan) -> Plan {
    let trainers = plan.trainers as usize;
    let mut plan =
        plan.hosting("p", Uint32, 1, SUM, Hosted::Program).hosting("k", Float32, ELEMENTS, SUM, Hosted::Part);
    for trainer in 0..trainers {
        plan = plan
            .hosting(INPUTS[trainer], Float32, ELEMENTS, SENDERS[trainer], Hosted::Part)
            .hosting(OUTPUTS[trainer], Float32, ELEMENTS, SUM, Hosted::Part)
            .hosting(STEPS[trainer], Int64, 1, SENDERS[trainer], Hosted::Part);
    }
    plan
}

/// Halves its value and adds each item, of a trainer at most one more than of the slowest one. Each item is answered
/// with the value, once the trainer has ended the step of the answer before.
#[derive(Clone, PartialEq, Message)]
struct HalvingMessage {
    #[prost(float, repeated, tag = "1")]
    value: Vec<f32>,
    #[prost(uint64, repeated, tag = "2")]
    taken: Vec<u64>,
    #[prost(uint64, repeated, tag = "3")]
    sent: Vec<u64>,
    #[prost(uint64, repeated, tag = "4")]
    steps: Vec<u64>,
    #[prost(uint32, repeated, tag = "5")]
    senders: Vec<u32>,
    #[prost(bytes = "vec", repeated, tag = "6")]
    unpublished: Vec<Vec<u8>>,
    #[prost(uint32, repeated, tag = "7")]
    unpublished_ends: Vec<u32>,
    #[prost(bool, tag = "8")]
    is_bad: bool,
}

struct Halving {
    ends: Vec<ProgramEnd>,
    trainers: u32,
    state: HalvingMessage,
    is_written: bool,
    unpublished: VecDeque<(usize, Vec<u8>)>,
}

pub(super) fn load(_: &[u8], trainers: u32) -> Result<Box<dyn HostedProgram>, Failure> {
    let end = |name: &str, kind, element_type, elements| ProgramEnd {
        name: name.to_owned(),
        kind,
        element_type,
        shape: vec![elements],
    };
    let mut ends = vec![end("k", EndKind::Kept, Float32, ELEMENTS)];
    for trainer in (0..trainers).map(TrainerId) {
        ends.push(end("i", EndKind::Input(trainer), Float32, ELEMENTS));
        ends.push(end("o", EndKind::Output(trainer), Float32, ELEMENTS));
        ends.push(end("s", EndKind::Steps(trainer), Int64, 1));
    }
    let none = || vec![0; trainers as usize];
    let state = HalvingMessage {
        value: vec![0.0; usize::try_from(ELEMENTS).expect("few")],
        taken: none(),
        sent: none(),
        steps: none(),
        senders: (0..trainers).collect(),
        ..HalvingMessage::default()
    };
    Ok(Box::new(Halving { ends, trainers, state, is_written: false, unpublished: VecDeque::new() }))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()
}

impl Halving {
    fn bytes(&self) -> Vec<u8> {
        self.state.value.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn output(trainer: usize) -> usize {
        2 + 3 * trainer
    }
}

impl HostedProgram for Halving {
    fn ends(&self) -> &[ProgramEnd] {
        &self.ends
    }

    fn set_kept(&mut self, end: usize, value: &[u8]) -> Result<(), Failure> {
        assert_eq!(end, 0, "one variable is kept");
        self.state.value = floats(value);
        Ok(())
    }

    fn deliver(&mut self, end: usize, item: &[u8]) -> Result<bool, Failure> {
        let trainer = (end - 1) / 3;
        let number = u32::try_from(trainer).expect("few");
        match self.ends[end].kind {
            EndKind::Steps(_) => self.state.steps[trainer] += 1,
            _ => {
                let others = self.state.senders.iter().filter(|other| **other != number);
                let slowest = others.map(|other| self.state.taken[*other as usize]).min();
                if slowest.is_some_and(|slowest| slowest < self.state.taken[trainer]) {
                    return Ok(false);
                }
                let item = floats(item);
                self.state.is_bad |= item[0] == BAD;
                self.state.value.iter_mut().zip(item).for_each(|(value, item)| *value = *value * 0.5 + item);
                self.state.taken[trainer] += 1;
                self.is_written = true;
            }
        }
        Ok(true)
    }

    fn forget_sender(&mut self, trainer: TrainerId) {
        self.state.senders.retain(|other| *other != trainer.0);
    }

    fn await_sender(&mut self, trainer: TrainerId) {
        if !self.state.senders.contains(&trainer.0) {
            self.state.senders.push(trainer.0);
        }
    }

    fn await_all(&mut self) {
        self.state.senders = (0..self.trainers).collect();
    }

    fn run_until_waiting(&mut self) -> Result<(), Failure> {
        if self.state.is_bad {
            return Err(Failure::call("op 3 halve: found a bad item"));
        }
        if std::mem::take(&mut self.is_written) {
            self.unpublished.push_back((0, self.bytes()));
        }
        for trainer in 0..self.trainers as usize {
            let state = &mut self.state;
            if state.sent[trainer] < state.taken[trainer] && state.sent[trainer] <= state.steps[trainer] {
                state.sent[trainer] += 1;
                self.unpublished.push_back((Self::output(trainer), self.bytes()));
            }
        }
        Ok(())
    }

    fn unpublished(&mut self) -> Option<(usize, &[u8])> {
        self.unpublished.front().map(|(end, value)| (*end, value.as_slice()))
    }

    fn note_published(&mut self) {
        self.unpublished.pop_front();
    }

    fn encode_state(&self) -> Vec<u8> {
        let (ends, values) = self.unpublished.iter().cloned().unzip::<_, _, Vec<_>, Vec<_>>();
        let unpublished_ends = ends.into_iter().map(|end| u32::try_from(end).expect("few")).collect();
        HalvingMessage { unpublished: values, unpublished_ends, ..self.state.clone() }.encode_to_vec()
    }

    fn restore_state(&mut self, saved: &[u8]) -> Result<(), Failure> {
        let mut state = HalvingMessage::decode(saved).map_err(|error| Failure::call(error.to_string()))?;
        let ends = std::mem::take(&mut state.unpublished_ends);
        let values = std::mem::take(&mut state.unpublished);
        self.unpublished = ends.into_iter().map(|end| end as usize).zip(values).collect();
        self.state = state;
        Ok(())
    }

    fn waits_for(&self) -> String {
        format!("items of trainers {:?}, of which it has {:?}", self.state.senders, self.state.taken)
    }
}

fn plan() -> Plan {
    with_program(Plan::new(Mode::Sync, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD"))
}

#[test]
fn an_item_is_taken_when_there_is_room_and_answered_when_the_step_before_is_over() {
    check(
        plan(),
        "pull 0 1 o0 ->
         push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1 & 0 value o0@1=2
         show k k.1 o0 -> k@1=2 & k.1@1=2 & o0@1=2
         push 0 2 i0=4 i0.1=4 -> 0 done i0@2 i0.1@2
         show k -> k@1=2
         push 0 3 i0=8 i0.1=8 ->
         pull 1 1 o1 ->
         push 1 1 i1=1 i1.1=1 -> 1 done i1@1 i1.1@1 & 1 value o1@1=2 & 0 done i0@3 i0.1@3
         show k o0 i0 -> k@3=5 & o0@1=2 & i0@2=0
         pull 0 2 o0 ->
         push 0 1 s0=1 -> 0 done s0@1 & 0 value o0@2=5",
    );
}

#[test]
fn a_half_of_an_item_is_none() {
    check(
        plan(),
        "push 0 1 i0=2 -> 0 done i0@1
         show k -> k@0=0
         push 0 1 i0.1=2 -> 0 done i0.1@1
         show k -> k@1=2
         again 0 -> 0 done i0.1@1
         show k -> k@1=2",
    );
}

#[test]
fn a_program_without_its_slowest_trainer_goes_on_when_that_has_left() {
    check(
        plan(),
        "push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1
         push 0 2 i0=4 i0.1=4 -> 0 done i0@2 i0.1@2
         show k -> k@1=2
         leave 1 -> 1 done
         show k -> k@2=5",
    );
}

/// A trainer that leaves is waited for until its last item is taken.
#[test]
fn a_trainer_leaves_behind_its_last_item() {
    check(
        plan(),
        "push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1
         push 0 2 i0=4 i0.1=4 -> 0 done i0@2 i0.1@2
         leave 0 -> 0 done
         push 1 1 i1=1 i1.1=1 -> 1 done i1@1 i1.1@1
         show k -> k@3=5
         push 1 2 i1=1 i1.1=1 -> 1 done i1@2 i1.1@2
         push 1 3 i1=1 i1.1=1 -> 1 done i1@3 i1.1@3
         show k i1 -> k@5=2.75 & i1@3=0",
    );
}

/// A push that waited when its trainer left is taken, and the trainer is not awaited again for it.
#[test]
fn an_item_after_the_departure_of_its_trainer_does_not_bring_it_back() {
    check(
        plan(),
        "push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1
         push 0 2 i0=4 i0.1=4 -> 0 done i0@2 i0.1@2
         push 0 3 i0=8 i0.1=8 ->
         leave 0 -> 0 done
         push 1 1 i1=1 i1.1=1 -> *
         push 1 2 i1=1 i1.1=1 -> *
         push 1 3 i1=1 i1.1=1 -> *
         push 1 4 i1=1 i1.1=1 -> *
         show i1 i0 -> i1@4=0 & i0@3=0",
    );
}

#[test]
fn a_stopped_program_refuses_pushes_that_wait() {
    check(
        plan(),
        "push 0 1 i0=2 i0.1=2 -> *
         push 0 2 i0=4 i0.1=4 -> *
         push 0 3 i0=8 i0.1=8 ->
         push 1 1 i1=666 i1.1=1 -> 1 done i1@1 i1.1@1 & 0 error Invalid: the program \"p\" has stopped: *",
    );
}

#[test]
fn pushes_and_sets_that_a_program_does_not_take_are_refused() {
    check(
        plan(),
        "push 1 1 i0=1 -> 1 error Invalid: parameter \"i0\": trainer 1 sent to it; expected 0
         push 0 1 o0=1 -> 0 error Invalid: parameter \"o0\": trainer 0 sent to it; expected none, because its server*
         push 0 1 k=1 -> 0 error Invalid: parameter \"k\": trainer 0 sent to it; expected none, because its server*
         set 0 k=1 -> 0 error Invalid: parameter \"k\": trainer 0 sent to it; expected none, because its server*
         set 0 i0=1 -> 0 error Invalid: parameter \"i0\": trainer 0 sent to it; expected 0
         push 0 1 i0=none -> 0 error Invalid: parameter \"i0\", an item: no number; expected 4096 bytes of float32
         push 0 1 i0=1h -> 0 error Invalid: parameter \"i0\", an item: 2048 bytes of float16; expected 4096 bytes of*
         show k w -> k@0=0 & w@0=0",
    );
}

#[test]
fn a_failed_op_stops_the_program_and_is_named() {
    check(
        plan(),
        "pull 1 1 o1 ->
         push 0 1 i0=666 i0.1=1 -> 0 done i0@1 i0.1@1 & \
             1 error Invalid: the program \"p\" has stopped: op 3 halve: found a bad item
         pull 0 0 k -> 0 error Invalid: the program \"p\" has stopped: op 3 halve: found a bad item
         push 1 1 i1=1 -> 1 error Invalid: the program \"p\" has stopped: *
         push 0 1 w=1 -> 0 done w@1",
    );
}

#[test]
fn a_wait_names_the_ops_of_the_program() {
    check(
        plan(),
        "pull 1 1 o1 ->
         wait 60000 -> 1 error Deadline: parameter \"o1\" chunk 0: version 1 was not reached within 60.0 s (*; it is \
             at version 0 and round 1 waits for its program, in which items of trainers [0, 1], of which it has [0, 0]",
    );
}

fn refused(plan: Plan, expected: &str) {
    let mut stage = Stage::empty(plan);
    stage.begin();
    let found = stage.errors().join("; ");
    assert!(found.contains(expected), "found {found:?}; expected {expected:?}");
}

#[test]
fn a_program_whose_ends_are_others_is_refused_by_name() {
    let base = || Plan::new(Mode::Sync, Merge::Mean, 1).hosting("p", Uint32, 1, SUM, Hosted::Program);
    refused(base(), "the hosted program \"p\": parameter 1 is not its Kept \"k\"");
    let shorter = base().hosting("k", Float32, 7, SUM, Hosted::Part);
    refused(shorter, "the hosted program \"p\": parameter 1 is not its Kept \"k\"");
    let plan = || Plan::new(Mode::Sync, Merge::Mean, 1);
    refused(plan().hosting("k", Float32, 7, SUM, Hosted::Part), "parameter \"k\" is a part of no hosted program");
    let more = with_program(plan()).hosting("x", Float32, 7, SUM, Hosted::Part);
    refused(more, "parameter \"x\" is a part of no hosted program");
    let delta = with_program(Plan::new(Mode::Delta, Merge::Mean, 1));
    refused(delta, "of a hosted program: found a job in mode delta");
    let late = with_program(plan()).hosting("q", Float32, 7, SENDERS[1], Hosted::Part);
    refused(late, "of a hosted program: found trainer 1; expected one below 1");
}

/// In other modes items are rounds, too.
#[test]
fn items_are_rounds_in_every_mode() {
    for mode in [Mode::Async, Mode::Staleness { bound: 1 }] {
        let plan = with_program(Plan::new(mode, Merge::Mean, 2).with("w", Float32, 2, "optimizer: SGD"));
        Script::new(Stage::serving(plan)).run(
            "push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1
             push 0 2 i0=4 i0.1=4 -> 0 done i0@2 i0.1@2
             push 1 1 i1=1 i1.1=1 -> 1 done i1@1 i1.1@1
             show k -> k@3=5",
        );
    }
}

#[test]
fn a_report_has_the_programs_with_their_items_and_waits() {
    let mut script = Script::new(Stage::serving(plan()));
    script.run("push 0 1 i0=2 i0.1=2 -> 0 done i0@1 i0.1@1");
    let report = script.stage.shard.report(Now(0));
    let [program] = &report.programs[..] else { panic!("found {:?}", report.programs) };
    assert_eq!((program.name.as_str(), program.items), ("p", 1));
    assert_eq!(program.state, "items of trainers [0, 1], of which it has [1, 0]");
    // The version of a program's parameter says nothing about steps.
    assert_eq!((report.slowest_version, report.fastest_version), (0, 1));
    script.run("push 1 1 w=1 -> 1 done w@1\n push 0 1 w=1 -> 0 done w@1");
    assert_eq!(script.stage.shard.report(Now(0)).slowest_version, 1);
}
