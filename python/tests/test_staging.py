"""Tensors of devices through memory of the host: here every tensor counts as one of a device, and its copies end late."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from needs import need_torch

need_torch()

import pserver  # noqa: E402
from pserver.torch import Optimizer, _staging  # noqa: E402


class Late(_staging.Copies):
    """Copies that are made when somebody waits for them, or asks for the third time."""

    def __init__(self, copy: Callable[[], None]) -> None:
        super().__init__(None)
        self._copy = copy
        self._asked = 0
        self.is_over = False

    def are_over(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self.wait()
        return self.is_over

    def wait(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._copy()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Tensors are not here, and the copies of gradients are late: those that were made."""
    made: list[Late] = []

    def bring(block: Any, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        into, out_of = list(places), list(tensors)
        for place in into:
            place.fill_(float("nan"))
        block.copies = Late(lambda: torch._foreach_copy_(into, out_of))
        made.append(block.copies)

    monkeypatch.setattr(_staging, "is_here", lambda tensor: False)
    monkeypatch.setattr(_staging.Block, "bring", bring)
    return made


def model(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5)]
    return torch.nn.Sequential(*layers).to(dtype)


def trained(client: pserver.Client, dtype: torch.dtype, steps: int = 6, **settings: Any) -> list[torch.Tensor]:
    net = model(dtype)
    optimizer = Optimizer(net.parameters(), "adam", lr=0.01, client=client, **settings)
    random = torch.Generator().manual_seed(client.trainer)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 20, generator=random).to(dtype)).square().mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in net.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_weights_are_those_of_tensors_of_the_host(
    overlap: bool, dtype: torch.dtype, wire: torch.dtype | None, elsewhere: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"overlap": overlap, "bucket_bytes": 1000, "wire": wire}
    with pserver.connect(servers=2) as client:
        found = trained(client, dtype, **settings)
    assert all(copies.is_over for copies in elsewhere)
    # Each bucket of each step; without overlap the bucket is the group.
    assert len(elsewhere) == 6 * (2 if overlap else 1)
    monkeypatch.setattr(_staging, "is_here", lambda tensor: True)
    with pserver.connect(servers=2) as client:
        expected = trained(client, dtype, **settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_memory_of_the_host_serves_again(elsewhere: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    of_block = _staging.Block.__init__

    def made(block: Any, *arguments: Any) -> None:
        blocks.append(block)
        of_block(block, *arguments)

    monkeypatch.setattr(_staging.Block, "__init__", made)
    with pserver.connect(servers=1) as client:
        trained(client, torch.float32)
    assert len(blocks) == 2, "one for gradients and one for values, for all steps"
