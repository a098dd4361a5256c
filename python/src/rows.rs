//! Rows of a call: ids and values of each parameter, in arrays.

use pserver_client::{CallNumber, DestinationRows, GradientRows};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::arrays::{Access, HeldArray, ParameterName, arrays};
use crate::carried::RawNumbers;
use crate::session::{PythonSession, name_for_good};

/// Ids and values of rows, one array of each for each parameter.
pub(crate) struct RowArrays {
    ids: Vec<HeldArray>,
    values: Vec<HeldArray>,
}

impl RowArrays {
    pub(crate) fn of(
        py: Python<'_>,
        names: &[PyBackedStr],
        ids: &[Bound<'_, PyAny>],
        values: &[Bound<'_, PyAny>],
        access: Access,
    ) -> PyResult<Self> {
        Ok(Self { ids: arrays(py, names, ids, Access::Read)?, values: arrays(py, names, values, access)? })
    }

    /// Rows to send.
    pub(crate) fn gradients<'a>(&'a self, names: &'a [PyBackedStr]) -> Result<Vec<GradientRows<'a>>, Failure> {
        let rows = names.iter().zip(&self.ids).zip(&self.values).map(|((name, ids), values)| {
            let (ids, element_type) = (row_ids(name, ids)?, values.element_type());
            Ok(GradientRows { name, element_type, ids, values: values.contents() })
        });
        rows.collect()
    }

    /// Destinations, each of the type of its parameter.
    pub(crate) fn destinations<'a>(
        &'a mut self,
        session: &PythonSession,
        names: &'a [PyBackedStr],
    ) -> Result<Vec<DestinationRows<'a>>, Failure> {
        let mut rows = Vec::with_capacity(names.len());
        for ((name, ids), values) in names.iter().zip(&self.ids).zip(&mut self.values) {
            check_type(session, name, values)?;
            rows.push(DestinationRows { name, ids: row_ids(name, ids)?, values: values.contents_mut() });
        }
        Ok(rows)
    }

    /// Destinations of a started call, and the arrays to hold until it is over.
    fn lasting_destinations(
        mut self,
        session: &PythonSession,
        names: &[PyBackedStr],
    ) -> Result<(Vec<DestinationRows<'static>>, Vec<HeldArray>), Failure> {
        let mut rows = Vec::with_capacity(names.len());
        for ((name, ids), values) in names.iter().zip(&self.ids).zip(&mut self.values) {
            check_type(session, name, values)?;
            row_ids(name, ids)?;
            let ids: &'static [u64] = bytemuck::cast_slice(ids.lasting());
            rows.push(DestinationRows { name: name_for_good(name), ids, values: values.lasting_mut() });
        }
        self.values.extend(self.ids);
        Ok((rows, self.values))
    }
}

/// Starts a pull of rows, with gradients behind a push of rows, and holds the destinations until the call is over.
pub(crate) fn start_rows(
    session: &PythonSession,
    names: &[PyBackedStr],
    given: Option<RowArrays>,
    out: RowArrays,
    numbers: &RawNumbers,
) -> Result<CallNumber, Failure> {
    let (into, held) = out.lasting_destinations(session, names)?;
    let number = match given {
        Some(given) => session.client().start_push_pull_rows(&given.gradients(names)?, numbers.carried(), into),
        None => session.client().start_pull_rows(into),
    }?;
    session.keep(number, held);
    Ok(number)
}

fn check_type(session: &PythonSession, name: &str, values: &HeldArray) -> Result<(), Failure> {
    let (declared, found) = (session.facts(name)?.element_type, values.element_type());
    if found == declared {
        return Ok(());
    }
    Err(Failure::call(format!("{}: an array of {found} for rows; expected {declared}", ParameterName(name))))
}

/// The ids of rows.
pub(crate) fn row_ids<'a>(name: &str, ids: &'a HeldArray) -> Result<&'a [u64], Failure> {
    let refuse = |text: &str| Failure::call(format!("{}: ids {text}", ParameterName(name)));
    if !matches!(ids.element_type(), ElementType::Int64 | ElementType::Uint64) {
        return Err(refuse(&format!("of {}; expected int64 or uint64", ids.element_type())));
    }
    // A negative number is a hash: a table with a height refuses it as an id of more than 63 bits.
    bytemuck::try_cast_slice(ids.contents())
        .map_err(|_| refuse("at an address that 8 does not divide; expected an array of int64 or uint64"))
}
