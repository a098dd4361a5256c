//! The oracle knows every gradient that a trainer has sent and that a server has acknowledged, and checks every value
//! that a trainer gets.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use pserver_core::ids::ChunkId;

use crate::job::{BOUND, SimChunk, SimJob, SimMode, first_steps};

/// The gradients of one chunk, as sets of steps by trainer.
#[derive(Clone, Debug, Default)]
struct ChunkGradients {
    sent: Vec<u64>,
    acknowledged: Vec<u64>,
    /// The last number that trainer 0 has sent as its value, and the last one that was acknowledged.
    set: u64,
    acknowledged_set: u64,
    /// Steps before the first one of each trainer that was in a value since the trainer came back.
    before_return: Vec<u32>,
}

/// The oracle of one simulation.
pub(crate) struct Oracle {
    job: SimJob,
    chunks: BTreeMap<ChunkId, ChunkGradients>,
    pub(crate) values_checked: u64,
}

/// The acknowledged gradients of some chunks at a time, of each trainer, and the acknowledged number behind them: a
/// value that is asked for later contains them.
pub(crate) type Acknowledged = Vec<(ChunkId, Vec<u64>)>;

impl Oracle {
    pub(crate) fn new(job: SimJob) -> Self {
        Self { job, chunks: BTreeMap::new(), values_checked: 0 }
    }

    pub(crate) fn sent(&mut self, id: ChunkId, trainer: u32, step: u64) {
        self.chunk(id).sent[trainer as usize] |= 1 << (step - 1);
    }

    pub(crate) fn acknowledged(&mut self, id: ChunkId, trainer: u32, step: u64) {
        self.chunk(id).acknowledged[trainer as usize] |= 1 << (step - 1);
    }

    pub(crate) fn set(&mut self, id: ChunkId, number: u64) {
        self.chunk(id).set = number;
    }

    pub(crate) fn acknowledged_set(&mut self, id: ChunkId, number: u64) {
        let chunk = self.chunk(id);
        chunk.acknowledged_set = chunk.acknowledged_set.max(number);
    }

