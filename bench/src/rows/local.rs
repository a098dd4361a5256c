//! One table, looked up and updated in batches, and every row of it checked.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::memory::{Arena, Budget};
use pserver_core::optim::{Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Update};
use pserver_core::rows::{
    CatchUp, Height, Ids, Initializer, RowLayout, RowMerge, RowTable, RowWorkspace, RowsView, TablePieces,
    TableSettings,
};
use pserver_kernels::cpu::Cpu;

use super::baseline::Array;
use super::draw::{Distribution, Draw};

/// Bytes of a piece of memory.
const PIECE_BYTES: u32 = 1 << 20;
/// Every so many rows one is followed by hand.
const FOLLOWED: usize = 509;

/// The settings of the measurement.
pub(crate) struct TablePlan {
    pub(crate) rows: u64,
    pub(crate) width: u32,
    pub(crate) batch: usize,
    pub(crate) rule: Rule,
    pub(crate) catch_up: CatchUp,
    pub(crate) distribution: Distribution,
    pub(crate) exponent: f64,
    pub(crate) iterations: u32,
}

/// Processor seconds of each batch, ours and those of the array.
#[derive(Default)]
pub(crate) struct BatchTimes {
    pub(crate) own: Vec<f64>,
    pub(crate) baseline: Vec<f64>,
}

/// The times of the measurement.
pub(crate) struct Local {
    pub(crate) touch: BatchTimes,
    pub(crate) lookup: BatchTimes,
    pub(crate) update: BatchTimes,
    /// Unique rows of an update's batch, as a mean.
    pub(crate) unique: f64,
    pub(crate) wrong: u64,
    pub(crate) record_bytes: u64,
    pub(crate) index_bytes: u64,
}

/// A table, the array it is compared with, and what is known of its rows.
struct TableBench<'a> {
    plan: &'a TablePlan,
    kernels: Cpu,
    table: RowTable,
    work: RowWorkspace,
    merge: RowMerge,
    array: Array,
    followed: Vec<Followed>,
    gradients: Vec<f32>,
    values: Vec<u8>,
    flat: Vec<f32>,
}

/// A row whose updates are reckoned one after another.
struct Followed {
    id: u64,
    weight: Vec<u8>,
    states: Vec<Vec<u8>>,
}

impl Local {
    /// Fills a table with all rows, then looks up and updates batches of them.
    pub(crate) fn measure(plan: &TablePlan) -> Result<Self> {
        let mut draw = Draw::new(plan.distribution, plan.exponent, plan.rows, 1);
        let mut bench = TableBench::new(plan, &mut draw)?;
        let touch = bench.touch()?;
        let (mut lookup, mut update, mut unique, mut wrong) = (BatchTimes::default(), BatchTimes::default(), 0, 0);
        for count in 0..=plan.iterations {
            let (looked, updated) = (draw.batch(plan.batch), draw.batch(plan.batch));
            let [own, baseline] = bench.look_up(&looked)?;
            wrong += bench.wrong(&looked, count == 0);
            let [own_update, baseline_update] = bench.update(&updated, &mut unique)?;
            // The first of each touches memory that nobody has touched.
            if count > 0 {
                lookup.own.push(own);
                lookup.baseline.push(baseline);
                update.own.push(own_update);
                update.baseline.push(baseline_update);
            }
        }
        let usage = bench.table.usage();
        let ids: Vec<_> = bench.followed.iter().map(|row| row.id).collect();
        bench.look_up(&ids)?;
        wrong += bench.wrong(&ids, false);
        Ok(Self {
            touch,
            lookup,
            update,
            unique: unique as f64 / f64::from(plan.iterations + 1),
            wrong,
            record_bytes: usage.record_bytes,
            index_bytes: usage.index_bytes,
        })
    }
}

impl<'a> TableBench<'a> {
    fn new(plan: &'a TablePlan, draw: &mut Draw) -> Result<Self> {
        let layout = RowLayout::new(ElementType::Float32, plan.width, Height::Unbounded)?;
        let settings = TableSettings {
            layout,
            rule: Arc::new(Prepared::new(plan.rule.clone())?),
            initializer: Initializer::Uniform { low: -0.1, high: 0.1 },
            seed: 1,
            first: 0,
            catch_up: plan.catch_up,
        };
        let states = plan.rule.states().len();
        let parts = states + 1;
        // Records at their largest stride, and an index that was just split everywhere.
        let record = (layout.row_bytes() * parts + 64) as u64;
        let mut budget = Budget::new();
        budget.line("rows", PIECE_BYTES, plan.rows * (record + 64) / u64::from(PIECE_BYTES) + plan.rows / 1024 + 4);
        let table = RowTable::new(settings, TablePieces::new(Arena::of_large_pages(&budget)?, PIECE_BYTES))?;
        let width = plan.width as usize;
        let rows = usize::try_from(plan.rows).context("--rows")?;
        let mut bench = Self {
            plan,
            kernels: Cpu::new(),
            table,
            work: RowWorkspace::default(),
            merge: RowMerge::with_capacity(plan.batch),
            array: Array::new(rows, width * parts)?,
            followed: Vec::new(),
            gradients: (0..plan.batch * width).map(|_| draw.single() - 0.5).collect(),
            values: vec![0; plan.batch * layout.row_bytes()],
            flat: vec![0.0; plan.batch * width],
        };
        for id in (0..plan.rows).step_by(FOLLOWED) {
            let states = vec![vec![0; layout.row_bytes()]; states];
            bench.followed.push(Followed { id, weight: bench.initial(id), states });
        }
        Ok(bench)
    }

