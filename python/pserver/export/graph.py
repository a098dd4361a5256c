"""Where a node of an exported graph comes from, and why it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

aten = torch.ops.aten

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s*([^\n]*))?')
_TORCH_FOLDER = str(Path(torch.__file__).parent)


class ExportError(Exception):
    """A model that no program computes: the text names the model's line, the op, what was found and expected."""


def place_of(node: Node) -> str:
    """The model's line that made a node, with its code."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith((_TORCH_FOLDER, "<"))]
    for file, line, code in (own or frames)[-1:]:
        return f"{file}:{line}: {code.strip()!r}: " if code else f"{file}:{line}: "
    return ""


def refusal(node: Node, reason: str) -> ExportError:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target)
    return ExportError(f"{place_of(node)}{target} ({node.name!r}): {reason}")


def check_gradients(exported: ExportedProgram) -> None:
    """Refuses a value that depends on a parameter and whose gradient the model stops: the decomposed graph says
    nothing about it."""
    signature = exported.graph_signature
    trained = set(signature.inputs_to_parameters)

    def check(graph_module: GraphModule, influenced: set[str]) -> None:
        for node in graph_module.graph.nodes:
            inputs = [each for each in node.all_input_nodes if each.name in influenced]
            if not inputs or node.op == "output":
                continue
            influenced.add(node.name)
            if node.op != "call_function":
                continue
            if node.target in (aten.detach.default, aten.detach_.default):
                raise refusal(node, "found a gradient that stops here; expected none, as programs have no such op")
            if "wrap_with_set_grad_enabled" in str(node.target):
                inner = getattr(graph_module, str(node.args[1].target))
                first = next(each for each in inner.graph.nodes if each.op == "call_function")
                if node.args[0] is False:
                    raise refusal(first, "found torch.no_grad() over a value that depends on a parameter; expected "
                                          "none, as programs have no such op")
                outer = zip(inner.graph.find_nodes(op="placeholder"), node.args[2:])
                check(inner, {each.name for each, given in outer if getattr(given, "name", None) in influenced})

    check(exported.graph_module, trained)


# The graph.


def source(node: Node, name: str) -> Any:
    """The argument of an op with this name in its schema: a node, a number or several of these."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [each.name for each in node.target._schema.arguments]
    return node.kwargs.get(name) if name in node.kwargs else dict(zip(names, node.args)).get(name)


def type_of(node: Any) -> torch.dtype | None:
    """The type of the tensor that a node computes."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, Tensor) else None
