//! `psbench peers`: what a user would pick instead, doing the same work in turns with this parameter server.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, ensure};
use pserver_core::ids::Version;
use pserver_core::optim::Step;
use serde_json::json;

use super::kernels::Kernel;
use super::pushpull::setting;
use crate::alternation::{BLOCKS_MIN, RoundBlock, RoundPace, Team, TeamServers};
use crate::baseline::Shape;
use crate::hosts::{self, Hosts, ServerPlacement};
use crate::job::{BenchJob, Buffers, Checks, Dtype, ModeName, Poll, TransportName, word};
use crate::peers::{InstallFolders, Kit, PEERS, Partner, Peer, install, optimizers};
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::route::Route;
use crate::sizes::{self, length};
use crate::statistics::{median, median_interval};
use crate::tensors::Tensors;

/// The options of `psbench peers`.
//
// tidy: allow fields: one field for each option of a command line.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these; several with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "mxnet,pslite,paddle,torch,openmpi")]
    only: Vec<Kit>,
    /// Bytes of a gradient; several sizes with commas between them.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = "4KiB,64KiB,1MiB,4MiB,64MiB")]
    bytes: Vec<u64>,
    /// Trainers; several counts with commas between them [default: 1,2; with --hosts one on each].
    #[arg(long, value_delimiter = ',')]
    trainers: Option<Vec<u32>>,
    /// Measure between so many hosts, which are network namespaces of this machine that a bridge joins. They have equal
    /// numbers of trainers; a dedicated server is on one more. Needs the rights of root.
    #[arg(long, conflicts_with = "transport")]
    hosts: Option<u8>,
    /// The rate of each host's link, each way, such as 1Gbit; without it the processors are the bound.
    #[arg(long, requires = "hosts", value_parser = hosts::rate)]
    link_rate: Option<u64>,
    /// Where servers are; several places with commas between them. A peer whose values are on one server has no others.
    #[arg(long, requires = "hosts", value_enum, value_delimiter = ',', default_value = "dedicated,colocated")]
    placement: Vec<ServerPlacement>,
    /// How bytes travel to our servers; several ways with commas between them. Peers that share memory are compared
    /// with shm only.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp,shm")]
    transport: Vec<TransportName>,
    /// The most bytes of our servers' chunks. Between hosts each server has at least one, if they have 64 KiB or more.
    #[arg(long, value_parser = sizes::parse, default_value = "1MiB")]
    chunk: u64,
    /// How our servers and trainers wait.
    #[arg(long, value_enum, default_value_t = Poll::Adaptive)]
    poll: Poll,
    /// Which payloads of ours over TCP carry checksums.
    #[arg(long, value_enum, default_value_t = Checks::BetweenHosts)]
    checks: Checks,
    /// One more setting of our servers, such as `encrypt=tcp`, which trainers have too; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    serve: Vec<String>,
    /// Where our trainers' gradients and values are: ordinary memory, or buffers of the library.
    #[arg(long, value_enum, default_value_t = Buffers::Ordinary)]
    buffers: Buffers,
    /// Seconds of each peer and size, all sides together.
    #[arg(short = 'D', long, default_value_t = 3.0)]
    duration: f64,
    /// Elements of the tensors that optimizers update; 0 leaves optimizers out.
    #[arg(long, value_parser = sizes::parse, default_value = "100000000")]
    elements: u64,
    /// Where peers are installed.
    #[arg(long, default_value = "target/peers")]
    folder: PathBuf,
    /// The scripts that install and run them.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/peers"))]
    scripts: PathBuf,
    /// Seconds that an installation may take.
    #[arg(long, default_value_t = 600)]
    install_limit: u64,
    /// Seconds that a peer may take for a size.
    #[arg(long, default_value_t = 180)]
    run_limit: u64,
    /// Measure this program instead, which speaks as the scripts do.
    #[arg(long, hide = true, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The comparisons that peers take part in.
