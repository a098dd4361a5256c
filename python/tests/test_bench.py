"""The measurements of the report, in small: that they run, and that contestants compute the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need_torch

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 120


def output_of(name: str, *arguments: str) -> str:
    need_torch()
    command = [sys.executable, str(ROOT / "python/bench" / name), "--blocks", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed")
def test_calls_are_compared_with_c() -> None:
    said = output_of("calls.py", "--library", str(ROOT / "target/debug"), "--transports", "shm")
    assert said.count("torch") == 4 and said.count("beside C") == 6


def test_steps_are_compared_with_ddp() -> None:
    said = output_of("ddp.py", "--transports", "shm", "--cases", "100 x 1 KiB")
    assert "step of DDP / ours, overlap" in said and "exchange of gloo / ours" in said


def test_tables_are_compared_with_torchs() -> None:
    said = output_of("embedding.py", "--rows", "1000", "--rules", "adagrad")
    assert said.count("waits for rows") == 4


def test_bits_on_a_device_are_compared_with_those_on_the_host() -> None:
    figures = [json.loads(line) for line in output_of("device_check.py", "--device", "cpu").splitlines()]
    assert len(figures) == 14 and all(figure["wrong"] == 0 for figure in figures)


def test_steps_on_a_device_are_compared_with_the_link() -> None:
    said = output_of("device_step.py", "--elements", "1000", "--device", "cpu")
    figures = [json.loads(line) for line in said.splitlines()]
    assert [sorted(figure) for figure in figures[:2]] == [["name", "seconds"]] * 2
    assert figures[2]["ratio_to_ceiling"] > 0 and "server on cpu" in figures[2]["name"]
