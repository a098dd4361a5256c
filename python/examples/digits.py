"""Digits under torchrun: each rank takes its share of every batch, and servers the mean of the gradients, as DDP does.

    torchrun --nproc-per-node 2 --max-restarts 3 python/examples/digits.py --checkpoint-dir /tmp/digits

With a checkpoint directory the end is the same if servers or ranks are killed on the way. The last line of rank 0's
output is the accuracy on digits that no rank has seen, and a digest of the weights.
"""

import argparse
import gzip
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch.nn.functional import cross_entropy

import pserver
from pserver.torch import Optimizer

DATA = Path(__file__).parents[2] / "cli/data/digits.csv.gz"
BATCH, HELD_OUT = 64, 300


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 64 pixels, and what each is."""
    with gzip.open(DATA, "rt") as file:
        table = numpy.loadtxt(file, delimiter=",", dtype=numpy.float32)
    table = table[numpy.random.default_rng(1).permutation(len(table))]
    return torch.from_numpy(table[:, :64] / 16), torch.from_numpy(table[:, 64]).long()


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def rows_of(step: int, rank: int, ranks: int, count: int) -> torch.Tensor:
    """The rows of this rank's share of a batch. They depend on the step alone: a step that is repeated is the same."""
    random = torch.Generator().manual_seed(step)
    return torch.randint(0, count - HELD_OUT, (BATCH,), generator=random)[rank::ranks]


def accuracy(model: torch.nn.Module) -> float:
    images, labels = digits()
    with torch.no_grad():
        return float((model(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]).float().mean())


def digest(model: torch.nn.Module) -> str:
    whole = hashlib.sha256()
    for value in model.state_dict().values():
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()


def train(
    steps: int,
    checkpoint_dir: str | None = None,
    before_step: Callable[[int, pserver.Client], None] | None = None,
    servers: int | Literal["colocated"] = 2,
) -> tuple[int, torch.nn.Module]:
    """Trains; returns the rank and the model."""
    images, labels = digits()
    model = network()
    with pserver.connect(servers=servers, checkpoint_dir=checkpoint_dir) as client:
        optimizer = Optimizer(model.parameters(), "adam", lr=0.01)
        # 0, unless an earlier process of this rank was ended. The weights are those of this step or a later one.
        first = client.resume_rounds()
        optimizer.fetch_weights()
        for step in range(first, steps):
            if before_step is not None:
                before_step(step, client)
            rows = rows_of(step, client.trainer, client.trainers, len(images))
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return client.trainer, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--colocated", action="store_true", help="a server on each host")
    given = parser.parse_args()
    rank, model = train(given.steps, given.checkpoint_dir, servers="colocated" if given.colocated else 2)
    if rank == 0:
        print(f"accuracy {accuracy(model):.3f} weights {digest(model)}")
