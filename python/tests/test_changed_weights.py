"""Weights that the program sets between two steps are the job's from then on, as with PyTorch's optimizers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()


def model(seed: int = 3, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(dtype)


def loss(network: Any, step: int) -> Any:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return network(inputs.to(network[0].weight.dtype)).square().mean()


def optimizer_of(network: Any, client: Any, **settings: Any) -> Any:
    import pserver.torch

    return pserver.torch.Optimizer(network.named_parameters(), "adamw", 1e-2, client=client, **settings)


LOADED = model(9).state_dict()


def load(network: Any) -> None:
    network.load_state_dict(LOADED)


def copy(network: Any) -> None:
    with torch.no_grad():
        for one in network.parameters():
            one.copy_(torch.linspace(-1, 1, one.numel()).view_as(one))


def initialise(network: Any) -> None:
    # Ranks are threads here, which have one stream of random numbers between them.
    generator = torch.Generator().manual_seed(1)
    for one in network.parameters():
        torch.nn.init.normal_(one, generator=generator)


def replace_data(network: Any) -> None:
    network[0].weight.data = torch.full_like(network[0].weight, 0.25)


def write_data(network: Any) -> None:
    network[2].bias.data[1] = 2.0


def clamp(network: Any) -> None:
    for one in network.parameters():
        one.data.clamp_(-0.05, 0.05)


def write_by_numpy(network: Any) -> None:
    network[0].bias.detach().numpy()[3] = -7.0


def from_vector(network: Any) -> None:
    vector = torch.nn.utils.parameters_to_vector(network.parameters())
    torch.nn.utils.vector_to_parameters(vector / 2, network.parameters())


CHANGES = [load, copy, initialise, replace_data, write_data, clamp, write_by_numpy, from_vector]


@pytest.mark.parametrize("how", [{}, {"overlap": True, "bucket_bytes": 1}, {"max_norm": 1e3}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_set_between_steps_stay_set(
    job: Any, in_ranks: Any, change: Callable[[Any], None], how: Any
) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both, theirs = [model(), model()], model()
    # A rank that begins fetches what another has set by then: before the first step changes are absolute.
    steps = (2, 3, 5) if change is from_vector else (0, 3)

    def run(rank: int) -> None:
        one = optimizer_of(both[rank], clients[rank], **how)
        for step in range(6):
            if step in steps:
                change(both[rank])
            loss(both[rank], 2 * step + rank).backward()
            one.step()
            one.zero_grad()

    in_ranks(run)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(6):
        if step in steps:
            change(theirs)
        ((loss(theirs, 2 * step) + loss(theirs, 2 * step + 1)) / 2).backward()
        if "max_norm" in how:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), how["max_norm"])
        reference.step()
        reference.zero_grad()
    for network in both:
        for one, other in zip(network.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_that_are_the_same_again_are_not_sent(job: Any) -> None:
    client, network = job(), model(dtype=torch.bfloat16)
    one = optimizer_of(network, client)
    for step in range(3):
        loss(network, step).backward()
        one.step()
        # An evaluation with other weights, and back: servers keep what float32 has beyond bfloat16.
        kept = {name: value.clone() for name, value in network.state_dict().items()}
        load(network)
        network.load_state_dict(kept)
        sent = client.transferred[0]
        one.zero_grad()
    loss(network, 3).backward()
    one.step()
    assert client.transferred[0] - sent == sum(2 * weight.numel() for weight in network.parameters())


def test_a_frozen_weight_that_is_set_is_sent_to_the_servers_too(job: Any) -> None:
    client, network = job(), model()
    network[0].bias.requires_grad_(False)
    one = optimizer_of(network, client)
    network[0].bias.data.fill_(3.0)
    loss(network, 0).backward()
    one.step()
    assert client.pull(["0.bias"])["0.bias"].tolist() == [3.0] * 8


def test_a_weight_that_is_changed_after_its_gradient_was_sent_is_named(job: Any) -> None:
    network = model()
    one = optimizer_of(network, job(), overlap=True, bucket_bytes=1)
    loss(network, 0).backward()
    network[2].weight.data.clamp_(-0.01, 0.01)
    with pytest.raises(pserver.Refused, match='"2.weight" was changed after its gradient was sent; expected it before'):
        one.step()
    assert network[2].weight.abs().max() > 0.1
    one.step()
    one.zero_grad()
    loss(network, 1).backward()
    one.step()


def test_a_weight_whose_memory_is_not_in_one_piece_is_named_too(job: Any) -> None:
    import pserver.torch

    first, weight = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(4, 3).t())
    one = pserver.torch.Optimizer([first, weight], "sgd", 0.5, client=job(), overlap=True, bucket_bytes=1)
    (first.sum() + weight.square().sum()).backward()
    weight.data.add_(1)
    with pytest.raises(pserver.Refused, match="was changed after its gradient was sent"):
        one.step()
    one.step()
    assert not weight.is_contiguous() and (weight == 0).all()


@pytest.mark.parametrize("arrives", [False, True])
def test_a_changed_weight_is_named_after_a_fetch_that_failed_and_an_unchanged_one_is_not(
    job: Any, arrives: bool, monkeypatch: Any
) -> None:
    network, client = model(), job()
    one = optimizer_of(network, client, overlap=True, bucket_bytes=1)
    start = client._start_held

    def failing(call: Any, gradients: Any, *given: Any, **named: Any) -> None:
        if gradients is not None:
            return start(call, gradients, *given, **named)
        monkeypatch.setattr(client, "_start_held", start)
        if arrives:
            start(call, gradients, *given, **named)
            call.wait()
        raise pserver.Timeout("no answer")

    loss(network, 0).backward()
    monkeypatch.setattr(client, "_start_held", failing)
    if not arrives:
        network[2].weight.data.clamp_(-0.01, 0.01)
    with pytest.raises(pserver.Timeout):
        one.step()
    if not arrives:
        with pytest.raises(pserver.Refused, match='"2.weight" was changed after its gradient was sent'):
            one.step()
    one.step()
    for name, value in client.pull().items():
        assert value.tolist() == network.get_parameter(name).tolist()
    one.zero_grad()
    loss(network, 1).backward()
    one.step()


@pytest.mark.parametrize("changes", [False, True])
def test_a_changed_weight_is_named_after_an_exchange_that_failed_and_an_unchanged_one_is_not(
    job: Any, changes: bool, monkeypatch: Any
) -> None:
    network, client = model(), job()
    one = optimizer_of(network, client)
    start = client._start_held

    def failing(call: Any, *_: Any) -> None:
        monkeypatch.setattr(client, "_start_held", start)
        call._raw = Failing()

    class Failing:
        def cancel(self) -> None:
            pass

        def wait(self) -> None:
            raise pserver.Timeout("no answer")

    loss(network, 0).backward()
    monkeypatch.setattr(client, "_start_held", failing)
    with pytest.raises(pserver.Timeout):
        one.step()
    if changes:
        network[2].weight.data.clamp_(-0.01, 0.01)
        with pytest.raises(pserver.Refused, match='"2.weight" was changed after its gradient was sent'):
            one.step()
    one.step()
    assert {one.version for one in client.parameters()} == {1}
    for name, value in client.pull().items():
        assert value.tolist() == network.get_parameter(name).tolist()


def test_a_slow_trainer_gets_the_weights_of_the_step_and_not_those_that_a_quick_one_has_set(
    job: Any, monkeypatch: Any
) -> None:
    import pserver.torch

    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    weights = [[torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in clients]
    both = [
        pserver.torch.Optimizer(some, "sgd", 0.5, client=client, overlap=True, bucket_bytes=1)
        for some, client in zip(weights, clients)
    ]
    start, set_by_quick = clients[1]._start_held, threading.Event()

    def late(call: Any, gradients: Any, *given: Any, **named: Any) -> None:
        # Of gradients that the backward pass has sent, a call of its own fetches the values.
        assert gradients is not None or set_by_quick.wait(30)
        start(call, gradients, *given, **named)

    def begin(at: int) -> None:
        first, last = weights[at]
        (first.square().sum() + last.square().sum()).backward()

    def step_of_both() -> None:
        slow = threads.submit(both[1].step)
        both[0].step()
        slow.result(30)

    with ThreadPoolExecutor(1) as threads:
        begin(0), begin(1)
        monkeypatch.setattr(clients[1], "_start_held", late)
        slow = threads.submit(both[1].step)
        both[0].step()
        assert all(weight.tolist() == [0, 0, 0] for weight in weights[0])
        # The quick one is in its next step, for which both add one to the weights.
        both[0].zero_grad()
        for weight in weights[0]:
            weight.data += 1
        begin(0)
        assert clients[1].pull(["parameter.1"])["parameter.1"].tolist() == [1, 1, 1]
        set_by_quick.set()
        slow.result(30)
        assert all(weight.tolist() == [0, 0, 0] for weight in weights[1])
        both[1].zero_grad()
        for weight in weights[1]:
            weight.data += 1
        begin(1)
        step_of_both()
    assert all(weight.tolist() == [0, 0, 0] for some in weights for weight in some)


def test_a_changed_weight_is_refused_in_async_mode(job: Any) -> None:
    clients = [job(trainers=2, trainer=0, mode="async"), job(trainer=1)]
    networks = [model(), model()]
    one, other = (optimizer_of(network, client) for network, client in zip(networks, clients))
    clamp(networks[0])
    loss(networks[0], 0).backward()
    with pytest.raises(pserver.Refused, match="was changed in mode async.*expected set_weights"):
        one.step()
    one.set_weights()
    one.step()
    loss(networks[1], 0).backward()
    other.step()


def test_weights_that_are_set_before_an_outer_step_counts_them_are_refused(job: Any) -> None:
    from pserver.torch import DiLoCo

    network = model()
    diloco = DiLoCo(network.named_parameters(), torch.optim.SGD(network.parameters(), 0.1), 2, client=job())
    load(network)
    loss(network, 0).backward()
    with pytest.raises(pserver.Refused, match="was changed before the first step; expected set_weights"):
        diloco.step()
    diloco.set_weights()
    diloco.step()
