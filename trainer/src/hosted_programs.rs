//! Programs that servers host, as trainers reach them: their declaration, and a trainer's ends of their channels.
//!
//! A step has one item on each channel. Items that a trainer has received stay on the server until the trainer has
//! ended its step, which it says after all that it sends. So a failed step, and one that another process of its rank
//! goes on with, receives the same items again, and no item counts twice.

use std::collections::{BTreeMap, BTreeSet};

use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ServerIndex, TrainerId, Version};
use pserver_core::partition::Hosted;
use pserver_core::port::{EndKind, ProgramEnd, enclose_program};
use pserver_program::hosted::{HostedEnd, hosted_program, program_ends};
use pserver_program::{Graph, OpKind, Program, ProgramPeer, Purpose, Tensor, VariableValue};

use super::initial_values::{InitialValues, initial_value};
use super::server_parameters::nodes;

/// A program that a server hosts.
#[derive(Clone, Debug)]
pub(super) struct ServerProgram {
    /// The name of the parameter that holds it.
    pub(super) name: String,
    /// Index of the server that hosts it.
    pub(super) server: u32,
    /// Why no flow carries it out.
    pub(super) reason: String,
    /// The component of the server's part, with its initialisation.
    component: Graph,
    program: Program,
    ends: Vec<HostedEnd>,
}

impl ServerProgram {
    /// # Errors
    /// When a server cannot host the component; names also why no flow carries it out.
    pub(super) fn of(
        component: Graph,
        (server, trainers): (u32, u32),
        batch: Option<u64>,
        reason: &Failure,
    ) -> Result<Self, Failure> {
        let made = hosted_program(&component, batch).and_then(|program| {
            let ends = program_ends(&Graph::new(program.clone())?, trainers)?;
            check_initialised(&component, &ends)?;
            Ok((program, ends))
        });
        let (program, ends) = made.map_err(|failure| {
            Failure::call(format!("{reason}; and the executor cannot run it on a server: {failure}"))
        })?;
        let name = ends.first().map_or_else(String::new, |first| format!("{}@program", first.end.name));
        Ok(Self { name, server, reason: reason.to_string(), component, program, ends })
    }

    /// Renames what a program before it has declared under the same name, such as a constant that both read.
    pub(super) fn rename_after(&mut self, earlier: &[Self]) {
        let known = |name: &String| {
            let mut ends = earlier.iter().flat_map(|program| &program.ends);
            ends.any(|one| one.end.name == *name) || earlier.iter().any(|program| program.name == *name)
        };
        for name in self.ends.iter_mut().map(|one| &mut one.end.name).chain([&mut self.name]) {
            while known(name) {
                name.push('_');
            }
        }
    }

    /// Declares the program and its ends, with the initial values that its part computes.
    pub(super) fn declare(&self, client: &Client) -> Result<(), Failure> {
        let server = u16::try_from(self.server).map(ServerIndex);
        let server = server.map_err(|_| {
            Failure::call(format!("program {:?}: found server {}; expected below 65536", self.name, self.server))
        })?;
        let settings = |hosted| {
            let settings = OptimizerSettings::from_text("algorithm: 'sum'")?;
            Ok::<_, Failure>(OptimizerSettings { hosted: Some(hosted), ..settings })
        };
        let program = enclose_program(&self.program.encode());
        let of_program = OptimizerSettings { owner: Some(server), ..settings(Hosted::Program)? };
        client.init_param(&self.name, ElementType::Uint32, &[], &program, &of_program)?;
        for HostedEnd { end, of } in &self.ends {
            let initial = match (end.kind, of) {
                (EndKind::Kept, Some(variable)) => initial_value(&self.component, variable)?,
                _ => Tensor::try_zeros(end.element_type, &end.shape)?.into(),
            };
            let of_end = OptimizerSettings { sender: end.kind.sender(), ..settings(Hosted::Part)? };
            client.init_param(&end.name, end.element_type, &end.shape, initial.tensor().bytes(), &of_end)?;
        }
        Ok(())
    }

