"""Measuring by turns: whatever slows the machine down slows every contestant alike."""

import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def say_where(blocks: int) -> None:
    """What was measured, and on which machine."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{model[1] if model else 'processor unknown'}, {cores} cores, load {load:.1f}, torch {torch.__version__}")
    print(f"medians (quartiles) of {blocks} blocks by turns", flush=True)


def by_turns(contestants: dict[str, Callable[[int], float]], blocks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a round of each contestant, block by block. A contestant runs so many rounds and says how long they
    took. The order turns from block to block; the first block warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for block in range(blocks + 1):
        for name in names[block % len(names) :] + names[: block % len(names)]:
            took = contestants[name](rounds)
            if block > 0:
                seconds[name].append(took / rounds)
    return seconds


def timed(step: Callable[[], object]) -> Callable[[int], float]:
    """A contestant that repeats a step."""

    def run(rounds: int) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            step()
        return time.perf_counter() - start

    return run


def ratio(ones: list[float], others: list[float]) -> str:
    """The median of one/other of the blocks, and its quartiles."""
    return spread([one / other for one, other in zip(ones, others)], 2)


def spread(values: list[float], digits: int = 1) -> str:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def micros(seconds: list[float]) -> str:
    """The median and the quartiles in microseconds."""
    return spread([1e6 * one for one in seconds])
