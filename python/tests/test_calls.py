"""Calls by rows that are started, optimizer state out and in, checkpoints, and values that are loaded."""

import asyncio
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pserver

ADAM = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }"
TABLE = "optimizer: SGD const_lr { learning_rate: 0.5 } sparse { height: 1000 width: 3 constant { value: 1 } }"
SEED = 20261


def table(client: pserver.Client) -> None:
    assert client.begin_init()
    client.init_rows("table", TABLE)
    client.init("dense", np.zeros(4, np.float32))
    client.finish_init()


def test_rows_of_started_calls_are_those_of_a_table_in_numpy(job: Any) -> None:
    client = job(2)
    table(client)
    expected, random = np.ones((1000, 3)), np.random.default_rng(SEED)
    ids = random.integers(0, 1000, 64)
    for step in range(6):
        gradients = random.standard_normal((ids.size, 3)).astype(np.float32)
        np.add.at(expected, ids, -0.5 * gradients)
        following = random.integers(0, 1000, 50)
        out = np.empty((50, 3), np.float32)
        if step % 3 == 0:
            out = client.push_pull_rows("table", ids, gradients, following)
        elif step % 3 == 1:
            call = client.start_push_pull_rows("table", ids, gradients, following, out)
            gradients[:] = np.nan
            call.wait()
        else:
            pushed = client.start_push_rows("table", ids, gradients)
            gradients[:] = np.nan
            pulled = client.start_pull_rows("table", following, out)
            pulled.wait()
            pushed.wait()
            assert pulled.done()
        np.testing.assert_allclose(out, expected[following], rtol=1e-5, atol=1e-6)
        ids = following


def test_wrong_rows_of_started_calls_are_refused(job: Any) -> None:
    client = job()
    table(client)
    ids, ones, out = np.arange(2), np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    mistakes: list[tuple[Any, str]] = [
        (lambda: client.start_pull_rows("table", ids, out[:1]), "a destination of 12 bytes for 2 rows; expected 24"),
        (lambda: client.start_pull_rows("table", ids, out.astype(np.float64)), "float64 for rows; expected float32"),
        (lambda: client.start_pull_rows("dense", ids, out), '"dense" is not sparse'),
        (lambda: client.start_push_rows("table", np.array([1000, 1]), ones), "1000"),
        (lambda: client.start_push_rows("table", np.array([-1, 1]), ones), "-1 as a signed number"),
        (lambda: client.push_pull_rows("dense", ids, ones, ids), '"dense" is not sparse'),
        (lambda: client.push_pull_rows("table", ids, ones, np.array([0.5])), "ids of float64; expected int64"),
        (lambda: client.push_pull_rows("table", ids, ones, ids, rate=-1.0), "learning rate -1"),
    ]
    for mistake, text in mistakes:
        with pytest.raises(pserver.Refused, match=text):
            mistake()
    assert client.rows("table").size == 0


def test_a_job_goes_on_from_the_state_of_another(job: Any) -> None:
    client = job(2)
    random = np.random.default_rng(SEED)
    weights = {"w": random.standard_normal((300, 17)).astype(np.float32)}
    gradients = [{"w": random.standard_normal((300, 17)).astype(np.float32)} for _ in range(6)]
    client.init_all(weights, ADAM)
    for gradient in gradients[:3]:
        middle = client.push_pull(gradient)
    state = client.state("w")
    assert (state.updates, list(state.tensors)) == (3, ["first_moment", "second_moment"])
    assert state.tensors["first_moment"].shape == (300, 17)
    for gradient in gradients[3:]:
        expected = client.push_pull(gradient)
    with pserver.connect(servers=1) as other:
        other.init_all(middle, ADAM)
        with pytest.raises(pserver.Refused, match="expected .*second_moment.*each once"):
            other.set_state("w", {"first_moment": state.tensors["first_moment"]}, 3)
        with pytest.raises(pserver.Refused, match="float64 for state"):
            other.set_state("w", {of: one.astype(np.float64) for of, one in state.tensors.items()}, 3)
        other.set_state("w", state.tensors, state.updates)
        for gradient in gradients[3:]:
            found = other.push_pull(gradient)
        assert other.state("w").updates == 6
    np.testing.assert_array_equal(found["w"], expected["w"])


