"""Buffers of a model, such as running statistics, at the servers: readers and saved models have them too."""

from collections.abc import Iterable

import torch

from .._client import Client
from .._errors import Refused
from ._weights import array

CONFIG = 'algorithm: "add"'
"""Of a parameter that gets no gradients."""
TYPES = {torch.float32, torch.float64, torch.int32, torch.int64}


class Buffers:
    """Named buffers of a model. They are no part of steps: a trainer makes its own the job's when it wants to."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._held = {name: tensor for name, tensor in named if tensor.numel() > 0}
        for name, tensor in self._held.items():
            if tensor.dtype not in TYPES:
                text = "expected float32, float64, int32 or int64, which servers hold"
                raise Refused(f'buffer "{name}" is of {tensor.dtype}; {text}')

    @property
    def names(self) -> set[str]:
        """Of those that servers hold."""
        return set(self._held)

    def declare(self, client: Client) -> None:
        """Declares them in a job that this trainer initialises."""
        for name, tensor in self._here().items():
            client.init(name, array(tensor), CONFIG)

    def send(self, client: Client) -> None:
        """Makes these the job's."""
        if self._held:
            client.set({name: array(tensor) for name, tensor in self._here().items()})

    def fetched(self, client: Client) -> dict[str, torch.Tensor]:
        """Those of the job, in memory of their own."""
        found = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in self._held.items()}
        if found:
            client.pull({name: array(tensor) for name, tensor in found.items()})
        return found

    def install(self, found: dict[str, torch.Tensor]) -> None:
        """Gives the model these."""
        for name, tensor in found.items():
            self._held[name].copy_(tensor)

    def _here(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self._held.items()}
