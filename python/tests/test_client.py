"""Calls of the client, against numpy."""

import asyncio
import gc
import inspect
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import pserver
from pserver import _pserver

SGD = "optimizer: SGD const_lr { learning_rate: 0.1 }"
ADAM = "optimizer: Adam adam { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 } const_lr { learning_rate: 0.01 }"
SEED = 20260


class OnlyDlpack:
    """An array that has DLPack and no buffer protocol, as torch's tensors have."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def values(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


SHAPES = {"w": (300, 17), "b": (17,), "deep/tail": (2, 3, 5), "scalar": (1,)}


def test_steps_of_adam_are_those_of_its_formula(job: Any) -> None:
    client = job(2)
    weights = values(SEED, SHAPES)
    assert client.init_all(weights, ADAM)
    expected = {name: value.astype(np.float64) for name, value in weights.items()}
    mean = {name: np.zeros_like(value) for name, value in expected.items()}
    square = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 21):
        gradients = values(SEED + step, SHAPES)
        found = client.push_pull(gradients)
        for name, gradient in gradients.items():
            mean[name] = 0.9 * mean[name] + 0.1 * gradient
            square[name] = 0.999 * square[name] + 0.001 * gradient.astype(np.float64) ** 2
            corrected = np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8
            expected[name] -= 0.01 * mean[name] / (1 - 0.9**step) / corrected
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert [(one.name, one.shape, one.dtype, one.version) for one in client.parameters()] == [
        (name, shape, "float32", 20) for name, shape in SHAPES.items()
    ]


def test_the_rate_of_a_step_replaces_the_schedules(job: Any) -> None:
    client = job()
    client.init_all({"w": np.zeros(5, np.float32)}, SGD)
    ones = np.ones(5, np.float32)
    for rate, expected in [(None, -0.1), (0.5, -0.6), (2.0, -2.6)]:
        np.testing.assert_allclose(client.push_pull({"w": ones}, rate=rate)["w"], expected, rtol=1e-6)
    client.push({"w": ones}, rate=1.0)
    call = client.start_push_pull({"w": ones}, {"w": (out := np.empty(5, np.float32))}, rate=1.0)
    call.wait()
    np.testing.assert_allclose(out, -4.6, rtol=1e-6)


def test_arrays_of_every_kind_carry_gradients_and_values(job: Any) -> None:
    client = job()
    client.init_all({"w": OnlyDlpack(np.zeros((2, 4), np.float32)), "n": np.arange(4, dtype=np.int64)}, "algorithm: 'add'")
    gradient = np.arange(8, dtype=np.float32).reshape(2, 4)
    kinds: list[Any] = [gradient, OnlyDlpack(gradient), memoryview(gradient), gradient.ravel(), gradient.astype(np.float16)]
    for count, kind in enumerate(kinds, 1):
        client.push({"w": kind})
        flat, half, shared = np.empty(8, np.float32), np.empty((2, 4), np.float16), client.empty((2, 4))
        for out in (flat, half, shared, OnlyDlpack(full := np.empty((2, 4), np.float32))):
            client.pull({"w": out})
        for found in (flat.reshape(2, 4), half, shared, full):
            np.testing.assert_array_equal(found, count * gradient)
    client.push({"n": np.full(4, 2**60, np.int64)})
    np.testing.assert_array_equal(client.pull(["n"])["n"], np.arange(4) + 2**60)
    client.set({"n": np.full(4, -7, np.int64)})
    assert client.pull()["n"].tolist() == [-7] * 4


def test_rows_are_those_of_a_table_in_numpy(job: Any) -> None:
    client = job(2)
    rows = "optimizer: SGD const_lr { learning_rate: 0.5 } sparse { height: 1000 width: 3 constant { value: 1 } }"
    assert client.begin_init()
    client.init_rows("table", rows)
    client.finish_init()
    table, random = np.ones((1000, 3)), np.random.default_rng(SEED)
    seen: set[int] = set()
    for _ in range(5):
        ids = random.integers(0, 1000, 64)
        gradients = random.standard_normal((64, 3)).astype(np.float32)
        client.push_rows("table", ids, gradients)
        np.add.at(table, ids, -0.5 * gradients)
        seen |= set(ids.tolist())
        np.testing.assert_allclose(client.pull_rows("table", ids), table[ids], rtol=1e-5, atol=1e-6)
    assert client.rows("table").tolist() == sorted(seen)
    assert client.parameters()[0].is_rows


def test_started_calls_end_in_every_way(job: Any) -> None:
    client = job()
    count = 50
    names = [f"w{index}" for index in range(count)]
    client.init_all({name: np.zeros(1000, np.float32) for name in names}, "algorithm: 'add'")
    ones = np.ones(1000, np.float32)
    outs = [np.empty(1000, np.float32) for _ in names]
    calls = [client.start_push_pull({name: ones}, {name: out}) for name, out in zip(names, outs)]
    for call in reversed(calls):
        call.wait()
        call.wait()
        assert call.done()
    assert all((out == 1).all() for out in outs)
    # Calls that no thread waits for keep their arrays until they end.
    for name in names:
        client.start_push({name: np.ones(1000, np.float32)})
        gc.collect()
    assert all((value == 2).all() for value in client.pull(names).values())

    async def train() -> None:
        results = [client.start_push_pull({name: ones}, {name: out}) for name, out in zip(names, outs)]
        for result in results:
            await result

    asyncio.run(train())
    assert all((out == 3).all() for out in outs)


def test_threads_share_a_client_and_run_while_a_call_waits(job: Any) -> None:
    client, other = job(trainers=2, trainer=0), job(trainer=1)
    client.init_all({"w": np.zeros(4, np.float32)}, "algorithm: 'add'")
    ones, turns, waits = np.ones(4, np.float32), 0, threading.Event()

    def wait() -> None:
        waits.set()
        client.push_pull({"w": ones})

    waiting = threading.Thread(target=wait)
    waiting.start()
    waits.wait()
    # The round waits for the other trainer: this thread runs meanwhile, and calls the same client.
    while turns < 1000 and waiting.is_alive():
        turns += 1
    assert client.trainers == 2 and waiting.is_alive() and turns == 1000
    other.push({"w": ones})
    waiting.join()
    np.testing.assert_array_equal(other.pull(["w"])["w"], ones)


def test_an_interrupt_ends_a_call_and_the_client_goes_on(job: Any) -> None:
    client, other = job(trainers=2, trainer=0, deadline=60), job(trainer=1)
    client.init_all({"w": np.zeros(4, np.float32)}, "algorithm: 'add'")
    ones = np.ones(4, np.float32)
    started = client.start_push_pull({"w": ones}, {"w": np.empty(4, np.float32)})
    for call in (lambda: client.pull(["w"]), started.wait):
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        timer.join()
    # A handler that raises nothing does not end the call, and may call the client.
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(client.trainers))
    timers = [threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)), threading.Timer(0.6, other.push, ({"w": ones},))]
    for timer in timers:
        timer.start()
    np.testing.assert_array_equal(client.push_pull({"w": ones})["w"], ones)
    signal.signal(signal.SIGUSR1, before)
    assert seen == [2]


def test_failures_have_different_exceptions(job: Any) -> None:
    client = job(trainers=2, trainer=0, arguments=["--round-timeout-seconds", "1"])
    ones = np.ones(4, np.float32)
    assert client.begin_init("algorithm: 'add'")
    with pytest.raises(pserver.NotInitialised, match="this trainer was elected and has not finished"):
        client.push({"w": ones})
    client.init("w", ones)
    client.finish_init()
    with pytest.raises(pserver.MissingTrainer, match="waits for trainer 1") as missing:
        client.push_pull({"w": ones})
    assert missing.value.ranks == [1]
    again = pickle.loads(pickle.dumps(missing.value))
    assert (again.ranks, str(again)) == ([1], str(missing.value))
    impatient = job(trainer=1, deadline=0.3)
    with pytest.raises(pserver.Timeout, match="no answer within 0.3 s"):
        impatient.push_pull({"w": ones})
        impatient.push_pull({"w": ones})
    with pytest.raises(pserver.Cancelled):
        threading.Timer(0.2, client.cancel).start()
        client.pull({"w": ones.copy()}, version=10**6)
    # The other trainer has pushed in two rounds, and in no third.
    for _ in range(2):
        client.push_pull({"w": ones})
    with pytest.raises(pserver.Cancelled, match="the client was closed"):
        call = client.start_push_pull({"w": ones}, {"w": ones.copy()})
        client.close()
        call.wait()


def test_a_server_that_is_gone_is_named() -> None:
    with pserver.Servers() as servers, pserver.connect(servers.address, server_absence=0.3, deadline=20) as client:
        client.init_all({"w": np.ones(4, np.float32)}, SGD)
        servers.stop()
        with pytest.raises(pserver.ServerLost, match="refuse"):
            client.pull(["w"])


def test_a_forked_process_is_refused_and_the_parent_goes_on(job: Any) -> None:
    client = job()
    client.init_all({"w": np.zeros(4, np.float32)}, SGD)
    client.start_push({"w": np.ones(4, np.float32)})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            client.pull(["w"])
        except pserver.Refused as error:
            status = 0 if "before a fork" in str(error) else 2
        client.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_allclose(client.pull(["w"])["w"], -0.1)


def in_a_process(address: str) -> list[float]:
    with pserver.connect(address, trainer=1) as client:
        found: list[float] = client.push_pull({"w": np.ones(2, np.float32)})["w"].tolist()
        return found


def test_a_spawned_process_has_a_client_of_its_own(job: Any) -> None:
    client = job(trainers=2, trainer=0)
    client.init_all({"w": np.zeros(2, np.float32)}, "algorithm: 'add'")
    with get_context("spawn").Pool(1) as pool:
        result = pool.apply_async(in_a_process, (client.coordinator,))
        client.push({"w": np.ones(2, np.float32)})
        assert result.get(30) == [1.0, 1.0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SERVERS_OF_A_KILLED_PROGRAM = """
