//! Ops of Paddle's that arrange elements: shapes, orders and parts of dimensions.

use pserver_core::error::Failure;

use crate::op::OpKind;
use crate::variable::Dim;

use super::super::paddle_op::PaddleOp;
use super::{ForwardPart, axes, axis_number, signed};

impl<'a> ForwardPart<'a> {
    /// Maps an op of this page; false where it is none.
    pub(super) fn arrange(&mut self, op: &PaddleOp<'a>) -> Result<bool, Failure> {
        match op.kind() {
            "reshape2" => self.reshape2(op)?,
            "squeeze2" | "unsqueeze2" => self.squeeze(op)?,
            "flatten_contiguous_range" => self.flatten(op)?,
            "transpose2" => self.transpose(op)?,
            "slice" => self.slice(op)?,
            "gather" => self.gather(op)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The dimensions that Paddle declares for a variable.
    fn declared_shape(&self, name: &str) -> Result<Vec<Dim>, Failure> {
        Ok(self.variables.dense(name)?.1)
    }

    /// Reshapes to the declared dimensions of the output, of which the caller knows that they are the op's.
    fn reshape(&mut self, op: &PaddleOp<'a>, x: &str, out: &str) -> Result<(), Failure> {
        let shape = self.shape(out)?;
        self.reshape_to(op, x, out, &shape)
    }

    pub(super) fn reshape_to(&mut self, op: &PaddleOp<'a>, x: &str, out: &str, shape: &[Dim]) -> Result<(), Failure> {
        let batches = shape.iter().filter(|dim| **dim == Dim::Batch).count();
        if batches > 1 {
            return Err(op.refuse(format!("output {out:?} has {batches} unknown dimensions; expected at most one")));
        }
        if let Some(place) = shape.iter().position(|dim| *dim == Dim::Fixed(0)) {
            return Err(op.refuse(format!("output {out:?} has dimension {place} of 0 elements; expected 1 or more")));
        }
        let lengths = shape.iter().map(|dim| if let Dim::Fixed(length) = dim { *length } else { 0 });
        self.push(op, OpKind::Reshape { shape: lengths.collect() }, &[x], &[out]);
        Ok(())
    }

    fn differs(op: &PaddleOp<'_>, out: &str, expected: &str) -> Failure {
        op.refuse(format!("found other dimensions declared for output {out:?}; expected {expected}"))
    }

    /// In `shape` 0 is the length that the input has, and -1 what remains.
    fn reshape2(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        let (from, to, said) = (self.declared_shape(x)?, self.declared_shape(out)?, op.ints("shape"));
        let fits = |(place, (said, to)): (usize, (&i64, &Dim))| match said {
            -1 => true,
            0 => from.get(place) == Some(to),
            length => u64::try_from(*length).is_ok_and(|length| Dim::Fixed(length) == *to),
        };
        let remains = said.iter().filter(|length| **length == -1).count();
        if said.len() != to.len() || remains > 1 || !said.iter().zip(&to).enumerate().all(fits) {
            return Err(Self::differs(op, out, &format!("those of shape {said:?}")));
        }
        self.reshape(op, x, out)
    }

    /// Takes away or puts in dimensions of 1.
    fn squeeze(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        let (short, long) = if op.kind() == "squeeze2" { (out, x) } else { (x, out) };
        let (less, more) = (self.declared_shape(short)?, self.declared_shape(long)?);
        let mut places = axes(op, &op.ints("axes"), more.len())?;
        if op.ints("axes").is_empty() && op.kind() == "squeeze2" {
            places = (0..more.len()).filter(|place| more[*place] == Dim::Fixed(1)).collect();
        }
        // Paddle's squeeze leaves dimensions that are longer.
        places.retain(|place| more[*place] == Dim::Fixed(1) || op.kind() == "unsqueeze2");
        let rest = more.iter().enumerate().filter(|(place, _)| !places.contains(place)).map(|(_, dim)| *dim);
        let are_ones = places.iter().all(|place| more[*place] == Dim::Fixed(1));
        if !are_ones || !rest.eq(less.iter().copied()) {
            return Err(Self::differs(op, out, &format!("those of axes {:?}", op.ints("axes"))));
        }
        self.reshape(op, x, out)
    }

    fn flatten(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        let (x, out) = (op.input("X")?, op.output("Out")?);
        let (from, to) = (self.declared_shape(x)?, self.declared_shape(out)?);
        let ends = [op.int("start_axis", 1)?, op.int("stop_axis", -1)?];
        let [start, stop] = [axes(op, &ends[..1], from.len())?, axes(op, &ends[1..], from.len())?].map(|axis| axis[0]);
        if start > stop {
            return Err(op.refuse(format!("found start_axis {start} behind stop_axis {stop}; expected it before")));
        }
        let middle = self.joined(op, x, &from[start..=stop])?;
        let expected: Vec<Dim> =
            from[..start].iter().copied().chain([middle]).chain(from[stop + 1..].to_vec()).collect();
        if expected != to {
            return Err(Self::differs(op, out, &format!("dimensions {start} to {stop} of {x:?} as one")));
        }
        self.reshape(op, x, out)
    }

    /// Several dimensions as one. The batch remains one number of examples only alone.
    pub(super) fn joined(&self, op: &PaddleOp<'a>, x: &str, dims: &[Dim]) -> Result<Dim, Failure> {
        let mut product = 1_u64;
        for dim in dims {
            product = match dim {
                Dim::Batch if dims.len() == 1 => return Ok(Dim::Batch),
                Dim::Batch => {
                    return Err(op.refuse(format!(
                        "found the batch of {x:?} joined with other dimensions; expected it \
                                                  to stay one"
                    )));
                }
                Dim::Fixed(length) => product.checked_mul(*length).ok_or_else(|| {
                    op.refuse(format!("found dimensions of {x:?} with 2^64 elements or more; expected fewer"))
                })?,
            };
        }
        Ok(Dim::Fixed(product))
    }

    fn transpose(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X"])?;
        self.check_whole(op)?;
        let axes = op.ints("axis").into_iter().map(|axis| {
            u32::try_from(axis).map_err(|_| op.refuse(format!("found axis {axis}; expected numbers from 0 on")))
        });
        let kind = OpKind::Transpose { axes: axes.collect::<Result<_, _>>()? };
        self.push(op, kind, &[op.input("X")?], &[op.output("Out")?]);
        Ok(())
    }

    /// Parts of some dimensions, one after another; those in `decrease_axis`, of length 1, are taken away.
    fn slice(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["Input"])?;
        self.check_whole(op)?;
        let (x, out) = (op.input("Input")?, op.output("Out")?);
        let mut shape = self.shape(x)?;
        let (dims, starts, ends) = (op.ints("axes"), op.ints("starts"), op.ints("ends"));
        if dims.len() != starts.len() || dims.len() != ends.len() {
            let found = [dims.len(), starts.len(), ends.len()];
            return Err(op.refuse(format!("found {found:?} axes, starts and ends; expected as many of each")));
        }
        if dims.len() > shape.len() {
            return Err(op.refuse(format!("found {} axes; expected at most {}", dims.len(), shape.len())));
        }
        let mut from = x.to_owned();
        for (dim, (start, end)) in dims.iter().zip(starts.into_iter().zip(ends)) {
            let axis = axes(op, &[*dim], shape.len())?[0];
            let Dim::Fixed(length) = shape[axis] else {
                return Err(op.refuse(format!("found a slice of dimension {axis}, the batch; expected a fixed one")));
            };
            let place = |place: i64| match u64::try_from(place) {
                Ok(place) => place.min(length),
                Err(_) => length.saturating_sub(place.unsigned_abs()),
            };
            let (start, end) = (place(start), place(end));
            if start >= end {
                return Err(op.refuse(format!("found elements {start} to {end} of dimension {axis}; expected some")));
            }
            shape[axis] = Dim::Fixed(end - start);
            let to = format!("{out}@slice{axis}");
            self.push(op, OpKind::Slice { axis: axis_number(op, axis)?, start, end }, &[&from], &[&to]);
            from = to;
        }
        let gone = axes(op, &op.ints("decrease_axis"), shape.len())?;
        if let Some(axis) = gone.iter().find(|axis| shape[**axis] != Dim::Fixed(1)) {
            return Err(op.refuse(format!("found decrease_axis {axis}, of {}; expected length 1", shape[*axis])));
        }
        let rest: Vec<Dim> = (0..shape.len()).filter(|axis| !gone.contains(axis)).map(|axis| shape[axis]).collect();
        self.reshape_to(op, &from, out, &rest)
    }

    fn gather(&mut self, op: &PaddleOp<'a>) -> Result<(), Failure> {
        op.check_slots(&["X", "Index"])?;
        self.check_whole(op)?;
        op.check_ints(&[("axis", 0)])?;
        let (x, index) = (op.input("X")?, op.input("Index")?);
        let rank = signed(self.shape(index)?.len());
        if rank != 1 {
            return Err(op.refuse(format!("found {index:?} of {rank} dimensions; expected one")));
        }
        self.push(op, OpKind::Gather, &[x, index], &[op.output("Out")?]);
        Ok(())
    }
}