struct PeerComparison<'a> {
    args: &'a Args,
    places: InstallFolders,
    hosts: Option<Hosts>,
    trainers: Vec<u32>,
    limit: Duration,
    /// Kits that cannot be had, with the reason.
    missing: Vec<(Kit, String)>,
}

/// Somebody who runs so many rounds when asked.
type Run<'a> = Box<dyn FnMut(u32) -> Result<RoundBlock> + 'a>;

/// A side of ours, with what it is to come up to.
struct Side<'a> {
    /// None where nothing travels.
    transport: Option<TransportName>,
    /// None where there is one host.
    placement: Option<ServerPlacement>,
    /// The time that a round takes on the hosts' links alone, in seconds, if their rate is bounded.
    link_seconds: Option<f64>,
    run: Run<'a>,
    ceiling_name: &'static str,
    ceiling: Run<'a>,
}

/// The blocks of a side.
#[derive(Clone, Default)]
struct Blocks {
    own: Vec<RoundBlock>,
    ceiling: Vec<RoundBlock>,
}

/// The outcome of a comparison with a peer.
enum Ended {
    /// Everybody's blocks: of ours those of each side.
    Well { mine: Vec<Blocks>, theirs: Vec<RoundBlock> },
    /// The peer's reason to give none.
    Failed(Error),
}

/// The least chunk into which values are cut for the sake of several servers.
const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// Rounds of a block.
const ROUNDS_MAX: u32 = 10_000;
/// Steps of a block of optimizers: so few that the roundings of all of them stay within what the checks allow.
const STEPS_MAX: u32 = 3;

