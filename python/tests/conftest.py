"""What the tests of the client share: servers, clients, and reports of skips."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pserver

Connect = Callable[..., pserver.Client]

# A shell without job control starts background processes with SIGINT ignored, and Python keeps it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: Any) -> None:
    """A skip is a line of the report that `cargo ci` counts."""
    path = os.environ.get("PSERVER_SKIP_REPORT")
    # A process that runs a share of the tests tells the one that reports.
    if report.skipped and path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        with open(path, "a") as file:
            file.write(f"SKIPPED: python {report.nodeid}: {reason}\n")


# A module that is skipped as a whole, for want of a package.
pytest_collectreport = pytest_runtest_logreport


@pytest.fixture
def job() -> Iterator[Connect]:
    """Makes clients of a job of its own: the arguments of the first call describe the servers."""
    clients: list[pserver.Client] = []
    servers: list[pserver.Servers] = []

    def connect(count: int = 1, *, trainers: int = 1, mode: str = "sync", arguments: Any = (), **settings: Any) -> Any:
        if not servers:
            servers.append(pserver.Servers(count, trainers=trainers, mode=mode, arguments=arguments))
        settings.setdefault("deadline", 30)
        clients.append(pserver.connect(servers[0].address, **settings))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    for one in servers:
        one.stop()


@pytest.fixture
def in_ranks() -> Callable[[Callable[[int], None]], None]:
    """Runs a function as two trainers, each in a thread, and raises the first failure."""

    def run(trainer: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(trainer, range(2)))

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The line of results that `cargo ci` reads. A skip is in the report above, and counts as Rust's do: passed."""
    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    failed = counts["failed"] + counts["error"]
    verdict = "FAILED" if failed else "ok"
    line = f"test result: {verdict}. {counts['passed'] + counts['skipped']} passed; {failed} failed; 0 ignored"
    terminalreporter.write_line(line)
