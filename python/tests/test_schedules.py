"""Schedules of learning rates and of other settings, beside PyTorch's own optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import need_torch

torch = need_torch()

from killed import kill, servers  # noqa: E402

import pserver  # noqa: E402

schedules = torch.optim.lr_scheduler

STEPS = 12
Change = Callable[[Any, int], None]


def module() -> Any:
    import pserver.torch

    return pserver.torch


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """As its paper has it; PyTorch has none."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.99), "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                step = (first * mean + (1 - first) * weight.grad).sign() + group["weight_decay"] * weight
                weight.sub_(group["lr"] * step)
                mean.mul_(second).add_(weight.grad, alpha=1 - second)


THEIRS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "lion": Lion,
}


def network() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def loss(model: Any, step: int, rank: int) -> Any:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return model(inputs).square().mean() + model(inputs).sum() * 0.1


def train(model: Any, optimizer: Any, change: Change, steps: range, ranks: range) -> None:
    """Steps by the mean of the losses of these ranks. ``change`` is called before the gradients are computed."""
    for step in steps:
        change(optimizer, step)
        for rank in ranks:
            (loss(model, step, rank) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def scheduled(make: Callable[[Any], Any]) -> Callable[[Any], Change]:
    """Changes by a scheduler of PyTorch, which is made for the optimizer at once, and steps before each step but one."""

    def begin(optimizer: Any) -> Change:
        scheduler = make(optimizer)
        return lambda _, step: scheduler.step() if step > 0 else None

    return begin


def every_step(change: Callable[[dict[str, Any], int], None]) -> Callable[[Any], Change]:
    return lambda _: lambda optimizer, step: [change(group, step) for group in optimizer.param_groups] and None


def check(
    job: Any, in_ranks: Any, rule: str, settings: dict[str, Any], begin: Callable[[Any], Change], **how: Any
) -> Any:
    """Trains with two trainers beside PyTorch's optimizer with the mean of their losses."""
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both, theirs = [network(), network()], network()

    def run(rank: int) -> None:
        one = module().Optimizer(both[rank].named_parameters(), rule, 0.02, client=clients[rank], **settings, **how)
        train(both[rank], one, begin(one), range(STEPS), range(rank, rank + 1))

    in_ranks(run)
    reference = THEIRS[rule](theirs.parameters(), lr=0.02, **settings)
    train(theirs, reference, begin(reference), range(STEPS), range(2))
    plain = network()
    unscheduled = THEIRS[rule](plain.parameters(), lr=0.02, **settings)
    train(plain, unscheduled, lambda *_: None, range(STEPS), range(2))
    for model in both:
        assert_alike(model, theirs)
    assert not any(torch.allclose(one, other, rtol=1e-4) for one, other in zip(plain.parameters(), theirs.parameters()))


SCHEDULERS = {
    "one_cycle": scheduled(lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=STEPS)),
    "cyclic": scheduled(lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4)),
}


@pytest.mark.parametrize("how", [{}, {"overlap": True, "bucket_bytes": 1}, {"max_norm": 0.3}], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_cycle_of_rate_and_momentum_is_torchs(job: Any, in_ranks: Any, scheduler: str, rule: str, how: Any) -> None:
    settings = {"momentum": 0.9, "nesterov": True} if rule == "sgd" else {}
    if "max_norm" not in how:
        return check(job, in_ranks, rule, settings, SCHEDULERS[scheduler], **how)
    ours, theirs = network(), network()
    optimizer = module().Optimizer(ours.named_parameters(), rule, 0.02, client=job(2), **settings, **how)
    reference = THEIRS[rule](theirs.parameters(), lr=0.02, **settings)
    changes = [SCHEDULERS[scheduler](one) for one in (optimizer, reference)]
    for step in range(STEPS):
        changes[0](optimizer, step)
        changes[1](reference, step)
        loss(ours, step, 0).backward()
        loss(theirs, step, 0).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), how["max_norm"])
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert_alike(ours, theirs)


def decay(group: dict[str, Any], step: int) -> None:
    """From what the optimizer was constructed with, up, and to zero."""
    group["weight_decay"] = [0.3, 0.5, 2.0, 0.0][step % 4]


