//! Placement: which server holds which rows of which parameter.

use super::cost::{Exchanges, real};
use super::division::Portion;
use super::step_loads::{GroupLoad, StepLoads};
use super::step_time::{ProcessGroup, ProcessSeconds};

/// How servers share the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Minimises the estimated time of a step; parameters are cut where they may be. Never slower than
    /// [`RoundRobin`](Self::RoundRobin), by the estimate.
    ///
    /// The search starts from whole parameters in turn and, for several numbers of servers, from two greedy placements:
    /// whole parameters, the slowest first, each to the server that is done first; and the same with parameters cut
    /// where they would pass the level at which all servers are equal. The fastest starts are improved: pieces are
    /// moved, shifted, exchanged and joined as long as that makes the step shorter, or servers more equal in a step as
    /// long.
    #[default]
    Balanced,
    /// Whole parameters in turn, in program order: the baseline for comparisons.
    RoundRobin,
}

/// Improvements of one start at most; a few per group are usual.
const IMPROVEMENTS_MAX: usize = 10_000;
/// An improvement of less than this share is left alone.
const WORTH: f64 = 1e-6;
/// Starts that are improved, the fastest ones; round robin is another one.
const IMPROVED_STARTS: usize = 4;
/// Every number of servers up to this one has starts of its own; above it, every doubling.
const EVERY_COUNT_MAX: usize = 8;

impl GroupLoad {
    /// A server's seconds of this many full units, without messages.
    fn seconds(&self, units: u64) -> ProcessSeconds {
        if units == 0 {
            return ProcessSeconds::default();
        }
        let share = real((units * self.unit).min(self.rows)) / real(self.rows);
        let ProcessSeconds { own, wire } = self.rows_seconds;
        ProcessSeconds { own: self.fixed + own * share, wire: wire * share }
    }

    fn whole(&self) -> f64 {
        self.seconds(self.units()).sum()
    }

    /// How many units fit into these seconds.
    fn fitting(&self, seconds: f64) -> u64 {
        let (mut least, mut most) = (0, self.units());
        while least < most {
            let middle = most - (most - least) / 2;
            if self.seconds(middle).sum() <= seconds { least = middle } else { most = middle - 1 }
        }
        least
    }

    /// A trainer's seconds for this many pieces, beyond those for one.
    fn pieces_seconds(&self, pieces: u32) -> f64 {
        if pieces < 2 { 0.0 } else { self.cut + self.piece * f64::from(pieces - 2) }
    }
}

impl Placement {
    /// Where the groups go: for each one its portions in the order of their rows, each on a server of its own.
    pub(super) fn place(self, loads: &StepLoads, servers: u32) -> Vec<Vec<Portion>> {
        let in_turn = Assignment::new(loads, servers).in_turn();
        let found = match self {
            Self::RoundRobin => in_turn,
            Self::Balanced => {
                let mut starts: Vec<Assignment<'_>> = counts(servers as usize)
                    .flat_map(|used| [false, true].map(|cuts| Assignment::new(loads, servers).filled(used, cuts)))
                    .collect();
                // The sort is stable, so equal starts keep their order.
                starts.sort_by(|one, other| one.score.step.total_cmp(&other.score.step));
                starts.truncate(IMPROVED_STARTS);
                starts.push(in_turn);
                let improved = starts.into_iter().map(Assignment::improved);
                improved.reduce(|best, next| if next.score.is_better(best.score) { next } else { best }).expect("one")
            }
        };
        (0..loads.groups.len()).map(|group| found.portions(group)).collect()
    }
}

/// The numbers of servers that starts use.
fn counts(servers: usize) -> impl Iterator<Item = usize> {
    (1..=servers).filter(move |used| *used <= EVERY_COUNT_MAX || used.is_power_of_two() || *used == servers)
}

/// The worth of an assignment: shorter steps first, then more equal servers.
#[derive(Clone, Copy, Debug, Default)]
struct PlacementScore {
    /// Seconds of a step.
    step: f64,
    /// Sum of the squares of the servers' seconds.
    spread: f64,
}

impl PlacementScore {
    fn is_better(self, than: Self) -> bool {
        let is_more_equal = self.step <= than.step && self.spread < than.spread * (1.0 - WORTH);
        self.step < than.step * (1.0 - WORTH) || is_more_equal
    }
}

/// Pieces on a server.
#[derive(Clone, Copy, Debug, Default)]
struct ServerPieces {
    /// Without messages.
    seconds: ProcessSeconds,
    /// Pieces with dense gradients.
    dense: u32,
    /// Gradients of rows.
    tables: u32,
}

impl ServerPieces {
    fn exchanges(&self) -> Exchanges {
        Exchanges { has_dense: self.dense > 0, tables: self.tables }
    }
}

/// Loads of all processes.
#[derive(Clone, Debug, Default)]
struct ClusterLoad {
    servers: Vec<ServerPieces>,
    /// A trainer's seconds for pieces.
    pieces_seconds: f64,
}

