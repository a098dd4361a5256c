//! Parameters that are updated by rows: pushing and fetching some of them.
//!
//! What a call brings is merged and dealt to buckets in memory of the call, from which it leaves; what it fetches
//! lands there and is dealt out to the caller's places, so that a row which is asked for twice comes once.

use prost::Message;
use pserver_core::client::LaneId;
use pserver_core::config::row_layout;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Sequence};
use pserver_core::limits::LISTED_IDS_MAX;
use pserver_core::memory::LoanBook;
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::rows::{Ids, Merge, RowLayout, RowsView};
use pserver_core::wire::{Entry, Flags, Kind, PushMessage};

use super::calls::CallNumber;
use super::dealt::{Dealt, Question, RowsRoom, Stack};
use super::job::Job;
use super::packer::{Packer, Piece};
use super::transfer::check_rate;
use super::{Client, Extent, GivenRows, State, WantedRows};

/// Ids that the answers of all buckets have room for together, as long as each has room for some.
const LISTED_TOGETHER: usize = 8 * 1024 * 1024;
/// Ids that each bucket's answer has room for, however many buckets there are.
const LISTED_LEAST: usize = 1024;

impl Client {
    /// Sends rows of gradients, or of deltas where the job optimises on the client. Rows may repeat; they are summed.
    /// Every bucket of these parameters takes part in the round, also where no row of it is sent. `rate` replaces the
    /// schedule's rate.
    ///
    /// # Errors
    /// What is wrong with which rows, also that a table would outgrow what was declared; or who did not answer before
    /// the deadline.
    pub fn push_rows(&self, gradients: &[GivenRows<'_>], rate: Option<f64>) -> Result<(), Failure> {
        let _memory = self.hold(gradients.iter().flat_map(|given| [Extent::of(given.ids), Extent::of(given.values)]));
        let mut state = self.enter()?;
        state.ready()?;
        check_rate(rate)?;
        let (chosen, stacks) = state.stack(gradients)?;
        state.know_rounds(&chosen)?;
        let pushed = state.lend(|state, book| {
            let call = state.start_push_rows(&chosen, &stacks, rate, book)?;
            state.finish(call)
        });
        state.rows_room.keep(stacks.into_iter().map(Stack::into_buffer));
        pushed
    }

    /// Fetches rows by their ids, which may repeat, each where its id stands. A row that nobody has pushed to is as it
    /// was declared to begin. In sync mode rows have all rounds in them that this trainer has pushed. After a failure
    /// the places are as they were.
    ///
    /// # Errors
    /// What is wrong with which rows; or who did not answer, or was waited for, until the deadline.
    pub fn pull_rows(&self, into: &mut [WantedRows<'_>]) -> Result<(), Failure> {
        let _memory = self.hold(into.iter().flat_map(|wanted| [Extent::of(wanted.ids), Extent::of(wanted.values)]));
        let mut state = self.enter()?;
        state.ready()?;
        let (chosen, questions) = state.questions(into)?;
        let mut answers: Vec<Vec<u8>> =
            questions.iter().map(|one| state.rows_room.take_of(one.answer_bytes())).collect();
        state.lend(|state, book| {
            let call = state.start_pull_rows(&chosen, &questions, &mut answers, Flags::default(), book)?;
            state.finish(call)
        })?;
        for ((wanted, question), answer) in into.iter_mut().zip(&questions).zip(&answers) {
            question.deal_out(answer, wanted.values);
        }
        state.rows_room.keep(answers);
        Ok(())
    }

    /// The ids of a sparse parameter's rows that somebody has pushed to, ascending: all that were there when the call
    /// began, and perhaps some that came to be meanwhile.
    ///
    /// # Errors
    /// When there is no such parameter, when it is not sparse, or who did not answer before the deadline.
    pub fn list_rows(&self, name: &str) -> Result<Vec<u64>, Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        let index = state.ready_job().parameter(name, &mut None)?;
        layout_of(state.ready_job(), index)?;
        let buckets = state.ready_job().chosen(index).chunk_count();
        let mut open: Vec<(ChunkIndex, u64)> = (0..buckets).map(|bucket| (ChunkIndex(bucket), 0)).collect();
        let mut found = Vec::new();
        while !open.is_empty() {
            let each = (LISTED_IDS_MAX as usize).min(LISTED_TOGETHER / open.len()).max(LISTED_LEAST);
            let question = Question::after_ids(&open, each);
            let mut answers = vec![vec![0; question.answer_bytes()]];
            state.lend(|state, book| {
                let questions = std::slice::from_ref(&question);
                let call = state.start_pull_rows(&[index], questions, &mut answers, Flags::LIST, book)?;
                state.finish(call)
            })?;
            open = question.take_ids(&answers[0], &mut found);
        }
        found.sort_unstable();
        Ok(found)
    }
}

impl State {
    /// Checks rows of gradients, and deals them to buckets.
    fn stack(&mut self, gradients: &[GivenRows<'_>]) -> Result<(Vec<ParameterIndex>, Vec<Stack>), Failure> {
        let mut room = std::mem::take(&mut self.rows_room);
        let stacked = self.stack_in(gradients, &mut room);
        self.rows_room = room;
        stacked
    }

    fn stack_in(
        &mut self,
        gradients: &[GivenRows<'_>],
        room: &mut RowsRoom,
    ) -> Result<(Vec<ParameterIndex>, Vec<Stack>), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut stacks, mut last) = (Vec::new(), Vec::new(), None);
        for given in gradients {
            let index = job.parameter(given.name, &mut last)?;
            let named = |failure: Failure| Failure::call(format!("parameter \"{}\": {failure}", given.name));
            let layout = layout_of(job, index)?;
            if !given.element_type.is_gradient_for(layout.element_type()) {
                let (found, expected) = (given.element_type, layout.element_type());
                return Err(named(Failure::call(format!("rows of {found}; expected {expected}"))));
            }
            let sent = layout.of(given.element_type).map_err(named)?;
            let view = RowsView::new(sent, given.ids, given.values).map_err(named)?;
            let buckets = job.chosen(index).declaration().buckets.expect("the parameter is sparse");
            let dealt = Dealt { buckets, bytes_max: job.chunk_bytes() };
            stacks.push(dealt.stack(layout, view, room).map_err(named)?);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        Ok((chosen, stacks))
    }

    /// Checks what rows are wanted, and deals the questions after them to buckets.
    fn questions(&mut self, into: &[WantedRows<'_>]) -> Result<(Vec<ParameterIndex>, Vec<Question>), Failure> {
        let mut room = std::mem::take(&mut self.rows_room);
        let asked = self.questions_in(into, &mut room.merge);
        self.rows_room = room;
        asked
    }

    fn questions_in(
        &mut self,
        into: &[WantedRows<'_>],
        merge: &mut Merge,
    ) -> Result<(Vec<ParameterIndex>, Vec<Question>), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut questions, mut last) = (Vec::new(), Vec::new(), None);
        for wanted in into {
            let index = job.parameter(wanted.name, &mut last)?;
            let named = |failure: Failure| Failure::call(format!("parameter \"{}\": {failure}", wanted.name));
            let layout = layout_of(job, index)?;
            let ids = Ids::new(layout, wanted.ids).map_err(named)?;
            let expected = wanted.ids.len().saturating_mul(layout.row_bytes());
            if wanted.values.len() != expected {
                let found = wanted.values.len();
                let text = format!("a place of {found} bytes for {} rows; expected {expected}", wanted.ids.len());
                return Err(named(Failure::call(text)));
            }
            let buckets = job.chosen(index).declaration().buckets.expect("the parameter is sparse");
            let dealt = Dealt { buckets, bytes_max: Packer::shared_bytes_max(job.chunk_bytes()) };
            questions.push(dealt.question(layout, ids, merge).map_err(named)?);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        Ok((chosen, questions))
    }

    fn start_push_rows<'env>(
        &mut self,
        chosen: &[ParameterIndex],
        stacks: &'env [Stack],
        rate: Option<f64>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let counts_rounds = self.ready_job().counts_rounds();
        let sent = stacks.iter().map(Stack::bytes).sum();
        let fresh = self.open(Kind::Push, chosen, (sent, 0))?;
        let mut packer = self.packer(Kind::Push, chosen).with(Flags::default(), PushMessage { rate }.encode_to_vec());
        for (index, stack) in chosen.iter().zip(stacks) {
            let progress = self.ready_job().progress(*index);
            let round = progress.round.filter(|_| counts_rounds).unwrap_or_default();
            let sequence = progress.push_again.unwrap_or(fresh);
            for (bucket, part) in stack.parts() {
                let id = ChunkId { parameter: *index, chunk: bucket };
                let entry = Entry::with_payload(id, round, stack.element_type, part);
                let payload = (!part.is_empty()).then(|| Outgoing::Loan(book.read(part)));
                self.add(&mut packer, Piece { entry, payload, into: None, sequence });
            }
        }
        Ok(self.send_rest(packer))
    }

    fn start_pull_rows<'env>(
        &mut self,
        chosen: &[ParameterIndex],
        questions: &'env [Question],
        answers: &'env mut [Vec<u8>],
        flags: Flags,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let counts_rounds = self.ready_job().counts_rounds();
        let received = questions.iter().map(|question| question.answer_bytes() as u64).sum();
        let sent = questions.iter().map(Question::bytes).sum();
        self.open(Kind::Pull, chosen, (sent, received))?;
        let mut packer = self.packer(Kind::Pull, chosen).with(flags, Vec::new());
        for ((index, question), answer) in chosen.iter().zip(questions).zip(answers) {
            let job = self.ready_job();
            let round = job.progress(*index).round.filter(|_| counts_rounds).unwrap_or_default();
            let element_type = job.chosen(*index).declaration().element_type;
            let mut rest = answer.as_mut_slice();
            for piece in question.pieces() {
                let (place, after) = rest.split_at_mut(piece.answer_bytes);
                rest = after;
                let id = ChunkId { parameter: *index, chunk: piece.bucket };
                let entry = Entry::with_payload(id, round, element_type, piece.payload);
                let payload = Some(Outgoing::Loan(book.read(piece.payload)));
                let into = Some(book.write(place));
                self.add(&mut packer, Piece { entry, payload, into: into.map(Incoming::Loan), sequence: Sequence(0) });
            }
        }
        Ok(self.send_rest(packer))
    }

    /// Adds a piece of the call that was opened to its frame, which leaves when it is full.
    fn add(&mut self, packer: &mut Packer, piece: Piece) {
        let job = self.ready_job();
        let lane: LaneId = job.lane(job.chosen(piece.entry.id.parameter).place(piece.entry.id.chunk));
        if let Some(full) = packer.add(lane, piece) {
            self.frame(lane, full);
        }
    }
}

/// What the rows of a parameter are, which must have some.
pub(super) fn layout_of(job: &Job, index: ParameterIndex) -> Result<RowLayout, Failure> {
    let declaration = job.chosen(index).declaration();
    row_layout(declaration)?.ok_or_else(|| {
        let name = declaration.name.as_str();
        Failure::call(format!("parameter \"{name}\" is not sparse: it is sent and fetched as a whole, not by rows"))
    })
}
