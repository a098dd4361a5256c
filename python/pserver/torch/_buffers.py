"""Buffers of a model, such as running statistics, at the servers: readers and saved models have them too."""

from collections.abc import Container

import torch

from .._client import Client
from .._errors import Refused
from ._weights import array

CONFIG = 'algorithm: "add"'
"""Of a parameter that gets no gradients."""
WIDER = {torch.bool: torch.int32, torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32}
WIDER |= {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Types that servers have as wider ones."""
TYPES = {torch.float32, torch.float64, torch.int32, torch.int64}


class Buffers:
    """The persistent buffers of a model, those with ``names`` where these are given. They are no part of steps: a
    trainer makes its own the job's when it wants to."""

    def __init__(self, model: torch.nn.Module | None, names: Container[str] | None = None) -> None:
        self._model = model
        persistent = set() if model is None else {plain(name) for name in model.state_dict(keep_vars=True)}
        self._names = {name for name in persistent if names is None or name in names}
        for name, tensor in self.held().items():
            at_servers(name, tensor)

    def held(self) -> dict[str, torch.Tensor]:
        """The model's present tensors by their names at the servers: ``model.to()`` replaces buffers."""
        if self._model is None:
            return {}
        named = [(plain(name), one) for name, one in self._model.named_buffers()]
        return {name: one for name, one in named if name in self._names and one.numel()}

    def declare(self, client: Client) -> None:
        """Declares them in a job that this trainer initialises."""
        for name, tensor in self._values().items():
            client.init(name, array(tensor), CONFIG)

    def send(self, client: Client) -> None:
        """Makes these the job's."""
        values = self._values()
        if values:
            client.set({name: array(tensor) for name, tensor in values.items()})

    def fetched(self, client: Client) -> dict[str, torch.Tensor]:
        """Those of the job, in memory of their own."""
        held = self.held().items()
        found = {name: torch.empty(one.shape, dtype=at_servers(name, one)) for name, one in held}
        if found:
            client.pull({name: array(tensor) for name, tensor in found.items()})
        return found

    def install(self, found: dict[str, torch.Tensor]) -> None:
        """Gives the model these."""
        held = self.held()
        for name, tensor in found.items():
            held[name].copy_(tensor)

    def _values(self) -> dict[str, torch.Tensor]:
        held = self.held().items()
        return {name: one.detach().to("cpu", at_servers(name, one)).contiguous() for name, one in held}


def at_servers(name: str, tensor: torch.Tensor) -> torch.dtype:
    """The type in which servers have a buffer."""
    dtype = WIDER.get(tensor.dtype, tensor.dtype)
    if dtype not in TYPES:
        raise Refused(f'buffer "{name}" is of {dtype}; expected real or whole numbers of at most 64 bits')
    return dtype


def plain(name: str) -> str:
    """The name of a parameter or buffer in the model that was compiled."""
    return name.replace("_orig_mod.", "")
