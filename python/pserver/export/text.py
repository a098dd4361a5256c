"""A program's text, and files of its values. Not here: where its ops come from (`translator`)."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

TYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
}
# The types' names in a safetensors file.
STORED_TYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}

# The lengths of a shape; None is the batch.
Shape = tuple[Union[int, None], ...]

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]*")


@dataclass(frozen=True)
class Variable:
    """A variable of the program. Results of comparisons are 1 or 0 in a float type."""

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass
class ProgramOp:
    role: str
    outputs: list[str]
    kind: str
    inputs: list[str]
    attributes: dict[str, Any]

    def line(self, names: dict[str, str]) -> str:
        def shown(name: str) -> str:
            return quoted(names.get(name, name))

        parts = [shown(name) for name in self.inputs]
        parts += [f"{name}={_attribute(value)}" for name, value in self.attributes.items()]
        return f"    {self.role} {', '.join(map(shown, self.outputs))} = {self.kind}({', '.join(parts)})"


@dataclass(frozen=True)
class Word:
    """An attribute that is a word and not a text."""

    word: str


def _attribute(value: Any) -> str:
    match value:
        case Word():
            return value.word
        case bool():
            return "true" if value else "false"
        case str():
            return quoted_text(value)
        case list() | tuple():
            return f"[{', '.join(str(each) for each in value)}]"
        case _:
            return repr(value)


@dataclass
class ProgramWriter:
    """The variables and ops of a program, each name once."""

    variables: list[tuple[str, Variable]] = field(default_factory=list)
    ops: list[ProgramOp] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def unique(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.taken:
            name, number = f"{wanted}.{number}", number + 1
        self.taken.add(name)
        return name

    def declare(self, purpose: str, variable: Variable) -> Variable:
        self.variables.append((purpose, variable))
        return variable

    def used(self, outputs: Sequence[str]) -> None:
        """Leaves out ops and variables that the outputs do not need."""
        needed = set(outputs)
        kept = []
        for op in reversed(self.ops):
            if needed.intersection(op.outputs):
                needed.update(op.inputs)
                needed.update(op.outputs)
                kept.append(op)
        self.ops = kept[::-1]
        self.variables = [(purpose, each) for purpose, each in self.variables if each.name in needed]

    def text(self, comments: Sequence[str], names: dict[str, str]) -> str:
        lines = [f"# {comment}" for comment in comments] + ["block 0 {"]
        for purpose, variable in self.variables:
            lines.append(f"    {purpose} {quoted(names.get(variable.name, variable.name))}: {facts(variable)}")
        initialised = [variable.name for purpose, variable in self.variables if purpose == "parameter"]
        lines.append("")
        lines += [f"    initialise {quoted(name)} = given(name={quoted_text(name)})" for name in initialised]
        lines += [op.line(names) for op in self.ops]
        return "\n".join([*lines, "}", ""])


# Where a node comes from.


def quoted(name: str) -> str:
    if _BARE.fullmatch(name):
        return name
    return quoted_text(name)


def quoted_text(content: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    each = (escapes.get(one) or (f"\\u{{{ord(one):x}}}" if ord(one) < 32 else one) for one in content)
    return f'"{"".join(each)}"'


def facts(variable: Variable) -> str:
    lengths = ", ".join("batch" if length is None else str(length) for length in variable.shape)
    return f"{TYPE_NAMES[variable.dtype]}[{lengths}]"


def write_safetensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Writes tensors by name in the format safetensors."""
    heads: dict[str, Any] = {}
    contents = []
    end = 0
    for name, tensor in tensors.items():
        kept = tensor.detach().cpu().contiguous()
        content = kept.reshape(-1).view(torch.uint8).numpy().tobytes() if kept.numel() > 0 else b""
        begin, end = end, end + len(content)
        heads[name] = {
            "dtype": STORED_TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        contents.append(content)
    head = json.dumps(heads, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(head)) + head + b"".join(contents))


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file in the format safetensors, by name.

    Raises:
        ValueError: the file is none.
    """
    content = bytearray(Path(path).read_bytes())
    try:
        return _tensors(content)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: {error!r}; expected a file in the format safetensors") from error


def _tensors(content: bytearray) -> dict[str, Tensor]:
    types = {name: dtype for dtype, name in STORED_TYPE_NAMES.items()}
    (length,) = struct.unpack("<Q", content[:8])
    heads = json.loads(content[8 : 8 + length])
    heads.pop("__metadata__", None)
    found = {}
    for name, head in heads.items():
        begin, end = head["data_offsets"]
        part = content[8 + length + begin : 8 + length + end]
        dtype = types[head["dtype"]]
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(head["shape"])
    return found


# The text.
