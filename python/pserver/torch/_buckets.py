"""Gradients that travel in one call: of a group, or, with overlap, of some parameters that are last in a model."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import torch

from .._client import Array, Call, Client, Held, StepCall
from .._errors import Error, Refused
from ._rules import Numbers
from ._staging import Copies
from ._weights import Fetch, Weight, begin_changed, gradients_of


class Absent(Enum):
    """What a trainer sends for a parameter without a gradient."""

    NOTHING = "nothing"
    """No other trainer waits for it."""
    PASS = "pass"
    """That it has none: a step in which no trainer has one is no update, as with PyTorch's optimizers."""
    ZEROS = "zeros"
    """In mode bounded each gradient is an update, and counts."""


class Sending(NamedTuple):
    """How the gradients of a step are sent."""

    absent: Absent
    wire: torch.dtype | None
    """The type in which they travel; none for their own."""
    factor: float = 1.0
    """What gradients are multiplied by."""
    is_void: bool = False
    """Whether this step is none, at any trainer: this one's gradients are infinite by their scale."""

    @property
    def is_as_they_are(self) -> bool:
        """Whether gradients that there are travel unchanged."""
        return self.wire is None and self.factor == 1.0 and not self.is_void


class Bucket:
    """Parameters of one group whose gradients travel in one call, in one step. It is sent once."""

    def __init__(self, group: int, weights: list[Weight], before: "Bucket | None" = None) -> None:
        self.group = group
        self.weights = weights
        self._names: list[str] = [weight.name for weight in weights] if before is None else before._names
        self._tensors: list[torch.Tensor] = [one.tensor for one in weights] if before is None else before._tensors
        self.is_sent = False
        """Whether servers have the gradients of this step."""
        self.is_unsure = False
        """Whether servers may have them, or a part: the call that sent them failed."""
        self.sent: list[Weight] = []
        """Those of which servers get a gradient, or that there is none."""
        self.numbers = Numbers(0.0, {})
        """What the gradients carry."""
        self._gradients: dict[str, Array] = {}
        """What the next call sends, unless it is held."""
        self._held: Held | None = None
        """What the next call sends, once it was looked at."""
        self._own: Held | None = None
        """The memory of the weights, if that of the gradients is sent as it is."""
        self.is_prepared = False
        """Whether a backward pass has found its gradients, which are on their way to the host, and it is not started."""
        self._copies: list[Copies] = []
        """Copies of these gradients from a device that have begun."""
        self._how: Sending | None = None
        """How what was found is sent."""
        self.changed_weights: Callable[[], list[Weight]] = list
        """Those that the program had changed when the gradients were found."""
        self._passing: list[str] = []
        """For which parameters another says that there is none."""
        self._is_void = False
        self._versions: list[tuple[Weight, torch.Tensor | None, int]] = []
        """The gradients that were sent, none where zeros stood for one, and how often each had been changed."""
        self._complete: set[int] = set()
        self._expected: int | None = None
        self._calls: list[tuple[Iterable[str], StepCall]] = []
        """The calls that send gradients, with the names of their parameters."""
        self._wanted = 0
        """How many there are to be."""
        self._acknowledged: set[str] = set()
        """The names of parameters whose gradients servers have, while others' are to be sent again."""
        self._fetch: tuple[StepCall, Fetch] | None = None
        """The call that also fetches, with where the values go."""
        self._later_fetch: tuple[StepCall, Fetch] | None = None
        """A call that fetches what comes of gradients that other calls or other trainers send."""
        self.fetched: set[str] = set()
        """The names of weights that have the value of this step."""

    def again(self) -> "Bucket":
        """The same parameters in the next step."""
        return Bucket(self.group, self.weights, self)

    @property
    def is_on_its_way(self) -> bool:
        """Whether servers have the gradients of this step, or a call is sending them."""
        return self.is_sent or bool(self._calls)

    @property
    def is_started(self) -> bool:
        """Whether servers have the gradients of this step, or may have them."""
        return self.is_on_its_way or self.is_unsure

    @property
    def is_ready(self) -> bool:
        """Whether everything that was found is in the host's memory."""
        return all(copies.are_over() for copies in self._copies)

    def completed(self, at: int) -> bool:
        """Notes that the backward pass has the gradient of the weight ``at``; true when all are there, or were sent."""
        if self._expected is None:
            self._expected = sum(weight.tensor.requires_grad for weight in self.weights)
        complete = self._complete
        complete.add(at)
        # Of many small parameters this is much of what overlap costs: properties are written out.
        is_begun = self.is_sent or self.is_unsure or self.is_prepared or bool(self._calls)
        return len(complete) == self._expected or is_begun

    def find(self, client: Client, how: Sending) -> None:
        """Finds the gradients to send, and begins to copy those of a device to the host; and to look for weights that
        the program has changed."""
        own = client._hold_plain(self._names, self._tensors, True)
        self._how = how
        self.changed_weights = begin_changed(self.weights, own)
        self._passing, self._is_void, self._gradients, self._copies = [], how.is_void, {}, []
        gradients = [tensor.grad for tensor in self._tensors]
        # Of many small parameters this is much of a step: where all gradients are sent as they are, they are looked at
        # together, and once.
        is_usual = own is not None and how.is_as_they_are and not self._acknowledged
        self._held = client._hold_plain(self._names, gradients) if is_usual else None
        self._own = None if self._held is None else own
        if self._held is not None:
            self.sent = self.weights
            self._versions = list(zip(self.weights, gradients, map(changes_of, gradients)))
            return
        self.sent, self._versions = [], []
        found: list[tuple[Weight, torch.Tensor]] = []
        for weight in self.weights:
            self._versions.append((weight, weight.tensor.grad, changes_of(weight.tensor.grad)))
            if weight.name in self._acknowledged:
                self.sent.append(weight)
                continue
            gradient = None if how.is_void else weight.gradient(how.factor)
            if gradient is None:
                # Frozen weights are so at every trainer, and decay nowhere.
                if how.absent == Absent.NOTHING or not weight.tensor.requires_grad:
                    continue
                if how.absent == Absent.PASS:
                    self._passing.append(weight.name)
                else:
                    gradient = weight.zeros()
            if gradient is not None:
                found.append((weight, gradient))
            weight.check()
            self.sent.append(weight)
        self._gradients, self._copies = gradients_of(found, how.wire)

    def is_found(self, how: Sending) -> bool:
        """Whether a backward pass has found the gradients that there are, to be sent in this way. What is held is looked at
        again, as the program may have given the weights other memory."""
        return self.is_prepared and self._held is None and self._how == how and self.changed() is None

    def check(self, client: Client, numbers: Numbers) -> None:
        """Refuses all that servers would refuse, before any of it is sent."""
        self.numbers = numbers
        for copies in self._copies:
            copies.wait()
        if self._gradients:
            self._held = client._hold(self._gradients)
        if self._held is not None:
            client._check_push(self._held, None, *numbers)

    def start(self, client: Client, fetches: bool = False) -> None:
        """Starts to send what was found; with ``fetches`` also to fetch what comes of the gradients, into weights that
        the program has not changed until now."""
        gradients, passing, held, own = self._gradients, self._passing, self._held, self._own
        self._forget_found()
        self._wanted = (held is not None) + bool(passing)
        if self._wanted == 0:
            self.is_sent, self.is_unsure = True, False
        try:
            if held is not None:
                values: Fetch | None = None
                if fetches and own is not None:
                    values = Fetch(client, self.sent, own)
                elif fetches:
                    values = Fetch(client, [weight for weight in self.sent if weight.name in gradients])
                    held = client._hold({name: gradients[name] for name in values.names})
                call = self._noted_call(gradients or self._names)
                if values is None:
                    client._start_held(call, held, None, *self.numbers)
                else:
                    self._fetch = call, values
                    values.start(client, call, held, *self.numbers)
            if passing:
                client._start_pass(self._noted_call(passing), passing, self._is_void)
        except BaseException:
            self._break_off()
            raise

    def _noted_call(self, names: Iterable[str]) -> StepCall:
        call = StepCall()
        self._calls.append((names, call))
        return call

    def _break_off(self) -> None:
        """Ends calls, some of which are not started. Those that servers have not acknowledged are started again."""
        for _, call in self._calls:
            with suppress(Error):
                call.cancel()
        self._end_calls()

    def settle(self) -> None:
        """Ends what is left of a start that was interrupted more than once."""
        if not all(call.is_started for _, call in self._calls):
            self._break_off()

    def start_fetch(self, client: Client, replaced: list[Weight]) -> None:
        """Starts to fetch what comes of the gradients of this step, also of those that other trainers alone send, unless
        the call that sends them does. Adds to ``replaced`` the weights that the program has changed since."""
        begun = self.fetched if self._fetch is None else set(self._fetch[1].names)
        if left := [weight for weight in self.sent if weight.name not in begun]:
            values = Fetch(client, left)
            replaced += begin_changed(left, values.own)()
            call = StepCall()
            self._later_fetch = call, values
            values.start(client, call, is_of_step=True)

    def end_fetch(self) -> None:
        """Waits for what :meth:`start_fetch` has started."""
        if self._later_fetch is not None:
            (call, values), self._later_fetch = self._later_fetch, None
            if call.is_started:
                values.finish(call.wait_sums())
                if not self.is_unsure:
                    self.fetched.update(values.names)

    def _end_calls(self) -> None:
        """Notes what servers have of calls that are over. Until the last line everything is as before, so that another
        call does the same after an interrupt."""
        started = [(names, call) for names, call in self._calls if call.is_started]
        answers = [acknowledged(call) for _, call in started]
        has_all = all(answers) and len(answers) == self._wanted
        known = self._acknowledged
        if not has_all:
            known = known.union(*(names for (names, _), has_it in zip(started, answers) if has_it))
        if self._fetch is not None and not self.fetched.issuperset(self._fetch[1].names):
            self._fetch[1].fail()
        sent, unsure = (has_all, not has_all) if started else (self.is_sent, self.is_unsure)
        # No interrupt comes within a line that calls nothing.
        self.is_sent, self.is_unsure, self._acknowledged, self._calls, self._fetch = sent, unsure, known, [], None

    def cancel(self) -> None:
        """Cancels calls that write weights, where nothing waits for them any more."""
        for fetch in (self._fetch, self._later_fetch):
            if fetch is not None:
                with suppress(Error):
                    fetch[0].cancel()

    def give_up(self) -> None:
        """Waits for calls that were cancelled. One that is over by then counts."""
        if self._fetch is not None:
            with suppress(Error):
                self.wait()
        with suppress(Error):
            self.end_fetch()

    def changed(self) -> Weight | None:
        """A weight whose gradient is another one than that which was sent."""
        for weight, gradient, version in self._versions:
            if weight.tensor.grad is not gradient or changes_of(gradient) != version:
                return weight
        return None

    def forget_gradients(self) -> None:
        """Gradients that were sent count, whatever those of the model become."""
        self._versions.clear()

    def wait(self) -> None:
        """Waits until servers have what was sent. After a failure it can be started again."""
        try:
            for _, call in self._calls:
                call.wait()
            if self._fetch is not None:
                call, values = self._fetch
                values.finish(call.wait_sums())
                self.fetched.update(values.names)
        finally:
            self._end_calls()

    def _forget_found(self) -> None:
        self._gradients, self._passing, self._copies = {}, [], []
        self._held = self._own = None
        self.changed_weights = list
        self.is_prepared = False


def changes_of(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def acknowledged(call: Call | StepCall) -> bool:
    """Whether servers have what a call sent that is over; if not, they may have it, or a part: each server answers for
    its own, and one may have refused its part."""
    try:
        call.wait()
    except Error:
        return False
    return True


def wait_all(buckets: Iterable[Bucket]) -> None:
    """Waits for every bucket, and raises the first failure afterwards: no call is left behind."""
    failure: Error | None = None
    for bucket in buckets:
        try:
            bucket.wait()
        except Error as error:
            failure = failure or error
    if failure is not None:
        raise failure


def in_buckets(group: int, weights: list[Weight], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at least so many bytes, the last parameters first, in the order of the backward pass."""
    if bucket_bytes < 1:
        raise Refused(f"buckets of {bucket_bytes} bytes; expected 1 or more")
    buckets: list[Bucket] = []
    some: list[Weight] = []
    bytes_of_some = 0
    for weight in reversed(weights):
        some.append(weight)
        bytes_of_some += weight.tensor.numel() * weight.tensor.element_size()
        if bytes_of_some >= bucket_bytes:
            buckets.append(Bucket(group, some))
            some, bytes_of_some = [], 0
    if some:
        buckets.append(Bucket(group, some))
    return buckets