import pserver, time
client = pserver.connect(servers=2)
print(*client._servers.processes, flush=True)
time.sleep(600)
"""


def test_servers_end_with_the_program_that_started_them_also_when_it_is_killed() -> None:
    program = subprocess.Popen([sys.executable, "-c", SERVERS_OF_A_KILLED_PROGRAM], stdout=subprocess.PIPE)
    assert program.stdout is not None
    servers = [int(pid) for pid in program.stdout.readline().split()]
    assert len(servers) == 2 and all(is_alive(pid) for pid in servers)
    program.kill()
    program.wait()
    program.stdout.close()
    while any(is_alive(pid) for pid in servers):
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_prints_nothing_of_the_librarys() -> None:
    text = "import numpy, pserver\nwith pserver.connect(servers=1) as client:\n    "
    text += f"client.init_all({{'w': numpy.ones(2, 'f')}}, {SGD!r}); print(client.pull()['w'])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1. 1.]\n", "")


def test_the_program_is_there_as_a_command_and_as_a_module() -> None:
    script = os.path.join(os.path.dirname(sys.executable), "pserver")
    for command in ([script], [sys.executable, "-m", "pserver"]):
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert shown.returncode == 0 and shown.stdout.startswith("pserver "), shown
        wrong = subprocess.run([*command, "serve", "--colour"], capture_output=True, text=True)
        assert wrong.returncode == 2 and "--colour" in wrong.stderr, wrong


def test_rounds_do_not_wait_for_a_trainer_that_left_its_context_normally(job: Any, in_ranks: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    ended: list[Any] = [None, None]

    def run(rank: int) -> None:
        with clients[rank] as client:
            client.init_all({"w": np.zeros(2, np.float32)}, "optimizer: SGD const_lr { learning_rate: 1 }")
            for step in range(2 + 2 * rank):
                ended[rank] = client.push_pull({"w": np.full(2, 1 + step, np.float32)})["w"].tolist()

    in_ranks(run)
    assert ended[1] == [-10, -10] and clients[0].is_closed


def test_rounds_wait_for_a_trainer_that_ended_by_an_exception(job: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1, deadline=2)]
    clients[0].init_all({"w": np.zeros(2, np.float32)}, "optimizer: SGD const_lr { learning_rate: 1 }")
    gradient = {"w": np.ones(2, np.float32)}
    with pytest.raises(RuntimeError, match="of the program"), clients[0] as client:
        client.push(gradient)
        raise RuntimeError("of the program")
    clients[1].push_pull(gradient)
    with pytest.raises((pserver.Timeout, pserver.MissingTrainer)):
        clients[1].push_pull(gradient)


def test_a_client_that_has_sent_nothing_leaves_no_job(job: Any) -> None:
    with job(trainers=2, trainer=0) as client:
        client.init_all({"w": np.zeros(2, np.float32)}, "optimizer: SGD const_lr { learning_rate: 1 }")
    again, other = job(trainer=0), job(trainer=1, deadline=2)
    with pytest.raises((pserver.Timeout, pserver.MissingTrainer)):
        other.push_pull({"w": np.ones(2, np.float32)})
    again.push({"w": np.ones(2, np.float32)})
    # Both have pushed the first round.
    assert other.push_pull({"w": np.ones(2, np.float32)})["w"].tolist() == [-1, -1]


def test_every_setting_of_clients_is_a_parameter() -> None:
    with pytest.raises(pserver.Refused) as refused:
        _pserver.RawClient("nonsense=1")
    named = str(refused.value).split("with a name of ")[1].split(", ")
    assert set(named) == set(inspect.signature(pserver.Client).parameters), named
    with pytest.raises(pserver.Refused, match="checks"):
        pserver.Client(checks="sometimes")


def test_an_optimizer_that_integers_do_not_support_is_logged(job: Any) -> None:
    lines: "SimpleQueue[logging.LogRecord]" = SimpleQueue()
    handler = logging.Handler()
    handler.emit = lines.put  # type: ignore[method-assign]
    logger = logging.getLogger("pserver")
    logger.addHandler(handler)
    try:
        client = job()
        assert client.begin_init("const_lr { learning_rate: 0.1 }")
        client.init("counts", np.zeros(3, np.int64))
        client.init("weights", np.zeros(3, np.float32))
        client.finish_init()
        found = (lines.get(timeout=30).getMessage() for _ in range(100))
        line = next(line for line in found if "have no effect" in line)
    finally:
        logger.removeHandler(handler)
    assert '"counts"' in line and "weights" not in line, line
