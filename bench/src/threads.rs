//! The parameter server and its trainers as threads of one process, with nothing between them but the in-process
//! transport: what a round costs beside the wire.
//!
//! To the parent the process is one trainer, whose rounds are those of the slowest.

use std::sync::Barrier;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use anyhow::{Context, Result};
use pserver_client::Client;
use pserver_node::Server;
use pserver_node::settings::Settings;
use pserver_transport::loopback::Hub;

use crate::baseline;
use crate::child::{self, Ask, Cores, Ran};
use crate::counters;
use crate::job::BenchJob;
use crate::report::announce;
use crate::shipped::{self, ClientTrainer};
use crate::trainer::Runner;

/// A trainer's thread, as the main one sees it.
struct Thread {
    asks: Sender<Ask>,
    rounds: Receiver<Ran>,
}

/// A trainer's thread, as it sees the others.
struct TrainerThread<'a> {
    trainer: u32,
    /// The path of the barrier of all trainers' rounds, if they have one.
    barrier: Option<&'a str>,
    /// Passed once every trainer is connected.
    are_ready: &'a Barrier,
    asked: Receiver<Ask>,
    done: Sender<Ran>,
}

/// The process: servers, then trainers, then answers to the parent until it ends.
pub(crate) fn serve(job: &BenchJob, barrier: Option<&str>) -> Result<()> {
    let hub = Hub::default();
    let servers = start(job, &hub)?;
    let coordinator = servers.first().context("there is at least one server")?.address().to_string();
    let _kept = Cores::of_trainers(job).keep()?;
    let are_ready = Barrier::new(1 + usize::try_from(job.trainers)?);
    thread::scope(|scope| {
        let begin = |trainer| {
            let ((asks, asked), (done, rounds)) = (channel(), channel());
            let (hub, coordinator) = (&hub, &coordinator);
            let thread = TrainerThread { trainer, barrier, are_ready: &are_ready, asked, done };
            scope.spawn(move || {
                let made = train(job, hub, coordinator, &thread);
                made.unwrap_or_else(|error| {
                    // The others wait for this one, and would for ever.
                    announce(&format!("trainer {trainer}: {error:#}"));
                    std::process::exit(1);
                });
            });
            Thread { asks, rounds }
        };
        let threads: Vec<Thread> = (0..job.trainers).map(begin).collect();
        are_ready.wait();
        child::serve(&coordinator, |ask| match ask {
            Ask::Usage => Ok(serde_json::to_value(child::usage()?)?),
            Ask::Heard => Ok(serde_json::to_value(counters::heard())?),
            Ask::Run { .. } => {
                threads.iter().try_for_each(|one| one.asks.send(ask)).context("a trainer has ended")?;
                let ran = threads.iter().map(|one| one.rounds.recv()).collect::<Result<Vec<_>, _>>();
                Ok(serde_json::to_value(Ran::together(&ran.context("a trainer has ended")?)?)?)
            }
        })
    })?;
    servers.into_iter().try_for_each(|server| Ok(server.stop()?))
}

/// The servers, told what those of other processes are told.
fn start(job: &BenchJob, hub: &Hub) -> Result<Vec<Server>> {
    let _kept = Cores::of_servers(job).keep()?;
    let mut servers: Vec<Server> = Vec::new();
    for index in 0..job.servers {
        let coordinator = servers.first().map(|first| first.address().to_string());
        let line = shipped::server_arguments(job, index, coordinator.as_deref(), None);
        servers.push(Server::start_within(Settings::of_words(line)?, hub)?);
    }
    Ok(servers)
}

/// A trainer: rounds as they are asked for, until nobody asks.
fn train(job: &BenchJob, hub: &Hub, coordinator: &str, thread: &TrainerThread<'_>) -> Result<()> {
    let TrainerThread { trainer, barrier, are_ready, asked, done } = thread;
    let (trainer, barrier) = (*trainer, *barrier);
    let client = Client::within(shipped::options(job, coordinator, trainer)?, hub)?;
    let mut exchange = ClientTrainer::new(client, job)?;
    let mut runner = Runner::new(&mut exchange, job, trainer, baseline::barrier(barrier, job)?)?;
    are_ready.wait();
    for ask in asked {
        if let Ask::Run { rounds, rate, spoil } = ask {
            done.send(runner.run(rounds, rate, spoil)?).context("nobody waits for rounds")?;
        }
    }
    Ok(())
}