/// The assignment while it is computed.
#[derive(Clone)]
struct Assignment<'a> {
    loads: &'a StepLoads,
    cluster: ClusterLoad,
    /// For every group the units on each server.
    units: Vec<Vec<u64>>,
    score: PlacementScore,
}

/// Units of a group on a server as they would be.
type UnitChange = (usize, usize, u64);

impl<'a> Assignment<'a> {
    fn new(loads: &'a StepLoads, servers: u32) -> Self {
        let servers = servers as usize;
        let cluster = ClusterLoad { servers: vec![ServerPieces::default(); servers], pieces_seconds: 0.0 };
        Self { loads, cluster, units: vec![vec![0; servers]; loads.groups.len()], score: PlacementScore::default() }
    }

    /// Whole groups to the servers in turn.
    fn in_turn(mut self) -> Self {
        for (group, load) in self.loads.groups.iter().enumerate() {
            self.apply(&[(group, group % self.cluster.servers.len(), load.units())]);
        }
        self
    }

    /// Groups to the first `used` servers, the slowest first. Those that may be cut come last, and fill servers up to
    /// the level at which all would be equal, if that is asked for.
    fn filled(mut self, used: usize, cuts: bool) -> Self {
        let loads = &self.loads.groups;
        let mut order: Vec<usize> = (0..loads.len()).collect();
        order.sort_by(|one, other| loads[*other].whole().total_cmp(&loads[*one].whole()).then(one.cmp(other)));
        let all: f64 = order.iter().map(|group| loads[*group].whole()).sum();
        let (cut, whole): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|group| cuts && loads[*group].units() > 1);
        for group in whole {
            self.apply(&[(group, self.least(used), loads[group].units())]);
        }
        let slowest = self.cluster.servers.iter().map(|server| server.seconds.sum()).fold(0.0, f64::max);
        let level = (all / real(used as u64)).max(slowest);
        for group in cut {
            self.pour(group, level, used);
        }
        self
    }

    /// Fills one server after the other up to the level; the remainder goes to the least loaded.
    fn pour(&mut self, group: usize, level: f64, used: usize) {
        let load = &self.loads.groups[group];
        let mut remaining = load.units();
        while remaining > 0 {
            let server = self.least(used);
            let room = load.fitting(level - self.cluster.servers[server].seconds.sum()).min(remaining);
            let units = if room == 0 { remaining } else { room };
            self.apply(&[(group, server, self.units[group][server] + units)]);
            remaining -= units;
        }
    }

    fn least(&self, used: usize) -> usize {
        let all = self.cluster.servers[..used].iter().enumerate();
        let found = all.min_by(|one, other| one.1.seconds.sum().total_cmp(&other.1.seconds.sum()));
        found.map_or(0, |(server, _)| server)
    }

    /// Makes the best change that can be found, as long as there is one.
    fn improved(mut self) -> Self {
        for _ in 0..IMPROVEMENTS_MAX {
            let mut best: Option<(PlacementScore, Vec<UnitChange>)> = None;
            for change in self.changes() {
                let score = self.after(&change);
                if score.is_better(best.as_ref().map_or(self.score, |(score, _)| *score)) {
                    best = Some((score, change));
                }
            }
            let Some((_, change)) = best else { break };
            self.apply(&change);
        }
        self
    }

    /// Changes to the slowest servers, and pieces of a group joined.
    fn changes(&self) -> Vec<Vec<UnitChange>> {
        let servers = self.cluster.servers.len();
        let mut slowest: Vec<usize> = [|load: &ServerPieces| load.seconds.own, |load: &ServerPieces| load.seconds.wire]
            .into_iter()
            .filter_map(|time| (0..servers).rev().max_by(|one, other| self.compare(time, *one, *other)))
            .collect();
        slowest.dedup();
        let mut changes = Vec::new();
        for group in 0..self.loads.groups.len() {
            let held: Vec<usize> = (0..servers).filter(|server| self.units[group][*server] > 0).collect();
            for from in slowest.iter().filter(|from| held.contains(from)) {
                for to in (0..servers).filter(|to| to != from) {
                    self.shifts(group, *from, to, &mut changes);
                    changes.extend(self.exchange(group, *from, to));
                }
            }
            if held.len() > 1 {
                for to in &held {
                    let joined = |from: &usize| if from == to { self.loads.groups[group].units() } else { 0 };
                    changes.push(held.iter().map(|from| (group, *from, joined(from))).collect());
                    changes.extend(held.iter().filter(|from| *from != to).map(|from| {
                        let all = self.units[group][*from] + self.units[group][*to];
                        vec![(group, *from, 0), (group, *to, all)]
                    }));
                }
            }
        }
        changes
    }

    fn compare(&self, time: fn(&ServerPieces) -> f64, one: usize, other: usize) -> std::cmp::Ordering {
        time(&self.cluster.servers[one]).total_cmp(&time(&self.cluster.servers[other]))
    }

    /// All of a group from one server to another, or as much as makes both equal, or one unit more.
    fn shifts(&self, group: usize, from: usize, to: usize, changes: &mut Vec<Vec<UnitChange>>) {
        let (here, there) = (self.units[group][from], self.units[group][to]);
        let half = self.loads.groups[group].fitting(self.difference(from, to) / 2.0);
        let parts = [half, half + 1].into_iter().filter(|units| (1..here).contains(units));
        let units = parts.chain([here]);
        changes.extend(units.map(|units| vec![(group, from, here - units), (group, to, there + units)]));
    }

    /// A group for one of another server: the one after which both are most equal.
    fn exchange(&self, group: usize, from: usize, to: usize) -> Option<Vec<UnitChange>> {
        let seconds = |group: usize, server: usize| self.loads.groups[group].seconds(self.units[group][server]).sum();
        let wanted = seconds(group, from) - self.difference(from, to) / 2.0;
        let others = (0..self.loads.groups.len()).filter(|other| *other != group && self.units[*other][to] > 0);
        let distance = |other: &usize| (seconds(*other, to) - wanted).abs();
        let other = others.min_by(|one, next| distance(one).total_cmp(&distance(next)))?;
        let units = |group: usize| self.units[group][from] + self.units[group][to];
        Some(vec![(group, from, 0), (group, to, units(group)), (other, to, 0), (other, from, units(other))])
    }

    fn difference(&self, from: usize, to: usize) -> f64 {
        self.cluster.servers[from].seconds.sum() - self.cluster.servers[to].seconds.sum()
    }

    fn apply(&mut self, change: &[UnitChange]) {
        let mut cluster = std::mem::take(&mut self.cluster);
        self.change(&mut cluster, change);
        self.cluster = cluster;
        change.iter().for_each(|(group, server, units)| self.units[*group][*server] = *units);
        self.score = self.loads.score(&self.cluster);
    }

    fn after(&self, change: &[UnitChange]) -> PlacementScore {
        let mut cluster = self.cluster.clone();
        self.change(&mut cluster, change);
        self.loads.score(&cluster)
    }

    /// The loads of processes after a change; all units of a group stay somewhere or are new.
    fn change(&self, cluster: &mut ClusterLoad, change: &[UnitChange]) {
        for (group, server, units) in change {
            let load = &self.loads.groups[*group];
            let (before, after) = (self.units[*group][*server], *units);
            let own = &mut cluster.servers[*server];
            let (less, more) = (load.seconds(before), load.seconds(after));
            own.seconds.own += more.own - less.own;
            own.seconds.wire += more.wire - less.wire;
            let count = |pieces: u32, each: u32| pieces + each * u32::from(after > 0) - each * u32::from(before > 0);
            own.dense = count(own.dense, load.exchanges.has_dense.into());
            own.tables = count(own.tables, load.exchanges.tables);
        }
        for group in touched(change) {
            let held = &self.units[group];
            let before = held.iter().filter(|units| **units > 0).count();
            let gone = change.iter().filter(|(at, server, units)| *at == group && held[*server] > 0 && *units == 0);
            let new = change.iter().filter(|(at, server, units)| *at == group && held[*server] == 0 && *units > 0);
            let after = before + new.count() - gone.count();
            let seconds = |pieces: usize| {
                self.loads.groups[group].pieces_seconds(u32::try_from(pieces).expect("a limit bounds servers"))
            };
            cluster.pieces_seconds += seconds(after) - seconds(before);
        }
    }

    /// Neighbouring rows for each server that has some, servers in order.
    fn portions(&self, group: usize) -> Vec<Portion> {
        let load = &self.loads.groups[group];
        let mut next = 0;
        let mut portions = Vec::new();
        for (server, units) in (0..).zip(&self.units[group]).filter(|(_, units)| **units > 0) {
            let end = (next + units * load.unit).min(load.rows);
            portions.push(Portion { server, rows: next..end });
            next = end;
        }
        portions
    }
}