    /// The staleness of its first accumulator, if it has one.
    pub(super) fn staleness(&self) -> Option<Option<u32>> {
        nodes(&self.component).find_map(|node| match node.kind {
            OpKind::GradientAccumulator { staleness, .. } => Some(staleness),
            _ => None,
        })
    }

    /// The variables that it sends before its loops, each with the channel: item `n + 1` answers step `n`.
    fn first_sent(&self) -> impl Iterator<Item = (&str, &str)> {
        let sends = self.component.scopes()[0].nodes.iter().filter_map(|node| match &node.kind {
            OpKind::Send { channel, .. } => Some((channel.as_str(), node.inputs[0])),
            _ => None,
        });
        sends.map(|(channel, variable)| (channel, self.component.variable(variable).name.as_str()))
    }

    /// The parameter of a kept variable that is a parameter of the program, too.
    pub(super) fn parameter(&self, variable: &str) -> Option<&ProgramEnd> {
        let index = self.component.find(variable)?;
        let is_parameter = self.component.variable(index).purpose == Purpose::Parameter;
        let kept = self.ends.iter().find(|one| one.end.kind == EndKind::Kept && one.of.as_deref() == Some(variable));
        kept.filter(|_| is_parameter).map(|one| &one.end)
    }
}

/// Refuses kept variables without an initial value.
fn check_initialised(component: &Graph, ends: &[HostedEnd]) -> Result<(), Failure> {
    let initial_values = InitialValues::of(component);
    for variable in ends.iter().filter(|one| one.end.kind == EndKind::Kept).filter_map(|one| one.of.as_deref()) {
        let index = component.find(variable).expect("it is a variable of the component");
        let checked = initial_values.check(index, false);
        checked.map_err(|reason| Failure::call(format!("variable {variable:?}: {reason}")))?;
    }
    Ok(())
}

/// A trainer's ends of the programs that servers host.
#[derive(Default)]
pub(super) struct HostedEnds {
    /// By channel, what it sends.
    sent: BTreeMap<String, HostedEnd>,
    /// By channel, what it receives, and from which server.
    received: BTreeMap<String, (u32, HostedEnd)>,
    /// By variable, the end that it receives with its last step in it, where the program sends such answers.
    answers: BTreeMap<String, ProgramEnd>,
    /// Of each program the parameter that counts its steps.
    steps: Vec<String>,
    /// The steps that it has ended.
    ended: u64,
    /// The channels on which it has sent in this step.
    sent_in_step: BTreeSet<String>,
}

impl HostedEnds {
    /// The ends of a trainer. It goes on with the step after those that an earlier process of its rank has ended.
    pub(super) fn of(client: &Client, programs: &[ServerProgram]) -> Result<Self, Failure> {
        let mut own = Self::default();
        if programs.is_empty() {
            return Ok(own);
        }
        let rank = TrainerId(client.trainer()?);
        for program in programs {
            let ServerProgram { server, ends, .. } = program;
            for one in ends {
                let channel = one.of.clone().unwrap_or_default();
                match one.end.kind {
                    EndKind::Input(trainer) if trainer == rank => drop(own.sent.insert(channel, one.clone())),
                    EndKind::Output(trainer) if trainer == rank => {
                        let answers = program.first_sent().filter(|(first, _)| *first == channel);
                        own.answers.extend(answers.map(|(_, variable)| (variable.to_owned(), one.end.clone())));
                        own.received.insert(channel, (*server, one.clone()));
                    }
                    EndKind::Steps(trainer) if trainer == rank => own.steps.push(one.end.name.clone()),
                    _ => {}
                }
            }
        }
        own.resume(client)?;
        Ok(own)
    }

    /// Learns the steps that were ended. Where one was ended in some programs only, all that it sent is there.
    fn resume(&mut self, client: &Client) -> Result<(), Failure> {
        let steps: Vec<&str> = self.steps.iter().map(String::as_str).collect();
        let found = client.items(&steps)?;
        self.ended = found.iter().copied().max().unwrap_or_default();
        for (name, found) in steps.iter().zip(&found) {
            client.resume_at(&[*name], *found)?;
            (*found..self.ended).try_for_each(|step| push_step(client, &[*name], step + 1))?;
        }
        let sent: Vec<&str> = self.sent.values().map(|one| one.end.name.as_str()).collect();
        client.resume_at(&sent, self.ended)
    }

