"""Jobs of launchers other than torchrun: each rank is found, is there once, and learns with the others."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from learns import learned
from processes import left_after, logs
from slurm import Slurm

import pserver

HERE = Path(__file__).parent
# A trainer that waits for another one gives up after 120 s, and names the missing trainer.
SECONDS_MAX = 180
END_SECONDS_MAX = 10
# Found: none. A processor may round a product and a sum once where numpy rounds both; weights are about 1.
DIFFERENCE_MAX = 1e-6


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
        # If the environment names servers, the launcher starts none.
        found = run(SHOW.replace("()", "(servers=1)", 1), **environment, PSERVER_COORDINATOR=servers.address)
        assert found.stdout == f"1 2 {servers.address}\n", found.stderr
    refused = run("import pserver; pserver.connect(servers=2)", **environment)
    assert "Refused: servers=2 in trainer 1 of 2" in refused.stderr and "pserver launch" in refused.stderr


@pytest.mark.parametrize("trainers", ["zero", "0", "-1"])
def test_an_invalid_number_of_trainers_is_refused(trainers: str) -> None:
    refused = run("import pserver; pserver.connect(servers=1)", PSERVER_TRAINERS=trainers)
    expected = f'Refused: PSERVER_TRAINERS is "{trainers}"; expected a number of trainers, 1 or more'
    assert refused.returncode == 1 and expected in refused.stderr, refused


def trainer(folder: Path) -> list[str]:
    """The command of a trainer that leaves its result in a folder."""
    return [sys.executable, str(HERE / "learns.py"), str(folder)]


def check_job(command: Sequence[str], folder: Path, **variables: str) -> list[str]:
    """Runs a job of two trainers in a folder. Each rank was there once, both have learned, and no process is left.

    Returns the Slurm step of each trainer, empty outside Slurm.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PSERVER_", "SLURM_"))}
    # The folder's name is in the environment of every process of the job.
    environment |= {"OMP_NUM_THREADS": "1", "PSERVER_TEST_FOLDER": str(folder), **variables}
    try:
        with open(folder / "output.log", "wb") as output, open(folder / "errors.log", "wb") as errors:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=errors, timeout=SECONDS_MAX
            )
        status = f"status {done.returncode}"
    except subprocess.TimeoutExpired:
        status = f"no end within {SECONDS_MAX} s"
    finally:
        left = left_after(END_SECONDS_MAX, folder)
    report = f"{command}: {status}{logs(folder)}"
    assert status == "status 0" and not left, f"{report}\nprocesses left: {left}"
    found = [dict(np.load(path)) for path in folder.glob("*.npz")]
    assert sorted(one["ranks"].tolist() for one in found) == [[0, 2], [1, 2]], f"{found}\n{report}"
    for one in found:
        np.testing.assert_allclose(one["weights"], learned(2), rtol=0, atol=DIFFERENCE_MAX, err_msg=report)
    return [str(one["step"]) for one in found]


def test_a_job_of_pserver_launch_has_every_rank_once(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "pserver", "launch", "--servers", "2", "--trainers", "2", "--"]
    check_job([*launch, *trainer(tmp_path)], tmp_path)


@pytest.mark.parametrize("launcher", ["mpirun.openmpi", "mpirun.mpich"])
def test_a_job_of_mpirun_beside_servers_has_every_rank_once(launcher: str, tmp_path: Path) -> None:
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    more = ["--allow-run-as-root", "--oversubscribe"] if launcher.endswith("openmpi") else []
    with pserver.Servers(trainers=2) as servers:
        command = [launcher, *more, "-n", "2", *trainer(tmp_path)]
        check_job(command, tmp_path, PSERVER_COORDINATOR=servers.address)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.stop()


def test_a_job_of_srun_beside_servers_has_every_rank_once(slurm: Slurm, tmp_path: Path) -> None:
    with pserver.Servers(2, trainers=2) as servers:
        command = ["srun", "--ntasks=2", *trainer(tmp_path)]
        steps = check_job(command, tmp_path, **slurm.environment, PSERVER_COORDINATOR=servers.address)
    assert steps == ["0", "0"]


def test_a_job_of_pserver_launch_in_an_allocation_has_every_rank_once(slurm: Slurm, tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs/LAUNCH.md").read_text()
    # The script for sbatch, whose --wait looks every ten seconds: salloc runs the same at once.
    script = page[page.index("    #!/bin/sh\n") :].split("\n\n")[0]
    own = {"./trainer arguments": shlex.join(trainer(tmp_path)), "--trainers 4": "--trainers 2"}
    for words, others in own.items():
        assert words in script, script
        script = script.replace(words, others)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["salloc", "--quiet", "--ntasks=2", "sh", "-c", script]
    steps = check_job(command, tmp_path, **slurm.environment, PATH=path)
    # Servers and trainers are a step each.
    assert steps in (["0", "0"], ["1", "1"])
