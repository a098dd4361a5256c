"""Mistakes with tensors and optimizers of PyTorch: each is an exception that says what to do, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest

import pserver

NO_TORCH = "torch is not installed; `sh bench/peers/install.sh torch target/kits` has one"
torch = pytest.importorskip("torch", reason=NO_TORCH)


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
        "another type": (other(ones.double()), pserver.Refused, "float64 for its value; expected float32"),
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
    assert [float(weight.detach()) for weight in weights] == [-11, -10]


def test_gradients_that_change_after_they_were_sent_are_named(job: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    one = module().Optimizer(layer.named_parameters(), "sgd", 1.0, client=job(), overlap=True)
    layer(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    with pytest.raises(pserver.Refused, match="another gradient after servers got one"):
        one.step()
    one.step()
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(pserver.Refused, match="servers have gradients of this step"):
        one.zero_grad()


def test_what_an_optimizer_cannot_do_is_refused(job: Any) -> None:
    import copy

    from pserver.torch import DiLoCo, Embedding, Optimizer

    table = Embedding(10, 2)
    with pytest.raises(pserver.Refused, match="max_norm with a table"):
        Optimizer(table.parameters(), client=job(), max_norm=1.0)
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


def test_a_table_in_a_second_job_has_nothing_of_the_first(job: Any) -> None:
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
