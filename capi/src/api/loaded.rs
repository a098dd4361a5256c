//! A program that a client trains: its text, its data and its values.

use std::path::Path;
use std::sync::Arc;

use pserver_client::{Client, GradientSlice};
use pserver_core::error::Failure;
use pserver_program::{Dim, Graph, Program, Purpose, Tensor, VariableFacts};
use pserver_trainer::{Training, read_program, trainable};

/// The part of one trainer of a job.
pub(super) struct LoadedProgram {
    training: Training<'static>,
    /// The whole program, which declares the data.
    graph: Graph,
}

impl LoadedProgram {
    /// Reads a program from a text, or from the file of that name if the text has no brace, and joins the job. `batch`
    /// is the number of rows in a step of all trainers together.
    pub(super) fn load(
        client: &Arc<Client>,
        program: &str,
        (loss, config): (&str, Option<&str>),
        batch: usize,
    ) -> Result<Self, Failure> {
        let graph = if program.contains('{') {
            let (program, positions) = Program::read(program, None)?;
            Graph::located(program, positions)?
        } else {
            read_program(Path::new(program))?
        };
        graph.check_initialised()?;
        let graph = trainable(graph.into_program(), loss, config)?;
        let training = Training::join(Arc::clone(client), &graph, batch)?;
        Ok(Self { training, graph })
    }

    pub(super) fn steps_before(&self) -> u64 {
        self.training.steps_before()
    }

    /// Sets data for the next step: all of them, or none if one does not fit its variable.
    pub(super) fn feed(&mut self, data: &[GradientSlice<'_>]) -> Result<(), Failure> {
        let tensors = data.iter().map(|one| self.tensor(one)).collect::<Result<Vec<_>, _>>()?;
        data.iter().zip(tensors).try_for_each(|(one, tensor)| self.training.feed(one.name, tensor))
    }

    pub(super) fn step(&mut self) -> Result<(), Failure> {
        self.training.step_fed()
    }

    pub(super) fn scalar(&self, name: &str) -> Result<f64, Failure> {
        self.training.scalar(name)
    }

    pub(super) fn value(&self, name: &str) -> Result<Tensor, Failure> {
        self.training.value(name)
    }

    /// Writes all parameters to a safetensors file of this machine.
    pub(super) fn save(&self, path: &str) -> Result<(), Failure> {
        self.training.save(Path::new(path))
    }

    /// The caller's bytes as the tensor of a data variable; the batch follows from their number.
    fn tensor(&self, given: &GradientSlice<'_>) -> Result<Tensor, Failure> {
        let name = given.name;
        let data = || self.graph.variables().iter().filter(|variable| variable.purpose == Purpose::Data);
        let known = data().find(|variable| variable.name == name).ok_or_else(|| {
            let all: Vec<&str> = data().map(|variable| variable.name.as_str()).collect();
            Failure::call(format!("found no data {name:?} in the program; expected one of {}", all.join(", ")))
        })?;
        let facts = &known.facts;
        let refuse = |text: String| Failure::call(format!("data {name:?}: {facts}: {text}"));
        let VariableFacts::Dense { element_type, shape } = facts else {
            return Err(refuse("expected a dense tensor".to_owned()));
        };
        if given.element_type != *element_type {
            return Err(refuse(format!("found elements of {}; expected {element_type}", given.element_type)));
        }
        let lengths = shape.iter().map(|dim| if let Dim::Fixed(length) = dim { *length } else { 1 });
        let row = lengths.fold(element_type.bytes(), u64::saturating_mul);
        let (found, batches) = (given.content.len() as u64, shape.iter().filter(|dim| **dim == Dim::Batch).count());
        let batch = match batches {
            0 if found == row => 1,
            1 if row > 0 && found.is_multiple_of(row) => found / row,
            0 => return Err(refuse(format!("found {found} bytes; expected {row}"))),
            1 => return Err(refuse(format!("found {found} bytes; expected a multiple of {row}, a row's bytes"))),
            _ => return Err(refuse("expected one dimension that is the batch".to_owned())),
        };
        let shape: Vec<u64> =
            shape.iter().map(|dim| if let Dim::Fixed(length) = dim { *length } else { batch }).collect();
        let mut tensor = Tensor::try_zeros(*element_type, &shape)?;
        tensor.bytes_mut().copy_from_slice(given.content);
        Ok(tensor)
    }
}
