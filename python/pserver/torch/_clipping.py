"""Clipping by the norm of all gradients, on servers: they have the gradients of all trainers, each server some.

Servers give for each parameter the sum of the squares of its merged gradient, its share; of a table one for each
bucket. Every trainer makes the norm of all shares and sends it back, and servers scale by it before the rule:
docs/decisions/server-flow.md.
"""

from collections.abc import Iterable
from math import inf, sqrt
from sys import float_info

import numpy

from .._client import Array, Client
from .._errors import Refused

SHARE = "algorithm: 'sum' total_part: Share"
TOTAL = "algorithm: 'sum' total_part: Total"


class Clipping:
    """Scales gradients so that the norm of all together is at most ``max_norm``, as
    :func:`torch.nn.utils.clip_grad_norm_` does."""

    def __init__(self, max_norm: float) -> None:
        if not 0 < max_norm < inf:
            raise Refused(f"max_norm is {max_norm}; expected a number above 0")
        self.max_norm = float(max_norm)
        self.total_norm = 0.0
        self._numbers: TotalNumbers | None = None
        """Memory for the numbers of the parameters that had gradients last."""

    @property
    def stage(self) -> str:
        """What servers do with a gradient and the norm of all."""
        return f"stage: 'g = g * min({self.max_norm!r} / (total(sum(g * g)) + 1e-6), 1); update'"

    @staticmethod
    def parts(names: Iterable[str]) -> set[str]:
        """The shares and totals of these parameters."""
        return {part(name) for name in names for part in (_share, _total)}

    def declare(self, client: Client, name: str) -> None:
        """Declares share and total of a parameter, behind it. One number stands for those of all buckets."""
        for part, config in ((_share(name), SHARE), (_total(name), TOTAL)):
            client.init(part, numpy.zeros(1), config)

    def run(self, client: Client, names: Iterable[str]) -> None:
        """Between the gradients of these parameters and their values: fetches the shares and sends the norm."""
        wanted = tuple(names)
        if not wanted:
            return
        numbers = self._numbers
        if numbers is None or numbers.names != wanted:
            numbers = self._numbers = TotalNumbers(client, wanted)
        client.pull(numbers.shares)
        self.total_norm = sqrt(float(numbers.memory.sum()))
        # Servers take finite numbers. Beyond them gradients are scaled to zero, as PyTorch scales them.
        numbers.memory.fill(min(self.total_norm, float_info.max))
        client.push(numbers.totals)


class TotalNumbers:
    """The shares of some parameters, and their total in the same places: one array, of which each has a part."""

    def __init__(self, client: Client, names: tuple[str, ...]) -> None:
        self.names = names
        counts = [client._facts(_share(name))[1][0] for name in names]
        self.memory = numpy.empty(sum(counts))
        parts = numpy.split(self.memory, numpy.cumsum(counts)[:-1])
        self.shares: dict[str, Array] = {_share(name): part for name, part in zip(names, parts)}
        self.totals: dict[str, Array] = {_total(name): part for name, part in zip(names, parts)}


def _share(name: str) -> str:
    return f"{name}@share"


def _total(name: str) -> str:
    return f"{name}@total"
