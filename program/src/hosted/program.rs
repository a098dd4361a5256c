//! A hosted program while it runs: its executor, and the values that pass between it and the shard.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use prost::Message;

use pserver_core::error::Failure;
use pserver_core::ids::TrainerId;
use pserver_core::port::{EndKind, HostedProgram, ProgramEnd};

use super::{HostedEnd, RUNS_MAX, program_ends};
use crate::executor::{Executor, ExecutorParts, ProgramLink, tensor_of};
use crate::{Graph, ProgramPeer, Tensor, VariableIndex, VariableValue};

/// A program on a shard.
pub(super) struct ExecutorProgram {
    ends: Vec<ProgramEnd>,
    /// The channel of each end.
    channels: Vec<String>,
    /// The kept variables, each with its end.
    kept: BTreeMap<VariableIndex, usize>,
    trainers: u32,
    // Its description takes it by `&mut`, and changes nothing.
    executor: RefCell<Executor>,
    link: RefCell<HostLink>,
}

/// The ends at which values leave, and what trainers have taken.
struct HostLink {
    /// By trainer, then by channel.
    outputs: Vec<BTreeMap<String, usize>>,
    /// By end: the items sent.
    sent: Vec<u64>,
    /// By trainer: the steps ended.
    steps: Vec<u64>,
    unpublished: VecDeque<Unpublished>,
    /// By end: the item behind the one that its trainer may still ask for.
    behind: BTreeMap<usize, Tensor>,
}

/// A value that the shard has not published.
struct Unpublished {
    end: usize,
    /// The item that is sent; of a kept variable the executor has the value.
    item: Option<Tensor>,
}

/// A program in a checkpoint.
#[derive(Clone, PartialEq, Message)]
struct SavedMessage {
    #[prost(bytes = "vec", tag = "1")]
    executor: Vec<u8>,
    #[prost(uint64, repeated, tag = "2")]
    sent: Vec<u64>,
    #[prost(uint64, repeated, tag = "3")]
    steps: Vec<u64>,
    #[prost(message, repeated, tag = "4")]
    unpublished: Vec<UnpublishedMessage>,
    /// Items behind the ones that their trainers may still ask for.
    #[prost(message, repeated, tag = "5")]
    behind: Vec<UnpublishedMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct UnpublishedMessage {
    #[prost(uint32, tag = "1")]
    end: u32,
    #[prost(bytes = "vec", optional, tag = "2")]
    item: Option<Vec<u8>>,
}

impl ProgramLink for HostLink {
    /// An item is forgotten when its trainer has ended the step in which it received it. One more waits behind it, as
    /// in the queue of a `recv`.
    fn has_room(&mut self, to: ProgramPeer, channel: &str) -> bool {
        let ProgramPeer::Trainer(trainer) = to else { return true };
        let end = self.outputs[trainer as usize].get(channel);
        end.is_none_or(|end| self.sent[*end] <= self.steps[trainer as usize] + 1)
    }

