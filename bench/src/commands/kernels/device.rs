//! `psbench kernels --device cuda`: kernels beside the device's own copies, and a server's steps beside the link.

mod goals;
mod server;
mod torch;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::limits::CHUNK_BYTES_DEFAULT;
use pserver_core::optim::{Formula, Prepared, Step};
use pserver_core::port::DeviceCode;
use pserver_kernels::cuda::{CopyDirection, CudaSettings, Probe, TimedUpdate, rules_folder};
use serde_json::json;

use super::{Args, Kernel, Measured};
use crate::environment::memory_bytes;
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::statistics::{median, median_interval};
use server::DeviceServer;

/// Trainers whose gradients are summed, when nobody says how many.
const GRADIENTS: [u32; 4] = [1, 4, 8, 16];
/// Gradients as trainers send them.
const TYPES: [ElementType; 2] = [ElementType::Float32, ElementType::Bfloat16];
const PARAMETER: ElementType = ElementType::Float32;
/// Elements that a link is timed with, at most: longer copies are no faster.
const LINK_ELEMENTS_MAX: u64 = 1 << 26;
/// Times that a user's rule and the built-in one have their turn.
const TURNS: usize = 5;
/// The subject of the report's lines.
const KERNEL: &str = "kernel";
const SERVER_STEP: &str = "server step";

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("bytes_per_element", "bytes"),
    scaled("elements_per_second", "Gelem/s", 1e9, 3),
    scaled("bytes_per_second", "GB/s", 1e9, 1),
    scaled("ceiling_bytes_per_second", "ceiling[GB/s]", 1e9, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("ratio_to_link_apart", "each way apart", 1.0, 3),
    scaled("ratio_to_torch", "torch", 1.0, 2),
    scaled("ratio_to_torch_compiled", "torch.compile", 1.0, 2),
    scaled("ratio_to_built_in", "built-in", 1.0, 3),
    scaled("goal", "goal", 1.0, 2),
    scaled("found", "found", 1.0, 3),
    plain("verdict", "verdict"),
    plain("wrong", "#wrong"),
];

/// The bandwidth of the device's copies and of its link, in bytes a second.
struct Ceilings {
    /// Read and written together.
    within: f64,
    into: f64,
    out: f64,
    /// Each way, when both are busy.
    both: f64,
}

impl Ceilings {
    /// Seconds of so many bytes in and out when each way is as fast as alone.
    fn apart(&self, into: f64, out: f64) -> f64 {
        (into / self.into).max(out / self.out)
    }

    /// The same when the ways share what they share: both are busy until the shorter one is done.
    fn together(&self, into: f64, out: f64) -> f64 {
        let shared = into.min(out);
        let rest = self.apart(into - shared, out - shared);
        (shared / self.both + rest).max(self.apart(into, out))
    }
}

/// The kernels of a rule.
struct DeviceRule {
    code: DeviceCode,
    /// The numbers of the first step.
    numbers: Vec<f64>,
    /// A sum has none.
    prepared: Option<Prepared>,
}

impl DeviceRule {
    fn new(kernel: Kernel) -> Result<Self> {
        let Some(rule) = kernel.rule()? else {
            return Ok(Self { code: DeviceCode::Sum, numbers: vec![1.0], prepared: None });
        };
        let prepared = Prepared::new(rule)?;
        let mut numbers = Vec::new();
        let Formula::Rule { code, .. } = prepared.formula(&step(1), &mut numbers) else {
            anyhow::bail!("{} has no code", crate::job::word(kernel))
        };
        let code = DeviceCode::Rule(Arc::clone(code));
        Ok(Self { code, numbers, prepared: Some(prepared) })
    }
}

/// One line of the table.
#[derive(Clone, Copy)]
struct Case<'a> {
    kernel: Kernel,
    program: &'a DeviceRule,
    gradients: u32,
    gradient_type: ElementType,
}

impl Case<'_> {
    fn name(&self) -> String {
        let (rule, count) = (crate::job::word(self.kernel), self.gradients);
        format!("{rule}, {count} {}", self.gradient_type)
    }

    /// A line of the report about this.
    fn outcome(&self, what: &str) -> Outcome {
        Outcome::new(&format!("{}, {what}", self.name()))
            .with("rule", crate::job::word(self.kernel))
            .with("gradients", self.gradients)
            .with("gradient_type", self.gradient_type.to_string())
            .with("what", what)
    }

    /// Bytes of all gradients of an element.
    fn gradient_bytes(&self) -> u64 {
        u64::from(self.gradients) * self.gradient_type.bytes()
    }
}

