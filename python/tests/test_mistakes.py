"""Mistakes: each is an exception that says what to do, and changes nothing."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_client import SGD, OnlyDlpack

import pserver


class BadDlpack:
    """An object whose DLPack has something else, or fails."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __dlpack__(self, **options: Any) -> Any:
        if self.found is None:
            raise BufferError("no memory to show")
        return self.found


def released(array: Any) -> memoryview:
    view = memoryview(array)
    view.release()
    return view


def odd(ids: Any) -> Any:
    """The same ids, one byte beyond an aligned address."""
    memory = np.zeros(ids.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(ids.tobytes(), np.uint8)
    return memory[1:].view(np.int64)


def mistakes() -> dict[str, tuple[Callable[[pserver.Client], Any], type[Exception], str]]:
    """A call of an initialised client with w (2, 3), n of int64, table by rows; its exception and part of its text."""
    ones = np.ones((2, 3), np.float32)
    ids = np.arange(2)
    read_only = ones.copy()
    read_only.setflags(write=False)
    refused = pserver.Refused

    def with_token(client: pserver.Client, token: str) -> pserver.Client:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(token)
            file.flush()
            return pserver.Client(client.coordinator, token_file=file.name)

    return {
        "no array": (
            lambda c: c.push({"w": [1.0]}),
            TypeError,
            'parameter "w": found list; expected an array of numpy',
        ),
        "None": (lambda c: c.push({"w": None}), TypeError, "found NoneType"),
        "a text": (lambda c: c.push({"w": "abc"}), TypeError, "found str"),
        "bytes": (lambda c: c.push({"w": b"1234"}), refused, 'elements of format "B"'),
        "float64": (lambda c: c.push({"w": ones.astype(float)}), refused, "element type float64; expected float32"),
        "complex": (lambda c: c.push({"w": ones.astype(np.complex64)}), refused, "expected int32, uint32"),
        "objects": (lambda c: c.push({"w": ones.astype(object)}), refused, 'parameter "w"'),
        "bool": (lambda c: c.push({"w": ones.astype(bool)}), refused, 'format "?"'),
        "big endian": (lambda c: c.push({"w": ones.astype(">f4")}), refused, 'format ">f"'),
        "transposed": (lambda c: c.push({"w": np.ones((3, 2), np.float32).T}), refused, "numpy.ascontiguousarray"),
        "a slice": (lambda c: c.push({"w": np.ones((2, 6), np.float32)[:, ::2]}), refused, "do not follow one another"),
        "a slice by DLPack": (
            lambda c: c.push({"w": OnlyDlpack(np.ones((2, 6), np.float32)[:, ::2])}),
            refused,
            "do not follow one another",
        ),
        "another shape": (
            lambda c: c.push({"w": np.ones((3, 2), np.float32)}),
            refused,
            "shape [3, 2]; expected the shape [2, 3]",
        ),
        "too long": (lambda c: c.push({"w": np.ones(7, np.float32)}), refused, "shape [7]"),
        "empty": (lambda c: c.push({"w": np.ones((0, 3), np.float32)}), refused, "shape [0, 3]"),
        "a scalar": (lambda c: c.push({"w": np.float32(1)}), refused, "shape []"),
        "unknown": (lambda c: c.push({"v": ones}), refused, '"v"'),
        "pull of an unknown": (lambda c: c.pull(["v"]), refused, '"v"'),
        "name of another type": (lambda c: c.push({1: ones}), TypeError, "str"),
        "a text for names": (lambda c: c.pull("w"), TypeError, '["w"]'),
        "read-only destination": (lambda c: c.pull({"w": read_only}), refused, "may only be read"),
        "bytes as destination": (lambda c: c.pull({"w": memoryview(bytes(24)).cast("f")}), refused, "may only be read"),
        "destination of another type": (
            lambda c: c.pull({"w": ones.astype(np.int32)}),
            refused,
            "array of int32 for its value",
        ),
        "destination of another shape": (lambda c: c.pull({"w": np.ones((3, 2), np.float32)}), refused, "shape [3, 2]"),
        "half of an integer": (lambda c: c.pull({"n": np.ones(4, np.float16)}), refused, "float16"),
        "float for an integer": (lambda c: c.push({"n": np.ones(4, np.float32)}), refused, "expected int64"),
        "other destinations": (
            lambda c: c.push_pull({"w": ones}, {"n": ones}),
            refused,
            "['n', 'w'] are on one side only",
        ),
        "a negative rate": (lambda c: c.push({"w": ones}, rate=-1.0), refused, "learning rate -1"),
        "a rate that is no number": (lambda c: c.push({"w": ones}, rate=float("nan")), refused, "learning rate NaN"),
        "a rate of another type": (
            lambda c: c.push({"w": ones}, rate="fast"),
            TypeError,
            "must be real number, not str",
        ),
        "rows as a whole": (lambda c: c.push({"table": ones}), refused, "rows"),
        "a whole as rows": (lambda c: c.pull_rows("w", ids), refused, "is not sparse"),
        "a push of a whole as rows": (lambda c: c.push_rows("w", ids, ones), refused, "is not sparse"),
        "ids of int32": (lambda c: c.pull_rows("table", ids.astype(np.int32)), refused, "expected int64 or uint64"),
        "negative ids": (lambda c: c.pull_rows("table", ids - 1), refused, "-1 as a signed number"),
        "ids beyond the height": (lambda c: c.pull_rows("table", ids + 10), refused, "10"),
        "ids without length": (lambda c: c.pull_rows("table", 3), TypeError, "len"),
        "too few rows": (lambda c: c.push_rows("table", ids, np.ones((1, 3), np.float32)), refused, '"table"'),
        "rows of another type": (lambda c: c.pull_rows("table", ids, ones.astype(np.float16)), refused, "for rows"),
        "initialised again": (lambda c: c.init("x", ones), refused, ""),
        "init with nothing": (lambda c: c.finish_init(), refused, ""),
        "unknown optimizer": (lambda c: c.begin_init("optimizer: Best"), refused, "Best"),
        "unknown field": (lambda c: c.begin_init("learning: 1"), refused, "learning"),
        "a missing rule file": (lambda c: c.begin_init("rule_file: '/nowhere.rule'"), refused, "/nowhere.rule"),
        "rows without sparse": (lambda c: c.init_rows("t", SGD), refused, "expected sparse"),
        "rows of an unknown type": (lambda c: c.init_rows("t", SGD, "float31"), refused, '"float31"'),
        "a path out of the directory": (lambda c: c.save("../x"), refused, ""),
        "an option": (lambda c: pserver.Client("nowhere"), refused, "nowhere"),
        "a negative deadline": (lambda c: pserver.Client(deadline=-1), refused, "deadline"),
        "a rank that is no number": (lambda c: pserver.Client(trainer="x"), refused, "trainer"),
        "servers and an address": (lambda c: pserver.connect("localhost:1", servers=1), ValueError, "expected one"),
        "no servers": (lambda c: pserver.connect(servers=0), ValueError, "expected 1 or more"),
        "an argument of servers": (lambda c: pserver.Servers(arguments=["--colour"]), pserver.Error, "status 2"),
        "a mode": (lambda c: pserver.Servers(mode="fast"), pserver.Error, "status"),
        "pickling": (lambda c: pickle.dumps(c), TypeError, "pserver.connect"),
        "copying": (lambda c: copy.deepcopy(c), TypeError, "pserver.connect"),
        "pickling a call": (lambda c: pickle.dumps(c.start_pull({"w": ones.copy()})), TypeError, "RawCall"),
        "NaN": (lambda c: c.push({"w": ones * np.float32("nan")}), refused, "NaN"),
        "infinity": (lambda c: c.push({"w": ones * np.float32("inf")}), refused, "inf"),
        "NaN in a row": (lambda c: c.push_rows("table", ids, ones * np.float32("nan")), refused, "NaN"),
        "a released view": (lambda c: c.push({"w": released(ones)}), refused, "released"),
        "records": (lambda c: c.push({"w": np.zeros((2, 3), [("x", "f4")])}), refused, "format"),
        "times": (lambda c: c.push({"w": np.zeros((2, 3), "M8[s]")}), refused, 'parameter "w"'),
        "texts": (lambda c: c.push({"w": np.zeros((2, 3), "U1")}), refused, "format"),
        "half of a double": (lambda c: c.pull({"d": np.ones(2, np.float16)}), refused, "expected float64"),
        "a scalar's destination": (lambda c: c.pull({"w": np.float32(1)}), refused, "may only be read"),
        "DLPack of another object": (lambda c: c.push({"w": BadDlpack(3)}), (refused, ValueError, TypeError), ""),
        "DLPack that fails": (lambda c: c.push({"w": BadDlpack(None)}), refused, "no memory to show"),
        "an empty name": (lambda c: c.push({"": ones}), refused, '""'),
        "a name of a megabyte": (lambda c: c.push({"w" * 2**20: ones}), refused, "www"),
        "a name that is no text": (lambda c: c.push({"\ud800": ones}), (UnicodeError, TypeError), ""),
        "a path's sign in a name": (lambda c: c.pull(["w\0"]), refused, "w"),
        "a number for gradients": (lambda c: c.push(3), TypeError, "type int; expected arrays by name"),
        "a list for gradients": (lambda c: c.push([ones]), TypeError, "type list; expected arrays"),
        "a list for destinations": (lambda c: c.push_pull({"w": ones}, [ones]), TypeError, "type list"),
        "started: a list for destinations": (lambda c: c.start_pull([ones]), TypeError, "type list"),
        "a negative version": (lambda c: c.pull(["w"], version=-1), (OverflowError, ValueError), ""),
        "a version that is no number": (lambda c: c.pull(["w"], version="x"), TypeError, ""),
        "an infinite rate": (lambda c: c.push({"w": ones}, rate=float("inf")), refused, "learning rate inf"),
        "started: another shape": (lambda c: c.start_push({"w": ones.T.copy()}), refused, "shape [3, 2]"),
        "started: a read-only destination": (lambda c: c.start_pull({"w": read_only}), refused, "may only be read"),
        "started: other destinations": (lambda c: c.start_push_pull({"w": ones}, {}), refused, "on one side only"),
        "a set of another type": (lambda c: c.set({"w": ones.astype(float)}), refused, "float32"),
        "a set of rows": (lambda c: c.set({"table": ones}), refused, "table"),
        "ids as a list": (lambda c: c.pull_rows("table", [1, 2]), TypeError, "found list"),
        "ids of float": (lambda c: c.pull_rows("table", ids.astype(float)), refused, "expected int64 or uint64"),
        "ids at an odd address": (lambda c: c.pull_rows("table", odd(ids)), refused, "address"),
        "a huge id": (
            lambda c: c.pull_rows("table", np.array([2**64 - 1], np.uint64)),
            refused,
            "18446744073709551615",
        ),
        "too few rows of a destination": (lambda c: c.pull_rows("table", ids, ones[:1]), refused, '"table"'),
        "rows of an unknown": (lambda c: c.pull_rows("v", ids), refused, '"v"'),
        "ids of an unknown": (lambda c: c.rows("v"), refused, '"v"'),
        "ids of a whole": (lambda c: c.rows("w"), refused, "w"),
        "a rank of somebody": (lambda c: pserver.Client(c.coordinator, trainer=7).trainers, refused, "7"),
        "a rank below zero": (lambda c: pserver.Client(trainer=-1), refused, "trainer"),
        "a reader's push": (lambda c: pserver.Client(c.coordinator, reader=True).push({"w": ones}), refused, "reader"),
        "a port that is no number": (lambda c: pserver.Client("localhost:http"), refused, "localhost:http"),
        "a missing token": (lambda c: pserver.Client(token_file="/nowhere"), refused, "/nowhere"),
        "another token": (lambda c: with_token(c, "another one of 16 bytes").trainers, pserver.Error, "token"),
        "no one there": (
            lambda c: pserver.Client("127.0.0.1:1", server_absence=0.1).trainers,
            pserver.Error,
            "127.0.0.1:1",
        ),
        "a way of waiting": (lambda c: pserver.Client(poll="never"), refused, "poll"),
        "a time that is no number": (lambda c: pserver.Client(deadline="soon"), refused, "deadline"),
        "servers that are no number": (lambda c: pserver.connect(servers="two"), ValueError, "colocated"),
        "no trainers": (lambda c: pserver.Servers(trainers=0), pserver.Error, "trainers"),
        "a text of arguments": (lambda c: pserver.Servers(arguments="--shards 2"), TypeError, '["--shards", "2"]'),
        "a size that is no number": (lambda c: c.empty("3"), (TypeError, ValueError), ""),
        "an array of objects": (lambda c: c.empty(3, object), ValueError, "OBJECT"),
        "a setting": (lambda c: pserver.connect(speed=3), TypeError, "speed"),
        "a negative size": (lambda c: c.empty((2, -1)), ValueError, "sizes of 0 or more"),
        "too large": (lambda c: c.empty(2**50), refused, ""),
    }


def test_mistakes_are_exceptions_that_say_what_to_do(job: Any, capfd: Any) -> None:
    client = job()
    assert client.begin_init("algorithm: 'add'")
    client.init("w", np.zeros((2, 3), np.float32))
    client.init("n", np.arange(4, dtype=np.int64))
    client.init("d", np.zeros(2))
    client.init_rows("table", "sparse { height: 10 width: 3 }")
    with pytest.raises(pserver.Refused, match="w"):
        client.init("w", np.zeros((2, 3), np.float32))
    client.finish_init()
    assert len(mistakes()) >= 100
    for name, (call, kind, text) in mistakes().items():
        with pytest.raises(kind) as caught:
            call(client)
        assert text in str(caught.value), f"{name}: {caught.value}"
        np.testing.assert_array_equal(client.pull(["w"])["w"], np.zeros((2, 3)), name)
    client.close()
    client.close()
    with pytest.raises(pserver.Refused, match="this client is closed"):
        client.pull(["w"])


def test_an_array_is_held_while_it_is_sent_and_cannot_be_resized(job: Any) -> None:
    client, other = job(trainers=2, trainer=0), job(trainer=1)
    client.init_all({"w": np.zeros(1000, np.float32)}, "algorithm: 'add'")
    gradient, out = np.ones(1000, np.float32), np.empty(1000, np.float32)
    call = client.start_push_pull({"w": gradient}, {"w": out})
    for array in (gradient, out):
        with pytest.raises(ValueError, match="resize"):
            array.resize(10)
    # The program forgets the gradient while the round waits for the other trainer.
    del gradient, array
    other.push({"w": np.ones(1000, np.float32)})
    call.wait()
    assert (out == 1).all()
    out.resize(10, refcheck=False)


def test_an_earlier_client_of_a_rank_is_refused_as_superseded(job: Any) -> None:
    client = job(trainer=0)
    client.init_all({"w": np.zeros(2, np.float32)}, SGD)
    later = job(trainer=0)
    later.push({"w": np.ones(2, np.float32)})
    with pytest.raises(pserver.Error, match="superseded|later|rank"):
        client.push({"w": np.ones(2, np.float32)})
    np.testing.assert_allclose(later.pull(["w"])["w"], -0.1)