    fn send(&mut self, to: ProgramPeer, channel: &str, value: &VariableValue) {
        let ProgramPeer::Trainer(trainer) = to else { return };
        if let (Some(end), VariableValue::Dense(item)) = (self.outputs[trainer as usize].get(channel), value) {
            self.sent[*end] += 1;
            if self.sent[*end] <= self.steps[trainer as usize] + 1 {
                self.unpublished.push_back(Unpublished { end: *end, item: Some(item.clone()) });
            } else {
                self.behind.insert(*end, item.clone());
            }
        }
    }
}

impl HostLink {
    /// A trainer has ended a step: it may receive what waited behind the item of this step.
    fn end_step(&mut self, trainer: TrainerId) {
        self.steps[trainer.0 as usize] += 1;
        for end in self.outputs[trainer.0 as usize].values() {
            if let Some(item) = self.behind.remove(end) {
                self.unpublished.push_back(Unpublished { end: *end, item: Some(item) });
            }
        }
    }
}

impl ExecutorProgram {
    pub(super) fn new(graph: Graph, trainers: u32, parts: ExecutorParts) -> Result<Self, Failure> {
        let found = program_ends(&graph, trainers)?;
        let (mut kept, mut outputs) = (BTreeMap::new(), vec![BTreeMap::new(); trainers as usize]);
        for (number, HostedEnd { end, of }) in found.iter().enumerate() {
            let of = of.clone().unwrap_or_default();
            match end.kind {
                EndKind::Kept => drop(kept.insert(graph.find(&of).expect("it is a variable of the program"), number)),
                EndKind::Output(trainer) => drop(outputs[trainer.0 as usize].insert(of, number)),
                EndKind::Input(_) | EndKind::Steps(_) => {}
            }
        }
        let senders = (0..trainers).map(ProgramPeer::Trainer).collect();
        let executor = Executor::new(Arc::new(graph), ExecutorParts { senders, ..parts })?;
        let (sent, steps) = (vec![0; found.len()], vec![0; trainers as usize]);
        let link = HostLink { outputs, sent, steps, unpublished: VecDeque::new(), behind: BTreeMap::new() };
        let (ends, channels) = found.into_iter().map(|one| (one.end, one.of.unwrap_or_default())).unzip();
        Ok(Self { ends, channels, kept, trainers, executor: executor.into(), link: link.into() })
    }

    fn tensor(&self, end: usize, bytes: &[u8]) -> Result<Tensor, Failure> {
        let ProgramEnd { name, element_type, shape, .. } = &self.ends[end];
        tensor_of(*element_type, shape.clone(), bytes)
            .ok_or_else(|| Failure::call(format!("{name:?}: found {} bytes of {element_type}{shape:?}", bytes.len())))
    }
}

impl HostedProgram for ExecutorProgram {
    fn ends(&self) -> &[ProgramEnd] {
        &self.ends
    }

    fn set_kept(&mut self, end: usize, value: &[u8]) -> Result<(), Failure> {
        let value = self.tensor(end, value)?;
        self.executor.get_mut().set(&self.channels[end], value)
    }

