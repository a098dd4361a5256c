//! Arrays of parameters that were looked at once, for several calls of a step: of many small parameters, looking at
//! arrays is most of a call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pserver_client::{DestinationSlice, GradientSlice};
use pserver_core::checksum::checksum;
use pserver_core::dtype::Half;
use pserver_core::error::Failure;
use pyo3::prelude::*;

use crate::arrays::HeldArray;

/// Arrays that fit their parameters: gradients, or destinations. A call that is started takes them.
#[pyclass(frozen, name = "RawArrays", module = "pserver._pserver")]
pub(crate) struct ParameterArrays {
    /// The parameters, and in which half precision the value of each comes.
    parameters: Vec<(&'static str, Option<Half>)>,
    arrays: Mutex<Vec<HeldArray>>,
}

impl ParameterArrays {
    pub(crate) fn new(parameters: Vec<(&'static str, Option<Half>)>, arrays: Vec<HeldArray>) -> Self {
        Self { parameters, arrays: Mutex::new(arrays) }
    }

    /// Calls `act` with the arrays as gradients.
    pub(crate) fn as_gradients<T>(&self, act: impl FnOnce(&[GradientSlice<'_>]) -> T) -> T {
        let arrays = self.locked();
        let given = self.parameters.iter().zip(&*arrays).map(|((name, _), array)| GradientSlice {
            name,
            element_type: array.element_type(),
            content: array.contents(),
        });
        act(&given.collect::<Vec<_>>())
    }

    /// Calls `act` with the arrays as destinations.
    pub(crate) fn as_destinations<T>(&self, act: impl FnOnce(&mut [DestinationSlice<'_>]) -> T) -> T {
        let mut arrays = self.locked();
        let wanted = self.parameters.iter().zip(&mut *arrays).map(|((name, half), array)| DestinationSlice {
            name,
            content: array.contents_mut(),
            half: *half,
        });
        act(&mut wanted.collect::<Vec<_>>())
    }

    /// Takes the arrays as gradients of a started call, which holds them.
    pub(crate) fn take_gradients(&self) -> Result<(Vec<GradientSlice<'static>>, Vec<HeldArray>), Failure> {
        let arrays = self.take()?;
        let given = self.parameters.iter().zip(&arrays).map(|((name, _), array)| GradientSlice {
            name,
            element_type: array.element_type(),
            content: array.lasting(),
        });
        Ok((given.collect(), arrays))
    }

    /// Takes the arrays as destinations of a started call, which holds them.
    pub(crate) fn take_destinations(&self) -> Result<(Vec<DestinationSlice<'static>>, Vec<HeldArray>), Failure> {
        let mut arrays = self.take()?;
        let wanted = self.parameters.iter().zip(&mut arrays).map(|((name, half), array)| DestinationSlice {
            name,
            content: array.lasting_mut(),
            half: *half,
        });
        Ok((wanted.collect(), arrays))
    }

    fn locked(&self) -> MutexGuard<'_, Vec<HeldArray>> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<Vec<HeldArray>, Failure> {
        let arrays = std::mem::take(&mut *self.locked());
        if arrays.len() < self.parameters.len() {
            return Err(Failure::call("arrays that an earlier call has taken; expected them to be looked at again"));
        }
        Ok(arrays)
    }
}

#[pymethods]
impl ParameterArrays {
    /// A checksum of each array's contents: equal ones have not changed.
    fn checksums(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.locked().iter().map(|one| checksum(one.contents())).collect())
    }
}