/// The groups of a change, each once; equal ones are neighbours.
fn touched(change: &[UnitChange]) -> Vec<usize> {
    let mut groups: Vec<usize> = change.iter().map(|(group, _, _)| *group).collect();
    groups.dedup();
    groups
}

impl StepLoads {
    fn score(&self, cluster: &ClusterLoad) -> PlacementScore {
        let (mut servers, mut spread) = (ProcessGroup::default(), 0.0);
        let (mut linked, mut messages, mut all) = (self.trainers as usize, 0.0, Exchanges::default());
        for server in &cluster.servers {
            let exchanges = server.exchanges();
            let own_messages = real(exchanges.messages());
            let own = server.seconds.own + own_messages * f64::from(self.trainers) * self.server_message;
            let seconds = ProcessSeconds { own, wire: server.seconds.wire };
            spread += seconds.sum() * seconds.sum();
            messages += own_messages;
            linked += usize::from(exchanges.messages() > 0);
            all.add(exchanges);
            servers.add(seconds, 1);
        }
        let mut trainers = ProcessGroup::default();
        let own = self.trainer.own + cluster.pieces_seconds + messages * self.trainer_message;
        trainers.add(ProcessSeconds { own, wire: self.trainer.wire }, self.trainers);
        let crowding = self.pace.crowding(linked, all.round_trips());
        PlacementScore { step: self.pace.step_seconds(&trainers, &servers) + crowding, spread }
    }
}
