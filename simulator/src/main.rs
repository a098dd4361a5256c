//! `pserver-simulate`: simulations of many seeds, with what they have covered.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use clap::Parser;
use pserver_client::console;
use pserver_simulator::{SeedOutcome, SimCase, run_seed};

/// Simulates whole clusters under faults that follow from seeds.
#[derive(Parser)]
struct SimulateArgs {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The least number of events of each seed.
    #[arg(long, default_value_t = 2000)]
    events: u64,
    /// Threads, each with seeds of its own.
    #[arg(long, default_value_t = 2)]
    threads: u64,
    /// Runs each seed twice and compares the two.
    #[arg(long)]
    twice: bool,
    /// Runs these kept cases alone.
    #[arg(long, num_args = 1..)]
    cases: Vec<PathBuf>,
    /// The folder that gets the case of each failure.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// The outcome of all seeds.
#[derive(Default)]
struct Totals {
    events: u64,
    /// Seeds that show each thing, and how often it happened in all.
    seen: BTreeMap<&'static str, (u64, u64)>,
    failures: Vec<String>,
}

fn main() -> Result<ExitCode> {
    let args = SimulateArgs::parse();
    if !args.cases.is_empty() {
        return run_cases(&args.cases);
    }
    let totals = Mutex::<Totals>::default();
    let next = AtomicU64::new(args.seed);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads).map(|_| scope.spawn(|| work(&args, &next, &totals))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (what, (seeds, count)) in &totals.seen {
        console::print(format_args!("{what:55} {seeds:8} seeds {count:12} times\n"))?;
    }
    totals.failures.iter().try_for_each(|failure| console::print(format_args!("{failure}\n")))?;
    let (seeds, events, failed) = (args.seeds, totals.events, totals.failures.len());
    console::print(format_args!("{seeds} seeds, {events} events, {failed} failed\n"))?;
    Ok(if totals.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_cases(paths: &[PathBuf]) -> Result<ExitCode> {
    let mut ended = ExitCode::SUCCESS;
    for path in paths {
        let case: SimCase = serde_json::from_str(&fs::read_to_string(path)?)?;
        match case.run()? {
            None => console::print(format_args!("{}: everything held\n", path.display()))?,
            Some(failure) => {
                console::print(format_args!("{}: {failure}\n", path.display()))?;
                ended = ExitCode::FAILURE;
            }
        }
    }
    Ok(ended)
}

fn work(args: &SimulateArgs, next: &AtomicU64, totals: &Mutex<Totals>) -> Result<()> {
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= args.seed + args.seeds {
            return Ok(());
        }
        let outcome = run_seed(seed, args.events)?;
        let again = if args.twice { Some(run_seed(seed, args.events)?.digest) } else { None };
        totals.lock().unwrap_or_else(PoisonError::into_inner).add(seed, &outcome, again, args.keep.as_deref())?;
    }
}

impl Totals {
    fn add(&mut self, seed: u64, outcome: &SeedOutcome, again: Option<u64>, keep: Option<&Path>) -> Result<()> {
        self.events += outcome.events;
        for (what, count) in &outcome.seen {
            let (seeds, total) = self.seen.entry(what).or_default();
            (*seeds, *total) = (*seeds + 1, *total + count);
        }
        if let Some(failure) = &outcome.failure {
            let case = serde_json::to_string(&failure.case)?;
            self.failures.push(format!("seed {seed} failed: {}\n{case}", failure.text));
            if let Some(folder) = keep {
                fs::create_dir_all(folder)?;
                fs::write(folder.join(format!("seed-{seed}.json")), case)?;
            }
        }
        if again.is_some_and(|digest| digest != outcome.digest) {
            self.failures.push(format!("seed {seed}: two runs differ"));
        }
        Ok(())
    }
}
