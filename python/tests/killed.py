"""The example of digits with faults: torchrun starts it, and it kills ranks and servers in mid-epoch.

Not here: the comparison with an undisturbed run (`test_torchrun.py`).
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from digits import accuracy, digest, train  # noqa: E402

import pserver  # noqa: E402

STEPS = 60
SERVER_KILLED, SERVERS_KILLED, RANKS_KILLED = 20, 30, {10: 1, 40: 0}


def before_step(step: int, client: pserver.Client) -> None:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for count, (at, rank) in enumerate(RANKS_KILLED.items()):
        if (step, client.trainer, restarts) == (at, rank, count):
            kill(os.getpid())
    if client.trainer == 0 and step == SERVER_KILLED:
        kill(servers(client)[1])
    if client.trainer == 0 and step == SERVERS_KILLED:
        for process in servers(client):
            kill(process)


def kill(process: int) -> None:
    print(f"killed {process}", flush=True)
    os.kill(process, signal.SIGKILL)


def servers(client: pserver.Client) -> list[int]:
    """The processes of the job's servers: server 1 names server 0's address, and one process has started both."""
    lines = {int(path.parent.name): path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    serving = {process: line for process, line in lines.items() if b"--until-stdin-closes" in line}
    address = client.coordinator.encode()
    last = next(process for process, line in serving.items() if any(word.endswith(address) for word in line))
    first = next(process for process in serving if parent(process) == parent(last) and process != last)
    return [first, last]


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


if __name__ == "__main__":
    rank, model = train(STEPS, sys.argv[1] or None, before_step if sys.argv[2] == "kill" else None)
    if rank == 0:
        print(f"accuracy {accuracy(model):.3f} weights {digest(model)}")