@pytest.mark.parametrize("rule", THEIRS)
def test_a_schedule_of_weight_decay_is_torchs(job: Any, in_ranks: Any, rule: str) -> None:
    check(job, in_ranks, rule, {"weight_decay": 0.3}, every_step(decay))


def betas(group: dict[str, Any], step: int) -> None:
    group["betas"] = (0.95 - 0.05 * step, 0.99 - 0.01 * step)
    group["eps"] = 10.0 ** -(step % 6) if "eps" in group else None


CHANGES: list[tuple[str, dict[str, Any], Callable[[dict[str, Any], int], Any]]] = [
    ("adam", {}, betas),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}, betas),
    ("adamw", {"amsgrad": True}, betas),
    ("adamw", {}, betas),
    ("lion", {"weight_decay": 0.0}, lambda group, step: group.update(betas=(0.8, 0.9), weight_decay=0.5 * step)),
    ("sgd", {"momentum": 0.9}, lambda group, step: group.update(momentum=0.9 - 0.05 * step)),
    (
        "sgd",
        {"momentum": 0.9, "dampening": 0.5},
        lambda group, step: group.update(momentum=1.5 - 0.1 * step, dampening=0.1 * step),
    ),
    ("adagrad", {"lr_decay": 0.1}, lambda group, step: group.update(lr_decay=0.3 * (step % 3), eps=0.1 * step)),
    ("adadelta", {}, lambda group, step: group.update(rho=0.9 - 0.05 * step, eps=0.1 / (1 + step))),
    ("rmsprop", {}, lambda group, step: group.update(alpha=0.9 - 0.05 * step, eps=0.1 / (1 + step))),
    (
        "rmsprop",
        {"centered": True, "momentum": 0.9, "weight_decay": 0.1},
        lambda group, step: group.update(alpha=0.9 - 0.05 * step, momentum=0.1 + 0.05 * step, weight_decay=0.02 * step),
    ),
]


@pytest.mark.parametrize(("rule", "settings", "change"), CHANGES, ids=[str(number) for number in range(len(CHANGES))])
def test_settings_of_each_step_are_torchs(
    job: Any, in_ranks: Any, rule: str, settings: dict[str, Any], change: Callable[[dict[str, Any], int], Any]
) -> None:
    check(job, in_ranks, rule, settings, every_step(change))


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_schedule_goes_on_with_servers_that_were_killed(tmp_path: Path, rule: str) -> None:
    settings = {"momentum": 0.9} if rule == "sgd" else {}
    ours, theirs = network(), network()
    reference = THEIRS[rule](theirs.parameters(), lr=0.02, **settings)
    with pserver.connect(servers=2, checkpoint_dir=tmp_path, deadline=60) as client:
        optimizer = module().Optimizer(ours.named_parameters(), rule, 0.02, client=client, **settings)
        changes = [SCHEDULERS["one_cycle"](one) for one in (optimizer, reference)]
        for step in range(STEPS):
            if step in (3, 7):
                # These steps have no checkpoint: servers replay their gradients with the settings that these carry.
                for process in servers(client):
                    kill(process)
            train(ours, optimizer, changes[0], range(step, step + 1), range(1))
        # The whole state comes from replayed gradients.
        for process in servers(client):
            kill(process)
        optimizer.fetch_weights()
        found = optimizer.state_dict()["state"]
    train(theirs, reference, changes[1], range(STEPS), range(1))
    assert_alike(ours, theirs)
    for at, (_, state) in enumerate(reference.state_dict()["state"].items()):
        for name in {"sgd": ["momentum_buffer"], "adam": ["exp_avg", "exp_avg_sq"]}[rule]:
            torch.testing.assert_close(found[at][name], state[name], rtol=1e-8, atol=1e-11)


