"""The optimizer whose rule runs on servers."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._client import Client, last_client
from .._errors import Refused
from ._buckets import Bucket, in_buckets, wait_all
from ._clipping import STAGE, Clipping
from ._embedding import Table
from ._rules import config
from ._weights import Places, Weight

BUCKET_BYTES = 8 << 20

_owners: "weakref.WeakValueDictionary[int, Optimizer]" = weakref.WeakValueDictionary()
"""The optimizers of parameters, by the tensors' identities."""


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose rule runs on servers.

    ``params`` are parameters, named parameters, or groups with settings of their own, as for PyTorch's optimizers;
    those of :class:`Embedding` are tables of rows. ``rule`` is a name of :data:`RULES`, or a configuration in text such as
    ``rule: '...'`` or ``rule_file: 'mine.rule'``. The learning rate of each group goes with each step, so PyTorch's
    schedulers work. ``client`` is the last one of :func:`pserver.connect` unless it is given.

    ``max_norm`` scales the gradients of a step, merged over all trainers, so that their norm is at most that.
    ``wire``, such as ``torch.bfloat16``, is the type in which gradients travel. ``overlap`` sends gradients while the
    backward pass goes on, in buckets of ``bucket_bytes`` and more; a backward pass that is not the last one before
    :meth:`step` then belongs in :meth:`no_sync`, and gradients are not to be changed between the two.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "sgd",
        lr: float = 1e-3,
        *,
        client: Client | None = None,
        max_norm: float | None = None,
        wire: torch.dtype | None = None,
        overlap: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        **settings: Any,
    ) -> None:
        self._is_declared = False
        config(rule, {"lr": lr, **settings})
        super().__init__(params, {"lr": lr, **settings})
        self.client = client if client is not None else last_client()
        self._clipping = None if max_norm is None else Clipping(max_norm)
        self._wire = wire
        self.weights: list[Weight] = []
        self._tables: list[tuple[int, Table]] = []
        self._buckets: list[Bucket] = []
        self._is_syncing = True
        configs: dict[str, str] = {}
        for number, (group, members) in enumerate(zip(self.param_groups, list(self._named()))):
            keys = {"lr", *settings} | {key for key in group if key not in {"params", "param_names", "initial_lr"}}
            text = config(rule, {key: group[key] for key in keys if key in group})
            configs.update({name: text for name, _ in members})
            weights = [Weight(name, tensor) for name, tensor in members if not Table.is_of(tensor)]
            self._tables += [(number, Table.of(tensor, name)) for name, tensor in members if Table.is_of(tensor)]
            self.weights += weights
            self._buckets += in_buckets(number, weights, bucket_bytes) if overlap else [Bucket(number, weights)]
        if len(configs) < sum(len(group["params"]) for group in self.param_groups):
            raise Refused("two parameters have one name; expected a name of its own for each")
        self._own()
        if not self.client._initialise(lambda: self._declare(configs)):
            self.fetch_weights()
        for _, table in self._tables:
            table.bind(self.client)
        self._is_declared = True
        self._is_alone = self.client.trainers == 1
        self._fetches_at_once = not overlap and self._clipping is None
        if overlap:
            self._hook()

    def _named(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        count = 0
        for group in self.param_groups:
            names = group.get("param_names") or [f"parameter.{count + at}" for at in range(len(group["params"]))]
            count += len(group["params"])
            yield list(zip(names, group["params"]))

    def _own(self) -> None:
        """Refuses parameters that another optimizer of an open client has."""
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for tensor in tensors:
            other = _owners.get(id(tensor))
            if other is not None and not other.client.is_closed and any(tensor is one for one in other._tensors()):
                raise Refused("a parameter of the model has another optimizer; expected one optimizer for each")
        _owners.update({id(tensor): self for tensor in tensors})

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for group in self.param_groups for tensor in group["params"])

    def _declare(self, configs: Mapping[str, str]) -> None:
        """Declares parameters and tables in a job that this trainer initialises."""
        client = self.client
        for weight in self.weights:
            stage = "" if self._clipping is None else f" {STAGE}"
            client.init(weight.name, weight.value(), configs[weight.name] + stage)
            if self._clipping is not None:
                self._clipping.declare(client, weight.name)
        for _, table in self._tables:
            table.declare(client, configs[table.name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the job is initialised: by the constructor."""
        if self._is_declared:
            raise Refused("a group after initialisation; expected all groups with the optimizer's construction")
        super().add_param_group(param_group)

    # Overlap

    def _hook(self) -> None:
        this = weakref.ref(self)
        for bucket in self._buckets:
            for at, weight in enumerate(bucket.weights):

                def completed(_: torch.Tensor, bucket: Bucket = bucket, at: int = at) -> None:
                    optimizer = this()
                    if optimizer is not None and optimizer._is_syncing:
                        optimizer._completed(bucket, at)

                weight.tensor.register_post_accumulate_grad_hook(completed)  # type: ignore[no-untyped-call]

    def _completed(self, bucket: Bucket, at: int) -> None:
        if bucket.is_started:
            text = "expected step() after a backward pass; earlier ones belong in `with optimizer.no_sync():`"
            raise Refused(f'parameter "{bucket.weights[at].name}": a gradient after it was sent; {text}')
        if bucket.completed(at):
            self._start(bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add to gradients and send nothing: for the accumulation of gradients."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # Steps

    def _rate(self, bucket: Bucket) -> float:
        return float(self.param_groups[bucket.group]["lr"])

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        gradients = bucket.gradients(not self._is_alone, self._wire)
        bucket.start(self.client, gradients, self._rate(bucket), self._fetches_at_once)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sends gradients and fetches weights. Where a job has several trainers, a parameter without a gradient counts
        as one with zeros, because servers wait for a gradient of each trainer. A step that failed is repeated by
        another :meth:`step`: no gradient is applied twice."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_rates()
        for group, table in self._tables:
            table.start_push(float(self.param_groups[group]["lr"]), not self._is_alone)
        if len(self._buckets) == 1 and self._fetches_at_once:
            self._exchange(self._buckets[0])
        else:
            self._exchange_buckets()
        for _, table in self._tables:
            table.wait_push()
        for bucket in self._buckets:
            bucket.reset()
        for _, table in self._tables:
            table.end_step()
        return loss

    def _exchange(self, bucket: Bucket) -> None:
        """All gradients in one call, and all values in its answer."""
        gradients = bucket.gradients(not self._is_alone, self._wire)
        if gradients and not bucket.is_sent:
            places = Places(bucket.sent)
            self.client.push_pull(gradients, places.arrays, rate=self._rate(bucket))
            places.finish()
        bucket.is_sent = True

    def _exchange_buckets(self) -> None:
        for bucket in self._buckets:
            if not bucket.is_started:
                self._start(bucket)
        wait_all(self._buckets)
        if not self._fetches_at_once:
            sent = [weight for bucket in self._buckets for weight in bucket.sent]
            if self._clipping is not None and sent:
                self._clipping.run(self.client, [weight.name for weight in sent])
            self._fetch(sent)

    def _check_rates(self) -> None:
        for bucket in self._buckets:
            if bucket.is_started and bucket.rate != self._rate(bucket):
                text = f"a learning rate of {self._rate(bucket)} after gradients were sent with {bucket.rate}"
                raise Refused(f"{text}; expected it to be set before the backward pass, or overlap=False")

    @property
    def total_norm(self) -> float:
        """The norm of all gradients of the last step, before they were scaled to ``max_norm``."""
        if self._clipping is None:
            raise Refused("this optimizer computes no norm; expected one with max_norm")
        return self._clipping.total_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's; gradients of rows that were not sent are dropped."""
        super().zero_grad(set_to_none)
        for _, table in self._tables:
            table.forget_gradients()

    # Values

    def fetch_weights(self) -> None:
        """Fetches the newest weights, as after a restart of this trainer."""
        self._fetch(self.weights)

    def set_weights(self) -> None:
        """Makes this trainer's weights the job's, as after ``model.load_state_dict``. One trainer calls it."""
        self.client.set({weight.name: weight.value() for weight in self.weights})

    def _fetch(self, weights: Iterable[Weight]) -> None:
        places = Places(weights)
        if places.arrays:
            self.client.pull(places.arrays)
        places.finish()
