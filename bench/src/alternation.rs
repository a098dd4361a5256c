//! Two teams that do the same work in turns, in short blocks, so that whatever else the machine does hits both alike.

use std::net::Ipv4Addr;
use std::time::Instant;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::baseline::shm;
use crate::baseline::{BaselinePlan, Region, Shape};
use crate::child::{Ask, Cores, Member, ProcessUsage, Ran, Verbs};
use crate::counters::{Carried, Heard};
use crate::hosts::{Hosts, ServerPlacement};
use crate::job::{BenchJob, ModeName, Poll, RuleName, TransportName};
use crate::route::Route;
use crate::shipped;
use crate::statistics::median;

/// Blocks of each team, at the least.
pub(crate) const BLOCKS_MIN: u32 = 9;
/// Chunks that the baseline server is tried with; the best counts.
pub(crate) const CHUNKS: [u64; 3] = [256 << 10, 1 << 20, 4 << 20];

/// Servers and trainers that run.
pub(crate) struct Team {
    pub(crate) name: String,
    servers: Vec<Member>,
    trainers: Vec<Member>,
    /// Whether its servers spin and rest while the others' turn is.
    spins: bool,
    /// Where its trainers look for its servers.
    place: String,
    pub(crate) chunk_bytes: u64,
    /// The resources that the servers had used before the first trainer.
    empty: ProcessUsage,
    /// Memory that its members share lives as long as the team.
    _regions: Vec<(Region, String)>,
    /// The folder of its servers' checkpoints and journals, if they keep some.
    _folder: Option<TempDir>,
}

/// The servers of a team of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TeamServers<'a> {
    /// Servers of its own on this machine's loopback.
    Own,
    /// Servers that run already, at this address.
    At(&'a str),
    /// Servers of its own on these hosts.
    On(&'a Hosts, ServerPlacement),
}

impl TeamServers<'_> {
    /// The place of servers among hosts.
    pub(crate) fn placement(self) -> Option<ServerPlacement> {
        match self {
            Self::On(_, placement) => Some(placement),
            Self::Own | Self::At(_) => None,
        }
    }
}

/// The result of a block of rounds: the time of the slowest trainer in each round.
#[derive(Clone, Debug, Default)]
pub(crate) struct RoundBlock {
    pub(crate) seconds: Vec<f64>,
    pub(crate) wrong: u64,
    /// From its begin to its end, with what happens between rounds.
    pub(crate) whole_seconds: f64,
    /// None of those who are no processes of their own, or say nothing.
    pub(crate) server: Option<ProcessUsage>,
    /// Of all trainers.
    pub(crate) verbs: Verbs,
}

/// How rounds are run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundPace {
    pub(crate) rate: Option<f64>,
    pub(crate) spoil: bool,
}

/// The job with a folder of its own for the servers' files, within the one that the setting names: two teams run at a
/// time, and each size is another job.
fn with_own_folder(job: &BenchJob) -> Result<(BenchJob, Option<TempDir>)> {
    let (mut job, mut own) = (job.clone(), None);
    for setting in &mut job.serve {
        if let Some(folder) = setting.strip_prefix("checkpoint_dir=") {
            let made = tempfile::tempdir_in(folder).with_context(|| format!("checkpoint_dir={folder}"))?;
            *setting = format!("checkpoint_dir={}", made.path().display());
            own = Some(made);
        }
    }
    Ok((job, own))
}

impl Team {
    /// The parameter server.
    pub(crate) fn ours(job: &BenchJob, with: TeamServers<'_>) -> Result<Self> {
        if job.transport == TransportName::Loopback {
            return Self::within(job);
        }
        let (job, folder) = with_own_folder(job)?;
        let job = &job;
        let mut servers = Vec::new();
        let (mut first, hosts) = match with {
            TeamServers::Own => (None, None),
            TeamServers::At(coordinator) => (Some(coordinator.to_owned()), None),
            TeamServers::On(hosts, _) => (None, Some(hosts)),
        };
        let own = if first.is_none() { job.servers } else { 0 };
        for index in 0..own {
            let host = match with {
                TeamServers::On(hosts, placement) => Some(hosts.of_server(placement, index)),
                TeamServers::Own | TeamServers::At(_) => None,
            };
            let mut arguments = vec!["child-server".to_owned()];
            let address = host.map(|host| host.address);
            arguments.extend(shipped::server_arguments(job, index, first.as_deref(), address));
            let (name, cores) = (format!("server {index}"), Cores::of_servers(job));
            let (member, address) = Member::start(&name, job.program.as_deref(), &arguments, cores, host)?;
            first.get_or_insert(address);
            servers.push(member);
        }
        let place = shipped::at(job.transport, &first.context("there is at least one server")?);
        let empty = sum(&mut servers)?;
        let regions = barrier(job)?;
        let more = ["--coordinator".to_owned(), place.clone()];
        let trainers = start_trainers(job, &regions, "child-trainer", &more, hosts)?;
        let name = job.team();
        let spins = job.poll == Poll::Busy;
        let chunk_bytes = job.chunk_bytes;
        Ok(Self { name, servers, trainers, spins, place, chunk_bytes, empty, _regions: regions, _folder: folder })
    }

