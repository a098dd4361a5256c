"""The optimizer and DiLoCo beside PyTorch's own."""

from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()


def model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batch(step: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 12, generator=random)
    return inputs, (inputs.sum(1).abs() * 2).long() % 3


def train(network: Any, optimizer: Any, steps: int, scheduler: Any = None, accumulate: int = 1) -> list[Any]:
    for step in range(steps):
        inputs, targets = batch(step)
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


def pserver_torch() -> Any:
    import pserver.torch

    return pserver.torch


def test_groups_schedulers_accumulation_and_names(job: Any) -> None:
    def groups(network: Any) -> Any:
        first, last = network[0], network[2]
        return [{"params": first.parameters(), "lr": 0.05}, {"params": last.parameters(), "weight_decay": 0.01}]

    ours, theirs = model(), model()
    optimizer = pserver_torch().Optimizer(groups(ours), "sgd", lr=0.1, client=job())
    reference = torch.optim.SGD(groups(theirs), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR
    found = train(ours, optimizer, 60, schedule(optimizer, 30), accumulate=2)
    expected = train(theirs, reference, 60, schedule(reference, 30), accumulate=2)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    state = optimizer.state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [group["lr"] for group in reference.param_groups]
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    ours[0].weight.data.fill_(1.0)
    optimizer.set_weights()
    ours[0].weight.data.zero_()
    optimizer.fetch_weights()
    assert (ours[0].weight == 1).all()


def test_names_and_halves_and_other_layouts(job: Any) -> None:
    client = job()
    network = torch.nn.Module()
    network.narrow = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    network.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    optimizer = pserver_torch().Optimizer(network.named_parameters(), "rule: 'w = w - 2*lr*g'", lr=0.5, client=client)
    network.narrow.grad = torch.full((8,), 0.5, dtype=torch.bfloat16)
    network.turned.grad = torch.ones(3, 2)
    optimizer.step()
    assert [(one.name, one.dtype) for one in client.parameters()] == [("narrow", "float32"), ("turned", "float32")]
    assert (network.narrow == 0.5).all() and network.narrow.dtype == torch.bfloat16
    torch.testing.assert_close(network.turned.detach(), torch.arange(6.0).reshape(2, 3).T - 1)


def test_two_trainers_have_the_mean_of_their_gradients(job: Any, in_ranks: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    models = [model(0), model(1)]
    ended: list[Any] = [None, None]

    def run(rank: int) -> None:
        optimizer = pserver_torch().Optimizer(models[rank].parameters(), "sgd", lr=0.1, client=clients[rank])
        for step in range(10):
            inputs, targets = batch(2 * step + rank)
            torch.nn.functional.cross_entropy(models[rank](inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended[rank] = [parameter.detach().clone() for parameter in models[rank].parameters()]

    in_ranks(run)
    for one, other in zip(*ended):
        assert torch.equal(one, other)


def test_diloco_is_an_outer_step_over_differences(job: Any) -> None:
    ours, theirs = model(), model()
    make = lambda network: torch.optim.AdamW(network.parameters(), lr=1e-2)  # noqa: E731
    diloco = pserver_torch().DiLoCo(ours.parameters(), make(ours), every=5, client=job())
    inner = make(theirs)
    outer_weights = [parameter.detach().clone().requires_grad_() for parameter in theirs.parameters()]
    outer = torch.optim.SGD(outer_weights, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(40):
        inputs, targets = batch(step)
        torch.nn.functional.cross_entropy(ours(inputs), targets).backward()
        is_outer = diloco.step()
        torch.nn.functional.cross_entropy(theirs(inputs), targets).backward()
        inner.step()
        inner.zero_grad()
        assert is_outer == (step % 5 == 4)
        if is_outer:
            for weight, parameter in zip(outer_weights, theirs.parameters()):
                weight.grad = weight.detach() - parameter.detach()
            outer.step()
            with torch.no_grad():
                for weight, parameter in zip(outer_weights, theirs.parameters()):
                    parameter.copy_(weight)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_mistakes_of_optimizers_say_what_to_do(job: Any) -> None:
    module, client, network = pserver_torch(), job(), model()
    refused = [
        ({"rule": "best"}, "expected adadelta, adagrad"),
        ({"rule": "sgd", "beta": 1}, "has no setting beta"),
        ({"rule": "optimizer: SGD", "momentum": 0.9}, "expected them in the text"),
        ({"rule": "rule: 'w = '"}, "rule"),
    ]
    for settings, text in refused:
        with pytest.raises(pserver.Refused, match=text):
            module.Optimizer(network.parameters(), client=client, **settings)
    with pytest.raises(pserver.Refused, match="name of its own"):
        module.Optimizer([("a", network[0].weight), ("a", network[0].bias)], client=client)
    optimizer = module.Optimizer(network.parameters(), client=client)
    with pytest.raises(pserver.Refused, match="all groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(pserver.Refused):
        module.Optimizer(torch.nn.Linear(5, 5).parameters(), client=client)
    table = torch.nn.Embedding(4, 2, sparse=True)
    network[0].weight.grad = torch.ones(16, 12).to_sparse()
    with pytest.raises(pserver.Refused, match="sparse gradient"):
        optimizer.step()
    assert table is not None


def test_tensors_whose_memory_is_not_their_value_are_refused(job: Any) -> None:
    client = job()
    client.init_all({"w": torch.zeros(1)}, "optimizer: SGD const_lr { learning_rate: 1 }")
    negated = torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag
    assert negated.is_neg() and negated.is_contiguous()
    refused = {
        "resolve_neg": negated,
        "detach": torch.ones(1, requires_grad=True),
        "strided": torch.ones(1).to_sparse(),
        "meta": torch.ones(1, device="meta"),
        "contiguous": torch.ones(4)[::2],
    }
    for text, tensor in refused.items():
        with pytest.raises(pserver.Refused, match=text):
            client.push({"w": tensor})
    client.push({"w": negated.resolve_neg()})
    assert client.pull(["w"])["w"].tolist() == [2]
