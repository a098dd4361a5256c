"""Clipping by the norm of all gradients, on servers: they have the gradients of all trainers, each server some.

Servers give for each parameter the sum of the squares of its merged gradient, its share; of a table one for each
bucket. Every trainer makes the norm of all shares and sends it back, and servers scale by it before the rule:
docs/decisions/server-flow.md.
"""

from collections.abc import Iterable
from math import inf, sqrt
from sys import float_info

import numpy

from .._client import Client
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
        shares = {name: numpy.empty(client._facts(_share(name))[1]) for name in names}
        if not shares:
            return
        client.pull({_share(name): share for name, share in shares.items()})
        self.total_norm = sqrt(sum(float(share.sum()) for share in shares.values()))
        # Servers take finite numbers. Beyond them gradients are scaled to zero, as PyTorch scales them.
        number = min(self.total_norm, float_info.max)
        client.push({_total(name): numpy.full(share.shape, number) for name, share in shares.items()})


def _share(name: str) -> str:
    return f"{name}@share"


def _total(name: str) -> str:
    return f"{name}@total"
