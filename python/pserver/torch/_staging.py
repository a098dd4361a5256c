"""Memory of the host beside tensors of a device. It is pinned, so that a CUDA device copies while the program goes on."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from .._client import Array

ALIGNMENT = 64
"""Bytes: where a tensor begins in a block."""
PACKED_BYTES_MAX = 256 << 10
"""A tensor of more is copied by itself."""
Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


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
    """Begins to copy a tensor of a device to the host, behind what computes it: the copy, and when it is over. Of a
    tensor of the host it is the tensor."""
    if is_here(tensor):
        return tensor, OVER
    into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    into.copy_(tensor, non_blocking=tensor.is_cuda)
    return into, Copies(recorded(torch.cuda.current_stream(tensor.device))) if tensor.is_cuda else OVER


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on a device. The program's later work there has it, and nobody waits."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what the stream has to do."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Block:
    """Tensors in one piece of memory of the host, beside some of a device. Small ones are copied in one piece, which
    the device has too: of small tensors most of a copy is its call."""

    def __init__(self, kinds: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device) -> None:
        self.device = device
        self.copies = OVER
        """The copies that began last."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        spans = [(0, 0)] * len(sizes)
        end = 0
        for at in sorted(range(len(sizes)), key=lambda at: sizes[at] > PACKED_BYTES_MAX):
            spans[at] = (end, end + -(-sizes[at] // ALIGNMENT) * ALIGNMENT)
            end = spans[at][1]
        is_packed = not is_here(torch.empty(0, device=device))
        packed = [at for at, size in enumerate(sizes) if is_packed and size <= PACKED_BYTES_MAX]
        self._spans = {at: spans[at] for at in packed}

        def views(whole: torch.Tensor) -> list[torch.Tensor]:
            """The tensors that lie there entirely."""
            pieces = [(start, start + size, *kind) for (start, _), size, kind in zip(spans, sizes, kinds)]
            return [whole[a:b].view(dtype).view(shape) for a, b, shape, dtype in pieces if b <= len(whole)]

        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._whole = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        self.tensors = views(self._whole)
        with self._behind_others([]):
            # The memory is the stream's, which is done with it before it is another tensor's.
            packed_bytes = max((end for _, end in self._spans.values()), default=0)
            self._there = torch.empty(packed_bytes, dtype=torch.uint8, device=device)
        self._packed = dict(zip(packed, views(self._there)))

    def bring(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy tensors of the device into places of the block, behind what computes them. Their elements get
        the type of the place."""
        is_cuda = self._stream is not None
        with self._behind_others(tensors):
            packed, others = self._sorted(places, tensors)
            if packed:
                torch._foreach_copy_([one for one, _ in packed], [one for _, one in packed])
            for run in self._runs(places):
                self._whole[run].copy_(self._there[run], non_blocking=is_cuda)
            if others:
                torch._foreach_copy_([one for one, _ in others], [one for _, one in others], non_blocking=is_cuda)

    def give(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy places of the block into tensors of the device. What is computed there later has the values."""
        is_cuda = self._stream is not None
        with self._behind_others(tensors):
            packed, others = self._sorted(places, tensors)
            for run in self._runs(places):
                self._there[run].copy_(self._whole[run], non_blocking=is_cuda)
            if packed:
                torch._foreach_copy_([one for _, one in packed], [one for one, _ in packed])
            if others:
                torch._foreach_copy_([one for _, one in others], [one for one, _ in others], non_blocking=is_cuda)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _sorted(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> tuple[Pairs, Pairs]:
        """Places of the piece that the device has with their tensors, and the other places with theirs."""
        packed = [(self._packed[at], tensor) for at, tensor in zip(places, tensors) if at in self._packed]
        others = [(self.tensors[at], tensor) for at, tensor in zip(places, tensors) if at not in self._packed]
        return packed, others

    def _runs(self, places: Sequence[int]) -> list[slice]:
        """The bytes of these places in the piece that the device has, those of neighbours together."""
        found: list[slice] = []
        for begin, end in sorted(self._spans[at] for at in places if at in self._spans):
            joins = found and found[-1].stop == begin
            found.append(slice(found.pop().start if joins else begin, end))
        return found

    @contextmanager
    def _behind_others(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Copies within it are in the block's stream, behind everything that the program has the device do by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            # Its memory is not given to another tensor before the copy is over.
            tensor.record_stream(self._stream)
        self.copies = Copies(recorded(self._stream))


class Place(NamedTuple):
    """A tensor in a block, and its memory."""

    tensor: torch.Tensor
    array: Array
    block: Block
    at: int


def by_block(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> Iterable[tuple[Block, list[int], Any]]:
    """Blocks, and the places and tensors of each."""
    found: dict[int, tuple[Block, list[int], list[torch.Tensor]]] = {}
    for place, tensor in zip(places, tensors):
        _, some, others = found.setdefault(id(place.block), (place.block, [], []))
        some.append(place.at)
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
