//! A trainer process: the same rounds, timed and checked in the same way, whoever the servers are.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::baseline::turns::Barrier;
use crate::child::{self, Ask, Ran, Verbs};
use crate::counters;
use crate::job::{BenchJob, ModeName};
use crate::pattern::{Expected, Pattern};

/// One trainer's end of a way to exchange a gradient for a value.
pub(crate) trait Exchange {
    /// Where the gradient is written.
    fn gradient(&mut self) -> &mut [u8];

    /// One round. It prepares what it needs, asks `begin` for the time to count from, and returns the time to its
    /// end; nothing is allocated or checked in between.
    fn round(&mut self, begin: &mut dyn FnMut() -> Instant) -> Result<Duration>;

    /// The value of the last round, whole.
    fn value(&mut self) -> &[u8];

    /// Brings the value to what all trainers' rounds made of it, where rounds are not waited for.
    fn settle(&mut self) -> Result<()>;

    /// The counters of verbs so far.
    fn verbs(&self) -> Verbs {
        Verbs::default()
    }
}

/// Runs rounds as the parent asks.
pub(crate) struct Runner<'a> {
    exchange: &'a mut dyn Exchange,
    pattern: Pattern,
    expected: Expected,
    barrier: Barrier,
    trainer: u32,
    round: u64,
    /// Whether each round's value is known; else only what many rounds come to.
    each: bool,
}

impl<'a> Runner<'a> {
    pub(crate) fn new(exchange: &'a mut dyn Exchange, job: &BenchJob, trainer: u32, barrier: Barrier) -> Result<Self> {
        Ok(Self {
            exchange,
            pattern: Pattern::of(job),
            expected: Expected::new(job)?,
            barrier,
            trainer,
            round: 0,
            each: job.mode == ModeName::Sync || job.trainers == 1,
        })
    }

    /// Answers the parent until it ends.
    pub(crate) fn serve(mut self) -> Result<()> {
        child::serve("trainer", |ask| match ask {
            Ask::Usage => Ok(serde_json::to_value(child::usage()?)?),
            Ask::Heard => Ok(serde_json::to_value(counters::heard())?),
            Ask::Run { rounds, rate, spoil } => Ok(serde_json::to_value(self.run(rounds, rate, spoil)?)?),
        })
    }

    /// Runs rounds and checks what comes back.
    pub(crate) fn run(&mut self, rounds: u32, rate: Option<f64>, spoil: bool) -> Result<Ran> {
        // Where only an even number of rounds has a known outcome, there is an even number.
        let rounds = if self.each { rounds } else { rounds.next_multiple_of(2) };
        let mut ran = Ran { seconds: Vec::with_capacity(rounds as usize), ..Ran::default() };
        let before = self.exchange.verbs();
        let origin = Instant::now();
        for index in 0..rounds {
            self.pattern.fill(self.trainer, self.round, self.exchange.gradient());
            let due = rate.map(|rate| origin + Duration::from_secs_f64(f64::from(index) / rate));
            let barrier = &mut self.barrier;
            let took = self.exchange.round(&mut || {
                barrier.wait();
                due.map_or_else(Instant::now, wait_until)
            })?;
            ran.seconds.push(took.as_secs_f64());
            self.round += 1;
            self.expected.advance();
            if self.each {
                ran.wrong += self.check(spoil);
            }
        }
        if !self.each {
            self.barrier.wait();
            self.exchange.settle()?;
            ran.wrong += self.check(spoil);
            self.barrier.wait();
        }
        let after = self.exchange.verbs();
        let (copies, registrations) =
            (after.copies.saturating_sub(before.copies), after.registrations.saturating_sub(before.registrations));
        ran.verbs = Verbs { copies, registrations, connections: after.connections };
        Ok(ran)
    }

    fn check(&mut self, spoil: bool) -> u64 {
        let value = self.exchange.value();
        if !spoil {
            return self.expected.wrong(value);
        }
        let mut spoiled = value.to_vec();
        spoiled[value.len() / 2] ^= 0x10;
        self.expected.wrong(&spoiled)
    }
}

/// Waits for the time to begin, awake for the last stretch, and hands it back.
fn wait_until(due: Instant) -> Instant {
    let doze = due.saturating_duration_since(Instant::now()).saturating_sub(Duration::from_micros(200));
    if !doze.is_zero() {
        std::thread::sleep(doze);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
    due
}
