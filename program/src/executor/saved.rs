//! Binary form of everything that a later run depends on, as a checkpoint keeps it: protobuf (proto3), with the numbers
//! of units, ops and variables of the same program.

use prost::Message;

use pserver_core::accumulator::PieceList;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::machine::{GradientPiece, OpState, ReceivedValue, StringPiece};
use super::marking::MarkingMessage;
use super::run::Executor;
use crate::value::Elements;
use crate::{ProgramPeer, Tensor, VariableIndex, VariableValue};

#[derive(Clone, PartialEq, Message)]
struct ExecutorMessage {
    #[prost(message, optional, tag = "1")]
    marking: Option<MarkingMessage>,
    /// The values of variables.
    #[prost(message, repeated, tag = "2")]
    values: Vec<HeldMessage>,
    /// The items of queues, in order.
    #[prost(message, repeated, tag = "3")]
    items: Vec<HeldMessage>,
    #[prost(message, repeated, tag = "4")]
    ops: Vec<OpStateMessage>,
    #[prost(uint64, repeated, tag = "5")]
    senders: Vec<u64>,
}

/// A value of a variable, or of its queue.
#[derive(Clone, PartialEq, Message)]
struct HeldMessage {
    #[prost(uint32, tag = "1")]
    variable: u32,
    #[prost(message, optional, tag = "2")]
    value: Option<HeldValueMessage>,
}

/// The state of an op between its units.
#[derive(Clone, PartialEq, Message)]
struct OpStateMessage {
    #[prost(uint32, tag = "1")]
    node: u32,
    /// Values that have arrived, or pieces.
    #[prost(message, repeated, tag = "2")]
    sent: Vec<SentMessage>,
    /// Of an accumulator: how many pieces of each sender it has given.
    #[prost(message, repeated, tag = "3")]
    given: Vec<GivenMessage>,
    #[prost(string, repeated, tag = "4")]
    strings: Vec<String>,
    /// Ids that rows were asked for.
    #[prost(uint64, repeated, tag = "5")]
    ids: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct SentMessage {
    #[prost(uint64, tag = "1")]
    from: u64,
    #[prost(message, optional, tag = "2")]
    value: Option<HeldValueMessage>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct GivenMessage {
    #[prost(uint64, tag = "1")]
    from: u64,
    #[prost(uint64, tag = "2")]
    count: u64,
}

#[derive(Clone, PartialEq, Message)]
struct HeldValueMessage {
    /// Of a dense value: the type of its elements, and one more.
    #[prost(uint32, tag = "1")]
    dense: u32,
    #[prost(uint64, repeated, tag = "2")]
    shape: Vec<u64>,
    #[prost(bytes = "vec", tag = "3")]
    bytes: Vec<u8>,
    /// Of a list of strings.
    #[prost(string, repeated, tag = "4")]
    strings: Vec<String>,
}

impl Executor {
    /// The binary form of everything that a later run depends on, but for the values of variables that `is_elsewhere`
    /// names. The program has no rows.
    #[must_use]
    pub fn encode(&self, is_elsewhere: impl Fn(VariableIndex) -> bool) -> Vec<u8> {
        let machine = &self.machine;
        let numbers = || (0..).zip(machine.graph().variables()).map(|(number, _)| VariableIndex(number));
        let held = |index: VariableIndex, value: &VariableValue| HeldMessage {
            variable: index.0,
            value: Some(HeldValueMessage::of(value)),
        };
        let own = numbers().filter(|index| !is_elsewhere(*index));
        let values = own.filter_map(|index| Some(held(index, machine.values.get(index)?))).collect();
        let queued = |index: VariableIndex| machine.queues[index.place()].iter().flat_map(|queue| queue.items());
        let items = numbers().flat_map(|index| queued(index).map(move |item| held(index, item))).collect();
        let ops = (0..).zip(&machine.kept).filter_map(|(node, state)| OpStateMessage::of(node, state)).collect();
        let senders = machine.senders().iter().copied().map(number_of).collect();
        let message = ExecutorMessage { marking: Some(self.marking.message()), values, items, ops, senders };
        message.encode_to_vec()
    }

    /// Takes over what [`encode`](Self::encode) wrote of an executor of the same program.
    ///
    /// # Errors
    /// When the bytes are damaged, or of another program.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let damaged = || Failure::call("the state of the executor is damaged, or of another program");
        let message = ExecutorMessage::decode(bytes).map_err(|_| damaged())?;
        self.marking = message.marking.and_then(|marking| self.marking.restored(marking)).ok_or_else(damaged)?;
        let machine = &mut self.machine;
        let variables = machine.graph().variables().len();
        let place = |number: u32| Some(number as usize).filter(|place| *place < variables);
        for HeldMessage { variable, value } in message.values {
            place(variable).ok_or_else(damaged)?;
            machine.values.set(VariableIndex(variable), read(value).ok_or_else(damaged)?);
        }
        for HeldMessage { variable, value } in message.items {
            let queue = place(variable).and_then(|place| machine.queues[place].as_mut());
            let queue = queue.filter(|queue| !queue.is_full()).ok_or_else(damaged)?;
            queue.put(read(value).ok_or_else(damaged)?);
        }
        for op in message.ops {
            let state = machine.kept.get_mut(op.node as usize).ok_or_else(damaged)?;
            *state = op.state(state).ok_or_else(damaged)?;
        }
        machine.set_senders(message.senders.into_iter().map(peer_of).collect());
        Ok(())
    }
}

impl OpStateMessage {
    fn of(node: u32, state: &OpState) -> Option<Self> {
        let arrivals = |all: &[ReceivedValue]| all.iter().map(|one| SentMessage::of(one.from, &one.value)).collect();
        let empty = Self { node, ..Self::default() };
        Some(match state {
            OpState::Nothing => return None,
            OpState::Arrivals(all) => Self { sent: arrivals(all), ..empty },
            OpState::Rows(ids, all) => Self { sent: arrivals(all), ids: ids.clone(), ..empty },
            OpState::Gradients(pieces, given) => Self {
                sent: pieces.as_slice().iter().map(|one| SentMessage::of(one.from, &one.value)).collect(),
                given: given
                    .iter()
                    .map(|(from, count)| GivenMessage { from: number_of(*from), count: *count })
                    .collect(),
                ..empty
            },
            OpState::Strings(lines) => {
                Self { strings: lines.as_slice().iter().map(|line| line.text.clone()).collect(), ..empty }
            }
        })
    }

