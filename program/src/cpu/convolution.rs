//! Convolutions as products of matrices: the elements under the window are a column for each of its places ("im2col").
//!
//! The matrix of columns is made for some places at a time, and so takes at most [`COLUMNS_BYTES`], or one column.

use std::ops::{AddAssign, Range};

use ndarray::LinalgScalar;

use crate::window::WindowSteps;
use crate::{Elements, OpKind, Tensor, VariableValue};

use super::product::{Matrix, product};

/// Most bytes of the matrix of columns: they stay in a core's cache. The bits of gradients depend on it.
const COLUMNS_BYTES: usize = 1 << 20;

/// The result of a convolution or of a gradient of one; none for other kinds.
pub(super) fn output(kind: &OpKind, inputs: &[&VariableValue]) -> Option<Tensor> {
    let (result, x, filter, steps) = match kind {
        OpKind::Conv2d { steps } => (Convolved::Output, 0, 1, *steps),
        OpKind::Conv2dInputGradient { steps } => (Convolved::InputGradient, 2, 0, *steps),
        OpKind::Conv2dFilterGradient { steps } => (Convolved::FilterGradient, 0, 2, *steps),
        _ => return None,
    };
    let convolution = Convolution::new(inputs[x].tensor().shape(), inputs[filter].tensor().shape(), steps)?;
    let elements = match (inputs[0].tensor().elements(), inputs[1].tensor().elements()) {
        (Elements::Float32(left), Elements::Float32(right)) => {
            Elements::Float32(convolution.result(result, left, right))
        }
        (Elements::Float64(left), Elements::Float64(right)) => {
            Elements::Float64(convolution.result(result, left, right))
        }
        _ => return None,
    };
    Some(Tensor::new(convolution.shape(result).map(|length| length as u64), elements))
}

/// The three tensors that are computed from the other two.
#[derive(Clone, Copy)]
enum Convolved {
    Output,
    InputGradient,
    FilterGradient,
}

/// The lengths of a convolution.
struct Convolution {
    x: [usize; 4],
    filter: [usize; 4],
    stride: [usize; 2],
    padding: [usize; 2],
    /// Places of the window along height and width.
    places: [usize; 2],
}

impl Convolution {
    fn new(x: &[u64], filter: &[u64], steps: WindowSteps) -> Option<Self> {
        let [_, _, height, width] = x[..] else { return None };
        let [_, _, filter_height, filter_width] = filter[..] else { return None };
        let [rows, columns] = steps.over([height, width], [filter_height, filter_width]);
        Some(Self {
            x: lengths(x)?,
            filter: lengths(filter)?,
            stride: lengths(&steps.stride)?,
            padding: lengths(&steps.padding)?,
            places: lengths(&[rows.places()?, columns.places()?])?,
        })
    }

    fn shape(&self, result: Convolved) -> [usize; 4] {
        match result {
            Convolved::Output => [self.x[0], self.filter[0], self.places[0], self.places[1]],
            Convolved::InputGradient => self.x,
            Convolved::FilterGradient => self.filter,
        }
    }

    /// Products of one output element.
    fn depth(&self) -> usize {
        self.filter[1..].iter().product()
    }

    fn result<T: LinalgScalar + AddAssign>(&self, result: Convolved, left: &[T], right: &[T]) -> Vec<T> {
        match result {
            Convolved::Output => self.output(left, right),
            Convolved::InputGradient => self.input_gradient(left, right),
            Convolved::FilterGradient => self.filter_gradient(left, right),
        }
    }

    fn output<T: LinalgScalar>(&self, x: &[T], filter: &[T]) -> Vec<T> {
        let (kernels, depth, places) = (self.filter[0], self.depth(), self.place_count());
        let mut y = vec![T::zero(); self.x[0] * kernels * places];
        for (image, y) in x.chunks_exact(self.image_len()).zip(y.chunks_exact_mut(kernels * places)) {
            for band in self.bands::<T>() {
                let columns = self.columns(image, &band);
                let part = product(plain(filter, kernels, depth), plain(&columns, depth, band.len()));
                for (part, y) in part.chunks_exact(band.len()).zip(y.chunks_exact_mut(places)) {
                    y[band.clone()].copy_from_slice(part);
                }
            }
        }
        y
    }

    fn filter_gradient<T: LinalgScalar + AddAssign>(&self, x: &[T], slope: &[T]) -> Vec<T> {
        let (kernels, depth) = (self.filter[0], self.depth());
        let mut gradient = vec![T::zero(); kernels * depth];
        let slopes = slope.chunks_exact(kernels * self.place_count());
        for (image, slope) in x.chunks_exact(self.image_len()).zip(slopes) {
            for band in self.bands::<T>() {
                let columns = self.columns(image, &band);
                let slope = self.band_of(slope, &band);
                let part = product(plain(&slope, kernels, band.len()), transposed(&columns, depth, band.len()));
                gradient.iter_mut().zip(part).for_each(|(gradient, part)| *gradient += part);
            }
        }
        gradient
    }

