"""A trainer of a launcher's job: it learns from its rank's points, and writes what it has found to a file of its own.

Not here: the launcher that starts it, and the comparison of its files with :func:`learned` (`test_launchers.py`).
"""

import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import pserver

STEPS, POINTS, RATE, MOMENTUM = 30, 100, 0.05, 0.9
CONFIG = f"optimizer: SGD sgd {{ momentum: {MOMENTUM} }} const_lr {{ learning_rate: {RATE} }}"
FIRST = np.array([3, 1, -2, 0.5], np.float32)


def gradient(weights: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    """That of the mean squared error at the points of a rank, whose targets differ from those of other ranks."""
    points = np.random.default_rng(rank).standard_normal((POINTS, len(weights)))
    errors = points @ weights - points.sum(axis=1) - rank
    return np.asarray(2 / POINTS * errors @ points, np.float32)


def learned(trainers: int) -> NDArray[np.float32]:
    """The weights that one process learns from the points of all ranks, without servers."""
    weights, velocity = FIRST, np.zeros_like(FIRST)
    for _ in range(STEPS):
        mean = np.mean([gradient(weights, rank) for rank in range(trainers)], axis=0)
        velocity = MOMENTUM * velocity - RATE * mean
        weights = weights + velocity
    return weights


def train(folder: Path) -> None:
    with pserver.connect() as client:
        client.init_all({"w": FIRST}, CONFIG)
        weights = client.pull(["w"])["w"]
        for _ in range(STEPS):
            weights = client.push_pull({"w": gradient(weights, client.trainer)})["w"]
        # Launchers forward output in pieces, so that lines of two ranks may be mixed.
        step, ranks = os.environ.get("SLURM_STEP_ID", ""), [client.trainer, client.trainers]
        np.savez(folder / f"{os.getpid()}.npz", ranks=ranks, weights=weights, step=step)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
