"""ATen ops that arrange, select or repeat elements.

The functions' parameters have the names of the ops' schemas; an argument that is not among them is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arithmetic import compared
from .graph import aten, source, type_of
from .text import Shape, Variable
from .translator import BatchMultiple, Translator, Value, maps, shown

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@maps(*RESHAPES, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default,
       aten.squeeze.dim, aten.squeeze.dims)
def _reshape(t: Translator, self: Value, size: Any = None, shape: Any = None, dim: Any = None, start_dim: int = 0,
             end_dim: int = -1, sizes: Any = None) -> Value:
    return t.reshape(t.variable(self), t.output()[0])


@maps(aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
       aten.lift_fresh_copy.default)
def _alias(t: Translator, self: Value) -> Value:
    return self


@maps(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default)
def _to(t: Translator, self: Value, dtype: Any = None, copy: bool = False, other: Value = None) -> Value:
    x, wanted = t.variable(self), t.node.meta["val"].dtype
    if wanted == torch.bool and type_of(source(t.node, "self")) != torch.bool:
        return compared(t, "ne", x, 0.0)
    return t.cast(x, t.checked_type(wanted))


@maps(aten.permute.default)
def _permute(t: Translator, self: Value, dims: Sequence[int]) -> Value:
    x = t.variable(self)
    return t.transposed(x, [t.axis(x, dim) for dim in dims])


@maps(aten.transpose.int, aten.t.default, aten.numpy_T.default)
def _transpose(t: Translator, self: Value, dim0: int | None = None, dim1: int | None = None) -> Value:
    x = t.variable(self)
    axes = list(range(len(x.shape)))
    if dim0 is None or dim1 is None:
        return t.transposed(x, axes[::-1])
    first, second = t.axis(x, dim0), t.axis(x, dim1)
    axes[first], axes[second] = second, first
    return t.transposed(x, axes)


@maps(aten.expand.default)
def _expand(t: Translator, self: Value, size: Any, implicit: bool = False) -> Value:
    x, shape = t.float_variable(self), t.output()[0]
    x = t.reshape(x, (*((1,) * (len(shape) - len(x.shape))), *x.shape))
    return x if x.shape == shape else t.binary("mul", _full_of(t, 1.0, shape, x.dtype), x)


@maps(aten.repeat.default)
def _repeat(t: Translator, self: Value, repeats: Sequence[Any]) -> Value:
    x = t.variable(self)
    x = t.reshape(x, (*((1,) * (len(repeats) - len(x.shape))), *x.shape))
    for axis, count in enumerate(repeats):
        length = x.shape[axis]
        if isinstance(count, BatchMultiple) and count.factor == 1 and length == 1:
            x = t.binary("mul", _full_of(t, 1.0, (None, *(1 for _ in x.shape[axis + 1 :])), x.dtype), x)
        elif count != 1:
            if length is None or not isinstance(count, int):
                t.refuse(f"found {shown(x.shape)} repeated {list(repeats)} times; expected fixed dimensions repeated")
            shape = (*x.shape[:axis], length * count, *x.shape[axis + 1 :])
            x = t.emit("concat", [x] * count, shape, x.dtype, axis=axis)
    return x


@maps(aten.full.default, aten.zeros.default, aten.ones.default, aten.full_like.default, aten.zeros_like.default,
       aten.ones_like.default, aten.new_zeros.default, aten.new_ones.default)
def _full(t: Translator, self: Value = None, size: Any = None, fill_value: float | None = None, dtype: Any = None
          ) -> Value:
    shape, made = t.output()
    value = (1.0 if "ones" in str(t.node.target) else 0.0) if fill_value is None else float(fill_value)
    if None in shape and made in (torch.int32, torch.int64):
        return t.cast(_full_of(t, value, shape, torch.float64), made)
    return _full_of(t, value, shape, made)


def _full_of(t: Translator, value: float, shape: Shape, dtype: torch.dtype) -> Variable:
    fixed = tuple(1 if length is None else length for length in shape)
    whole = t.filled(value, fixed, dtype)
    if fixed == shape:
        return whole
    ones = t.reshape(t.cast(t.batch_ones(), dtype), tuple(None if length is None else 1 for length in shape))
    return t.binary("mul", whole, ones)


@maps(aten.cat.default)
def _cat(t: Translator, tensors: Sequence[Value], dim: int = 0) -> Value:
    shape, dtype = t.output()
    pieces = [t.variable(each, dtype) for each in tensors]
    return t.emit("concat", pieces, shape, dtype, axis=dim % len(shape))


@maps(aten.stack.default)
def _stack(t: Translator, tensors: Sequence[Value], dim: int = 0) -> Value:
    shape, dtype = t.output()
    axis = dim % len(shape)
    pieces = [t.variable(each, dtype) for each in tensors]
    pieces = [t.reshape(each, (*each.shape[:axis], 1, *each.shape[axis:])) for each in pieces]
    return t.emit("concat", pieces, shape, dtype, axis=axis)


@maps(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(t: Translator, self: Value, split_size: Any = None, split_sizes: Any = None, chunks: Any = None,
           dim: int = 0) -> Value:
    x = t.variable(self)
    shapes = [t.output(place)[0] for place in range(len(t.node.meta["val"]))]
    axis = t.axis(x, dim)
    if x.shape[axis] is None:
        t.refuse("found a split of the batch; expected a split of a fixed dimension")
    return t.emit_outputs("split", [x], shapes, axis=axis, lengths=[shape[axis] for shape in shapes])


@maps(aten.unbind.int)
def _unbind(t: Translator, self: Value, dim: int = 0) -> Value:
    x = t.variable(self)
    axis = t.axis(x, dim)
    if x.shape[axis] is None:
        t.refuse("found the batch as the dimension to unbind; expected a fixed one")
    return tuple(_selected(t, x, axis, place) for place in range(x.shape[axis] or 0))


def _selected(t: Translator, x: Variable, axis: int, place: int) -> Variable:
    piece = t.emit("slice", [x], (*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype, axis=axis, start=place,
                   end=place + 1)
    return t.reshape(piece, (*x.shape[:axis], *x.shape[axis + 1 :]))


@maps(aten.select.int)
def _select(t: Translator, self: Value, dim: int, index: int) -> Value:
    x = t.variable(self)
    axis = t.axis(x, dim)
    length = x.shape[axis]
    if length is None or not isinstance(index, int):
        t.refuse(f"found row {index} of dimension {axis} of {shown(x.shape)}; expected a fixed number and dimension")
    return _selected(t, x, axis, index % length)


@maps(aten.slice.Tensor)
def _slice(t: Translator, self: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    x, (shape, dtype) = t.variable(self), t.output()
    axis = t.axis(x, dim)
    if shape == x.shape and step == 1:
        return x
    length, begin = x.shape[axis], start or 0
    if length is None or not isinstance(begin, int):
        t.refuse(f"found a slice of dimension {axis} of {shown(x.shape)}; expected one of a fixed dimension")
    begin = begin + length if begin < 0 else begin
    if step != 1:
        return _gathered(t, x, axis, torch.arange(begin, length, step)[: shape[axis]])
    return t.emit("slice", [x], shape, dtype, axis=axis, start=begin, end=begin + (shape[axis] or 0))


@maps(aten.index_select.default)
def _index_select(t: Translator, self: Value, dim: int, index: Value) -> Value:
    x = t.variable(self)
    return _gathered(t, x, t.axis(x, dim), index)


@maps(aten.flip.default)
def _flip(t: Translator, self: Value, dims: Sequence[int]) -> Value:
    x = t.variable(self)
    for axis in (t.axis(x, dim) for dim in dims):
        length = x.shape[axis]
        x = _gathered(t, x, axis, torch.arange(length or 1).flip(0))
    return x


@maps(aten.index.Tensor)
def _index(t: Translator, self: Value, indices: Sequence[Value]) -> Value:
    x = t.variable(self)
    used = [axis for axis, each in enumerate(indices) if each is not None]
    is_of_numbers = len(used) == 1 and type_of(source(t.node, "indices")[used[0]]) in (torch.int64, torch.int32)
    if not is_of_numbers:
        t.refuse("found several indices, or a mask; expected indices of one dimension")
    return _gathered(t, x, used[0], indices[used[0]])


def _gathered(t: Translator, x: Variable, axis: int, indices: Value) -> Variable:
    """Pieces along a dimension, which is moved to the front and back."""
    places = t.cast(t.variable(indices), torch.int64)
    if x.shape[axis] is None:
        t.refuse("found indices of the batch; expected indices of a fixed dimension")
    if axis > 0 and len(places.shape) != 1:
        t.refuse(f"found indices {shown(places.shape)} of dimension {axis}; expected a list, or dimension 0")
    to_front = [axis, *(each for each in range(len(x.shape)) if each != axis)]
    front = t.transposed(x, to_front)
    picked = t.emit("gather", [front, places], (*places.shape, *front.shape[1:]), x.dtype)
    return t.transposed(picked, [to_front.index(each) for each in range(len(to_front))]) if axis > 0 else picked


# Arithmetic of two operands.
