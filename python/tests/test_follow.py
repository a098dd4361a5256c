"""Readers that follow a job, files of models, and DiLoCo in fragments."""

import io
import threading
from typing import Any

import pytest
from needs import need_torch

import pserver

torch = need_torch()


def module() -> Any:
    import pserver.torch

    return pserver.torch


NAMES = [f"part_{at}" for at in range(6)]


def test_a_follower_has_whole_versions_only(job: Any) -> None:
    """A version is the value of every element, in parameters of several chunks on three servers. The trainer makes
    steps in pairs, without a pause within one: fetches meet servers between two versions, and then between pairs."""
    client = job(3)
    values = {**{name: torch.zeros(100_000) for name in NAMES}, "rest": torch.zeros(3)}
    trained = torch.nn.ParameterDict(values)
    optimizer = module().Optimizer(trained.named_parameters(), "sgd", 1.0, client=client)
    followed = torch.nn.ParameterDict({name: torch.ones_like(one) for name, one in trained.items()})
    parts = [name for name in trained if name != "rest"]
    for name in parts:
        trained[name].grad = torch.full_like(trained[name], -1.0)
    asked, rested, ended = threading.Semaphore(0), threading.Semaphore(1), threading.Event()

    def train() -> None:
        while asked.acquire() and not ended.is_set():
            optimizer.step()
            optimizer.step()
            rested.release()

    with module().follow(followed, client.coordinator, deadline=30) as follower:
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        seen: set[float] = set()
        for _ in range(150):
            assert rested.acquire(timeout=60)
            asked.release()
            follower.update(wait=True)
            found = {float(value) for name in parts for value in followed[name].detach().unique()}
            assert found == {float(follower.versions[parts[0]])} and (followed["rest"] == 0).all()
            seen |= found
        ended.set()
        asked.release()
        thread.join()
        follower.update(wait=True)
        newest = optimizer.client.parameters()[0].version
        assert all((followed[name] == newest).all() for name in parts)
        assert follower.versions == {**dict.fromkeys(parts, newest), "rest": 0}
        assert not follower.update(wait=True)
        # The follower also saw versions before the last one, among them the first of a pair.
        assert len(seen) > 20


def test_a_saved_model_is_loaded_by_names_or_places(job: Any, tmp_path: Any) -> None:
    client = job(arguments=["--model-dir", str(tmp_path)])
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1, bias=False))
    module().Optimizer(network.parameters(), "sgd", 0.1, client=client)
    where = module().save_model("model.safetensors", client=client)
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1, bias=False))
    module().load_model(where, other)
    for one, same in zip(network.parameters(), other.parameters()):
        assert torch.equal(one, same) and one.shape == same.shape
    with pytest.raises(pserver.Refused, match="servers have no"):
        module().load_model(where, torch.nn.Sequential(*network, torch.nn.Linear(1, 1)))


def test_a_saved_model_is_loaded_beside_a_frozen_base_and_into_a_model_that_was_compiled(
    job: Any, tmp_path: Any
) -> None:
    def adapted() -> torch.nn.Module:
        base, adapter = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        base.requires_grad_(False)
        return torch.nn.ModuleDict({"base": base, "adapter": adapter})

    def compiled(model: torch.nn.Module) -> torch.nn.Module:
        """The model as torch.compile wraps it, without its second of imports."""
        made: Any = torch.nn.Module()
        made._orig_mod = model
        return made

    client = job(arguments=["--model-dir", str(tmp_path)])
    trained = compiled(adapted())
    learned = [(name, tensor) for name, tensor in trained.named_parameters() if tensor.requires_grad]
    assert learned[0][0] == "_orig_mod.adapter.weight"
    module().Optimizer(learned, "sgd", 0.1, client=client)
    where = module().save_model("adapter.safetensors", client=client)
    for other in (adapted(), compiled(adapted())):
        before = {name: tensor.clone() for name, tensor in other.named_parameters()}
        module().load_model(where, other)
        for (name, tensor), (_, ours) in zip(other.named_parameters(), trained.named_parameters()):
            assert torch.equal(tensor, before[name] if "base" in name else ours), name
    adapter_alone = adapted()
    adapter_alone.get_submodule("base").requires_grad_(True)
    with pytest.raises(pserver.Refused, match="base.weight"):
        module().load_model(where, adapter_alone)


