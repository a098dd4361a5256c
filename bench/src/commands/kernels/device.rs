//! `psbench kernels --device cuda`: kernels beside the device's own copies, and a server's steps beside the link.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use half::bf16;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::limits::CHUNK_BYTES_DEFAULT;
use pserver_core::memory::{Arena, Budget, Lease, Value};
use pserver_core::optim::{Formula, Prepared, Step};
use pserver_core::port::{Accelerator, Code, Done, GradientLease, Kernels, Plain, Resident, Update, Work};
use pserver_kernels::cuda::{Cuda, Probe, Settings, Timed, Way, rules_folder};
use serde_json::json;

use super::{Args, Kernel};
use crate::report::{Column, Outcome, Report, plain, scaled};
use crate::statistics::{median, median_interval};
use crate::tensors::{PERIOD, value};

/// Trainers whose gradients are summed, when nobody says how many.
const GRADIENTS: [u32; 4] = [1, 4, 8, 16];
/// Gradients as trainers send them.
const TYPES: [ElementType; 2] = [ElementType::Float32, ElementType::Bfloat16];
const PARAMETER: ElementType = ElementType::Float32;
/// Elements of a chunk, as servers cut them.
const CHUNK: u64 = CHUNK_BYTES_DEFAULT as u64 / 4;
/// Elements of a whole step at most: the gradients of all trainers are in the host's memory.
const STEP_ELEMENTS_MAX: u64 = 1 << 25;

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("bytes_per_element", "bytes"),
    scaled("elements_per_second", "Gelem/s", 1e9, 3),
    scaled("bytes_per_second", "GB/s", 1e9, 1),
    scaled("ceiling_bytes_per_second", "ceiling[GB/s]", 1e9, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    plain("wrong", "#wrong"),
];

/// What the device and its link do when nothing but bytes are moved, in bytes a second.
struct Ceilings {
    /// Read and written together.
    within: f64,
    into: f64,
    out: f64,
}

/// One line of the table.
struct Case {
    kernel: Kernel,
    gradients: u32,
    gradient_type: ElementType,
}

impl Case {
    fn name(&self) -> String {
        let (rule, count) = (crate::job::word(self.kernel), self.gradients);
        format!("{rule}, {count} {}", self.gradient_type)
    }

    /// What runs, and its numbers for one step.
    fn code(&self) -> Result<(Code, Vec<f64>, Option<Prepared>)> {
        let Some(rule) = self.kernel.rule()? else { return Ok((Code::Sum, vec![1.0], None)) };
        let prepared = Prepared::new(rule)?;
        let mut scalars = Vec::new();
        let Formula::Rule { code, .. } = prepared.formula(&step(1), &mut scalars) else {
            anyhow::bail!("{} has no code", self.name())
        };
        Ok((Code::Rule(Arc::clone(code)), scalars, Some(prepared)))
    }
}

pub(super) fn run(args: &Args) -> Result<Report> {
    let gradients = if args.gradients.is_empty() { GRADIENTS.to_vec() } else { args.gradients.clone() };
    // Rules that are not shipped are compiled once, and kept where a server of this user keeps them.
    let cache = rules_folder(|name| std::env::var(name).ok());
    let settings = Settings { cache, ..Settings::of(args.ordinal) };
    let mut probe = Probe::open(&settings)?;
    let (device, architecture, driver) = probe.about();
    let rules = args.rule.iter().map(|rule| crate::job::word(*rule)).collect::<Vec<_>>();
    let parameters = json!({ "rules": rules, "elements": args.elements, "gradients": gradients,
        "iterations": args.iterations, "dtype": "f32", "device": device, "architecture": architecture,
        "driver_cuda": driver });
    ensure!(args.elements > 0 && args.iterations > 0, "expected elements and iterations");
    let most = gradients.iter().max().context("--gradients: expected a count")?;
    ensure!((1..=64).contains(most), "--gradients {most}: expected 1 to 64");
    let ceilings = ceilings(&mut probe, args)?;
    let mut report = Report::new("kernels", parameters, COLUMNS);
    report.results.push(moved("copy within the device", ceilings.within));
    report.results.push(moved("copy to the device", ceilings.into));
    report.results.push(moved("copy from the device", ceilings.out));
    for kernel in &args.rule {
        for gradients in &gradients {
            for gradient_type in TYPES {
                let case = Case { kernel: *kernel, gradients: *gradients, gradient_type };
                eprintln!("psbench: {}", case.name());
                report.results.push(alone(&mut probe, &case, &ceilings, args)?);
                report.results.push(whole(&settings, &case, &ceilings, args)?);
            }
        }
    }
    Ok(report)
}