def test_a_state_brings_its_settings(job: Any) -> None:
    saved, theirs = network(), network()
    reference = torch.optim.Adam(theirs.parameters(), lr=0.02)
    train(theirs, reference, SCHEDULERS["one_cycle"](reference), range(5), range(1))
    state = reference.state_dict()
    assert state["param_groups"][0]["betas"] != (0.9, 0.999)
    saved.load_state_dict(theirs.state_dict())
    ours = network()
    optimizer = module().Optimizer(ours.named_parameters(), "adam", 0.5, client=job())
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["betas"] == state["param_groups"][0]["betas"]
    for model, one in ((ours, optimizer), (theirs, reference)):
        train(model, one, lambda *_: None, range(5, 9), range(1))
    assert_alike(ours, theirs)
    again = torch.optim.Adam(saved.parameters(), lr=0.1)
    again.load_state_dict({key: value for key, value in optimizer.state_dict().items() if key != "rule"})
    assert again.param_groups[0]["betas"] == state["param_groups"][0]["betas"]


def test_settings_that_make_another_rule_are_refused(job: Any) -> None:
    refused: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("sgd", {}, {"momentum": 0.9}, "momentum is 0.9 at a step, and the rule on servers has none; .*above 0"),
        ("sgd", {"momentum": 0.9}, {"momentum": 0.0}, "momentum is 0.0 at a step, and servers keep 0.9; .*above 0"),
        ("sgd", {"momentum": 0.9}, {"nesterov": True}, "nesterov is True at a step, and servers keep False"),
        ("sgd", {"momentum": 0.9}, {"dampening": 0.5}, "dampening is 0.5 .* has none; .*above 0"),
        ("adam", {}, {"weight_decay": 0.1}, "weight_decay is 0.1 .* has none; .*weight_decay above 0"),
        ("adam", {}, {"amsgrad": True}, "amsgrad is True .* constructed with the other"),
        ("adam", {}, {"maximize": True}, "maximize is True"),
        ("adam", {}, {"betas": (0.9, 1.0)}, '"beta_2" = 1; expected one in'),
        ("adam", {}, {"betas": (0.9,)}, "betas is .0.9,. at a step; expected numbers of 0 or more, as"),
        ("adam", {}, {"betas": "all"}, "betas is 'all' at a step; expected numbers"),
        ("adam", {}, {"eps": float("nan")}, "eps is nan at a step; expected numbers"),
        ("adam", {}, {"eps": -1.0}, "eps is -1.0 at a step; expected numbers"),
        ("adam", {"betas": (0.0, 0.9)}, {"betas": (0.5, 0.9)}, "beta_1 = 0.5 .configured as 0., .*other operations"),
        ("adagrad", {}, {"initial_accumulator_value": 1.0}, "initial_accumulator_value is 1.0 .* constructed with"),
        ("rmsprop", {}, {"centered": True}, "centered is True"),
    ]
    for rule, settings, change, text in refused:
        with pserver.connect(servers=1, deadline=30) as client:
            model = network()
            one = module().Optimizer(model.named_parameters(), rule, 0.02, client=client, **settings)
            loss(model, 0, 0).backward()
            before = {key: one.param_groups[0].get(key, False) for key in change}
            one.param_groups[0].update(change)
            with pytest.raises(pserver.Refused, match=text):
                one.step()
            assert all(parameter.version == 0 for parameter in client.parameters()), text
            one.param_groups[0].update(before)
            one.step()


