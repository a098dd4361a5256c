"""Steps that an interrupt or a failure ends at any point: no gradient counts twice, no call goes on, no change is lost."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()


def weights_of(elements: int = 3) -> list[Any]:
    return [torch.nn.Parameter(torch.ones(elements)) for _ in range(2)]


def optimizer_of(weights: list[Any], client: Any) -> Any:
    """The backward pass sends the gradient of the last weight, the step that of the first."""
    import pserver.torch

    return pserver.torch.Optimizer(weights, "sgd", 0.5, client=client, overlap=True, bucket_bytes=1)


def begin(weights: list[Any]) -> None:
    sum(weight.square().sum() for weight in weights).backward()


class InterruptedAtStart:
    """The extension's client, in which an interrupt arrives while the first call of a kind starts."""

    def __init__(self, client: Any, of_fetch: bool) -> None:
        self._client, self._raw, self._of_fetch = client, client._raw, of_fetch
        client._raw = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def start_held(self, noted: Any, both: Any, *given: Any) -> None:
        self._raw.start_held(noted, both, *given)
        if (both[0] is None) == self._of_fetch:
            self._client._raw = self._raw
            raise KeyboardInterrupt


def is_interrupted(step: Any) -> bool:
    try:
        step()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("of_fetch", [False, True])
def test_a_call_whose_start_was_interrupted_is_over_and_counts_once(job: Any, of_fetch: bool) -> None:
    client, weights = job(), weights_of()
    one = optimizer_of(weights, client)
    for step in range(1, 4):
        for weight in weights:
            weight.data.fill_(1)
        one.set_weights()
        begin(weights)
        InterruptedAtStart(client, of_fetch)
        assert is_interrupted(one.step)
        one.step()
        one.zero_grad()
        assert [weight.tolist() for weight in weights] == [[0, 0, 0]] * 2, (step, client.pull())
        assert {parameter.version for parameter in client.parameters()} == {step}


def test_a_fetch_whose_start_was_interrupted_writes_nothing_later(job: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    both = [weights_of() for _ in clients]
    one, other = (optimizer_of(weights, client) for weights, client in zip(both, clients))
    begin(both[0])
    InterruptedAtStart(clients[0], True)
    assert is_interrupted(one.step)
    # The round that the fetch waited for is complete now.
    begin(both[1])
    other._buckets[0].wait()
    assert clients[1].pull(["parameter.1"])["parameter.1"].tolist() == [0, 0, 0]
    assert all(weight.tolist() == [1, 1, 1] for weight in both[0])
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(other.step)
        one.step()
        step.result(30)
    assert all(weight.tolist() == [0, 0, 0] for weights in both for weight in weights)


def test_a_value_that_was_not_copied_to_its_weight_is_fetched_again(job: Any, monkeypatch: Any) -> None:
    from pserver.torch import _staging

    client, weights = job(), [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, 3).t())]
    one, give = optimizer_of(weights, client), _staging.give

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(_staging, "give", give)
        raise KeyboardInterrupt

    begin(weights)
    monkeypatch.setattr(_staging, "give", interrupted)
    assert is_interrupted(one.step)
    one.step()
    assert all((weight == 0).all() for weight in weights)


def test_weights_whose_fetch_failed_are_not_named_as_changed(job: Any, monkeypatch: Any) -> None:
    client, weights = job(), weights_of()
    one, start = optimizer_of(weights, client), client._start_held

    class Lost:
        """A call whose values came, and whose end did not."""

        def wait(self) -> Any:
            raise pserver.Timeout("no answer")

        def cancel(self) -> None:
            pass

    def lost(call: Any, gradients: Any, *given: Any, **named: Any) -> None:
        start(call, gradients, *given, **named)
        if gradients is None:
            call.wait()
            call._raw = Lost()
            monkeypatch.setattr(client, "_start_held", start)

    begin(weights)
    monkeypatch.setattr(client, "_start_held", lost)
    with pytest.raises(pserver.Timeout):
        one.step()
    one.step()
    assert all(weight.tolist() == [0, 0, 0] for weight in weights)


def test_a_weight_with_replaced_memory_gets_the_value_of_the_job(job: Any, monkeypatch: Any) -> None:
    from pserver.torch._buckets import Bucket

    client, weights = job(), weights_of()
    one = optimizer_of(weights, client)
    # As behind a bucket of a device whose copies go on.
    monkeypatch.setattr(Bucket, "is_ready", property(lambda _: False))
    begin(weights)
    assert one._buckets[0].is_prepared
    weights[1].data = torch.full((3,), 10.0)
    one.step()
    assert weights[1].tolist() == client.pull()["parameter.1"].tolist() == [9, 9, 9]


class InterruptAtLine:
    """An interrupt at one of the lines of the package that a program runs, counted from one."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.place: str | None = None
        """The line, once it was reached."""

    def __enter__(self) -> "InterruptAtLine":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        is_ours = f"pserver{os.sep}torch" in frame.f_code.co_filename
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and self.place is None:
            self._left -= 1
            if self._left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}: {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("given", [{}, {"overlap": True, "bucket_bytes": 1}, {"max_norm": 1e9}])
def test_a_step_that_is_interrupted_at_any_line_counts_once(job: Any, given: dict[str, Any]) -> None:
    import pserver.torch

    client = job()
    ours, reference = ([torch.nn.Parameter(torch.ones(4).double()) for _ in range(2)] for _ in range(2))
    groups = [{"params": [weight]} for weight in ours]
    one = pserver.torch.Optimizer(groups, "sgd", 0.05, momentum=0.9, client=client, **given)
    other = torch.optim.SGD(reference, 0.05, momentum=0.9)
    number, is_reached = 0, True
    while is_reached:
        number += 1
        for weights in (ours, reference):
            begin(weights)
        with InterruptAtLine(number) as interrupt:
            is_reached = is_interrupted(one.step)
        # Also where the interrupted call has completed the step.
        if is_reached:
            one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
        differences = [(weight - expected).abs().max() for weight, expected in zip(ours, reference)]
        assert max(differences) < 1e-12, (number, interrupt.place)
        assert {parameter.version for parameter in client.parameters() if "@" not in parameter.name} == {number}
    assert number > 100, "a step has many lines"


def test_two_interrupts_in_a_row_lose_no_gradient(job: Any) -> None:
    """The second one comes while the step ends the calls of the first."""
    client, weights = job(), weights_of()
    one = optimizer_of(weights, client)
    number, is_reached = 0, True
    while is_reached:
        number += 1
        for weight in weights:
            weight.data.fill_(1)
        one.set_weights()
        begin(weights)
        at_start = InterruptedAtStart(client, False)
        start, bucket = one._buckets[1].start, one._buckets[1]

        def interrupted(*given: Any, **named: Any) -> None:
            with InterruptAtLine(number) as interrupt:
                try:
                    start(*given, **named)
                finally:
                    places.append(interrupt.place)

        places: list[Any] = []
        setattr(bucket, "start", interrupted)
        assert is_interrupted(one.step)
        delattr(bucket, "start")
        client._raw = at_start._raw
        is_reached = places[0] is not None
        one.step()
        one.zero_grad()
        assert [weight.tolist() for weight in weights] == [[0, 0, 0]] * 2, (number, places)
        assert {parameter.version for parameter in client.parameters()} == {number}
