"""Clipping by the norm of all gradients, on servers: they have the gradients of all trainers, each server some.

Servers give for each parameter the sum of the squares of its merged gradient, its share. Every trainer makes the factor
of all shares and sends it back, and servers apply it before the rule: docs/decisions/server-flow.md.
"""

from collections.abc import Iterable
from math import sqrt

import numpy

from .._client import Client
from .._errors import Refused

SHARE = "algorithm: 'sum' total_part: Share"
TOTAL = "algorithm: 'sum' total_part: Total"
STAGE = "stage: 'g = g * total(sum(g * g)); update'"


class Clipping:
    """Scales gradients so that the norm of all together is at most ``max_norm``, as
    :func:`torch.nn.utils.clip_grad_norm_` does."""

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise Refused(f"max_norm is {max_norm}; expected a number above 0")
        self.max_norm = max_norm
        self.total_norm = 0.0

    def declare(self, client: Client, name: str) -> None:
        """Declares share and total of a parameter, behind it."""
        for part, config in ((_share(name), SHARE), (_total(name), TOTAL)):
            client.init(part, numpy.zeros(1), config)

    def run(self, client: Client, names: Iterable[str]) -> None:
        """Between the gradients of these parameters and their values: fetches the shares and sends the factor."""
        shares = {_share(name): numpy.empty(1) for name in names}
        client.pull(shares)
        self.total_norm = sqrt(sum(float(share[0]) for share in shares.values()))
        factor = self.max_norm / (self.total_norm + 1e-6)
        number = numpy.array([factor if factor < 1.0 else 1.0])
        client.push({_total(name): number for name in names})


def _share(name: str) -> str:
    return f"{name}@share"


def _total(name: str) -> str:
    return f"{name}@total"
