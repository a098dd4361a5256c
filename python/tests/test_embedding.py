"""Embeddings over tables of rows, beside PyTorch's own."""

import threading
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()

HEIGHT, WIDTH = 500, 8


def module() -> Any:
    import pserver.torch

    return pserver.torch


class Ours(torch.nn.Module):  # type: ignore[misc]
    """A table of servers, begun with zeros, before a dense layer."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        made = getattr(module(), kind)
        self.table = made(HEIGHT, WIDTH, initial="constant { value: 0.25 }", **settings)
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.head(self.table(*given, **named))


class Theirs(torch.nn.Module):  # type: ignore[misc]
    """The same of PyTorch."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.table = getattr(torch.nn, kind)(HEIGHT, WIDTH, sparse=True, **settings)
        with torch.no_grad():
            self.table.weight.fill_(0.25)
            if settings.get("padding_idx") is not None:
                self.table.weight[settings["padding_idx"]] = 0
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, 1)

    forward = Ours.forward


def ids_of(step: int, *shape: int) -> Any:
    random = torch.Generator().manual_seed(step)
    return (torch.rand(*shape, generator=random) ** 3 * HEIGHT).long()


def given_of(kind: str, settings: dict[str, Any], step: int) -> tuple[list[Any], dict[str, Any]]:
    if kind == "Embedding":
        return [ids_of(step, 20, 3)], {}
    offsets = torch.tensor([0, 4, 4, 20])
    if settings["mode"] == "sum":
        weights = torch.linspace(0.5, 2, 30)
        return [ids_of(step, 30), offsets], {"per_sample_weights": weights}
    return [ids_of(step, 10, 3)], {}


