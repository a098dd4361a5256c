"""Skip-gram with negative sampling on the text of the King James Bible: two tables, of which a step moves a few rows.

    python python/examples/words.py

A word predicts its neighbours, and not words drawn at random (Mikolov et al., 2013). The trainer has no table in
memory: it fetches the rows of a batch and sends their gradients. The last line says how often a pair of neighbours has
a higher score than a pair drawn at random, in verses that were held out.
"""

import argparse
import gzip
import re
from pathlib import Path

import numpy

import pserver

DATA = Path(__file__).parents[2] / "cli/data/kjv.txt.gz"
WIDTH, BATCH, NEGATIVES, WINDOW, HELD_OUT = 32, 2048, 4, 3, 1000
ROWS = "optimizer: Adagrad adagrad {{ epsilon: 1e-8 }} const_lr {{ learning_rate: {rate} }} sparse {{ {sparse} }}"


def pairs() -> tuple[numpy.ndarray, numpy.ndarray, list[str]]:
    """Pairs of neighbours to learn from, those of the last verses, and the words by their ids."""
    with gzip.open(DATA, "rt") as file:
        verses = [re.findall("[a-z]+", line.partition(" ")[2].lower()) for line in file]
    vocabulary = sorted({word for verse in verses for word in verse})
    ids = {word: number for number, word in enumerate(vocabulary)}

    def neighbours(some: list[list[str]]) -> numpy.ndarray:
        found = []
        for verse in some:
            words = numpy.array([ids[word] for word in verse], numpy.int64)
            for away in range(1, WINDOW + 1):
                found.append(numpy.stack([words[:-away], words[away:]], 1))
        return numpy.concatenate(found)

    return neighbours(verses[:-HELD_OUT]), neighbours(verses[-HELD_OUT:]), vocabulary


def scores(client: pserver.Client, chosen: numpy.ndarray) -> numpy.ndarray:
    """Scores of pairs."""
    centers = client.pull_rows("centers", numpy.ascontiguousarray(chosen[:, 0]))
    targets = client.pull_rows("targets", numpy.ascontiguousarray(chosen[:, 1]))
    return numpy.einsum("pw,pw->p", centers, targets)


def step(client: pserver.Client, chosen: numpy.ndarray, drawn: numpy.ndarray) -> None:
    """A step on pairs of neighbours, and as many words drawn at random for each as there are columns."""
    ids = numpy.concatenate([chosen[:, 1:], drawn], 1)
    centers = client.pull_rows("centers", numpy.ascontiguousarray(chosen[:, 0]))
    targets = client.pull_rows("targets", ids.ravel()).reshape(*ids.shape, WIDTH)
    errors = 1 / (1 + numpy.exp(-numpy.einsum("pw,ptw->pt", centers, targets)))
    errors[:, 0] -= 1
    of_centers = numpy.einsum("pt,ptw->pw", errors, targets)
    of_targets = errors[:, :, None] * centers[:, None, :]
    client.push_rows("centers", numpy.ascontiguousarray(chosen[:, 0]), of_centers)
    client.push_rows("targets", ids.ravel(), of_targets.reshape(-1, WIDTH))


def main(steps: int) -> None:
    learned, held_out, vocabulary = pairs()
    random = numpy.random.default_rng(1)
    with pserver.connect(servers=2) as client:
        if client.begin_init():
            size = f"height: {len(vocabulary)} width: {WIDTH}"
            client.init_rows("centers", ROWS.format(rate=0.1, sparse=f"{size} uniform {{ low: -0.02 high: 0.02 }}"))
            client.init_rows("targets", ROWS.format(rate=0.1, sparse=size))
            client.finish_init()
        for _ in range(steps):
            chosen = learned[random.integers(0, len(learned), BATCH)]
            # A word of a pair drawn at random has the frequency that it has in the text.
            drawn = learned[random.integers(0, len(learned), (BATCH, NEGATIVES)), 1]
            step(client, chosen, drawn)
        at_random = numpy.stack([held_out[:, 0], random.permutation(held_out[:, 1])], 1)
        better = (scores(client, held_out) > scores(client, at_random)).mean()
        print(f"{len(vocabulary)} words, neighbours score higher than others in {better:.3f} of pairs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    main(parser.parse_args().steps)
