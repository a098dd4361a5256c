//! Trainings by the program `pserver` in a folder, and their oracle: one process.

#![allow(dead_code, reason = "every test program uses the part that it needs")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::{
    Elements, Graph, ParameterGradient, PlainRun, Program, Tensor, VariableValue, append_backward, append_optimizer,
};
use pserver_trainer::{DataSet, read_model};

/// A folder in which `pserver` runs.
pub(crate) struct Place(tempfile::TempDir);

/// Status and output of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) is_success: bool,
    pub(crate) output: String,
    pub(crate) errors: String,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).expect("a file");
    }

    /// The command, without settings of the surroundings.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = pserver_processes::unconfigured(Path::new(env!("CARGO_BIN_EXE_pserver")));
        command.current_dir(self.path()).args(arguments).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        Said::of(self.command(arguments).output().expect("the program starts"))
    }

    /// Runs a command that succeeds; gives its output.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments);
        assert!(said.is_success, "{arguments:?}: {said:?}");
        said.output
    }

    pub(crate) fn model(&self, name: &str) -> BTreeMap<String, Tensor> {
        read_model(&self.path().join(name)).expect("a model")
    }
}

impl Said {
    pub(crate) fn of(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints UTF-8");
        Self { is_success: output.status.success(), output: text(output.stdout), errors: text(output.stderr) }
    }
}

/// The numbers that a training printed, by name.
pub(crate) fn numbers(output: &str) -> BTreeMap<String, f64> {
    let line = |line: &str| {
        let (name, number) = line.rsplit_once(' ').expect("a name and a number");
        (name.to_owned(), number.parse().expect("a number"))
    };
    output.lines().map(line).collect()
}

pub(crate) fn floats(tensor: &Tensor) -> &[f32] {
    match tensor.elements() {
        Elements::Float32(values) => values,
        other => panic!("found {}", other.element_type()),
    }
}

/// One process that trains a program by the parts of several trainers: the gradients of each part of a batch are added
/// in the order of trainers, and their mean makes one update.
pub(crate) struct OneProcess<'a> {
    pub(crate) program: &'a str,
    pub(crate) optimizer: &'a str,
    pub(crate) data: &'a Path,
    pub(crate) batch: usize,
    pub(crate) epochs: usize,
}

impl OneProcess<'_> {
    /// The parameters in the end.
    pub(crate) fn train(&self, trainers: usize) -> BTreeMap<String, Tensor> {
        let mut program: Program = self.program.parse().expect("it is a program");
        let gradients = append_backward(&mut program, "loss").expect("it has gradients");
        let graph = Graph::new(program).expect("it is a program");
        let data = DataSet::read(self.data, &graph).expect("the data fit");
        let updates = self.updates(&graph, &gradients);
        let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
        let mut forward = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
        let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
        let mut update = PlainRun::new(&updates, &mut arithmetic, &mut kernels).expect("it begins");
        for one in &gradients {
            let initial = forward.value(&one.parameter).expect("it is initialised").clone();
            update.set(&one.parameter, initial).expect("it fits");
        }
        // The numbers of trainers are powers of two, so that the mean is the sum with another exponent.
        let share = 1.0 / u16::try_from(trainers).map(f32::from).expect("trainers are few");
        for step in (0..self.epochs).flat_map(|_| 0..data.rows() / self.batch) {
            let mut sums: Vec<Vec<f32>> = Vec::new();
            for part in 0..trainers {
                let first = step * self.batch + part * self.batch / trainers;
                let rows: Vec<usize> = (first..first + self.batch / trainers).collect();
                for (name, tensor) in data.batch(&rows) {
                    forward.set(name, tensor).expect("it fits");
                }
                forward.step().expect("a step succeeds");
                let found = gradients.iter().map(|one| dense(forward.value(&one.gradient).expect("it was computed")));
                if sums.is_empty() {
                    sums = found.collect();
                } else {
                    let all = sums.iter_mut().zip(found).flat_map(|(sum, found)| sum.iter_mut().zip(found));
                    all.for_each(|(sum, value)| *sum += value);
                }
            }
            for (one, sum) in gradients.iter().zip(sums) {
                let mean = sum.into_iter().map(|sum| sum * share).collect();
                let shape = forward.value(&one.parameter).expect("it is there").tensor().shape().to_vec();
                update.set(&name_of_mean(one), Tensor::new(shape, Elements::Float32(mean))).expect("it fits");
            }
            update.step().expect("a step succeeds");
            for one in &gradients {
                let new = update.value(&one.parameter).expect("it was updated").clone();
                forward.set(&one.parameter, new).expect("it fits");
            }
        }
        let value = |name: &String| (name.clone(), update.value(name).expect("it is there").tensor().clone());
        gradients.iter().map(|one| value(&one.parameter)).collect()
    }

    /// The updates alone, by dense gradients that are data.
    fn updates(&self, graph: &Graph, gradients: &[ParameterGradient]) -> Graph {
        let declared: String = gradients
            .iter()
            .map(|one| {
                let (name, facts) = (&one.parameter, graph.facts(&one.parameter).expect("it is declared"));
                format!("data \"{}\": {facts}\nparameter \"{name}\": {facts}\n", name_of_mean(one))
            })
            .collect();
        let mut updates: Program = format!("block 0 {{ {declared} }}").parse().expect("it is a program");
        let means = gradients.iter().map(|one| ParameterGradient { gradient: name_of_mean(one), ..one.clone() });
        append_optimizer(&mut updates, self.optimizer, &means.collect::<Vec<_>>()).expect("it fits");
        Graph::new(updates).expect("it is a program")
    }
}

fn name_of_mean(one: &ParameterGradient) -> String {
    format!("{}@mean", one.parameter)
}

/// A gradient as a dense one; a row that occurs several times is added, first to last.
fn dense(gradient: &VariableValue) -> Vec<f32> {
    let VariableValue::SelectedRows(rows) = gradient else { return floats(gradient.tensor()).to_vec() };
    let layout = rows.view().layout();
    let (height, width) = (layout.height().bound(), layout.width() as usize);
    let mut whole = vec![0.0; usize::try_from(height).expect("it is in memory") * width];
    for (id, row) in rows.view().iter() {
        let place = usize::try_from(id).expect("it is in memory") * width;
        let values = row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        whole[place..place + width].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    whole
}
