//! Rounds a second of three trainers, alone in a job, and in one of four whose fourth trainer stands still and whose
//! rounds do not wait for it, by turns in this process over TCP.
//!
//! Each trainer's gradient is ones in a part of its own, so that the value says how often each was counted: once in
//! each round, and the fourth never. Late gradients are those of `cli/tests/servers/backup.rs`.
//! `cargo bench -p pserver-bench --bench backup_trainers`

use std::fmt::Write;
use std::time::Instant;

use pserver_bench::{is_measured, serve};
use pserver_client::console::{self, OutputError};
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::error::Failure;
use pserver_node::Server;

/// Trainers that make every step.
const STEADY: usize = 3;

struct StandingJob {
    servers: Vec<Server>,
    clients: Vec<Client>,
    /// Elements of one trainer's part.
    own: usize,
    rounds: usize,
    rates: Vec<f64>,
}

impl StandingJob {
    fn new(trainers: u32, own: usize) -> Self {
        let servers = serve("tcp", "sum", trainers, (1, 1)).expect("a server starts");
        let client = |trainer| {
            let address = servers[0].address().clone();
            Client::new(ClientOptions { trainer: Some(trainer), ..ClientOptions::new(address) }).expect("it joins")
        };
        let clients: Vec<Client> = (0..trainers).map(client).collect();
        let backup = clients.len() - STEADY;
        let text = format!("optimizer: SGD const_lr {{ learning_rate: 1 }} backup_trainers: {backup}");
        let settings = OptimizerSettings::from_text(&text).expect("it is right");
        let zeros = vec![0_u8; clients.len() * own * 4];
        clients[0].begin_init(&OptimizerSettings::default()).expect("it begins");
        let shape = [(clients.len() * own) as u64];
        clients[0].init_param("w", Float32, &shape, &zeros, &settings).expect("it takes it");
        clients[0].finish_init().expect("it ends");
        let mut new = Self { servers, clients, own, rounds: 0, rates: Vec::new() };
        new.run(1);
        new
    }

    /// Steps of all trainers but the fourth, each on a thread of its own; rounds a second.
    fn run(&mut self, steps: usize) -> f64 {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for (trainer, client) in self.clients[..STEADY].iter().enumerate() {
                let (own, length) = (self.own, self.own * self.clients.len());
                scope.spawn(move || {
                    let mut gradient = vec![0.0_f32; length];
                    gradient[trainer * own..][..own].fill(1.0);
                    let mut value = vec![0.0_f32; length];
                    (0..steps).for_each(|_| step(client, &gradient, &mut value).expect("a step succeeds"));
                });
            }
        });
        self.rounds += steps;
        steps as f64 / begin.elapsed().as_secs_f64()
    }

    /// Each trainer but the fourth counts once in each round.
    fn check(&self) {
        let mut value = vec![0.0_f32; self.own * self.clients.len()];
        let place = DestinationSlice::new("w", bytemuck::cast_slice_mut(&mut value));
        self.clients[0].pull(&mut [place]).expect("it is there");
        for (trainer, part) in value.chunks(self.own).enumerate() {
            let expected = if trainer < STEADY { -(self.rounds as f32) } else { 0.0 };
            assert!(part.iter().all(|one| *one == expected), "trainer {trainer}: expected {expected}");
        }
    }
}

fn step(client: &Client, gradient: &[f32], value: &mut [f32]) -> Result<(), Failure> {
    let gradients = [GradientSlice { name: "w", element_type: Float32, content: bytemuck::cast_slice(gradient) }];
    client.push_pull(&gradients, None, &mut [DestinationSlice::new("w", bytemuck::cast_slice_mut(value))])?;
    Ok(())
}

fn median(numbers: &[f64]) -> (f64, f64, f64) {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1])
}

fn main() -> Result<(), OutputError> {
    // The same bytes in both jobs, of which twelve parts are three or four trainers' own.
    let (parts, steps, turns) = if is_measured() { (21_840, 100, 15) } else { (120, 3, 2) };
    let [mut three, mut four] = [StandingJob::new(3, parts * 4), StandingJob::new(4, parts * 3)];
    for _ in 0..turns {
        for job in [&mut three, &mut four] {
            let rate = job.run(steps);
            job.rates.push(rate);
        }
    }
    let ratios: Vec<f64> = three.rates.iter().zip(&four.rates).map(|(alone, beside)| beside / alone).collect();
    let mut text = "job rounds_per_second (min max)\n".to_owned();
    for (name, job) in [("three", &three), ("four_one_stands_still", &four)] {
        let (middle, least, most) = median(&job.rates);
        job.check();
        writeln!(text, "{name} {middle:.1} ({least:.1} {most:.1})").expect("a string takes everything");
    }
    let (middle, least, most) = median(&ratios);
    writeln!(text, "ratio {middle:.3} ({least:.3} {most:.3})").expect("a string takes everything");
    for StandingJob { servers, clients, .. } in [three, four] {
        drop(clients);
        servers.into_iter().for_each(|server| server.stop().expect("it stops"));
    }
    console::print(text)
}
