"""DiLoCo: inner steps by an optimizer of the trainer's own, outer steps on servers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from .._client import Array, Call, Client
from .._errors import Refused
from ._buckets import acknowledged
from ._embedding import Table
from ._optimizer import Optimizer
from ._rules import Numbers
from ._staging import Copies
from ._weights import Places, Weight, gradients_of, kept

STATE = {"steps", "inner", "outer", "weights"}
PIECE_ELEMENTS = 1 << 24
"""Differences of so many elements are found at once, or of one parameter."""


class _Outer(Optimizer):
    """The outer optimizer. Its steps and its weights are :class:`DiLoCo`'s, which knows the weights of the last one."""

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise Refused("a step of the outer optimizer; expected DiLoCo.step() or DiLoCo.outer_step()")

    def set_weights(self) -> NoReturn:
        raise Refused("weights for the outer optimizer; expected DiLoCo.set_weights()")

    def fetch_weights(self) -> None:
        """Fetches the weights of the job, before the first step."""
        if self._is_declared:
            raise Refused("weights of the outer optimizer; expected those that DiLoCo.step() fetches")
        super().fetch_weights()

    def replace_weights(self, values: Iterable[torch.Tensor]) -> None:
        """Makes these values the job's, one for each weight."""
        pairs = zip(self.weights, values)
        self.client.set({weight.name: Weight(weight.name, value).value() for weight, value in pairs})