def test_a_checkpoint_is_on_disk_when_the_call_returns(job: Any, tmp_path: Path) -> None:
    client = job(2, arguments=["--checkpoint-dir", str(tmp_path / "checkpoints")])
    client.init_all({"w": np.zeros(5, np.float32)}, ADAM)
    client.push_pull({"w": np.ones(5, np.float32)})
    taken = client.checkpoint()
    assert taken.version == 1 and taken.bytes > 0
    assert taken.directories and all(any(Path(one).glob("checkpoint-*.json")) for one in taken.directories)
    with pserver.connect(servers=1) as other:
        other.init_all({"w": np.zeros(5, np.float32)})
        with pytest.raises(pserver.Refused, match="expected one with checkpoint_dir"):
            other.checkpoint()


def safetensors(path: Path, arrays: dict[str, Any]) -> None:
    header, data = {}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_values_are_loaded_whole_or_not_at_all(job: Any, tmp_path: Path) -> None:
    client = job(2)
    client.init_all({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, ADAM)
    right = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.full(3, 7, np.float32)}
    mistakes: list[tuple[Any, str]] = [
        ({"w": right["w"], "c": right["b"]}, 'unknown parameter "c"'),
        ({"b": right["b"], "w": right["w"].T.copy()}, r"shape \[3, 2\]; expected \[2, 3\]"),
        ({"b": right["b"], "w": right["w"].astype(np.float64)}, "float64; expected float32"),
        (tmp_path / "none", "none"),
    ]
    for wrong, text in mistakes:
        with pytest.raises(pserver.Refused, match=text):
            client.load(wrong)
    assert all((value == 0).all() for value in client.pull().values())
    assert client.load({"b": right["b"]}) == ["b"]
    safetensors(tmp_path / "model.safetensors", right)
    assert sorted(client.load(os.fspath(tmp_path / "model.safetensors"))) == ["b", "w"]
    for name, value in client.pull().items():
        np.testing.assert_array_equal(value, right[name])


ROWS = "sparse { height: 500 width: 4 uniform { low: -0.5 high: 0.5 } seed: 3 }"
RULES = [
    "optimizer: Adagrad adagrad { } const_lr { learning_rate: 0.1 }",
    f"{ADAM} l2: 0.1",
    "rule: 'state m = 0.5; m = 0.9*m + g; w -= lr*m' const_lr { learning_rate: 0.1 }",
]


@pytest.mark.parametrize("rule", RULES)
def test_a_table_goes_on_in_another_job_from_pieces_of_its_rows(rule: str) -> None:
    random = np.random.default_rng(SEED)
    steps = [(random.integers(0, 400, 100), random.standard_normal((100, 4)).astype(np.float32)) for _ in range(6)]
    everything = np.arange(500)
    with pserver.connect(servers=2) as one, pserver.connect(servers=1) as other:
        for client in (one, other):
            assert client.begin_init()
            client.init_rows("table", f"{rule} {ROWS}")
            client.finish_init()
        for step, (ids, gradients) in enumerate(steps[:3]):
            one.push_rows("table", ids, gradients, rate=0.1 / (1 + step))
        pieces = np.array_split(one.rows("table"), 7)
        for piece in pieces:
            state = one.state("table", piece)
            assert state.updates == 3 and all(tensor.shape == (piece.size, 4) for tensor in state.tensors.values())
            other.load({"table": pserver.Rows(piece, one.pull_rows("table", piece))})
            is_last = piece is pieces[-1]
            updates, rates = (state.updates, state.rates) if is_last else (None, ())
            other.set_state("table", state.tensors, updates, ids=piece, rates=rates)
        for ids, gradients in steps[3:]:
            assert (one.push_pull_rows("table", ids, gradients, everything)
                    == other.push_pull_rows("table", ids, gradients, everything)).all()
        mine, its = one.state("table", everything), other.state("table", everything)
        assert mine.updates == its.updates == 6 and mine.rates == its.rates
        assert all((mine.tensors[of] == its.tensors[of]).all() for of in mine.tensors)
        assert one.state("table").ids.tolist() == one.rows("table").tolist()  # type: ignore[union-attr]
        mistakes: list[tuple[Any, Any, str]] = [
            (lambda: one.set_state("table", mine.tensors, None), TypeError, "expected the rows"),
            (lambda: one.set_state("table", mine.tensors, 1), pserver.Refused, "is sparse"),
            (lambda: one.set_state("table", mine.tensors, 1, ids=everything[1:]), pserver.Refused, "bytes of state"),
            (lambda: one.set_state("table", mine.tensors, 1, ids=everything * 0), pserver.Refused, "row 0 is there twice"),
            (lambda: one.state("table", [1, 2]), TypeError, "found list"),
            (lambda: one.load({"table": pserver.Rows(everything[:2], np.ones((1, 4), np.float32))}), pserver.Refused, "bytes"),
            (lambda: one.load({"table": np.ones((500, 4), np.float32)}), pserver.Refused, "is sparse"),
        ]
        for mistake, kind, text in mistakes:
            with pytest.raises(kind, match=text):
                mistake()
        assert (one.state("table", everything).tensors[list(mine.tensors)[0]] == mine.tensors[list(mine.tensors)[0]]).all()