    fn initial(&self, id: u64) -> Vec<u8> {
        let settings = self.table.settings();
        let mut row = vec![0; settings.layout.row_bytes()];
        settings.begin(id, &mut row);
        row
    }

    /// Touches all rows for the first time, a batch after another; an array is filled with the same values.
    fn touch(&mut self) -> Result<BatchTimes> {
        let mut times = BatchTimes::default();
        let settings = self.table.settings().clone();
        let layout = settings.layout;
        let all: Vec<u64> = (0..self.plan.rows).collect();
        let mut array = vec![0; all.len() * layout.row_bytes()];
        let pieces = array.chunks_mut(self.plan.batch * layout.row_bytes());
        for (ids, into) in all.chunks(self.plan.batch).zip(pieces) {
            let checked = Ids::new(layout, ids)?;
            let start = processor_seconds();
            self.table.reserve(&mut self.work, checked)?;
            let own = since(start);
            let baseline = timed(|| {
                for (id, row) in ids.iter().zip(into.chunks_exact_mut(layout.row_bytes())) {
                    settings.begin(*id, row);
                }
            });
            // The last batch may be a short one.
            if ids.len() == self.plan.batch || times.own.is_empty() {
                times.own.push(own);
                times.baseline.push(baseline);
            }
        }
        Ok(times)
    }

    /// Seconds of a lookup by the table and by the array.
    fn look_up(&mut self, ids: &[u64]) -> Result<[f64; 2]> {
        let width = self.plan.width as usize;
        let checked = Ids::new(self.table.layout(), ids)?;
        let bytes = ids.len() * width * 4;
        self.values.resize(bytes.max(self.values.len()), 0);
        self.flat.resize((bytes / 4).max(self.flat.len()), 0.0);
        let own =
            timed(|| self.table.pull(&mut self.work, &mut self.kernels, checked, black_box(&mut self.values[..bytes])));
        let places = places(ids);
        let baseline = timed(|| self.array.gather(&places, black_box(&mut self.flat), width));
        Ok([own, baseline])
    }

    /// Seconds of an update by the table and by the array.
    fn update(&mut self, ids: &[u64], unique: &mut usize) -> Result<[f64; 2]> {
        let (width, layout) = (self.plan.width as usize, self.table.layout());
        let version = Version(self.table.version().0 + 1);
        let step = Step { version, ..Step::FIRST };
        let bytes: &[u8] = bytemuck::cast_slice(&self.gradients);
        let start = processor_seconds();
        let views = [RowsView::new(layout, ids, bytes)?];
        let merged = self.merge.unite(layout, &views)?;
        self.table.apply(&mut self.work, &mut self.kernels, &merged, &step, &[])?;
        let own = since(start);
        *unique += merged.len();
        self.follow(ids, &step);
        let places = places(ids);
        let baseline = timed(|| self.array.add(&places, black_box(&self.gradients), width));
        Ok([own, baseline])
    }

    /// One update of the rows that are followed, as a dense parameter has it: what a batch says of a row is summed in
    /// order, and is zero when it says nothing.
    fn follow(&mut self, ids: &[u64], step: &Step) {
        let width = self.plan.width as usize;
        let mut sums = vec![0.0_f32; self.followed.len() * width];
        for (id, row) in ids.iter().zip(self.gradients.chunks_exact(width)) {
            if let Some(index) = followed(*id) {
                sums[index * width..][..width].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
        }
        for (row, sum) in self.followed.iter_mut().zip(sums.chunks_exact(width)) {
            row.update(&mut self.kernels, &self.table.settings().rule, step, bytemuck::cast_slice(sum));
        }
    }

    /// How many elements of the last lookup are not what they must be: all of them before the first update, and after
    /// it those of the rows that are followed.
    fn wrong(&self, ids: &[u64], all: bool) -> u64 {
        let rows = self.values.chunks_exact(self.plan.width as usize * 4);
        let differ = |(id, row): (&u64, &[u8])| {
            let expected = match followed(*id).map(|index| &self.followed[index]) {
                Some(followed) => followed.weight.clone(),
                None if all => self.initial(*id),
                None => return 0,
            };
            let pairs = row.chunks_exact(4).zip(expected.chunks_exact(4));
            pairs.filter(|(found, expected)| found != expected).count() as u64
        };
        ids.iter().zip(rows).map(differ).sum()
    }
}

impl Followed {
    fn update(&mut self, kernels: &mut Cpu, rule: &Prepared, step: &Step, bytes: &[u8]) {
        let element_type = ElementType::Float32;
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        kernels.update(Update {
            formula: rule.formula(step, &mut Vec::new()),
            element_type,
            parameter: &mut self.weight,
            states: &mut states,
            gradients: &[Gradient { bytes, element_type }],
        });
    }
}

/// Which of the followed rows this is.
fn followed(id: u64) -> Option<usize> {
    usize::try_from(id).ok().filter(|id| id.is_multiple_of(FOLLOWED)).map(|id| id / FOLLOWED)
}

fn places(ids: &[u64]) -> Vec<usize> {
    ids.iter().map(|id| usize::try_from(*id).expect("a row of an array")).collect()
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = processor_seconds();
    work();
    since(start)
}

/// Seconds since then that a processor worked for this thread; never none, so that they can be divided by.
fn since(start: f64) -> f64 {
    (processor_seconds() - start).max(1e-6)
}

/// Seconds that a processor has worked for this thread: what others do on this machine meanwhile is not counted.
fn processor_seconds() -> f64 {
    // Not what `getrusage` counts, which goes by the ticks of the system's clock, a few milliseconds long.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).expect("threads have a clock").as_secs_f64()
}
