//! Given values of parameters of a job that runs, from memory or from a safetensors file.
//!
//! A table of rows is in a file as `pserver` saves it: as a matrix of its name, or as `name:ids` and `name:rows`.

use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::wire::Flags;
use safetensors::{Dtype, SafeTensors};

use super::job::check_dense;
use super::{Client, ClientState, Extent, GradientRows, GradientSlice};

/// Endings of the names of a table's tensors in a file.
const IDS: &str = ":ids";
const ROWS: &str = ":rows";

/// A value of a parameter, in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct GivenValue<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The type of the elements, which is the parameter's.
    pub element_type: ElementType,
    /// The shape, which is the parameter's.
    pub shape: &'a [u64],
    /// The elements.
    pub content: &'a [u8],
}

impl Client {
    /// Replaces values of dense parameters; others stay, and so do the counts of updates and the optimizers' states.
    /// Every name, type, shape and length is checked before anything is sent. Other trainers should wait meanwhile. A
    /// call that failed on its way may be repeated.
    ///
    /// # Errors
    /// The value that is refused, and why, and then every parameter is as it was; else as [`Client::push`].
    pub fn load(&self, values: &[GivenValue<'_>]) -> Result<(), Failure> {
        self.load_with_rows(values, &[])
    }

    /// [`Client::load`], and of sparse parameters the rows given, each once: other rows stay, and so do the optimizer's
    /// states. Of a table larger than this process's memory several calls load parts.
    ///
    /// # Errors
    /// As [`Client::load`]; and when an id repeats or is no row's, or rows are not of the parameter's type.
    pub fn load_with_rows(&self, values: &[GivenValue<'_>], rows: &[GradientRows<'_>]) -> Result<(), Failure> {
        let given = rows.iter().flat_map(|rows| [Extent::of(rows.ids), Extent::of(rows.values)]);
        let _memory = self.hold(values.iter().map(|given| Extent::of(given.content)).chain(given));
        let mut state = self.lock()?;
        state.ready()?;
        values.iter().try_for_each(|given| state.check_given(given))?;
        state.check_rows_to_set(rows)?;
        let values = values.iter().map(|given| {
            let GivenValue { name, element_type, content, .. } = *given;
            GradientSlice { name, element_type, content }
        });
        let values: Vec<_> = values.collect();
        state.lend(|state, book| {
            let call = state.start_set(&values, book)?;
            state.finish(call)
        })?;
        rows.iter().try_for_each(|rows| state.set_rows(rows, (Flags::default(), Vec::new())))
    }

    /// [`Client::load_with_rows`], of every tensor in a safetensors file of this machine. Returns the names of the
    /// parameters.
    ///
    /// # Errors
    /// When the file cannot be read or is no safetensors file; else as [`Client::load`].
    pub fn load_file(&self, path: &Path) -> Result<Vec<String>, Failure> {
        let refuse = |text: String| Failure::call(format!("{}: {text}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes);
        let file = file.map_err(|error| refuse(format!("not a safetensors file: {error}")))?;
        let tensors = file.tensors();
        let mut shapes: Vec<Vec<u64>> = Vec::with_capacity(tensors.len());
        shapes.extend(tensors.iter().map(|(_, tensor)| tensor.shape().iter().map(|length| *length as u64).collect()));
        let values = tensors.iter().zip(&shapes).map(|((name, tensor), shape)| {
            let element_type = element_type(tensor.dtype()).ok_or_else(|| {
                refuse(format!("tensor \"{name}\" of {:?}; expected a parameter's type", tensor.dtype()))
            })?;
            Ok(GivenValue { name, element_type, shape, content: tensor.data() })
        });
        let values = values.collect::<Result<Vec<_>, Failure>>()?;
        let (values, tables) = self.tables_of(values).map_err(|failure| at(path, &failure))?;
        let rows: Vec<GradientRows<'_>> = tables.iter().map(FileTable::rows).collect();
        self.load_with_rows(&values, &rows).map_err(|failure| at(path, &failure))?;
        let names = values.iter().map(|given| given.name).chain(tables.iter().map(|table| table.name));
        Ok(names.map(str::to_owned).collect())
    }

    /// Separates the tables of rows in a file from its other values.
    fn tables_of<'a>(&self, all: Vec<GivenValue<'a>>) -> Result<(Vec<GivenValue<'a>>, Vec<FileTable<'a>>), Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        let (mut values, mut tables) = (Vec::new(), Vec::new());
        for given in &all {
            let table = given.name.strip_suffix(ROWS).filter(|name| state.is_table(name));
            if let Some(name) = table {
                let ids = all.iter().find(|one| one.name.strip_suffix(IDS) == Some(name));
                tables.push(FileTable::listed(name, given, ids)?);
            } else if state.is_table(given.name) {
                tables.push(FileTable::matrix(given, state.facts(given.name)?.shape)?);
            } else if given.name.strip_suffix(IDS).is_none_or(|name| !state.is_table(name)) {
                values.push(*given);
            }
        }
        Ok((values, tables))
    }
}

/// A failure about a file.
fn at(path: &Path, failure: &Failure) -> Failure {
    Failure::ended(failure.end(), format!("{}: {failure}", path.display()))
}

/// A table of rows in a file.
struct FileTable<'a> {
    name: &'a str,
    element_type: ElementType,
    ids: Vec<u64>,
    values: &'a [u8],
}

