"""The optimizer's state in PyTorch's layout: out of servers, into them, and into PyTorch's own optimizers."""

import copy
import io
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()

Trained = tuple[Any, Any]
"""A model and its optimizer."""


def optimizer_of(network: Any, rule: str, client: Any, **settings: Any) -> Any:
    import pserver.torch

    return pserver.torch.Optimizer(network.named_parameters(), rule, client=client, **settings)


def model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def loss(network: Any, step: int) -> Any:
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 12, generator=random)
    return torch.nn.functional.cross_entropy(network(inputs), (inputs.sum(1).abs() * 2).long() % 3)


def train(one: Trained, first: int, last: int) -> None:
    network, optimizer = one
    for step in range(first, last):
        loss(network, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(one: Any, other: Any, tolerance: float = 0.0) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def saved(state: Any) -> Any:
    """The state after a way through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


RULES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening": ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
    "adam": ("adam", torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.01}),
    "adam amsgrad": ("adam", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": ("adamw", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw amsgrad": ("adamw", torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adagrad": ("adagrad", torch.optim.Adagrad, {"lr": 0.05}),
    "adagrad begun": (
        "adagrad",
        torch.optim.Adagrad,
        {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01, "weight_decay": 0.01},
    ),
    "adadelta": ("adadelta", torch.optim.Adadelta, {"lr": 1.0}),
    "rmsprop": ("rmsprop", torch.optim.RMSprop, {"lr": 1e-3}),
    "rmsprop centered": (
        "rmsprop",
        torch.optim.RMSprop,
        {"lr": 1e-3, "centered": True, "momentum": 0.5, "alpha": 0.9, "eps": 1e-4},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_weights_are_those_of_torchs_optimizer_after_200_steps_with_a_schedule(job: Any, name: str) -> None:
    rule, kind, settings = RULES[name]
    ours, theirs = model(), model()
    optimizer, reference = optimizer_of(ours, rule, job(2), **settings), kind(theirs.parameters(), **settings)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 150) for one in (optimizer, reference)]
    for step in range(200):
        train((ours, optimizer), step, step + 1)
        train((theirs, reference), step, step + 1)
        for schedule in schedules:
            schedule.step()
    assert_alike(ours, theirs, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_torchs_optimizer_goes_on_from_the_servers_state_and_servers_from_its(job: Any, name: str) -> None:
    rule, kind, settings = RULES[name]
    ours = model()
    optimizer = optimizer_of(ours, rule, job(2), **settings)
    # Before the first step, and after some.
    for first, last in ((0, 3), (3, 53)):
        theirs = copy.deepcopy(ours)
        reference = kind(theirs.parameters(), **settings)
        reference.load_state_dict(saved(optimizer.state_dict()))
        train((ours, optimizer), first, last)
        train((theirs, reference), first, last)
        assert_alike(ours, theirs, 1e-6)
    its, mine = reference.state_dict(), optimizer.state_dict()
    for key, state in its["state"].items():
        assert mine["state"][key].keys() == state.keys()
        for of, tensor in state.items():
            torch.testing.assert_close(mine["state"][key][of], tensor, rtol=1e-4, atol=1e-6)
    # The other way round: into another job.
    again = copy.deepcopy(theirs)
    with pserver.connect(servers=3, deadline=30) as client:
        other = optimizer_of(again, rule, client, **{**settings, "lr": 0.5})
        other.load_state_dict(saved(its))
        assert other.param_groups[0]["lr"] == settings["lr"]
        train((again, other), 53, 103)
    train((theirs, reference), 53, 103)
    assert_alike(again, theirs, 1e-6)


LION = "rule: 'state m = 0; w -= lr * sign(0.9 * m + 0.1 * g) * n ^ -0.5; m = 0.99 * m + 0.01 * g'"


CASES = [
    ("adamw", torch.float32),
    ("adamw", torch.bfloat16),
    ("sgd", torch.bfloat16),
    ("lion", torch.float64),
    (LION, torch.float32),
]


@pytest.mark.parametrize("rule, type", CASES, ids=str)
def test_another_job_goes_on_to_the_bit(job: Any, in_ranks: Any, rule: str, type: Any) -> None:
    def loss_of(network: Any, step: int) -> None:
        inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(step)).to(type)
        network(inputs).square().mean().backward()

    def go_on(one: Trained, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(one[0], step)
            one[1].step()
            one[1].zero_grad()

    whole = model().to(type)
    optimizer = optimizer_of(whole, rule, job(), lr=1e-2)
    go_on((whole, optimizer), 0, 7)
    state = saved({"model": whole.state_dict(), "optimizer": optimizer.state_dict()})
    go_on((whole, optimizer), 7, 12)
    # Three servers, and two trainers with the same batches, all of which load the state.
    with pserver.Servers(3, trainers=2) as servers:
        models = [model(1).to(type), model(1).to(type)]
        states: list[Any] = [None, None]

        def trainer(rank: int) -> None:
            with pserver.Client(servers.address, trainer=rank, deadline=30) as client:
                resumed = optimizer_of(models[rank], rule, client, lr=0.5)
                # A state of half precision has the weights, as servers have them.
                if type != torch.bfloat16:
                    models[rank].load_state_dict(state["model"])
                    resumed.set_weights()
                resumed.load_state_dict(state["optimizer"])
                go_on((models[rank], resumed), 7, 12)
                states[rank] = resumed.state_dict()

        in_ranks(trainer)
    assert_alike(models[0], models[1])
    assert_alike(models[0], whole)
    for of, expected in optimizer.state_dict()["state"].items():
        for rank in range(2):
            assert states[rank]["state"][of].keys() == expected.keys()
            assert all(torch.equal(states[rank]["state"][of][key], tensor) for key, tensor in expected.items())


def test_a_state_that_is_refused_changes_nothing(job: Any) -> None:
    ours = model()
    optimizer = optimizer_of(ours, "adam", job(2), lr=0.01)
    train((ours, optimizer), 0, 2)
    before = optimizer.state_dict()
    one = {**before["state"][3]}

    def state(**changes: Any) -> dict[str, Any]:
        return {**before, "state": {**before["state"], 3: {**one, **changes}}}

    def group(**changes: Any) -> dict[str, Any]:
        return {**before, "param_groups": [{**before["param_groups"][0], **changes}]}

    lacking = {key: tensor for key, tensor in one.items() if key != "exp_avg_sq"}
    refused = [
        ({}, "of an optimizer's state_dict"),
        ({**before, "rule": "adamw"}, "'adamw'; expected one of 'adam'"),
        ({**before, "param_groups": []}, r"groups with \[\] parameters; expected \[4\]"),
        (group(params=[0, 1, 2]), r"groups with \[3\] parameters"),
        (group(betas=(0.5,)), "betas is .0.5,. in the state; expected numbers of 0 or more, as .0.9, 0.999."),
        (group(weight_decay=0.5), "weight_decay is 0.5 in the state, and the rule on servers has none"),
        (group(amsgrad=True), "amsgrad is True in the state"),
        (group(maximize=True), "maximize is True in the state"),
        (group(decoupled_weight_decay=True), "decoupled_weight_decay is True"),
        ({**before, "state": {**before["state"], 3: lacking}}, r"'2.bias'|\"2.bias\".*expected .*'exp_avg_sq'"),
        (state(exp_avg=torch.ones(4)), r'"exp_avg" has shape \(4,\); expected \(3,\)'),
        (state(exp_avg=1.0), '"exp_avg" is of float; expected a tensor'),
        (state(step=torch.tensor(0.5)), '"step" is 0.5; expected a number of updates'),
        (state(step="many"), '"step" is many'),
        (state(step=torch.tensor(-1.0)), '"step" is -1'),
        (state(step=float("nan")), '"step" is nan'),
        (state(step=torch.ones(2)), '"step" is'),
        (state(step=1e30), "at most"),
        (state(exp_avg_sq=torch.full((3,), float("nan"))), "has NaN"),
    ]
    for given, text in refused:
        with pytest.raises(pserver.Refused, match=text):
            optimizer.load_state_dict(given)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"], text
        for key, tensors in before["state"].items():
            assert all(torch.equal(tensor, after["state"][key][of]) for of, tensor in tensors.items()), text
    assert not any(optimizer.state.values())


def test_a_state_within_a_step_is_refused(job: Any) -> None:
    import pserver.torch

    ours = model()
    optimizer = pserver.torch.Optimizer(ours.parameters(), "adam", client=job(), overlap=True, bucket_bytes=1)
    loss(ours, 0).backward()
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(pserver.Refused, match="in a step; expected step"):
            call()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def with_table(lazy: bool) -> Any:
    import pserver.torch

    torch.manual_seed(4)
    table = pserver.torch.Embedding(200, 5, initial="uniform { low: -1 high: 1 }", lazy=lazy)
    return torch.nn.Sequential(table, torch.nn.Linear(5, 1))


def train_on_rows(one: Trained, first: int, last: int) -> None:
    network, optimizer = one
    for step in range(first, last):
        ids = torch.randint(0, 150, (24,), generator=torch.Generator().manual_seed(step))
        (network(ids) - 1).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("rule", ["sgd", "adam", "rule: 'state m = 0.5; m = 0.9*m + g; w -= lr*m'"])
def test_rows_of_a_table_go_on_in_another_job_to_the_bit(job: Any, monkeypatch: Any, rule: str, lazy: bool) -> None:
    import pserver.torch._table_state

    # Several pieces.
    monkeypatch.setattr(pserver.torch._table_state, "PIECE_BYTES", 500)
    ours, other = with_table(lazy), with_table(lazy)
    client = job(2)
    optimizer = optimizer_of(ours, rule, client, lr=0.1)
    begun = saved(optimizer.state_dict(tables=True))
    train_on_rows((ours, optimizer), 0, 20)
    state = saved(optimizer.state_dict(tables=True))
    rows = next(one for one in state["state"].values() if "ids" in one)
    assert rows["updates"] == 20 and 100 < len(rows["ids"]) < 150 and rows["rows"].shape == (len(rows["ids"]), 5)
    assert "ids" not in str(optimizer.state_dict())
    every = torch.arange(150).numpy()
    with pserver.connect(servers=1, deadline=30) as second:
        again = optimizer_of(other, rule, second, lr=0.1)
        # A state before the first step, then the newer one over a few steps of another kind.
        again.load_state_dict(begun)
        again.load_state_dict(state)
        other.load_state_dict(ours.state_dict())
        again.set_weights()
        trained = rows["ids"].numpy()
        assert (second.pull_rows("0.weight", trained) == client.pull_rows("0.weight", trained)).all()
        if lazy:
            train_on_rows((ours, optimizer), 20, 40)
            train_on_rows((other, again), 20, 40)
            assert_alike(ours[1], other[1])
            assert (second.pull_rows("0.weight", every) == client.pull_rows("0.weight", every)).all()
        before = again.state_dict(tables=True)
        for change, text in _broken(rows):
            key = next(key for key, one in state["state"].items() if "ids" in one)
            wrong = {**state, "state": {**state["state"], key: {**rows, **change}}}
            with pytest.raises(pserver.Refused, match=text):
                again.load_state_dict(wrong)
        groups = [{**state["param_groups"][0], "lr": lr} for lr in ("x", float("nan"))]
        changes = [{"param_groups": None}, {"param_groups": [{}]}, {"state": {key: [1]}}]
        for change in [*changes, *({"param_groups": [one]} for one in groups)]:
            with pytest.raises(pserver.Refused):
                again.load_state_dict({**state, **change})
        after = again.state_dict(tables=True)
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert after["param_groups"] == before["param_groups"]


def _broken(rows: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    ids = rows["ids"]
    return [
        ({"ids": ids.float()}, "expected a tensor of int64"),
        ({"ids": ids[:-1]}, "shape"),
        ({"ids": torch.cat([ids[:-1], ids[:1]])}, "ids that repeat"),
        ({"ids": ids - 1000}, "not of 0 to 199"),
        ({"rows": rows["rows"] * float("nan")}, "NaN or infinity"),
        ({"rows": None}, "NoneType"),
        ({"rows": rows["rows"] * 1j}, "is complex"),
        ({"updates": -1}, "updates -1"),
        ({"updates": True}, "updates True"),
        ({"extra": 1}, "expected"),
        *(({"rates": rates}, "rates with") for rates in (None, 5, [("a", 0.1)], [(1,)], [(-1, 0.1)])),
        *(({"rates": rates}, "rates with") for rates in ([(1, float("nan"))], [(99, 0.1)], [(2, 0.1), (1, 0.1)])),
    ]


def test_rows_that_were_prefetched_before_a_load_are_not_used_after_it(job: Any) -> None:
    network = with_table(True)
    optimizer = optimizer_of(network, "sgd", job(), lr=0.1)
    train_on_rows((network, optimizer), 0, 5)
    begun = optimizer.state_dict(tables=True)
    train_on_rows((network, optimizer), 5, 9)
    ids = torch.arange(8)
    network[0].prefetch(ids)
    optimizer.load_state_dict(begun)
    with torch.no_grad():
        assert torch.equal(network(ids), network(ids))