def test_a_task_that_is_cancelled_cancels_its_call_and_its_gradient_counts_once(job: Any) -> None:
    client, other = job(trainers=2, trainer=0, deadline=300), job(trainer=1, deadline=300)
    client.init_all({"w": np.zeros(1000, np.float32)}, "optimizer: SGD const_lr { learning_rate: 1 }")
    gradient, out = np.full(1000, 2, np.float32), np.zeros(1000, np.float32)

    async def wait(limit: float) -> None:
        # Servers answer when trainer 1 has sent its gradient.
        await asyncio.wait_for(client.start_push_pull({"w": gradient}, {"w": out}), limit)

    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(wait(0.1))
    call = client.start_push_pull({"w": gradient}, {"w": out})
    call.cancel()
    with pytest.raises(pserver.Cancelled, match="cancelled by the program"):
        call.wait()
    call.cancel()
    assert call.done() and time.monotonic() - began < 30 and (out == 0).all()
    pushed = other.start_push({"w": np.full(1000, 4, np.float32)})
    asyncio.run(wait(60))
    pushed.wait()
    assert (out == -3).all() and client.parameters()[0].version == 1
    pushed.cancel()


def test_an_optimizer_is_compared_with_that_of_the_job(job: Any) -> None:
    client = job()
    assert client.mode == "sync"
    table(client)
    for name, config in {
        "table": TABLE.replace("0.5", "0.25"),
        "dense": "optimizer: SGD const_lr { learning_rate: 3 }",
    }.items():
        if name == "table":
            client.check_optimizer(name, config)
        for wrong in (config.replace("SGD", "Adagrad adagrad {}"), f"{config} l2: 0.5", config.replace("1000", "1001")):
            if wrong != config:
                with pytest.raises(pserver.Refused, match=f'"{name}": found the optimizer .*; expected that with'):
                    client.check_optimizer(name, wrong)
    with pytest.raises(pserver.Refused, match='unknown parameter "other"'):
        client.check_optimizer("other", TABLE)
    ids = client.rows("table")
    assert ids.dtype == np.uint64 and len(ids) == 0


def test_awaited_calls_take_no_threads_of_the_event_loop(job: Any) -> None:
    client, other = job(trainers=2, trainer=0, deadline=300), job(trainer=1, deadline=300)
    names = [f"w{at}" for at in range(40)]
    client.init_all({name: np.zeros(4, np.float32) for name in names}, "optimizer: SGD const_lr { learning_rate: 1 }")
    ones, outs = np.ones(4, np.float32), [np.zeros(4, np.float32) for _ in names]

    async def train() -> float:
        calls = [client.start_push_pull({name: ones}, {name: out}) for name, out in zip(names, outs)]
        waiting = [asyncio.ensure_future(asyncio.wait_for(call, 60)) for call in calls]
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.start_push_pull({"w0": ones}, {"w0": outs[0].copy()}), 0.2)
        seconds = time.monotonic() - began
        await asyncio.to_thread(other.push, {name: ones for name in names})
        await asyncio.gather(*waiting)
        return seconds

    assert asyncio.run(train()) < 20 and all((out == -1).all() for out in outs)