class _Fragment:
    """Parameters whose outer step is one call."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.due = 0
        """The step of a period after which its outer step begins."""
        self.before = [weight.tensor.detach().clone() for weight in weights]
        """The weights of the last outer step."""
        self._prepared: tuple[dict[str, Array], Places, Numbers] | None = None
        """What the next outer step sends, where values go, and what it carries."""
        self._gradients: dict[str, Array] = {}
        """What the outer step that has begun sends."""
        self._numbers = Numbers(0.0, {})
        self._call: Call | None = None
        self._is_acknowledged = False
        """Whether servers have it."""
        self._places: Places | None = None
        self._sent: list[torch.Tensor] = []

    @property
    def is_under_way(self) -> bool:
        """Whether an outer step has begun and is not finished."""
        return bool(self._gradients)

    def prepare(self, client: Client, numbers: Numbers, wire: torch.dtype | None, is_started: bool) -> None:
        """Finds the differences that an outer step sends, and checks them; ``is_started``: they travel while the
        weights are trained on."""
        gradients: dict[str, Array] = {}
        begun: list[Copies] = []
        for some, before in self._pieces():
            differences = torch._foreach_sub(before, [weight.tensor.detach() for weight in some])
            of_piece, copies = gradients_of(list(zip(some, differences)), wire)
            gradients.update(of_piece)
            begun += copies
        places = Places(self.weights, is_staged=is_started, use=kept("value", self.weights))
        for one in begun:
            one.wait()
        held = client._hold({name: gradients[name] for name in places.arrays})
        client._check_push(held, client._hold(places.arrays, True), *numbers)
        self._prepared = gradients, places, numbers

    def _pieces(self) -> Iterator[tuple[list[Weight], list[torch.Tensor]]]:
        """Weights with those of the last outer step, in pieces whose differences take little memory."""
        begin, elements = 0, 0
        for at, weight in enumerate(self.weights):
            if at > begin and elements + weight.tensor.numel() > PIECE_ELEMENTS:
                yield self.weights[begin:at], self.before[begin:at]
                begin, elements = at, 0
            elements += weight.tensor.numel()
        yield self.weights[begin:], self.before[begin:]

    def begin(self, client: Client, is_started: bool) -> None:
        """Begins the outer step that was prepared."""
        assert self._prepared is not None, "it was prepared"
        (self._gradients, self._places, self._numbers), self._prepared = self._prepared, None
        if is_started:
            self._sent = [weight.tensor.detach().clone() for weight in self.weights]
            self._call = self._push(client, self._places)

    def _push(self, client: Client, places: Places) -> Call:
        rate, settings = self._numbers
        return client.start_push_pull(self._gradients, places.arrays, rate=rate, settings=settings)

    def finish(self, client: Client) -> None:
        """Waits for the outer step. What was trained since its begin is added to its weights. After a failure another
        call sends the same differences, which count once."""
        places = self._places
        if not self._gradients or places is None:
            return
        if not self._is_acknowledged:
            call = self._call = self._call or self._push(client, places)
            try:
                call.wait()
            finally:
                # Until it is known, the call stays.
                self._is_acknowledged = acknowledged(call)
                self._call = None
        if self._sent:
            places.finish(self.before)
            sent = iter(self._sent)
            for some, before in self._pieces():
                changes = torch._foreach_sub(before, [next(sent) for _ in some])
                torch._foreach_add_([weight.tensor.detach() for weight in some], changes)
        else:
            places.finish()
            self.keep_weights()
        self._gradients, self._places, self._sent, self._is_acknowledged = {}, None, [], False

    def keep_weights(self) -> None:
        """The weights are those of the last outer step."""
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

    outer: _Outer
    """The outer optimizer, for schedules of its rate and its settings."""

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
        if any(map(Table.is_of, _tensors(params))):
            raise Refused("DiLoCo with a table of rows; expected it in an Optimizer of another job")
        self.inner, self.every, self.wire, self.steps = inner, every, wire, 0
        self.outer = _Outer(params, outer, lr, client=client, **settings)
        if len(self.outer.param_groups) > 1:
            raise Refused(f"{len(self.outer.param_groups)} groups of parameters; expected one, with one outer rate")
        self._fragments = [_Fragment(some) for some in _in_parts(self.outer.weights, fragments)]
        for number, fragment in enumerate(self._fragments, 1):
            fragment.due = number * every // len(self._fragments) % every
        self._ending: list[_Fragment] = []
        """Parts whose outer step is to be finished now."""
        self._beginning: list[_Fragment] = []
        """Parts whose outer step is to be begun now, and finished where the trainer waits."""
        self._waits = True

    @torch.no_grad()
    def step(self) -> bool:
        """An inner step, and the outer ones that are due; true if there are some. Gradients are zero afterwards. Where
        an outer step has failed, another call completes it first, and makes an inner step if there are gradients."""
        had_failed = self._has_failed
        if self.steps == 0 and not had_failed:
            self._check_first()
        if had_failed:
            self._advance()
            if all(weight.tensor.grad is None for weight in self.outer.weights):
                return True
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1
        at = self.steps % self.every
        ends = [one for one in self._fragments if at == (one.due + self.delay) % self.every]
        self._ending = [one for one in ends if one.is_under_way]
        self._beginning = [one for one in self._fragments if at == one.due]
        self._waits = self.delay == 0
        is_due = had_failed or bool(self._beginning)
        self._advance()
        return is_due

    @torch.no_grad()
    def outer_step(self) -> None:
        """An outer step of the whole model, now: sends the differences and fetches the weights with all trainers' in
        them. Where one has failed, it is completed instead."""
        if not self._has_failed:
            self._ending = [fragment for fragment in self._fragments if fragment.is_under_way]
            self._beginning, self._waits = list(self._fragments), True
        self._advance()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the parts that travel, as at the end of a training."""
        self._advance()
        self._ending = [fragment for fragment in self._fragments if fragment.is_under_way]
        self._advance()

    def _check_first(self) -> None:
        """Refuses weights that the program has set since the construction: the difference is no training."""
        pairs = ((weight, before) for one in self._fragments for weight, before in zip(one.weights, one.before))
        for weight, before in pairs:
            if not torch.equal(weight.tensor, before):
                text = "expected set_weights() after it, or DiLoCo constructed with these weights"
                raise Refused(f'parameter "{weight.name}" was changed before the first step; {text}')

    @property
    def _has_failed(self) -> bool:
        return bool(self._ending or self._beginning)

    def _advance(self) -> None:
        """Finishes and begins the outer steps that are due. After a failure another call goes on where it failed."""
        client, numbers = self.outer.client, self.outer._numbers(0)
        # PyTorch's schedulers look whether the optimizer has made a step.
        setattr(self.outer, "_opt_called", True)
        while self._ending:
            self._ending[0].finish(client)
            self._ending.pop(0)
        # All are checked before one is sent: servers have nothing of an outer step that is refused.
        if not any(fragment.is_under_way for fragment in self._beginning):
            for fragment in self._beginning:
                fragment.prepare(client, numbers, self.wire, not self._waits)
        while self._beginning:
            fragment = self._beginning[0]
            if not fragment.is_under_way:
                fragment.begin(client, not self._waits)
            if self._waits:
                fragment.finish(client)
            self._beginning.pop(0)

    # Weights and state

    @torch.no_grad()
    def set_weights(self) -> None:
        """Makes this trainer's weights the job's, as after ``model.load_state_dict``, and those from which the next
        outer step counts. All trainers call it, with the same weights."""
        self._check_rest()
        self.outer.replace_weights(weight.tensor.detach() for weight in self.outer.weights)
        for fragment in self._fragments:
            fragment.keep_weights()

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner and of the outer optimizer, and the weights of the last outer step. Each trainer
        saves its own, beside ``model.state_dict()``."""
        self._check_rest()
        weights = [before.clone() for before in self._before]
        return {
            "steps": self.steps,
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "weights": weights,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state of :meth:`state_dict`, also in another job. Each trainer loads its own, and the model's
        weights by ``model.load_state_dict``, before its next step. The whole job goes on from it: a trainer that was
        started again in a job that runs loads none, and begins at step ``client.resume_rounds() * every``."""
        self._check_rest()
        if not isinstance(state_dict, Mapping) or state_dict.keys() != STATE:
            found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise Refused(f"a state of {found}; expected {sorted(STATE)}, as state_dict() has")
        steps, weights = state_dict["steps"], self._checked_weights(state_dict["weights"])
        if type(steps) is not int or steps < 0:
            raise Refused(f"steps {steps!r}; expected a number of 0 or more")
        load_outer = self.outer._checked_state(state_dict["outer"])
        try:
            self.inner.load_state_dict(state_dict["inner"])
        except Exception as error:
            raise Refused(f"the state of the inner optimizer: {error!r}") from error
        self.outer.replace_weights(weights)
        # After the weights: of those in half precision it has the servers' own.
        load_outer()
        for before, value in zip(self._before, weights):
            before.copy_(value)
        self.steps = steps

    @property
    def _before(self) -> list[torch.Tensor]:
        """The weights of the last outer step."""
        return [before for fragment in self._fragments for before in fragment.before]

    def _checked_weights(self, given: Any) -> list[torch.Tensor]:
        expected = [(tuple(one.shape), one.dtype) for one in self._before]
        is_list = isinstance(given, list) and all(isinstance(one, torch.Tensor) for one in given)
        found = [(tuple(one.shape), one.dtype) for one in given] if is_list else [type(given).__name__]
        if found != expected:
            raise Refused(f"weights of {found[:5]}; expected {expected[:5]}, as the model has")
        if not all(bool(torch.isfinite(one).all()) for one in given):
            raise Refused("weights with NaN or infinity; expected numbers")
        return list(given)

    def _check_rest(self) -> None:
        if self._has_failed or any(fragment.is_under_way for fragment in self._fragments):
            raise Refused("parts of the model travel; expected finish() before, which waits for them")


def _tensors(params: list[Any]) -> Iterator[Any]:
    """The tensors of parameters, named parameters or groups."""
    for one in params:
        if isinstance(one, dict):
            yield from _tensors(list(one["params"]))
        else:
            yield one[-1] if isinstance(one, tuple) else one


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
