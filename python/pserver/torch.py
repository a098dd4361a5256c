"""Optimizers of PyTorch whose state lives on servers.

Every trainer of a job constructs the same optimizer. The first one's weights are the job's; the others get them. A step
sends the gradients, which the servers merge over all trainers, and fetches the weights with the update in them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ._client import Array, Client, last_client
from ._errors import Refused

__all__ = ["DiLoCo", "LRScheduler", "Optimizer", "config"]

NUMPY_TYPES = {torch.float32, torch.float64, torch.float16}
HALVES = {torch.float16, torch.bfloat16}


def config(rule: str, settings: dict[str, Any]) -> str:
    """The configuration of a rule by its name, with PyTorch's names of settings; or a configuration in text as it is,
    whose rate ``lr`` replaces.

    >>> config("adamw", {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.1})
    'algorithm: "adamw" adamw { beta_1: 0.9 beta_2: 0.99 epsilon: 1e-08 } l2: 0.1 const_lr { learning_rate: 0.001 }'
    """
    given = dict(settings)
    rate = f"const_lr {{ learning_rate: {float(given.pop('lr'))!r} }}"
    if ":" in rule:
        if given:
            raise Refused(f"settings {sorted(given)} beside a configuration in text; expected them in the text")
        return f"{rule} {rate}"
    if rule not in RULES:
        raise Refused(f"rule {rule!r}; expected {', '.join(sorted(RULES))}, or a configuration in text")
    made = RULES[rule](given)
    if given:
        raise Refused(f"rule {rule!r} has no setting {', '.join(sorted(given))}")
    return f"{made} {rate}"


def _sgd(given: dict[str, Any]) -> str:
    momentum, nesterov = float(given.pop("momentum", 0.0)), bool(given.pop("nesterov", False))
    inner = f" sgd {{ momentum: {momentum!r} nesterov: {str(nesterov).lower()} }}" if momentum else ""
    return f"optimizer: SGD{inner}" + _coupled(given)


def _adam(given: dict[str, Any]) -> str:
    return f"optimizer: Adam adam {{ {_moments(given)} }}" + _coupled(given)


def _adamw(given: dict[str, Any]) -> str:
    decay = float(given.pop("weight_decay", 0.01))
    return f'algorithm: "adamw" adamw {{ {_moments(given)} }} l2: {decay!r}'


def _adagrad(given: dict[str, Any]) -> str:
    return f"optimizer: Adagrad adagrad {{ epsilon: {float(given.pop('eps', 1e-10))!r} }}" + _coupled(given)


def _adadelta(given: dict[str, Any]) -> str:
    rho, epsilon = float(given.pop("rho", 0.9)), float(given.pop("eps", 1e-6))
    return f"optimizer: Adadelta adadelta {{ rho: {rho!r} epsilon: {epsilon!r} }}" + _coupled(given)


def _rmsprop(given: dict[str, Any]) -> str:
    rho, epsilon = float(given.pop("alpha", 0.99)), float(given.pop("eps", 1e-8))
    return f'algorithm: "rmsprop" rmsprop {{ rho: {rho!r} epsilon: {epsilon!r} }}' + _coupled(given)


def _lion(given: dict[str, Any]) -> str:
    first, second = given.pop("betas", (0.9, 0.99))
    values = {"b1": first, "b2": second, "wd": given.pop("weight_decay", 0.0)}
    sets = " ".join(f"rule_set {{ key: '{key}' value: {float(value)!r} }}" for key, value in values.items())
    return f'algorithm: "lion" {sets}'


def _moments(given: dict[str, Any]) -> str:
    first, second = given.pop("betas", (0.9, 0.999))
    return f"beta_1: {float(first)!r} beta_2: {float(second)!r} epsilon: {float(given.pop('eps', 1e-8))!r}"


def _coupled(given: dict[str, Any]) -> str:
    decay = float(given.pop("weight_decay", 0.0))
    return f" regularizer: Coupled l2: {decay!r}" if decay else ""


RULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "lion": _lion,
}


class _Weight:
    """A parameter of the model and its name at the servers."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self._address = 0
        self._array: Array = None

    def first_value(self) -> Array:
        """The value that servers begin with: half precision is updated in float32 there."""
        value = self.tensor.detach()
        return _array((value.float() if value.dtype in HALVES else value).cpu().contiguous())

    def destination(self) -> tuple[Array, torch.Tensor | None]:
        """Where a fetched value goes: the parameter's memory, or memory of the host that is copied to it."""
        value = self.tensor.detach()
        if value.device.type != "cpu" or not value.is_contiguous():
            stage = torch.empty(value.shape, dtype=value.dtype)
            return _array(stage), stage
        if value.data_ptr() != self._address:
            self._address, self._array = value.data_ptr(), _array(value)
        return self._array, None

    def gradient(self, needs_one: bool) -> Array | None:
        found = self.tensor.grad
        if found is None:
            return _array(torch.zeros(self.tensor.shape, dtype=self.tensor.dtype)) if needs_one else None
        if found.is_sparse:
            raise Refused(f'parameter "{self.name}": a sparse gradient; expected a dense one, or a table by rows')
        return _array(found.detach().cpu().contiguous())


