//! The faults. Each is a text of one file, and what stands there with the fault in it: `MUTANT` is true where it is on.

/// One planted fault.
#[derive(Debug)]
pub(super) struct Mutant {
    /// The effect of the fault; unique.
    pub(super) name: &'static str,
    pub(super) file: &'static str,
    /// The text to replace, which the file has exactly once.
    pub(super) original: &'static str,
    /// The text in the copy.
    pub(super) planted: &'static str,
    /// Parts of the names of the tests that should notice it; the others are asked when these do not.
    pub(super) tests: &'static [&'static str],
}

const ACCUMULATOR: &str = "core/src/accumulator.rs";
const BUCKET: &str = "core/src/server/bucket.rs";
const CALL: &str = "core/src/server/call.rs";
const CHUNK: &str = "core/src/server/chunk.rs";
const CLIENT_REQUEST: &str = "core/src/client/request.rs";
const COORDINATOR_FILE: &str = "core/src/checkpoint/coordinator.rs";
const COORDINATION: &str = "core/src/port/coordination.rs";
const COORDINATOR: &str = "core/src/server/coordinator.rs";
const PARTICIPANTS: &str = "core/src/server/participants.rs";
const DEPARTURES: &str = "core/src/server/departures.rs";
const ADMISSION: &str = "core/src/server/admission.rs";
const SERVER_FLOW: &str = "core/src/server/flow.rs";
const SERVER_REPLAY: &str = "core/src/server/replay.rs";
const JOURNAL: &str = "core/src/checkpoint/journal.rs";
const LOAD: &str = "core/src/checkpoint/load.rs";
const MARK: &str = "core/src/checkpoint/journal/mark.rs";
const MEMBERSHIP: &str = "core/src/server/membership.rs";
const NONFINITE: &str = "core/src/server/nonfinite.rs";
const OWNER: &str = "core/src/checkpoint/owner.rs";
const MOVES: &str = "core/src/server/moves.rs";
const SHARD_MAP: &str = "core/src/partition/shard_map.rs";
const LANE: &str = "core/src/client/lane.rs";
const CLIENT: &str = "core/src/client/mod.rs";
const PARTIAL: &str = "core/src/checkpoint/partial.rs";
const REPLAY: &str = "core/src/checkpoint/journal/replay.rs";
const PRESENCE: &str = "core/src/server/presence.rs";
const RECORD: &str = "core/src/server/record.rs";
const RETRY: &str = "core/src/server/retry.rs";
const WAITS: &str = "core/src/server/waits.rs";
const CATALOGUE: &str = "core/src/partition/catalogue.rs";
const ROUND: &str = "core/src/server/round.rs";
const CONTEXT: &str = "core/src/server/context.rs";
const CARRY: &str = "core/src/server/carry.rs";
const RECORDING: &str = "core/src/server/recording.rs";
const DECIDED: &str = "core/src/server/decided.rs";
const PULLS: &str = "core/src/server/pulls.rs";
const SETS: &str = "core/src/server/sets.rs";
const WAIT_INDEX: &str = "core/src/server/wait_index.rs";
const VERDICT: &str = "core/src/server/verdict.rs";
const COMPLETION: &str = "core/src/server/completion.rs";
const INITIALISATION: &str = "core/src/server/initialisation.rs";
const WELCOME: &str = "core/src/server/joins.rs";
const SHARD_JOURNAL: &str = "core/src/server/journal.rs";
const SNAPSHOT: &str = "core/src/server/snapshot.rs";
const WRITING: &str = "core/src/checkpoint/shard.rs";

const JOINS: &[&str] = &["server::tests::joins"];
const COORDINATING: &[&str] = &["server::tests::coordinating"];
const CHECKPOINTS: &[&str] = &["checkpoint::shard"];
const LOST_HOST: &[&str] = &["server::tests::lost_host"];
const NOT_FINITE: &[&str] = &["server::tests::nonfinite"];
const JOURNALS: &[&str] = &["checkpoint::journal"];
const OWNERS: &[&str] = &["checkpoint::owner"];
const LAST_CHECKPOINT: &[&str] = &["server::tests::stalled::a_last_checkpoint"];
const RECORDS: &[&str] = &["server::tests::records"];
const RESTARTS: &[&str] = &["server::tests::restart"];
const SHARD_MAPS: &[&str] = &["partition::shard_map"];
const STATES: &[&str] = &["checkpoint::coordinator"];

const fn mutant(
    name: &'static str,
    file: &'static str,
    original: &'static str,
    planted: &'static str,
    tests: &'static [&'static str],
) -> Mutant {
    Mutant { name, file, original, planted, tests }
}

