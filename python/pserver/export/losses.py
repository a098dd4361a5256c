"""ATen ops of losses.

The functions' parameters have the names of the ops' schemas; an argument that is not among them is refused."""

from __future__ import annotations

import torch

from .arithmetic import arithmetic, inverted, limited
from .graph import aten
from .text import ProgramOp, Variable
from .translator import Translator, Value, maps, shown

Reduction = int
_NONE, _MEAN = 0, 1


def _concluded(t: Translator, losses: Variable, reduction: Reduction) -> Variable:
    if reduction == _NONE or losses.shape == ():
        return losses
    return t.reduced("mean" if reduction == _MEAN else "reduce_sum", losses, list(range(len(losses.shape))))


@maps(aten.cross_entropy_loss.default)
def _cross_entropy(t: Translator, self: Value, target: Value, reduction: Reduction = 1, ignore_index: int = -100,
                   label_smoothing: float = 0.0) -> Value:
    scores, label = t.float_variable(self), t.variable(target)
    if label.dtype in (torch.float32, torch.float64) and label.shape == scores.shape:
        if label_smoothing != 0.0:
            t.refuse("found label_smoothing with probabilities as target; expected classes")
        logs = t.unary("log_softmax", _matrix(t, scores))
        losses = t.scaled(t.reduced("reduce_sum", t.binary("mul", label, logs), [1]), -1.0)
        return _concluded(t, losses, reduction)
    losses = _losses_of_classes(t, scores, label, ignore_index)
    if label_smoothing != 0.0:
        mean = t.reduced("mean", t.unary("log_softmax", scores), [1])
        losses = t.binary("sub", t.scaled(losses, 1 - label_smoothing), t.scaled(mean, label_smoothing))
    return _concluded(t, losses, reduction)


def _matrix(t: Translator, scores: Variable) -> Variable:
    if len(scores.shape) != 2:
        t.refuse(f"found scores {shown(scores.shape)}; expected two dimensions, a row's classes last")
    return scores


def _losses_of_classes(t: Translator, scores: Variable, label: Variable, ignore_index: int) -> Variable:
    classes = _matrix(t, scores).shape[1] or 0
    if 0 <= ignore_index < classes:
        t.refuse(f"found ignore_index={ignore_index}; expected no class, as no label is ignored")
    rows = scores.shape[:1]
    losses, _ = (Variable(t.writer.unique(t.node.name), shape, scores.dtype) for shape in (rows, scores.shape))
    op = ProgramOp("forward", [losses.name, _.name], "softmax_with_cross_entropy",
             [scores.name, t.cast(label, torch.int64).name], {})
    t.writer.ops.append(op)
    return losses


@maps(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss_forward.default)
def _nll_loss(t: Translator, self: Value, target: Value, weight: Value = None, reduction: Reduction = 1,
              ignore_index: int = -100) -> Value:
    logs = t.float_variable(self)
    made = next((op for op in t.writer.ops if logs.name in op.outputs and op.kind == "log_softmax"), None)
    if made is None or weight is not None:
        t.refuse("found log-probabilities that are no result of log_softmax over the last dimension, or weights; "
                 "expected its result and no weights")
    scores = Variable(made.inputs[0], logs.shape, logs.dtype)
    whole = _concluded(t, _losses_of_classes(t, scores, t.variable(target), ignore_index), reduction)
    total = t.error("found the total weight of a loss; expected only the loss")
    return (whole, total) if t.node.target is aten.nll_loss_forward.default else whole


@maps(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_of_logits(t: Translator, self: Value, target: Value, weight: Value = None,
                             reduction: Reduction = 1) -> Value:
    scores = t.float_variable(self)
    label = t.variable(target, scores.dtype)
    losses = t.emit("sigmoid_cross_entropy", [scores, label], scores.shape, scores.dtype)
    if weight is not None:
        losses = t.binary("mul", losses, t.variable(weight, scores.dtype))
    return _concluded(t, losses, reduction)


@maps(aten.binary_cross_entropy.default)
def _binary_cross_entropy(t: Translator, self: Value, target: Value, weight: Value = None, reduction: Reduction = 1
                          ) -> Value:
    p = t.float_variable(self)
    label = t.variable(target, p.dtype)
    # The logarithms are at least -100, as torch has them.
    logs = [limited(t, t.unary("log", each), "max", -100.0) for each in (p, inverted(t, p))]
    likelihood = t.binary("add", t.binary("mul", label, logs[0]), t.binary("mul", inverted(t, label), logs[1]))
    losses = t.scaled(likelihood, -1.0)
    if weight is not None:
        losses = t.binary("mul", losses, t.variable(weight, p.dtype))
    return _concluded(t, losses, reduction)


@maps(aten.mse_loss.default, aten.l1_loss.default)
def _distance(t: Translator, self: Value, target: Value, reduction: Reduction = 1) -> Value:
    difference = arithmetic(t, "sub", self, target) if reduction == _NONE else _difference(t, self, target)
    is_square = t.node.target is aten.mse_loss.default
    losses = t.binary("mul", difference, difference) if is_square else t.unary("abs", difference)
    return _concluded(t, losses, reduction)


def _difference(t: Translator, a: Value, b: Value) -> Variable:
    dtype = t.output()[1]
    return t.binary("sub", t.variable(a, dtype), t.variable(b, dtype))


@maps(aten.smooth_l1_loss.default, aten.huber_loss.default)
def _smooth_distance(t: Translator, self: Value, target: Value, reduction: Reduction = 1, beta: float = 1.0,
                     delta: float = 1.0) -> Value:
    is_huber = t.node.target is aten.huber_loss.default
    limit = delta if is_huber else beta
    if limit <= 0:
        t.refuse(f"found the limit {limit}; expected one above 0")
    away = t.unary("abs", _difference(t, self, target))
    # Up to the limit half the square, from there on a line.
    near = limited(t, away, "min", limit)
    square = t.scaled(t.binary("mul", near, near), 0.5 / limit)
    losses = t.binary("add", square, t.binary("sub", away, near))
    return _concluded(t, t.scaled(losses, limit if is_huber else 1.0), reduction)
