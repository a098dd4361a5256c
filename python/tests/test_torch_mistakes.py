"""Mistakes with tensors and optimizers of PyTorch: each is an exception that says what to do, and changes nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from needs import need_torch
from test_follow import completed

import pserver
from pserver._client import StepCall

torch = need_torch()


def module() -> Any:
    import pserver.torch

    return pserver.torch


def test_mistakes_with_tensors_say_what_to_do_and_change_nothing(job: Any) -> None:
    client, layer = job(), torch.nn.Linear(3, 2)
    optimizer = module().Optimizer(layer.named_parameters(), "sgd", 0.1, client=client)
    weight = layer.weight
    first = weight.detach().clone()

    def other(value: Any) -> Callable[[], None]:
        """The parameter's tensor is replaced after its registration."""

        def call() -> None:
            weight.data, weight.grad = value, torch.ones_like(value)
            optimizer.step()

        return call

    def gradient(value: Any, rate: Any = 0.1) -> Callable[[], None]:
        def call() -> None:
            weight.grad, optimizer.param_groups[0]["lr"] = value, rate
            optimizer.step()

        return call

    def made(tensor: Any, *given: Any) -> Callable[[], Any]:
        return lambda: module().Optimizer([torch.nn.Parameter(tensor)], *given, client=client)

    ones = torch.ones(2, 3)
    refused: dict[str, tuple[Callable[[], Any], Any, str]] = {
        "another shape": (other(torch.ones(4, 4)), pserver.Refused, r"shape \[4, 4\]; expected the shape \[2, 3\]"),
        "another type": (other(ones.double()), pserver.Refused, "float64 for its value; expected torch.float32"),
        "NaN": (gradient(ones * float("nan")), pserver.Refused, "has NaN"),
        "a sparse gradient": (gradient(ones.to_sparse()), pserver.Refused, "sparse gradient"),
        "a rate of NaN": (gradient(ones, float("nan")), pserver.Refused, "learning rate NaN"),
        "a negative rate": (gradient(ones, -0.1), pserver.Refused, "learning rate -0.1"),
        "a rate in text": (gradient(ones, "fast"), ValueError, "fast"),
        "a second model": (made(ones), pserver.Refused, "groups for the parameters of all models"),
        "no parameters": (lambda: module().Optimizer([], client=client), ValueError, "empty"),
        "settings of a text": (made(ones, "sgd", "fast"), ValueError, "fast"),
        "a second optimizer": (
            lambda: module().Optimizer(layer.parameters(), client=client),
            pserver.Refused,
            "one optimizer for each",
        ),
    }
    for name, (call, kind, text) in refused.items():
        with pytest.raises(kind, match=text):
            call()
        weight.data, weight.grad, optimizer.param_groups[0]["lr"] = first.clone(), None, 0.1
        optimizer.step()
        assert torch.equal(torch.from_numpy(client.pull(["weight"])["weight"]), first), name
    # Gradients in other layouts, whose memory is freed at once, are sent as they are.
    for at, tensor in enumerate([torch.ones(1, 1).expand(2, 3), torch.ones(3, 2).T, torch.ones(4, 6)[::2, ::2]], 1):
        gradient(tensor)()
        torch.testing.assert_close(weight.detach(), first - 0.1 * at)
    client.close()
    for call in (gradient(ones), optimizer.state_dict, optimizer.set_weights):
        with pytest.raises(pserver.Refused, match="this client is closed"):
            call()