    fn deliver(&mut self, end: usize, item: &[u8]) -> Result<bool, Failure> {
        let (trainer, is_input) = match self.ends[end].kind {
            EndKind::Input(trainer) => (trainer, true),
            EndKind::Steps(trainer) => (trainer, false),
            EndKind::Kept | EndKind::Output(_) => unreachable!("nothing is sent to it"),
        };
        let sender = ProgramPeer::Trainer(trainer.0);
        // A trainer that has left stays so: the item was sent before.
        if !is_input {
            self.link.get_mut().end_step(trainer);
        } else if self.executor.get_mut().has_room(&self.channels[end], sender)? {
            let item = self.tensor(end, item)?;
            self.executor.get_mut().arrive(&self.channels[end], sender, item.into())?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn forget_sender(&mut self, trainer: TrainerId) {
        self.executor.get_mut().leave(ProgramPeer::Trainer(trainer.0));
    }

    fn await_sender(&mut self, trainer: TrainerId) {
        self.executor.get_mut().join(ProgramPeer::Trainer(trainer.0));
    }

    fn await_all(&mut self) {
        (0..self.trainers).for_each(|trainer| self.executor.get_mut().join(ProgramPeer::Trainer(trainer)));
    }

    fn run_until_waiting(&mut self) -> Result<(), Failure> {
        let (executor, link) = (self.executor.get_mut(), self.link.get_mut());
        let units_max = RUNS_MAX * executor.plan().units().len() as u64;
        let (mut written, mut ran) = (BTreeSet::new(), 0);
        while let Some(unit) = executor.step(link)? {
            written.extend(executor.writes(unit).iter().filter_map(|variable| self.kept.get(variable)));
            ran += 1;
            if units_max < ran {
                return Err(Failure::call(format!(
                    "found {ran} ops run after one value has arrived; expected an op in each loop that waits"
                )));
            }
        }
        // A value that waits already is read when it is published.
        let waiting: BTreeSet<usize> =
            link.unpublished.iter().filter(|one| one.item.is_none()).map(|one| one.end).collect();
        let new = written.difference(&waiting).map(|end| Unpublished { end: *end, item: None });
        link.unpublished.extend(new);
        Ok(())
    }

    fn unpublished(&mut self) -> Option<(usize, &[u8])> {
        let first = self.link.get_mut().unpublished.front()?;
        let value = match &first.item {
            Some(item) => item.bytes(),
            None => match self.executor.get_mut().value(&self.channels[first.end])? {
                VariableValue::Dense(value) => value.bytes(),
                VariableValue::SelectedRows(_) | VariableValue::Strings(_) => unreachable!("kept values are dense"),
            },
        };
        Some((first.end, value))
    }

    fn note_published(&mut self) {
        self.link.get_mut().unpublished.pop_front();
    }

    fn encode_state(&self) -> Vec<u8> {
        let (executor, link) = (self.executor.borrow(), self.link.borrow());
        let waiting = |end: usize| link.unpublished.iter().any(|one| one.end == end && one.item.is_none());
        let is_published = |variable| self.kept.get(&variable).is_some_and(|end| !waiting(*end));
        let message = |end: usize, item: Option<&Tensor>| UnpublishedMessage {
            end: u32::try_from(end).expect("a program has few ends"),
            item: item.map(|item| item.bytes().to_vec()),
        };
        let unpublished = link.unpublished.iter().map(|one| message(one.end, one.item.as_ref())).collect();
        let behind = link.behind.iter().map(|(end, item)| message(*end, Some(item))).collect();
        let (sent, steps) = (link.sent.clone(), link.steps.clone());
        let executor = executor.encode(is_published);
        SavedMessage { executor, sent, steps, unpublished, behind }.encode_to_vec()
    }

    fn restore_state(&mut self, saved: &[u8]) -> Result<(), Failure> {
        let damaged = || Failure::call("the saved state is damaged, or of another program");
        let message = SavedMessage::decode(saved).map_err(|_| damaged())?;
        let SavedMessage { executor, sent, steps, unpublished, behind } = message;
        self.executor.get_mut().decode(&executor)?;
        let link = self.link.get_mut();
        if (sent.len(), steps.len()) != (link.sent.len(), link.steps.len()) {
            return Err(damaged());
        }
        (link.sent, link.steps) = (sent, steps);
        let read = |UnpublishedMessage { end, item }: UnpublishedMessage| {
            let end = Some(end as usize).filter(|end| *end < self.ends.len()).ok_or_else(damaged)?;
            Ok((end, item.map(|item| self.tensor(end, &item)).transpose()?))
        };
        let unpublished: Vec<_> = unpublished.into_iter().map(read).collect::<Result<_, Failure>>()?;
        let behind: Vec<_> = behind.into_iter().map(read).collect::<Result<_, Failure>>()?;
        let link = self.link.get_mut();
        link.unpublished = unpublished.into_iter().map(|(end, item)| Unpublished { end, item }).collect();
        link.behind = behind.into_iter().filter_map(|(end, item)| Some((end, item?))).collect();
        Ok(())
    }

    fn waits_for(&self) -> String {
        let mut link = self.link.borrow_mut();
        let waits = self.executor.borrow_mut().waits(&mut *link);
        // A `send` waits for these.
        let behind = (0..).zip(&link.steps).filter_map(|(trainer, ended)| {
            let trainer: u32 = trainer;
            let mut sent = link.outputs[trainer as usize].iter().map(|(channel, end)| (channel, link.sent[*end]));
            let (channel, item) = sent.find(|(_, sent)| *sent > *ended + 1)?;
            Some(format!(
                "item {item} of channel {channel:?} waits for trainer {trainer}, which has ended {ended} steps"
            ))
        });
        waits.into_iter().chain(behind).collect::<Vec<_>>().join("; ")
    }
}
