//! Rows over the network: servers and trainers as they ship, in turns with the baseline server for the same trainers.

use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use bytemuck::{cast_slice, cast_slice_mut};
use pserver_client::{Client, ClientOptions, DestinationRows, GradientRows, TransferredBytes};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;

use super::BatchTimes;
use super::draw::{Distribution, Draw};
use super::table_server::{self, TableTrainer};
use crate::job::{TransportName, word};
use crate::report::announce;
use crate::servers::serve;
use crate::sizes::length;

const NAME: &str = "rows";

/// The settings of the measurement.
pub(crate) struct NetworkPlan {
    pub(crate) transport: TransportName,
    pub(crate) trainers: u32,
    pub(crate) servers: u16,
    pub(crate) shards: u16,
    pub(crate) rows: u64,
    pub(crate) width: u32,
    pub(crate) batch: usize,
    pub(crate) distribution: Distribution,
    pub(crate) exponent: f64,
    pub(crate) iterations: u32,
    pub(crate) spoil: bool,
}

/// The times of the measurement, each of the slowest trainer.
#[derive(Default)]
pub(crate) struct NetworkTimes {
    pub(crate) push: BatchTimes,
    pub(crate) pull: BatchTimes,
    /// Payload bytes of one trainer's batch, as a mean.
    pub(crate) push_bytes: f64,
    pub(crate) pull_bytes: f64,
    pub(crate) wrong: u64,
    /// Where trainers look for the servers.
    pub(crate) coordinator: String,
}

/// Seconds of one trainer's batch.
#[derive(Clone, Copy, Default)]
struct Turn {
    push: f64,
    pull: f64,
    baseline_push: f64,
    baseline_pull: f64,
    push_bytes: u64,
    pull_bytes: u64,
    wrong: u64,
}

impl NetworkTimes {
    pub(crate) fn measure(plan: &NetworkPlan) -> Result<Self> {
        let servers = serve(&word(plan.transport), "sum", plan.trainers, (plan.servers, plan.shards))?;
        let baseline = TcpListener::bind("127.0.0.1:0").context("the baseline server")?;
        let address = baseline.local_addr()?;
        let trainers = usize::try_from(plan.trainers)?;
        let apart = table_server::serve(baseline, trainers, usize::try_from(plan.rows)?, usize::try_from(plan.width)?)?;
        let barrier = Barrier::new(trainers);
        let coordinator = servers[0].address().clone();
        let place = coordinator.to_string();
        let turns = thread::scope(|scope| {
            let all: Vec<_> = (0..plan.trainers)
                .map(|trainer| {
                    let (barrier, coordinator) = (&barrier, coordinator.clone());
                    scope.spawn(move || {
                        let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(coordinator) };
                        let client = Client::new(options).expect("this process can have another transport");
                        let trainer_of = || RowTrainer::new(plan, client, TcpStream::connect(address)?);
                        let turns = trainer_of().and_then(|one| one.run(plan, trainer, barrier));
                        turns.unwrap_or_else(|error| {
                            // The others wait for this one at a barrier, and would for ever.
                            announce(&format!("trainer {trainer}: {error:#}"));
                            std::process::exit(1);
                        })
                    })
                })
                .collect();
            let join =
                |one: thread::ScopedJoinHandle<'_, Vec<Turn>>| one.join().map_err(|_| anyhow!("a trainer panicked"));
            all.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        apart.join().map_err(|_| anyhow!("the baseline server panicked"))?;
        for server in servers {
            server.stop()?;
        }
        Ok(Self { coordinator: place, ..Self::of(&turns) })
    }

    /// The slowest trainer of each batch, and the bytes of all.
    fn of(turns: &[Vec<Turn>]) -> Self {
        let mut network = Self::default();
        let batches = turns[0].len();
        for batch in 0..batches {
            let slowest = |time: fn(&Turn) -> f64| turns.iter().map(|one| time(&one[batch])).fold(0.0, f64::max);
            network.push.own.push(slowest(|turn| turn.push));
            network.pull.own.push(slowest(|turn| turn.pull));
            network.push.baseline.push(slowest(|turn| turn.baseline_push));
            network.pull.baseline.push(slowest(|turn| turn.baseline_pull));
        }
        let all = || turns.iter().flatten();
        let count = all().count() as f64;
        network.push_bytes = all().map(|turn| turn.push_bytes).sum::<u64>() as f64 / count;
        network.pull_bytes = all().map(|turn| turn.pull_bytes).sum::<u64>() as f64 / count;
        network.wrong = all().map(|turn| turn.wrong).sum();
        network
    }
}

/// One trainer: its client, its baseline connection, and what the rows must come to.
struct RowTrainer {
    client: Client,
    baseline: TableTrainer,
    /// The ids of every batch, of every trainer, so that each knows what all push.
    batches: Vec<Vec<Vec<u64>>>,
    /// The sum of the gradients of every row.
    lost: Vec<f32>,
}

impl RowTrainer {
    fn new(plan: &NetworkPlan, client: Client, baseline: TcpStream) -> Result<Self> {
        let baseline = TableTrainer::new(baseline, usize::try_from(plan.width)?)?;
        let settings = format!(
            "optimizer: SGD const_lr {{ learning_rate: 1 }} sparse {{ height: {} width: {} }}",
            plan.rows, plan.width
        );
        if client.begin_init(&OptimizerSettings::default())? {
            client.init_param(NAME, Float32, &[], &[], &OptimizerSettings::from_text(&settings)?)?;
            client.finish_init()?;
        }
        let draw = |seed| Draw::new(plan.distribution, plan.exponent, plan.rows, seed);
        let mut draws: Vec<Draw> = (0..u64::from(plan.trainers)).map(draw).collect();
        // Drawn beforehand: a draw would take the caches from what is measured.
        let batch = |_| draws.iter_mut().map(|draw| draw.batch(plan.batch)).collect();
        let batches = (0..=plan.iterations).map(batch).collect();
        Ok(Self { client, baseline, batches, lost: vec![0.0; usize::try_from(plan.rows)?] })
    }