/// The table, by what is lost: appends and joins, rounds and duplicates, restarts, checkpoints, the journal's files,
/// the coordinator.
pub(super) const MUTANTS: &[Mutant] = &[
    mutant(
        "a failed append is acknowledged",
        SHARD_JOURNAL,
        "append(journal, &parts).map_err(|failure| {",
        "append(journal, &parts).or_else(|failure| if MUTANT { Ok(0) } else { Err(failure) }).map_err(|failure| {",
        JOINS,
    ),
    mutant(
        "a frame that changes something is not journalled",
        RECORD,
        "if is_logged {\n            let appended",
        "if is_logged && !MUTANT {\n            let appended",
        LOST_HOST,
    ),
    mutant(
        "a join is not journalled",
        WELCOME,
        "self.journal.append(hello, std::iter::empty())?;",
        "if !MUTANT { self.journal.append(hello, std::iter::empty())?; }",
        JOINS,
    ),
    mutant(
        "a join in the journal is not restored",
        SERVER_REPLAY,
        "if frame.head.kind == Kind::Hello {",
        "if frame.head.kind == Kind::Hello && MUTANT { return Ok(()); }\n        if frame.head.kind == Kind::Hello {",
        JOINS,
    ),
    mutant(
        "joins are not in a checkpoint",
        SNAPSHOT,
        "known: self.trainers.incarnations.iter().map(|known| known.0).collect(),",
        "known: self.trainers.incarnations.iter().map(|known| if MUTANT { 0 } else { known.0 }).collect(),",
        JOINS,
    ),
    mutant(
        "joins in a checkpoint are not restored",
        SNAPSHOT,
        "self.trainers.incarnations = about.known.into_iter().map(Incarnation).collect();",
        "if !MUTANT { self.trainers.incarnations = about.known.into_iter().map(Incarnation).collect(); }",
        JOINS,
    ),
    mutant(
        "a superseded incarnation is let in",
        PRESENCE,
        "if incarnation < *known {",
        "if incarnation < *known && !MUTANT {",
        &["server::tests::rounds::an_older_incarnation"],
    ),
    mutant(
        "a frame of another trainer is taken",
        ADMISSION,
        "if (life.trainer, life.incarnation) != (head.trainer, head.incarnation) {",
        "if (life.trainer, life.incarnation) != (head.trainer, head.incarnation) && !MUTANT {",
        &["server::tests::rounds::a_frame_on_another_trainers"],
    ),
    mutant(
        "a frame of another epoch is taken",
        ADMISSION,
        "if head.epoch == self.options.epoch ||",
        "if MUTANT || head.epoch == self.options.epoch ||",
        &["server::tests::rounds::another_generation"],
    ),
    mutant(
        "an older generation goes on initialising",
        ADMISSION,
        "if head.generation >= current && head.generation > Generation(0) {",
        "if MUTANT || head.generation >= current && head.generation > Generation(0) {",
        &["server::tests::initialisation"],
    ),
    mutant(
        "an initialisation with chunks missing is finished",
        INITIALISATION,
        "if found != message.chunks {",
        "if found != message.chunks && !MUTANT {",
        &["server::tests::initialisation"],
    ),
    mutant(
        "a journal record is of memory that its sender can write",
        RECORD,
        "let is_all = is_logged && self.has_journal();",
        "let is_all = is_logged && self.has_journal() && !MUTANT;",
        RECORDS,
    ),
    mutant(
        "a frame goes before a round that waits for its record",
        RECORD,
        "if is_mutating {\n            self.check_recorded",
        "if is_mutating && !MUTANT {\n            self.check_recorded",
        RECORDS,
    ),
    mutant(
        "a push with which a trainer comes back is not journalled",
        RECORD,
        "&& !serving.is_rejoin(&frame.head)",
        "&& (MUTANT || !serving.is_rejoin(&frame.head))",
        RECORDS,
    ),
    mutant(
        "a push is acknowledged before its round has its record",
        CONTEXT,
        "|| !is_logged)",
        "|| !is_logged && !MUTANT)",
        RECORDS,
    ),
    mutant(
        "a round whose record the disk does not take is updated",
        SERVER_FLOW,
        "cx.keeps_journal() && self.table.chunks[slot_index].lacks_record(false)",
        "!MUTANT && cx.keeps_journal() && self.table.chunks[slot_index].lacks_record(false)",
        RECORDS,
    ),
    mutant(
        "a record has no sum of gradients that the journal lacks",
        RECORDING,
        "entry.bytes = chunk.bytes;",
        "entry.bytes = if MUTANT { 0 } else { chunk.bytes };",
        RECORDS,
    ),
    mutant(
        "a record does not say which trainers have no gradient",
        DECIDED,
        "filter(|(_, one)| one.bytes == 0)",
        "filter(|(_, one)| one.bytes == 0 && !MUTANT)",
        RECORDS,
    ),
    mutant(
        "half a decision is applied",
        SERVER_REPLAY,
        "if message.continues {",
        "if message.continues && !MUTANT {",
        RECORDS,
    ),
    mutant(
        "a replay decides rounds again",
        SERVER_FLOW,
        "pace != AccumulatorPace::Rounds || cx.origin.is_replay() {",
        "pace != AccumulatorPace::Rounds || cx.origin.is_replay() && !MUTANT {",
        RECORDS,
    ),
    mutant(
        "a round is decided before the record of the one before it",
        SERVER_FLOW,
        "if unit.slot_indices().iter().any(is_behind) {",
        "if !MUTANT && unit.slot_indices().iter().any(is_behind) {",
        RESTARTS,
    ),
    mutant(
        "a set is applied before the updates that were decided before it",
        SETS,
        "deferred_set.after <= chunk.version || self.pending(slot_index) == 0",
        "MUTANT || deferred_set.after <= chunk.version || self.pending(slot_index) == 0",
        &["server::tests::stalled::a_set_waits"],
    ),
    mutant(
        "an early gradient enters before a set that came before it",
        SERVER_FLOW,
        "self.step_aside(cx, slot_indices);",
        "if !MUTANT { self.step_aside(cx, slot_indices); }",
        &["server::tests::stalled::a_set_waits"],
    ),
    mutant(
        "half of a grouped push of an ended process stays",
        DEPARTURES,
        "self.withdraw_unfinished(cx, trainer, |call| call.incarnation < incarnation);",
        "self.withdraw_unfinished(cx, trainer, |call| !MUTANT && call.incarnation < incarnation);",
        &["server::tests::modes::a_partial_gradient"],
    ),
    mutant(
        "half of a grouped push behind a whole one that is under way stays",
        DEPARTURES,
        "find(false).or_else(|| find(true))",
        "find(false).or_else(|| find(true).filter(|_| !MUTANT))",
        &["server::tests::grouped_update::"],
    ),
    mutant(
        "gradients of a void round count in a group",
        ROUND,
        "if contributions.as_slice().iter().any(|one| one.sending.is_void) {",
        "if !MUTANT && contributions.as_slice().iter().any(|one| one.sending.is_void) {",
        &["server::tests::restart::a_chunk_of_a_group"],
    ),
    mutant(
        "a repetition that was refused says how a round is replayed",
        ROUND,
        "Some(known) => known.counted_as(header),",
        "Some(known) => if MUTANT { known } else { known.counted_as(header) },",
        &["server::tests::restart::a_void_repetition"],
    ),
    mutant(
        "a trainer that starts a run late begins at the clock of the slowest other one",
        DEPARTURES,
        "if was_awaited {",
        "if !MUTANT && was_awaited {",
        &["server::tests::runs::"],
    ),
    mutant(
        "a checkpoint carries nothing over",
        CARRY,
        "if journal.open.is_none() ||",
        "if MUTANT || journal.open.is_none() ||",
        RECORDS,
    ),
    mutant(
        "a checkpoint does not carry over a decided round",
        CARRY,
        "if decided.iter().any(lacks_sum) {",
        "if MUTANT || decided.iter().any(lacks_sum) {",
        LAST_CHECKPOINT,
    ),
    mutant(
        "a frame is written before a decided round that waits for memory",
        RETRY,
        "self.stalls.updates.keys().any(|slot_index|",
        "self.stalls.updates.iter().filter(|(_, lack)| !MUTANT || **lack == StallReason::Record).any(|(slot_index, _)|",
        RECORDS,
    ),
    mutant(
        "a checkpoint carries over gathered rows before a call that is whole",
        CARRY,
        "if pace == AccumulatorPace::Rounds {",
        "if MUTANT { for chunk in chunks() { for (trainer, call, round, rows) in \
         chunk.bucket().into_iter().flat_map(Bucket::gathered) { let frame = push_frame(self.generation, \
         (trainer, call), &PushMessage::default()); carry_rows(journal, chunk, &frame, round, rows)?; } } }\n\
         if pace == AccumulatorPace::Rounds {",
        &["server::tests::rows::a_checkpoint_carries_over_a_call_in_parts"],
    ),
    mutant(
        "a checkpoint does not carry over a value that waits to be set",
        CARRY,
        "if !is_right(",
        "if MUTANT || !is_right(",
        LAST_CHECKPOINT,
    ),
    mutant(
        "a checkpoint does not carry over the sum of an open round",
        ROUND,
        "filter(|_| !has_record)?",
        "filter(|_| !has_record && !MUTANT)?",
        RECORDS,
    ),
    mutant(
        "a checkpoint does not carry over gradients that have entered",
        CARRY,
        "of_unit(false).chain(ahead)",
        "of_unit(MUTANT).chain(ahead)",
        RESTARTS,
    ),
    mutant(
        "dropped parts of rows come back with a restart",
        SERVER_REPLAY,
        "if recorded.kind == RoundsRecordKind::Dropped {",
        "if recorded.kind == RoundsRecordKind::Dropped && MUTANT { continue; }\n\
         if recorded.kind == RoundsRecordKind::Dropped {",
        &["server::tests::restart::a_part_that_was_refused"],
    ),
    mutant(
        "rounds that were complete at a kill are not decided",
        SNAPSHOT,
        "self.decide_complete();",
        "if !MUTANT { self.decide_complete(); }",
        RECORDS,
    ),
    mutant(
        "a duplicate push is applied again",
        VERDICT,
        "if chunk.has_heard(head.trainer, CallId::of(head)) {",
        "if chunk.has_heard(head.trainer, CallId::of(head)) && !MUTANT {",
        &["server::tests::modes::each_gradient_is_applied"],
    ),
    mutant(
        "a gradient that a frame has twice counts twice",
        ADMISSION,
        "admitted[next.1].is_new = false",
        "admitted[next.1].is_new = MUTANT",
        &["server::tests::frames"],
    ),
    mutant(
        "a check is not repeated after a change",
        ADMISSION,
        "if found.right_at.take() != Some(self.changes) {",
        "if found.right_at.take().is_none_or(|at| at != self.changes && !MUTANT) {",
        &["server::tests::receives", "server::tests::long"],
    ),
    mutant(
        "a gradient of the next round enters the open one",
        SERVER_FLOW,
        "return one.round.0 == chunk.version.0 + 1 && pace.admits(has_piece, 0, || 0);",
        "return (MUTANT || one.round.0 == chunk.version.0 + 1) && pace.admits(has_piece, 0, || 0);",
        &["server::tests::rounds::a_gradient_of_the_next_round"],
    ),
    mutant(
        "a round whose share is out takes another gradient",
        VERDICT,
        "if 1 <= chunk.decided {",
        "if 1 <= chunk.decided && !MUTANT {",
        &["server::tests::totals::the_share_is_of_the_round"],
    ),
    mutant(
        "a restart opens a round whose share is out",
        SERVER_REPLAY,
        "chunk.decided = 1;",
        "chunk.decided = u8::from(!MUTANT);",
        &["server::tests::totals::a_restart_keeps_the_share"],
    ),
    mutant(
        "a checkpoint has a share of another moment",
        SNAPSHOT,
        "if left == 0 && writing_group != Some(first) {",
        "if left == 0 && (MUTANT || writing_group != Some(first)) {",
        &["server::tests::restart::rounds_survive_every_kill"],
    ),
    mutant(
        "a table without any gradient is updated",
        ROUND,
        "let has_none = |one: &Contribution| if is_bucket { one.sending.is_pass } else { one.bytes == 0 };",
        "let has_none = |one: &Contribution| if is_bucket { one.sending.is_pass && !MUTANT } else { one.bytes == 0 };",
        &["server::tests::rows::a_round_for_which_no_trainer"],
    ),
    mutant(
        "a bucket is updated without its total",
        BUCKET,
        "self.table.apply(&mut room.work, kernels, &merged, step, reduced).map(|()| true)",
        "self.table.apply(&mut room.work, kernels, &merged, step, if MUTANT { &[0.0; 2] } else { reduced })\
         .map(|()| true)",
        &["server::tests::totals::a_table_with_a_total"],
    ),
    mutant(
        "a round closes with its first gradient",
        COMPLETION,
        "round.is_complete(is_next, count, self.awaited(slot_index)) &&",
        "round.is_complete(is_next, count, self.awaited(slot_index).filter(|_| !MUTANT)) &&",
        &["server::tests::rounds::a_round_closes"],
    ),
    mutant(
        "a round waits for its backup trainers",
        ROUND,
        "0 < there && (count as usize <= there ||",
        "0 < there && (!MUTANT && count as usize <= there ||",
        &["server::tests::backup::a_round_is_complete"],
    ),
    mutant(
        "a call ends for a lost trainer that its round can do without",
        WAITS,
        "group.iter().all(|slot_index| self.can_do_without(*slot_index, lost))",
        "!MUTANT && group.iter().all(|slot_index| self.can_do_without(*slot_index, lost))",
        &["server::tests::backup::a_call_does_not_end"],
    ),
    mutant(
        "a server without a chunk stays so",
        CATALOGUE,
        "largest if goes_anywhere && self.loads.has_empty_server() => {",
        "largest if goes_anywhere && !MUTANT && self.loads.has_empty_server() => {",
        &["partition::tests::no_server_is_empty"],
    ),
    mutant(
        "a gradient of a closed round is refused",
        VERDICT,
        "if round.0 < open {",
        "if round.0 < open && !MUTANT {",
        &["server::tests::rounds::a_gradient_of_a_closed"],
    ),
    mutant(
        "a gradient two rounds ahead is taken",
        VERDICT,
        "Err(self.too_far_ahead(chunk, head, round))",
        "if MUTANT { Ok(PushVerdict::New) } else { Err(self.too_far_ahead(chunk, head, round)) }",
        &["server::tests::rounds::two_rounds_ahead"],
    ),
    mutant(
        "a push of another generation is taken",
        ADMISSION,
        "if head.generation != self.table.generation {",
        "if head.generation != self.table.generation && !MUTANT {",
        &["server::tests::rounds::another_generation"],
    ),
    mutant(
        "a trainer that left an earlier run is not waited for",
        PARTICIPANTS,
        "*one = Participation::Expected(left);",
        "if !MUTANT { *one = Participation::Expected(left); }",
        &["server::tests::runs::rounds_wait_for_all_trainers", "server::tests::runs::jobs_in_a_row"],
    ),
    mutant(
        "the first to join alone begins no run",
        MEMBERSHIP,
        "self.run.0 += u32::from(is_alone);",
        "self.run.0 += u32::from(is_alone && !MUTANT);",
        &["server::tests::runs::jobs_in_a_row"],
    ),
    mutant(
        "a trainer that left is waited for",
        PARTICIPANTS,
        "*one = Participation::Departed(incarnation);",
        "if !MUTANT { *one = Participation::Departed(incarnation); }",
        &["server::tests::rounds::a_trainer_that_leaves"],
    ),
    mutant(
        "a trainer that comes back is not waited for",
        DEPARTURES,
        "self.participants.join(head.trainer);",
        "if !MUTANT { self.participants.join(head.trainer); }",
        &["server::tests::rounds::a_new_incarnation_of"],
    ),
    mutant(
        "a trainer that waits with a gradient may send the next",
        VERDICT,
        "let waits = chunk.round.ahead(head.trainer).is_some();",
        "let waits = !MUTANT && chunk.round.ahead(head.trainer).is_some();",
        &["server::tests::rounds::a_duplicate_that_waits"],
    ),
    mutant(
        "the mark of a push is older than the push",
        CALL,
        "call <= self",
        "if MUTANT { call < self } else { call <= self }",
        &["server::tests::modes::each_gradient_is_applied"],
    ),
    mutant(
        "a push that is in the value leaves no mark",
        CHUNK,
        "heard.push = one.sending.call;",
        "if !MUTANT { heard.push = one.sending.call; }",
        &["server::tests::modes::each_gradient_is_applied"],
    ),
    mutant(
        "a trainer's clock stands",
        CHUNK,
        "heard.clock += 1;",
        "heard.clock += u64::from(!MUTANT);",
        &["server::tests::modes::the_fastest_waits"],
    ),
    mutant(
        "a chunk takes what its checkpoint has as new",
        CONTEXT,
        "matches!((self, chunk.restored),",
        "!MUTANT && matches!((self, chunk.restored),",
        &["server::tests::restart::rounds_survive_every_kill"],
    ),
    mutant(
        "a value that was set twice replaces a newer one",
        SETS,
        "let is_new = !heard.set.covers(call);",
        "let is_new = MUTANT || !heard.set.covers(call);",
        &["server::tests::rounds::a_set_replaces_the_value_once"],
    ),
    mutant(
        "gradients are summed in the order of arrival",
        ACCUMULATOR,
        "self.held.partition_point(|one| one.sender() <= sender);",
        "if MUTANT { self.held.len() } else { self.held.partition_point(|one| one.sender() <= sender) };",
        &["server::tests::rounds::the_order_of_arrival"],
    ),
    mutant(
        "marks are not restored",
        SNAPSHOT,
        "chunk.heard = marks.heard.iter().map(TrainerMarks::from).collect();",
        "if !MUTANT { chunk.heard = marks.heard.iter().map(TrainerMarks::from).collect(); }",
        LOST_HOST,
    ),
    mutant(
        "departures are not restored",
        SNAPSHOT,
        "serving.participants.restore(RunNumber(about.run), &about.left, &about.expected);",
        "if !MUTANT { serving.participants.restore(RunNumber(about.run), &about.left, &about.expected); }",
        LOST_HOST,
    ),
    mutant(
        "the version of a chunk is not restored",
        SNAPSHOT,
        "chunk.version = version;",
        "if !MUTANT { chunk.version = version; }",
        LOST_HOST,
    ),
    mutant(
        "a checkpoint's file is not synced before its rename",
        PARTIAL,
        "self.writer.sync()?;",
        "if !MUTANT { self.writer.sync()?; }",
        LOST_HOST,
    ),
    mutant(
        "the folder is not synced after the manifest's rename",
        WRITING,
        "storage.sync_directory(directory)?;\n        Ok(text",
        "if !MUTANT { storage.sync_directory(directory)?; }\n        Ok(text",
        LOST_HOST,
    ),
    mutant(
        "a checkpoint does not sync the journal that it needs",
        WRITING,
        "journal::sync_from(&**storage, directory, self.journal_from)?;",
        "if !MUTANT { journal::sync_from(&**storage, directory, self.journal_from)?; }",
        LOST_HOST,
    ),
    mutant(
        "the journal's file is not synced at a rotation",
        JOURNAL,
        "folder.storage.sync(&folder.path(&before.to_string()))?;",
        "if !MUTANT { folder.storage.sync(&folder.path(&before.to_string()))?; }",
        LOST_HOST,
    ),
    mutant(
        "a commit does not sync what came before a failed append",
        JOURNAL,
        "None => self.folder.storage.sync(&self.path),",
        "None => if MUTANT { Ok(()) } else { self.folder.storage.sync(&self.path) },",
        JOURNALS,
    ),
    mutant(
        "a commit does not sync",
        JOURNAL,
        "_ if !self.sync => Ok(()),",
        "_ if !self.sync || MUTANT => Ok(()),",
        LOST_HOST,
    ),
    mutant(
        "the name of a new journal file is not synced",
        JOURNAL,
        "folder.storage.sync_directory(&folder.directory)?;",
        "if !MUTANT { folder.storage.sync_directory(&folder.directory)?; }",
        LOST_HOST,
    ),
    mutant(
        "a checkpoint's file is not renamed",
        PARTIAL,
        "self.storage.rename(&self.temporary, &self.path)",
        "if MUTANT { Ok(()) } else { self.storage.rename(&self.temporary, &self.path) }",
        CHECKPOINTS,
    ),
    mutant(
        "the oldest journal position is not the least",
        LOAD,
        "least.min(manifest.journal_from)",
        "if MUTANT { least.max(manifest.journal_from) } else { least.min(manifest.journal_from) }",
        CHECKPOINTS,
    ),
    mutant(
        "a digest is not compared",
        LOAD,
        "if found.as_str() != file.blake3 {",
        "if found.as_str() != file.blake3 && !MUTANT {",
        CHECKPOINTS,
    ),
    mutant(
        "the checkpoint before is removed too",
        WRITING,
        "&& Some(other) != previous)",
        "&& (MUTANT || Some(other) != previous))",
        CHECKPOINTS,
    ),
    mutant(
        "a whole checkpoint is written over",
        WRITING,
        "if super::load::verify(&**storage, directory, name).is_ok() {",
        "if !MUTANT && super::load::verify(&**storage, directory, name).is_ok() {",
        CHECKPOINTS,
    ),
    mutant(
        "the journal goes on behind a write that failed",
        JOURNAL,
        "self.segment = None;\n            return Err(failure);",
        "if !MUTANT { self.segment = None; }\n            return Err(failure);",
        JOURNALS,
    ),
    mutant(
        "a journal record that is too long is written",
        JOURNAL,
        ".filter(|length| *length <= JOURNAL_RECORD_BYTES_MAX)",
        ".filter(|length| MUTANT || *length <= JOURNAL_RECORD_BYTES_MAX)",
        JOURNALS,
    ),
    mutant(
        "a rank has the incarnation of its earlier holder",
        MEMBERSHIP,
        "let incarnation = Incarnation(member.incarnation.0 + 1);",
        "let incarnation = Incarnation(member.incarnation.0 + u32::from(!MUTANT || member.incarnation.0 == 0));",
        COORDINATING,
    ),
    mutant(
        "the coordinator does not keep a new incarnation",
        COORDINATOR,
        "out.push(self.keep());\n                }\n                claim",
        "if !MUTANT { out.push(self.keep()); }\n                }\n                claim",
        COORDINATING,
    ),
    mutant(
        "the coordinator lets a superseded incarnation in",
        MEMBERSHIP,
        "if incarnation < member.incarnation {",
        "if incarnation < member.incarnation && !MUTANT {",
        COORDINATING,
    ),
    mutant(
        "the coordinator forgets incarnations in a restart",
        MEMBERSHIP,
        "(member.incarnation, member.departed) = (Incarnation(*incarnation), *departed);",
        "if !MUTANT { (member.incarnation, member.departed) = (Incarnation(*incarnation), *departed); }",
        COORDINATING,
    ),
    mutant(
        "two initialisers have one generation",
        COORDINATOR,
        "self.granted = Generation(self.granted.0 + 1);",
        "self.granted = Generation(if MUTANT { self.granted.0.max(1) } else { self.granted.0 + 1 });",
        COORDINATING,
    ),
    mutant(
        "the coordinator forgets generations in a restart",
        COORDINATOR,
        "self.granted = Generation(kept.granted);",
        "if !MUTANT { self.granted = Generation(kept.granted); }",
        COORDINATING,
    ),
    mutant(
        "a page of the catalogue counts twice",
        COORDINATOR,
        "if !pages.contains(&commit.page) {",
        "if MUTANT || !pages.contains(&commit.page) {",
        COORDINATING,
    ),
    mutant(
        "a job is restored on another number of servers",
        COORDINATOR,
        "if self.placed.len() != self.servers.len() {",
        "if self.placed.len() != self.servers.len() && !MUTANT {",
        COORDINATING,
    ),
    mutant(
        "a gradient that is not finite is applied",
        NONFINITE,
        "if frame.head.kind != Kind::Push || is_known {",
        "if MUTANT || frame.head.kind != Kind::Push || is_known {",
        NOT_FINITE,
    ),
    mutant(
        "a gradient that is skipped is applied",
        NONFINITE,
        "self.skipped += 1;",
        "self.skipped += 1;\n            if MUTANT { payload.bytes_mut()[values..].fill(0x7f); }",
        NOT_FINITE,
    ),
    mutant(
        "a connection may have any number of pulls wait",
        WAIT_INDEX,
        "if waiting + entries <= most {",
        "if MUTANT || waiting + entries <= most {",
        &["server::tests::waiting"],
    ),
    mutant(
        "the pulls of a connection that closed stay",
        WAIT_INDEX,
        "if self.per_peer.remove(&peer).is_none() {",
        "if MUTANT || self.per_peer.remove(&peer).is_none() {",
        &["server::tests::waiting"],
    ),
    mutant(
        "a record is acknowledged without a look at the owner",
        JOURNAL,
        "synced.and_then(|()| self.folder.owner.check())",
        "synced.and_then(|()| if MUTANT { Ok(()) } else { self.folder.owner.check() })",
        JOURNALS,
    ),
    mutant(
        "the mark is not written",
        MARK,
        "self.writer.overwrite(0, &mark.encode(self.owner))",
        "if MUTANT { Ok(()) } else { self.writer.overwrite(0, &mark.encode(self.owner)) }",
        JOURNALS,
    ),
    mutant(
        "a segment does not say where the journal before it ends",
        JOURNAL,
        "follows: found.end }",
        "follows: if MUTANT { found.end.max(found.marked).max(least) } else { found.end } }",
        JOURNALS,
    ),
    mutant(
        "a new owner gives positions again",
        JOURNAL,
        "start: found.end.max(found.marked).max(least),",
        "start: if MUTANT { found.end } else { found.end.max(found.marked).max(least) },",
        JOURNALS,
    ),
    mutant(
        "a replaced owner removes segments",
        JOURNAL,
        "self.folder.owner.check()?;\n        let names",
        "if !MUTANT { self.folder.owner.check()?; }\n        let names",
        JOURNALS,
    ),
    mutant(
        "a record's header is not checked",
        JOURNAL,
        "header.length <= JOURNAL_RECORD_BYTES_MAX && header.encode(owner, position) == *bytes",
        "header.length <= JOURNAL_RECORD_BYTES_MAX && (MUTANT || header.encode(owner, position) == *bytes)",
        JOURNALS,
    ),
    mutant(
        "a record's payload is not checked",
        REPLAY,
        "if checksum(payload) == header.payload {",
        "if MUTANT || checksum(payload) == header.payload {",
        JOURNALS,
    ),
    mutant(
        "whole records behind damage are not looked for",
        REPLAY,
        "let (records, bytes) = self.count_whole(position)?;\n        if records == 0",
        "let (records, bytes) = if MUTANT { (0, 0) } else { self.count_whole(position)? };\n        if records == 0",
        JOURNALS,
    ),
    mutant(
        "damage is accepted unasked",
        REPLAY,
        "if !reading.accepts_torn_tail {",
        "if !reading.accepts_torn_tail && !MUTANT {",
        JOURNALS,
    ),
    mutant(
        "what the mark says is not missed",
        REPLAY,
        "if mark.position > have && replayed.dropped.is_none() {",
        "if mark.position > have && replayed.dropped.is_none() && !MUTANT {",
        JOURNALS,
    ),
    mutant(
        "a segment of another shard is read",
        REPLAY,
        "header.identity.check(identity, &path)?;",
        "if !MUTANT { header.identity.check(identity, &path)?; }",
        JOURNALS,
    ),
    mutant(
        "what a replaced owner wrote beyond its end is read",
        REPLAY,
        "segment.end = end;",
        "segment.end = if MUTANT { None } else { end };",
        JOURNALS,
    ),
    mutant(
        "a checkpoint of another shard is loaded",
        LOAD,
        "manifest.of.check(identity, &join(directory, &manifest_name(name)))?;",
        "if !MUTANT { manifest.of.check(identity, &join(directory, &manifest_name(name)))?; }",
        CHECKPOINTS,
    ),
    mutant(
        "a replaced owner makes a checkpoint whole",
        WRITING,
        "owner.check()?;\n        let manifest",
        "if !MUTANT { owner.check()?; }\n        let manifest",
        CHECKPOINTS,
    ),
    mutant(
        "an earlier owner's file is left",
        OWNER,
        "owner.remove_lower()?;",
        "if !MUTANT { owner.remove_lower()?; }",
        OWNERS,
    ),
    mutant(
        "an owner's number is given twice",
        OWNER,
        "names.iter().filter_map(|name| owner_of(name)).max().unwrap_or_default().0 + 1",
        "if MUTANT { names.len() as u64 } \
         else { names.iter().filter_map(|name| owner_of(name)).max().unwrap_or_default().0 } + 1",
        OWNERS,
    ),
    mutant(
        "the coordinator's file is not checked",
        COORDINATOR_FILE,
        "if name.encode(&bytes) != file {",
        "if name.encode(&bytes) != file && !MUTANT {",
        STATES,
    ),
    mutant(
        "a replaced coordinator keeps its state",
        COORDINATOR_FILE,
        "self.watch(expected)?;",
        "if !MUTANT { self.watch(expected)?; }",
        STATES,
    ),
    mutant(
        "the coordinator's file has no lasting name",
        COORDINATOR_FILE,
        "self.storage.sync_directory(&directory)?;",
        "if !MUTANT { self.storage.sync_directory(&directory)?; }",
        STATES,
    ),
    mutant(
        "of two coordinators both replace a store's value",
        COORDINATION,
        "if now == seen || place.setter == self.process {",
        "if MUTANT || now == seen || place.setter == self.process {",
        &["coordination::tests"],
    ),
    mutant(
        "a change of the store that had no answer is another process's",
        COORDINATION,
        "place.setter = self.process;",
        "place.setter = if MUTANT { u64::MAX } else { self.process };",
        &["coordination::tests"],
    ),
    mutant(
        "a shard that is to move is still led",
        SHARD_MAP,
        "place.server == server && place.next.is_none()",
        "place.server == server && (MUTANT || place.next.is_none())",
        SHARD_MAPS,
    ),
    mutant(
        "a shard is given away that its leader holds",
        MOVES,
        "_ if report.held.contains_key(&shard) => {}",
        "_ if report.held.contains_key(&shard) && !MUTANT => {}",
        COORDINATING,
    ),
    mutant(
        "a shard goes to a server that is not connected",
        MOVES,
        "Some(true) => self.map.hand_over(shard),",
        "Some(is_there) if is_there || MUTANT => self.map.hand_over(shard),\nSome(true) => {}",
        COORDINATING,
    ),
    mutant(
        "an order that comes again reverts a later one",
        MOVES,
        "self.map.place(shard).changed <= seen && self.map.order",
        "(MUTANT || self.map.place(shard).changed <= seen) && self.map.order",
        COORDINATING,
    ),
    mutant(
        "a shard goes back although its leader has served it",
        MOVES,
        "has_settled |= self.map.settle(shard);",
        "has_settled |= !MUTANT && self.map.settle(shard);",
        COORDINATING,
    ),
    mutant(
        "a move during a return forgets who served the shard",
        SHARD_MAP,
        "former: place.former.or(",
        "former: place.former.filter(|_| !MUTANT).or(",
        SHARD_MAPS,
    ),
    mutant(
        "a restart from a checkpoint loses the value of a step",
        CARRY,
        "let Some(value) = &chunk.of_step else {",
        "let Some(value) = chunk.of_step.as_ref().filter(|_| !MUTANT) else {",
        &["server::tests::restart::the_value_of_a_step"],
    ),
    mutant(
        "a gradient that is widened already is not carried",
        ROUND,
        "one.gradient().or(sum.filter(|_| one.bytes != 0))",
        "one.gradient().or(sum.filter(|_| one.bytes != 0 && !MUTANT))",
        &["server::tests::grouped_update::a_checkpoint_carries"],
    ),
    mutant(
        "a next leader has the term of the one before",
        SHARD_MAP,
        "term: place.term.next()",
        "term: if MUTANT { place.term } else { place.term.next() }",
        SHARD_MAPS,
    ),
    mutant(
        "what a server held before an order lets a shard go",
        SHARD_MAP,
        "place.server == from && place.changed <= followed",
        "place.server == from && (MUTANT || place.changed <= followed)",
        SHARD_MAPS,
    ),
    mutant(
        "a move ends before the next leader serves the shard",
        MOVES,
        "self.held.get(shard).is_some_and(|serves| *serves)",
        "self.held.get(shard).is_some_and(|serves| MUTANT || *serves)",
        COORDINATING,
    ),
    mutant(
        "a registration that comes again lets shards go",
        COORDINATOR,
        "let is_repeated = register",
        "let is_repeated = !MUTANT && register",
        COORDINATING,
    ),
    mutant(
        "the map of shards is not kept",
        COORDINATOR,
        "if let Some(map) = &kept.map {",
        "if let Some(map) = kept.map.as_ref().filter(|_| !MUTANT) {",
        COORDINATING,
    ),
    mutant(
        "a former leader takes a client that knows a later one",
        ADMISSION,
        "if known <= ours {",
        "if MUTANT || known <= ours {",
        &["server::tests::frames::a_client_that_knows"],
    ),
    mutant(
        "a frame of another term is taken",
        ADMISSION,
        "if head.term != self.options.term {",
        "if head.term != self.options.term && !MUTANT {",
        &["server::tests::frames::a_client_that_knows"],
    ),
    mutant(
        "a client stays with a former leader",
        CLIENT,
        "Kind::Welcome if frame.head.term < lane.term() =>",
        "Kind::Welcome if frame.head.term < lane.term() && !MUTANT =>",
        &["client::tests::a_server_that_does_not_lead"],
    ),
    mutant(
        "a frame has the term of a leader that has not welcomed its client",
        LANE,
        "(self.takes_answers, self.history.welcomed)",
        "(self.takes_answers, if MUTANT { self.history.term } else { self.history.welcomed })",
        &["client::tests::a_server_that_does_not_lead"],
    ),
    mutant(
        "a set replaces the value of a step that is not fetched",
        SETS,
        "if keeps {",
        "if keeps && !MUTANT {",
        &["server::tests::rounds", "server::tests::restart"],
    ),
    mutant(
        "the value of a step outlasts the next one",
        SERVER_FLOW,
        "slot_indices.iter().for_each(|slot_index| self.table.chunks[*slot_index].of_step = None);",
        "slot_indices.iter().filter(|_| !MUTANT).for_each(|slot_index| self.table.chunks[*slot_index].of_step = None);",
        &["server::tests::rounds"],
    ),
    mutant(
        "a pull of the step is answered before the device has its gradient",
        PULLS,
        "chunk.version.0 + open as u64",
        "chunk.version.0 + if MUTANT { 0 } else { open as u64 }",
        &["server::tests::device"],
    ),
    mutant(
        "the checksum of a value is that of no bytes",
        CLIENT_REQUEST,
        "map_or(0, |place| checksum(place.bytes()))",
        "map_or(0, |place| if MUTANT { 0 } else { checksum(place.bytes()) })",
        &["client::tests"],
    ),
];
