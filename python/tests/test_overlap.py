"""The optimizer's overlap, buckets, clipping and half precision, beside PyTorch's own."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()
functional = torch.nn.functional


def model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(12, 16), tanh(), linear(16, 16), tanh(), linear(16, 3))


def batch(step: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 12, generator=random)
    return inputs, (inputs.sum(1).abs() * 2).long() % 3


def loss(network: Any, step: int) -> Any:
    inputs, targets = batch(step)
    return functional.cross_entropy(network(inputs), targets)


def optimizer_of(network: Any, *given: Any, **settings: Any) -> Any:
    import pserver.torch

    return pserver.torch.Optimizer(network.named_parameters(), *given, **settings)


def assert_alike(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bucket_bytes", [1, 1100, 1 << 20])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_overlap_and_clipping_give_torchs_weights(job: Any, bucket_bytes: int, max_norm: float | None) -> None:
    ours, theirs = model(), model()
    how = {"max_norm": max_norm, "overlap": True, "bucket_bytes": bucket_bytes}
    optimizer = optimizer_of(ours, "adamw", 1e-2, client=job(2), **how)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 30) for one in (optimizer, reference)]
    clipped = 0
    for step in range(60):
        with optimizer.no_sync():
            loss(ours, 2 * step).backward()
            assert not any(bucket.is_started for bucket in optimizer._buckets)
        loss(ours, 2 * step + 1).backward()
        assert all(bucket.is_started for bucket in optimizer._buckets[:-1]), "the step sends the last one"
        optimizer.step()
        optimizer.zero_grad()
        for part in (0, 1):
            loss(theirs, 2 * step + part).backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            clipped += norm > max_norm
            assert optimizer.total_norm == pytest.approx(float(norm), rel=1e-3)
        reference.step()
        reference.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert max_norm is None or 0 < clipped
    assert_alike(ours, theirs, 1e-4)


def test_clipping_is_of_the_gradients_of_all_trainers(job: Any, in_ranks: Any) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    models, theirs = [model(), model()], model()

    def run(rank: int) -> None:
        optimizer = optimizer_of(models[rank], "sgd", 0.5, client=clients[rank], max_norm=0.2, overlap=rank == 1)
        for step in range(20):
            loss(models[rank], 2 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    in_ranks(run)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(20):
        ((loss(theirs, 2 * step) + loss(theirs, 2 * step + 1)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        reference.step()
        reference.zero_grad()
    assert_alike(models[0], theirs)
    assert_alike(models[1], models[0], 0.0)


def test_a_parameter_without_a_gradient_is_left_out_or_sent_at_the_step(job: Any) -> None:
    ours, theirs = model(), model()
    optimizer = optimizer_of(ours, "sgd", 0.1, client=job(), overlap=True, bucket_bytes=1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        for network, one in ((ours, optimizer), (theirs, reference)):
            part = network if step % 2 else network[2:]
            inputs = batch(step)[0] if step % 2 else torch.ones(4, 16) * step
            part(inputs).square().mean().backward()
            one.step()
            one.zero_grad()
    assert_alike(ours, theirs)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_gradients_travel_in_half_precision(job: Any, wire: Any) -> None:
    client = job()
    ours, theirs = model(), model()
    optimizer = optimizer_of(ours, "sgd", 0.1, client=client, wire=wire)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    sent = client.transferred[0]
    for step in range(10):
        for network in (ours, theirs):
            loss(network, step).backward()
        for one in theirs.parameters():
            one.grad = one.grad.to(wire).float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_alike(ours, theirs)
    elements = sum(one.numel() for one in ours.parameters())
    assert client.transferred[0] - sent == 10 * 2 * elements


def test_values_of_sent_gradients_arrive_while_the_last_gradients_wait(job: Any) -> None:
    import pserver.torch

    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    weights = [[torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in clients]
    both = [
        pserver.torch.Optimizer(some, "sgd", 0.5, client=client, overlap=True, bucket_bytes=1)
        for some, client in zip(weights, clients)
    ]
    for first, last in weights:
        (first.square().sum() + last.square().sum()).backward()
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(both[0].step)
        deadline = time.monotonic() + 30
        while weights[0][1].tolist() != [0, 0, 0]:
            assert time.monotonic() < deadline, "the value of the bucket that both have sent has not come"
            time.sleep(0.001)
        assert not step.done() and weights[0][0].tolist() == [1, 1, 1]
        both[1].step()
        step.result(30)
    assert all(weight.tolist() == [0, 0, 0] for some in weights for weight in some)


def test_a_failed_step_is_repeated_and_applied_once(job: Any) -> None:
    client = job()
    ours = model()
    groups = [{"params": [one], "lr": 0.5} for one in ours.parameters()]
    import pserver.torch

    optimizer = pserver.torch.Optimizer(groups, "sgd", client=client)
    before = [one.detach().clone() for one in ours.parameters()]
    for one in ours.parameters():
        one.grad = torch.ones_like(one)
    failing = optimizer._buckets[2]
    whole, failing.wait = failing.wait, raising
    with pytest.raises(pserver.Timeout):
        optimizer.step()
    failing.wait = whole
    optimizer.step()
    for one, first in zip(ours.parameters(), before):
        torch.testing.assert_close(one.detach(), first - 0.5)
    assert {one.version for one in client.parameters()} == {1}


def raising() -> None:
    raise pserver.Timeout("a server that does not answer")


def test_mistakes_with_overlap_say_what_to_do(job: Any) -> None:
    client, network = job(), model()
    optimizer = optimizer_of(network, "sgd", 0.1, client=client, overlap=True, bucket_bytes=1)
    loss(network, 0).backward()
    with pytest.raises(pserver.Refused, match="no_sync"):
        loss(network, 1).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(pserver.Refused, match="before the backward pass"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    with pytest.raises(pserver.Refused, match="no norm"):
        optimizer.total_norm
    with pytest.raises(pserver.Refused, match="one optimizer for each"):
        optimizer_of(network, "sgd", 0.1, client=client)
    for settings, text in [({"max_norm": 0.0}, "above 0"), ({"overlap": True, "bucket_bytes": 0}, "1 or more")]:
        with pytest.raises(pserver.Refused, match=text):
            optimizer_of(model(), "sgd", 0.1, client=client, **settings)
    client.close()
    optimizer_of(network, "sgd", 0.1, client=pserver.connect(servers=1, deadline=30)).client.close()
