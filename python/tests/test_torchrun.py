"""Jobs of torchrun: which rank starts servers, how ranks find them, and the result after a kill."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from needs import need_torch
from ports import free_ports
from processes import processes_of

import pserver

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
SECONDS_MAX = 300


def torchrun(*arguments: Any, folder: Path, agents: Sequence[Sequence[str]] = [("--nproc-per-node", "2")]) -> str:
    """Runs a job of these agents, of one with two ranks; returns its output. Nothing that it started is left."""
    need_torch()
    # The folder's name is in the environment of every process of the job.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PSERVER_TEST_FOLDER": str(folder)}

    def run(agent: Sequence[str]) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", *agent, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with ThreadPoolExecutor(len(agents)) as threads:
        said = "".join(threads.map(run, agents))
    while left := processes_of(folder):
        assert len(left) < 10
    return said


def results(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("accuracy")]


def test_digits_are_learned_by_ranks_whose_servers_rank_0_starts(tmp_path: Path) -> None:
    found = results(torchrun("--standalone", EXAMPLES / "digits.py", folder=tmp_path))
    assert len(found) == 1 and float(found[0].split()[1]) > 0.95, found
    # As two hosts: torchrun's store is at the first agent's address, and servers listen there.
    port = free_ports(1)[0]
    shared = ["--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [[*shared, "--node-rank", "0"], [*shared, "--node-rank", "1"]]
    assert results(torchrun(EXAMPLES / "digits.py", folder=tmp_path, agents=agents)) == found
    # A server below each agent, which a rank that is started again finds: the same weights.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", "1"]
    agent = ["--nproc-per-node", "1", "--nnodes", "2", "--local-addr", "127.0.0.1", "--max-restarts", "1", *rendezvous]
    output = torchrun(HERE / "colocated.py", folder=tmp_path, agents=[agent, agent])
    lines = output.splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0: [0]", "rank 1: [1]"], output
    assert len([line for line in lines if line.startswith("killed")]) == 1, output
    assert results(output) == found


def test_kills_of_ranks_and_servers_leave_the_result_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = torchrun("--standalone", HERE / "killed.py", "", "no", folder=tmp_path)
    restarts = ["--max-restarts", "6"]
    output = torchrun(
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        *restarts,
        HERE / "killed.py",
        "checkpoints",
        "kill",
        folder=tmp_path,
    )
    assert len([line for line in output.splitlines() if line.startswith("killed")]) == 5, output
    assert results(output) == results(undisturbed) and len(results(output)) == 1


def test_missing_variables_of_torchrun_are_named(monkeypatch: Any) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("RANK", "0")
    text = "TORCHELASTIC_RUN_ID is set and MASTER_ADDR, MASTER_PORT, LOCAL_RANK not"
    with pytest.raises(pserver.Refused, match=text):
        pserver.connect(servers="colocated")