def test_frozen_weights_stay_as_they_are_where_there_are_several_trainers(job: Any, in_ranks: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    layers = [torch.nn.Linear(2, 2) for _ in clients]
    first = [layer.bias.detach().clone() for layer in layers]

    def run(rank: int) -> None:
        layers[rank].bias.requires_grad_(False)
        one = module().Optimizer(layers[rank].named_parameters(), "adamw", 0.1, client=clients[rank], weight_decay=0.5)
        for _ in range(5):
            layers[rank](torch.ones(1, 2)).sum().backward()
            one.step()
            one.zero_grad()

    in_ranks(run)
    # The trainer that initialised the job gave the weights.
    assert torch.equal(layers[0].bias, layers[1].bias)
    assert any(torch.equal(layers[0].bias, value) for value in first)


def test_a_failed_step_that_is_given_up_takes_nothing_of_the_next_batch(job: Any) -> None:
    client = job()
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    one = module().Optimizer(groups, "sgd", 1.0, client=client)
    weights[0].grad, weights[1].grad = torch.ones(1), torch.tensor([float("nan")])
    with pytest.raises(pserver.Refused, match="NaN"):
        one.step()
    one.zero_grad()
    for weight in weights:
        weight.grad = torch.full((1,), 10.0)
    one.step()
    assert [float(weight.detach()) for weight in weights] == [-10, -10]


def test_gradients_that_are_strided_lazy_or_attached_are_sent(job: Any) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    one = module().Optimizer(weights, "sgd", 1.0, client=job())
    followed = torch.tensor([4.0, 5.0], requires_grad=True)
    gradients = [torch.tensor([1j, 2j]).conj().imag, torch.arange(4.0)[::2], followed * 1]
    assert gradients[0].is_neg() and not gradients[1].is_contiguous()
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    one.step()
    assert [weight.tolist() for weight in weights] == [[1, 2], [0, -2], [-4, -5]]


def test_gradients_that_change_after_they_were_sent_are_named(job: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    one = module().Optimizer(layer.named_parameters(), "sgd", 1.0, client=job(), overlap=True, bucket_bytes=1)
    layer(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    with pytest.raises(pserver.Refused, match="another gradient after servers got one"):
        one.step()
    one.step()
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(pserver.Refused, match="servers have gradients of this step"):
        one.zero_grad()


def test_unsupported_calls_of_optimizers_are_refused(job: Any) -> None:
    import copy

    from pserver.torch import DiLoCo, Embedding, Optimizer

    table = Embedding(10, 2)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(pserver.Refused, match="DiLoCo with a table"):
        DiLoCo(table.named_parameters(), inner, 2, client=job())
    with pytest.raises(RuntimeError, match="a table on servers"):
        table.load_state_dict(torch.nn.Embedding(10, 2).state_dict())
    one = Optimizer(table.parameters(), "sgd", 1.0, client=job())
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(one)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    with pytest.raises(pserver.Refused, match="GradScaler"):
        scaler.step(one)


def test_a_batch_that_the_model_forgets_is_not_sent(job: Any) -> None:
    from pserver.torch import Embedding, Optimizer

    table = Embedding(10, 2, initial="constant { value: 0 }")
    one = Optimizer(table.parameters(), "sgd", 1.0, client=job())
    for scale in (1000, 1):
        table.zero_grad()
        (scale * table(torch.tensor([1]))).sum().backward()
    one.step()
    assert table(torch.tensor([1])).tolist() == [[-1, -1]]


def test_a_number_is_a_parameter(job: Any) -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))
    one = module().Optimizer([scale], "adam", 0.5, client=job())
    scale.square().backward()
    one.step()
    theirs = torch.nn.Parameter(torch.tensor(2.0))
    reference = torch.optim.Adam([theirs], 0.5)
    theirs.square().backward()
    reference.step()
    torch.testing.assert_close(scale.detach(), theirs.detach())
    reference.load_state_dict(one.state_dict())


def test_a_table_in_a_second_job_keeps_nothing_from_the_first(job: Any) -> None:
    from pserver.torch import Embedding, Optimizer

    table, ids = Embedding(10, 2, initial="constant { value: 0 }"), torch.tensor([1])
    first = job()
    one = Optimizer(table.parameters(), "sgd", 1.0, client=first)
    table(ids).sum().backward()
    one.step()
    table.prefetch(ids)
    (7 * table(torch.tensor([2]))).sum().backward()
    first.close()
    with pserver.connect(servers=1, deadline=30) as second:
        two = Optimizer(table.parameters(), "sgd", 1.0, client=second)
        assert table(ids).tolist() == [[0, 0]]
        two.step()
        assert table(torch.tensor([2])).tolist() == [[0, 0]]


def test_rows_in_a_forked_process_are_refused(job: Any) -> None:
    import multiprocessing

    from pserver.torch import Embedding, Optimizer

    table, ids = Embedding(10, 2), torch.tensor([1])
    one = Optimizer(table.parameters(), "sgd", 1.0, client=job())
    table(ids).sum().backward()
    one.step()
    context = multiprocessing.get_context("fork")
    said = context.Queue()

    def child() -> None:
        try:
            table(ids)
        except pserver.Error as error:
            said.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(30)
    try:
        assert process.exitcode == 0 and "fork" in said.get(timeout=10)
    finally:
        process.kill()


def test_another_optimizer_than_the_jobs_is_refused_at_every_trainer(job: Any) -> None:
    first, second = job(trainers=2, trainer=0), job(trainer=1)

    def network() -> Any:
        return torch.nn.Sequential(module().Embedding(100, 4), torch.nn.Linear(4, 2))

    def made(client: Any, rule: str = "adam", rate: float = 0.1, **settings: Any) -> Any:
        return module().Optimizer(network().named_parameters(), rule, rate, client=client, **settings)

    made(first, weight_decay=0.5)
    for rule, settings in [("adam", {}), ("sgd", {}), ("adamw", {"weight_decay": 0.5}), ("optimizer: SGD", {})]:
        with pytest.raises(pserver.Refused, match="found the optimizer .*; expected that with which the job was init"):
            made(second, rule, **settings)
    with pytest.raises(pserver.Refused, match='"0.weight": found the optimizer .*height: 100 .*lazy: true'):
        layers = [module().Embedding(100, 4, lazy=False), torch.nn.Linear(4, 2)]
        named = torch.nn.Sequential(*layers).named_parameters()
        module().Optimizer(named, "adam", 0.1, client=second, weight_decay=0.5)
    # The rate goes with each step.
    made(second, "adam", 0.3, weight_decay=0.5)


def test_a_clip_at_one_trainer_alone_is_refused(job: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    module().Optimizer([weight], "sgd", 0.1, client=job(trainers=2, trainer=0), max_norm=1.0)
    with pytest.raises(pserver.Refused, match="found the optimizer .*; expected .*stage"):
        module().Optimizer([torch.nn.Parameter(torch.ones(2))], "sgd", 0.1, client=job(trainer=1))


def test_servers_that_only_add_are_refused_before_anything_is_declared(job: Any) -> None:
    client = job(mode="delta")
    with pytest.raises(pserver.Refused, match="mode delta, .*; expected sync, async or bounded"):
        module().Optimizer([torch.nn.Parameter(torch.ones(2))], "sgd", 0.1, client=client)
    client.init_all({"w": torch.zeros(2)}, "algorithm: 'add'")


def test_files_that_are_no_models_and_closed_followers_are_refused(job: Any, tmp_path: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    client = job()
    module().Optimizer(layer.named_parameters(), "sgd", 0.1, client=client)
    path = tmp_path / "model.safetensors"
    head = '{"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}'
    for content in (b"", b"short", b"\xff" * 64, (9).to_bytes(8, "little") + b"[1, 2, 3]", _file(head), _file("{")):
        path.write_bytes(content)
        with pytest.raises(pserver.Refused, match="model.safetensors: .*expected a file in the format safetensors"):
            module().load_model(path, layer)
    with pytest.raises(FileNotFoundError):
        module().load_model(tmp_path / "none", layer)
    with module().follow(layer, client.coordinator) as follower:
        pass
    with pytest.raises(pserver.Refused, match="this follower is closed"):
        follower.update()


def _file(head: str) -> bytes:
    """A file in the format safetensors whose tensors lack their values."""
    return len(head).to_bytes(8, "little") + head.encode()


def test_other_limits_types_and_parameters_at_one_trainer_are_refused(job: Any) -> None:
    first, second = job(trainers=2, trainer=0), job(trainer=1)
    network = torch.nn.Linear(3, 2)
    module().Optimizer(network.named_parameters(), "sgd", 0.1, client=first, max_norm=1.0)
    with pytest.raises(pserver.Refused, match="found the optimizer .*min.2.0 .*; expected .*min.1.0 "):
        module().Optimizer(network.named_parameters(), "sgd", 0.1, client=second, max_norm=2.0)
    with pytest.raises(pserver.Refused, match="lacks .'bias', 'bias@share', 'bias@total'."):
        module().Optimizer([("weight", network.weight)], "sgd", 0.1, client=second, max_norm=1.0)
    # A refused construction owns nothing, also while its exception is kept.
    module().Optimizer(network.named_parameters(), "sgd", 0.1, client=second, max_norm=1.0)
    with pserver.Servers(trainers=2) as servers:
        clients = [pserver.connect(servers.address, trainer=rank, deadline=30) for rank in range(2)]
        tables = [module().Embedding(9, 2, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        module().Optimizer(tables[0].named_parameters(), "sgd", 0.1, client=clients[0])
        with pytest.raises(pserver.Refused, match="table .* is of torch.float64; expected float32"):
            module().Optimizer(tables[1].named_parameters(), "sgd", 0.1, client=clients[1])
        for client in clients:
            client.close()


def test_a_step_whose_end_is_unknown_is_completed_and_not_replaced(job: Any) -> None:
    clients = [job(trainers=2, trainer=0, deadline=3), job(trainer=1)]
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in clients]
    first, second = (
        module().Optimizer([weight], "sgd", 1.0, client=client) for weight, client in zip(weights, clients)
    )
    weights[0].grad = torch.full((2,), 1.0)
    with pytest.raises(pserver.Timeout):
        first.step()
    with pytest.raises(pserver.Refused, match="or may; expected step"):
        first.zero_grad()
    mine, weights[0].grad = weights[0].grad, torch.full((2,), 100.0)
    with pytest.raises(pserver.Refused, match="another gradient after servers got one"):
        first.step()
    weights[0].grad = mine
    weights[1].grad = torch.full((2,), 3.0)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.step)
        completed(first.step)
        other.result()
    first.zero_grad()
    assert weights[0].tolist() == weights[1].tolist() == [-2, -2]


def test_zero_grad_completes_the_step_of_a_single_trainer_whose_end_is_unknown(job: Any, monkeypatch: Any) -> None:
    client, weight = job(), torch.nn.Parameter(torch.zeros(1))
    one = module().Optimizer([weight], "sgd", 1.0, client=client)
    start = client._start_held

    class Lost:
        def wait(self) -> None:
            raise pserver.Timeout("no answer")

        def cancel(self) -> None:
            pass

    def lost(call: Any, *_: Any, **named: Any) -> None:
        monkeypatch.setattr(client, "_start_held", start)
        call._raw = Lost()

    monkeypatch.setattr(client, "_start_held", lost)
    weight.grad = torch.ones(1)
    with pytest.raises(pserver.Timeout):
        one.step()
    one.zero_grad()
    assert weight.grad is None and weight.item() == -1
    weight.grad = torch.full((1,), 5.0)
    one.step()
    assert weight.item() == -6


def test_after_an_interrupt_no_call_of_the_step_writes_weights(job: Any, monkeypatch: Any) -> None:
    clients = [job(trainers=2, trainer=0), job(trainer=1)]
    weights = [[torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in clients]
    groups = [[{"params": [("a", a)]}, {"params": [("b", b)], "lr": 0.25}] for a, b in weights]
    ours, others = (module().Optimizer(of, "sgd", 0.5, client=client) for of, client in zip(groups, clients))
    start = clients[0]._start_held
    calls: list[Interrupted] = []

    class Interrupted:
        """The wait for the first is interrupted, which cancels it."""

        def __init__(self, raw: Any) -> None:
            self.raw, self.cancel, self.is_interrupted = raw, raw.cancel, bool(calls)
            calls.append(self)

        def wait(self) -> Any:
            if not self.is_interrupted:
                self.is_interrupted = True
                self.cancel()
                raise KeyboardInterrupt
            return self.raw.wait()

    def interrupted(call: Any, *given: Any) -> None:
        start(call, *given)
        call._raw = Interrupted(call._raw)

    monkeypatch.setattr(clients[0], "_start_held", interrupted)
    for weight in [*weights[0], *weights[1]]:
        weight.grad = torch.ones(3)
    with pytest.raises(KeyboardInterrupt):
        # Both calls wait for the other trainer.
        ours.step()
    assert len(calls) == 2 and all(one.raw.done() for one in calls)
    monkeypatch.setattr(clients[0], "_start_held", start)
    weights[0][1].data += 5
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(others.step)
        with pytest.raises(pserver.Refused, match='"b" was changed after its gradient was sent'):
            ours.step()
        ours.step()
        other.result(30)
    assert [one.tolist() for one in weights[0]] == [one.tolist() for one in weights[1]] == [[0.5] * 3, [0.75] * 3]


def test_a_call_that_is_over_when_its_step_is_interrupted_counts_once(job: Any, monkeypatch: Any) -> None:
    client, weights = job(), [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    one = module().Optimizer([{"params": [("a", weights[0])]}, {"params": [("b", weights[1])]}], "sgd", 0.5, client=client)
    wait, asked = StepCall.wait, []

    def interrupted(call: Any) -> None:
        asked.append(call)
        wait(call)
        if len(asked) == 1:
            one._buckets[1]._calls[0][1]._raw.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(StepCall, "wait", interrupted)
    for weight in weights:
        weight.grad = torch.ones(3)
    with pytest.raises(KeyboardInterrupt):
        one.step()
    one.step()
    assert [weight.tolist() for weight in weights] == [[0.5] * 3] * 2
    assert {parameter.version for parameter in client.parameters()} == {1}


def test_rows_of_a_step_whose_end_is_unknown_are_completed_and_not_replaced(job: Any) -> None:
    clients = [job(trainers=2, trainer=0, deadline=3), job(trainer=1)]
    tables = [module().Embedding(9, 1, initial="constant { value: 0 }") for _ in clients]
    first, second = (
        module().Optimizer(table.named_parameters(), "sgd", 1.0, client=client, overlap=True)
        for table, client in zip(tables, clients)
    )
    ids = torch.tensor([3])
    tables[0](ids).sum().backward()
    first.step()
    # Rows of this step wait for the other trainer's push.
    with pytest.raises(pserver.Timeout):
        tables[0](ids)
    tables[1](ids).sum().backward()
    second.step()
    assert tables[0](ids).item() == tables[1](ids).item() == -1


def test_a_failed_step_of_tables_alone_is_completed(job: Any, monkeypatch: Any) -> None:
    client, table = job(), module().Embedding(9, 1, initial="constant { value: 0 }")
    one = module().Optimizer(table.named_parameters(), "sgd", 1.0, client=client)
    push = client.push_rows

    def lost(*_: Any, **named: Any) -> None:
        monkeypatch.setattr(client, "push_rows", push)
        raise pserver.Timeout("no answer")

    for steps, repeat in enumerate((one.step, one.zero_grad), 1):
        table(torch.tensor([3])).sum().backward()
        monkeypatch.setattr(client, "push_rows", lost)
        with pytest.raises(pserver.Timeout):
            one.step()
        repeat()
        one.zero_grad()
        with torch.no_grad():
            assert table(torch.tensor([3])).item() == -steps


def test_frozen_weights_stay_and_others_leave_early_with_overlap(job: Any) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[0].weight.requires_grad_(False)
    network[1].bias.requires_grad_(False)
    kept = [network[0].weight.detach().clone(), network[1].bias.detach().clone()]
    one = module().Optimizer(network.named_parameters(), "sgd", 0.1, client=job(), overlap=True, bucket_bytes=1)
    for _ in range(3):
        network(torch.ones(1, 2)).sum().backward()
        on_their_way = {bucket.weights[0].name for bucket in one._buckets if bucket.is_on_its_way}
        # Buckets of frozen weights, and the last one, are left for the step.
        assert on_their_way == {"1.weight", "0.bias"}
        one.step()
        one.zero_grad()
    assert torch.equal(network[0].weight, kept[0]) and torch.equal(network[1].bias, kept[1])


def test_copies_of_tables_are_refused_and_parameters_without_elements_stay(job: Any) -> None:
    import copy

    network = torch.nn.Sequential(module().Embedding(5, 2), torch.nn.Linear(2, 1))
    for call in (copy.deepcopy, lambda one: torch.optim.swa_utils.AveragedModel(one)):
        with pytest.raises(TypeError, match="table is on servers; expected another one"):
            call(network)
    layer = torch.nn.Module()
    layer.empty, layer.weight = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(3))
    one = module().Optimizer(layer.named_parameters(), "adam", 0.1, client=job())
    (layer.empty.sum() + layer.weight.sum()).backward()
    one.step()
    one.load_state_dict(one.state_dict())
    assert layer.empty.shape == (0, 3) and float(layer.weight[0].detach()) == pytest.approx(0.9)
    with module().follow(layer, one.client.coordinator, deadline=30) as follower:
        assert follower.versions == {"weight": 1}


def test_an_interrupt_after_servers_have_the_gradient_counts_it_once(job: Any, monkeypatch: Any) -> None:
    client, weight = job(), torch.nn.Parameter(torch.zeros(1))
    one = module().Optimizer([weight], "sgd", 1.0, client=client)
    wait = StepCall.wait

    def interrupted(call: Any) -> None:
        monkeypatch.setattr(StepCall, "wait", wait)
        wait(call)
        raise KeyboardInterrupt

    for repeat in (one.step, one.zero_grad):
        before = weight.item()
        weight.grad = torch.ones(1)
        monkeypatch.setattr(StepCall, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.step()
        repeat()
        assert weight.item() == before - 1 and client.pull(["parameter.0"])["parameter.0"].tolist() == [before - 1]
        one.zero_grad()


def test_a_refused_step_that_is_given_up_writes_no_weights(job: Any) -> None:
    weights = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4, 6).t())]
    one = module().Optimizer([{"params": [weight]} for weight in weights], "sgd", 1.0, client=job())
    weights[0].grad, weights[1].grad = torch.ones(4), torch.full((6, 4), float("nan"))
    with pytest.raises(pserver.Refused, match="NaN"):
        one.step()
    one.zero_grad()
    assert (weights[0] == 0).all() and (weights[1] == 1).all()


def test_a_norm_beyond_numbers_scales_to_zero(job: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    one = module().Optimizer([weight], "sgd", 1.0, client=job(), max_norm=1.0)
    for gradient, expected in ((1e200, 1.0), (2**-0.5, 1 - 2**-0.5)):
        weight.grad = torch.full((2,), gradient, dtype=torch.float64)
        one.step()
        expected = torch.full((2,), expected, dtype=torch.float64)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=0)


def overlapped(client: Any) -> tuple[list[Any], Any]:
    """Weights of a bucket each, and their optimizer."""
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    return weights, module().Optimizer(weights, "sgd", 1.0, client=client, overlap=True, bucket_bytes=1)


def test_gradients_of_several_buckets_that_were_changed_are_refused_once(job: Any) -> None:
    weights, one = overlapped(job())
    sum(weight.sum() for weight in weights).backward()
    for weight in weights:
        weight.grad = torch.full((3,), 7.0)
    with pytest.raises(pserver.Refused, match="another gradient after servers got one"):
        one.step()
    # The last bucket was not sent, so that it has the new one.
    one.step()
    assert [weight.tolist() for weight in weights] == [[-7.0] * 3, [-1.0] * 3, [-1.0] * 3]


def test_scaled_gradients_that_overlap_has_sent_end_the_job(job: Any) -> None:
    weights, one = overlapped(job())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    text = "gradients of a GradScaler;.*has sent gradients with their scale"
    for call in (lambda: scaler.step(one), one.step, one.zero_grad):
        with pytest.raises(pserver.Refused, match=text):
            call()
    assert all((weight == 0).all() for weight in weights)
