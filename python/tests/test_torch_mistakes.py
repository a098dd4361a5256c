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
        "complex numbers": (made(torch.ones(2, dtype=torch.complex64)), pserver.Refused, "parameter.0"),
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
