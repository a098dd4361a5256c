//! Convolutions and pools, window after window.

use crate::op::OpKind;
use crate::value::{Tensor, VariableValue};
use crate::window::{WindowAxis, WindowSteps};

use super::pointwise::index;
use super::real::TensorReal;

/// The result of a convolution, of a pool, or of a gradient of either; none for other kinds.
pub(super) fn output<R: TensorReal>(kind: &OpKind, inputs: &[&VariableValue]) -> Option<Tensor> {
    let input = |place: usize| inputs[place].tensor();
    Some(match kind {
        OpKind::Conv2d { steps } => convolution::<R>(input(0), input(1), *steps),
        OpKind::Conv2dInputGradient { steps } => input_gradient::<R>(input(0), input(1), input(2).shape(), *steps),
        OpKind::Conv2dFilterGradient { steps } => filter_gradient::<R>(input(0), input(1), input(2).shape(), *steps),
        OpKind::MaxPool2d { size, steps } => {
            let windows = PoolWindows::new(input(0), *size, *steps);
            let x = R::slice(input(0).elements());
            windows.output(|window| x[largest(x, window)])
        }
        OpKind::AvgPool2d { size, steps } => {
            let windows = PoolWindows::new(input(0), *size, *steps);
            let x = R::slice(input(0).elements());
            let sum = |window: &[usize]| window.iter().fold(R::ZERO, |sum, element| sum + x[*element]);
            windows.output(|window| sum(window) / R::count(window.len()))
        }
        OpKind::MaxPool2dGradient { size, steps } => {
            let windows = PoolWindows::new(input(0), *size, *steps);
            let x = R::slice(input(0).elements());
            windows.gradient::<R>(input(1), |slope, window, gradient| {
                let element = &mut gradient[largest(x, window)];
                *element = *element + slope;
            })
        }
        OpKind::AvgPool2dGradient { size, steps } => {
            let windows = PoolWindows::new(input(0), *size, *steps);
            windows.gradient::<R>(input(1), |slope, window, gradient| {
                let share = slope / R::count(window.len());
                window.iter().for_each(|element| gradient[*element] = gradient[*element] + share);
            })
        }
        _ => return None,
    })
}

/// One product of a convolution: the indices of an element of the images, of the filter and of the output.
type Term = (usize, usize, usize);

/// Visits every product of a convolution. Those of one output element come together, in the filter's order.
fn each_term(x: &[u64], filter: &[u64], steps: WindowSteps, mut visit: impl FnMut(Term)) {
    let axes = steps.over([x[2], x[3]], [filter[2], filter[3]]);
    let mut output = 0;
    for image in 0..x[0] {
        for kernel in 0..filter[0] {
            for_each_place(axes, |place| {
                for channel in 0..x[1] {
                    for_each_element(axes, place, |[row, column], [down, right]| {
                        let element = index(((image * x[1] + channel) * x[2] + row) * x[3] + column);
                        let weight = index(((kernel * x[1] + channel) * filter[2] + down) * filter[3] + right);
                        visit((element, weight, output));
                    });
                }
                output += 1;
            });
        }
    }
}

fn for_each_place(axes: [WindowAxis; 2], mut visit: impl FnMut([u64; 2])) {
    let [rows, columns] = axes.map(places);
    for row in 0..rows {
        (0..columns).for_each(|column| visit([row, column]));
    }
}

/// Visits the elements under a window that are no padding, with their offsets in the window.
fn for_each_element(axes: [WindowAxis; 2], place: [u64; 2], mut visit: impl FnMut([u64; 2], [u64; 2])) {
    let [(downs, first_row), (rights, first_column)] = [axes[0].covered(place[0]), axes[1].covered(place[1])];
    for (row, down) in (first_row..).zip(downs) {
        for (column, right) in (first_column..).zip(rights.clone()) {
            visit([row, column], [down, right]);
        }
    }
}

