"""Memory of the host beside tensors of a device. It is pinned, so that a CUDA device copies while the program goes on."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._client import Array

ALIGNMENT = 64
"""Bytes: where a tensor begins in a block."""


def is_here(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in memory of the host."""
    return tensor.is_cpu


class Copies:
    """Copies between a block and tensors of a device that have begun."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def are_over(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


OVER = Copies(None)


def read(tensor: torch.Tensor) -> tuple[torch.Tensor, Copies]:
    """Begins to copy a tensor of a device to the host, behind what computes it: the copy, and when it is over."""
    into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    into.copy_(tensor, non_blocking=True)
    return into, Copies(recorded(torch.cuda.current_stream(tensor.device))) if tensor.is_cuda else OVER


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what the stream has to do."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Block:
    """Tensors in one piece of memory of the host, beside some of a device."""

    def __init__(self, kinds: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device) -> None:
        self.device = device
        self.copies = OVER
        """The copies that began last."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        is_cuda = device.type == "cuda"
        whole = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        pieces = [(start, size, *kind) for start, size, kind in zip(starts, sizes, kinds)]
        self.tensors = [whole[start : start + size].view(dtype).view(shape) for start, size, shape, dtype in pieces]
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def bring(self, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy tensors of the device into places of the block, behind what computes them."""
        self._copy(places, tensors, tensors)

    def give(self, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy places of the block into tensors of the device. What is computed there later has the values."""
        self._copy(tensors, places, tensors)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _copy(
        self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor], of_device: Sequence[torch.Tensor]
    ) -> None:
        if self._stream is None:
            torch._foreach_copy_(list(into), list(out_of))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(into), list(out_of), non_blocking=True)
        for tensor in of_device:
            # Its memory is not given to another tensor before the copy is over.
            tensor.record_stream(self._stream)
        self.copies = Copies(recorded(self._stream))


class Place(NamedTuple):
    """A tensor in a block, and its memory."""

    tensor: torch.Tensor
    array: Array
    block: Block


def by_block(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> Iterable[tuple[Block, Any, Any]]:
    """Blocks, and the places and tensors of each."""
    found: dict[int, tuple[Block, list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, tensor in zip(places, tensors):
        _, some, others = found.setdefault(id(place.block), (place.block, [], []))
        some.append(place.tensor)
        others.append(tensor)
    return found.values()


def bring(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> list[Copies]:
    """Begins to copy tensors of devices to places of the host."""
    begun = []
    for block, some, others in by_block(places, tensors):
        block.bring(some, others)
        begun.append(block.copies)
    return begun


def give(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> None:
    """Begins to copy places of the host to tensors of devices."""
    for block, some, others in by_block(places, tensors):
        block.give(some, others)
