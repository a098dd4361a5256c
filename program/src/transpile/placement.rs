//! Placement: which server holds which rows of which parameter.

use std::ops::Range;

use super::cost::real;

/// How servers share the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Minimises the time of the slowest server; parameters are cut where they may be.
    ///
    /// Uncut parameters go first, the slowest first, each to the server that is done first (no server is then later
    /// than 4/3 of the optimum, by Graham's bound). The others fill servers up to the level at which all would be
    /// equal, the slowest first, and are cut at the level. Then pieces of the slowest server are moved, cut or
    /// exchanged as long as that helps.
    #[default]
    Balanced,
    /// Whole parameters in turn, in program order: the baseline for comparisons.
    RoundRobin,
}

/// The time of a server for a step of one group of ops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// Seconds that do not depend on the number of rows.
    pub(super) fixed: f64,
    /// Seconds of all rows.
    pub(super) rows_seconds: f64,
    /// Rows; one when the group cannot be cut.
    pub(super) rows: u64,
    /// Cuts are at multiples of this many rows.
    pub(super) unit: u64,
}

/// Some rows of a group, on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Portion {
    /// The server.
    pub(super) server: u32,
    /// The rows.
    pub(super) rows: Range<u64>,
}

/// Improvements at most; each makes the slowest server faster, and a few per group are usual.
const IMPROVEMENTS_MAX: usize = 10_000;
/// An improvement of less than this share is left alone.
const WORTH: f64 = 1e-6;

impl Load {
    fn units(&self) -> u64 {
        self.rows.div_ceil(self.unit)
    }

    /// Seconds of this many full units.
    fn seconds(&self, units: u64) -> f64 {
        if units == 0 {
            return 0.0;
        }
        let rows = (units * self.unit).min(self.rows);
        self.fixed + self.rows_seconds * (real(rows) / real(self.rows))
    }

    /// How many units fit into these seconds.
    fn fitting(&self, seconds: f64) -> u64 {
        let (mut least, mut most) = (0, self.units());
        while least < most {
            let middle = most - (most - least) / 2;
            if self.seconds(middle) <= seconds { least = middle } else { most = middle - 1 }
        }
        least
    }
}

impl Placement {
    /// Where the groups go: for each one its portions in the order of their rows, each on a server of its own.
    pub(super) fn place(self, loads: &[Load], servers: u32) -> Vec<Vec<Portion>> {
        let mut held = Assignment::new(loads, servers);
        match self {
            Self::RoundRobin => held.place_in_turn(),
            Self::Balanced => {
                held.fill();
                held.improve();
                // Either initial placement may lead to the better result, so the outcome is never worse than round
                // robin.
                let mut dealt = Assignment::new(loads, servers);
                dealt.place_in_turn();
                dealt.improve();
                if dealt.slowest() < held.slowest() {
                    held = dealt;
                }
            }
        }
        (0..loads.len()).map(|group| held.portions(group)).collect()
    }
}

/// The assignment while it is computed.
struct Assignment<'a> {
    loads: &'a [Load],
    /// Seconds of each server.
    servers: Vec<f64>,
    /// For every group the units on each server.
    units: Vec<Vec<u64>>,
}

impl<'a> Assignment<'a> {
    fn new(loads: &'a [Load], servers: u32) -> Self {
        let servers = servers as usize;
        Self { loads, servers: vec![0.0; servers], units: vec![vec![0; servers]; loads.len()] }
    }

    fn put(&mut self, group: usize, server: usize, units: u64) {
        self.set(group, server, self.units[group][server] + units);
    }

    fn set(&mut self, group: usize, server: usize, units: u64) {
        let before = std::mem::replace(&mut self.units[group][server], units);
        self.servers[server] += self.loads[group].seconds(units) - self.loads[group].seconds(before);
    }

    /// Whole groups to the servers in turn.
    fn place_in_turn(&mut self) {
        for (group, load) in self.loads.iter().enumerate() {
            self.put(group, group % self.servers.len(), load.units());
        }
    }

    fn slowest(&self) -> f64 {
        self.servers[self.most()]
    }

