"""DiLoCo: inner steps by an optimizer of the trainer's own, outer steps on servers."""

from collections.abc import Iterable
from typing import Any

import torch

from .._client import Call, Client
from .._errors import Refused
from ._embedding import Table
from ._optimizer import Optimizer
from ._weights import Places, Weight


class _Fragment:
    """Parameters whose outer step is one call."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.due = 0
        """The step of a period after which its outer step begins."""
        self.before = [weight.tensor.detach().clone() for weight in weights]
        """The weights of the last outer step."""
        self._call: Call | None = None
        self._places: Places | None = None
        self._sent: list[torch.Tensor] = []

    def differences(self, wire: torch.dtype | None) -> dict[str, Any]:
        """The outer gradients."""
        pairs = zip(self.weights, self.before)
        return {weight.name: Weight.sent(before - weight.tensor.detach(), wire) for weight, before in pairs}

    def start(self, client: Client, rate: float, wire: torch.dtype | None) -> None:
        """Starts an outer step, while the weights are trained on."""
        self._places = Places(self.weights, is_staged=True)
        self._sent = [weight.tensor.detach().clone() for weight in self.weights]
        self._call = client.start_push_pull(self.differences(wire), self._places.arrays, rate=rate)

    def finish(self) -> None:
        """Waits for the outer step. What was trained meanwhile is added to its weights."""
        call, places = self._call, self._places
        if call is None or places is None:
            return
        self._call = self._places = None
        call.wait()
        for (weight, value), before, sent in zip(places.staged, self.before, self._sent):
            value = value.to(before.device)
            before.copy_(value)
            weight.tensor.detach().add_(value - sent)

    def run(self, client: Client, rate: float, wire: torch.dtype | None) -> None:
        """An outer step that the trainer waits for."""
        places = Places(self.weights)
        client.push_pull(self.differences(wire), places.arrays, rate=rate)
        places.finish()
        for weight, before in zip(self.weights, self.before):
            before.copy_(weight.tensor.detach())


class DiLoCo:
    """Inner steps by an optimizer of the trainer's own, and every so many an outer step on the servers.

    The difference between the weights of the last outer step and the trainer's is the outer gradient (arXiv
    2311.08105).
    ``outer`` is a rule as :class:`Optimizer` has it, or ``nesterov``: ``sgd`` with momentum 0.9. ``wire`` may be
    ``torch.bfloat16``: differences then travel in half the bytes.

    With ``fragments`` the outer steps of so many parts of the model are distributed over the period (arXiv 2501.18512).
    A part travels while the trainer makes ``delay`` inner steps, by default until the next part's turn; what these have
    changed is added to the weights that come back. Without ``fragments`` and ``delay`` the trainer waits.

    >>> diloco = DiLoCo(model.parameters(), inner, every=50)              # doctest: +SKIP
    >>> for batch in batches: loss(batch).backward(); diloco.step()       # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner: torch.optim.Optimizer,
        every: int,
        outer: str = "nesterov",
        lr: float = 0.7,
        *,
        fragments: int = 1,
        delay: int | None = None,
        wire: torch.dtype | None = None,
        client: Client | None = None,
        **settings: Any,
    ) -> None:
        if every < 1:
            raise Refused(f"an outer step every {every} steps; expected 1 or more")
        if not 1 <= fragments <= every:
            raise Refused(f"{fragments} fragments in {every} steps; expected 1 to {every}")
        self.delay = (every // fragments if fragments > 1 else 0) if delay is None else delay
        if not 0 <= self.delay < max(every, 2):
            raise Refused(f"a delay of {self.delay} steps; expected 0 to {every - 1}")
        if outer == "nesterov":
            outer, settings = "sgd", {"momentum": 0.9, "nesterov": True, **settings}
        params = list(params)
        if any(Table.is_of(one[-1] if isinstance(one, tuple) else one) for one in params):
            raise Refused("DiLoCo with a table of rows; expected it in an Optimizer of another job")
        self.inner, self.every, self.wire, self.steps = inner, every, wire, 0
        self.outer = Optimizer(params, outer, lr, client=client, **settings)
        if len(self.outer.param_groups) > 1:
            raise Refused(f"{len(self.outer.param_groups)} groups of parameters; expected one, with one outer rate")
        self._fragments = [_Fragment(some) for some in _in_parts(self.outer.weights, fragments)]
        for number, fragment in enumerate(self._fragments, 1):
            fragment.due = number * every // len(self._fragments) % every

    @torch.no_grad()
    def step(self) -> bool:
        """An inner step, and the outer ones that are due; true if there are some. Gradients are zero afterwards."""
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1
        for fragment in self._fragments:
            if self.steps % self.every == (fragment.due + self.delay) % self.every:
                fragment.finish()
        due = [fragment for fragment in self._fragments if self.steps % self.every == fragment.due]
        for fragment in due:
            self._begin(fragment, self.delay > 0)
        return bool(due)

    @torch.no_grad()
    def outer_step(self) -> None:
        """An outer step of the whole model, now: sends the differences and fetches the weights with all trainers' in
        them."""
        self.finish()
        for fragment in self._fragments:
            self._begin(fragment, False)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the parts that travel, as at the end of a training."""
        for fragment in self._fragments:
            fragment.finish()

    def _begin(self, fragment: _Fragment, is_started: bool) -> None:
        rate = float(self.outer.param_groups[0]["lr"])
        begin = fragment.start if is_started else fragment.run
        begin(self.outer.client, rate, self.wire)


def _in_parts(weights: list[Weight], parts: int) -> list[list[Weight]]:
    """Parts of about equally many elements, each of some consecutive parameters."""
    total = sum(weight.tensor.numel() for weight in weights)
    found: list[list[Weight]] = [[] for _ in range(parts)]
    before = 0
    for weight in weights:
        middle = before + weight.tensor.numel() / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))].append(weight)
        before += weight.tensor.numel()
    return [some for some in found if some]