CASES = [
    ("Embedding", {}),
    ("Embedding", {"padding_idx": 3}),
    ("EmbeddingBag", {"mode": "sum"}),
    ("EmbeddingBag", {"mode": "mean"}),
    ("EmbeddingBag", {"mode": "mean", "padding_idx": 0}),
]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind, settings", CASES)
def test_rows_are_those_of_torchs_embedding(job: Any, kind: str, settings: Any, is_ahead: bool) -> None:
    client = job(2)
    ours, theirs = Ours(kind, **settings), Theirs(kind, **settings)
    optimizer = module().Optimizer(ours.named_parameters(), "sgd", 0.01, client=client)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for step in range(40):
        given, named = given_of(kind, settings, step)
        losses = [(network(*given, **named) - 1).square().mean() for network in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        if is_ahead:
            ours.table.prefetch(given_of(kind, settings, step + 1)[0][0])
        for one in losses:
            one.backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    every = torch.arange(HEIGHT)
    with torch.no_grad():
        seen = torch.from_numpy(client.pull_rows("table.weight", every.numpy()))
    seen[settings.get("padding_idx", 0)] = theirs.table.weight[settings.get("padding_idx", 0)].detach()
    torch.testing.assert_close(seen, theirs.table.weight.detach(), rtol=1e-5, atol=1e-5)


def test_a_table_that_is_not_lazy_is_a_dense_parameter(job: Any) -> None:
    ours, theirs = Ours("Embedding", lazy=False), Theirs("Embedding")
    theirs.table.sparse = False
    optimizer = module().Optimizer(ours.named_parameters(), "adam", 0.05, client=job())
    reference = torch.optim.Adam(theirs.parameters(), lr=0.05)
    for step in range(30):
        given = ids_of(step, 16)
        losses = [(network(given) - 1).square().mean() for network in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        ours.table.prefetch(ids_of(step + 1, 16))
        for one in losses:
            one.backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()


def loss_of_some(network: Any, step: int, rank: int) -> Any:
    """The loss of a rank's batch; the second rank has none in every third step."""
    if rank == 0 or step % 3:
        return (network(ids_of(2 * step + rank, 12)) - 1).square().mean()
    return None


def train_two(
    in_ranks: Any, clients: list[Any], networks: list[Any], loss: Any, steps: int, *rule: Any, **given: Any
) -> list[Any]:
    """Both ranks make these steps; the optimizer's norm after each of the first rank's, where it clips."""
    norms: list[Any] = []

    def run(rank: int) -> None:
        optimizer = module().Optimizer(networks[rank].named_parameters(), *rule, client=clients[rank], **given)
        for step in range(steps):
            one = loss(networks[rank], step, rank)
            if one is not None:
                one.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and "max_norm" in given:
                norms.append(optimizer.total_norm)

    in_ranks(run)
    return norms


def train_theirs(theirs: Any, reference: Any, loss: Any, steps: int, before_step: Any = lambda step: None) -> None:
    """The same by PyTorch, with the mean of both ranks' gradients."""
    for step in range(steps):
        for rank in range(2):
            one = loss(theirs, step, rank)
            if one is not None:
                (one / 2).backward()
        before_step(step)
        reference.step()
        reference.zero_grad()


def test_two_trainers_share_a_table_and_one_may_have_no_rows(job: Any, in_ranks: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    networks = [Ours("Embedding"), Ours("Embedding")]
    theirs = Theirs("Embedding")
    train_two(in_ranks, clients, networks, loss_of_some, 20, "sgd", 0.1)
    train_theirs(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), loss_of_some, 20)
    with torch.no_grad():
        every = torch.arange(HEIGHT)
        torch.testing.assert_close(networks[0].table(every), theirs.table(every), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(networks[0].head.weight, networks[1].head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("rule, rate, lazy", [("sgd", 0.5, True), ("adam", 0.02, False), ("sgd", 0.5, False)])
def test_the_norm_of_tables_and_weights_together_is_clipped(
    job: Any, in_ranks: Any, rule: str, rate: float, lazy: bool
) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    networks = [Ours("Embedding", lazy=lazy), Ours("Embedding", lazy=lazy)]
    theirs = Theirs("Embedding")
    theirs.table.sparse = False
    norms = train_two(in_ranks, clients, networks, loss_of_some, 20, rule, rate, max_norm=0.3)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[rule]

    def clip(step: int) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3))
        assert norms[step] == pytest.approx(norm, rel=1e-4)

    train_theirs(theirs, kind(theirs.parameters(), lr=rate), loss_of_some, 20, clip)
    assert len(norms) == 20 and any(norm < 0.3 for norm in norms) and any(norm > 0.3 for norm in norms)
    with torch.no_grad():
        every = torch.arange(HEIGHT)
        torch.testing.assert_close(networks[0].table(every), theirs.table(every), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(networks[0].head.weight, theirs.head.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(networks[0].head.weight, networks[1].head.weight, rtol=0, atol=0)


def test_a_table_without_a_gradient_anywhere_stays_as_it_is(job: Any, in_ranks: Any) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    networks = [Ours("Embedding", lazy=False), Ours("Embedding", lazy=False)]
    theirs = Theirs("Embedding")
    theirs.table.sparse = False
    ids = torch.arange(40)

    def loss(network: Any, step: int, rank: int) -> Any:
        # The table has no part in every third step, and in one of two ranks' every second.
        if step % 3 == 0 or (step % 2 and rank):
            return network.head(torch.ones(2, WIDTH) * step).square().mean()
        return (network(ids + step + rank) - 1).square().mean()

    def check(step: int) -> None:
        assert (theirs.table.weight.grad is None) == (step % 3 == 0)

    train_two(in_ranks, clients, networks, loss, 15, "adamw", 0.01)
    train_theirs(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), loss, 15, check)
    with torch.no_grad():
        every = torch.arange(HEIGHT)
        torch.testing.assert_close(networks[0].table(every), theirs.table(every), rtol=1e-5, atol=1e-5)


def test_gradients_of_several_passes_are_summed_or_dropped(job: Any) -> None:
    client = job()
    ours, theirs = Ours("Embedding"), Theirs("Embedding")
    optimizer = module().Optimizer(ours.named_parameters(), "sgd", 0.1, client=client)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for network, one in ((ours, optimizer), (theirs, reference)):
        network(ids_of(0, 9)).sum().backward()
        one.zero_grad()
        for step in (1, 2):
            (network(ids_of(step, 9)).sum() * network(ids_of(step + 5, 4)).mean()).backward()
        one.step()
        one.zero_grad()
    every = torch.arange(HEIGHT)
    with torch.no_grad():
        torch.testing.assert_close(ours.table(every), theirs.table(every), rtol=1e-5, atol=1e-5)
    assert client.rows("table.weight").tolist() == sorted(
        set(torch.cat([ids_of(1, 9), ids_of(2, 9), ids_of(6, 4), ids_of(7, 4)]).tolist())
    )


def test_the_wait_for_rows_is_counted_and_a_prefetch_shortens_it(job: Any) -> None:
    ours = Ours("Embedding")
    client = job()
    optimizer = module().Optimizer(ours.named_parameters(), "sgd", 0.1, client=client)
    whole, pull = client.pull_rows, threading.Event()

    def slow(*given: Any) -> Any:
        assert pull.wait(30)
        return whole(*given)

    client.pull_rows = slow
    # The rows of the first batch arrive when the test releases them.
    threading.Timer(0.2, pull.set).start()
    ours(ids_of(0, 9)).sum().backward()
    waited = ours.table.seconds_waited
    assert waited > 0.1
    # The next batch is fetched at once, and the program asks for it later.
    ours.table.prefetch(ids_of(1, 9))
    optimizer.step()
    ours.table._table._prefetched[0].wait()
    assert ours.table.seconds_waited > waited
    pull.clear()
    ours(ids_of(1, 9))


def test_mistakes_with_embeddings_say_what_to_do(job: Any) -> None:
    ours = Ours("Embedding")
    with pytest.raises(pserver.Refused, match="without servers"):
        ours(torch.tensor([1]))
    module().Optimizer(ours.named_parameters(), "sgd", 0.1, client=job())
    for ids, text in [([1.0], "ids of torch.float32"), ([HEIGHT], "500"), ([-1], "-1")]:
        with pytest.raises(pserver.Refused, match=text):
            ours(torch.tensor(ids))
    with pytest.raises(pserver.Refused, match="were not used"):
        for step in range(20):
            ours.table.prefetch(ids_of(step, 3))
    with pytest.raises(pserver.Refused, match='expected "sum" or "mean"'):
        module().EmbeddingBag(10, 2, mode="max")
    with pytest.raises(pserver.Refused, match="padding_idx"):
        module().Embedding(10, 2, 10)
