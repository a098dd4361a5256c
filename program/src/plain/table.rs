//! Tables of rows, and selected rows.

use crate::infer;
use crate::value::{Tensor, VariableValue};
use pserver_core::error::Failure;
use pserver_core::rows::SelectedRows;

use super::loss::integers;
use super::pointwise::index;
use super::real::TensorReal;

/// Rows of a table by number.
pub(super) fn lookup<R: TensorReal>(table: &Tensor, ids: &Tensor, padding: Option<u64>) -> Result<Tensor, Failure> {
    let (height, width) = (index(table.shape()[0]), index(table.shape()[1]));
    let values = R::slice(table.elements());
    let mut found = Vec::with_capacity(ids.elements().len() * width);
    for (place, id) in integers(ids).iter().enumerate() {
        let row = usize::try_from(*id).ok().filter(|row| *row < height);
        let row = row.ok_or_else(|| missing(*id, place, height as u64))?;
        match padding {
            Some(padding) if padding == row as u64 => found.resize(found.len() + width, R::ZERO),
            _ => found.extend_from_slice(&values[row * width..][..width]),
        }
    }
    let mut shape = ids.shape().to_vec();
    shape.push(width as u64);
    Ok(Tensor::new(shape, R::wrap(found)))
}

/// Rows by id among selected ones, which ascend.
pub(super) fn lookup_rows(rows: &SelectedRows, ids: &Tensor, padding: Option<u64>) -> Result<Tensor, Failure> {
    let (view, layout) = (rows.view(), rows.view().layout());
    let held: Vec<u64> = view.ids().iter().collect();
    if let Some(place) = held.windows(2).position(|pair| pair[1] <= pair[0]) {
        let [before, after] = [held[place], held[place + 1]];
        return Err(Failure::call(format!("row {after} follows row {before}; expected ascending rows, each once")));
    }
    let mut found = Vec::with_capacity(ids.elements().len() * layout.row_bytes());
    for (place, id) in integers(ids).iter().enumerate() {
        let row = u64::try_from(*id).ok().filter(|row| *row < layout.height().bound());
        let row = row.ok_or_else(|| missing(*id, place, layout.height().bound()))?;
        if padding == Some(row) {
            found.resize(found.len() + layout.row_bytes(), 0);
            continue;
        }
        let at = held.binary_search(&row).map_err(|_| {
            Failure::call(format!("id {id} at place {place}; expected one of the {} rows that are there", held.len()))
        })?;
        found.extend_from_slice(view.row(at));
    }
    let mut shape = ids.shape().to_vec();
    shape.push(layout.width().into());
    let mut tensor = Tensor::zeros(view.element_type(), &shape);
    tensor.bytes_mut().copy_from_slice(&found);
    Ok(tensor)
}

fn missing(id: i64, place: usize, height: u64) -> Failure {
    Failure::call(format!("id {id} at place {place}; expected 0 to {}", height - 1))
}

/// The gradient of a table: each id with the gradient of its output row, without those of the padding.
pub(super) fn gradient(inputs: &[&VariableValue], height: u64, padding: Option<u64>) -> Result<VariableValue, Failure> {
    let (ids, slope) = (inputs[0].tensor(), inputs[1].tensor());
    let width = *slope.shape().last().expect("a checked gradient has a last dimension");
    let element_type = slope.elements().element_type();
    let layout = infer::layout(element_type, height, width).map_err(Failure::call)?;
    let ids = integers(ids).iter().enumerate();
    let ids = ids.map(|(place, id)| u64::try_from(*id).map_err(|_| missing(*id, place, height)));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    if padding.is_none_or(|padding| !ids.contains(&padding)) {
        return SelectedRows::new(layout, &ids, slope.bytes()).map(VariableValue::SelectedRows);
    }
    let rows = ids.iter().zip(slope.bytes().chunks_exact(layout.row_bytes()));
    let (ids, rows): (Vec<u64>, Vec<&[u8]>) = rows.filter(|(id, _)| Some(**id) != padding).unzip();
    SelectedRows::new(layout, &ids, &rows.concat()).map(VariableValue::SelectedRows)
}