    /// Whole groups, the slowest first; then the others up to the level.
    fn fill(&mut self) {
        let mut order: Vec<usize> = (0..self.loads.len()).collect();
        let seconds = |group: &usize| self.loads[*group].seconds(self.loads[*group].units());
        order.sort_by(|one, other| seconds(other).total_cmp(&seconds(one)).then(one.cmp(other)));
        let all: f64 = order.iter().map(seconds).sum();
        let (cut, whole): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|at| self.loads[*at].units() > 1);
        for group in whole {
            self.put(group, self.least(), 1);
        }
        let level = (all / real(self.servers.len() as u64)).max(self.servers[self.most()]);
        for group in cut {
            self.pour(group, level);
        }
    }

    /// Fills one server after the other up to the level; the remainder goes to the least loaded.
    fn pour(&mut self, group: usize, level: f64) {
        let mut remaining = self.loads[group].units();
        while remaining > 0 {
            let server = self.least();
            let room = self.loads[group].fitting(level - self.servers[server]).min(remaining);
            let units = if room == 0 { remaining } else { room };
            self.put(group, server, units);
            remaining -= units;
        }
    }

    /// Takes something off the slowest server, the best that can be found, as long as it helps.
    fn improve(&mut self) {
        for _ in 0..IMPROVEMENTS_MAX {
            let slowest = self.most();
            let limit = self.servers[slowest] * (1.0 - WORTH);
            let groups = (0..self.loads.len()).filter(|group| self.units[*group][slowest] > 0);
            let mut best: Option<(f64, PlacementChange)> = None;
            for group in groups {
                for change in self.changes(group, slowest) {
                    let seconds = self.after(&change);
                    if seconds < best.as_ref().map_or(limit, |(least, _)| *least) {
                        best = Some((seconds, change));
                    }
                }
            }
            let Some((_, change)) = best else { return };
            change.sets.iter().for_each(|(group, server, units)| self.set(*group, *server, *units));
        }
    }

    /// The possible changes to a group on the slowest server.
    fn changes(&self, group: usize, slowest: usize) -> Vec<PlacementChange> {
        let held = self.units[group][slowest];
        let load = &self.loads[group];
        let mut changes = Vec::new();
        for server in (0..self.servers.len()).filter(|server| *server != slowest) {
            let there = self.units[group][server];
            let shift =
                |units: u64| PlacementChange::of(&[(group, slowest, held - units), (group, server, there + units)]);
            changes.push(shift(held));
            // As much as makes both equal, or a little less or more.
            let half = (self.servers[slowest] - self.servers[server]) / 2.0;
            let half = load.fitting(half).min(held);
            changes.extend([half, half + 1].into_iter().filter(|units| (1..held).contains(units)).map(shift));
            let others = (0..self.loads.len()).filter(|other| *other != group);
            for other in others.filter(|other| self.units[*other][server] > 0) {
                let back = self.units[other][server];
                let own = self.units[other][slowest];
                changes.push(PlacementChange::of(&[
                    (group, slowest, 0),
                    (group, server, there + held),
                    (other, server, 0),
                    (other, slowest, own + back),
                ]));
            }
        }
        changes
    }

    /// The time of the slower of the servers that a change touches.
    fn after(&self, change: &PlacementChange) -> f64 {
        let mut touched: Vec<usize> = change.sets.iter().map(|(_, server, _)| *server).collect();
        touched.sort_unstable();
        touched.dedup();
        let seconds = touched.into_iter().map(|server| {
            let sets = change.sets.iter().filter(|(_, at, _)| *at == server);
            sets.fold(self.servers[server], |seconds, (group, _, units)| {
                let load = &self.loads[*group];
                seconds - load.seconds(self.units[*group][server]) + load.seconds(*units)
            })
        });
        seconds.fold(0.0, f64::max)
    }

    fn least(&self) -> usize {
        let all = self.servers.iter().enumerate();
        all.min_by(|one, other| one.1.total_cmp(other.1)).map_or(0, |(server, _)| server)
    }

    fn most(&self) -> usize {
        let all = self.servers.iter().enumerate().rev();
        all.max_by(|one, other| one.1.total_cmp(other.1)).map_or(0, |(server, _)| server)
    }

    /// Neighbouring rows for each server that has some, servers in order.
    fn portions(&self, group: usize) -> Vec<Portion> {
        let load = &self.loads[group];
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

/// Units of groups on servers as they would be.
struct PlacementChange {
    sets: Vec<(usize, usize, u64)>,
}

impl PlacementChange {
    fn of(sets: &[(usize, usize, u64)]) -> Self {
        Self { sets: sets.to_vec() }
    }
}