const COLUMNS: &[Column] = &[
    plain("peer", "peer"),
    plain("peer_transport", "over"),
    plain("peer_placement", "its servers"),
    plain("work", "work"),
    plain("transport", "ours over"),
    plain("placement", "servers"),
    scaled("latency_us_p50", "ours[us]", 1.0, 1),
    scaled("peer_latency_us_p50", "theirs", 1.0, 1),
    scaled("peer_over_ours", "theirs/ours", 1.0, 2),
    scaled("peer_over_ours_low", "low", 1.0, 2),
    scaled("peer_over_ours_high", "high", 1.0, 2),
    scaled("ceiling_latency_us_p50", "baseline", 1.0, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 2),
    scaled("ratio_to_link", "of link", 1.0, 2),
    scaled("server_cpu_seconds_per_gigabyte", "s/GB", 1.0, 3),
    scaled("peer_server_cpu_seconds_per_gigabyte", "theirs", 1.0, 3),
    plain("wrong", "#wrong"),
    plain("reason", "why not"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    ensure!(args.duration > 0.0, "--duration {}: expected seconds above zero", args.duration);
    ensure!(
        !args.transport.iter().any(|one| matches!(one, TransportName::Loopback | TransportName::Auto)),
        "--transport {}: peers are processes of their own, and each path is a line; expected tcp or shm",
        args.transport.iter().map(|one| word(*one)).collect::<Vec<_>>().join(",")
    );
    let trainers = match (&args.trainers, args.hosts) {
        (Some(trainers), _) => trainers.clone(),
        (None, Some(hosts)) => vec![hosts.into()],
        (None, None) => vec![1, 2],
    };
    let hosts = args.hosts.map(|hosts| Hosts::new(hosts, args.link_rate)).transpose()?;
    let is_even =
        |trainers: &u32| args.hosts.is_none_or(|hosts| *trainers > 0 && trainers.is_multiple_of(hosts.into()));
    ensure!(trainers.iter().all(is_even), "--trainers {trainers:?}: expected multiples of --hosts");
    let ways = if hosts.is_some() { &[TransportName::Auto][..] } else { &args.transport };
    let parameters = json!({ "bytes": args.bytes, "trainers": trainers, "hosts": args.hosts,
        "link_bits_per_second": args.link_rate, "poll": word(args.poll),
        "buffers": word(args.buffers), "checks": word(args.checks), "chunk_bytes": args.chunk,
        "only": args.only.iter().map(|kit| word(*kit)).collect::<Vec<_>>(),
        "transport": ways.iter().map(|one| word(*one)).collect::<Vec<_>>(), "blocks": BLOCKS_MIN,
        "duration_seconds": args.duration, "elements": args.elements, "install_limit_seconds": args.install_limit,
        "run_limit_seconds": args.run_limit });
    let mut report = Report::new("peers", parameters, COLUMNS);
    report.travelled(&Route::within_machine(ways));
    let places = InstallFolders::new(&args.scripts, &args.folder)?;
    let limit = Duration::from_secs(args.run_limit);
    let mut course = PeerComparison { args, places, hosts, trainers, limit, missing: Vec::new() };
    if args.program.is_none() {
        course.install();
    }
    let cells = course.trainers.len() * args.bytes.len();
    // Between hosts nobody shares memory.
    let takes_part =
        |peer: &&Peer| args.only.contains(&peer.kit) && (args.hosts.is_none() || peer.path == TransportName::Tcp);
    let peers = PEERS.iter().filter(takes_part).count();
    report.expect(if args.program.is_some() { cells } else { peers * cells }, "comparisons");
    for peer in PEERS.iter().filter(takes_part) {
        course.rounds(peer, &mut report)?;
        if args.program.is_some() {
            return Ok(report);
        }
    }
    if args.only.contains(&Kit::Torch) && args.elements > 0 && args.hosts.is_none() {
        course.optimizers(&mut report)?;
    }
    Ok(report)
}

impl PeerComparison<'_> {
    fn install(&mut self) {
        for kit in &self.args.only {
            announce(&format!("installing {} unless it is there", word(*kit)));
            if let Err(error) = install(*kit, &self.places, Duration::from_secs(self.args.install_limit)) {
                announce(&format!("{error:#}"));
                self.missing.push((*kit, format!("not installed: {error:#}")));
            }
        }
    }

    /// A peer at every size and number of trainers.
    fn rounds(&self, peer: &Peer, report: &mut Report) -> Result<()> {
        if let Some(reason) = self.lacks(peer.kit) {
            report.push(skipped(&about(peer), reason));
            report.measured(self.trainers.len() * self.args.bytes.len());
            return Ok(());
        }
        for trainers in &self.trainers {
            if !peer.serves(*trainers) {
                let about = about(peer).with("work", many(*trainers)).with("trainers", *trainers);
                report.push(skipped(&about, &format!("skipped: {}", peer.bounds)));
                report.measured(self.args.bytes.len());
                continue;
            }
            for bytes in &self.args.bytes {
                let hosts = self.hosts.as_ref();
                let is_spread = hosts.is_some() && peer.spreads;
                let places = if is_spread { &self.args.placement[..] } else { &[ServerPlacement::Dedicated] };
                for placement in places {
                    self.cell(peer, hosts.map(|hosts| (hosts, *placement)), (*bytes, *trainers), report)?;
                }
                report.measured(1);
            }
        }
        Ok(())
    }

    fn cell(
        &self,
        peer: &Peer,
        on: Option<(&Hosts, ServerPlacement)>,
        (bytes, trainers): (u64, u32),
        report: &mut Report,
    ) -> Result<()> {
        let command = match &self.args.program {
            Some(program) => ["sh".to_owned(), program.to_string_lossy().into_owned(), bytes.to_string()].to_vec(),
            None => peer.command(&self.places, bytes, trainers, on),
        };
        let jobs = self.jobs(peer, bytes, trainers)?;
        let ours = |(job, with): &(BenchJob, TeamServers<'_>)| Team::ours(job, *with);
        let mut teams = jobs.iter().map(ours).collect::<Result<Vec<_>>>()?;
        let baseline = |(job, _): &(BenchJob, _)| Team::best_baseline(Shape::of(job), job, self.hosts.as_ref());
        let mut baseline = jobs.iter().map(baseline).collect::<Result<Vec<_>>>()?;
        let pace = RoundPace { rate: None, spoil: false };
        let sides = teams.iter_mut().zip(&mut baseline).zip(&jobs).map(|((team, baseline), (job, with))| Side {
            transport: Some(job.transport),
            placement: with.placement(),
            link_seconds: with.placement().and_then(|placement| self.link_seconds(job, placement)),
            run: Box::new(move |count| team.block(count, pace)),
            ceiling_name: Shape::of(job).name(),
            ceiling: Box::new(move |count| baseline.block(count, pace)),
        });
        let about = at(about(peer), bytes, trainers).with("rule", word(peer.rule));
        let about = match on {
            Some((_, placement)) if peer.spreads => about
                .clone()
                .with("name", format!("{}, its servers {}", about.name(), word(placement)))
                .with("peer_placement", word(placement)),
            _ => about,
        };
        self.contest(about, &command, (bytes, Some(trainers)), sides.collect(), report)
    }

    /// A peer in turns with ours, as a result for each side of ours, or as one that says why there is none.
    fn contest(
        &self,
        about: Outcome,
        command: &[String],
        (amount, trainers): (u64, Option<u32>),
        mut ours: Vec<Side<'_>>,
        report: &mut Report,
    ) -> Result<()> {
        announce(about.name());
        let log = self.places.log(about.name());
        let mut partner = match Partner::start(command, amount, trainers.unwrap_or(1), &log, self.limit) {
            Ok(partner) => partner,
            Err(error) => {
                report.push(failed(&about, &error));
                return Ok(());
            }
        };
        let about = about.with("version", partner.version());
        let most = if trainers.is_some() { ROUNDS_MAX } else { STEPS_MAX };
        match alternate(&mut ours, &mut |count| partner.block(count), self.args.duration, most)? {
            Ended::Failed(error) => report.push(failed(&about, &error)),
            Ended::Well { mine, theirs } => {
                for (side, blocks) in ours.iter().zip(&mine) {
                    note(report, about.clone(), side, blocks, &theirs);
                }
            }
        }
        Ok(())
    }

    /// The jobs of ours that a peer is compared with, and where their servers are.
    fn jobs(&self, peer: &Peer, bytes: u64, trainers: u32) -> Result<Vec<(BenchJob, TeamServers<'_>)>> {
        if let Some(hosts) = &self.hosts {
            let job = |placement: &ServerPlacement| {
                let job = self.job(peer, bytes, trainers, TransportName::Auto)?;
                let servers = hosts.servers(*placement);
                // All servers have a part, but of few bytes.
                let part = (bytes / u64::from(servers)).max(CHUNK_BYTES_MIN);
                let chunk_bytes = job.chunk_bytes.min(1 << part.ilog2());
                Ok((BenchJob { servers, chunk_bytes, ..job }, TeamServers::On(hosts, *placement)))
            };
            return self.args.placement.iter().map(job).collect();
        }
        let same = |transport: &&TransportName| peer.path == TransportName::Tcp || **transport == TransportName::Shm;
        let job = |transport: &TransportName| Ok((self.job(peer, bytes, trainers, *transport)?, TeamServers::Own));
        self.args.transport.iter().filter(same).map(job).collect()
    }

    /// The time of a round on the busiest link: each way at once, of a host with `n` of `N` trainers
    /// `2 n (H - 1) / H` times the bytes of all values where each of `H` hosts has a server, and `N` times them of a
    /// dedicated server's. None where not every server has a part.
    fn link_seconds(&self, job: &BenchJob, placement: ServerPlacement) -> Option<f64> {
        if job.bytes.div_ceil(job.chunk_bytes) < job.servers.into() {
            return None;
        }
        let (hosts, rate) = (f64::from(self.args.hosts?), self.args.link_rate? as f64);
        let trainers = f64::from(job.trainers);
        let times = match placement {
            ServerPlacement::Dedicated => trainers,
            ServerPlacement::Colocated => 2.0 * trainers / hosts * (hosts - 1.0) / hosts,
        };
        Some(times * job.bytes as f64 * 8.0 / rate)
    }

    fn job(&self, peer: &Peer, bytes: u64, trainers: u32, transport: TransportName) -> Result<BenchJob> {
        let job = BenchJob {
            transport,
            trainers,
            servers: 1,
            shards: 1,
            bytes,
            parameters: 1,
            chunk_bytes: self.args.chunk,
            mode: ModeName::Sync,
            staleness: 0,
            checks: self.args.checks,
            rdma_device: "auto".to_owned(),
            token_file: None,
            dtype: Dtype::F32,
            values: None,
            rule: peer.rule,
            poll: self.args.poll,
            buffers: self.args.buffers,
            pin: false,
            serve: self.args.serve.clone(),
            program: None,
        };
        job.check()?;
        Ok(job)
    }

    /// PyTorch's fused optimizers beside our kernels, one thread each.
    fn optimizers(&self, report: &mut Report) -> Result<()> {
        for kernel in [Kernel::Sgd, Kernel::Momentum, Kernel::Adagrad, Kernel::Adam, Kernel::Adamw] {
            let (rule, elements) = (word(kernel), self.args.elements);
            let work = format!("{rule}, {elements} elements");
            let about = Outcome::new(&format!("torch fused optimizer, {work}")).with("peer", "torch fused optimizer");
            let about = about.with("work", work).with("elements", elements).with("rule", rule.as_str());
            if let Some(reason) = self.lacks(Kit::Torch) {
                report.push(skipped(&about, reason));
                continue;
            }
            let command = optimizers(&self.places, &rule, elements);
            let steps = RefCell::new(Steps::new(Tensors::new(length(elements), 1, kernel.rule()?)));
            let side = Side {
                transport: None,
                placement: None,
                link_seconds: None,
                run: Box::new(|count| Ok(steps.borrow_mut().block(count))),
                ceiling_name: "memory, the same streams",
                ceiling: Box::new(|count| Ok(steps.borrow_mut().stream(count))),
            };
            self.contest(about, &command, (elements, None), vec![side], report)?;
        }
        Ok(())
    }

    fn lacks(&self, kit: Kit) -> Option<&str> {
        self.missing.iter().find(|(missing, _)| *missing == kit).map(|(_, reason)| reason.as_str())
    }
}

/// The servers' kernels, step by step.
struct Steps {
    tensors: Tensors,
    count: u64,
    /// Which of memory's two ways to walk the same streams is the faster one.
    is_tiled: bool,
}

impl Steps {
    fn new(tensors: Tensors) -> Self {
        let mut steps = Self { tensors, count: 0, is_tiled: false };
        // The first one touches memory that nobody has touched.
        steps.stream(1);
        let [lines, tiles] = [false, true].map(|is_tiled| {
            steps.is_tiled = is_tiled;
            median(&steps.stream(STEPS_MAX).seconds)
        });
        steps.is_tiled = tiles < lines;
        steps
    }

    /// Memory's own speed for the same streams.
    fn stream(&mut self, count: u32) -> RoundBlock {
        let mut block = RoundBlock::default();
        for _ in 0..count {
            let start = Instant::now();
            self.tensors.stream(self.is_tiled);
            block.seconds.push(start.elapsed().as_secs_f64());
        }
        block
    }

    fn block(&mut self, steps: u32) -> RoundBlock {
        let mut block = RoundBlock::default();
        for _ in 0..steps {
            self.count += 1;
            let step = Step { version: Version(self.count), ..Step::FIRST };
            let start = Instant::now();
            self.tensors.step(&step);
            block.seconds.push(start.elapsed().as_secs_f64());
            self.tensors.step_plain(&step);
        }
        block.wrong = self.tensors.wrong();
        block
    }
}

/// Blocks of everybody in turns, all about as long. An error is ours, and ends the program.
fn alternate(
    ours: &mut [Side<'_>],
    theirs: &mut dyn FnMut(u32) -> Result<RoundBlock>,
    seconds: f64,
    most: u32,
) -> Result<Ended> {
    let sides = 2 * u32::try_from(ours.len()).context("there are few sides")? + 1;
    let share = seconds / f64::from(sides * BLOCKS_MIN);
    let counts = |side: &mut Side<'_>| -> Result<_> {
        Ok((rounds_for(&mut side.run, share, most)?, rounds_for(&mut side.ceiling, share, most)?))
    };
    let counts = ours.iter_mut().map(counts).collect::<Result<Vec<_>>>()?;
    let count = match rounds_for(theirs, share, most) {
        Ok(count) => count,
        Err(error) => return Ok(Ended::Failed(error)),
    };
    let (mut mine, mut others) = (vec![Blocks::default(); ours.len()], Vec::new());
    for _ in 0..BLOCKS_MIN {
        for ((side, (count, ceiling)), blocks) in ours.iter_mut().zip(&counts).zip(&mut mine) {
            blocks.own.push((side.run)(*count)?);
            blocks.ceiling.push((side.ceiling)(*ceiling)?);
        }
        match theirs(count) {
            Ok(block) => others.push(block),
            Err(error) => return Ok(Ended::Failed(error)),
        }
    }
    Ok(Ended::Well { mine, theirs: others })
}

/// How many rounds take so many seconds, with their checks, but no more than `most`; the side is warm afterwards.
fn rounds_for(run: &mut dyn FnMut(u32) -> Result<RoundBlock>, seconds: f64, most: u32) -> Result<u32> {
    run(2)?;
    let mut rounds = 1;
    loop {
        let start = Instant::now();
        run(rounds)?;
        let took = start.elapsed().as_secs_f64();
        if took > seconds / 4.0 || rounds >= most {
            return Ok(whole(f64::from(rounds) * seconds / took).min(most));
        }
        rounds = (rounds * 4).min(most);
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is within 1 and a million")]
fn whole(rounds: f64) -> u32 {
    rounds.clamp(1.0, 1e6) as u32
}

fn about(peer: &Peer) -> Outcome {
    Outcome::new(&format!("{} over {}", peer.name, word(peer.path)))
        .with("peer", peer.name)
        .with("peer_transport", word(peer.path))
}

fn at(about: Outcome, bytes: u64, trainers: u32) -> Outcome {
    let work = format!("{}, {}", sizes::show(bytes), many(trainers));
    let name = format!("{}, {work}", about.name());
    about.with("name", name).with("work", work).with("bytes", bytes).with("trainers", trainers)
}

fn many(trainers: u32) -> String {
    if trainers == 1 { "1 trainer".to_owned() } else { format!("{trainers} trainers") }
}

fn skipped(about: &Outcome, reason: &str) -> Outcome {
    about.clone().with("reason", reason).without_ratio(reason)
}

fn failed(about: &Outcome, error: &Error) -> Outcome {
    announce(&format!("{}: {error:#}", about.name()));
    skipped(about, &format!("failed: {error:#}"))
}

/// Notes the blocks of a side of ours, of its ceiling and of the peer, and how they compare.
fn note(report: &mut Report, about: Outcome, side: &Side<'_>, ours: &Blocks, theirs: &[RoundBlock]) {
    let medians = |blocks: &[RoundBlock]| blocks.iter().map(|block| median(&block.seconds) * 1e6).collect::<Vec<_>>();
    let rounds = |blocks: &[RoundBlock]| blocks.iter().map(|block| block.seconds.len()).sum::<usize>();
    let wrong = |blocks: &[RoundBlock]| blocks.iter().map(|block| block.wrong).sum::<u64>();
    let Blocks { own: mine, ceiling } = ours;
    let own = match (side.placement, side.transport) {
        (Some(placement), _) => format!("pserver, {} servers", word(placement)),
        (None, Some(transport)) => format!("pserver over {}", word(transport)),
        (None, None) => "pserver".to_owned(),
    };
    let name = format!("{} beside {own}", about.name());
    for (side, blocks) in [(own.as_str(), mine.as_slice()), ("the ceiling", ceiling), ("the peer", theirs)] {
        for (index, block) in blocks.iter().enumerate() {
            report.intervals.push(json!({ "block": index, "name": format!("{name}: {side}"),
                "rounds": block.seconds.len(), "latency_us_p50": median(&block.seconds) * 1e6, "wrong": block.wrong,
                "server_cpu_seconds": block.server.map(|server| server.cpu_seconds) }));
        }
    }
    let cpu = |blocks| cpu_seconds_per_gigabyte(&about, blocks);
    let (cpu_ours, cpu_baseline, cpu_peer) = (cpu(mine), cpu(ceiling), cpu(theirs));
    let (blocks, baseline, others) = (medians(mine), medians(ceiling), medians(theirs));
    let ratios = |others: &[f64]| blocks.iter().zip(others).map(|(own, other)| other / own).collect::<Vec<_>>();
    let ((low, high), (peer_low, peer_high)) = (median_interval(&ratios(&baseline)), median_interval(&ratios(&others)));
    report.push(
        about
            .with("name", name)
            .with("ceiling_name", side.ceiling_name)
            .with("transport", json!(side.transport.map(word)))
            .with("placement", json!(side.placement.map(word)))
            .with("link_latency_us", json!(side.link_seconds.map(|seconds| seconds * 1e6)))
            .with("ratio_to_link", json!(side.link_seconds.map(|seconds| seconds * 1e6 / median(&blocks))))
            .with("rounds", rounds(mine))
            .with("peer_rounds", rounds(theirs))
            .with("latency_us_p50", median(&blocks))
            .with("peer_latency_us_p50", median(&others))
            .with("peer_over_ours", median(&others) / median(&blocks))
            .with("peer_over_ours_low", peer_low)
            .with("peer_over_ours_high", peer_high)
            .with("ceiling_latency_us_p50", median(&baseline))
            .with("ratio_to_ceiling", median(&baseline) / median(&blocks))
            .with("ratio_low", low)
            .with("ratio_high", high)
            .with("server_cpu_seconds_per_gigabyte", json!(cpu_ours))
            .with("ceiling_server_cpu_seconds_per_gigabyte", json!(cpu_baseline))
            .with("peer_server_cpu_seconds_per_gigabyte", json!(cpu_peer))
            .with("peer_cpu_over_ours", json!(cpu_peer.zip(cpu_ours).map(|(theirs, ours)| theirs / ours)))
            .with("block_latency_us", blocks)
            .with("peer_wrong", wrong(theirs))
            .with("wrong", wrong(mine) + wrong(ceiling) + wrong(theirs)),
    );
}

/// Processor seconds of the servers for each 10^9 bytes in either direction; none without servers.
fn cpu_seconds_per_gigabyte(about: &Outcome, blocks: &[RoundBlock]) -> Option<f64> {
    let used: f64 = blocks.iter().map(|block| block.server.map(|server| server.cpu_seconds)).sum::<Option<f64>>()?;
    let rounds = blocks.iter().map(|block| block.seconds.len()).sum::<usize>();
    // Each trainer's gradient and value, both f32.
    let round_bytes = 2.0 * about.field("bytes").as_f64()? * about.field("trainers").as_f64()?;
    Some(used / (round_bytes * rounds as f64 * 1e-9))
}
