"""A step is applied on all servers or on none, or it stays open until the same step is complete."""

from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()

NAN = float("nan")
PARAMETERS = 4


def parameters(values: float = 0.0) -> Any:
    """Several parameters, of which each server has some."""
    return [(f"w{at}", torch.nn.Parameter(torch.full((3,), values))) for at in range(PARAMETERS)]


def give(named: Any, value: float, bad: int | None = None) -> None:
    """Gradients of this value, but for a NaN in one parameter."""
    for at, (_, tensor) in enumerate(named):
        tensor.grad = torch.full((3,), value)
        if at == bad:
            tensor.grad[1] = NAN


def optimizer_of(named: Any, client: Any, *given: Any, **settings: Any) -> Any:
    import pserver.torch

    return pserver.torch.Optimizer(named, *(given or ("sgd", 1.0)), client=client, **settings)


def values(named: Any) -> list[float]:
    return [one for _, tensor in named for one in tensor.tolist()]


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("bad", range(PARAMETERS))
def test_servers_have_nothing_of_a_batch_that_is_refused(job: Any, in_ranks: Any, bad: int, groups: bool) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both = [parameters(), parameters()]

    def run(rank: int) -> None:
        named = both[rank]
        one = optimizer_of([{"params": [one]} for one in named] if groups else named, clients[rank])
        if rank == 1:
            give(named, 100.0, bad)
            with pytest.raises(pserver.Refused, match=f'"w{bad}".*NaN.*element 1'):
                one.step()
            assert one.state_dict()["param_groups"]
            one.zero_grad()
        give(named, 2.0 + 4 * rank)
        one.step()

    in_ranks(run)
    assert values(both[0]) == values(both[1]) == [-4.0] * 3 * PARAMETERS


def test_a_corrected_gradient_completes_the_step(job: Any) -> None:
    named = parameters()
    one = optimizer_of(named, job(2))
    give(named, 1.0, 2)
    with pytest.raises(pserver.Refused, match="NaN"):
        one.step()
    named[2][1].grad.nan_to_num_(nan=1.0)
    one.step()
    assert values(named) == [-1.0] * 3 * PARAMETERS


@pytest.mark.parametrize("rate", [NAN, -1.0, 1e39, "fast"])
def test_a_rate_that_is_refused_in_one_group_sends_nothing_of_others(job: Any, rate: Any) -> None:
    named = parameters()
    one = optimizer_of([{"params": [pair]} for pair in named], job(2))
    give(named, 1.0)
    one.param_groups[2]["lr"] = rate
    with pytest.raises(ValueError, match="learning rate|fast"):
        one.step()
    one.zero_grad()
    one.param_groups[2]["lr"] = 1.0
    give(named, 5.0)
    one.step()
    assert values(named) == [-5.0] * 3 * PARAMETERS


def test_another_fault_of_one_tensor_sends_nothing_of_others(job: Any) -> None:
    named = parameters()
    one = optimizer_of([{"params": [pair]} for pair in named], job(2))
    last = named[-1][1]
    faults = [(torch.ones(3).to_sparse(), "sparse"), (torch.ones(3).to(torch.float16) * 1e38, "inf")]
    for bad, text in faults:
        give(named, 100.0)
        last.grad = bad if bad.is_sparse else None
        if not bad.is_sparse:
            last.grad = torch.full((3,), float("inf"))
        with pytest.raises(pserver.Refused, match=text):
            one.step()
        one.zero_grad()
    give(named, 5.0)
    one.step()
    assert values(named) == [-5.0] * 3 * PARAMETERS


