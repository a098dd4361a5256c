//! Placement: which server holds which rows of which parameter.

use super::cost::{Exchanges, real};
use super::division::Portion;
use super::given_placement::GivenPlacement;
use super::step_loads::{GroupLoad, StepLoads};
use super::step_time::{ProcessGroup, ProcessSeconds};

/// How servers share the parameters. No server holds more than
/// [`server_bytes_max`](super::CostModel::server_bytes_max), if a placement without such a server is found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Minimises the estimated time of a step; parameters are cut where they may be. Never slower than
    /// [`RoundRobin`](Self::RoundRobin), by the estimate.
    ///
    /// The search starts from whole parameters in turn and, for several numbers of servers, from greedy placements:
    /// whole parameters, the slowest first, each to the server that is done first; and the same with parameters cut
    /// where they would pass the level at which all servers are equal; both also by bytes. The fastest starts are
    /// improved: pieces are moved, shifted, exchanged and joined as long as that makes the step shorter, or servers
    /// more equal in a step as long. Then bytes are spread, as far as the step gets at most a twentieth longer.
    #[default]
    Balanced,
    /// As [`Balanced`](Self::Balanced), but bytes are spread however long the step gets.
    EqualBytes,
    /// Whole parameters in turn, in program order: the baseline for comparisons.
    RoundRobin,
    /// As it is given.
    Given(GivenPlacement),
}

/// Improvements of one start at most; a few per group are usual.
const IMPROVEMENTS_MAX: usize = 10_000;
/// An improvement of less than this share is left alone.
const WORTH: f64 = 1e-6;
/// Starts that are improved, the fastest ones; round robin is another one.
const IMPROVED_STARTS: usize = 4;
/// Every number of servers up to this one has starts of its own; above it, every doubling.
const EVERY_COUNT_MAX: usize = 8;
/// By how much of its time a step may get longer, so that servers hold about as many bytes.
const SLACK: f64 = 0.05;
/// Bytes for each server from which on they are spread.
const SPREAD_BYTES: f64 = 65_536.0;
/// Steps of the search for whole parameters that fit under a limit.
const PACKING_STEPS_MAX: u32 = 20_000;

/// An amount that servers are to have equally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    Seconds,
    Bytes,
}

