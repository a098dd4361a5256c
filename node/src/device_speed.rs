//! How fast an accelerator and the processor update chunks: what `--device auto` chooses by.
//!
//! Both run Adam in binary32, with gradients and parameters in memory of the host, as a server's shards do: the
//! accelerator for one shard, which may have the whole link, the processor with all shards at once. The gradients of
//! every other chunk are bfloat16, since nothing is known of a job yet.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Algorithm, Formula, Gradient, Prepared, Rule, Step};
use pserver_core::port::{Accelerator, DeviceCode, GradientLease, Kernels, NotAdopted, Resident, Update, Work};
use pserver_kernels::cpu::Cpu;

/// The type of parameters.
const TYPE: ElementType = ElementType::Float32;
/// Chunks that an accelerator updates side by side.
const CHUNKS: u32 = 8;
/// Memory of a shard's chunks on the processor, so that it is no cache's.
const SHARD_BYTES: usize = 8 << 20;
/// More gradients would take much memory, and tell the same.
const GRADIENTS_MAX: u32 = 8;
/// The same of larger chunks.
const CHUNK_BYTES_MAX: u32 = 1 << 20;
/// For so long updates are counted, behind as long a warm-up.
const TIME: Duration = Duration::from_millis(25);
/// An accelerator that is a little slower is taken: it leaves the processor to trainers.
const SLOWER_MAX: f64 = 1.1;

/// The updates to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeasuredWork {
    chunk_bytes: u32,
    gradients: u32,
    shards: u16,
}

/// Seconds of one update, where updates follow one another.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredSpeeds {
    work: MeasuredWork,
    accelerator: f64,
    processor: f64,
}

impl MeasuredWork {
    /// Updates as a job has them, of chunks of at most `chunk_bytes` and with at most `gradients` gradients.
    pub(super) fn new(chunk_bytes: u32, gradients: u32, shards: u16) -> Self {
        let (chunk_bytes, gradients) = (chunk_bytes.min(CHUNK_BYTES_MAX) / 4 * 4, gradients.clamp(1, GRADIENTS_MAX));
        Self { chunk_bytes: chunk_bytes.max(4), gradients, shards }
    }

    /// Measures both. The accelerator is empty afterwards.
    ///
    /// # Errors
    /// When the accelerator, or the host, has no room for the chunks, or the accelerator fails.
    pub(super) fn measure(self, accelerator: &mut dyn Accelerator) -> Result<MeasuredSpeeds, Failure> {
        let measured = self.accelerator_seconds(accelerator);
        accelerator.clear();
        Ok(MeasuredSpeeds { work: self, accelerator: measured?, processor: self.processor_seconds() })
    }

    fn accelerator_seconds(self, accelerator: &mut dyn Accelerator) -> Result<f64, Failure> {
        let (code, numbers) = adam();
        let mut budget = Budget::new();
        let leases = self.gradients + 2 + u32::try_from(code.states()).expect("a rule has few states");
        budget.line("measured updates", self.chunk_bytes, u64::from(CHUNKS * leases));
        let arena = Arena::new(&budget)?;
        // Memory that cannot be pinned is copied all the same.
        let _ = accelerator.pin(&arena);
        let lease = || arena.take_zeroed(self.chunk_bytes);
        let leases = |count: usize| (0..count).map(|_| lease()).collect::<Result<Vec<Lease>, _>>();
        let resident = Resident { element_type: TYPE, bytes: self.chunk_bytes, code: code.clone(), keeps_sum: false };
        let (mut queue, mut done) = (VecDeque::new(), Vec::new());
        for index in 0..CHUNKS {
            let slot = match accelerator.adopt(&resident) {
                Err(NotAdopted::Full(_)) if 0 < index => break,
                other => other?,
            };
            let parameter = Arc::new(Value::new(lease()?, self.chunk_bytes));
            queue.push_back(Work::Load { slot, parameter, states: leases(code.states())? });
        }
        let mut count = Count::new();
        while count.goes_on() {
            accelerator.submit(&mut queue)?;
            accelerator.wait(TIME);
            accelerator.poll(&mut done)?;
            for one in done.drain(..) {
                one.outcome?;
                count.add(u32::from(matches!(one.work, Work::Update { .. })));
                queue.push_back(match one.work {
                    Work::Load { slot, states, .. } => {
                        drop(states);
                        let element_type = gradient_type(slot.0);
                        let bytes = self.gradient_bytes(element_type);
                        let gradients = leases(self.gradients as usize)?.into_iter();
                        let gradient = |lease| GradientLease { lease, bytes, element_type };
                        let (gradients, numbers) = (gradients.map(gradient).collect(), numbers.clone());
                        Work::Update { slot, numbers, gradients, is_summed: false, into: lease()? }
                    }
                    update => update,
                });
            }
        }
        Ok(count.seconds())
    }

