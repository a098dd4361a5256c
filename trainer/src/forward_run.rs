//! Forward runs: what a program computes from saved parameters and data, without training.

use std::collections::{BTreeMap, BTreeSet};

use pserver_core::error::Failure;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::{
    Block, Dim, Graph, OpKind, OpRole, PlainRun, Program, Purpose, Tensor, VariableFacts, VariableValue,
};

use super::data::DataSet;
use super::step_numbers::StepNumbers;
use super::training::scalar;

/// The forward ops that some variables need, with their data and parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardRun {
    graph: Graph,
    wanted: Vec<String>,
}

impl ForwardRun {
    /// Takes the forward ops of block 0 that these variables need.
    ///
    /// # Errors
    /// When the program is invalid; when a variable does not exist, is not dense, or is computed by an op of another
    /// role.
    pub fn new(program: &Program, wanted: &[String]) -> Result<Self, Failure> {
        let graph = Graph::new(program.clone())?;
        for name in wanted {
            match graph.facts(name) {
                Some(VariableFacts::Dense { .. }) => {}
                Some(facts) => {
                    return Err(Failure::call(format!("{name:?} is {facts}; expected a dense tensor to compute")));
                }
                None => {
                    let known = graph.variables().iter().map(|variable| variable.name.as_str());
                    let known: Vec<&str> = known.filter(|name| !name.contains('@')).collect();
                    return Err(Failure::call(format!(
                        "found no variable {name:?} to compute; expected one of {}",
                        known.join(", ")
                    )));
                }
            }
        }
        let whole = &program.blocks[0];
        let mut needed: BTreeSet<&str> = wanted.iter().map(String::as_str).collect();
        let mut is_kept = vec![false; whole.ops.len()];
        for (op, is_kept) in whole.ops.iter().zip(&mut is_kept).rev() {
            // Given values are among those that the run is called with.
            let is_given = matches!(op.kind, OpKind::Given { .. });
            let is_run = matches!(op.role, OpRole::Forward | OpRole::Initialise) && !is_given;
            if is_run && op.outputs.iter().any(|output| needed.contains(output.as_str())) {
                needed.extend(op.inputs.iter().chain(&op.outputs).map(String::as_str));
                *is_kept = true;
            }
        }
        let ops = whole.ops.iter().zip(is_kept).filter(|(_, is_kept)| *is_kept).map(|(op, _)| op.clone()).collect();
        let variables = whole.variables.iter().filter(|one| needed.contains(one.name.as_str())).cloned().collect();
        let graph = Graph::new(Program { blocks: vec![Block { parent: None, variables, ops }] })?;
        if let Some(name) = wanted.iter().find(|name| graph.find(name).is_none()) {
            return Err(Failure::call(format!("{name:?} is not computed by forward ops; expected one that is")));
        }
        Ok(Self { graph, wanted: wanted.to_vec() })
    }

    /// The graph that is run: its data variables are those that are read.
    #[must_use]
    pub const fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Computes the variables for batches of rows, and gives their values with the number of rows.
    ///
    /// # Errors
    /// When a parameter is missing among the values or has other facts; when an op refuses its inputs.
    fn batches(
        &self,
        values: &BTreeMap<String, Tensor>,
        data: &DataSet,
        batch: usize,
    ) -> Result<Vec<(usize, Vec<Tensor>)>, Failure> {
        let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
        let mut run = PlainRun::new(&self.graph, &mut arithmetic, &mut kernels)?;
        for variable in self.graph.variables() {
            match values.get(&variable.name) {
                Some(value) if variable.purpose.is_persistable() => run.set(&variable.name, value.clone())?,
                None if variable.purpose == Purpose::Parameter => {
                    let (name, facts) = (&variable.name, &variable.facts);
                    return Err(Failure::call(format!("found no value of parameter {name:?}; expected {facts}")));
                }
                _ => {}
            }
        }
        for (name, value) in StepNumbers::of(&self.graph).values_of_predictions() {
            run.set(name, value)?;
        }
        let rows: Vec<usize> = (0..data.rows()).collect();
        let batches = rows.chunks(batch.max(1)).map(|rows| {
            for (name, tensor) in data.batch(rows) {
                run.set(name, tensor)?;
            }
            run.step()?;
            let value = |name: &String| match run.value(name) {
                Some(VariableValue::Dense(tensor)) => Ok(tensor.clone()),
                _ => Err(Failure::call(format!("found no value of {name:?} after the forward ops"))),
            };
            Ok((rows.len(), self.wanted.iter().map(value).collect::<Result<_, Failure>>()?))
        });
        batches.collect()
    }

    /// Computes scalars for batches of rows, the last one smaller, and gives the mean of each, weighted by rows.
    ///
    /// # Errors
    /// When a parameter is missing among the values or has other facts; when an op refuses its inputs; when there are
    /// no rows.
    pub fn means(&self, values: &BTreeMap<String, Tensor>, data: &DataSet, batch: usize) -> Result<Vec<f64>, Failure> {
        let mut sums = vec![0.0; self.wanted.len()];
        for (rows, tensors) in self.batches(values, data, batch)? {
            for ((sum, tensor), name) in sums.iter_mut().zip(tensors).zip(&self.wanted) {
                let value = scalar(&tensor.into());
                *sum += rows as f64
                    * value.ok_or_else(|| Failure::call(format!("{name:?} is no scalar of float32 or float64")))?;
            }
        }
        if data.rows() == 0 {
            return Err(Failure::call("found no rows of data; expected one or more"));
        }
        Ok(sums.into_iter().map(|sum| sum / data.rows() as f64).collect())
    }

    /// Computes the variables for all rows: in one run, or in runs of `batch` rows whose results are put one after
    /// another.
    ///
    /// # Errors
    /// When a parameter is missing among the values or has other facts; when an op refuses its inputs; when there are
    /// no rows; when there are several runs and a variable's first dimension is not the batch.
    pub fn predict(
        &self,
        values: &BTreeMap<String, Tensor>,
        data: &DataSet,
        batch: Option<usize>,
    ) -> Result<Vec<(String, Tensor)>, Failure> {
        let batch = batch.unwrap_or(data.rows());
        let runs = self.batches(values, data, batch)?;
        if runs.is_empty() {
            return Err(Failure::call("found no rows of data; expected one or more"));
        }
        let join = |(place, name): (usize, &String)| {
            let mut pieces = runs.iter().map(|(_, tensors)| &tensors[place]);
            let facts = self.graph.facts(name).expect("it was looked up");
            let is_by_row = matches!(facts, VariableFacts::Dense { shape, .. } if shape.first() == Some(&Dim::Batch));
            if runs.len() > 1 && !is_by_row {
                return Err(Failure::call(format!(
                    "{name:?} is {facts}; expected the batch as first dimension, because the rows are run {batch} at a \
                     time"
                )));
            }
            let first = pieces.next().expect("there is a run");
            let mut bytes = first.bytes().to_vec();
            let mut shape = first.shape().to_vec();
            for piece in pieces {
                shape[0] += piece.shape()[0];
                bytes.extend_from_slice(piece.bytes());
            }
            let mut whole = Tensor::zeros(first.elements().element_type(), &shape);
            whole.bytes_mut().copy_from_slice(&bytes);
            Ok((name.clone(), whole))
        };
        self.wanted.iter().enumerate().map(join).collect()
    }
}