    /// The state, of the same kind as `like`.
    fn state(self, like: &OpState) -> Option<OpState> {
        let sent = self.sent.into_iter().map(|one| Some((peer_of(one.from), read(one.value)?)));
        let sent: Vec<(ProgramPeer, VariableValue)> = sent.collect::<Option<_>>()?;
        let arrivals = || sent.iter().cloned().map(|(from, value)| ReceivedValue { from, value }).collect();
        Some(match like {
            OpState::Nothing => return None,
            OpState::Arrivals(_) => OpState::Arrivals(arrivals()),
            OpState::Rows(..) => OpState::Rows(self.ids, arrivals()),
            OpState::Gradients(..) => {
                let mut pieces = PieceList::default();
                for (from, value) in sent {
                    pieces.put(GradientPiece { from, value });
                }
                let given = self.given.iter().map(|one| (peer_of(one.from), one.count)).collect();
                OpState::Gradients(pieces, given)
            }
            OpState::Strings(_) => {
                let mut lines = PieceList::default();
                for text in self.strings {
                    lines.put(StringPiece::of(text));
                }
                OpState::Strings(lines)
            }
        })
    }
}

impl SentMessage {
    fn of(from: ProgramPeer, value: &VariableValue) -> Self {
        Self { from: number_of(from), value: Some(HeldValueMessage::of(value)) }
    }
}

impl HeldValueMessage {
    fn of(value: &VariableValue) -> Self {
        match value {
            VariableValue::Dense(tensor) => Self {
                dense: u32::from(tensor.elements().element_type().number()) + 1,
                shape: tensor.shape().to_vec(),
                bytes: tensor.bytes().to_vec(),
                strings: Vec::new(),
            },
            VariableValue::Strings(strings) => Self { strings: strings.clone(), ..Self::default() },
            VariableValue::SelectedRows(_) => panic!("the program has no rows; its loader checks that"),
        }
    }
}

fn read(message: Option<HeldValueMessage>) -> Option<VariableValue> {
    let HeldValueMessage { dense, shape, bytes, strings } = message?;
    let Some(number) = dense.checked_sub(1) else { return Some(VariableValue::Strings(strings)) };
    tensor_of(ElementType::from_number(number.into())?, shape, &bytes).map(VariableValue::Dense)
}

/// A dense tensor of these bytes, if there are as many as the shape needs.
pub(crate) fn tensor_of(element_type: ElementType, shape: Vec<u64>, bytes: &[u8]) -> Option<Tensor> {
    let count = shape.iter().try_fold(1_u64, |count, length| count.checked_mul(*length))?;
    if count.checked_mul(element_type.bytes())? != bytes.len() as u64 {
        return None;
    }
    let mut elements = Elements::zeros(element_type, usize::try_from(count).ok()?);
    elements.bytes_mut().copy_from_slice(bytes);
    Some(Tensor::new(shape, elements))
}

/// Trainers have even numbers, servers odd ones.
fn number_of(peer: ProgramPeer) -> u64 {
    match peer {
        ProgramPeer::Trainer(number) => 2 * u64::from(number),
        ProgramPeer::Server(number) => 2 * u64::from(number) + 1,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers of processes have 32 bits, and damage gives another one")]
fn peer_of(number: u64) -> ProgramPeer {
    let of = (number / 2) as u32;
    if number.is_multiple_of(2) { ProgramPeer::Trainer(of) } else { ProgramPeer::Server(of) }
}