impl<'a> FileTable<'a> {
    /// A matrix has every row of the table.
    fn matrix(given: &GivenValue<'a>, shape: Vec<u64>) -> Result<Self, Failure> {
        let GivenValue { name, element_type, content, .. } = *given;
        match *given.shape {
            [height, _] if given.shape == shape => {
                Ok(Self { name, element_type, ids: (0..height).collect(), values: content })
            }
            _ => Err(Failure::call(format!(
                "parameter \"{name}\": a value of shape {:?}; expected {shape:?}, or \"{name}{IDS}\" and \
                 \"{name}{ROWS}\"",
                given.shape
            ))),
        }
    }

    /// Ids, and a row for each.
    fn listed(name: &'a str, rows: &GivenValue<'a>, ids: Option<&GivenValue<'a>>) -> Result<Self, Failure> {
        let refuse = |text: &str| Failure::call(format!("parameter \"{name}\": {text}"));
        let ids = ids.ok_or_else(|| refuse("rows without \"name:ids\"; expected both"))?;
        if !matches!(ids.element_type, ElementType::Int64 | ElementType::Uint64) {
            return Err(refuse(&format!("ids of {}; expected int64", ids.element_type)));
        }
        let ids = ids.content.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
        Ok(Self { name, element_type: rows.element_type, ids, values: rows.content })
    }

    fn rows(&self) -> GradientRows<'_> {
        GradientRows { name: self.name, element_type: self.element_type, ids: &self.ids, values: self.values }
    }
}

impl ClientState {
    /// Whether there is a sparse parameter of this name.
    fn is_table(&mut self, name: &str) -> bool {
        let job = self.ready_job();
        job.parameter(name, &mut None).is_ok_and(|index| job.chosen(index).declaration().buckets.is_some())
    }

    /// Checks name and shape; type and length are checked with the set.
    fn check_given(&mut self, given: &GivenValue<'_>) -> Result<(), Failure> {
        let job = self.ready_job();
        let parameter = job.chosen(job.parameter(given.name, &mut None)?);
        check_dense(parameter)?;
        let declared = &parameter.declaration().shape;
        let elements = [parameter.declaration().bytes / parameter.declaration().element_type.bytes()];
        let expected: &[u64] = if declared.is_empty() { &elements } else { declared };
        if given.shape == expected || given.shape == declared {
            return Ok(());
        }
        let (name, found) = (given.name, given.shape);
        Err(Failure::call(format!("parameter \"{name}\": a value of shape {found:?}; expected {expected:?}")))
    }
}

fn element_type(found: Dtype) -> Option<ElementType> {
    Some(match found {
        Dtype::I32 => ElementType::Int32,
        Dtype::U32 => ElementType::Uint32,
        Dtype::I64 => ElementType::Int64,
        Dtype::U64 => ElementType::Uint64,
        Dtype::F32 => ElementType::Float32,
        Dtype::F64 => ElementType::Float64,
        Dtype::F16 => ElementType::Float16,
        Dtype::BF16 => ElementType::Bfloat16,
        _ => return None,
    })
}
