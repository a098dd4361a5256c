"""The loop of a user of MXNet's kvstore (or of ps-lite), moved over. The right side is what this program does.

    kv = mx.kv.create("dist_sync")                client = pserver.connect()
    kv.rank, kv.num_workers                       client.trainer, client.trainers
    kv.set_optimizer(mx.optimizer.SGD(0.5))       a configuration, given with the first values
    kv.init("w", w)                               client.init_all({"w": w}, CONFIG)
    kv.push("w", g); kv.pull("w", out=w)          client.push_pull({"w": g}, {"w": w})
    kv.row_sparse_pull("t", out, row_ids=ids)     client.pull_rows("t", ids, out)
    kv.barrier()                                  pulls of a version: client.pull(["w"], version=n)

Servers and trainers find each other by the variables ``DMLC_...`` of ps-lite's launchers, as they are. Gradients are
averaged over the trainers, where kvstore adds them (``pserver serve --merge sum`` adds them too).
"""

import gzip
from pathlib import Path

import numpy

import pserver

DATA = Path(__file__).parents[2] / "cli/data/digits.csv.gz"
CONFIG = "optimizer: SGD const_lr { learning_rate: 0.5 }"
STEPS, BATCH, HELD_OUT = 200, 64, 300


def main() -> None:
    """Softmax regression on the digits."""
    with gzip.open(DATA, "rt") as file:
        table = numpy.random.default_rng(1).permutation(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    pixels, labels = table[:, :64] / 16, table[:, 64].astype(int)
    with pserver.connect() as client:
        weights = {"w": numpy.zeros((64, 10), numpy.float32), "b": numpy.zeros(10, numpy.float32)}
        client.init_all(weights, CONFIG)
        client.pull(weights)
        random = numpy.random.default_rng(client.trainer)
        for _ in range(STEPS):
            rows = random.integers(0, len(pixels) - HELD_OUT, BATCH)
            scores = numpy.exp(pixels[rows] @ weights["w"] + weights["b"])
            errors = scores / scores.sum(1, keepdims=True) - numpy.eye(10, dtype=numpy.float32)[labels[rows]]
            gradients = {"w": pixels[rows].T @ errors / BATCH, "b": errors.mean(0)}
            client.push_pull(gradients, weights)
        found = (pixels[-HELD_OUT:] @ weights["w"] + weights["b"]).argmax(1)
        accuracy = (found == labels[-HELD_OUT:]).mean()
        print(f"trainer {client.trainer} of {client.trainers}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
