"""The example of digits with a server on each host: torchrun starts it, and rank 1 is killed once.

Not here: the comparison with servers that rank 0 starts (`test_torchrun.py`).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from digits import accuracy, digest, train  # noqa: E402
from killed import kill, parent  # noqa: E402

import pserver  # noqa: E402

STEPS, KILLED = 300, 150


def before_step(step: int, client: pserver.Client) -> None:
    if step == 0:
        print(f"rank {client.trainer}: {servers_of(os.getppid())}", flush=True)
    if (step, client.trainer, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (KILLED, 1, "0"):
        kill(os.getpid())


def servers_of(agent: int) -> list[int]:
    """The indices of the servers that ranks of an agent have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"--until-stdin-closes" in words and agent in above(int(path.parent.name)):
            found.append(int(words[words.index(b"--index") + 1]))
    return sorted(found)


def above(process: int) -> list[int]:
    """The processes above one."""
    found = []
    while process > 1:
        process = parent(process)
        found.append(process)
    return found


if __name__ == "__main__":
    rank, model = train(STEPS, None, before_step, "colocated")
    if rank == 0:
        print(f"accuracy {accuracy(model):.3f} weights {digest(model)}")
