"""Walk over an exported graph that writes a program. The modules `layers`, `shapes`, `arithmetic` and `losses` say
what becomes of each ATen op."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import Node

from .graph import ExportError, refusal
from .text import TYPE_NAMES, ProgramOp, ProgramWriter, Shape, Variable, Word, facts, quoted, write_safetensors

# The longest constant, in runs of equal elements, that is written into the text.
CONSTANT_RUNS_MAX = 1024

# The counterpart of a node of the graph: a variable, a constant, a number or several of these.
Value = Any
Handler = Callable[..., Value]
# The functions that write ATen ops, by op.
MAPPED: dict[Any, Handler] = {}
# The functions that write ops by their nodes, because an argument alone has no counterpart.
MAPPED_NODES: dict[Any, Handler] = {}


@dataclass(frozen=True)
class TorchProgram:
    """A program's text and the values that its parameters begin with."""

    text: str
    """The program's text."""
    values: dict[str, Tensor]
    """The parameters by name, as in `state_dict`."""
    data: dict[str, str]
    """Type and shape of the variables that are fed, by name."""
    outputs: list[str]
    """The variables with the model's outputs, in the model's order."""

    def write(self, program: str | Path, values: str | Path) -> None:
        """Writes the text, and the values as safetensors."""
        Path(program).write_text(self.text)
        write_safetensors(values, self.values)


@dataclass(frozen=True)
class MovingAverage:
    """A parameter that moves towards a value of each step, as `(1 - momentum)` of it and `momentum` of the value."""

    parameter: Variable
    value: Variable
    momentum: float


@dataclass(frozen=True)
class BatchMultiple:
    """A number that is a multiple of the batch."""

    factor: int


def maps(*targets: Any) -> Callable[[Handler], Handler]:
    """Registers the function that writes these ATen ops. Its parameters have the names of the ops' schemas."""

    def register(handler: Handler) -> Handler:
        MAPPED.update(dict.fromkeys(targets, handler))
        return handler

    return register


def maps_nodes(*targets: Any) -> Callable[[Handler], Handler]:
    """Registers the function that writes these ATen ops by their nodes."""

    def register(handler: Handler) -> Handler:
        MAPPED_NODES.update(dict.fromkeys(targets, handler))
        return handler

    return register


