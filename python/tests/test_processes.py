"""Threads, processes, signals and logs of a program that has a client."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from needs import need_torch
from test_client import SGD, descriptors, resident

import pserver

CLIENTS = 10_000 if os.environ.get("PSERVER_FULL") == "1" else 300
INTERRUPTS, INTERRUPT_SECONDS_MAX = 10, 0.1


def test_memory_and_descriptors_are_flat_over_many_clients_steps_and_buffers(job: Any) -> None:
    first = job(mode="async", trainers=4)
    first.init_all({"w": np.zeros(20_000, np.float32)}, SGD)
    gradient = np.ones(20_000, np.float32)

    def use() -> None:
        client = pserver.connect(first.coordinator)
        out = client.empty(20_000)
        client.start_push_pull({"w": gradient}, {"w": out})
        client.push_pull({"w": gradient}, {"w": out})
        client.close()

    for _ in range(100):
        use()
    gc.collect()
    before, memory, threads = descriptors(), resident(), threading.active_count()
    for _ in range(CLIENTS):
        use()
    gc.collect()
    assert descriptors() <= before + 4 and threading.active_count() <= threads
    # A buffer of each would be 24 MB in the short form.
    assert resident() < memory + 8_000_000


def test_an_interrupt_ends_a_waiting_call_within_a_tenth_of_a_second(job: Any) -> None:
    client, other = job(trainers=2, trainer=0, deadline=60), job(trainer=1)
    client.init_all({"w": np.zeros(4, np.float32)}, "algorithm: 'add'")
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    taken = []
    for _ in range(INTERRUPTS):
        timer = threading.Timer(0.1, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.pull(["w"], version=10**6)
        taken.append(time.monotonic() - sent)
        timer.join()
    # The quickest of several: other programs of the machine may delay any of them.
    assert min(taken) < INTERRUPT_SECONDS_MAX, taken
    assert other.trainers == 2 and client.pull(["w"])["w"].tolist() == [0.0] * 4


INTERRUPTED = f"""
import numpy as np, pserver
with pserver.connect(servers=1) as client:
    client.init_all({{"w": np.zeros(2, np.float32)}}, {SGD!r})
    try:
        print("waits", flush=True)
        client.pull(["w"], version=10**6)
    except KeyboardInterrupt:
        print(client.pull(["w"])["w"].tolist())
"""


def test_an_interrupt_from_the_terminal_leaves_the_programs_servers(job: Any) -> None:
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=pipe, text=True, start_new_session=True)
    assert program.stdout is not None and program.stdout.readline() == "waits\n"
    # The terminal sends it to the whole group.
    os.killpg(program.pid, signal.SIGINT)
    assert program.communicate(timeout=60)[0] == "[0.0, 0.0]\n" and program.returncode == 0


def pulled(address: str) -> list[float]:
    """In another process: the parameter, by a client of its own."""
    with pserver.connect(address, reader=True) as client:
        found: list[float] = client.pull(["w"])["w"].tolist()
        return found


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_every_kind_have_clients_of_their_own(job: Any, method: str) -> None:
    client = job()
    client.init_all({"w": np.ones(3, np.float32)}, SGD)
    call = client.start_push({"w": np.ones(3, np.float32)})
    call.wait()
    with ProcessPoolExecutor(2, mp_context=get_context(method)) as pool:
        for found in pool.map(pulled, [client.coordinator] * 4):
            np.testing.assert_allclose(found, 0.9)
    np.testing.assert_allclose(client.push_pull({"w": np.ones(3, np.float32)})["w"], 0.8)


def test_a_pool_of_threads_shares_a_client(job: Any) -> None:
    client = job()
    names = [f"w{index}" for index in range(20)]
    client.init_all({name: np.zeros(100, np.float32) for name in names}, "algorithm: 'add'")
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda name: client.push({name: np.ones(100, np.float32)}), names))
    assert all((value == 5).all() for value in client.pull().values())


def test_workers_of_a_data_loader_and_the_training_go_on(job: Any) -> None:
    data = need_torch("torch.utils.data").DataLoader
    client = job()
    client.init_all({"w": np.zeros(1, np.float32)}, "algorithm: 'add'")
    rows = [np.full(1, number, np.float32) for number in range(64)]
    for method in ("fork", "spawn"):
        for batch in data(rows, batch_size=8, num_workers=2, multiprocessing_context=method):
            client.push({"w": batch.sum(0)})
    np.testing.assert_array_equal(client.pull(["w"])["w"], 2 * sum(range(64)))


def test_servers_log_where_logging_asks_for_it(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="pserver.server"), pserver.Servers():
        pass
    lines = [record.getMessage() for record in caplog.records]
    assert lines and all(line.startswith("server 0: ") for line in lines)
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="pserver.server"), pserver.Servers():
        pass
    assert caplog.records == []


LOGGED = """
import logging, sys, time
import pserver

class Slow(logging.StreamHandler):
    def emit(self, record):
        time.sleep(0.02)
        super().emit(record)

if sys.argv[2] != "none":
    logging.basicConfig(level=sys.argv[2], format="%(name)s %(levelname)s %(message)s", handlers=[Slow(sys.stdout)])
for _ in range(20):
    with pserver.connect(sys.argv[1], reader=True) as client:
        client.pull(["w"])
"""


def test_lines_of_the_library_go_to_logging_if_it_asks_for_them_and_none_is_lost_at_the_end(job: Any) -> None:
    client = job()
    client.init_all({"w": np.ones(3, np.float32)}, SGD)
    for level, least in [("INFO", 20), ("WARNING", 0), ("none", 0)]:
        command = [sys.executable, "-c", LOGGED, client.coordinator, level]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 and ended.stderr == "", ended.stderr
        lines = ended.stdout.splitlines()
        assert least <= len(lines) and (not lines or least > 0), ended.stdout
        assert all(line.startswith("pserver INFO pserver_") for line in lines), ended.stdout


def test_a_handler_of_log_lines_may_call_the_client(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = job()
    first.init_all({"w": np.ones(3, np.float32)}, SGD)
    found: list[str] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.getMessage()} {first.pull(['w'])['w'][0]}")

    logger, handler = logging.getLogger("pserver"), Asking()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, "pserver"):
        for _ in range(20):
            with pserver.connect(first.coordinator, reader=True) as client:
                client.pull(["w"])
        end = time.monotonic() + 30
        while len(found) < 20 and time.monotonic() < end:
            time.sleep(0.01)
    logger.removeHandler(handler)
    assert len(found) >= 20 and all(line.endswith(" 1.0") for line in found)