/// The same bytes, moved and nothing else: within the device a tensor of the kernels' length, over the link one of a
/// step's.
fn ceilings(probe: &mut Probe, args: &Args) -> Result<Ceilings> {
    let mut rate = |way, elements: u64, each: u64| -> Result<f64> {
        let bytes = elements * PARAMETER.bytes();
        // The first one touches memory that nobody has touched.
        let seconds = probe.copies(way, bytes, args.iterations + 1)?;
        Ok((bytes * each) as f64 / median(&seconds[1..]))
    };
    let (within, step) = (args.elements, args.elements.min(STEP_ELEMENTS_MAX));
    Ok(Ceilings { within: rate(Way::Within, within, 2)?, into: rate(Way::In, step, 1)?, out: rate(Way::Out, step, 1)? })
}

fn moved(name: &str, rate: f64) -> Outcome {
    Outcome::new(name).with("bytes_per_second", rate).with("ceiling_bytes_per_second", rate)
}

/// The kernel on tensors that lie on the device.
fn alone(probe: &mut Probe, case: &Case, ceilings: &Ceilings, args: &Args) -> Result<Outcome> {
    let (code, numbers, _) = case.code()?;
    let written = match code {
        Code::Rule(_) => 2 * (1 + code.states() as u64),
        _ => 1,
    };
    let bytes = written * PARAMETER.bytes() + u64::from(case.gradients) * case.gradient_type.bytes();
    let timed = Timed {
        code: &code,
        element_type: PARAMETER,
        gradient_type: case.gradient_type,
        elements: args.elements,
        gradients: case.gradients as usize,
        numbers: &numbers,
    };
    let seconds = probe.updates(&timed, args.iterations + 1)?;
    let all = (bytes * args.elements) as f64;
    Ok(outcome(&format!("{}, kernel", case.name()), &seconds[1..], args.elements, (bytes, all), ceilings.within))
}

/// A server's step: gradients from pinned memory, the update, the parameter to pinned memory, chunk by chunk.
fn whole(settings: &Settings, case: &Case, ceilings: &Ceilings, args: &Args) -> Result<Outcome> {
    let elements = args.elements.min(STEP_ELEMENTS_MAX);
    let mut server = Server::new(settings, case, elements)?;
    let mut seconds = Vec::new();
    for _ in 0..=args.iterations {
        seconds.push(server.step()?);
    }
    let (into, out) = (u64::from(case.gradients) * case.gradient_type.bytes(), PARAMETER.bytes());
    // Both ways at once: the slower one bounds.
    let least = ((into * elements) as f64 / ceilings.into).max((out * elements) as f64 / ceilings.out);
    let all = ((into + out) * elements) as f64;
    let name = format!("{}, server step", case.name());
    let found = outcome(&name, &seconds[1..], elements, (into + out, all), all / least);
    Ok(found.with("wrong", server.wrong()))
}