class Translator:
    """Walks a graph and writes ops. A node that cannot be written is an error only if an output needs it."""

    def __init__(self, exported: ExportedProgram, prefix: str, seed: int) -> None:
        self.exported = exported
        self.prefix = prefix
        self.seed = seed
        self.writer = ProgramWriter()
        self.values: dict[Node, Value] = {}
        self.parameters: dict[str, Tensor] = {}
        self.comments: list[str] = []
        self.constants: dict[tuple[Any, ...], Variable] = {}
        self.kept_alive: list[Tensor] = []
        self.dropouts = 0
        self.numbers: list[Variable] = []
        self.averages: list[MovingAverage] = []
        self.ones: Variable | None = None
        self.node: Node = next(iter(exported.graph.nodes))
        self.batch: Any = None

    # The whole.

    def program(self, data_names: Sequence[str] | None, output_names: Sequence[str] | None) -> TorchProgram:
        signature = self.exported.graph_signature
        placeholders = {node.name: node for node in self.exported.graph.find_nodes(op="placeholder")}
        user = [each.arg for each in signature.input_specs if each.kind == InputKind.USER_INPUT]
        names = self._data_names([each.name for each in user if isinstance(each, TensorArgument)], data_names)
        by_value: dict[tuple[Any, ...], Variable] = {}
        for spec in signature.input_specs:
            self.node = placeholders[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                is_tensor = isinstance(spec.arg, TensorArgument)
                self.values[self.node] = self._data(names) if is_tensor else _number(spec.arg)
            else:
                self.values[self.node] = self._stored(spec.target or "", spec.kind, by_value)
        for node in self.exported.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.node = node
                self.values[node] = self._translated(node)
        for spec in signature.output_specs:
            if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
                self._check_changed(spec)
        return self._finished(output_names)

    def _finished(self, output_names: Sequence[str] | None) -> TorchProgram:
        self.node = self.exported.graph.output_node()
        found: list[Variable] = []
        mutations = len(self.exported.graph_signature.buffers_to_mutate)
        for node in flattened(self.exported.graph.output_node().args)[mutations:]:
            if isinstance(node, Node):
                value = self.needed(node)
                self.node = node
                found.append(self.variable(value))
            else:
                self.refuse(f"found the output {node!r}; expected a tensor")
        renamed = self._renamed(found, self._output_names(found, output_names))
        for average in self.averages:
            self._update(average)
        self.writer.used([variable.name for variable in (*found, *(each.parameter for each in self.averages))])
        known = {each.name for _, each in self.writer.variables}
        self.comments += [
            f"parameter {quoted(name)} has no effect on the outputs and is left out"
            for name in self.parameters
            if name not in known
        ]
        text = self.writer.text(self.comments, renamed)
        values = {name: tensor for name, tensor in self.parameters.items() if name in known}
        fed = (each for purpose, each in self.writer.variables if purpose == "data" and each not in self.numbers)
        data = {each.name: facts(each) for each in fed}
        return TorchProgram(text, values, data, [renamed.get(each.name, each.name) for each in found])

    def _data_names(self, own: list[str], given: Sequence[str] | None) -> dict[str, str]:
        if given is None:
            return {name: name for name in own}
        if len(set(given)) != len(own):
            raise ExportError(f"found the names {list(given)} of data; expected {len(own)} different ones")
        return dict(zip(own, given))

    def _data(self, names: dict[str, str]) -> Variable:
        shape, dtype = self.output()
        name = names[self.node.name]
        if name in self.writer.taken:
            self.refuse(f"found data {name!r} and a parameter of this name; expected another name of the data")
        return self.writer.declare("data", Variable(self.writer.unique(name), shape, dtype))

    def _stored(self, target: str, kind: InputKind, by_value: dict[tuple[Any, ...], Variable]) -> Value:
        """A parameter, or a constant's value."""
        if kind == InputKind.TOKEN or kind == InputKind.CUSTOM_OBJ:
            return self.error(f"found {target!r}, which is no tensor; expected a tensor")
        stored = self.exported.state_dict.get(target)
        if stored is None:
            stored = self.exported.constants[target]
        assert isinstance(stored, Tensor)
        name = target.removeprefix(self.prefix)
        if kind != InputKind.PARAMETER or not stored.requires_grad:
            return stored.detach()
        # Parameters that share their elements are one.
        key = (stored.data_ptr(), tuple(stored.shape), stored.stride())
        if key not in by_value:
            by_value[key] = self._parameter(name, stored)
        return by_value[key]

    def _parameter(self, name: str, value: Tensor) -> Variable:
        self.parameters[name] = value.detach().clone()
        made = Variable(self.writer.unique(name), self.shape_of(value.shape), self.checked_type(value.dtype))
        return self.writer.declare("parameter", made)

    def _check_changed(self, spec: Any) -> None:
        """Refuses a value that the model keeps between runs, unless it is an average of a batch norm, or its counter,
        which nothing reads."""
        name = str(spec.target).removeprefix(self.prefix)
        self.node = next(node for node in self.exported.graph.nodes if node.name == spec.arg.name)
        value = self.values[self.node]
        if isinstance(value, MovingAverage) and value.parameter.name == name:
            return
        if isinstance(value, ExportError) and self.node.target is operator.getitem:
            raise value
        inputs = self.node.all_input_nodes
        if name.endswith("num_batches_tracked") and isinstance(value, Tensor) and len(inputs) == 1 == len(inputs[0].users):
            self.comments.append(f"buffer {quoted(name)} only counts batches and is left out")
            return
        self.refuse(f"found a new value of {name!r}, which the model keeps between runs; expected none but a batch "
                    "norm's, as only optimizer ops change variables")

    def _update(self, average: MovingAverage) -> None:
        """An optimizer of the average's own: its gradient is the value, and its update their sum."""
        parameter, momentum = average.parameter, average.momentum
        count = self.writer.declare("state", Variable(self.writer.unique(f"{parameter.name}@count"), (), torch.int64))
        self.writer.ops.insert(0, ProgramOp("initialise", [count.name], "fill", [], {"value": 0.0}))
        rule = f"rule: 'w = {1 - momentum!r}*w + {momentum!r}*g'"
        inputs = [parameter.name, average.value.name, count.name]
        self.writer.ops.append(
            ProgramOp("optimize", [parameter.name, count.name], "update", inputs, {"config": rule})
        )

    def _output_names(self, found: list[Variable], given: Sequence[str] | None) -> list[str]:
        if given is not None:
            if len(set(given)) != len(found):
                raise ExportError(f"found the names {list(given)} of outputs; expected {len(found)} different ones")
            return list(given)
        spec = self.exported.call_spec.out_spec
        if spec is not None and spec.type is dict and len(spec.context) == len(found):
            return [str(key) for key in spec.context]
        loss = next((each for each in found if each.shape == ()), None)
        others = sum(each is not loss for each in found)
        numbers = iter(range(others))
        one = [("loss" if each is loss else f"output{next(numbers)}") for each in found]
        return ["output" if name == "output0" and others == 1 else name for name in one]

    def _renamed(self, found: list[Variable], names: list[str]) -> dict[str, str]:
        """The final names of the variables that are outputs; an output that has a name already is copied."""
        renamed: dict[str, str] = {}
        declared = {each.name for purpose, each in self.writer.variables if purpose != "temporary"}
        for place, (variable, name) in enumerate(zip(found, names)):
            if name in declared:
                raise ExportError(f"found an output {name!r} and data or a parameter of this name; expected another")
            if variable.name in declared or variable.name in renamed:
                self.node = self.exported.graph.output_node()
                variable = found[place] = self.emit("scale", [variable], variable.shape, variable.dtype, factor=1.0)
            renamed[variable.name] = name
        # A name that an op in between has gives way.
        for name in names:
            if name in self.writer.taken and name not in renamed:
                renamed[name] = self.writer.unique(name)
        return renamed

    # A node.

    def _translated(self, node: Node) -> Value:
        try:
            if node.op == "get_attr":
                value = getattr(self.exported.graph_module, str(node.target), None)
                return value if isinstance(value, Tensor) else self.error("found a graph within the graph")
            if node.op != "call_function":
                return self.error(f"found {node.op}; expected an ATen op")
            if not isinstance(node.target, torch._ops.OpOverload):
                return self._python(node)
            return self._aten(node, node.target)
        except ExportError as error:
            return error

    def error(self, reason: str) -> ExportError:
        return refusal(self.node, reason)

    def _python(self, node: Node) -> Value:
        if node.target is operator.getitem:
            whole, place = node.args
            assert isinstance(whole, Node) and isinstance(place, int)
            return self.needed(whole)[place]
        if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
            return self._number_of_batch(node.meta["val"])
        return self.error("found an op that is not mapped; expected one of docs/PROGRAMS.md, From PyTorch")

    def _aten(self, node: Node, target: torch._ops.OpOverload) -> Value:
        if isinstance(node.meta.get("val"), (int, torch.SymInt)):
            return self._number_of_batch(node.meta["val"])
        if target in MAPPED_NODES:
            return MAPPED_NODES[target](self, node)
        given = self._arguments(node, target)
        tensors = [each for each in flattened(given.values()) if isinstance(each, (Tensor, Variable))]
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        is_folded = all(isinstance(each, Tensor) for each in tensors) and not is_random
        if is_folded and not any(isinstance(each, BatchMultiple) for each in flattened(given.values())):
            return self._folded(node, target)
        handler = MAPPED.get(target)
        if handler is None:
            return self.error("found an op that is not mapped; expected one of docs/PROGRAMS.md, From PyTorch")
        unknown = given.keys() - inspect.signature(handler).parameters.keys()
        if unknown:
            each = min(unknown)
            return self.error(f"found {each}={given[each]!r}; expected it not given")
        return handler(self, **given)

    def _folded(self, node: Node, target: torch._ops.OpOverload) -> Value:
        """The value of an op that depends on constants alone."""
        take = lambda each: self.needed(each)  # noqa: E731
        args = torch.fx.node.map_arg(node.args, take)
        return target(*args, **torch.fx.node.map_arg(node.kwargs, take))

    def _arguments(self, node: Node, target: torch._ops.OpOverload) -> dict[str, Any]:
        """The values of the arguments that differ from their defaults, by the schema's names."""
        given: dict[str, Any] = {}
        schema = target._schema.arguments
        named = dict(zip((each.name for each in schema), node.args)) | node.kwargs
        for each in schema:
            value = torch.fx.node.map_arg(named.get(each.name, each.default_value), self.needed)
            is_default = each.has_default_value() and _is_same(value, each.default_value)
            if each.name in named and not is_default:
                given[each.name] = list(value) if isinstance(value, (list, tuple)) else value
        for ignored in ("device", "layout", "pin_memory", "memory_format", "non_blocking"):
            given.pop(ignored, None)
        return given

    def needed(self, node: Node) -> Value:
        value = self.values[node]
        if isinstance(value, ExportError):
            raise value
        return value

    def _number_of_batch(self, value: Any) -> Value:
        """An integer of the graph: a number, or a multiple of the batch."""
        if isinstance(value, (int, float)):
            return value
        expression = value.node.expr
        if self.batch is not None:
            factor = expression / self.batch
            if factor.is_Integer:
                return BatchMultiple(int(factor))
        return self.error(f"found the number {expression}; expected one that is fixed, or a multiple of the batch")

    # The methods for handlers.

    def kept(self, node: Node) -> Variable:
        """The parameter of a buffer that the model keeps between runs."""
        target = self.exported.graph_signature.inputs_to_buffers.get(node.name)
        if target is None:
            self.refuse(f"found {node.name!r}, which is computed; expected a buffer of the model")
        name = target.removeprefix(self.prefix)
        if name in self.parameters:
            self.refuse(f"found {name!r} kept by two layers; expected one")
        return self._parameter(name, self.needed(node))

    def moved(self, parameter: Variable, value: Variable, momentum: float) -> MovingAverage:
        self.averages.append(MovingAverage(parameter, value, momentum))
        return self.averages[-1]

    def refuse(self, reason: str) -> NoReturn:
        raise self.error(reason)

    def output(self, place: int | None = None) -> tuple[Shape, torch.dtype]:
        """Shape and type of the node's output."""
        value = self.node.meta["val"]
        value = value if place is None else value[place]
        return self.shape_of(value.shape), self.checked_type(value.dtype)

    def checked_type(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.bool:
            return torch.float32
        if dtype not in TYPE_NAMES:
            self.refuse(f"found {dtype}; expected {', '.join(map(str, TYPE_NAMES))} or bool of a comparison")
        return dtype

    def shape_of(self, lengths: Sequence[Any]) -> Shape:
        shape: list[int | None] = []
        for length in lengths:
            if isinstance(length, int):
                shape.append(length)
                continue
            expression = length.node.expr
            if self.batch is None and expression.is_Symbol and self.node.op == "placeholder":
                self.batch = expression
            if self.batch is None or expression != self.batch:
                shown = "[" + ", ".join(str(each) for each in lengths) + "]"
                self.refuse(f"found the shape {shown}, where {expression} is not fixed; expected fixed dimensions and "
                            f"the batch{'' if self.batch is None else f' {self.batch}'} alone")
            shape.append(None)
        if 0 in shape:
            self.refuse(f"found the shape {list(shape)}; expected dimensions of 1 or more")
        return tuple(shape)

    def emit(
        self,
        kind: str,
        inputs: Sequence[Variable],
        shape: Sequence[int | None],
        dtype: torch.dtype,
        /,
        **attributes: Any,
    ) -> Variable:
        """Writes a forward op with one output. Attributes that are None are left out."""
        variable = Variable(self.writer.unique(self._base()), tuple(shape), dtype)
        kept = {name: value for name, value in attributes.items() if value is not None}
        self.writer.ops.append(ProgramOp("forward", [variable.name], kind, [each.name for each in inputs], kept))
        return variable

    def emit_outputs(
        self, kind: str, inputs: Sequence[Variable], outputs: Sequence[Shape], /, **attributes: Any
    ) -> tuple[Variable, ...]:
        dtype = inputs[0].dtype
        made = tuple(Variable(self.writer.unique(self._base()), shape, dtype) for shape in outputs)
        op = ProgramOp("forward", [each.name for each in made], kind, [each.name for each in inputs], attributes)
        self.writer.ops.append(op)
        return made

    def _base(self) -> str:
        """What variables of the node are called."""
        name = "output" if self.node.op == "output" else self.node.name
        return re.sub("_native_batch_norm_legit(_functional|_no_training)?", "batch_norm", name)

    def filled(self, value: float, shape: Sequence[int], dtype: torch.dtype) -> Variable:
        """A tensor of equal elements."""
        key = (float(value), tuple(shape), dtype)
        if key not in self.constants:
            if value != value or value in (float("inf"), float("-inf")):
                self.refuse(f"found the constant {value}; expected a finite number")
            name = self.writer.unique("constant")
            variable = self.writer.declare("temporary", Variable(name, tuple(shape), dtype))
            self.writer.ops.append(ProgramOp("forward", [name], "fill", [], {"value": float(value)}))
            self.constants[key] = variable
        return self.constants[key]

    def variable(self, value: Value, dtype: torch.dtype | None = None) -> Variable:
        """The variable of a value: a constant is written into the program. With a type the value is cast to it."""
        match value:
            case Variable():
                made = value
            case Tensor():
                made = self._constant(value, dtype or self.checked_type(value.dtype))
            case bool() | int() | float():
                made = self.filled(float(value), (), dtype or torch.float32)
            case BatchMultiple():
                made = self.batch_size(value.factor, dtype or torch.float32)
            case ExportError():
                raise value
            case _:
                self.refuse(f"found {value!r}; expected a tensor")
        return made if dtype is None else self.cast(made, dtype)

    def _constant(self, value: Tensor, dtype: torch.dtype) -> Variable:
        key = (id(value), tuple(value.shape), dtype)
        if key in self.constants:
            return self.constants[key]
        flat = value.detach().to(dtype).reshape(-1)
        if flat.numel() == 0:
            self.refuse("found a constant without elements; expected 1 or more")
        if dtype in (torch.int32, torch.int64) and int(flat.abs().max()) > 2**53:
            self.refuse("found a constant above 2^53; expected one that a float64 holds")
        runs, counts = torch.unique_consecutive(flat, return_counts=True)
        if len(runs) > CONSTANT_RUNS_MAX:
            self.refuse(f"found a constant {list(value.shape)} (a buffer, or a parameter without gradient) of "
                        f"{len(runs)} runs of equal elements; expected at most {CONSTANT_RUNS_MAX}, or data")
        if len(runs) == 1:
            return self.filled(runs[0].item(), tuple(value.shape), dtype)
        pieces = [self.filled(run.item(), (count,), dtype) for run, count in zip(runs, counts.tolist())]
        whole = self.emit("concat", pieces, (flat.numel(),), dtype, axis=0)
        self.constants[key] = self.reshape(whole, tuple(value.shape))
        # The key has the object's address, which no other object gets while this one lives.
        self.kept_alive.append(value)
        return self.constants[key]

    def batch_ones(self) -> Variable:
        """Ones, one for each row of the batch: each is 1 more than whether a row's first datum is above itself."""
        if self.ones is None:
            data = (each for purpose, each in self.writer.variables if purpose == "data" and None in each.shape)
            first = next(data, None)
            if first is None or first.shape[0] is not None:
                self.refuse("found a dimension of the batch and no data whose first dimension it is; expected some")
            row = 1
            for length in first.shape[1:]:
                assert length is not None
                row *= length
            one = first
            if row > 1:
                one = self.emit("reshape", [one], (None, row), one.dtype, shape=[0, row])
                one = self.emit("slice", [one], (None, 1), one.dtype, axis=1, start=0, end=1)
            one = self.cast(self.reshape(one, (None,)), torch.float32)
            zeros = self.emit("greater", [one, one], (None,), torch.float32)
            self.ones = self.emit("add", [zeros, self.filled(1.0, (), torch.float32)], (None,), torch.float32)
        return self.ones

    def batch_size(self, factor: int, dtype: torch.dtype) -> Variable:
        size = self.emit("reduce_sum", [self.batch_ones()], (), torch.float32)
        return self.cast(self.scaled(size, float(factor)), dtype)

    def step_numbers(self) -> list[Variable]:
        """The step's number, and that of its first row, which `pserver train` feeds."""
        for name in ("step", "first")[len(self.numbers) :]:
            variable = Variable(self.writer.unique(f"training.{name}"), (), torch.int64)
            self.numbers.append(self.writer.declare("data", variable))
        return self.numbers

    def cast(self, x: Variable, dtype: torch.dtype) -> Variable:
        if x.dtype == dtype:
            return x
        return self.emit("cast", [x], x.shape, dtype, to=Word(TYPE_NAMES[dtype]))

    def scaled(self, x: Variable, factor: float) -> Variable:
        return x if factor == 1 else self.emit("scale", [x], x.shape, x.dtype, factor=float(factor))

    def unary(self, kind: str, x: Variable, **attributes: Any) -> Variable:
        return self.emit(kind, [x], x.shape, x.dtype, **attributes)

    def binary(self, kind: str, a: Variable, b: Variable) -> Variable:
        return self.emit(kind, [a, b], broadcast(a.shape, b.shape), a.dtype)

    def reduced(self, kind: str, x: Variable, axes: Sequence[int], keep: bool = False) -> Variable:
        shape = [1 if at in axes else length for at, length in enumerate(x.shape) if keep or at not in axes]
        return self.emit(kind, [x], shape, x.dtype, axes=list(axes), keep=True if keep else None)

    def transposed(self, x: Variable, axes: Sequence[int]) -> Variable:
        if list(axes) == list(range(len(axes))):
            return x
        return self.emit("transpose", [x], [x.shape[axis] for axis in axes], x.dtype, axes=list(axes))

    def reshape(self, x: Variable, shape: Shape) -> Variable:
        """The same elements in the same order."""
        if x.shape == shape:
            return x
        found, wanted = x.shape.count(None), shape.count(None)
        if found != wanted or found > 1 or fixed_elements(x.shape) != fixed_elements(shape):
            self.refuse(f"found {shown(x.shape)} reshaped to {shown(shape)}; expected the batch in both as one "
                        "dimension, and as many elements")
        return self.emit("reshape", [x], shape, x.dtype, shape=[0 if length is None else length for length in shape])

    def axis(self, x: Variable, dim: int) -> int:
        return dim % max(len(x.shape), 1)

    def float_variable(self, value: Value) -> Variable:
        """A variable of a type that has arithmetic."""
        made = self.variable(value)
        if made.dtype not in (torch.float32, torch.float64):
            self.refuse(f"found {TYPE_NAMES[made.dtype]}; expected float32 or float64")
        return made

    # Products.

    def product(self, x: Variable, w: Variable, transpose: bool = False) -> Variable:
        """The matrix product over the last dimension of x, with the matrix w, or with transpose its transposition."""
        outer, inner = (w.shape if transpose else w.shape[::-1])
        assert inner is not None and outer is not None
        leading = x.shape[:-1]
        flag = True if transpose else None
        if len(x.shape) == 2:
            return self.emit("matmul", [x, w], (*leading, outer), x.dtype, transpose_right=flag)
        if None not in leading or fixed_elements(leading) == 1:
            rows = None if None in leading else fixed_elements(leading)
            matrix = self.reshape(x, (rows, inner))
            whole = self.emit("matmul", [matrix, w], (rows, outer), x.dtype, transpose_right=flag)
            return self.reshape(whole, (*leading, outer))
        if leading[0] is not None:
            axes = [at := leading.index(None), *(each for each in range(len(x.shape)) if each != at)]
            whole = self.product(self.transposed(x, axes), w, transpose)
            return self.transposed(whole, [axes.index(each) for each in range(len(axes))])
        # Rows of an example are places of an image of width 1, and the matrix a filter of one place.
        rows = fixed_elements(leading)
        filters = w if transpose else self.transposed(w, (1, 0))
        filters = self.reshape(filters, (outer, inner, 1, 1))
        places = self.reshape(self.transposed(self.reshape(x, (None, rows, inner)), (0, 2, 1)), (None, inner, rows, 1))
        images = self.emit("conv2d", [places, filters], (None, outer, rows, 1), x.dtype)
        back = self.transposed(self.reshape(images, (None, outer, rows)), (0, 2, 1))
        return self.reshape(back, (*leading, outer))

    def batched_product(self, a: Variable, b: Variable) -> Variable:
        """Products of matrices [..., n, k] and [..., k, m]: every product of two elements, and their sums."""
        left, right = self.reshape(a, (*a.shape, 1)), self.reshape(b, (*b.shape[:-2], 1, *b.shape[-2:]))
        every = self.binary("mul", left, right)
        return self.reduced("reduce_sum", every, [len(every.shape) - 2])


def _number(argument: Any) -> Value:
    return argument.value if isinstance(argument, ConstantArgument) else ExportError(
        f"found the input {argument.name!r}, which is no tensor; expected tensors")


def flattened(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += flattened(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def _is_same(value: Any, usual: Any) -> bool:
    if isinstance(value, (Variable, Tensor)):
        return False
    if isinstance(value, (list, tuple)) and isinstance(usual, (list, tuple)):
        return list(value) == list(usual)
    return type(value) is type(usual) and bool(value == usual)


def fixed_elements(shape: Sequence[int | None]) -> int:
    """The product of the fixed lengths."""
    count = 1
    for length in shape:
        count *= 1 if length is None else length
    return count


def shown(shape: Shape) -> str:
    return "[" + ", ".join("batch" if length is None else str(length) for length in shape) + "]"


def broadcast(a: Shape, b: Shape) -> Shape:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    padded = (1,) * (len(long) - len(short)) + short
    return tuple(other if one == 1 else one for one, other in zip(long, padded))


def pair(values: int | Sequence[int]) -> list[int]:
    each = [values] if isinstance(values, int) else list(values)
    return each * 2 if len(each) == 1 else each


# ATen ops. The parameters have the names of the schemas, and an argument that is not among them is refused.
