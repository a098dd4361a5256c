//! Time of a program's step: estimated, and measured in a job, for both placements by turns.

use std::sync::Arc;

use anyhow::{Result, ensure};
use pserver_core::prng::Prng;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, Placement, ProgramPart, Transpiler, estimate};
use pserver_program::{Graph, Purpose};

use super::data::step_data;
use super::job::ProgramJob;
use crate::statistics::{median, median_interval};

/// Steps whose data differ; then they repeat.
const DIFFERENT_STEPS: usize = 8;

/// How a program is measured.
#[derive(Clone, Copy)]
pub(crate) struct StepPlan {
    pub(crate) cluster: Cluster,
    pub(crate) costs: CostModel,
    /// Blocks of each placement.
    pub(crate) blocks: u32,
    /// Seconds of each block, about.
    pub(crate) block_seconds: f64,
}

/// The estimated and measured seconds of a step.
#[derive(Clone, Debug)]
pub(crate) struct StepTimes {
    pub(crate) estimated: f64,
    /// By block.
    pub(crate) measured: Vec<f64>,
}

/// Both placements of a program.
pub(crate) struct StepComparison {
    pub(crate) balanced: StepTimes,
    /// None where it is the same placement.
    pub(crate) in_turn: Option<StepTimes>,
    /// Parameters that differ between the placements after equal steps.
    pub(crate) wrong: u64,
}

/// A placement's parts and its estimate of a step.
pub(crate) struct PlacedProgram {
    parts: Arc<Vec<ProgramPart>>,
    pub(crate) estimated: f64,
}

impl PlacedProgram {
    pub(crate) fn new(graph: &Graph, placement: Placement, plan: &StepPlan) -> Result<Self> {
        let transpiler = ParameterServer { placement, ..ParameterServer::default() };
        let parts = transpiler.transpile(graph, plan.cluster, &plan.costs)?;
        let estimated = estimate(&parts, &plan.costs).step_seconds;
        Ok(Self { parts: Arc::new(parts), estimated })
    }
}

impl StepTimes {
    pub(crate) fn median(&self) -> f64 {
        median(&self.measured)
    }

    pub(crate) fn interval(&self) -> (f64, f64) {
        median_interval(&self.measured)
    }
}

impl StepComparison {
    /// Whether the estimates of the two placements differ by this factor or more.
    pub(crate) fn is_divided_differently(graph: &Graph, plan: &StepPlan, factor: f64) -> Result<bool> {
        let step = |placement| PlacedProgram::new(graph, placement, plan).map(|placed| placed.estimated);
        Ok(step(Placement::RoundRobin)? > step(Placement::Balanced)? * factor)
    }

    /// Measures a program with both placements, in alternating blocks.
    pub(crate) fn measure(graph: &Graph, plan: &StepPlan) -> Result<Self> {
        let placements = [Placement::Balanced, Placement::RoundRobin];
        let [balanced, in_turn] = placements.map(|placement| PlacedProgram::new(graph, placement, plan));
        let (balanced, in_turn) = (balanced?, in_turn?);
        let mut programs = vec![balanced];
        if in_turn.parts != programs[0].parts {
            programs.push(in_turn);
        }
        let jobs: Result<Vec<ProgramJob>> = programs.iter().map(|placed| start(graph, placed, plan)).collect();
        let jobs = jobs?;
        let mut times: Vec<StepTimes> =
            programs.iter().map(|placed| StepTimes { estimated: placed.estimated, measured: Vec::new() }).collect();
        // The first steps make connections and memory, and say how many fill a block.
        let mut slowest = 0.0_f64;
        for job in &jobs {
            job.steps(3)?;
            slowest = slowest.max(job.steps(3)?);
        }
        let steps = (plan.block_seconds / slowest).clamp(1.0, 2_000.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it was clamped")]
        let steps = steps as u32;
        for _ in 0..plan.blocks {
            for (job, times) in jobs.iter().zip(&mut times) {
                times.measured.push(job.steps(steps)?);
            }
        }
        let wrong = differing(graph, &jobs)?;
        jobs.into_iter().try_for_each(ProgramJob::stop)?;
        let mut times = times.into_iter();
        let balanced = times.next();
        ensure!(balanced.is_some(), "found no placement; expected one");
        Ok(Self { balanced: balanced.expect("it was checked"), in_turn: times.next(), wrong })
    }
}

fn start(graph: &Graph, placed: &PlacedProgram, plan: &StepPlan) -> Result<ProgramJob> {
    let data = |trainer: u32| {
        let mut prng = Prng(trainer.into());
        (0..DIFFERENT_STEPS).map(|_| step_data(graph, plan.costs.batch, &mut prng)).collect()
    };
    let servers = u16::try_from(plan.cluster.servers)?;
    ProgramJob::start(&placed.parts, servers, (0..plan.cluster.trainers).map(data).collect())
}

/// Parameters that jobs do not have alike.
fn differing(graph: &Graph, jobs: &[ProgramJob]) -> Result<u64> {
    let parameters = graph.variables().iter().filter(|known| known.purpose == Purpose::Parameter);
    let names: Vec<String> = parameters.map(|known| known.name.clone()).collect();
    let mut values: Vec<Vec<Vec<u8>>> = Vec::new();
    for job in jobs {
        values.push(job.parameters(&names)?);
    }
    let differs = |place: &usize| values.windows(2).any(|pair| pair[0][*place] != pair[1][*place]);
    Ok((0..names.len()).filter(differs).count() as u64)
}