    fn input_gradient<T: LinalgScalar + AddAssign>(&self, filter: &[T], slope: &[T]) -> Vec<T> {
        let (kernels, depth) = (self.filter[0], self.depth());
        let mut gradient = vec![T::zero(); self.x.iter().product()];
        let slopes = slope.chunks_exact(kernels * self.place_count());
        for (image, slope) in gradient.chunks_exact_mut(self.image_len()).zip(slopes) {
            for band in self.bands::<T>() {
                let slope = self.band_of(slope, &band);
                let columns = product(transposed(filter, kernels, depth), plain(&slope, kernels, band.len()));
                self.each_run(&band, |run, first| {
                    let elements = image[first..].iter_mut().step_by(self.stride[1]);
                    elements.zip(&columns[run]).for_each(|(element, column)| *element += *column);
                });
            }
        }
        gradient
    }

    fn image_len(&self) -> usize {
        self.x[1..].iter().product()
    }

    fn place_count(&self) -> usize {
        self.places[0] * self.places[1]
    }

    /// Ranges of places whose columns are made together.
    fn bands<T>(&self) -> impl Iterator<Item = Range<usize>> + use<T> {
        let count = self.place_count();
        let most = (COLUMNS_BYTES / size_of::<T>() / self.depth()).max(1);
        (0..count).step_by(most).map(move |first| first..count.min(first + most))
    }

    /// The columns of some places: a matrix of a row for every element of a filter.
    fn columns<T: LinalgScalar>(&self, image: &[T], band: &Range<usize>) -> Vec<T> {
        let mut columns = vec![T::zero(); self.depth() * band.len()];
        self.each_run(band, |run, first| {
            let elements = image[first..].iter().step_by(self.stride[1]);
            columns[run].iter_mut().zip(elements).for_each(|(column, element)| *column = *element);
        });
        columns
    }

    /// The columns of some places in a matrix of a row for every filter.
    fn band_of<T: Copy>(&self, rows: &[T], band: &Range<usize>) -> Vec<T> {
        rows.chunks_exact(self.place_count()).flat_map(|row| &row[band.clone()]).copied().collect()
    }

    /// Visits the elements of the matrix of columns that are no padding, as ranges that lie in one row of it and in one
    /// row of the image, with the index of the first element in the image; the others follow by the stride.
    fn each_run(&self, band: &Range<usize>, mut visit: impl FnMut(Range<usize>, usize)) {
        let [_, channels, filter_height, filter_width] = self.filter;
        let in_band = band.start / self.places[1]..band.end.div_ceil(self.places[1]);
        for channel in 0..channels {
            for down in 0..filter_height {
                let rows = common(&self.covering(0, down), &in_band);
                for right in 0..filter_width {
                    let row_of_columns = (channel * filter_height + down) * filter_width + right;
                    let covering = self.covering(1, right);
                    for row in rows.clone() {
                        let begin = row * self.places[1];
                        let here = band.start.saturating_sub(begin)..band.end - begin;
                        let places = common(&covering, &here);
                        if places.is_empty() {
                            continue;
                        }
                        let element_row = row * self.stride[0] + down - self.padding[0];
                        let element_column = places.start * self.stride[1] + right - self.padding[1];
                        let element = (channel * self.x[2] + element_row) * self.x[3] + element_column;
                        let run = row_of_columns * band.len() + begin + places.start - band.start;
                        visit(run..run + places.len(), element);
                    }
                }
            }
        }
    }

    /// The places at which an offset in the window is over an element, along one dimension.
    fn covering(&self, axis: usize, offset: usize) -> Range<usize> {
        let (stride, padding, length) = (self.stride[axis], self.padding[axis], self.x[2 + axis]);
        let first = padding.saturating_sub(offset).div_ceil(stride);
        let end = (length + padding).saturating_sub(offset).div_ceil(stride);
        first..end.min(self.places[axis])
    }
}

fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    one.start.max(other.start)..one.end.min(other.end)
}

fn plain<T>(values: &[T], rows: usize, columns: usize) -> Matrix<'_, T> {
    Matrix { values, shape: (rows, columns), is_transposed: false }
}

/// A matrix of these rows and columns, read with both exchanged.
fn transposed<T>(values: &[T], rows: usize, columns: usize) -> Matrix<'_, T> {
    Matrix { is_transposed: true, ..plain(values, rows, columns) }
}

fn lengths<const N: usize, L: Copy + TryInto<usize>>(lengths: &[L]) -> Option<[usize; N]> {
    let lengths: Vec<usize> = lengths.iter().map(|length| (*length).try_into().ok()).collect::<Option<_>>()?;
    lengths.try_into().ok()
}
