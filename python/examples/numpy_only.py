"""A line through points, in NumPy alone: two trainers in threads, each with half of the points.

python python/examples/numpy_only.py
"""

import argparse
import threading

import numpy

import pserver

CONFIG = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }"
WEIGHTS, BIAS = numpy.array([2.0, -1.0, 0.5], numpy.float32), 0.25


def train(address: str, rank: int, steps: int) -> dict[str, numpy.ndarray]:
    """Trains on this rank's points; returns the parameters."""
    random = numpy.random.default_rng(rank)
    points = random.standard_normal((500, 3)).astype(numpy.float32)
    targets = points @ WEIGHTS + BIAS
    with pserver.connect(address, trainer=rank) as client:
        client.init_all({"w": numpy.zeros(3, numpy.float32), "b": numpy.zeros(1, numpy.float32)}, CONFIG)
        values = client.pull(["w", "b"])
        for _ in range(steps):
            errors = points @ values["w"] + values["b"] - targets
            gradients = {"w": 2 * errors @ points / 500, "b": 2 * errors.mean(keepdims=True)}
            values = client.push_pull(gradients)
        return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with pserver.Servers(trainers=2) as servers:
        other = threading.Thread(target=train, args=(servers.address, 1, steps))
        other.start()
        found = train(servers.address, 0, steps)
        other.join()
    print(f"w {found['w'].round(3).tolist()} b {found['b'].round(3).tolist()}")