    fn gradient_bytes(self, element_type: ElementType) -> u32 {
        if element_type == TYPE { self.chunk_bytes } else { self.chunk_bytes / 2 }
    }

    fn processor_seconds(self) -> f64 {
        let begin = Barrier::new(self.shards.into());
        let rates = thread::scope(|scope| {
            let shards: Vec<_> = (0..self.shards).map(|_| scope.spawn(|| self.shard_rate(&begin))).collect();
            shards.into_iter().map(|shard| shard.join().expect("arithmetic does not panic")).sum::<f64>()
        });
        1.0 / rates
    }

    /// Updates a second of one shard, while the others have theirs.
    fn shard_rate(self, begin: &Barrier) -> f64 {
        let (code, numbers) = adam();
        // Pages that nobody has written would all be the same one.
        let tensors = |count: usize| (0..count).map(|_| vec![1_u8; self.chunk_bytes as usize]).collect::<Vec<_>>();
        let of_chunk = self.chunk_bytes as usize * (1 + code.states() + self.gradients as usize);
        let count = SHARD_BYTES.div_ceil(of_chunk).max(CHUNKS as usize);
        let chunk = |_| (tensors(1 + code.states()), tensors(self.gradients as usize));
        let mut chunks: Vec<_> = (0..count).map(chunk).collect();
        let mut kernels = Cpu::new();
        begin.wait();
        let mut count = Count::new();
        while count.goes_on() {
            for (number, (own, gradients)) in (0..).zip(&mut chunks) {
                let element_type = gradient_type(number);
                let bytes = self.gradient_bytes(element_type) as usize;
                let gradients = gradients.iter().map(|whole| Gradient { bytes: &whole[..bytes], element_type });
                let [parameter, states @ ..] = &mut own[..] else { unreachable!("a chunk has a parameter") };
                kernels.update(Update {
                    formula: code.formula(&numbers),
                    element_type: TYPE,
                    parameter,
                    states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
                    gradients: &gradients.collect::<Vec<_>>(),
                });
                count.add(1);
            }
        }
        1.0 / count.seconds()
    }
}

impl MeasuredSpeeds {
    /// Whether the accelerator is the better choice.
    pub(super) fn prefers_accelerator(&self) -> bool {
        self.accelerator <= self.processor * SLOWER_MAX
    }
}

impl fmt::Display for MeasuredSpeeds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MeasuredWork { chunk_bytes, gradients, shards } = self.work;
        let (accelerator, processor) = (self.accelerator * 1e6, self.processor * 1e6);
        write!(
            formatter,
            "an update of {chunk_bytes} bytes by {gradients} gradients, half of them bfloat16, takes {accelerator:.0} \
             us there, and {processor:.0} us on the processor with {shards} shards"
        )
    }
}

/// Counts what happens within a time, behind a warm-up.
struct Count {
    begin: Instant,
    counted_from: Option<Instant>,
    count: u32,
}

impl Count {
    fn new() -> Self {
        Self { begin: Instant::now(), counted_from: None, count: 0 }
    }

