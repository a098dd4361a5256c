//! Counters that processes wait for.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::shared::Region;
use crate::job::Poll;

/// How long an adaptive waiter looks before it sleeps.
const LOOK: Duration = Duration::from_micros(50);
/// Looks between two of the clock.
const LOOKS: u32 = 64;

/// A counter in shared memory that only grows, and wraps: one process adds, others wait for it.
#[derive(Clone, Copy)]
pub(crate) struct Counter {
    /// The word that counts; the one after it is the number of sleepers, which they alone change.
    word: usize,
}

impl Counter {
    /// The counter with this place; each takes two words.
    pub(crate) const fn at(place: usize) -> Self {
        Self { word: place * 2 }
    }

    /// Adds, and wakes the sleepers.
    pub(crate) fn add(self, region: &Region, count: u32) {
        region.word(self.word).fetch_add(count, Ordering::Release);
        // Either this process sees the sleeper, or the sleeper sees the new count before it sleeps.
        fence(Ordering::SeqCst);
        if region.word(self.word + 1).load(Ordering::Relaxed) != 0 {
            // A wake that fails has nobody to wake.
            let _ = futex::wake(region.word(self.word), futex::Flags::empty(), i32::MAX.unsigned_abs());
        }
    }

    /// Waits until the counter has reached `goal`.
    pub(crate) fn wait(self, region: &Region, goal: u32, poll: Poll) {
        let word = region.word(self.word);
        if look(poll, || reached(word, goal)) {
            return;
        }
        let sleepers = region.word(self.word + 1);
        sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        loop {
            let seen = word.load(Ordering::Acquire);
            if has_passed(seen, goal) {
                break;
            }
            // It comes back early when the word has changed or a signal arrived; either way it looks again.
            let _ = futex::wait(word, futex::Flags::empty(), seen, None);
        }
        sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the counter has reached `goal`.
    pub(crate) fn is_at(self, region: &Region, goal: u32) -> bool {
        reached(region.word(self.word), goal)
    }
}

/// Trainers that begin each round together.
pub(crate) struct Barrier {
    region: Option<Region>,
    trainers: u32,
    poll: Poll,
    goal: u32,
}

impl Barrier {
    /// A barrier of so many trainers in a region; with one trainer there is nobody to wait for.
    pub(crate) fn new(region: Option<Region>, trainers: u32, poll: Poll) -> Self {
        // A round is short: whoever is here first looks for a while before it sleeps.
        let poll = if poll == Poll::Busy { Poll::Busy } else { Poll::Adaptive };
        Self { region, trainers, poll, goal: 0 }
    }

    pub(crate) fn wait(&mut self) {
        let Some(region) = &self.region else { return };
        self.goal = self.goal.wrapping_add(self.trainers);
        let counter = Counter::at(0);
        counter.add(region, 1);
        counter.wait(region, self.goal, self.poll);
    }
}

/// Looks as long as the way of waiting lets it; says whether it was seen.
pub(crate) fn look(poll: Poll, mut seen: impl FnMut() -> bool) -> bool {
    if seen() {
        return true;
    }
    if poll == Poll::Block {
        return false;
    }
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if seen() {
                return true;
            }
            std::hint::spin_loop();
        }
        if poll == Poll::Adaptive && start.elapsed() > LOOK {
            return false;
        }
    }
}

fn reached(word: &AtomicU32, goal: u32) -> bool {
    has_passed(word.load(Ordering::Acquire), goal)
}

/// Whether a wrapping count is at or after another.
fn has_passed(count: u32, goal: u32) -> bool {
    count.wrapping_sub(goal) < 1 << 31
}

/// One side adds many times for each time that the other waits, so that it sees sleepers come and go between additions.
#[test]
fn no_wake_up_is_lost() {
    const ROUNDS: u32 = 20_000;
    const ADDITIONS: u32 = 24;
    let (region, path) = Region::create(0).expect("there is shared memory");
    let other = Region::open(&path).expect("it is open");
    let (many, one) = (Counter::at(0), Counter::at(1));
    std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            one.wait(&other, round, Poll::Block);
            (0..ADDITIONS).for_each(|_| many.add(&other, 1));
        }
    });
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            one.add(&region, 1);
            many.wait(&region, round * ADDITIONS, Poll::Block);
        }
        done.send(())
    });
    is_done.recv_timeout(Duration::from_secs(60)).expect("both end: each addition wakes the one that waits for it");
}