def _array(tensor: torch.Tensor) -> Array:
    """The tensor's memory. NumPy has no bfloat16, which goes by DLPack."""
    return tensor.numpy() if tensor.dtype in NUMPY_TYPES else tensor


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose rule runs on servers.

    ``params`` are parameters, named parameters, or groups with settings of their own, as for PyTorch's optimizers.
    ``rule`` is a name of :data:`RULES`, or a configuration in text such as ``rule: '...'`` or
    ``rule_file: 'mine.rule'``. The learning rate of each group goes with each step, so PyTorch's schedulers work.
    ``client`` is the last one of :func:`pserver.connect` unless it is given.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "sgd",
        lr: float = 1e-3,
        *,
        client: Client | None = None,
        **settings: Any,
    ) -> None:
        self._weights: list[list[_Weight]] | None = None
        config(rule, {"lr": lr, **settings})
        super().__init__(params, {"lr": lr, **settings})
        self.client = client if client is not None else last_client()
        weights = list(self._named())
        configs = {}
        for group, members in zip(self.param_groups, weights):
            keys = {"lr", *settings} | {key for key in group if key not in {"params", "param_names", "initial_lr"}}
            text = config(rule, {key: group[key] for key in keys if key in group})
            configs.update({weight.name: text for weight in members})
        every = [weight for members in weights for weight in members]
        if len({weight.name for weight in every}) < len(every):
            raise Refused("two parameters have one name; expected a name of its own for each")
        values = {weight.name: weight.first_value() for weight in every}
        if not self.client.init_all(values, configs=configs):
            self._fetch(every)
        self._weights = weights
        self._is_alone = self.client.trainers == 1

    def _named(self) -> Iterable[list[_Weight]]:
        count = 0
        for group in self.param_groups:
            names = group.get("param_names") or [f"parameter.{count + at}" for at in range(len(group["params"]))]
            count += len(group["params"])
            yield [_Weight(name, tensor) for name, tensor in zip(names, group["params"])]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the job is initialised: by the constructor."""
        if self._weights is not None:
            raise Refused("a group after initialisation; expected all groups with the optimizer's construction")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sends gradients and fetches weights. Where a job has several trainers, a parameter without a gradient counts
        as one with zeros, because servers wait for a gradient of each trainer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls = []
        for group, members in zip(self.param_groups, self._weights or []):
            gradients, out, staged = {}, {}, []
            for weight in members:
                gradient = weight.gradient(not self._is_alone)
                if gradient is None:
                    continue
                gradients[weight.name] = gradient
                out[weight.name], stage = weight.destination()
                if stage is not None:
                    staged.append((weight, stage))
            if gradients:
                calls.append((gradients, out, float(group["lr"]), staged))
        if len(calls) == 1:
            gradients, out, rate, staged = calls[0]
            self.client.push_pull(gradients, out, rate=rate)
        else:
            started = [self.client.start_push_pull(*given, rate=rate) for *given, rate, _ in calls]
            for call in started:
                call.wait()
        for *_, staged in calls:
            for weight, stage in staged:
                weight.tensor.detach().copy_(stage)
        return loss

    def fetch_weights(self) -> None:
        """Fetches the newest weights, as after a restart of this trainer."""
        self._fetch([weight for members in self._weights or [] for weight in members])

    def set_weights(self) -> None:
        """Makes this trainer's weights the job's, as after ``model.load_state_dict``. One trainer calls it."""
        every = [weight for members in self._weights or [] for weight in members]
        self.client.set({weight.name: weight.first_value() for weight in every})

    def _fetch(self, every: list[_Weight]) -> None:
        places = [(weight, *weight.destination()) for weight in every]
        self.client.pull({weight.name: array for weight, array, _ in places})
        for weight, _, stage in places:
            if stage is not None:
                weight.tensor.detach().copy_(stage)


class DiLoCo:
    """Inner steps by an optimizer of the trainer's own, and every so many an outer step on the servers.

    The difference between the weights of the last outer step and the trainer's is the outer gradient (arXiv 2311.08105).
    ``wire`` may be ``torch.bfloat16``: differences then travel in half the bytes.

    >>> diloco = DiLoCo(model.parameters(), inner, every=50)              # doctest: +SKIP
    >>> for batch in batches: loss(batch).backward(); diloco.step()       # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner: torch.optim.Optimizer,
        every: int,
        outer: str = "sgd",
        lr: float = 0.7,
        *,
        wire: torch.dtype | None = None,
        client: Client | None = None,
        **settings: Any,
    ) -> None:
        if every < 1:
            raise Refused(f"an outer step every {every} steps; expected 1 or more")
        if outer == "sgd" and not settings:
            settings = {"momentum": 0.9, "nesterov": True}
        self.inner, self.every, self.wire, self.steps = inner, every, wire, 0
        self.outer = Optimizer(params, outer, lr, client=client, **settings)
        self._before = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self.outer.param_groups for tensor in group["params"]]

    def step(self) -> bool:
        """An inner step, and the outer one when it is due; true for the latter. Gradients are zero afterwards."""
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1
        if self.steps % self.every:
            return False
        self.outer_step()
        return True

    @torch.no_grad()
    def outer_step(self) -> None:
        """Sends the differences and fetches the weights with all trainers' in them."""
        differences: dict[str, Array] = {}
        out: dict[str, Array] = {}
        rate = float(self.outer.param_groups[0]["lr"])
        staged = []
        every = [weight for members in self.outer._weights or [] for weight in members]
        for weight, before in zip(every, self._before):
            difference = (before - weight.tensor.detach()).cpu().contiguous()
            differences[weight.name] = _array(difference if self.wire is None else difference.to(self.wire))
            out[weight.name], stage = weight.destination()
            if stage is not None:
                staged.append((weight, stage))
        self.outer.client.push_pull(differences, out, rate=rate)
        for weight, stage in staged:
            weight.tensor.detach().copy_(stage)
        for weight, before in zip(every, self._before):
            before.copy_(weight.tensor.detach())