def test_buffers_are_kept_on_the_servers_for_readers_and_saved_models(job: Any, tmp_path: Any) -> None:
    def network() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())

    client = job(arguments=["--model-dir", str(tmp_path)])
    trained, reader, loaded = network(), network(), network()
    whole: Any = torch.nn.Module()
    whole._orig_mod = trained  # as torch.compile wraps it
    optimizer = module().Optimizer(whole.named_parameters(), "sgd", 0.1, client=client, buffers=whole)
    with module().follow(reader, client.coordinator, deadline=30) as follower:
        assert same(trained, reader), "as they were declared"
        for _ in range(3):
            trained(torch.rand(5, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.set_buffers()
        assert follower.update(wait=True)
        assert int(reader[1].num_batches_tracked) == 3 and same(trained, reader)
        # Buffers alone, which `to` replaces in the model.
        trained[1].to(torch.float64).to(torch.float32)
        trained(torch.rand(5, 2))
        optimizer.set_buffers()
        assert follower.update(wait=True) and same(trained, reader)
        assert not follower.update(wait=True)
    assert client.resume_rounds() == 3, "they take no part in steps"
    module().load_model(module().save_model("model.safetensors", client=client), loaded)
    assert same(trained, loaded)


def test_buffers_of_other_types_are_wider_at_servers_or_refused(job: Any) -> None:
    def masked(dtype: torch.dtype) -> Any:
        model = torch.nn.Linear(2, 1)
        model.register_buffer("mask", torch.tensor([1, 0], dtype=dtype))
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        return model

    client, trained, reader = job(), masked(torch.bool), masked(torch.bool)
    reader.mask.fill_(True)
    module().Optimizer(trained.named_parameters(), "sgd", 0.1, client=client, buffers=trained)
    assert {one.name for one in client.parameters()} == {"weight", "bias", "mask"}
    with module().follow(reader, client.coordinator, deadline=30):
        assert reader.mask.tolist() == [True, False]
    with pytest.raises(pserver.Refused, match='buffer "mask" is of torch.complex64; expected real'):
        model = masked(torch.complex64)
        module().Optimizer(model.named_parameters(), "sgd", 0.1, client=client, buffers=model)


@pytest.mark.parametrize("fragments, delay", [(1, 0), (2, 0), (2, None), (1, 2)])
def test_diloco_in_fragments_is_the_same_in_plain_torch(job: Any, fragments: int, delay: int | None) -> None:
    every, steps = 4, 24
    torch.manual_seed(2)
    ours = torch.nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6)])
    theirs = torch.nn.ParameterList([one.detach().clone() for one in ours])
    how = {"fragments": fragments, "delay": delay, "client": job()}
    diloco = module().DiLoCo(ours.parameters(), torch.optim.SGD(ours.parameters(), lr=0.1), every, **how)
    inner = torch.optim.SGD(theirs.parameters(), lr=0.1)
    outer = [one.detach().clone().requires_grad_() for one in theirs]
    rules = [torch.optim.SGD([one], lr=0.7, momentum=0.9, nesterov=True) for one in outer]
    due = [0, 0] if fragments == 1 else [2, 0]
    wait = (every // fragments if fragments > 1 else 0) if delay is None else delay
    flying: dict[int, Any] = {}

    def loss(weights: Any, step: int) -> Any:
        return sum((one @ torch.full((6,), 0.1 * step) - 1).square().mean() for one in weights)

    def land(at: int) -> None:
        with torch.no_grad():
            theirs[at].add_(outer[at].detach() - flying.pop(at))

    for step in range(1, steps + 1):
        loss(ours, step % 5).backward()
        diloco.step()
        loss(theirs, step % 5).backward()
        inner.step()
        inner.zero_grad()
        for at in [at for at in flying if step % every == (due[at] + wait) % every]:
            land(at)
        for at in (0, 1):
            if step % every == due[at]:
                outer[at].grad = outer[at].detach() - theirs[at].detach()
                rules[at].step()
                flying[at] = theirs[at].detach().clone()
                if wait == 0:
                    land(at)
    diloco.finish()
    for at in list(flying):
        land(at)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_mistakes_of_diloco_say_what_to_do() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    inner = torch.optim.SGD(weights, lr=0.1)
    for settings, text in [({"fragments": 5}, "1 to 4"), ({"delay": 4}, "0 to 3"), ({"delay": -1}, "0 to 3")]:
        with pytest.raises(pserver.Refused, match=text):
            module().DiLoCo(weights, inner, 4, **settings)


def test_parameters_that_are_not_updated_together_are_refused_unless_the_program_says_so(job: Any) -> None:
    client = job()
    values = {name: torch.zeros(2) for name in ("a", "b")}
    client.init_all(values, "optimizer: SGD const_lr { learning_rate: 1 }")
    for names in (["a", "b"], ["a"], ["a"]):
        client.push({name: torch.full((2,), -1.0) for name in names})
    followed = torch.nn.ParameterDict(values)
    with pytest.raises(pserver.Refused, match='3 updates of "a" and 1 of "b"; expected .* together=False'):
        module().follow(followed, client.coordinator, deadline=30)
    with module().follow(followed, client.coordinator, together=False, deadline=30) as follower:
        assert follower.versions == {"a": 3, "b": 1} and followed["a"][0] == 3 and followed["b"][0] == 1


def diloco_of(network: Any, client: Any, **how: Any) -> Any:
    inner = torch.optim.AdamW(network.parameters(), lr=1e-2)
    return module().DiLoCo(network.named_parameters(), inner, 4, client=client, **how)


def train(network: Any, diloco: Any, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).to(network[0].weight.dtype)
        (network(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        diloco.step()


def network_of() -> Any:
    torch.manual_seed(6)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _wrong(weights: Any) -> list[Any]:
    infinite = [weights[0] * float("inf"), *weights[1:]]
    return [None, [1, 2], weights[1:], [one.double() for one in weights], infinite]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"fragments": 2}])