    /// The acknowledged gradients of each chunk, and the number that replaced its value.
    pub(crate) fn acknowledged_now<'a>(&mut self, chunks: impl Iterator<Item = &'a SimChunk>) -> Acknowledged {
        let mut acknowledged = |chunk: &SimChunk| {
            let known = self.chunk(chunk.id);
            known.acknowledged.iter().copied().chain([known.acknowledged_set]).collect()
        };
        chunks.map(|chunk| (chunk.id, acknowledged(chunk))).collect()
    }

    fn chunk(&mut self, id: ChunkId) -> &mut ChunkGradients {
        let none = || vec![0; self.job.trainers as usize];
        let before_return = || vec![u64::BITS; self.job.trainers as usize];
        let empty = || ChunkGradients {
            sent: none(),
            acknowledged: none(),
            before_return: before_return(),
            ..ChunkGradients::default()
        };
        self.chunks.entry(id).or_insert_with(empty)
    }

    /// Checks a value of this version, which was asked for when `before` was acknowledged. The value of a step has
    /// nothing that was set after the step.
    pub(crate) fn check(
        &mut self,
        chunk: &SimChunk,
        (version, of_step): (u64, Option<u64>),
        value: &[u8],
        before: &[u64],
    ) -> Result<()> {
        self.values_checked += 1;
        let id = chunk.id;
        let (acknowledged_set, before) = before.split_last().context("there is a number")?;
        if !chunk.has_gradients {
            return self.check_set(chunk, value, *acknowledged_set);
        }
        let context = || format!("chunk {}.{} at version {version}", id.parameter, id.chunk);
        let (found, base) = self.job.contents(chunk, version, value).with_context(context)?;
        let known = self.chunk(id).clone();
        // The version at which the value was replaced. Trainer 0 contributes to every round.
        let replaced_at = match found[0] {
            _ if base == 0.0 => 0,
            0 => version,
            steps => u64::from(steps.trailing_zeros()),
        };
        if chunk.is_set {
            self.check_number(chunk, base, *acknowledged_set)?;
            let is_of_step = base == 0.0 || of_step != Some(version) || replaced_at < version;
            ensure!(is_of_step, "{}: it is not the value of the step: {base} replaced that", context());
        }
        let count: u32 = found.iter().map(|set| set.count_ones()).sum();
        for (trainer, set) in found.iter().enumerate() {
            let here = self.job.steps_of(u32::try_from(trainer).expect("it is small"), chunk);
            let unknown = set & !known.sent[trainer];
            ensure!(unknown == 0, "{}: it contains steps {unknown:#b} of trainer {trainer}, never sent", context());
            if self.job.mode == SimMode::Sync {
                let last = self.job.lasts[trainer];
                let mut expected = first_steps(version.min(last)) & here;
                if self.job.misses_rounds(u32::try_from(trainer).expect("it is small")) {
                    // Rounds await it from the first one on that has its gradient again.
                    let again = (set & !first_steps(last)).trailing_zeros();
                    let before = &mut self.chunk(id).before_return[trainer];
                    *before = again.min(*before);
                    expected |= first_steps(version) & !first_steps(u64::from(*before)) & here;
                }
                ensure!(
                    *set == expected & !first_steps(replaced_at),
                    "{}: it contains steps {set:#b} of trainer {trainer}; expected {expected:#b}",
                    context()
                );
                continue;
            }
            let lost = before[trainer] & here & !set;
            ensure!(lost == 0, "{}: steps {lost:#b} of trainer {trainer} were acknowledged and are lost", context());
        }
        if self.job.mode == SimMode::Bounded && chunk.rows.is_none() && !self.job.has_leavers() {
            // A run levels the trainers' clocks.
            let first = first_steps(self.job.last(0, false));
            for run in [first, !first] {
                let counts: Vec<u32> = found.iter().map(|set| (set & run).count_ones()).collect();
                let ahead = counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0);
                ensure!(ahead <= BOUND + 1, "{}: a trainer is {ahead} steps ahead of another: {counts:?}", context());
            }
        }
        // A bucket's version also counts gradients without rows of it.
        let counts_all = self.job.mode == SimMode::Sync || chunk.rows.is_some();
        let updates = if counts_all { version } else { u64::from(count) };
        ensure!(version == updates, "{}: {count} gradients are in it; expected as many as updates", context());
        Ok(())
    }

    /// Checks a value that trainer 0 replaces: it is one that was sent, whole, and not older than the acknowledged one.
    fn check_set(&mut self, chunk: &SimChunk, value: &[u8], before: u64) -> Result<()> {
        let (first, rest) = value.split_at(4);
        let name = format!("chunk {}.{}, a set value", chunk.id.parameter, chunk.id.chunk);
        ensure!(rest.chunks_exact(4).all(|other| other == first), "{name}: it is of several sets");
        self.check_number(chunk, f32::from_le_bytes(first.try_into().expect("4 bytes")), before)
    }

    /// Checks a number that replaced a value: it was sent, and is not older than the acknowledged one.
    fn check_number(&mut self, chunk: &SimChunk, number: f32, before: u64) -> Result<()> {
        let name = format!("chunk {}.{}, a set value", chunk.id.parameter, chunk.id.chunk);
        let is_sent = (0..=self.chunk(chunk.id).set).any(|sent| sent as f32 == number);
        ensure!(is_sent, "{name}: {number} was never sent");
        ensure!(number >= before as f32, "{name}: {number} is older than {before}, which was acknowledged");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::ids::{ChunkIndex, ParameterIndex};
    use pserver_core::prng::Prng;

    use super::*;

    const ID: ChunkId = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
    const CHUNK: SimChunk = SimChunk { id: ID, bytes: 4096, rows: None, parts: 1, is_set: false, has_gradients: true };

    /// A job in this mode, of two trainers or more.
    fn job(mode: SimMode) -> SimJob {
        let mut jobs = (0..).map(|seed| SimJob::draw(&mut Prng(seed)));
        jobs.find(|job| job.mode == mode && job.trainers > 1 && job.is_plain()).expect("one seed in twelve has one")
    }

    /// A value of the job after these gradients of trainers and steps.
    fn value(job: &SimJob, gradients: &[(u32, u64)]) -> Vec<u8> {
        let mut value = vec![0.0_f32; 1024];
        for (trainer, step) in gradients {
            for (element, bytes) in value.iter_mut().zip(job.gradient(*trainer, *step, &CHUNK, 0).chunks_exact(4)) {
                *element -= f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            }
        }
        value.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    /// The oracle's verdict on a value with `found` in it, when `sent` was sent and `acknowledged` is acknowledged.
    fn check(sent: &[(u32, u64)], acknowledged: &[(u32, u64)], found: &[(u32, u64)], version: u64) -> Result<()> {
        let job = job(SimMode::Async);
        let value = value(&job, found);
        let mut oracle = Oracle::new(job);
        sent.iter().for_each(|(trainer, step)| oracle.sent(ID, *trainer, *step));
        acknowledged.iter().for_each(|(trainer, step)| oracle.acknowledged(ID, *trainer, *step));
        let before = oracle.acknowledged_now([&CHUNK].into_iter());
        oracle.check(&CHUNK, (version, None), &value, &before[0].1)
    }

    #[test]
    fn a_value_contains_each_acknowledged_gradient_once() {
        let sent = [(0, 1), (0, 2), (1, 1)];
        check(&sent, &[(0, 1), (1, 1)], &[(0, 1), (1, 1)], 2).expect("it has both");
        check(&sent, &[(0, 1)], &[(0, 1), (0, 2)], 2).expect("the second is not acknowledged yet");
        let refused = |acknowledged: &[_], found: &[_], version| {
            format!("{:#}", check(&sent, acknowledged, found, version).expect_err("it is wrong"))
        };
        assert!(refused(&[(0, 1), (1, 1)], &[(0, 1)], 1).contains("acknowledged and are lost"));
        assert!(refused(&[], &[(0, 1), (0, 1)], 2).contains("is [-2.0]; expected -1"));
        assert!(refused(&[], &[(1, 2)], 1).contains("never sent"));
        assert!(refused(&[], &[(0, 1)], 2).contains("expected as many as updates"));
    }

    #[test]
    fn in_mode_sync_a_value_is_of_whole_rounds() {
        let job = job(SimMode::Sync);
        let all: Vec<_> = (0..job.trainers).flat_map(|trainer| [(trainer, 1), (trainer, 2)]).collect();
        let mut oracle = Oracle::new(job.clone());
        all.iter().for_each(|(trainer, step)| oracle.sent(ID, *trainer, *step));
        let none = vec![0; job.trainers as usize + 1];
        let first: Vec<_> = all.iter().copied().filter(|(_, step)| *step == 1).collect();
        oracle.check(&CHUNK, (1, None), &value(&job, &first), &none).expect("it is of the first round");
        let late = oracle.check(&CHUNK, (1, None), &value(&job, &first[1..]), &none).expect_err("a trainer is missing");
        assert!(late.to_string().contains("of trainer 0; expected 0b1"), "{late}");
    }
}
