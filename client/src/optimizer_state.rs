//! The optimizer's state of a dense parameter, out of its servers and into them. That of rows is in `row_states`.

use prost::Message;
use pserver_core::config::{Mode, ParameterConfig};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, Sequence, Version};
use pserver_core::memory::LoanBook;
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::wire::{Entry, Flags, Kind, StateMessage};

use super::call::CallNumber;
use super::client_lock::ClientGuard;
use super::job::check_dense;
use super::packer::ChunkPiece;
use super::{Client, ClientState, Extent};

/// Attempts to fetch a state when it is updated meanwhile.
pub(super) const FETCHES_MAX: u32 = 20;

/// The optimizer's state of a parameter after a number of updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerState {
    /// The type of the elements of each tensor, which is the parameter's.
    pub element_type: ElementType,
    /// The shape of each tensor, which is the parameter's.
    pub shape: Vec<u64>,
    /// Updates that the state has seen. Adam's correction of its means and the schedule of the learning rate go on from
    /// there.
    pub updates: u64,
    /// The tensors in the rule's order; none where the rule has no state.
    pub tensors: Vec<StateTensor>,
}

/// A tensor of an optimizer's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name in the rule.
    pub name: String,
    /// Its elements: as many bytes as the parameter has.
    pub content: Vec<u8>,
}

/// A tensor of an optimizer's state to set, in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct StateSlice<'a> {
    /// Its name in the rule.
    pub name: &'a str,
    /// Its elements: as many bytes as the parameter has.
    pub content: &'a [u8],
}

impl Client {
    /// The optimizer's state of a dense parameter, all of it after the same updates. In sync mode it has every round in
    /// it that this trainer has pushed.
    ///
    /// # Errors
    /// When there is no such parameter, it is sparse ([`Client::row_states`]) or on a device; when other trainers'
    /// gradients changed the state each time while it was fetched; or when a server does not answer before the
    /// deadline.
    pub fn optimizer_state(&self, name: &str) -> Result<OptimizerState, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        let index = state.dense_parameter(name)?;
        let (names, facts) = (state.state_names(index)?, state.facts(name)?);
        let bytes = usize::try_from(facts.bytes);
        let bytes = bytes.map_err(|_| Failure::call(format!("parameter \"{name}\": its state exceeds the memory")))?;
        let mut contents = vec![vec![0; bytes]; names.len()];
        state.wait_for_own_round(index)?;
        for _ in 0..FETCHES_MAX {
            let fetched = state.lend(|state, book| {
                let call = state.start_state_pull(index, &mut contents, book)?;
                state.finish_versions(call)
            })?;
            if let Some(Version(updates)) = fetched {
                let tensors = names.into_iter().zip(contents);
                let tensors = tensors.map(|(name, content)| StateTensor { name, content }).collect();
                return Ok(OptimizerState { element_type: facts.element_type, shape: facts.shape, updates, tensors });
            }
        }
        Err(Failure::call(format!(
            "parameter \"{name}\": its state was after different updates in each of {FETCHES_MAX} fetches; expected no \
             gradients of other trainers meanwhile, and each state set as a whole"
        )))
    }

    /// Replaces the optimizer's state of a dense parameter, whose value stays: every tensor, and the updates that they
    /// have seen. Other trainers should wait meanwhile. After a failure some of it may be replaced; the call may be
    /// repeated.
    ///
    /// # Errors
    /// When the tensors are not exactly those of the rule, or one has another length, and then nothing is sent; else as
    /// [`Client::optimizer_state`].
    pub fn set_optimizer_state(&self, name: &str, tensors: &[StateSlice<'_>], updates: u64) -> Result<(), Failure> {
        let _memory = self.hold(tensors.iter().map(|tensor| Extent::of(tensor.content)));
        let mut state = self.lock()?;
        state.ready()?;
        let index = state.dense_parameter(name)?;
        let bytes = state.ready_job().chosen(index).declaration().bytes;
        let ordered = state.ordered_tensors(index, tensors, bytes)?;
        state.wait_for_own_round(index)?;
        state.lend(|state, book| {
            let mut calls = Vec::with_capacity(ordered.len() + 1);
            for (tensor, content) in (0..).zip(ordered) {
                calls.push(state.start_state_set(
                    index,
                    StateMessage { state: Some(tensor), updates },
                    content,
                    book,
                )?);
            }
            calls.push(state.start_state_set(index, StateMessage { state: None, updates }, &[], book)?);
            let ended: Vec<_> = calls.into_iter().map(|call| state.finish(call)).collect();
            ended.into_iter().collect()
        })
    }
}

impl ClientGuard<'_> {
    /// Waits until the round of this trainer's last push is closed.
    pub(super) fn wait_for_own_round(&mut self, index: ParameterIndex) -> Result<(), Failure> {
        self.learn_rounds(&[index])?;
        let round = self.ready_job().progress(index).round.unwrap_or_default();
        self.open(Kind::Pull, &[index], (0, 0))?;
        let packer = self.packer(Kind::Pull, &[index]).without_values();
        let call = self.pack_bare(packer, index, &LoanBook::open(), (round, Sequence(0)));
        self.finish(call)
    }
}

impl ClientState {
    fn dense_parameter(&mut self, name: &str) -> Result<ParameterIndex, Failure> {
        let job = self.ready_job();
        let index = job.parameter(name, &mut None)?;
        check_dense(job.chosen(index)).map(|()| index)
    }