    fn add(&mut self, count: u32) {
        if self.counted_from.is_some() {
            self.count += count;
        }
    }

    /// Whether there is time left, or nothing was counted yet.
    fn goes_on(&mut self) -> bool {
        match self.counted_from {
            None if TIME <= self.begin.elapsed() => self.counted_from = Some(Instant::now()),
            None => {}
            Some(from) => return self.count == 0 || from.elapsed() < TIME,
        }
        true
    }

    fn seconds(&self) -> f64 {
        self.counted_from.map_or(f64::NAN, |from| from.elapsed().as_secs_f64() / f64::from(self.count))
    }
}

fn gradient_type(chunk: u32) -> ElementType {
    if chunk.is_multiple_of(2) { TYPE } else { ElementType::Bfloat16 }
}

/// Adam's code, and its numbers in the first step.
fn adam() -> (DeviceCode, Vec<f64>) {
    let rule = Rule { algorithm: Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }, ..Rule::default() };
    let rule = Prepared::new(rule).expect("it is a built-in rule");
    let mut numbers = Vec::new();
    let Formula::Rule { code, .. } = rule.formula(&Step::FIRST, &mut numbers) else { unreachable!("it is a rule") };
    (DeviceCode::Rule(Arc::clone(code)), numbers)
}

#[cfg(test)]
mod tests {
    use pserver_core::port::{Plain, Simulated};

    use super::{Accelerator, Cpu, MeasuredSpeeds, MeasuredWork};

    #[test]
    fn an_accelerator_that_is_at_most_a_tenth_slower_is_preferred() {
        let work = MeasuredWork::new(1 << 20, 4, 16);
        let check = |accelerator, processor, expected| {
            let speeds = MeasuredSpeeds { work, accelerator, processor };
            assert_eq!(speeds.prefers_accelerator(), expected, "{speeds}");
        };
        check(20e-6, 20e-6, true);
        check(22e-6, 20e-6, true);
        check(22.1e-6, 20e-6, false);
        check(60e-6, 20e-6, false);
        // NaN as a time does not prefer the accelerator.
        check(f64::NAN, 20e-6, false);
        let speeds = MeasuredSpeeds { work, accelerator: 60.4e-6, processor: 20e-6 };
        let text = "an update of 1048576 bytes by 4 gradients, half of them bfloat16, takes 60 us there, and 20 us on \
                    the processor with 16 shards";
        assert_eq!(speeds.to_string(), text);
    }

    #[test]
    fn updates_are_those_of_the_job_within_bounds() {
        let check = |chunk_bytes, gradients, expected: (u32, u32)| {
            let work = MeasuredWork::new(chunk_bytes, gradients, 1);
            assert_eq!((work.chunk_bytes, work.gradients), expected);
        };
        check(64 << 10, 3, (64 << 10, 3));
        check(16 << 20, 100, (1 << 20, 8));
        check(1023, 0, (1020, 1));
        check(1, 1, (4, 1));
    }

    #[test]
    fn a_measurement_finds_the_slower_device() {
        let work = MeasuredWork::new(64 << 10, 2, 1);
        let mut plain = Simulated::new(Plain, u64::MAX, 1);
        let speeds = work.measure(&mut plain).expect("there is room");
        assert!(0.0 < speeds.processor && speeds.processor < speeds.accelerator, "{speeds}");
        assert!(!speeds.prefers_accelerator(), "plain code is slower: {speeds}");
        assert_eq!(plain.capabilities().bytes_free, u64::MAX, "it is empty again");
        // A chunk with its states takes 196,608 bytes.
        let with_room =
            |bytes| work.measure(&mut Simulated::new(Cpu::new(), bytes, 1)).map(|speeds| speeds.accelerator);
        assert!(with_room(200_000).expect("there is room for one").is_finite());
        let refused = with_room(100_000).expect_err("there is no room").to_string();
        assert!(refused.contains("196608 bytes"), "{refused}");
    }
}