def test_settings_that_change_after_gradients_were_sent_are_refused(job: Any) -> None:
    model = network()
    settings = {"overlap": True, "bucket_bytes": 1}
    one = module().Optimizer(model.named_parameters(), "adam", 0.02, client=job(), **settings)
    loss(model, 0, 0).backward()
    one.param_groups[0]["betas"] = (0.5, 0.9)
    text = "settings {'beta_1': 0.5, 'beta_2': 0.9} after gradients were sent with {}; expected .*overlap=False"
    with pytest.raises(pserver.Refused, match=text):
        one.step()
    one.param_groups[0]["betas"] = (0.9, 0.999)
    one.step()


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_rows_of_a_lazy_table_take_settings_and_exact_ones_refuse_them(job: Any, rule: str) -> None:
    settings = {"momentum": 0.9} if rule == "sgd" else {}

    def step(table: Any) -> None:
        table(torch.arange(3)).sum().backward()

    def made(lazy: bool, client: Any) -> tuple[Any, Any]:
        table = module().Embedding(9, 2, initial="constant { value: 0.25 }", lazy=lazy)
        return table, module().Optimizer(table.named_parameters(), rule, 0.5, client=client, **settings)

    def change(optimizer: Any, step: int) -> None:
        name, values = ("momentum", [0.5, 0.7]) if rule == "sgd" else ("betas", [(0.5, 0.9), (0.6, 0.8)])
        optimizer.param_groups[0][name] = values[step]

    theirs = torch.nn.Parameter(torch.full((3, 2), 0.25))
    reference = THEIRS[rule]([theirs], lr=0.5, **settings)
    table, optimizer = made(True, job())
    for at in range(2):
        change(optimizer, at)
        change(reference, at)
        step(table)
        optimizer.step()
        theirs.sum().backward()
        reference.step()
        for one in (optimizer, reference):
            one.zero_grad()
    torch.testing.assert_close(table(torch.arange(3)).detach(), theirs.detach())
    with pserver.connect(servers=1, deadline=30) as client:
        exact, optimizer = made(False, client)
        step(exact)
        change(optimizer, 0)
        with pytest.raises(pserver.Refused, match="table that replays missed updates.*expected none, or lazy: true"):
            optimizer.step()
        assert [parameter.version for parameter in client.parameters()] == [0]


def test_an_outer_step_of_diloco_carries_settings(job: Any) -> None:
    ours, theirs = network(), network()
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    diloco = module().DiLoCo(ours.parameters(), inner[0], every=1, client=job())
    weights = [parameter.detach().clone().requires_grad_() for parameter in theirs.parameters()]
    outer = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        for group in (diloco.outer.param_groups[0], outer.param_groups[0]):
            group["momentum"] = 0.9 - 0.15 * step
        loss(ours, step, 0).backward()
        assert diloco.step()
        loss(theirs, step, 0).backward()
        inner[1].step()
        inner[1].zero_grad()
        for weight, parameter in zip(weights, theirs.parameters()):
            weight.grad = weight.detach() - parameter.detach()
        outer.step()
        with torch.no_grad():
            for weight, parameter in zip(weights, theirs.parameters()):
                parameter.copy_(weight)
    assert_alike(ours, theirs)


def test_calls_carry_settings_by_name(job: Any) -> None:
    client = job()
    config = "rule: 'param mu in (0, 1) = 0.5; state m = 0; m = mu * m + g; w -= lr * m' l2: 0.5 regularizer: Coupled"
    assert client.init_all({"w": np.zeros(2)}, f"{config} const_lr {{ learning_rate: 1 }}")
    ones = {"w": np.ones(2)}
    client.push(ones)
    assert client.push_pull(ones, settings={"mu": 0.25, "l2": 0.0})["w"].tolist() == [-2.25, -2.25]
    out = {"w": np.empty(2)}
    client.start_push_pull(ones, out, rate=0.5, settings={"l2": 0.0}).wait()
    assert out["w"].tolist() == [-3.0625, -3.0625]
    client.start_push(ones, settings={"mu": 0.75, "l2": 0.0}).wait()
    assert client.pull(["w"])["w"].tolist() == [-5.28125, -5.28125]
    for settings, text in [({"mu": 1.0}, "expected one in"), ({"nu": 0.5}, "expected some of: l2, mu")]:
        for call in (client.push, client.push_pull, client.start_push):
            with pytest.raises(pserver.Refused, match=f'parameter "w": the step carries .*{text}'):
                call(ones, settings=settings)
    with pytest.raises(TypeError):
        client.push(ones, settings={"mu": "half"})
    # Beside a learning rate that this client's gradients bring by themselves.
    assert not client.init_all({"w": np.zeros(2)}, f"{config} const_lr {{ learning_rate: 0.5 }}")
    client.set({"w": np.zeros(2)})
    client.set_state("w", {"m": np.ones(2)}, 4)
    assert client.push_pull(ones, settings={"mu": 0.25})["w"].tolist() == [-0.625, -0.625]
