//! Answers with rows of a bucket. Where rows replay many missed updates an answer takes several turns.

use std::sync::Arc;

use super::bucket::RowsAnswer;
use super::context::Context;
use super::group::SlotIndex;
use super::reply::Refusal;
use super::serving::{RowsPull, Serving};
use super::waiters::Waiter;
use crate::ids::{PeerId, Round};
use crate::wire::{Entry, ErrorCode, Flags, StateMessage};

impl Serving {
    /// Answers with rows of weights or of a state, with ids of existing rows, or with learning rates.
    pub(super) fn answer_rows(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: SlotIndex,
        waiter: Waiter,
        about: Option<StateMessage>,
    ) {
        let chunk = &self.table.chunks[slot_index];
        let entry = match about {
            None => chunk.version_entry(),
            Some(_) => Entry { round: Round(chunk.updates()), ..chunk.version_entry() },
        };
        let bucket = chunk.bucket().expect("a wish for rows is one to a bucket");
        let wish = waiter.wish.as_ref().expect("a pull of a bucket names its rows");
        let is_list = waiter.head.flags.contains(Flags::LIST);
        let first = match about {
            Some(_) if is_list => bucket.list_rates(cx.pool, wish),
            None if is_list => bucket.list(cx.pool, wish),
            _ => bucket.begin_read(cx.pool, wish),
        };
        match first {
            Ok(Some(value)) => {
                let (entry, state) = (Entry { bytes: value.len(), ..entry }, about.and_then(|about| about.state));
                let pull = RowsPull { slot_index, waiter, entry, answer: RowsAnswer::new(value, state) };
                if is_list { pull.answer(cx) } else { self.read_on(cx, pull) }
            }
            Ok(None) => cx.replies.nothing(waiter.peer, &waiter.head, entry),
            Err(failure) => {
                let refusal = Refusal::new(ErrorCode::Busy, failure.to_string());
                cx.replies.error(waiter.peer, &waiter.head, &refusal);
            }
        }
    }

    /// Continues a pull; an unfinished one goes to the end of the queue.
    fn read_on(&mut self, cx: &mut Context<'_>, mut pull: RowsPull) {
        let RowsPull { slot_index, waiter, answer, .. } = &mut pull;
        let bucket = self.table.chunks[*slot_index].bucket_mut().expect("a wish for rows is one to a bucket");
        let wish = waiter.wish.as_ref().expect("a pull of a bucket names its rows");
        if bucket.read(&mut self.rows_room, cx.kernels, wish, answer, &mut cx.replay_left) {
            let updates = Round(self.table.chunks[pull.slot_index].updates());
            if pull.waiter.head.flags.contains(Flags::STATE) && pull.entry.round != updates {
                let text = format!(
                    "{}: rows were updated while their state was read",
                    self.table.bucket_text(pull.slot_index)
                );
                cx.replies.error(pull.waiter.peer, &pull.waiter.head, &Refusal::new(ErrorCode::Busy, text));
                return;
            }
            pull.answer(cx);
        } else {
            self.slow_pulls.push_back(pull);
        }
    }

    /// Continues pulls that take several turns; true when there were any.
    pub(super) fn read_on_slow(&mut self, cx: &mut Context<'_>) -> bool {
        let count = self.slow_pulls.len();
        for _ in 0..count {
            if cx.replay_left == 0 {
                break;
            }
            let pull = self.slow_pulls.pop_front().expect("they were counted");
            self.read_on(cx, pull);
        }
        count > 0
    }

    /// Drops the pulls of a closed connection.
    pub(super) fn forget_pulls(&mut self, peer: PeerId) {
        self.slow_pulls.retain(|pull| pull.waiter.peer != peer);
    }
}

impl RowsPull {
    fn answer(self, cx: &mut Context<'_>) {
        cx.replies.value(self.waiter.peer, &self.waiter.head, self.entry, Arc::new(self.answer.value));
    }
}
