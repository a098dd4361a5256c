"""Servers that a program starts for itself and that end with it."""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from ._errors import Error, Timeout

READY_SECONDS = 30.0
STOP_SECONDS = 10.0
RESTART_SECONDS = 0.1
RESTARTS_MAX = 100
"""For each server: one that cannot stay up is not restarted for ever."""
LOG_LINES_KEPT = 5

LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
}
_log = logging.getLogger("pserver.server")
# Without a handler of the program's nothing is written.
logging.getLogger("pserver").addHandler(logging.NullHandler())


class Servers:
    """Servers on this machine. They end with :meth:`stop`, with the program, or when the program is killed.

    With ``checkpoint_dir`` a server that was killed is started again where it was, with all that it had acknowledged.
    With ``index`` only this one of the ``count`` servers is started; others than server 0 need its ``coordinator``.
    """

    address: str
    """Where server 0 listens."""
    addresses: list[str]
    """Where those listen that were started here."""

    def __init__(
        self,
        count: int = 1,
        *,
        trainers: int = 1,
        mode: str = "sync",
        checkpoint_dir: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        arguments: Sequence[str] = (),
        index: int | None = None,
        coordinator: str | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"{count} servers; expected 1 or more")
        if index is not None and not 0 <= index < count:
            raise ValueError(f"server {index} of {count}; expected an index from 0 to {count - 1}")
        if (coordinator is None) != (index is None or index == 0):
            raise ValueError("index and coordinator; expected both, to start another server than server 0")
        if isinstance(arguments, str):
            raise TypeError(f"a text of arguments; expected a list, {json.dumps(arguments.split())}")
        shared = ["--servers", str(count), *arguments]
        if checkpoint_dir is not None:
            shared += ["--checkpoint-dir", os.fspath(checkpoint_dir)]
        if "--log-level" not in arguments:
            shared += ["--log-level", _level()]
        self._process = os.getpid()
        self._children: list[_Server] = []
        self.address, self.addresses = coordinator or "", []
        atexit.register(self.stop)
        try:
            for each in range(count) if index is None else [index]:
                first = ["--trainers", str(trainers), "--mode", mode]
                own = first if each == 0 else ["--coordinator", self.address]
                child = _Server(each, [*own, *shared], checkpoint_dir is not None)
                self._children.append(child)
                self.addresses.append(child.start(f"{host}:0"))
                if each == 0:
                    self.address = self.addresses[0]
        except BaseException:
            self.stop()
            raise

    @property
    def processes(self) -> list[int]:
        """The ids of the servers' processes."""
        return [child.child.pid for child in self._children if child.child is not None]

    def wait(self) -> None:
        """Waits until a server has ended that is not started again."""
        children = self._children
        while children and not any(child.ended.wait(1.0 / len(children)) for child in children):
            pass

    def stop(self) -> None:
        """Ends the servers, each after a last checkpoint. A second time has no effect."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.stop)
        children, self._children = self._children, []
        for child in children:
            child.ask_to_stop()
        end = time.monotonic() + STOP_SECONDS
        for child in children:
            child.stop(max(0.1, end - time.monotonic()))

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Server:
    """A server's process, and the thread that reads its log and starts it again."""

    def __init__(self, index: int, arguments: list[str], is_lasting: bool) -> None:
        self.ended = threading.Event()
        """The process has ended, and there will be no other."""
        self.child: subprocess.Popen[bytes] | None = None
        self._index, self._arguments, self._is_lasting = index, arguments, is_lasting
        self._tail: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._lock = threading.Lock()
        self._is_stopping, self._address = False, ""
        self._follower = threading.Thread(target=self._follow, name=f"pserver-log-{index}", daemon=True)

    def start(self, bind: str) -> str:
        """Starts the process; returns the address where it listens."""
        child = self.child = self._spawn(bind)
        self._follower.start()
        return self._ready(child)

    def ask_to_stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if self.child is not None and self.child.stdin is not None:
                self.child.stdin.close()

    def stop(self, seconds: float) -> None:
        if self.child is None:
            return
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        if self._follower.ident is not None:
            self._follower.join()
        _close(self.child)

    def _spawn(self, bind: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pserver", "serve", "--index", str(self._index), "--bind", bind]
        command += ["--until-stdin-closes", *self._arguments]
        pipe = subprocess.PIPE
        # In a group of its own: an interrupt from the terminal is for the program, which may go on.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)

    def _follow(self) -> None:
        """Reads the log of the process and of those that follow it."""
        for _ in range(RESTARTS_MAX):
            child = self.child
            assert child is not None and child.stderr is not None
            for line in child.stderr:
                self._tell(line.decode(errors="replace").rstrip())
            # The log's end is the process's.
            status = child.wait()
            time.sleep(RESTART_SECONDS)
            with self._lock:
                if self._is_stopping or not self._is_lasting or not self._address:
                    break
                _log.warning("server %d ended with status %d and is started again", self._index, status)
                _close(child)
                self.child = self._spawn(self._address)
        self.ended.set()

    def _tell(self, line: str) -> None:
        self._tail.append(line)
        # Time, level, the rest.
        words = line.split(None, 2)
        is_line = len(words) == 3 and words[1] in LEVELS
        level, text = (LEVELS[words[1]], words[2]) if is_line else (logging.WARNING, line)
        _log.log(level, "server %d: %s", self._index, text)

    def _ready(self, child: "subprocess.Popen[bytes]") -> str:
        """Waits for the line in which the server says where it listens."""
        assert child.stdout is not None
        end = time.monotonic() + READY_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Timeout(f"server {self._index} was not ready within {READY_SECONDS:.0f} s")
            more = os.read(child.stdout.fileno(), 4096)
            if not more:
                self._follower.join()
                log = " / ".join(self._tail)
                raise Error(f"server {self._index} ended with status {child.wait()} before it was ready: {log}")
            line += more
        word, _, self._address = line.decode().strip().partition(" ")
        if word != "ready":
            raise Error(f"server {self._index} said {line!r}; expected the word ready and its address")
        return self._address


def _close(child: "subprocess.Popen[bytes]") -> None:
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _level() -> str:
    """The level from which servers write lines: that which the program's logging asks for."""
    wanted = _log.getEffectiveLevel()
    return next((name.lower() for name, level in LEVELS.items() if wanted <= level and name != "TRACE"), "error")