@pytest.mark.parametrize("trainers", [1, 2])
def test_with_overlap_a_step_of_which_servers_have_a_part_stays_open(job: Any, in_ranks: Any, trainers: int) -> None:
    clients = [job(2, trainers=trainers, trainer=0), *([job(trainer=1)] if trainers == 2 else [])]
    both = [parameters() for _ in clients]

    def backward(named: Any, rank: int, bad: bool) -> None:
        factors = [1.0 + rank] * PARAMETERS
        # The backward pass has the last parameter first: those behind the bad one are sent.
        factors[1] = NAN if bad else factors[1]
        # In two passes: each bucket is complete with its one parameter.
        for factor, (_, tensor) in reversed(list(zip(factors, named))):
            (factor * tensor).sum().backward()

    def run(rank: int) -> None:
        named = both[rank]
        one = optimizer_of(named, clients[rank], overlap=True, bucket_bytes=1)
        is_bad = rank == trainers - 1
        backward(named, rank, is_bad)
        if is_bad:
            assert [bucket.is_started for bucket in one._buckets] == [True, True, False, False]
            for call in (one.step, one.zero_grad, one.step):
                with pytest.raises(pserver.Refused, match="servers have.* gradients of this step"):
                    call()
            named[1][1].grad.fill_(1.0 + rank)
        one.step()
        one.zero_grad()
        backward(named, rank, False)
        one.step()

    if trainers == 2:
        in_ranks(run)
    else:
        run(0)
    assert all(values(named) == [-3.0 if trainers == 2 else -2.0] * 3 * PARAMETERS for named in both)


def test_rows_and_dense_parameters_are_sent_both_or_neither(job: Any) -> None:
    from pserver.torch import Embedding

    ids = torch.tensor([1, 4])
    network = torch.nn.ModuleDict({
        "table": Embedding(9, 2, initial="constant { value: 0 }"),
        "head": torch.nn.Linear(2, 1, bias=False),
    })
    torch.nn.init.ones_(network["head"].weight)
    one = optimizer_of(network.named_parameters(), job(2))

    def batch(rows: float, head: float) -> None:
        (rows * network["table"](ids)).sum().backward()
        network["head"].weight.grad = torch.full((1, 2), head)

    for rows, head in ((NAN, 100.0), (100.0, NAN)):
        batch(rows, head)
        with pytest.raises(pserver.Refused, match="NaN"):
            one.step()
        one.zero_grad()
    batch(1.0, 1.0)
    one.step()
    assert network["table"](ids).tolist() == [[-1, -1], [-1, -1]]
    assert network["head"].weight.tolist() == [[0, 0]]


@pytest.mark.parametrize("fragments", [1, 2])
def test_servers_have_nothing_of_an_outer_step_that_is_refused(job: Any, in_ranks: Any, fragments: int) -> None:
    from pserver.torch import DiLoCo

    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both = [parameters(), parameters()]

    def run(rank: int) -> None:
        named = both[rank]
        inner = torch.optim.SGD([tensor for _, tensor in named], 1.0)
        diloco = DiLoCo(named, inner, 4, "sgd", 1.0, momentum=0.0, nesterov=False, client=clients[rank], fragments=fragments)
        with torch.no_grad():
            for at, (_, tensor) in enumerate(named):
                tensor.fill_(NAN if rank == 1 and at == PARAMETERS - 1 else 100.0 * rank)
        if rank == 1:
            with pytest.raises(pserver.Refused, match="NaN"):
                diloco.outer_step()
        with torch.no_grad():
            for _, tensor in named:
                tensor.fill_(2.0 + 4 * rank)
        diloco.outer_step()

    in_ranks(run)
    assert values(both[0]) == values(both[1]) == [4.0] * 3 * PARAMETERS


@pytest.mark.parametrize("setting", ["skip", "accept"])
def test_nan_is_sent_to_servers_that_accept_it(job: Any, setting: str) -> None:
    named = parameters()
    one = optimizer_of(named, job(2, arguments=["--nonfinite", setting]))
    give(named, 1.0, 2)
    one.step()
    found = values(named)
    assert found[:6] == [-1.0] * 6
    assert (found[7] != found[7]) if setting == "accept" else found[6:9] == [0.0] * 3