fn places(axis: WindowAxis) -> u64 {
    axis.places().expect("a checked window fits into its image")
}

fn convolution<R: TensorReal>(x: &Tensor, filter: &Tensor, steps: WindowSteps) -> Tensor {
    let axes = steps.over([x.shape()[2], x.shape()[3]], [filter.shape()[2], filter.shape()[3]]);
    let shape = [x.shape()[0], filter.shape()[0], places(axes[0]), places(axes[1])];
    let (images, weights) = (R::slice(x.elements()), R::slice(filter.elements()));
    sums::<R>(&shape, |sums| {
        each_term(x.shape(), filter.shape(), steps, |(element, weight, output)| {
            sums[output] = sums[output] + images[element] * weights[weight];
        });
    })
}

fn input_gradient<R: TensorReal>(filter: &Tensor, slope: &Tensor, x: &[u64], steps: WindowSteps) -> Tensor {
    let (weights, slopes) = (R::slice(filter.elements()), R::slice(slope.elements()));
    sums::<R>(x, |sums| {
        each_term(x, filter.shape(), steps, |(element, weight, output)| {
            sums[element] = sums[element] + weights[weight] * slopes[output];
        });
    })
}

fn filter_gradient<R: TensorReal>(x: &Tensor, slope: &Tensor, filter: &[u64], steps: WindowSteps) -> Tensor {
    let (images, slopes) = (R::slice(x.elements()), R::slice(slope.elements()));
    sums::<R>(filter, |sums| {
        each_term(x.shape(), filter, steps, |(element, weight, output)| {
            sums[weight] = sums[weight] + images[element] * slopes[output];
        });
    })
}

/// A tensor of sums, which begin at zero.
fn sums<R: TensorReal>(shape: &[u64], add: impl FnOnce(&mut [R])) -> Tensor {
    let mut sums = vec![R::ZERO; shape.iter().map(|length| index(*length)).product()];
    add(&mut sums);
    Tensor::new(shape, R::wrap(sums))
}

/// The first element of a window that no other one exceeds.
fn largest<R: TensorReal>(x: &[R], window: &[usize]) -> usize {
    window.iter().fold(window[0], |largest, element| if x[*element] > x[largest] { *element } else { largest })
}

/// The windows of a pool over images.
struct PoolWindows<'x> {
    shape: &'x [u64],
    axes: [WindowAxis; 2],
}

impl<'x> PoolWindows<'x> {
    fn new(x: &'x Tensor, size: [u32; 2], steps: WindowSteps) -> Self {
        let shape = x.shape();
        Self { shape, axes: steps.over([shape[2], shape[3]], size.map(u64::from)) }
    }

    /// Visits every window by the indices of its elements, which are in order and at least one.
    fn each(&self, mut visit: impl FnMut(&[usize])) {
        let mut window = Vec::new();
        for plane in 0..self.shape[0] * self.shape[1] {
            for_each_place(self.axes, |place| {
                window.clear();
                for_each_element(self.axes, place, |[row, column], _| {
                    window.push(index((plane * self.shape[2] + row) * self.shape[3] + column));
                });
                visit(&window);
            });
        }
    }

    fn output<R: TensorReal>(&self, value: impl Fn(&[usize]) -> R) -> Tensor {
        let mut values = Vec::new();
        self.each(|window| values.push(value(window)));
        let [rows, columns] = self.axes.map(places);
        Tensor::new([self.shape[0], self.shape[1], rows, columns], R::wrap(values))
    }

    /// Adds the slope of every window to its elements' gradients.
    fn gradient<R: TensorReal>(&self, slope: &Tensor, add: impl Fn(R, &[usize], &mut [R])) -> Tensor {
        let mut slopes = R::slice(slope.elements()).iter();
        sums::<R>(self.shape, |gradient| {
            self.each(|window| add(*slopes.next().expect("one slope for each window"), window, gradient));
        })
    }
}
