//! Duration of a step: how the times of trainers, the network and servers follow one another.
//!
//! A trainer receives parameters, computes and sends gradients; a server updates when it has those of all trainers, and
//! answers. Where servers wait for all trainers, nothing of this overlaps:
//!
//! ```text
//! step = slowest trainer's computing + slowest process's bytes + slowest server's updates
//! ```
//!
//! Bytes count once, on the busiest link, since sender and receiver move them at the same time. Where servers do not
//! wait, a trainer's step has an `n`th of a server's updates, unless a server cannot keep up with all trainers.
//!
//! Processes that share a machine's cores take at least their total divided by the cores, in each of the three terms.
//! Where those that exchange messages are more than the cores, they wait for a core in each round trip as well.

/// Seconds of a process in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ProcessSeconds {
    /// Computing and messages.
    pub(super) own: f64,
    /// Bytes over its link.
    pub(super) wire: f64,
}

/// How processes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepPace {
    /// Whether an update waits for the gradients of all trainers; that of one trainer does.
    pub(super) is_waiting: bool,
    /// Cores that all processes share; zero if each has its own.
    pub(super) shared_cores: u32,
    /// As [`CostModel::crowding_seconds`](super::CostModel::crowding_seconds).
    pub(super) crowding_seconds: f64,
}

/// Slowest and total of one time of some processes.
#[derive(Clone, Copy, Debug, Default)]
struct SlowestAndTotal {
    slowest: f64,
    total: f64,
}

/// All trainers, or all servers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProcessGroup {
    count: f64,
    own: SlowestAndTotal,
    wire: SlowestAndTotal,
    /// Slowest sum of both.
    both: f64,
}

impl ProcessSeconds {
    pub(super) fn sum(self) -> f64 {
        self.own + self.wire
    }
}

impl SlowestAndTotal {
    fn add(&mut self, seconds: f64, count: f64) {
        self.slowest = self.slowest.max(seconds);
        self.total += count * seconds;
    }
}

impl ProcessGroup {
    /// Adds this many equal processes.
    pub(super) fn add(&mut self, process: ProcessSeconds, count: u32) {
        let count = f64::from(count);
        self.count += count;
        self.own.add(process.own, count);
        self.wire.add(process.wire, count);
        self.both = self.both.max(process.sum());
    }
}

impl FromIterator<ProcessSeconds> for ProcessGroup {
    fn from_iter<T: IntoIterator<Item = ProcessSeconds>>(processes: T) -> Self {
        let mut all = Self::default();
        processes.into_iter().for_each(|process| all.add(process, 1));
        all
    }
}

impl StepPace {
    /// Seconds by which so many round trips of a trainer take longer where so many processes make some.
    pub(super) fn crowding(self, processes: usize, round_trips: u32) -> f64 {
        let cores = if self.shared_cores == 0 { usize::MAX } else { self.shared_cores as usize };
        self.crowding_seconds * processes.saturating_sub(cores) as f64 * f64::from(round_trips)
    }

    /// The duration of a step in seconds.
    pub(super) fn step_seconds(self, trainers: &ProcessGroup, servers: &ProcessGroup) -> f64 {
        if self.is_waiting {
            let wire = SlowestAndTotal {
                slowest: trainers.wire.slowest.max(servers.wire.slowest),
                total: trainers.wire.total + servers.wire.total,
            };
            return self.duration(trainers.own) + self.duration(wire) + self.duration(servers.own);
        }
        let alone = trainers.both + servers.own.slowest / trainers.count.max(1.0);
        let total = trainers.own.total + trainers.wire.total + servers.own.total + servers.wire.total;
        self.duration(SlowestAndTotal { slowest: alone.max(servers.both), total })
    }

    fn duration(self, all: SlowestAndTotal) -> f64 {
        match self.shared_cores {
            0 => all.slowest,
            cores => all.slowest.max(all.total / f64::from(cores)),
        }
    }
}