    /// The parameter server in one process: servers and trainers are threads of it, and it answers as one trainer.
    fn within(job: &BenchJob) -> Result<Self> {
        let (job, folder) = with_own_folder(job)?;
        let job = &job;
        let regions = barrier(job)?;
        let mut arguments = vec!["child-within".to_owned(), "--job".to_owned(), serde_json::to_string(job)?];
        arguments.extend(regions.iter().flat_map(|(_, path)| ["--barrier".to_owned(), path.clone()]));
        let (member, place) =
            Member::start("servers and trainers", job.program.as_deref(), &arguments, Cores::All, None)?;
        Ok(Self {
            name: job.team(),
            servers: Vec::new(),
            trainers: vec![member],
            spins: job.poll == Poll::Busy,
            place,
            chunk_bytes: job.chunk_bytes,
            empty: ProcessUsage::default(),
            _regions: regions,
            _folder: folder,
        })
    }

    /// The baseline server of a path, on a host of its own where there are hosts.
    pub(crate) fn baseline(shape: Shape, job: &BenchJob, chunk_bytes: u64, hosts: Option<&Hosts>) -> Result<Self> {
        // It sums, in rounds, whatever the servers do.
        let job = &BenchJob { rule: RuleName::Sum, mode: ModeName::Sync, program: None, ..job.clone() };
        let mut plan = BaselinePlan::new(shape, job, chunk_bytes);
        let barrier = barrier(job)?;
        let mut shared = Vec::new();
        let host = hosts.map(|hosts| hosts.of_server(ServerPlacement::Dedicated, 0));
        if shape == Shape::Tcp {
            let address = host.map_or(Ipv4Addr::LOCALHOST, |host| host.address);
            plan.address = format!("{address}:0");
        } else {
            shared = shm::regions(&plan)?;
            plan.regions = shared.iter().map(|(_, path)| path.clone()).collect();
        }
        let arguments = ["baseline-server".to_owned(), "--plan".to_owned(), serde_json::to_string(&plan)?];
        let (mut server, address) = Member::start("baseline server", None, &arguments, Cores::of_servers(job), host)?;
        let empty = server.usage()?;
        plan.address = address;
        let more = ["--plan".to_owned(), serde_json::to_string(&plan)?];
        let trainers = start_trainers(job, &barrier, "baseline-trainer", &more, hosts)?;
        shared.extend(barrier);
        let (name, spins) = (shape.name().to_owned(), job.poll == Poll::Busy);
        let (place, chunk_bytes) = (plan.address, plan.chunk_bytes);
        let servers = vec![server];
        Ok(Self { name, servers, trainers, spins, place, chunk_bytes, empty, _regions: shared, _folder: None })
    }

    /// The baseline server of a path with the chunk that suits it best. One at a time is tried, so that memory is
    /// asked of the machine once.
    pub(crate) fn best_baseline(shape: Shape, job: &BenchJob, hosts: Option<&Hosts>) -> Result<Self> {
        let pace = RoundPace { rate: None, spoil: false };
        let mut best: Option<(f64, u64)> = None;
        let fitting = CHUNKS.iter().enumerate().filter(|(index, _)| *index == 0 || CHUNKS[index - 1] < job.bytes);
        for (_, chunk_bytes) in fitting {
            let mut team = Self::baseline(shape, job, *chunk_bytes, hosts)?;
            team.block(3, pace)?;
            let seconds = median(&team.block(7, pace)?.seconds);
            if best.is_none_or(|(least, _)| seconds < least) {
                best = Some((seconds, *chunk_bytes));
            }
        }
        Self::baseline(shape, job, best.context("a chunk fits")?.1, hosts)
    }

    /// Runs rounds.
    pub(crate) fn block(&mut self, rounds: u32, pace: RoundPace) -> Result<RoundBlock> {
        self.rest(false)?;
        let (before, begun) = (self.server_usage()?, Instant::now());
        for trainer in &mut self.trainers {
            trainer.ask(Ask::Run { rounds, rate: pace.rate, spoil: pace.spoil })?;
        }
        let ran = self.trainers.iter_mut().map(Member::answer).collect::<Result<Vec<Ran>>>()?;
        let (whole_seconds, after) = (begun.elapsed().as_secs_f64(), self.server_usage()?);
        self.rest(true)?;
        let Ran { seconds, wrong, verbs } = Ran::together(&ran)?;
        let used = || ProcessUsage { cpu_seconds: after.cpu_seconds - before.cpu_seconds, ..after };
        Ok(RoundBlock { seconds, wrong, whole_seconds, server: self.has_servers().then(used), verbs })
    }

    /// The transport and the link of the trainers' connections.
    pub(crate) fn route(&mut self, job: &BenchJob) -> Result<Route> {
        let mut all = Heard::default();
        // Within one process those who rest are those who are asked.
        self.rest(false)?;
        for trainer in &mut self.trainers {
            trainer.ask(Ask::Heard)?;
            all.add(trainer.answer()?);
        }
        self.rest(true)?;
        Ok(Route::of(Carried::of(job.transport, &all), &self.place, &job.rdma_device))
    }

