"""What a test's processes have written and left: logs of a folder, and processes by a text in their environment."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def logs(folder: Path) -> str:
    """The text of all logs in a folder."""
    return "".join(f"\n{path.name}:\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.log")))


def processes_of(mark: object) -> list[int]:
    """Processes with this text in their environment, this one not among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(mark).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def left_after(seconds: float, mark: object) -> list[int]:
    """Processes with this text in their environment that have not ended within these seconds. They are killed."""
    end = time.monotonic() + seconds
    while (left := processes_of(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    found = left
    while left:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        left = processes_of(mark)
    return found