    fn run(mut self, plan: &NetworkPlan, trainer: u32, barrier: &Barrier) -> Result<Vec<Turn>> {
        let own = usize::try_from(trainer)?;
        let width = usize::try_from(plan.width)?;
        let ones = vec![1.0_f32; plan.batch * width];
        let (mut values, mut baseline_values) = (vec![0.0; ones.len()], vec![0.0; ones.len()]);
        let mut turns = Vec::new();
        self.touch(plan, cast_slice_mut(&mut values))?;
        // The first batch makes connections and memory, and is not counted.
        for (batch, all) in std::mem::take(&mut self.batches).iter().enumerate() {
            all.iter().flatten().for_each(|id| self.lost[length(*id)] += 1.0);
            let mut turn = Turn::default();
            let before = self.client.moved();
            barrier.wait();
            let begun = Instant::now();
            let (ids, gradients) = (&all[own], cast_slice(&ones));
            self.client
                .push_rows(&[GradientRows { name: NAME, element_type: Float32, ids, values: gradients }], None)?;
            turn.push = begun.elapsed().as_secs_f64();
            let pushed = self.client.moved();
            barrier.wait();
            let begun = Instant::now();
            self.client.pull_rows(&mut [DestinationRows {
                name: NAME,
                ids: &all[own],
                values: cast_slice_mut(&mut values),
            }])?;
            turn.pull = begun.elapsed().as_secs_f64();
            turn.note_bytes(before, pushed, self.client.moved());
            if plan.spoil {
                values[0] += 1.0;
            }
            turn.wrong = self.wrong(&all[own], &values, -1.0);
            barrier.wait();
            let begun = Instant::now();
            self.baseline.push(&all[own], &ones)?;
            turn.baseline_push = begun.elapsed().as_secs_f64();
            barrier.wait();
            let begun = Instant::now();
            self.baseline.pull(&all[own], &mut baseline_values)?;
            turn.baseline_pull = begun.elapsed().as_secs_f64();
            turn.wrong += self.wrong(&all[own], &baseline_values, 1.0);
            if batch > 0 {
                turns.push(turn);
            }
        }
        self.client.leave()?;
        Ok(turns)
    }

    /// Pushes a gradient of zero to every row: its first touch costs fresh pages (`--local` measures it).
    fn touch(&self, plan: &NetworkPlan, values: &mut [u8]) -> Result<()> {
        values.fill(0);
        let ids: Vec<u64> = (0..plan.rows).collect();
        for ids in ids.chunks(plan.batch) {
            let values = &values[..ids.len() * length(u64::from(plan.width)) * 4];
            self.client.push_rows(&[GradientRows { name: NAME, element_type: Float32, ids, values }], None)?;
        }
        Ok(())
    }

    /// Elements that are not what all trainers' gradients make of them, each times this.
    fn wrong(&self, ids: &[u64], values: &[f32], times: f32) -> u64 {
        let rows = ids.iter().zip(values.chunks_exact(values.len() / ids.len()));
        let wrong = |(id, row): (&u64, &[f32])| {
            let expected = times * self.lost[length(*id)];
            row.iter().filter(|element| element.to_bits() != expected.to_bits()).count() as u64
        };
        rows.map(wrong).sum()
    }
}

impl Turn {
    fn note_bytes(&mut self, before: TransferredBytes, pushed: TransferredBytes, after: TransferredBytes) {
        self.push_bytes = pushed.sent - before.sent;
        self.pull_bytes = (after.sent - pushed.sent) + (after.received - pushed.received);
    }
}