pub(super) fn run(args: &Args) -> Result<Report> {
    let gradients = if args.gradients.is_empty() { GRADIENTS.to_vec() } else { args.gradients.clone() };
    // Rules that are not shipped are compiled once, and kept where a server of this user keeps them.
    let cache = rules_folder(|name| std::env::var(name).ok());
    let settings = CudaSettings { cache, ..CudaSettings::of(args.ordinal) };
    let mut probe = Probe::open(&settings)?;
    let (device, architecture, driver) = probe.about();
    let rules = args.rule.iter().map(|rule| crate::job::word(*rule)).collect::<Vec<_>>();
    let parameters = json!({ "rules": rules, "elements": args.elements, "gradients": gradients,
        "step_elements": args.step_elements, "iterations": args.iterations, "dtype": "f32", "device": device,
        "architecture": architecture, "driver_cuda": driver, "image": probe.image().to_string() });
    ensure!(args.elements > 0 && args.step_elements > 0 && args.iterations > 0, "expected elements and iterations");
    let most = gradients.iter().max().context("--gradients: expected a count")?;
    ensure!((1..=64).contains(most), "--gradients {most}: expected 1 to 64");
    let ceilings = ceilings(&mut probe, args)?;
    let mut report = Report::new("kernels", parameters, COLUMNS);
    report.push(moved("copy within the device", ceilings.within));
    report.push(moved("copy to the device", ceilings.into));
    report.push(moved("copy from the device", ceilings.out));
    report.push(moved("copy both ways at once", 2.0 * ceilings.both));
    report.expect(args.rule.len() * gradients.len() * TYPES.len(), "kernels");
    for kernel in &args.rule {
        let program = DeviceRule::new(*kernel)?;
        for (gradients, gradient_type) in gradients.iter().flat_map(|count| TYPES.map(|each| (*count, each))) {
            let case = Case { kernel: *kernel, program: &program, gradients, gradient_type };
            announce(&case.name());
            if let Err(why) = times(&mut probe, &case, 1, 0) {
                let why = format!("left out: {why:#}");
                report.push(case.outcome(KERNEL).with("verdict", why.as_str()).without_ratio(&why));
                report.measured(1);
                continue;
            }
            if args.measure.contains(&Measured::Kernel) {
                report.push(alone(&mut probe, &case, &ceilings, args)?);
            }
            if args.measure.contains(&Measured::ServerStep) {
                report.push(whole(&probe, &case, &ceilings, args)?);
            }
            report.measured(1);
        }
    }
    if let Some(python) = &args.torch {
        torch::beside(&mut report, python, args, &gradients);
    }
    if args.goals {
        let measures: Vec<&str> = args.measure.iter().map(|measure| subject(*measure)).collect();
        goals::verdicts(report.results(), &measures).into_iter().for_each(|verdict| report.push(verdict));
    }
    Ok(report)
}

/// The same bytes, moved and nothing else: within the device a tensor of the kernels' length, over the link one of a
/// step's.
fn ceilings(probe: &mut Probe, args: &Args) -> Result<Ceilings> {
    let within = args.elements.min(fitting(probe.free_bytes()?, 2 * PARAMETER.bytes()));
    let step = args.elements.min(args.step_elements).min(LINK_ELEMENTS_MAX);
    let mut rate = |way, elements: u64, each: u64| -> Result<f64> {
        let bytes = elements * PARAMETER.bytes();
        // The first one touches memory that nobody has touched.
        let seconds = match way {
            Some(way) => probe.copies(way, bytes, args.iterations + 1)?,
            None => probe.copies_both(bytes, args.iterations + 1)?,
        };
        Ok((bytes * each) as f64 / median(&seconds[1..]))
    };
    Ok(Ceilings {
        within: rate(Some(CopyDirection::Within), within, 2)?,
        into: rate(Some(CopyDirection::In), step, 1)?,
        out: rate(Some(CopyDirection::Out), step, 1)?,
        both: rate(None, step, 1)?,
    })
}

/// How many elements fit, when each takes so many bytes. The driver needs some memory, and so do others.
fn fitting(free: u64, each: u64) -> u64 {
    (free / 10 * 9 / each).max(1)
}

fn moved(name: &str, rate: f64) -> Outcome {
    let line = Outcome::new(name).with("bytes_per_second", rate).with("ceiling_bytes_per_second", rate);
    line.with("ratio_to_ceiling", 1.0)
}

/// Seconds of each of some updates behind a first one, on tensors that lie on the device.
fn times(probe: &mut Probe, case: &Case<'_>, elements: u64, iterations: u32) -> Result<Vec<f64>> {
    let timed = TimedUpdate {
        code: &case.program.code,
        element_type: PARAMETER,
        gradient_type: case.gradient_type,
        elements,
        gradients: case.gradients as usize,
        numbers: &case.program.numbers,
    };
    Ok(probe.updates(&timed, iterations + 1)?.split_off(1))
}