    /// Whether its servers take a processor also while they wait.
    pub(crate) fn spins(&self) -> bool {
        self.spins
    }

    /// Whether its servers are processes of ours, whose use of the machine is known.
    pub(crate) fn has_servers(&self) -> bool {
        !self.servers.is_empty()
    }

    fn rest(&self, rests: bool) -> Result<()> {
        if self.spins {
            // Within one process the servers are where the trainers are.
            let spinning = if self.has_servers() { &self.servers } else { &self.trainers };
            spinning.iter().try_for_each(|member| member.rest(rests))?;
        }
        Ok(())
    }

    /// The resources that the servers had used before the first trainer.
    pub(crate) fn empty(&self) -> ProcessUsage {
        self.empty
    }

    /// The resources that all its servers have used so far.
    pub(crate) fn server_usage(&mut self) -> Result<ProcessUsage> {
        sum(&mut self.servers)
    }
}

/// The resources that several processes have used so far, added.
fn sum(members: &mut [Member]) -> Result<ProcessUsage> {
    let mut sum = ProcessUsage::default();
    for member in members {
        let one = member.usage()?;
        sum.cpu_seconds += one.cpu_seconds;
        sum.peak_rss_bytes += one.peak_rss_bytes;
        sum.resident_bytes += one.resident_bytes;
    }
    Ok(sum)
}

/// How many rounds a block of both teams has, so that all blocks take about `seconds`; both are warm afterwards.
pub(crate) fn rounds_for(teams: &mut [&mut Team], pace: RoundPace, seconds: f64) -> Result<u32> {
    let mut rounds = 1;
    loop {
        let start = Instant::now();
        for team in teams.iter_mut() {
            team.block(rounds, pace)?;
        }
        let share = start.elapsed().as_secs_f64() * f64::from(BLOCKS_MIN) / seconds;
        // A trial that is long enough to reckon with.
        if share > 0.3 || rounds >= 100_000 {
            return Ok(scale(rounds, 1.0 / share));
        }
        rounds = scale(rounds, (0.5 / share).clamp(2.0, 20.0));
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is within 1 and a million")]
fn scale(rounds: u32, factor: f64) -> u32 {
    (f64::from(rounds) * factor).clamp(1.0, 1e6) as u32
}

/// The blocks of every team, in turns: so many, and as many more as fit into `seconds`, since a trial on a busy machine
/// makes blocks too short. `each` is called after every block, and told whether it is one of those more.
pub(crate) fn alternate(
    teams: &mut [&mut Team],
    pace: RoundPace,
    rounds: u32,
    (blocks, seconds): (u32, f64),
    each: &mut dyn FnMut(bool),
) -> Result<Vec<Vec<RoundBlock>>> {
    let mut results = vec![Vec::new(); teams.len()];
    let start = Instant::now();
    let mut done = 0;
    while done < blocks || start.elapsed().as_secs_f64() * f64::from(done + 1) <= seconds * f64::from(done) {
        for (team, result) in teams.iter_mut().zip(&mut results) {
            result.push(team.block(rounds, pace)?);
            each(done >= blocks);
        }
        done += 1;
    }
    Ok(results)
}

/// The shared barrier of a team of several trainers, and its path.
fn barrier(job: &BenchJob) -> Result<Vec<(Region, String)>> {
    if job.trainers == 1 { Ok(Vec::new()) } else { Ok(vec![Region::create(0)?]) }
}

fn start_trainers(
    job: &BenchJob,
    barrier: &[(Region, String)],
    command: &str,
    more: &[String],
    hosts: Option<&Hosts>,
) -> Result<Vec<Member>> {
    let text = serde_json::to_string(job)?;
    let start = |trainer: u32| {
        let mut arguments = vec![command.to_owned(), "--job".to_owned(), text.clone()];
        arguments.extend(["--trainer".to_owned(), trainer.to_string()]);
        arguments.extend(barrier.iter().flat_map(|(_, path)| ["--barrier".to_owned(), path.clone()]));
        arguments.extend(more.iter().cloned());
        let (name, host) = (format!("trainer {trainer}"), hosts.map(|hosts| hosts.of_trainer(trainer, job.trainers)));
        Member::begin(&name, job.program.as_deref(), &arguments, Cores::of_trainers(job), host)
    };
    let mut trainers = (0..job.trainers).map(start).collect::<Result<Vec<_>>>()?;
    // All are started before the first is waited for: they wait for each other.
    trainers.iter_mut().try_for_each(|trainer| trainer.ready().map(|_| ()))?;
    Ok(trainers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_blocks_follow_while_they_fit_into_the_seconds() {
        let begun = Instant::now();
        // Blocks of no team take no time.
        let pace = RoundPace { rate: None, spoil: false };
        let results = alternate(&mut [], pace, 1, (BLOCKS_MIN, 0.05), &mut |_| ()).expect("there is no team to fail");
        assert!(results.is_empty());
        assert!(begun.elapsed().as_secs_f64() > 0.05 * 0.9, "over after {:?}", begun.elapsed());
    }
}