/// Rows of several, one after another.
pub(super) fn sum(inputs: &[&VariableValue]) -> Result<VariableValue, Failure> {
    let layout = inputs[0].rows().view().layout();
    let (mut ids, mut values) = (Vec::new(), Vec::new());
    for input in inputs {
        let rows = input.rows().view();
        ids.extend(rows.ids().iter());
        values.extend_from_slice(rows.values());
    }
    SelectedRows::new(layout, &ids, &values).map(VariableValue::SelectedRows)
}

/// The values of selected rows as a matrix, in their order.
pub(super) fn values(rows: &SelectedRows) -> VariableValue {
    let (view, layout) = (rows.view(), rows.view().layout());
    let mut values = Tensor::zeros(view.element_type(), &[view.len() as u64, u64::from(layout.width())]);
    values.bytes_mut().copy_from_slice(view.values());
    values.into()
}

/// Selected rows with the same ids and other values, a matrix as [`values`] gives it.
pub(super) fn with_values(rows: &SelectedRows, values: &VariableValue) -> Result<VariableValue, Failure> {
    let (view, layout) = (rows.view(), rows.view().layout());
    let ids: Vec<u64> = view.ids().iter().collect();
    SelectedRows::new(layout, &ids, values.tensor().bytes()).map(VariableValue::SelectedRows)
}

/// Pieces of selected rows by height; each counts its rows from its own zero and keeps their order.
pub(super) fn split(rows: &SelectedRows, heights: &[u64]) -> Result<Vec<VariableValue>, Failure> {
    let view = rows.view();
    let (element_type, width) = (view.element_type(), view.layout().width());
    let mut first = 0;
    let mut pieces = Vec::with_capacity(heights.len());
    for height in heights {
        let (mut ids, mut values) = (Vec::new(), Vec::new());
        for (id, row) in view.iter().filter(|(id, _)| (first..first + height).contains(id)) {
            ids.push(id - first);
            values.extend_from_slice(row);
        }
        let layout = infer::layout(element_type, *height, width.into()).map_err(Failure::call)?;
        pieces.push(VariableValue::SelectedRows(SelectedRows::new(layout, &ids, &values)?));
        first += height;
    }
    Ok(pieces)
}

/// Rows of several along dimension 0, the inverse of [`split`].
pub(super) fn concat(inputs: &[&VariableValue]) -> Result<VariableValue, Failure> {
    let (mut ids, mut values, mut height) = (Vec::new(), Vec::new(), 0);
    for input in inputs {
        let rows = input.rows().view();
        ids.extend(rows.ids().iter().map(|id| height + id));
        values.extend_from_slice(rows.values());
        height += rows.layout().height().bound();
    }
    let first = inputs[0].rows().view().layout();
    let layout = infer::layout(first.element_type(), height, first.width().into()).map_err(Failure::call)?;
    SelectedRows::new(layout, &ids, &values).map(VariableValue::SelectedRows)
}

/// The same value without selected rows.
pub(super) fn whole(value: &VariableValue) -> Result<VariableValue, Failure> {
    match value {
        VariableValue::SelectedRows(rows) => dense(rows).map(VariableValue::Dense),
        other => Ok(other.clone()),
    }
}

/// Selected rows as a dense tensor: repeated rows summed in order, zero elsewhere.
pub(super) fn dense(rows: &SelectedRows) -> Result<Tensor, Failure> {
    let view = rows.view();
    let layout = view.layout();
    let shape = [layout.height().bound(), u64::from(layout.width())];
    let mut tensor = Tensor::zeros(view.element_type(), &shape);
    if !view.element_type().is_parameter_type() {
        let found = view.element_type();
        return Err(Failure::call(format!("selected rows of {found}; expected a type that parameters have")));
    }
    let mut merge = pserver_core::rows::RowMerge::default();
    let contributions = [view];
    let merged = merge.unite(layout, &contributions)?;
    let bytes = tensor.bytes_mut();
    for (place, id) in merged.ids().enumerate() {
        merged.sum(place..place + 1, &mut bytes[index(id) * layout.row_bytes()..][..layout.row_bytes()]);
    }
    Ok(tensor)
}
