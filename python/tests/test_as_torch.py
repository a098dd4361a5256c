"""What programs for PyTorch expect: parameters without gradients, GradScaler, seeds, checkpoints of torch.distributed."""

import copy
import warnings
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()


def module() -> Any:
    import pserver.torch

    return pserver.torch


def network() -> Any:
    generator = torch.Generator().manual_seed(1)
    made = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("always", "sometimes", "never")}).double()
    with torch.no_grad():
        for one in made.parameters():
            one.normal_(0, 1, generator=generator)
    return made


@pytest.mark.parametrize("how", [{}, {"max_norm": 0.1}, {"overlap": True, "bucket_bytes": 1}], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_parameter_without_any_gradient_stays_and_its_state_too(job: Any, in_ranks: Any, rule: str, how: Any) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both, theirs = [network(), network()], network()
    settings: dict[str, Any] = {"weight_decay": 0.3} if rule == "adamw" else {"weight_decay": 0.3, "momentum": 0.9}
    states: list[Any] = [None, None]

    def loss(model: Any, step: int, rank: int) -> Any:
        inputs = torch.ones(4, 3, dtype=torch.float64) * (1 + step + rank)
        found = model["always"](inputs).square().mean()
        # One trainer has a gradient, or none.
        return found + model["sometimes"](inputs).sum() if (step % 3, rank) == (1, 1) else found

    def run(rank: int) -> None:
        one = module().Optimizer(both[rank].named_parameters(), rule, 0.05, client=clients[rank], **settings, **how)
        for step in range(7):
            loss(both[rank], step, rank).backward()
            one.step()
            one.zero_grad()
        states[rank] = one.state_dict()

    in_ranks(run)
    make = torch.optim.AdamW if rule == "adamw" else torch.optim.SGD
    reference = make(theirs.parameters(), lr=0.05, **settings)
    for step in range(7):
        ((loss(theirs, step, 0) + loss(theirs, step, 1)) / 2).backward()
        if "max_norm" in how:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), how["max_norm"])
        reference.step()
        reference.zero_grad()
    for model in both:
        for one, other in zip(model.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    if rule == "adamw":
        steps = [float(states[0]["state"].get(at, {}).get("step", 0)) for at in range(6)]
        assert steps == [7, 7, 2, 2, 0, 0]


def test_a_step_that_is_infinite_at_one_trainer_is_left_out_at_all(job: Any, in_ranks: Any) -> None:
    clients = [job(2, trainers=2, trainer=0), job(trainer=1)]
    both, theirs = [network()["always"], network()["always"]], network()["always"]
    scales: list[float] = [0.0, 0.0]

    def loss(model: Any, step: int, rank: int) -> Any:
        return model(torch.ones(4, 3, dtype=torch.float64) * (1 + step + rank)).square().mean()

    def run(rank: int) -> None:
        one = module().Optimizer(both[rank].named_parameters(), "adamw", 0.05, client=clients[rank])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            scaler.scale(loss(both[rank], step, rank)).backward()
            if (step, rank) == (2, 1):
                both[rank].weight.grad[0, 0] = float("inf")
            if step == 4:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
            one.zero_grad()
        scales[rank] = scaler.get_scale()

    in_ranks(run)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    for step in range(6):
        if step != 2:
            ((loss(theirs, step, 0) + loss(theirs, step, 1)) / 2).backward()
            reference.step()
            reference.zero_grad()
    for model in both:
        for one, other in zip(model.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert scales == [1024.0, 512.0]


def rows(job: Any, client: Any, seed: int | None, names: tuple[str, ...] = ("first", "second")) -> dict[str, Any]:
    """The initial rows of two tables of one width, as a program with this seed has them."""
    if seed is not None:
        torch.manual_seed(seed)
    tables = torch.nn.ModuleDict({name: module().Embedding(50, 8) for name in names})
    module().Optimizer(tables.named_parameters(), "sgd", 0.1, client=client)
    return {name: table(torch.arange(50)).detach() for name, table in tables.items()}


def test_rows_of_two_tables_differ_and_follow_the_programs_seed(job: Any) -> None:
    found = []
    for seed in (1, 1, 2):
        with pserver.connect(servers=1, deadline=30) as client:
            found.append(rows(job, client, seed))
    one, again, other = found
    for tables in found:
        assert abs(float(torch.corrcoef(torch.stack([tables["first"].ravel(), tables["second"].ravel()]))[0, 1])) < 0.2
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_rows_without_a_seed_differ_by_the_parameters_name(job: Any) -> None:
    import numpy as np

    client = job()
    client.begin_init()
    for name in ("a", "b", "c"):
        seed = "seed: 5" if name == "c" else ""
        client.init_rows(name, f"optimizer: SGD sparse {{ height: 9 width: 4 uniform {{ low: 0 high: 1 }} {seed} }}")
    client.finish_init()
    values = [client.pull_rows(name, np.arange(9)) for name in ("a", "b", "c")]
    assert not any((values[at] == values[at - 1]).all() for at in range(3))


def test_another_trainers_seed_is_no_other_optimizer(job: Any) -> None:
    first = rows(job, job(trainers=2, trainer=0), 1)
    second = rows(job, job(trainer=1), 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_by_torch_distributed_makes_no_step(job: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    client, model = job(), network()["always"]
    one = module().Optimizer(model.named_parameters(), "adam", 0.1, client=client)
    for steps in range(3):
        before = copy.deepcopy(model.state_dict())
        state = get_optimizer_state_dict(model, one)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert [int(of["step"]) for of in state["state"].values()] == [steps, steps]
        set_optimizer_state_dict(model, one, state)
        assert [parameter.version for parameter in client.parameters()] == [steps, steps]
        model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        one.step()
        one.zero_grad()


def test_a_second_experiment_in_one_job_is_told_of_the_first(job: Any) -> None:
    client = job()

    def experiment() -> Any:
        model = network()["always"]
        one = module().Optimizer(model.named_parameters(), "sgd", 0.1, client=client)
        model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        one.step()
        return one

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment()
    with pytest.warns(UserWarning, match="earlier optimizer of this client has trained this job.*another pserver.connect"):
        one = experiment()
    assert one.rule == "sgd"


def test_help_lists_the_settings_of_every_rule() -> None:
    text = " ".join(module().Optimizer.__doc__.split())
    for rule, (settings, _) in module().RULES.items():
        of = text.split(f"``{rule}``: ", 1)[1]
        given = settings if rule != "adamw" else {"weight_decay": 0.01}
        wanted = ", ".join(f"{name}={value!r}" for name, value in given.items())
        assert of.split("``;")[0].split("``.")[0].endswith(f"``{wanted}"), rule


def test_mistakes_of_types_and_rules_are_named(job: Any) -> None:
    def made(*given: Any, dtype: Any = torch.float32, **settings: Any) -> Any:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        return module().Optimizer([("w", parameter)], *given, client=job(), **settings)

    refused = [
        ((torch.optim.AdamW,), {}, "rule AdamW; expected its name, such as 'adamw'"),
        ((), {"dtype": torch.complex64}, '"w" is of torch.complex64; expected float32'),
        ((), {"dtype": torch.float8_e4m3fn}, '"w" is of torch.float8_e4m3fn; expected float32'),
        (("adam",), {"fused": True}, "has no setting fused"),
    ]
    for given, settings, text in refused:
        with pytest.raises(pserver.Refused, match=text):
            made(*given, **settings)
    one = made("adam", wire=torch.float16, fused=None, foreach=False)
    (parameter,) = one.param_groups[0]["params"]
    parameter.grad = torch.full((3,), 1e5)
    with pytest.raises(pserver.Refused, match="gradients of up to 1e.05 in wire=torch.float16; expected wire=torch.bfloat16"):
        one.step()
    parameter.grad = torch.ones(3)
    one.step()


def test_a_bucket_looks_at_each_of_its_tensors_once_in_a_step() -> None:
    from pserver.torch._buckets import Bucket

    looks = [0]

    class Tensor:
        @property
        def requires_grad(self) -> bool:
            looks[0] += 1
            return True

    class Weight:
        name = "w"
        tensor = Tensor()

    bucket = Bucket(0, [Weight()] * 500)  # type: ignore[list-item]
    assert [bucket.completed(at) for at in range(500)] == [False] * 499 + [True]
    assert looks == [500]


def test_a_norm_without_the_rows_of_a_table_warns(job: Any) -> None:
    model = torch.nn.ModuleDict({"table": module().Embedding(9, 2), "head": torch.nn.Linear(2, 1)})
    one = module().Optimizer(model.named_parameters(), "sgd", 1.0, client=job())
    model["head"](model["table"](torch.tensor([1, 2]))).sum().backward()
    with pytest.warns(UserWarning, match='leaves out the gradients of table "table.weight".*the other parameters'):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_norm_(model["head"].parameters(), 1.0)
        one.step()
        one.zero_grad()


def test_a_reader_follows_the_trained_weights_of_a_frozen_or_compiled_model(job: Any) -> None:
    def lora() -> Any:
        model = torch.nn.ModuleDict({"base": torch.nn.Linear(3, 3), "adapter": torch.nn.Linear(3, 3)})
        model["base"].requires_grad_(False)
        return model

    client, model, reader = job(), lora(), lora()
    compiled = torch.nn.Module()
    compiled._orig_mod = model
    named = [(name, one) for name, one in compiled.named_parameters() if one.requires_grad]
    assert named[0][0] == "_orig_mod.adapter.weight"
    one = module().Optimizer(named, "sgd", 0.5, client=client)
    model["adapter"](torch.ones(1, 3)).sum().backward()
    one.step()
    base = reader["base"].weight.clone()
    with module().follow(reader, client.coordinator, deadline=30):
        assert torch.equal(reader["adapter"].weight, model["adapter"].weight)
        assert torch.equal(reader["base"].weight, base)
    reader["base"].requires_grad_(True)
    with pytest.raises(pserver.Refused, match="no .'base.weight', 'base.bias'.*requires_grad_.False. for others"):
        module().follow(reader, client.coordinator, deadline=30)
