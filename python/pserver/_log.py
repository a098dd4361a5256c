"""Lines of the library, passed on to the logger ``pserver``."""

import atexit
import logging
import os
import threading

from . import _pserver

_END_SECONDS = 5.0

_logger = logging.getLogger("pserver")
_lock = threading.Lock()
_process: int | None = None


def begin() -> None:
    """Passes lines on, in this process, from the level on that the logger has now."""
    global _lock, _process
    _pserver.begin_log(_logger.getEffectiveLevel())
    with _lock:
        if _process == os.getpid():
            return
        _process = os.getpid()
        passing = threading.Thread(target=_pass_on, name="pserver-log", daemon=True)
        passing.start()
        atexit.register(_end, passing, _process)


def _pass_on() -> None:
    while lines := _pserver.log_lines():
        for level, module, text in lines:
            _logger.log(level, "%s: %s", module, text)


def _end(passing: threading.Thread, process: int) -> None:
    if process == os.getpid():
        _pserver.end_log()
        passing.join(_END_SECONDS)


def _after_fork() -> None:
    """The forked process has no other thread, and the lock may be taken by one that it has not."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
