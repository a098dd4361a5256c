"""Models exported by `torch.export` as programs of pserver.

    from pserver.export import export_program

    program = export_program(model, (pixels,), loss=torch.nn.functional.cross_entropy, targets=(label,))
    program.write("net.program", "net.safetensors")

writes the forward part as text (docs/PROGRAMS.md) and the parameters' values; `pserver train` adds gradients and
optimizer. A model that `torch.export.save` wrote becomes a program by `python -m pserver.export net.pt2 -o net.program
--values net.safetensors`.

Not here: training, and reading the text. Read in this order: this file (the entries), `translator` (a graph's nodes to
ops), `layers`, `shapes`, `arithmetic` and `losses` (one function for each ATen op), `attention` (a
formula with the batch apart), `graph` (refusals), `text`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from . import arithmetic, layers, losses, shapes
from .attention import batched_attention
from .graph import ExportError, check_gradients
from .text import write_safetensors
from .translator import MAPPED, MAPPED_NODES, TorchProgram, Translator

__all__ = ["ExportError", "TorchProgram", "export_program", "program_of", "write_safetensors"]

# Each module adds its ops to the table when it is loaded.
_OP_MODULES = (arithmetic, layers, losses, shapes)


def export_program(
    model: nn.Module,
    example_inputs: Sequence[Tensor],
    *,
    loss: Callable[..., Tensor] | None = None,
    targets: Sequence[Tensor] = (),
    data_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    seed: int = 0,
) -> TorchProgram:
    """The program of a model in its present mode, training or evaluation.

    With `loss`, the program also has the variable `loss`: `loss(output, *targets)` for the model's output. Data are
    called as the parameters of `forward`, and targets as those of `loss` after the first, unless `data_names` names all
    of them. With `dynamic_batch` the first dimension of every input and target is the batch; the examples then have 2
    rows or more. `output_names` names the outputs, the loss first; without it see `program_of`, as for `seed`.

    Raises:
        ExportError: when an op, a shape or a type has no counterpart.
    """
    inputs = (*example_inputs, *targets)
    if dynamic_batch and any(tensor.dim() > 0 and tensor.shape[0] < 2 for tensor in inputs):
        raise ExportError("found an example with 1 row or none; expected 2 or more, so that the batch stays a variable")
    names = list(data_names) if data_names is not None else _argument_names(model, len(example_inputs), loss)
    if data_names is None:
        names += _target_names(loss, len(targets), names)
    if len(names) != len(inputs):
        raise ExportError(f"found {len(names)} names of data; expected {len(inputs)}, one for each input and target")
    prefix = "" if loss is None else "model."
    exported_module = model if loss is None else _WithLoss(model, loss, len(example_inputs))
    exported_module.train(model.training)
    batch = Dim("batch")
    shapes = tuple({0: batch} if tensor.dim() > 0 else {} for tensor in inputs) if dynamic_batch else None
    if loss is not None and shapes is not None:
        shapes = (shapes,)  # type: ignore[assignment]
    with batched_attention():
        exported = torch.export.export(exported_module, inputs, dynamic_shapes=shapes)
    return program_of(exported, data_names=names, output_names=output_names, prefix=prefix, seed=seed)


def program_of(
    exported: ExportedProgram,
    *,
    data_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    prefix: str = "",
    seed: int = 0,
) -> TorchProgram:
    """The program of a model that `torch.export.export` exported, with one dynamic dimension at most, the batch.

    Outputs are called by the keys of a dictionary, else `loss` (the first that is a scalar) and `output`, with numbers
    from 0 where there are several. `prefix` is removed from the parameters' names. Masks of dropout follow from `seed`.

    Raises:
        ExportError: when an op, a shape or a type has no counterpart.
    """
    check_gradients(exported)
    table = torch.export.default_decompositions()
    for target in (*MAPPED, *MAPPED_NODES):
        table.pop(target, None)  # type: ignore[no-untyped-call]
    return Translator(exported.run_decompositions(table), prefix, seed).program(data_names, output_names)


class _WithLoss(nn.Module):
    """A model whose first output is its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], inputs: int) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.inputs = inputs

    def forward(self, *values: Tensor) -> dict[str, Any]:
        output = self.model(*values[: self.inputs])
        outputs = output if isinstance(output, dict) else {"output": output}
        return {"loss": self.loss(output, *values[self.inputs :]), **outputs}


def _argument_names(model: nn.Module, count: int, loss: object) -> list[str]:
    found = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return found[:count] if len(found) >= count else [f"input{place}" for place in range(count)]


def _target_names(loss: object, count: int, taken: Sequence[str]) -> list[str]:
    found: list[str] = []
    if callable(loss) and count > 0:
        parameters = inspect.signature(loss).parameters.values()
        found = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD][1:]
    if len(found) < count or set(found[:count]) & set(taken):
        found = ["target"] if count == 1 else [f"target{place}" for place in range(count)]
    return found[:count]
