"""Servers that a program starts for itself and that end with it."""

import atexit
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from ._errors import Error, Timeout

READY_SECONDS = 30.0
STOP_SECONDS = 10.0


class Servers:
    """Servers on this machine. They end with :meth:`stop`, with the program, or when the program is killed."""

    address: str
    """Where server 0 listens."""

    def __init__(
        self, count: int = 1, *, trainers: int = 1, mode: str = "sync", arguments: Sequence[str] = ()
    ) -> None:
        if count < 1:
            raise ValueError(f"{count} servers; expected 1 or more")
        self._process = os.getpid()
        self._children: list[subprocess.Popen[bytes]] = []
        atexit.register(self.stop)
        try:
            self.address = self._start(0, count, ["--trainers", str(trainers), "--mode", mode, *arguments])
            for index in range(1, count):
                self._start(index, count, ["--coordinator", self.address, *arguments])
        except BaseException:
            self.stop()
            raise

    def _start(self, index: int, count: int, arguments: list[str]) -> str:
        command = [sys.executable, "-m", "pserver", "serve", "--index", str(index), "--servers", str(count)]
        command += ["--bind", "127.0.0.1:0", "--until-stdin-closes"]
        if "--log-level" not in arguments:
            command += ["--log-level", "warn"]
        command += arguments
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=None)
        self._children.append(child)
        return _ready(child, index)

    def stop(self) -> None:
        """Ends the servers, each after a last checkpoint. A second time has no effect."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.stop)
        children, self._children = self._children, []
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        for child in children:
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _ready(child: "subprocess.Popen[bytes]", index: int) -> str:
    """Waits for the line in which a server says where it listens."""
    assert child.stdout is not None
    end = time.monotonic() + READY_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            raise Timeout(f"server {index} was not ready within {READY_SECONDS:.0f} s")
        more = os.read(child.stdout.fileno(), 4096)
        if not more:
            raise Error(f"server {index} ended with status {child.wait()} before it was ready; its log says why")
        line += more
    word, _, address = line.decode().strip().partition(" ")
    if word != "ready":
        raise Error(f"server {index} said {line!r}; expected the word ready and its address")
    return address
