//! A job that runs a program: servers and trainers as they ship, each a thread of this process, over TCP.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Result, anyhow};
use pserver_client::{Client, ClientOptions};
use pserver_node::Server;
use pserver_program::transpile::ProgramPart;
use pserver_trainer::{Trainer, initialise};

use super::data::StepData;
use crate::servers::serve;

/// A running job.
pub(super) struct ProgramJob {
    servers: Vec<Server>,
    trainers: Vec<ProgramTrainer>,
}

struct ProgramTrainer {
    orders: Sender<TrainerOrder>,
    answers: Receiver<Result<TrainerAnswer>>,
    thread: JoinHandle<()>,
}

enum TrainerOrder {
    /// Steps, in turn through the data.
    Steps(u32),
    /// The bytes of these parameters.
    Fetch(Vec<String>),
}

enum TrainerAnswer {
    /// Of a step, as a mean, without the feeding of data.
    Seconds(f64),
    Parameters(Vec<Vec<u8>>),
}

impl ProgramJob {
    /// Starts a job and has every trainer join it; `data` has for each trainer the data of its steps.
    pub(super) fn start(parts: &Arc<Vec<ProgramPart>>, servers: u16, data: Vec<Vec<StepData>>) -> Result<Self> {
        let servers = serve("tcp", "mean", u32::try_from(data.len())?, (servers, 1))?;
        let coordinator = servers[0].address().clone();
        let trainer = |(trainer, data): (u32, Vec<StepData>)| {
            let (orders, received) = channel();
            let (answered, answers) = channel();
            let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(coordinator.clone()) };
            let parts = Arc::clone(parts);
            let thread = std::thread::spawn(move || {
                if let Err(error) = train(options, &parts, &data, &received, &answered) {
                    // Where nobody reads it, the job has failed before.
                    let _ = answered.send(Err(error.context(format!("trainer {trainer}"))));
                }
            });
            ProgramTrainer { orders, answers, thread }
        };
        Ok(Self { servers, trainers: (0..).zip(data).map(trainer).collect() })
    }

    /// Seconds of a step of the slowest trainer, as a mean over this many.
    pub(super) fn steps(&self, count: u32) -> Result<f64> {
        let answers = self.ask(|| TrainerOrder::Steps(count))?;
        let seconds =
            answers.iter().map(|answer| if let TrainerAnswer::Seconds(seconds) = answer { *seconds } else { 0.0 });
        Ok(seconds.fold(0.0, f64::max))
    }

    /// The bytes of parameters on the servers.
    pub(super) fn parameters(&self, names: &[String]) -> Result<Vec<Vec<u8>>> {
        let answers = self.ask(|| TrainerOrder::Fetch(names.to_vec()))?;
        let found = answers.into_iter().find_map(|answer| match answer {
            TrainerAnswer::Parameters(all) => Some(all),
            TrainerAnswer::Seconds(_) => None,
        });
        found.ok_or_else(|| anyhow!("found no parameters; expected those of a trainer"))
    }

    fn ask(&self, order: impl Fn() -> TrainerOrder) -> Result<Vec<TrainerAnswer>> {
        for trainer in &self.trainers {
            // A trainer that has ended has said why.
            let _ = trainer.orders.send(order());
        }
        let answer =
            |trainer: &ProgramTrainer| trainer.answers.recv().unwrap_or_else(|_| Err(anyhow!("a trainer ended")));
        self.trainers.iter().map(answer).collect()
    }

    /// Ends trainers, then servers.
    pub(super) fn stop(self) -> Result<()> {
        let (orders, threads): (Vec<_>, Vec<_>) =
            self.trainers.into_iter().map(|trainer| (trainer.orders, trainer.thread)).unzip();
        drop(orders);
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a trainer panicked"))?;
        }
        for server in self.servers {
            server.stop()?;
        }
        Ok(())
    }
}

fn train(
    options: ClientOptions,
    parts: &[ProgramPart],
    data: &[StepData],
    orders: &Receiver<TrainerOrder>,
    answers: &Sender<Result<TrainerAnswer>>,
) -> Result<()> {
    let client = Client::new(options)?;
    initialise(&client, parts)?;
    let mut trainer = Trainer::new(&client, parts)?;
    let mut all = data.iter().cycle();
    for order in orders {
        let answer = match order {
            TrainerOrder::Steps(count) => {
                let mut seconds = 0.0;
                for data in all.by_ref().take(usize::try_from(count)?) {
                    for (name, tensor) in data {
                        trainer.feed(name, tensor.clone())?;
                    }
                    let begun = Instant::now();
                    trainer.step()?;
                    seconds += begun.elapsed().as_secs_f64();
                }
                TrainerAnswer::Seconds(seconds / f64::from(count))
            }
            TrainerOrder::Fetch(names) => {
                let bytes = names.iter().map(|name| Ok(trainer.fetch(name)?.bytes().to_vec()));
                TrainerAnswer::Parameters(bytes.collect::<Result<_>>()?)
            }
        };
        answers.send(Ok(answer))?;
    }
    client.leave()?;
    Ok(())
}
