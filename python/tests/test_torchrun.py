"""Jobs of torchrun and of other launchers: who starts servers, who finds them, and what a kill leaves."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pserver

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
SECONDS_MAX = 300


def torchrun(*arguments: Any, folder: Path, agents: Sequence[Sequence[str]] = [("--nproc-per-node", "2")]) -> str:
    """Runs a job of these agents, of one with two ranks; returns its output. Nothing that it started is left."""
    pytest.importorskip("torch", reason="torch is not installed; `sh bench/peers/install.sh torch target/kits` has one")
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


def processes_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def results(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("accuracy")]


def test_digits_are_learned_by_ranks_whose_servers_rank_0_starts(tmp_path: Path) -> None:
    found = results(torchrun("--standalone", EXAMPLES / "digits.py", folder=tmp_path))
    assert len(found) == 1 and float(found[0].split()[1]) > 0.95, found
    # As two hosts: torchrun's store is at the first agent's address, and servers listen there.
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = ["--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [[*shared, "--node-rank", "0"], [*shared, "--node-rank", "1"]]
    assert results(torchrun(EXAMPLES / "digits.py", folder=tmp_path, agents=agents)) == found


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


def run(text: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", text], env={**os.environ, **environment}, capture_output=True, text=True
    )


SHOW = "import pserver\nwith pserver.connect() as client: print(client.trainer, client.trainers, client.coordinator)"


@pytest.mark.parametrize(
    "environment",
    [
        {"PSERVER_TRAINER": "1", "PSERVER_TRAINERS": "2"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_a_launchers_rank_is_found_and_its_trainers_start_no_servers_of_their_own(environment: dict[str, str]) -> None:
    with pserver.Servers(trainers=2) as servers:
        found = run(SHOW, **environment, PSERVER_COORDINATOR=servers.address)
        assert found.stdout == f"1 2 {servers.address}\n", found.stderr
        # Where the environment names servers, none are started.
        found = run(SHOW.replace("()", "(servers=1)", 1), **environment, PSERVER_COORDINATOR=servers.address)
        assert found.stdout == f"1 2 {servers.address}\n", found.stderr
    refused = run("import pserver; pserver.connect(servers=2)", **environment)
    assert "Refused: servers=2 in trainer 1 of 2" in refused.stderr and "pserver launch" in refused.stderr


@pytest.mark.parametrize("launcher", ["pserver launch", "mpirun.openmpi", "mpirun.mpich"])
def test_a_job_of_a_launcher_has_every_rank_once(launcher: str) -> None:
    program = [sys.executable, "-P", "-c", SHOW.replace("print(", "print('rank', ")]
    if launcher == "pserver launch":
        command = [sys.executable, "-m", "pserver", "launch", "--servers", "2", "--trainers", "2", "--", *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    elif shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    else:
        more = ["--allow-run-as-root", "--oversubscribe"] if launcher.endswith("openmpi") else []
        with pserver.Servers(trainers=2) as servers:
            environment = {**os.environ, "PSERVER_COORDINATOR": servers.address}
            command = [launcher, *more, "-n", "2", *program]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    ranks = [line.split("rank ")[1].split()[:2] for line in done.stdout.splitlines() if "rank " in line]
    assert sorted(ranks) == [["0", "2"], ["1", "2"]], done.stdout
