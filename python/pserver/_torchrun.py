"""Servers of a job that torchrun started: rank 0 starts them, and the store of torchrun says where they are.

torchrun kills and starts all trainers when one fails. So the servers belong to a process of their own
(:mod:`pserver._supervisor`), which ends with torchrun's agent; a rank 0 that was started again finds them in the store.
"""

import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from ._errors import Error, Timeout
from ._servers import READY_SECONDS, _log

SERVER_ABSENCE_SECONDS = 10.0
"""So long servers may be away that rank 0 finds in the store: one that was killed is started again."""
RANK_GRACE_SECONDS = 60
RUN = "TORCHELASTIC_RUN_ID"
_started = 0
"""How often this process has asked for servers: each time the job gets others."""


def is_worker() -> bool:
    """Whether torchrun started this process."""
    return RUN in os.environ


def servers(settings: dict[str, Any]) -> dict[str, str]:
    """Address and token of the job's servers, which rank 0 starts unless they run already."""
    global _started
    _started += 1
    environment = os.environ
    store = _store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    key = f"pserver/{environment[RUN]}/{_started}"
    # After a restart the other ranks wait until rank 0 has looked whether the servers are still there.
    current = f"{key}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if environment["RANK"] != "0":
        try:
            store.wait([current], timedelta(seconds=2 * READY_SECONDS))
        except Exception as error:
            raise Timeout(f"rank 0 has started no servers within {2 * READY_SECONDS:.0f} s: {error}") from None
        return _read(store.get(current))
    if store.check([key]) and _is_there(_read(store.get(key))["address"]):
        found = _read(store.get(key))
    else:
        found = _start(settings)
        store.set(key, json.dumps(found))
    store.set(current, json.dumps(found))
    return found


def _read(value: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(value)
    return found


def _store(host: str, port: int) -> Any:
    distributed = importlib.import_module("torch.distributed")
    try:
        return distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=READY_SECONDS))
    except Exception as error:
        text = f"torchrun's store at {host}:{port} does not answer ({error}); expected a job of torchrun's"
        raise Error(f"{text}, or servers that run already: connect(address)") from None


def _is_there(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    end = time.monotonic() + SERVER_ABSENCE_SECONDS
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def _start(settings: dict[str, Any]) -> dict[str, str]:
    is_one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    given = dict(settings, host="127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"], agent=_agent())
    # A trainer that torchrun starts again needs its time to import torch.
    if "--rank-grace-seconds" not in settings["arguments"]:
        given["arguments"] = [*settings["arguments"], "--rank-grace-seconds", str(RANK_GRACE_SECONDS)]
    # The process has no logging of the program's, so its lines go to standard error if the program has a handler.
    has_handler = any(not isinstance(one, logging.NullHandler) for one in logging.getLogger().handlers + _log.handlers)
    given["log_level"] = _log.getEffectiveLevel() if has_handler else None
    command = [sys.executable, "-m", "pserver._supervisor", json.dumps(given)]
    # In a session of its own: torchrun ends a trainer with its whole group.
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    process = subprocess.Popen(command, stdin=null, stdout=pipe, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    if not line:
        raise Error(f"the servers' supervisor ended with status {process.wait()}; standard error says why")
    # It ends with torchrun; this process never waits for it.
    process.returncode = 0
    return _read(line)


def _agent() -> int:
    """torchrun's process: the first above this one that is no trainer, nor a program that a trainer started."""
    process = os.getppid()
    while process > 1:
        with open(f"/proc/{process}/environ", "rb") as file:
            if f"\0{RUN}=".encode() not in b"\0" + file.read():
                break
        with open(f"/proc/{process}/stat") as file:
            process = int(file.read().rsplit(")", 1)[1].split()[1])
    return process