/// The reason why one assignment is better than another, among those that exceed the limit of bytes least.
#[derive(Clone, Copy, Debug)]
enum PlacementGoal {
    /// Shorter steps first, then more equal servers.
    Time,
    /// Bytes spread over servers, in steps of at most so many seconds.
    Bytes { step_max: f64 },
}

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

    /// The bytes that a server holds for so many full units.
    fn bytes(&self, units: u64) -> f64 {
        if units == 0 {
            return 0.0;
        }
        self.rows_bytes * real((units * self.unit).min(self.rows)) / real(self.rows)
    }

    fn amount(&self, measure: Measure, units: u64) -> f64 {
        match measure {
            Measure::Seconds => self.seconds(units).sum(),
            Measure::Bytes => self.bytes(units),
        }
    }

    fn whole(&self, measure: Measure) -> f64 {
        self.amount(measure, self.units())
    }

    /// How many units fit into this amount.
    fn fitting(&self, measure: Measure, amount: f64) -> u64 {
        let (mut least, mut most) = (0, self.units());
        while least < most {
            let middle = most - (most - least) / 2;
            if self.amount(measure, middle) <= amount { least = middle } else { most = middle - 1 }
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
    pub(super) fn place(&self, loads: &StepLoads, servers: u32) -> Vec<Vec<Portion>> {
        let in_turn = Assignment::new(loads, servers).in_turn();
        let found = match self {
            Self::RoundRobin | Self::Given(_) => in_turn,
            Self::Balanced | Self::EqualBytes => {
                let in_turn_step = in_turn.score.step;
                let fastest = fastest(loads, servers, in_turn);
                let own = fastest.score.step;
                let step_max = match self {
                    Self::EqualBytes => f64::INFINITY,
                    _ => in_turn_step.min(own * (1.0 + SLACK)).max(own),
                };
                spread(fastest, PlacementGoal::Bytes { step_max })
            }
        };
        (0..loads.groups.len()).map(|group| found.portions(group)).collect()
    }
}

/// The assignment with the shortest step.
fn fastest<'a>(loads: &'a StepLoads, servers: u32, in_turn: Assignment<'a>) -> Assignment<'a> {
    let start = || Assignment::new(loads, servers);
    let mut starts: Vec<Assignment<'_>> = counts(servers as usize)
        .flat_map(|used| [false, true].map(|cuts| start().filled(used, cuts, Measure::Seconds)))
        .collect();
    if loads.bytes_max > 0.0 {
        starts.push(start().filled(servers as usize, true, Measure::Bytes));
        starts.extend(start().packed());
    }
    // The sort is stable, so equal starts keep their order.
    let by_excess = |one: &Assignment<'_>, other: &Assignment<'_>| one.score.excess.total_cmp(&other.score.excess);
    starts.sort_by(|one, other| by_excess(one, other).then(one.score.step.total_cmp(&other.score.step)));
    starts.truncate(IMPROVED_STARTS);
    starts.push(in_turn);
    let improved = starts.into_iter().map(|one| one.improved(PlacementGoal::Time));
    let better = |best: Assignment<'a>, next: Assignment<'a>| best.or_better(next, PlacementGoal::Time);
    improved.reduce(better).expect("there is one start")
}

/// An assignment with bytes spread over servers, if they are enough for that.
fn spread(fastest: Assignment<'_>, goal: PlacementGoal) -> Assignment<'_> {
    let (loads, servers) = (fastest.loads, fastest.cluster.servers.len());
    let bytes: f64 = loads.groups.iter().map(|load| load.whole(Measure::Bytes)).sum();
    if bytes < SPREAD_BYTES * real(servers as u64) {
        return fastest;
    }
    let filled = fastest.emptied().filled(servers, true, Measure::Bytes);
    [fastest.clone(), filled]
        .into_iter()
        .map(|one| one.improved(goal))
        .fold(fastest, |best, next| best.or_better(next, goal))
}

/// The numbers of servers that starts use.
fn counts(servers: usize) -> impl Iterator<Item = usize> {
    (1..=servers).filter(move |used| *used <= EVERY_COUNT_MAX || used.is_power_of_two() || *used == servers)
}

/// The worth of an assignment.
#[derive(Clone, Copy, Debug, Default)]
struct PlacementScore {
    /// Bytes of all servers above the limit.
    excess: f64,
    /// Seconds of a step.
    step: f64,
    /// Sum of the squares of the servers' seconds.
    spread: f64,
    /// Sum of the squares of the servers' bytes.
    bytes_spread: f64,
}

impl PlacementScore {
    fn is_better(self, than: Self, goal: PlacementGoal) -> bool {
        let is_less = |own: f64, other: f64| own < other * (1.0 - WORTH);
        if self.excess > 0.0 || than.excess > 0.0 {
            return is_less(self.excess, than.excess);
        }
        let is_faster = || {
            let is_more_equal = self.step <= than.step && is_less(self.spread, than.spread);
            is_less(self.step, than.step) || is_more_equal
        };
        match goal {
            PlacementGoal::Time => is_faster(),
            PlacementGoal::Bytes { step_max } => match (self.step <= step_max, than.step <= step_max) {
                (true, true) => {
                    let is_as_equal = self.bytes_spread <= than.bytes_spread;
                    is_less(self.bytes_spread, than.bytes_spread) || is_as_equal && is_faster()
                }
                (false, false) => is_faster(),
                (is_short, _) => is_short,
            },
        }
    }
}

/// Pieces on a server.
#[derive(Clone, Copy, Debug, Default)]
struct ServerPieces {
    /// Without messages.
    seconds: ProcessSeconds,
    /// That it holds.
    bytes: f64,
    /// Pieces with dense gradients.
    dense: u32,
    /// Gradients of rows.
    tables: u32,
}

impl ServerPieces {
    fn exchanges(&self) -> Exchanges {
        Exchanges { has_dense: self.dense > 0, tables: self.tables }
    }

    fn amount(&self, measure: Measure) -> f64 {
        match measure {
            Measure::Seconds => self.seconds.sum(),
            Measure::Bytes => self.bytes,
        }
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

    /// The same without any group.
    fn emptied(&self) -> Self {
        Self::new(self.loads, u32::try_from(self.cluster.servers.len()).expect("a limit bounds servers"))
    }

    fn or_better(self, other: Self, goal: PlacementGoal) -> Self {
        if other.score.is_better(self.score, goal) { other } else { self }
    }

    /// The groups, those with most of the measure first.
    fn order(&self, measure: Measure) -> Vec<usize> {
        let loads = &self.loads.groups;
        let mut order: Vec<usize> = (0..loads.len()).collect();
        let whole = |group: usize| loads[group].whole(measure);
        order.sort_by(|one, other| whole(*other).total_cmp(&whole(*one)).then(one.cmp(other)));
        order
    }

    /// Groups to the first `used` servers, those with most of the measure first. Those that may be cut come last, and
    /// fill servers up to the level at which all would be equal, if that is asked for.
    fn filled(mut self, used: usize, cuts: bool, measure: Measure) -> Self {
        let loads = &self.loads.groups;
        let order = self.order(measure);
        let all: f64 = order.iter().map(|group| loads[*group].whole(measure)).sum();
        let (cut, whole): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|group| cuts && loads[*group].units() > 1);
        for group in whole {
            self.apply(&[(group, self.least(used, measure), loads[group].units())]);
        }
        let most = self.cluster.servers.iter().map(|server| server.amount(measure)).fold(0.0, f64::max);
        let level = (all / real(used as u64)).max(most);
        for group in cut {
            self.pour(group, level, used, measure);
        }
        self
    }

    /// Fills one server after the other up to the level; the remainder goes to the one that has least.
    fn pour(&mut self, group: usize, level: f64, used: usize, measure: Measure) {
        let load = &self.loads.groups[group];
        let mut remaining = load.units();
        while remaining > 0 {
            let server = self.least(used, measure);
            let held = self.units[group][server];
            let room = level - self.cluster.servers[server].amount(measure) + load.amount(measure, held);
            let units = load.fitting(measure, room).saturating_sub(held).min(remaining);
            let units = if units == 0 { remaining } else { units };
            self.apply(&[(group, server, held + units)]);
            remaining -= units;
        }
    }

    fn least(&self, used: usize, measure: Measure) -> usize {
        let all = self.cluster.servers[..used].iter().enumerate();
        let found = all.min_by(|one, other| one.1.amount(measure).total_cmp(&other.1.amount(measure)));
        found.map_or(0, |(server, _)| server)
    }

    /// Whole groups so that no server exceeds the limit of bytes, if the search finds a way, and then those that may be
    /// cut up to the limit.
    fn packed(mut self) -> Option<Self> {
        let order = self.order(Measure::Bytes);
        let (cut, whole): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|group| self.loads.groups[*group].units() > 1);
        let mut steps = 0;
        if !self.pack(&whole, &mut steps) {
            return None;
        }
        let (level, servers) = (self.loads.bytes_max, self.cluster.servers.len());
        cut.into_iter().for_each(|group| self.pour(group, level, servers, Measure::Bytes));
        Some(self)
    }

    /// Tries every server for the first of these groups, then the others; servers with equal bytes once.
    fn pack(&mut self, groups: &[usize], steps: &mut u32) -> bool {
        let Some((group, others)) = groups.split_first() else { return true };
        let load = &self.loads.groups[*group];
        let mut tried: Vec<f64> = Vec::new();
        for server in 0..self.cluster.servers.len() {
            let held = self.cluster.servers[server].bytes;
            if self.loads.bytes_max < held + load.whole(Measure::Bytes) || tried.contains(&held) {
                continue;
            }
            *steps += 1;
            if *steps > PACKING_STEPS_MAX {
                return false;
            }
            tried.push(held);
            self.apply(&[(*group, server, load.units())]);
            if self.pack(others, steps) {
                return true;
            }
            self.apply(&[(*group, server, 0)]);
        }
        false
    }

    /// Makes the best change that can be found, as long as there is one.
    fn improved(mut self, goal: PlacementGoal) -> Self {
        for _ in 0..IMPROVEMENTS_MAX {
            let mut best: Option<(PlacementScore, Vec<UnitChange>)> = None;
            for change in self.changes(goal) {
                let score = self.after(&change);
                if score.is_better(best.as_ref().map_or(self.score, |(score, _)| *score), goal) {
                    best = Some((score, change));
                }
            }
            let Some((_, change)) = best else { break };
            self.apply(&change);
        }
        self
    }

    /// Changes to the servers with most of what the goal is about, and pieces of a group joined.
    fn changes(&self, goal: PlacementGoal) -> Vec<Vec<UnitChange>> {
        let servers = self.cluster.servers.len();
        let most = |amount: fn(&ServerPieces) -> f64| {
            let servers = (0..servers).rev();
            servers.max_by(|one, other| self.compare(amount, *one, *other))
        };
        let fullest = most(|load| load.bytes).map(|server| (server, Measure::Bytes));
        let mut sources = Vec::new();
        if let (PlacementGoal::Time, true) = (goal, self.score.excess == 0.0) {
            let slowest = [most(|load| load.seconds.own), most(|load| load.seconds.wire)];
            sources.extend(slowest.into_iter().flatten().map(|server| (server, Measure::Seconds)));
            sources.dedup();
        } else {
            sources.extend(fullest);
        }
        let mut changes = Vec::new();
        for group in 0..self.loads.groups.len() {
            let held: Vec<usize> = (0..servers).filter(|server| self.units[group][*server] > 0).collect();
            for (from, measure) in sources.iter().filter(|(from, _)| held.contains(from)) {
                for to in (0..servers).filter(|to| to != from) {
                    self.shifts(group, (*from, to), *measure, &mut changes);
                    changes.extend(self.exchange(group, (*from, to), *measure));
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

    fn compare(&self, amount: fn(&ServerPieces) -> f64, one: usize, other: usize) -> std::cmp::Ordering {
        amount(&self.cluster.servers[one]).total_cmp(&amount(&self.cluster.servers[other]))
    }

    /// All of a group from one server to another, or as much as makes both equal, or one unit more.
    fn shifts(&self, group: usize, (from, to): (usize, usize), measure: Measure, changes: &mut Vec<Vec<UnitChange>>) {
        let (here, there) = (self.units[group][from], self.units[group][to]);
        let half = self.loads.groups[group].fitting(measure, self.difference(from, to, measure) / 2.0);
        let parts = [half, half + 1].into_iter().filter(|units| (1..here).contains(units));
        let units = parts.chain([here]);
        changes.extend(units.map(|units| vec![(group, from, here - units), (group, to, there + units)]));
    }

    /// A group for one of another server: the one after which both are most equal.
    fn exchange(&self, group: usize, (from, to): (usize, usize), measure: Measure) -> Option<Vec<UnitChange>> {
        let amount = |group: usize, at: usize| self.loads.groups[group].amount(measure, self.units[group][at]);
        let wanted = amount(group, from) - self.difference(from, to, measure) / 2.0;
        let others = (0..self.loads.groups.len()).filter(|other| *other != group && self.units[*other][to] > 0);
        let distance = |other: &usize| (amount(*other, to) - wanted).abs();
        let other = others.min_by(|one, next| distance(one).total_cmp(&distance(next)))?;
        let units = |group: usize| self.units[group][from] + self.units[group][to];
        Some(vec![(group, from, 0), (group, to, units(group)), (other, to, 0), (other, from, units(other))])
    }

    fn difference(&self, from: usize, to: usize, measure: Measure) -> f64 {
        self.cluster.servers[from].amount(measure) - self.cluster.servers[to].amount(measure)
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
            own.bytes += load.bytes(after) - load.bytes(before);
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
        let (mut excess, mut bytes_spread) = (0.0, 0.0);
        let (mut linked, mut messages, mut all) = (self.trainers as usize, 0.0, Exchanges::default());
        for server in &cluster.servers {
            let exchanges = server.exchanges();
            let own_messages = real(exchanges.messages());
            let own = server.seconds.own + own_messages * f64::from(self.trainers) * self.server_message;
            let seconds = ProcessSeconds { own, wire: server.seconds.wire };
            spread += seconds.sum() * seconds.sum();
            bytes_spread += server.bytes * server.bytes;
            if self.bytes_max > 0.0 {
                // Sums of shares are rounded.
                excess += (server.bytes - self.bytes_max - 0.5).max(0.0);
            }
            messages += own_messages;
            linked += usize::from(exchanges.messages() > 0);
            all.add(exchanges);
            servers.add(seconds, 1);
        }
        let mut trainers = ProcessGroup::default();
        let own = self.trainer.own + cluster.pieces_seconds + messages * self.trainer_message;
        trainers.add(ProcessSeconds { own, wire: self.trainer.wire }, self.trainers);
        let crowding = self.pace.crowding(linked, all.round_trips());
        PlacementScore { excess, step: self.pace.step_seconds(&trainers, &servers) + crowding, spread, bytes_spread }
    }
}
