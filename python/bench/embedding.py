"""Training steps of a table of embeddings on a server beside `torch.nn.EmbeddingBag(sparse=True)` in one process.

    python python/bench/embedding.py

The ids of a batch follow Zipf's law and lie in bags of 16, over a network of dense layers. The contestants take turns.
`wait` is the part of a step in which it waits for rows: their fetch, and the push that comes before it.
"""

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy
import torch

import pserver
from pserver.torch import EmbeddingBag, Optimizer
from turns import by_turns, ratio, say_where, spread, timed

EXPONENT, IDS, BAG, RATE = 1.05, 16384, 16, 0.01
BATCHES = 32
"""Batches that are used in turn."""
TOPS = {"one layer": [], "three layers": [512, 256]}
RULES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    options = parser.parse_args()
    batches = zipf(options.rows)
    say_where(options.blocks)
    for rule in options.rules:
        for top in TOPS:
            measure(options, rule, top, batches)


def zipf(rows: int) -> list[torch.Tensor]:
    """Batches of ids, the most frequent ones anywhere in the table."""
    random = numpy.random.default_rng(1)
    shares = numpy.cumsum(numpy.arange(1, rows + 1, dtype=numpy.float64) ** -EXPONENT)
    ranks = numpy.searchsorted(shares, random.random((BATCHES, IDS)) * shares[-1])
    ids = ranks * 1_000_003 % rows
    return [torch.from_numpy(batch.reshape(-1, BAG)) for batch in ids]


def measure(options: argparse.Namespace, rule: str, top: str, batches: list[torch.Tensor]) -> None:
    """One rule and one network: torch, and this package without and with prefetch, each with a server of its own."""
    theirs = Model(torch.nn.EmbeddingBag(options.rows, options.width, mode="sum", sparse=True), options.width, top)
    torch.nn.init.zeros_(theirs.table.weight)
    contestants = {"torch": timed(Steps(theirs, RULES[rule](theirs.parameters(), RATE), batches))}
    runs = {}
    with ExitStack() as open_things:
        for name in ["ours", "prefetch"]:
            servers = open_things.enter_context(pserver.Servers(1))
            client = open_things.enter_context(pserver.Client(f"{options.transport}://{servers.address}"))
            table = EmbeddingBag(options.rows, options.width, mode="sum", initial="constant { value: 0 }")
            model = Model(table, options.width, top)
            optimizer = Optimizer(model.named_parameters(), rule, RATE, client=client)
            runs[name] = Steps(model, optimizer, batches, prefetches=name == "prefetch")
            contestants[name] = timed(runs[name])
        seconds = by_turns(contestants, options.blocks, BATCHES)
        print(f"{rule}, {top}:")
        for name, took in seconds.items():
            print(f"  {name:8} {spread([1 / one for one in took])} steps a second, torch/it {ratio(seconds['torch'], took)}")
        for name, run in runs.items():
            print(f"  {name}: waits for rows in {run.waited / run.seconds:.1%} of the time")
            with torch.no_grad():
                torch.testing.assert_close(run.model(batches[0]), theirs(batches[0]), rtol=0, atol=0.02)


class Steps:
    """Steps of training. Called, it does one, and starts to fetch what the next needs where it prefetches."""

    def __init__(
        self,
        model: "Model",
        optimizer: torch.optim.Optimizer,
        batches: list[torch.Tensor],
        prefetches: bool = False,
    ) -> None:
        self.model, self.optimizer, self.batches, self.prefetches = model, optimizer, batches, prefetches
        self.number = 0
        self.seconds = self.waited = 0.0
        self.before = getattr(model.table, "seconds_waited", 0.0)

    def __call__(self) -> None:
        start = time.perf_counter()
        ids = self.batches[self.number % BATCHES]
        self.number += 1
        out = self.model(ids)
        if self.prefetches:
            self.model.table.prefetch(self.batches[self.number % BATCHES])
        (out - 1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - start
        self.waited = getattr(self.model.table, "seconds_waited", 0.0) - self.before


class Model(torch.nn.Module):
    def __init__(self, table: Any, width: int, top: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = table
        sizes = [width, *TOPS[top], 1]
        layers: list[torch.nn.Module] = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        self.rest = torch.nn.Sequential(*layers[:-1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rest(self.table(ids))


if __name__ == "__main__":
    main()