/// The kernel on tensors that lie on the device.
fn alone(probe: &mut Probe, case: &Case<'_>, ceilings: &Ceilings, args: &Args) -> Result<Outcome> {
    let states = case.program.code.states() as u64;
    let written = match case.program.code {
        DeviceCode::Rule(_) => 2 * (1 + states),
        _ => 1,
    };
    let into = case.gradient_bytes();
    let bytes = written * PARAMETER.bytes() + into;
    let each = (1 + states) * PARAMETER.bytes() + into;
    let elements = args.elements.min(fitting(probe.free_bytes()?, each));
    let seconds = times(probe, case, elements, args.iterations)?;
    let found = outcome(case.outcome(KERNEL), &seconds, elements, (bytes * elements) as f64, ceilings.within);
    let found = found.with("bytes_per_element", bytes);
    if case.kernel != Kernel::AdamText {
        return Ok(found);
    }
    let built_in = Case { kernel: Kernel::Adam, program: &DeviceRule::new(Kernel::Adam)?, ..*case };
    let mut ratios = Vec::new();
    for _ in 0..TURNS {
        let built_in_times = times(probe, &built_in, elements, args.iterations)?;
        ratios.push(median(&built_in_times) / median(&times(probe, case, elements, args.iterations)?));
    }
    let (low, high) = median_interval(&ratios);
    let found = found.with("ratio_to_built_in", median(&ratios));
    Ok(found.with("ratio_to_built_in_low", low).with("ratio_to_built_in_high", high))
}

/// A server's step: gradients from pinned memory, the update, the parameter to pinned memory, chunk by chunk.
fn whole(probe: &Probe, case: &Case<'_>, ceilings: &Ceilings, args: &Args) -> Result<Outcome> {
    let (into, out) = (case.gradient_bytes(), PARAMETER.bytes());
    // A server opens the same device for such a job.
    let settings = CudaSettings::for_job(args.ordinal, CHUNK_BYTES_DEFAULT, case.gradients);
    let free = probe.free_bytes()?.saturating_sub(settings.gradient_bytes);
    // Half of the host's memory: the values are made beside the leases.
    let host = memory_bytes().map_or(u64::MAX, |bytes| fitting(bytes / 2, into + out));
    let device = fitting(free, out * (1 + case.program.code.states() as u64));
    let elements = args.elements.min(args.step_elements).min(host).min(device);
    let mut server = DeviceServer::new(&settings, case, elements)?;
    let mut seconds = Vec::new();
    for _ in 0..=args.iterations {
        seconds.push(server.step()?);
    }
    let (all_in, all_out) = ((into * elements) as f64, (out * elements) as f64);
    let (together, apart) = (ceilings.together(all_in, all_out), ceilings.apart(all_in, all_out));
    let all = all_in + all_out;
    let found = outcome(case.outcome(SERVER_STEP), &seconds[1..], elements, all, all / together);
    let found = found.with("bytes_per_element", into + out).with("ratio_to_link_apart", apart / median(&seconds[1..]));
    Ok(found.with("wrong", server.wrong()))
}

fn outcome(found: Outcome, seconds: &[f64], elements: u64, all: f64, ceiling: f64) -> Outcome {
    let own = median(seconds);
    let ratios: Vec<f64> = seconds.iter().map(|seconds| all / seconds / ceiling).collect();
    let (low, high) = median_interval(&ratios);
    found
        .with("elements", elements)
        .with("elements_per_second", elements as f64 / own)
        .with("bytes_per_second", all / own)
        .with("block_latency_us", seconds.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("ceiling_bytes_per_second", ceiling)
        .with("ratio_to_ceiling", all / own / ceiling)
        .with("ratio_low", low)
        .with("ratio_high", high)
}

/// The subject of a measure's lines.
fn subject(measure: Measured) -> &'static str {
    match measure {
        Measured::Kernel => KERNEL,
        Measured::ServerStep => SERVER_STEP,
    }
}

fn step(version: u64) -> Step {
    Step { version: Version(version), ..Step::FIRST }
}

#[cfg(test)]
mod tests {
    use super::Ceilings;

    #[test]
    fn a_half_duplex_link_bounds_a_step_by_both_directions() {
        let check = |both, (into, out), expected: f64| {
            let ceilings = Ceilings { within: 1.0, into: 10.0, out: 20.0, both };
            assert_eq!(ceilings.together(into, out), expected, "{both}: {into} in, {out} out");
        };
        // Ways that do not meet are as fast as alone.
        check(10.0, (100.0, 100.0), 10.0);
        check(10.0, (100.0, 0.0), 10.0);
        // Ways that halve each other: 20 s for what is moved both ways, the rest alone.
        check(5.0, (100.0, 100.0), 20.0);
        check(5.0, (300.0, 100.0), 20.0 + 20.0);
        check(5.0, (100.0, 300.0), 20.0 + 10.0);
    }
}