fn outcome(name: &str, seconds: &[f64], elements: u64, (each, all): (u64, f64), ceiling: f64) -> Outcome {
    let own = median(seconds);
    let ratios: Vec<f64> = seconds.iter().map(|seconds| all / seconds / ceiling).collect();
    let (low, high) = median_interval(&ratios);
    Outcome::new(name)
        .with("bytes_per_element", each)
        .with("elements_per_second", elements as f64 / own)
        .with("bytes_per_second", all / own)
        .with("block_latency_us", seconds.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("ceiling_bytes_per_second", ceiling)
        .with("ratio_to_ceiling", all / own / ceiling)
        .with("ratio_low", low)
        .with("ratio_high", high)
}

fn step(version: u64) -> Step {
    Step { version: Version(version), rate: None, norm: None, scale: 1.0 }
}

/// A parameter in chunks on the device, and one step's work for all of them.
struct Server {
    device: Cuda,
    prepared: Option<Prepared>,
    /// What waits for its next step.
    work: VecDeque<Work>,
    chunks: usize,
    steps: u64,
    gradient_type: ElementType,
    gradients: usize,
}

impl Server {
    fn new(settings: &Settings, case: &Case, elements: u64) -> Result<Self> {
        let mut device = Cuda::open(settings.clone())?;
        let (code, _, prepared) = case.code()?;
        let (chunks, states) = (elements.div_ceil(CHUNK), code.states() as u64);
        let bytes = |elements: u64, of: ElementType| u32::try_from(elements * of.bytes());
        let mut budget = Budget::new();
        budget.line("gradients", bytes(CHUNK, case.gradient_type)?, chunks * u64::from(case.gradients));
        budget.line("parameters", bytes(CHUNK, PARAMETER)?, chunks + 1 + states);
        let arena = Arena::new(&budget)?;
        device.pin(&arena)?;
        let mut work = VecDeque::new();
        for chunk in 0..chunks {
            let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(elements);
            let length = range.end - range.start;
            let resident = Resident { element_type: PARAMETER, bytes: bytes(length, PARAMETER)?, code: code.clone() };
            let slot = device.adopt(&resident)?;
            let parameter = filled(&arena, range.clone(), PARAMETER, 0)?;
            let parameter = Arc::new(Value::new(parameter, resident.bytes));
            let states = (0..states).map(|_| arena.take_zeroed(resident.bytes)).collect::<Result<_, _>>()?;
            finish(&mut device, &mut VecDeque::from([Work::Load { slot, parameter, states }]), 1)?;
            let gradient = |seed| -> Result<GradientLease> {
                let lease = filled(&arena, range.clone(), case.gradient_type, seed)?;
                Ok(GradientLease { bytes: lease.len(), lease, element_type: case.gradient_type })
            };
            let gradients = (1..=case.gradients as usize).map(gradient).collect::<Result<_>>()?;
            let into = arena.take(resident.bytes)?;
            work.push_back(Work::Update { slot, numbers: Vec::new(), gradients, into });
        }
        let (chunks, gradients) = (work.len(), case.gradients as usize);
        Ok(Self { device, prepared, work, chunks, steps: 0, gradient_type: case.gradient_type, gradients })
    }

    /// One update of every chunk; seconds from the first copy in to the last one out.
    fn step(&mut self) -> Result<f64> {
        self.steps += 1;
        let mut scalars = vec![1.0];
        if let Some(prepared) = &self.prepared {
            let _ = prepared.formula(&step(self.steps), &mut scalars);
        }
        for work in &mut self.work {
            if let Work::Update { numbers, .. } = work {
                numbers.clone_from(&scalars);
            }
        }
        let start = Instant::now();
        let done = finish(&mut self.device, &mut self.work, self.chunks)?;
        let seconds = start.elapsed().as_secs_f64();
        self.work.extend(done.into_iter().map(|one| one.work));
        Ok(seconds)
    }

    /// Elements that do not have the bits of the plain form. Values repeat, so one period stands for all.
    fn wrong(&self) -> u64 {
        let mut plain = bytes_of(0..PERIOD, PARAMETER, 0);
        let count = self.prepared.as_ref().map_or(0, |prepared| prepared.states().len());
        let mut states = vec![vec![0; plain.len()]; count];
        let gradients: Vec<_> =
            (1..=self.gradients).map(|seed| bytes_of(0..PERIOD, self.gradient_type, seed)).collect();
        for version in 1..=self.steps {
            let mut scalars = Vec::new();
            let formula = match &self.prepared {
                Some(prepared) => prepared.formula(&step(version), &mut scalars),
                None => Formula::Sum { scale: 1.0 },
            };
            let of = |bytes| pserver_core::optim::Gradient { bytes, element_type: self.gradient_type };
            Plain.update(Update {
                formula,
                element_type: PARAMETER,
                parameter: &mut plain,
                states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
                gradients: &gradients.iter().map(|bytes| of(bytes.as_slice())).collect::<Vec<_>>(),
            });
        }
        let period = plain.as_chunks::<4>().0;
        let wrong = self.work.iter().map(|work| {
            let Work::Update { slot, into, .. } = work else { return 0 };
            let first = usize::try_from(u64::from(slot.0) * CHUNK).expect("an address has 64 bits");
            let found = into.bytes().as_chunks::<4>().0.iter().enumerate();
            found.filter(|(index, found)| **found != period[(first + index) % PERIOD]).count() as u64
        });
        wrong.sum()
    }
}

/// Runs work until so much of it is over.
fn finish(device: &mut Cuda, queue: &mut VecDeque<Work>, count: usize) -> Result<Vec<Done>> {
    let mut done = Vec::with_capacity(count);
    while done.len() < count {
        device.submit(queue)?;
        device.poll(&mut done)?;
        if queue.is_empty() && done.len() < count {
            device.wait(Duration::from_secs(10));
        }
    }
    for one in &done {
        one.outcome.clone()?;
    }
    Ok(done)
}

/// A lease with the values of these elements.
fn filled(arena: &Arena, range: std::ops::Range<u64>, element_type: ElementType, seed: usize) -> Result<Lease> {
    let of = |index: u64| usize::try_from(index).expect("an address has 64 bits");
    let bytes = bytes_of(of(range.start)..of(range.end), element_type, seed);
    let mut lease = arena.take(u32::try_from(bytes.len())?)?;
    lease.bytes_mut().copy_from_slice(&bytes);
    Ok(lease)
}

fn bytes_of(range: std::ops::Range<usize>, element_type: ElementType, seed: usize) -> Vec<u8> {
    let values = range.map(|index| value(index, seed));
    match element_type {
        ElementType::Bfloat16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}
