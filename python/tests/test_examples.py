"""The examples, with their results."""

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_torchrun import results, torchrun

import pserver

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS_MAX = 300


def output_of(name: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_numpy_alone_finds_the_line(tmp_path: Path) -> None:
    assert output_of("numpy_only.py", folder=tmp_path) == "w [2.0, -1.0, 0.5] b [0.25]\n"


def test_words_of_the_text_predict_their_neighbours(tmp_path: Path) -> None:
    words, share = output_of("words.py", folder=tmp_path).split(" words, neighbours score higher than others in ")
    # A model that has learned nothing has 0.5; the pairs are 70,000.
    assert words == "12544" and float(share.split()[0]) > 0.62


def test_a_loop_of_kvstores_finds_servers_by_its_launchers_variables(tmp_path: Path) -> None:
    with pserver.Servers(trainers=2) as servers:
        host, _, port = servers.address.rpartition(":")
        job = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "2"}
        command = [sys.executable, str(EXAMPLES / "kvstore.py")]
        environments = [{**os.environ, **job, "DMLC_WORKER_ID": str(rank)} for rank in range(2)]
        pipe = subprocess.PIPE
        workers = [subprocess.Popen(command, env=one, stdout=pipe, stderr=pipe, text=True) for one in environments]
        outputs = [worker.communicate(timeout=SECONDS_MAX) for worker in workers]
    for rank, (output, errors) in enumerate(outputs):
        assert output.startswith(f"trainer {rank} of 2: accuracy ") and errors == ""
        assert float(output.split()[-1]) > 0.92, output


def test_diloco_of_two_ranks_is_that_of_torch_alone(tmp_path: Path) -> None:
    output = torchrun("--standalone", EXAMPLES / "diloco.py", folder=tmp_path)
    words = results(output)[0].split()
    assert float(words[1]) > 0.95 and float(words[5]) < 1e-4, output


async def run_cells(texts: list[str]) -> dict[str, Any]:
    """Runs the cells as a notebook does: in one space of names, within an event loop, where a cell may await."""
    names: dict[str, Any] = {}
    for text in texts:
        code = compile(text, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    return names


def test_the_cells_of_the_notebook_run() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    names = asyncio.run(run_cells(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]))
    assert abs(names["out"]).max() < 0.1
    assert [(one.name, one.version) for one in names["parameters"]] == [("w", 201)]