    /// The steps that the trainer has ended; none where it has no end of a program.
    pub(super) fn ended(&self) -> Option<u64> {
        (!self.steps.is_empty()).then_some(self.ended)
    }

    /// Sends what has been computed, in one call. No item of a step is sent twice.
    pub(super) fn send(&mut self, client: &Client, computed: &BTreeMap<String, VariableValue>) -> Result<(), Failure> {
        let mut channels = Vec::new();
        let mut items = Vec::new();
        for (channel, value) in computed.iter().filter(|(channel, _)| !self.sent_in_step.contains(*channel)) {
            let (Some(one), VariableValue::Dense(item)) = (self.sent.get(channel), value) else { continue };
            let (found, expected) = (item.shape(), &one.end.shape);
            if found != expected {
                return Err(Failure::call(format!(
                    "channel {channel:?}: found an item of {found:?}; expected {expected:?}"
                )));
            }
            let element_type = item.elements().element_type();
            items.push(GradientSlice { name: &one.end.name, element_type, content: item.bytes() });
            channels.push(channel.clone());
        }
        if !items.is_empty() {
            client.push(&items, None)?;
            self.sent_in_step.extend(channels);
        }
        Ok(())
    }

    /// Whether items of a channel come from a program.
    pub(super) fn receives(&self, channel: &str) -> bool {
        self.received.contains_key(channel)
    }

    /// Waits for the step's item of a channel, into `room` where that fits; none for another channel. Returns the
    /// server with the item.
    pub(super) fn receive(
        &self,
        client: &Client,
        channel: &str,
        room: Option<Tensor>,
    ) -> Result<Option<(ProgramPeer, Tensor)>, Failure> {
        let Some((server, HostedEnd { end, .. })) = self.received.get(channel) else { return Ok(None) };
        let fits = |room: &Tensor| room.shape() == end.shape && room.elements().element_type() == end.element_type;
        let mut item = match room.filter(fits) {
            Some(room) => room,
            None => Tensor::try_zeros(end.element_type, &end.shape)?,
        };
        let next = Version(self.ended + 1);
        let found = client.pull_version(&mut [DestinationSlice::new(&end.name, item.bytes_mut())], next)?;
        if found != next {
            return Err(Failure::call(format!(
                "channel {channel:?}: found item {found}; expected {next}, which another process of this rank has taken"
            )));
        }
        Ok(Some((ProgramPeer::Server(*server), item)))
    }

    /// Waits until a variable has all steps in it that this trainer has ended, where its program answers steps.
    pub(super) fn await_own(&self, client: &Client, variable: &str) -> Result<(), Failure> {
        let Some(end) = self.answers.get(variable) else { return Ok(()) };
        let mut item = Tensor::try_zeros(end.element_type, &end.shape)?;
        let answer = Version(self.ended + 1);
        client.pull_version(&mut [DestinationSlice::new(&end.name, item.bytes_mut())], answer).map(drop)
    }

    /// Ends the step: the programs may send the next items.
    pub(super) fn end_step(&mut self, client: &Client) -> Result<(), Failure> {
        let steps: Vec<&str> = self.steps.iter().map(String::as_str).collect();
        if steps.is_empty() {
            return Ok(());
        }
        push_step(client, &steps, self.ended + 1)?;
        self.ended += 1;
        self.sent_in_step.clear();
        Ok(())
    }
}

/// Says that a step is ended.
fn push_step(client: &Client, names: &[&str], step: u64) -> Result<(), Failure> {
    let content = i64::try_from(step).expect("steps are counted one by one").to_le_bytes();
    let slices = names.iter().map(|name| GradientSlice { name, element_type: ElementType::Int64, content: &content });
    client.push(&slices.collect::<Vec<_>>(), None)
}