    /// The names of a parameter's states, in the rule's order.
    pub(super) fn state_names(&mut self, index: ParameterIndex) -> Result<Vec<String>, Failure> {
        let job = self.ready_job();
        if job.sharing().mode == Mode::Delta {
            return Ok(Vec::new());
        }
        let config = ParameterConfig::decode(&job.chosen(index).declaration().config)?;
        Ok(config.rule.states().into_iter().map(str::to_owned).collect())
    }

    /// The contents of all tensors of a parameter's state, each of so many bytes, in the rule's order.
    pub(super) fn ordered_tensors<'a>(
        &mut self,
        index: ParameterIndex,
        tensors: &[StateSlice<'a>],
        bytes: u64,
    ) -> Result<Vec<&'a [u8]>, Failure> {
        let expected = self.state_names(index)?;
        let declaration = self.ready_job().chosen(index).declaration();
        let name = declaration.name.as_str();
        let mut found: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
        let mut sorted: Vec<&str> = expected.iter().map(String::as_str).collect();
        found.sort_unstable();
        sorted.sort_unstable();
        if found != sorted {
            let text = format!("parameter \"{name}\": states {found:?}; expected {expected:?}, each once");
            return Err(Failure::call(text));
        }
        for StateSlice { name: of, content } in tensors {
            if u64::try_from(content.len()).ok() != Some(bytes) {
                let found = content.len();
                let text = format!("parameter \"{name}\": {found} bytes of state \"{of}\"; expected {bytes}");
                return Err(Failure::call(text));
            }
        }
        let of = |name: &String| tensors.iter().find(|tensor| tensor.name == name).expect("each is there").content;
        Ok(expected.iter().map(of).collect())
    }

    /// Starts to fetch all tensors, and the updates that they have seen.
    fn start_state_pull<'env>(
        &mut self,
        index: ParameterIndex,
        contents: &'env mut [Vec<u8>],
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let received: usize = contents.iter().map(Vec::len).sum();
        self.open(Kind::Pull, &[index], (0, received as u64))?;
        let spans = self.spans(index);
        let element_type = self.ready_job().chosen(index).declaration().element_type;
        let bare = |chunk| Entry::bare(ChunkId { parameter: index, chunk }, Round(0), element_type);
        for (state, content) in (0..).zip(contents) {
            let mut rest = content.as_mut_slice();
            let pieces: Vec<ChunkPiece> = spans
                .iter()
                .map(|(chunk, bytes)| {
                    let (part, after) = std::mem::take(&mut rest).split_at_mut(*bytes);
                    rest = after;
                    let into = Some(Incoming::Loan(book.write(part)));
                    ChunkPiece { entry: bare(*chunk), payload: None, into, sequence: Sequence(0) }
                })
                .collect();
            self.pack_state(Kind::Pull, StateMessage { state: Some(state), updates: 0 }, pieces);
        }
        let pieces = spans.iter().map(|(chunk, _)| ChunkPiece {
            entry: bare(*chunk),
            payload: None,
            into: None,
            sequence: Sequence(0),
        });
        self.pack_state(Kind::Pull, StateMessage { state: None, updates: 0 }, pieces.collect());
        Ok(self.close())
    }

    /// Starts to replace a tensor, or without content the updates that the state has seen.
    fn start_state_set<'env>(
        &mut self,
        index: ParameterIndex,
        about: StateMessage,
        content: &'env [u8],
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let sequence = self.open(Kind::Set, &[index], (content.len() as u64, 0))?;
        self.forget_repetition();
        let element_type = self.ready_job().chosen(index).declaration().element_type;
        let mut rest = content;
        let pieces = self.spans(index).into_iter().map(|(chunk, bytes)| {
            let id = ChunkId { parameter: index, chunk };
            if about.state.is_none() {
                let entry = Entry::bare(id, Round(0), element_type);
                return ChunkPiece { entry, payload: None, into: None, sequence };
            }
            let (part, after) = rest.split_at(bytes);
            rest = after;
            let entry = Entry::with_payload(id, Round(0), element_type, part);
            ChunkPiece { entry, payload: Some(Outgoing::Loan(book.read(part))), into: None, sequence }
        });
        let pieces = pieces.collect();
        self.pack_state(Kind::Set, about, pieces);
        Ok(self.close())
    }

    /// The chunks of a parameter, each with its bytes.
    fn spans(&mut self, index: ParameterIndex) -> Vec<(ChunkIndex, usize)> {
        let parameter = self.ready_job().chosen(index);
        parameter.chunks().map(|(chunk, span)| (chunk, span.bytes as usize)).collect()
    }

    /// Sends pieces of the open call that are about one part of the state.
    pub(super) fn pack_state(&mut self, kind: Kind, about: StateMessage, pieces: Vec<ChunkPiece>) {
        let mut packer = self.packer(kind, &[]).with(Flags::STATE, about.encode_to_vec());
        if pieces.iter().all(|piece| piece.into.is_none()) {
            packer = packer.without_values();
        }
        for piece in pieces {
            let job = self.ready_job();
            let lane = job.lane(job.chosen(piece.entry.id.parameter).shard_of(piece.entry.id.chunk));
            if let Some(full) = packer.add(lane, piece) {
                self.send_frame(lane, full);
            }
        }
        packer.rest().for_each(|(lane, packed)| self.send_frame(lane, packed));
    }
}
