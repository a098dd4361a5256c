//! Given values of parameters of a job that runs, from memory or from a safetensors file.

use std::path::Path;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use safetensors::{Dtype, SafeTensors};

use super::job::check_dense;
use super::{Client, ClientState, Extent, GradientSlice};

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
        let _memory = self.hold(values.iter().map(|given| Extent::of(given.content)));
        let mut state = self.lock()?;
        state.ready()?;
        values.iter().try_for_each(|given| state.check_given(given))?;
        let values = values.iter().map(|given| {
            let GivenValue { name, element_type, content, .. } = *given;
            GradientSlice { name, element_type, content }
        });
        let values: Vec<_> = values.collect();
        state.lend(|state, book| {
            let call = state.start_set(&values, book)?;
            state.finish(call)
        })
    }

    /// [`Client::load`], of every tensor in a safetensors file of this machine. Returns their names.
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
        let loaded = self.load(&values);
        loaded.map_err(|failure| Failure::ended(failure.end(), format!("{}: {failure}", path.display())))?;
        Ok(values.iter().map(|given| given.name.to_owned()).collect())
    }
}

impl ClientState {
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