def test_diloco_goes_on_in_another_job_to_the_bit(job: Any, how: dict[str, Any], dtype: Any) -> None:
    ours, other = network_of().to(dtype), network_of().to(dtype)
    diloco = diloco_of(ours, job(2), **how)
    train(ours, diloco, 0, 11)
    if how:
        with pytest.raises(pserver.Refused, match="expected finish"):
            diloco.state_dict()
        diloco.finish()
    file = io.BytesIO()
    torch.save({"model": ours.state_dict(), "diloco": diloco.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with pserver.connect(servers=1, deadline=30) as client:
        again = diloco_of(other, client, **how)
        train(other, again, 0, 2)
        again.finish()
        other.load_state_dict(state["model"])
        again.load_state_dict(state["diloco"])
        for wrong, text in [
            (None, "a state of NoneType"),
            ({"steps": 1}, "expected \\['inner'"),
            *(({**state["diloco"], "steps": steps}, "steps") for steps in ("x", 1.5, -1, True)),
            *(({**state["diloco"], "weights": wrong}, "weights ") for wrong in _wrong(state["diloco"]["weights"])),
            *(({**state["diloco"], "outer": outer}, "expected that of an optimizer") for outer in ({}, None)),
            *(({**state["diloco"], "inner": inner}, "of the inner optimizer") for inner in ({}, None)),
        ]:
            with pytest.raises(pserver.Refused, match=text):
                again.load_state_dict(wrong)
        train(ours, diloco, 11, 30)
        train(other, again, 11, 30)
        for one, same in zip(ours.parameters(), other.parameters()):
            assert torch.equal(one, same)


def completed(call: Any) -> None:
    """Repeats a call, as of a client with a short deadline, until it succeeds."""
    for _ in range(20):
        try:
            call()
            return
        except pserver.Timeout:
            continue
    raise AssertionError("it fails each time")


@pytest.mark.parametrize("how", [{}, {"fragments": 2}, {"fragments": 2, "delay": 0}])
def test_an_outer_step_that_fails_is_completed_by_the_next_call(job: Any, monkeypatch: Any, how: Any) -> None:
    ours, other, client = network_of(), network_of(), job(2)
    with pserver.connect(servers=1, deadline=30) as second:
        undisturbed = diloco_of(other, second, **how)
        train(other, undisturbed, 0, 24)
        undisturbed.finish()
    diloco = diloco_of(ours, client, **how)
    failures = 0

    def failing(call: Any) -> Any:
        """The call, of which the first and every third after it fails."""
        count = 0

        def run(*given: Any, **named: Any) -> Any:
            nonlocal count, failures
            count += 1
            if count % 3 == 1:
                failures += 1
                raise pserver.Timeout("no answer")
            return call(*given, **named)

        return run

    monkeypatch.setattr(client, "start_push_pull", failing(client.start_push_pull))
    for step in range(24):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        (ours(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        try:
            diloco.step()
        except pserver.Timeout:
            completed(diloco.step)
    completed(diloco.finish)
    assert failures > 1
    for one, same in zip(ours.parameters(), other.parameters()):
        assert torch.equal(one, same)


def test_weights_that_are_set_are_those_of_the_next_outer_step(job: Any) -> None:
    ours, client = network_of(), job()
    diloco = diloco_of(ours, client)
    train(ours, diloco, 0, 5)
    for call in (diloco.outer.step, diloco.outer.set_weights, diloco.outer.fetch_weights):
        with pytest.raises(pserver.Refused, match="DiLoCo"):
            call()
    with torch.no_grad():
        for one in ours.parameters():
            one.fill_(0.5)
    diloco.set_weights()
    # Nothing was trained since, so the outer step has a gradient of zero; its momentum moves weights by little.
    state = diloco.outer.state_dict()
    for one in state["state"].values():
        one["momentum_buffer"].zero_()
    diloco.outer.load_state_dict(state)
    diloco.outer_step()
    for one in ours.parameters():
        assert (one == 0.5).all()


def test_the_batch_after_a_failed_outer_step_counts(job: Any, monkeypatch: Any) -> None:
    weight, client = torch.nn.Parameter(torch.zeros(1)), job()
    diloco = module().DiLoCo([weight], torch.optim.SGD([weight], lr=1.0), 2, "sgd", 1.0, client=client)
    start = client.start_push_pull

    def failing(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(client, "start_push_pull", start)
        raise pserver.Timeout("no answer")

    monkeypatch.setattr(client, "start_push_pull", failing)
    for step in range(1, 7):
        weight.grad = torch.ones(1)
        if step == 2:
            with pytest.raises(pserver.Timeout):
                diloco.step()
        else:
            assert diloco.step() == (step % 2 == 0 or step == 3)
        assert weight.grad is None and weight.item() == -step


def test_a_schedule_of_the_outer_rate_and_a_table_in_a_group(job: Any, recwarn: Any) -> None:
    ours = network_of()
    diloco = diloco_of(ours, job())
    schedule = torch.optim.lr_scheduler.StepLR(diloco.outer, 1)
    train(ours, diloco, 0, 4)
    schedule.step()
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]
    table = module().Embedding(10, 2)
    with pytest.raises(pserver.Refused, match="DiLoCo with a table"):
        module().DiLoCo([{"params": list(table.parameters())}], diloco.inner, 4)
