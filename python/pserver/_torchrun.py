"""Servers of a job that torchrun started: rank 0 starts them, and the store of torchrun says where they are. Colocated
ones are started by the first rank of each host, after the one of rank 0.

torchrun kills and starts all trainers when one fails. So the servers belong to a process of their own
(:mod:`pserver._supervisor`), which ends with torchrun's agent; a rank that was started again finds them in the store.
"""

import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from ._errors import Error, Refused, Timeout
from ._servers import READY_SECONDS, STOP_SECONDS, _log

SERVER_ABSENCE_SECONDS = 10.0
"""So long servers may be away that rank 0 finds in the store: one that was killed is started again."""
RANK_GRACE_SECONDS = 60
RUN = "TORCHELASTIC_RUN_ID"
OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK")
"""Other variables that torchrun sets."""
SUPERVISOR = "pserver._supervisor"
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
    if lacking := [name for name in OF_TORCHRUN if name not in environment]:
        raise Refused(f"{RUN} is set and {', '.join(lacking)} not; expected all variables of torchrun, or none")
    hosts, host = int(environment.get("GROUP_WORLD_SIZE", "1")), int(environment.get("GROUP_RANK", "0"))
    is_colocated = settings["count"] is None
    if is_colocated:
        settings = {**settings, "count": hosts, "index": 0}
    store = _store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    jobs = _Jobs(store, f"pserver/{environment[RUN]}/{_started}", settings["count"] if is_colocated else 1)
    if environment["RANK"] == "0":
        return jobs.find() or jobs.start(settings)
    found = jobs.wait()
    if is_colocated and host > 0 and environment["LOCAL_RANK"] == "0":
        jobs.join(found, {**settings, "index": host, "joins": found})
    return found


class _Jobs:
    """The jobs that one call has started, in torchrun's store: of each the token, and where its servers listen.

    Agents count restarts of their own, so nothing in the store is of this restart. Every rank takes the last job if all
    of its servers are there that have been. Rank 0 starts another one otherwise, for which the others wait.
    """

    def __init__(self, store: Any, key: str, supervisors: int) -> None:
        self._store, self._key, self._supervisors = store, key, supervisors

    def find(self) -> dict[str, str] | None:
        if not self._store.check([self._key]):
            return None
        found = _read(self._store.get(self._key))
        if int(found["supervisors"]) != self._supervisors:
            first = found["supervisors"]
            raise Error(f"colocated servers on {self._supervisors} hosts; expected {first}, as at the job's start")
        joined = [self._joined(found, host) for host in range(1, self._supervisors)]
        listens = [found["listens"]] + [self._store.get(key).decode() for key in joined if self._store.check([key])]
        return found if all(map(_is_there, listens)) else None

    def wait(self) -> dict[str, str]:
        limit = timedelta(seconds=2 * READY_SECONDS)
        text = f"within {limit.seconds} s"
        if not self._store.check([self._key]):
            try:
                self._store.wait([self._key], limit)
            except Exception as error:
                raise Timeout(f"rank 0 has started no servers {text}: {error}") from None
            # It has started them just now.
            return _read(self._store.get(self._key))
        end = time.monotonic() + limit.seconds
        while time.monotonic() < end:
            if (found := self.find()) is not None:
                return found
        address = _read(self._store.get(self._key))["address"]
        gone = f"a server of the job at {address} is gone or cannot be reached from here"
        raise Timeout(f"{gone}, and rank 0 has started no other job {text}")

    def start(self, settings: dict[str, Any]) -> dict[str, str]:
        found = {**self._supervise(settings), "supervisors": str(self._supervisors)}
        self._store.set(self._key, json.dumps(found))
        return found

    def join(self, job: dict[str, str], settings: dict[str, Any]) -> None:
        key = self._joined(job, settings["index"])
        if not self._store.check([key]):
            self._store.set(key, self._supervise(settings)["listens"])

    def _joined(self, job: dict[str, str], host: int) -> str:
        return f"{self._key}/{job['token']}/{host}"

    def _supervise(self, settings: dict[str, Any]) -> dict[str, str]:
        """Starts servers of this host; ends those of an earlier job first, which may have the same folders."""
        agent = _agent()
        key = f"{self._key}/{_boot()}/{agent}"
        if self._store.check([key]):
            _end(int(self._store.get(key)))
        process, found = _start({**settings, "agent": agent})
        self._store.set(key, str(process))
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


def _start(settings: dict[str, Any]) -> tuple[int, dict[str, str]]:
    given = dict(settings, host=_own_address("joins" in settings))
    # A trainer that torchrun starts again needs its time to import torch.
    if "--rank-grace-seconds" not in settings["arguments"]:
        given["arguments"] = [*settings["arguments"], "--rank-grace-seconds", str(RANK_GRACE_SECONDS)]
    # The process has no logging of the program's, so its lines go to standard error if the program has a handler.
    has_handler = any(not isinstance(one, logging.NullHandler) for one in logging.getLogger().handlers + _log.handlers)
    given["log_level"] = _log.getEffectiveLevel() if has_handler else None
    command = [sys.executable, "-m", SUPERVISOR]
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
    return process.pid, _read(line)


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _end(supervisor: int) -> None:
    """Ends a supervisor of this host with its servers, unless it has ended."""
    try:
        handle = os.pidfd_open(supervisor)
    except ProcessLookupError:
        return
    with os.fdopen(handle, closefd=True), open(f"/proc/{supervisor}/cmdline", "rb") as file:
        # Another process may have its number by now.
        if SUPERVISOR.encode() in file.read():
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            select.select([handle], [], [], 2 * STOP_SECONDS)


def _own_address(is_elsewhere: bool) -> str:
    """Where a server listens: server 0 at ``MASTER_ADDR``, another at this host's address on the way there."""
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return "127.0.0.1"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if is_elsewhere:
        with socket.create_connection((address, port), READY_SECONDS) as connection:
            address = str(connection.getsockname()[0])
    return f"[{address}]" if ":" in address else address


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
