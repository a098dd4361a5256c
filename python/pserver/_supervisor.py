"""The process that has the servers of a job under torchrun: ``python -m pserver._supervisor``.

Rank 0 starts it, and the first rank of each host where servers are colocated, with settings on standard input. It
outlives that rank, which torchrun may kill and start again, and ends with torchrun's agent. It prints one line: a JSON
object with server 0's address, the job's token, and where a server of this process listens.
"""

import json
import logging
import os
import secrets
import select
import signal
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

from ._servers import Servers


def main(settings: dict[str, Any]) -> None:
    """Serves until the process ``agent`` has ended, or a server that is not started again."""
    agent = os.pidfd_open(settings.pop("agent"))
    level = settings.pop("log_level")
    if level is not None:
        logging.basicConfig(level=level, format="%(message)s")
    signal.signal(signal.SIGTERM, _exit)
    joins = settings.pop("joins", {})
    token = joins.get("token") or secrets.token_hex(32)
    if joins:
        settings["coordinator"] = joins["address"]
    with tempfile.TemporaryDirectory(prefix="pserver-") as folder:
        path = os.path.join(folder, "token")
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        with Servers(**{**settings, "arguments": ["--token-file", path, *settings["arguments"]]}) as servers:
            found = {"address": servers.address, "token": token, "listens": servers.addresses[0]}
            print(json.dumps(found), flush=True)
            # Rank 0 may end, and with it the other end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ended, ends = os.pipe()

            def follow() -> None:
                servers.wait()
                os.write(ends, b"x")

            threading.Thread(target=follow, daemon=True).start()
            select.select([agent, ended], [], [])


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main(json.load(sys.stdin))
