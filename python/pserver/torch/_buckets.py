"""Gradients that travel in one call: of a group, or, with overlap, of some parameters that are last in a model."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from .._client import Array, Call, Client
from .._errors import Error, Refused
from ._weights import Places, Weight


class Bucket:
    """Parameters of one group whose gradients travel in one call. It is sent once in a step."""

    def __init__(self, group: int, weights: list[Weight]) -> None:
        self.group = group
        self.weights = weights
        self.is_sent = False
        """Whether servers have the gradients of this step."""
        self.is_unsure = False
        """Whether servers may have them: the call that sent them failed, and was not refused."""
        self.sent: list[Weight] = []
        self.rate = 0.0
        self._versions: list[tuple[Weight, torch.Tensor | None, int]] = []
        """The gradients that were sent, none where zeros stood for one, and how often each had been changed."""
        self._complete: set[int] = set()
        self._call: Call | None = None
        self._places: Places | None = None

    @property
    def is_on_its_way(self) -> bool:
        """Whether servers have the gradients of this step, or a call is sending them."""
        return self.is_sent or self._call is not None

    @property
    def is_started(self) -> bool:
        """Whether servers have the gradients of this step, or may have them."""
        return self.is_on_its_way or self.is_unsure

    def completed(self, at: int) -> bool:
        """Notes that the backward pass has the gradient of the weight ``at``; true when all are there."""
        self._complete.add(at)
        return len(self._complete) == sum(weight.tensor.requires_grad for weight in self.weights)

    def gradients(self, needs_all: bool, wire: torch.dtype | None) -> dict[str, Array]:
        """The gradients to send. ``needs_all``: servers wait for one of each parameter, so zeros stand for none."""
        found: dict[str, Array] = {}
        self.sent = []
        self._versions = []
        for weight in self.weights:
            gradient = weight.gradient(wire)
            if gradient is None:
                self._versions.append((weight, None, 0))
                # Frozen weights are so at every trainer, and decay nowhere.
                if not needs_all or not weight.tensor.requires_grad:
                    continue
                gradient = weight.zeros()
            elif weight.tensor.grad is not None:
                self._versions.append((weight, weight.tensor.grad, weight.tensor.grad._version))
            found[weight.name] = gradient
            self.sent.append(weight)
        return found

    def start(self, client: Client, gradients: dict[str, Array], rate: float, fetches: bool) -> None:
        """Starts to send the gradients, and to fetch the values with them where ``fetches``."""
        self.rate, self._places = rate, None
        if not gradients:
            self.is_sent = True
        elif fetches:
            self._places = Places(self.sent)
            self._call = client.start_push_pull(gradients, self._places.arrays, rate=rate)
        else:
            self._call = client.start_push(gradients, rate=rate)

    def changed(self) -> Weight | None:
        """A weight whose gradient is another one than that which was sent."""
        for weight, gradient, version in self._versions:
            if weight.tensor.grad is not gradient or (gradient is not None and gradient._version != version):
                return weight
        return None

    def forget_gradients(self) -> None:
        """Gradients that were sent count, whatever those of the model become."""
        self._versions.clear()

    def wait(self) -> None:
        """Waits until servers have the gradients. After a failure they can be started again."""
        call = self._call
        if call is not None:
            try:
                call.wait()
            finally:
                self._call = None
                self._note_end(call)
        if self._places is not None:
            self._places.finish()
            self._places = None

    def _note_end(self, call: Call) -> None:
        """Notes what servers have after a call, also where the program was interrupted when it ended."""
        try:
            self.is_sent = acknowledged(call)
            self.is_unsure = not self.is_sent
        except Refused:
            pass
        if not self.is_sent:
            self._places = None

    def give_up(self) -> None:
        """Waits until a call that was started is over, well or not."""
        with suppress(Error):
            self.wait()

    def reset(self) -> None:
        """The next step begins."""
        self.is_sent = self.is_unsure = False
        self._places = None
        self.sent = []
        self._versions = []
        self._complete.clear()


def acknowledged(call: Call) -> bool:
    """Whether servers have what a call sent that is over; if not, they may have it.

    Raises:
        Refused: they refused it.
    """
    try:
        call.wait()
    except Refused:
        raise
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
