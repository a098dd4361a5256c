"""ATen ops of arithmetic: element-wise functions, comparisons and reductions.

The functions' parameters have the names of the ops' schemas; an argument that is not among them is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .graph import aten, source, type_of
from .text import TYPE_NAMES, Variable
from .translator import Translator, Value, fixed_elements, maps


@maps(aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.sqrt.default, aten.exp.default,
       aten.log.default, aten.abs.default, aten.sign.default)
def _same(t: Translator, self: Value) -> Value:
    return t.unary(str(t.node.target).split(".")[1], t.float_variable(self))


@maps(aten.gelu.default)
def _gelu(t: Translator, self: Value, approximate: str = "none") -> Value:
    return t.unary("gelu", t.float_variable(self), approximate=True if approximate == "tanh" else None)


@maps(aten.neg.default)
def _neg(t: Translator, self: Value) -> Value:
    return t.scaled(t.float_variable(self), -1.0)


@maps(aten.silu.default)
def _silu(t: Translator, self: Value) -> Value:
    x = t.float_variable(self)
    return t.binary("mul", x, t.unary("sigmoid", x))


@maps(aten.leaky_relu.default)
def _leaky_relu(t: Translator, self: Value, negative_slope: float = 0.01) -> Value:
    x = t.float_variable(self)
    below = t.unary("relu", t.scaled(x, -1.0))
    return t.binary("sub", t.unary("relu", x), t.scaled(below, negative_slope))


@maps(aten.elu.default)
def _elu(t: Translator, self: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    x = t.float_variable(self)
    below = t.scaled(limited(t, x, "min", 0.0), input_scale)
    curve = t.binary("sub", t.unary("exp", below), t.filled(1.0, (), x.dtype))
    return t.scaled(t.binary("add", t.unary("relu", x), t.scaled(curve, alpha)), scale)


@maps(aten.softplus.default)
def _softplus(t: Translator, self: Value, beta: float = 1, threshold: float = 20) -> Value:
    return t.scaled(_log_of_one_and_exp(t, t.scaled(t.float_variable(self), beta)), 1 / beta)


@maps(aten.log_sigmoid.default)
def _log_sigmoid(t: Translator, self: Value) -> Value:
    return t.scaled(_log_of_one_and_exp(t, t.scaled(t.float_variable(self), -1.0)), -1.0)


def _log_of_one_and_exp(t: Translator, x: Variable) -> Variable:
    """log(1 + exp(x)): the loss of scores x against labels of zero, which x is nowhere above itself."""
    return t.emit("sigmoid_cross_entropy", [x, t.binary("greater", x, x)], x.shape, x.dtype)


@maps(aten.hardtanh.default)
def _hardtanh(t: Translator, self: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return _clamp(t, self, min_val, max_val)


@maps(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(t: Translator, self: Value, min: Value = None, max: Value = None) -> Value:
    (x,), _, wanted = _operands(t, self)
    x = x if min is None else limited(t, x, "max", min)
    return t.cast(x if max is None else limited(t, x, "min", max), wanted)


def limited(t: Translator, x: Variable, kind: str, limit: Value) -> Variable:
    # At the limit the gradient is that of the second operand, as torch has it.
    return t.binary(kind, t.variable(limit, x.dtype), x)


@maps(aten.rsqrt.default, aten.reciprocal.default)
def _reciprocal(t: Translator, self: Value) -> Value:
    x = t.float_variable(self)
    below = t.unary("sqrt", x) if t.node.target is aten.rsqrt.default else x
    return t.binary("div", t.filled(1.0, (), x.dtype), below)


@maps(aten.log1p.default)
def _log1p(t: Translator, self: Value) -> Value:
    x = t.float_variable(self)
    return t.unary("log", t.binary("add", x, t.filled(1.0, (), x.dtype)))


def _operands(t: Translator, *values: Value) -> tuple[list[Variable], torch.dtype, torch.dtype]:
    """The operands in the type of the arithmetic, that type, and the type of the result. Integers are computed in
    float64, which holds those up to 2^53."""
    wanted = t.output()[1]
    inside = torch.float64 if wanted in (torch.int32, torch.int64) else wanted
    if inside not in (torch.float32, torch.float64):
        t.refuse(f"found {TYPE_NAMES[inside]}; expected float32 or float64")
    return [t.variable(value, inside) for value in values], inside, wanted


def arithmetic(t: Translator, kind: str, first: Value, second: Value) -> Variable:
    (a, b), _, wanted = _operands(t, first, second)
    return t.cast(t.binary(kind, a, b), wanted)


@maps(aten.add.Tensor, aten.add.Scalar)
def _add(t: Translator, self: Value, other: Value, alpha: float = 1) -> Value:
    return arithmetic(t, "add", self, _times(t, other, alpha))


@maps(aten.sub.Tensor, aten.sub.Scalar)
def _sub(t: Translator, self: Value, other: Value, alpha: float = 1) -> Value:
    return arithmetic(t, "sub", self, _times(t, other, alpha))


@maps(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(t: Translator, self: Value, other: Value, alpha: float = 1) -> Value:
    return arithmetic(t, "sub", other, _times(t, self, alpha))


def _times(t: Translator, value: Value, factor: float) -> Value:
    if factor == 1:
        return value
    return value * factor if isinstance(value, (int, float, Tensor)) else t.scaled(t.float_variable(value), factor)


@maps(aten.mul.Tensor, aten.mul.Scalar)
def _mul(t: Translator, self: Value, other: Value) -> Value:
    if isinstance(other, (int, float)):
        (x,), _, wanted = _operands(t, self)
        return t.cast(t.scaled(x, float(other)), wanted)
    return arithmetic(t, "mul", self, other)


@maps(aten.div.Tensor, aten.div.Scalar)
def _div(t: Translator, self: Value, other: Value) -> Value:
    return arithmetic(t, "div", self, other)


@maps(aten.maximum.default, aten.minimum.default)
def _extreme(t: Translator, self: Value, other: Value) -> Value:
    return arithmetic(t, "max" if t.node.target is aten.maximum.default else "min", self, other)


@maps(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(t: Translator, self: Value, exponent: Value) -> Value:
    if not isinstance(exponent, (int, float)):
        return arithmetic(t, "pow", self, exponent)
    (x,), inside, wanted = _operands(t, self)
    if exponent == 0.5:
        return t.unary("sqrt", x)
    if exponent in (1, 2, 3):
        power = x
        for _ in range(int(exponent) - 1):
            power = t.binary("mul", power, x)
        return t.cast(power, wanted)
    return t.cast(t.binary("pow", x, t.filled(exponent, (), inside)), wanted)


# Comparisons: 1 or 0.

_COMPARISONS = {
    getattr(getattr(aten, name), overload): name
    for name in ("gt", "lt", "ge", "le", "eq", "ne")
    for overload in ("Scalar", "Tensor")
}


@maps(*_COMPARISONS)
def _compare(t: Translator, self: Value, other: Value) -> Value:
    return compared(t, _COMPARISONS[t.node.target], self, other)


def compared(t: Translator, name: str, self: Value, other: Value) -> Variable:
    # Integers are compared in float64, which holds those up to 2^53.
    found = [t.variable(each).dtype for each in (self, other) if isinstance(each, (Tensor, Variable))]
    inside = torch.float32 if all(each == torch.float32 for each in found) else torch.float64
    a, b = t.variable(self, inside), t.variable(other, inside)
    match name:
        case "gt":
            made = t.binary("greater", a, b)
        case "lt":
            made = t.binary("greater", b, a)
        case "ge":
            made = inverted(t, t.binary("greater", b, a))
        case "le":
            made = inverted(t, t.binary("greater", a, b))
        case _:
            unequal = t.binary("add", t.binary("greater", a, b), t.binary("greater", b, a))
            made = unequal if name == "ne" else inverted(t, unequal)
    return t.cast(made, torch.float32)


def inverted(t: Translator, x: Variable) -> Variable:
    return t.binary("sub", t.filled(1.0, (), x.dtype), x)


@maps(aten.logical_not.default, aten.bitwise_not.default)
def _not(t: Translator, self: Value) -> Value:
    return inverted(t, truth(t, self, "self"))


@maps(aten.logical_and.default, aten.bitwise_and.Tensor)
def _and(t: Translator, self: Value, other: Value) -> Value:
    return t.binary("mul", truth(t, self, "self"), truth(t, other, "other"))


@maps(aten.logical_or.default, aten.bitwise_or.Tensor)
def _or(t: Translator, self: Value, other: Value) -> Value:
    return t.binary("max", truth(t, self, "self"), truth(t, other, "other"))


def truth(t: Translator, value: Value, argument: str) -> Variable:
    found = type_of(source(t.node, argument))
    if found != torch.bool:
        t.refuse(f"found {found}; expected the result of a comparison")
    return t.variable(value, torch.float32)


@maps(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(t: Translator, condition: Value, self: Value, other: Value) -> Value:
    (a, b), inside, wanted = _operands(t, self, other)
    chosen = t.variable(condition, inside)
    return t.cast(t.binary("add", t.binary("mul", chosen, a), t.binary("mul", inverted(t, chosen), b)), wanted)


@maps(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(t: Translator, self: Value, mask: Value, value: Value) -> Value:
    return _where(t, mask, value, self)


# Reductions.


def _axes(x: Variable, dim: Any) -> list[int]:
    dims = list(range(len(x.shape))) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    return sorted(each % max(len(x.shape), 1) for each in dims)


def _reduced(t: Translator, kind: str, value: Value, dim: Any, keep: bool) -> Variable:
    wanted = t.output()[1]
    inside = torch.float64 if wanted in (torch.int32, torch.int64) else wanted
    x = t.variable(value, inside)
    return t.cast(x if x.shape == () else t.reduced(kind, x, _axes(x, dim), keep), wanted)


@maps(aten.sum.default, aten.sum.dim_IntList)
def _sum(t: Translator, self: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _reduced(t, "reduce_sum", self, dim, keepdim)


@maps(aten.mean.default, aten.mean.dim)
def _mean(t: Translator, self: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _reduced(t, "mean", self, dim, keepdim)


@maps(aten.var.correction, aten.std.correction)
def _variance(t: Translator, self: Value, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Value:
    x = t.float_variable(self)
    axes, away = _axes(x, dim), 1 if correction is None else correction
    count = fixed_elements([x.shape[axis] for axis in axes])
    if away != 0 and any(x.shape[axis] is None for axis in axes):
        t.refuse(f"found a variance over the batch with correction={away}; expected 0")
    centred = t.binary("sub", x, t.reduced("mean", x, axes, keep=True))
    spread = t.reduced("mean", t.binary("mul", centred, centred), axes, keepdim)
    spread = t.scaled(spread, count / (count - away)) if away != 0 else spread
    return t.unary("sqrt", spread) if t.node.target is aten.std.correction else spread


@maps(aten.linalg_vector_norm.default)
def _norm(t: Translator, self: Value, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Value:
    x = t.float_variable(self)
    if ord not in (1, 2):
        t.refuse(f"found ord={ord}; expected 1 or 2")
    if ord == 1:
        return t.reduced("reduce_sum", t.unary("abs", x), _axes(x, dim), keepdim)
    return t.unary("sqrt", t.reduced("reduce_sum", t.binary("mul", x, x), _axes(x, dim), keepdim))


# Losses.
