"""ATen ops of layers: products, convolutions, pools, norms, attention, dropout and tables.

The functions' parameters have the names of the ops' schemas; an argument that is not among them is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .arithmetic import inverted
from .graph import aten, source, type_of
from .shapes import RESHAPES
from .text import Shape, Variable
from .translator import BatchMultiple, Translator, Value, fixed_elements, maps, maps_nodes, pair, shown

# The score of a masked place in attention: its weight is zero in float32 and float64, and differences are finite.
MASKED_SCORE = -1e30


@maps(aten.linear.default)
def _linear(t: Translator, input: Value, weight: Value, bias: Value = None) -> Value:
    x, w = t.float_variable(input), t.float_variable(weight)
    whole = t.product(t.reshape(x, (1, *x.shape)) if len(x.shape) == 1 else x, w, transpose=True)
    whole = t.reshape(whole, t.output()[0])
    return whole if bias is None else t.binary("add", whole, t.float_variable(bias))


@maps(aten.addmm.default)
def _addmm(t: Translator, self: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1) -> Value:
    product = t.scaled(t.product(t.float_variable(mat1), t.float_variable(mat2)), alpha)
    return t.binary("add", product, t.scaled(t.float_variable(self), beta))


@maps(aten.mm.default)
def _mm(t: Translator, self: Value, mat2: Value) -> Value:
    return t.product(t.float_variable(self), t.float_variable(mat2))


@maps(aten.matmul.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def _matmul(t: Translator, self: Value, other: Value = None, mat2: Value = None, vec: Value = None,
            tensor: Value = None) -> Value:
    second = next(each for each in (other, mat2, vec, tensor) if each is not None)
    a, b = t.float_variable(self), t.float_variable(second)
    shape = t.output()[0]
    if len(b.shape) == 1:
        return t.reduced("reduce_sum", t.binary("mul", a, b), [len(a.shape) - 1])
    if len(a.shape) == 1:
        a = t.reshape(a, (1, *a.shape))
    if len(b.shape) == 2 and None not in b.shape:
        return t.reshape(t.product(a, b), shape)
    if len(a.shape) == len(b.shape) == 2:
        return t.emit("matmul", [a, b], shape, a.dtype)
    return t.reshape(t.batched_product(a, b), shape)


@maps(aten.scaled_dot_product_attention.default)
def _attention(t: Translator, query: Value, key: Value, value: Value, attn_mask: Value = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None) -> Value:
    q, k, v = (t.float_variable(each) for each in (query, key, value))
    width = q.shape[-1]
    if width is None or dropout_p != 0.0:
        t.refuse(f"found {shown(q.shape)} and dropout_p={dropout_p}; expected a fixed width and 0.0")
    last = len(k.shape) - 1
    scores = t.batched_product(q, t.transposed(k, [*range(last - 1), last, last - 1]))
    scores = t.scaled(scores, width**-0.5 if scale is None else scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        if rows is None or columns is None:
            t.refuse(f"found scores {shown(scores.shape)}; expected fixed lengths under is_causal")
        attn_mask = torch.ones(rows, columns, dtype=torch.bool).tril()
    if isinstance(attn_mask, Tensor):
        is_bool = attn_mask.dtype == torch.bool
        attn_mask = torch.where(attn_mask, 0.0, MASKED_SCORE) if is_bool else attn_mask.clamp(min=MASKED_SCORE)
    elif attn_mask is not None and type_of(source(t.node, "attn_mask")) == torch.bool:
        mask = t.float_variable(attn_mask)
        attn_mask = t.scaled(inverted(t, mask), MASKED_SCORE)
    if attn_mask is not None:
        scores = t.binary("add", scores, t.variable(attn_mask, scores.dtype))
    return t.reshape(t.batched_product(t.unary("softmax", scores), v), t.output()[0])


@maps(aten.conv2d.default, aten.conv2d.padding, aten.conv1d.default, aten.conv1d.padding)
def _convolution(t: Translator, input: Value, weight: Value, bias: Value = None, stride: Any = (1,),
                 padding: Any = (0,), groups: int = 1) -> Value:
    x, filters = t.float_variable(input), t.float_variable(weight)
    shape = t.output()[0]
    is_flat = len(filters.shape) == 3
    if len(x.shape) != len(filters.shape):
        t.refuse(f"found {shown(x.shape)}; expected {len(filters.shape)} dimensions, the images first")
    if is_flat:
        x = t.reshape(x, (*x.shape[:2], 1, x.shape[2]))
        filters = t.reshape(filters, (*filters.shape[:2], 1, filters.shape[2]))
    size = [length or 1 for length in filters.shape[2:]]
    if padding == "valid":
        padding = [0, 0]
    elif padding == "same":
        if any(length % 2 == 0 for length in size):
            t.refuse(f"found padding 'same' with a filter of {size}; expected odd lengths")
        padding = [length // 2 for length in size]
    x = _images(t, x)
    strides, paddings = _window(stride, 1, is_flat), _window(padding, 0, is_flat)
    over = (shape[0], shape[1], *((1,) if is_flat else ()), *shape[2:])
    whole = _grouped(t, x, filters, over, groups, strides, paddings)
    if bias is not None:
        whole = t.binary("add", whole, t.reshape(t.float_variable(bias), (shape[1], 1, 1)))
    return t.reshape(whole, shape)


def _window(values: Any, usual: int, is_flat: bool) -> list[int]:
    each = [values] if isinstance(values, int) else list(values)
    return [usual, each[0]] if is_flat else pair(each)


def _grouped(t: Translator, x: Variable, filters: Variable, shape: Shape, groups: int, stride: list[int],
             padding: list[int]) -> Variable:
    """The convolutions of groups of channels, side by side."""
    if groups == 1:
        return t.emit("conv2d", [x, filters], shape, x.dtype, stride=stride, padding=padding)
    inputs, outputs = (x.shape[1] or 0) // groups, (shape[1] or 0) // groups
    pieces = t.emit_outputs("split", [x], [(x.shape[0], inputs, *x.shape[2:])] * groups, axis=1,
                            lengths=[inputs] * groups)
    parts = t.emit_outputs("split", [filters], [(outputs, *filters.shape[1:])] * groups, axis=0,
                           lengths=[outputs] * groups)
    small = (shape[0], outputs, *shape[2:])
    made = [t.emit("conv2d", list(pair), small, x.dtype, stride=stride, padding=padding) for pair in zip(pieces, parts)]
    return t.emit("concat", made, shape, x.dtype, axis=1)


@maps(aten.max_pool2d.default)
def _max_pool(t: Translator, self: Value, kernel_size: Any, stride: Any = (), padding: Any = (0,)) -> Value:
    return _pool(t, "max_pool2d", self, kernel_size, stride, padding)


@maps(aten.avg_pool2d.default)
def _avg_pool(t: Translator, self: Value, kernel_size: Any, stride: Any = (), padding: Any = (0,),
              count_include_pad: bool = True) -> Value:
    if count_include_pad and any(pair(padding)):
        t.refuse("found count_include_pad=True with padding; expected False, as the mean is over places of the image")
    return _pool(t, "avg_pool2d", self, kernel_size, stride, padding)


def _images(t: Translator, x: Variable) -> Variable:
    if len(x.shape) != 4 or None in x.shape[1:]:
        t.refuse(f"found {shown(x.shape)}; expected four dimensions, of which the last three are fixed")
    return x


def _pool(t: Translator, kind: str, image: Value, size: Any, stride: Any, padding: Any) -> Value:
    x, (shape, dtype) = _images(t, t.float_variable(image)), t.output()
    stride = pair(stride or size)
    return t.emit(kind, [x], shape, dtype, size=pair(size), stride=stride, padding=pair(padding))


@maps(aten.adaptive_avg_pool2d.default)
def _adaptive_avg_pool(t: Translator, self: Value, output_size: Any) -> Value:
    x, (shape, dtype) = _images(t, t.float_variable(self)), t.output()
    lengths = [(found or 0, wanted or 1) for found, wanted in zip(x.shape[-2:], shape[-2:])]
    if any(found % wanted for found, wanted in lengths):
        t.refuse(f"found {shown(x.shape)} to {shown(shape)}; expected lengths that the wanted ones divide")
    size = [found // wanted for found, wanted in lengths]
    return t.emit("avg_pool2d", [x], shape, dtype, size=size, stride=size)


@maps(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def _softmax(t: Translator, self: Value, dim: int, half_to_float: bool = False) -> Value:
    x = t.float_variable(self)
    kind = "log_softmax" if "log" in str(t.node.target) else "softmax"
    axis, last = t.axis(x, dim), len(x.shape) - 1
    if x.shape == () or x.shape[axis] is None:
        t.refuse(f"found dimension {dim} of {shown(x.shape)}; expected a fixed one")
    axes = list(range(len(x.shape)))
    axes[axis], axes[last] = axes[last], axes[axis]
    return t.transposed(t.unary(kind, t.transposed(x, axes)), axes)


@maps(aten.layer_norm.default)
def _layer_norm(t: Translator, input: Value, normalized_shape: Sequence[int], weight: Value = None,
                bias: Value = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Value:
    x = t.float_variable(input)
    width = fixed_elements(normalized_shape)
    rows = t.reshape(x, (*x.shape[: len(x.shape) - len(normalized_shape)], width))
    scale = t.reshape(t.variable(weight), (width,)) if weight is not None else t.filled(1.0, (width,), x.dtype)
    shift = t.reshape(t.variable(bias), (width,)) if bias is not None else t.filled(0.0, (width,), x.dtype)
    return t.reshape(t.emit("layer_norm", [rows, scale, shift], rows.shape, x.dtype, epsilon=eps), x.shape)


@maps(aten.group_norm.default)
def _group_norm(t: Translator, input: Value, num_groups: int, weight: Value = None, bias: Value = None,
                eps: float = 1e-5, cudnn_enabled: bool = True) -> Value:
    x = t.float_variable(input)
    width = fixed_elements(x.shape[1:]) // num_groups
    rows = t.reshape(x, (x.shape[0], num_groups, width))
    one, zero = t.filled(1.0, (width,), x.dtype), t.filled(0.0, (width,), x.dtype)
    whole = t.reshape(t.emit("layer_norm", [rows, one, zero], rows.shape, x.dtype, epsilon=eps), x.shape)
    return _by_channel(t, whole, weight, bias)


def _by_channel(t: Translator, x: Variable, scale: Value, shift: Value) -> Variable:
    shape = (x.shape[1], *(1 for _ in x.shape[2:]))
    if scale is not None:
        x = t.binary("mul", x, t.reshape(t.variable(scale, x.dtype), shape))
    return x if shift is None else t.binary("add", x, t.reshape(t.variable(shift, x.dtype), shape))


@maps(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(t: Translator, input: Value, weight: Value, bias: Value, running_mean: Value, running_var: Value,
                momentum: float, eps: float) -> Value:
    if not isinstance(running_mean, Tensor) or not isinstance(running_var, Tensor):
        t.refuse("found computed statistics; expected buffers")
    inverse = 1 / torch.sqrt(running_var + eps)
    normal = _by_channel(t, t.float_variable(input), inverse, -running_mean * inverse)
    return (_by_channel(t, normal, weight, bias),)


@maps_nodes(aten._native_batch_norm_legit_functional.default)
def _batch_norm_in_training(t: Translator, node: Node) -> Value:
    """Batch statistics, whose averages are parameters with an optimizer of their own. A prediction has the averages."""
    input, weight, bias, mean, variance = (source(node, name) for name in ("input", "weight", "bias", "running_mean",
                                                                          "running_var"))
    if not source(node, "training"):
        t.refuse("found new averages without training; expected training")
    x = t.float_variable(t.needed(input))
    kept = [t.kept(each) for each in (mean, variance)]
    given = [None if each is None else t.needed(each) for each in (weight, bias)]
    y, *seen = _normalised(t, x, given, kept, t.step_numbers()[0], source(node, "eps"))
    # The average is of a sample's variance.
    rows, share = x.shape[0], fixed_elements(x.shape[2:])
    count = t.variable(BatchMultiple(share) if rows is None else rows * share, x.dtype)
    correction = t.binary("div", count, t.binary("sub", count, t.filled(1.0, (), x.dtype)))
    seen[1] = t.binary("mul", seen[1], correction)
    momentum = source(node, "momentum")
    return (y, t.error("found the batch's mean; expected only the output"),
            t.error("found the batch's deviation; expected only the output"),
            *(t.moved(parameter, value, momentum) for parameter, value in zip(kept, seen)))


@maps(aten._native_batch_norm_legit.no_stats)
def _batch_norm_without_averages(t: Translator, input: Value, weight: Value, bias: Value, training: bool,
                                 momentum: float, eps: float) -> Value:
    x = t.float_variable(input)
    unread = [t.filled(each, (fixed_elements(x.shape[1:2]),), x.dtype) for each in (0.0, 1.0)]
    return _normalised(t, x, [weight, bias], unread, t.filled(0.0, (), torch.int64), eps)


def _normalised(t: Translator, x: Variable, given: Sequence[Value], kept: Sequence[Variable], step: Variable,
                eps: float) -> tuple[Variable, ...]:
    """The output, and the mean and the variance of each channel."""
    channels = (fixed_elements(x.shape[1:2]),)
    scale, shift = (t.filled(usual, channels, x.dtype) if each is None else t.variable(each, x.dtype)
                    for usual, each in zip((1.0, 0.0), given))
    return t.emit_outputs("batch_norm", [x, scale, shift, *kept, step], [x.shape, channels, channels], epsilon=eps)


@maps(aten.native_dropout.default, aten.dropout.default)
def _dropout(t: Translator, input: Value, p: float, train: bool | None = True) -> Value:
    x = t.float_variable(input)
    if train and p > 0:
        if p >= 1:
            t.refuse(f"found the probability {p}; expected one below 1")
        x = t.emit("dropout", [x, *t.step_numbers()], x.shape, x.dtype, rate=p, seed=t.seed + t.dropouts)
        t.dropouts += 1
    mask = t.error("found the mask of a dropout; expected only its result")
    return x if t.node.target is aten.dropout.default else (x, mask)


@maps(aten.embedding.default)
def _embedding(t: Translator, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False,
               sparse: bool = False) -> Value:
    if scale_grad_by_freq:
        t.refuse("found scale_grad_by_freq=True; expected False")
    return _looked_up(t, t.variable(weight), t.variable(indices), padding_idx)


def _looked_up(t: Translator, table: Variable, ids: Variable, padding: int | None) -> Variable:
    attributes: dict[str, Any] = {}
    if padding is not None and padding >= 0:
        values = t.parameters.get(table.name)
        if values is None or bool(values[padding].any()):
            t.refuse(f"found padding_idx={padding} and a row with other values than 0; expected zeros, as which it is "
                     "read")
        attributes["padding"] = padding
    return t.emit("lookup_table", [table, t.cast(ids, torch.int64)], (*ids.shape, table.shape[1]), table.dtype,
                  **attributes)


@maps_nodes(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(t: Translator, node: Node) -> Value:
    """The bags of an input of two dimensions, which torch writes as one, with offsets at equal distances."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {each.name: each.default_value for each in schema}
    given |= dict(zip((each.name for each in schema), node.args)) | node.kwargs
    ids, offsets = given["indices"], given["offsets"]
    whole: Node | None = ids.args[0] if ids.target in RESHAPES else None
    shape = () if whole is None else t.shape_of(whole.meta["val"].shape)
    is_from_zero = offsets.target is aten.arange.start_step and offsets.args[0] == 0
    is_even = is_from_zero and shape[-1:] == (offsets.args[2:3] or (1,))
    is_plain = given["mode"] in (0, 1) and given["per_sample_weights"] is None
    if whole is None or len(shape) != 2 or not is_even or not is_plain:
        t.refuse("found offsets, mode 'max' or per_sample_weights; expected ids of two dimensions and mode 'sum' or "
                 "'mean'")
    padding = given["padding_idx"]
    if given["scale_grad_by_freq"] or given["include_last_offset"] or (padding is not None and padding >= 0):
        t.refuse("found scale_grad_by_freq, include_last_offset or padding_idx; expected none of them")
    table = t.variable(t.needed(given["weight"]))
    rows = _looked_up(t, table, t.variable(t.needed(whole)), None)
    return (t.reduced("mean" if given["mode"] == 1 else "reduce_sum", rows, [1]),)
