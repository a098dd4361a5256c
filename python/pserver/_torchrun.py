"""Servers of a job that torchrun started: rank 0 starts them, and the store of torchrun says where they are. Colocated
ones are started by the first rank of each host, after the one of rank 0.

torchrun kills and starts all trainers when one fails. So the servers belong to a process of their own
(:mod:`pserver._supervisor`), which ends with torchrun's agent; a rank that was started again finds them in the store.
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
    """Address and token of the job's servers, which are started unless they run already. ``count`` is their number, or
    none for one on each host."""
    global _started
    _started += 1
    environment = os.environ
    hosts, host = int(environment.get("GROUP_WORLD_SIZE", "1")), int(environment.get("GROUP_RANK", "0"))
    is_colocated = settings["count"] is None
    if is_colocated:
        settings = {**settings, "count": hosts, "index": 0}
    store = _store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    key = f"pserver/{environment[RUN]}/{_started}"
    if environment["RANK"] == "0":
        return _find_or_start(store, key, settings)
    found = _found(store, key)
    if is_colocated and host > 0 and environment["LOCAL_RANK"] == "0":
        _find_or_start(store, f"{key}/server-{host}", {**settings, "index": host, "joins": found})
    return found


def _found(store: Any, key: str) -> dict[str, str]:
    """What rank 0 has found or started. Agents count restarts of their own, so nothing in the store is of this one: the
    servers of an earlier start that are gone are those that rank 0 replaces."""
    limit = 2 * READY_SECONDS
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=left))
        except Exception as error:
            raise Timeout(f"rank 0 has started no servers within {limit:.0f} s: {error}") from None
        found = _read(store.get(key))
        if _is_there(found["listens"]):
            return found
    raise Timeout(f"the servers at {found['listens']} are gone, and rank 0 has started no others within {limit:.0f} s")


def _find_or_start(store: Any, key: str, settings: dict[str, Any]) -> dict[str, str]:
    """What the supervisor of servers said that an earlier process started, if they are still there, else a new one."""
    if store.check([key]):
        found = _read(store.get(key))
        if _is_there(found["listens"]):
            return found
    found = _start(settings)
    store.set(key, json.dumps(found))
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
    given = dict(settings, host=_own_address("joins" in settings), agent=_agent())
    # A trainer that torchrun starts again needs its time to import torch.
    if "--rank-grace-seconds" not in settings["arguments"]:
        given["arguments"] = [*settings["arguments"], "--rank-grace-seconds", str(RANK_GRACE_SECONDS)]
    # The process has no logging of the program's, so its lines go to standard error if the program has a handler.
    has_handler = any(not isinstance(one, logging.NullHandler) for one in logging.getLogger().handlers + _log.handlers)
    given["log_level"] = _log.getEffectiveLevel() if has_handler else None
    command = [sys.executable, "-m", "pserver._supervisor"]
    # In a session of its own: torchrun ends a trainer with its whole group.
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    # The settings have the token of a job that a server joins: nobody else is to read it.
    with process.stdin:
        process.stdin.write(json.dumps(given).encode())
    with process.stdout:
        line = process.stdout.readline()
    if not line:
        raise Error(f"the servers' supervisor ended with status {process.wait()}; standard error says why")
    # It ends with torchrun; this process never waits for it.
    process.returncode = 0
    return _read(line)


def _own_address(is_elsewhere: bool) -> str:
    """Where a server listens: server 0 at ``MASTER_ADDR``, another at this host's address on the way there."""
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return "127.0.0.1"
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not is_elsewhere:
        return first
    with socket.create_connection((first, port), READY_SECONDS) as connection:
        own = str(connection.getsockname()[0])
    return f"[{own}]" if ":" in own else own


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
