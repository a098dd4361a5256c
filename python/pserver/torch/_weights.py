"""Tensors of a model beside their names at the servers: what is sent of them, and where fetched values go."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from .. import _pserver
from .._client import Array, Client, Held, Settings, StepCall
from .._errors import Error, Refused
from . import _staging
from ._staging import Block, Copies, Place

NUMPY_TYPES = {torch.float32, torch.float64, torch.float16}
HALVES = {torch.float16, torch.bfloat16}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a tensor's elements."""


def array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor of the host. NumPy has no bfloat16, which goes by DLPack. A number is one
    element at servers."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    return tensor.numpy() if tensor.dtype in NUMPY_TYPES else tensor


class Weight:
    """A parameter of the model and its name at the servers."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in HALVES | {torch.float32, torch.float64}:
            text = "expected float32, float64, float16 or bfloat16"
            raise Refused(f'parameter "{name}" is of {tensor.dtype}; {text}, which servers can update')
        self.name = name
        self.tensor = tensor
        self.noted: int | None = None
        """The checksum of the contents that the job's value has; none where it is not known what they are."""
        self._declared = self.dtype, tensor.shape
        self._places: dict[str, Place] = {}
        """Memory of the host beside this tensor, by what it is for."""
        self._address = 0
        self._array: Array = None

    @property
    def dtype(self) -> torch.dtype:
        """The type at the servers, which update half precision in float32."""
        return torch.float32 if self.tensor.dtype in HALVES else self.tensor.dtype

    def check(self) -> None:
        """Refuses a tensor that has become one for which servers have no value."""
        dtype, shape = self._declared
        if self.dtype != dtype:
            text = f"a tensor of {self.dtype} for its value; expected {dtype}, as when the optimizer was made"
            raise Refused(f'parameter "{self.name}": {text}')
        if self.tensor.shape != shape:
            text = f"the shape {list(self.tensor.shape)}; expected the shape {list(shape)}"
            raise Refused(f'parameter "{self.name}": {text}, as when the optimizer was made')

    def value(self) -> Array:
        """The present value as servers have it."""
        return array(self.tensor.detach().to("cpu", self.dtype).contiguous())

    def gradient(self, factor: float = 1.0) -> torch.Tensor | None:
        """The gradient times ``factor``, if there is one, where it is."""
        found = self.tensor.grad
        if found is None:
            return None
        if found.is_sparse:
            text = "expected a dense one, or pserver.torch.Embedding, whose gradients are rows"
            raise Refused(f'parameter "{self.name}": a sparse gradient; {text}')
        return found if factor == 1.0 else found * factor

    def zeros(self) -> torch.Tensor:
        """A gradient without effect on the sum."""
        return torch.zeros(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")

    def destination(self) -> Array | None:
        """The parameter's memory, if a value can be written there."""
        value = self.tensor
        if not _staging.is_here(value) or not value.is_contiguous():
            return None
        if value.data_ptr() != self._address:
            self._address, self._array = value.data_ptr(), array(value.detach())
        return self._array


def memory(tensor: torch.Tensor) -> Array:
    """The memory of a tensor of the host, or of a contiguous copy with its values."""
    return array(tensor.resolve_neg().contiguous())


def beside(use: str | None, wanted: Sequence[tuple[Weight, torch.dtype]]) -> list[Place]:
    """Places in memory of the host beside weights, for values of these types: for each use one, which serves again, and
    without a use new ones. New ones lie in a block for each device."""
    found: dict[int, Place] = {}
    missing: dict[torch.device, list[tuple[Weight, torch.dtype]]] = {}
    for weight, dtype in wanted:
        place = None if use is None else weight._places.get(use)
        device, kind = weight.tensor.device, (weight.tensor.shape, dtype)
        if place is None or place.block.device != device or (place.tensor.shape, place.tensor.dtype) != kind:
            missing.setdefault(device, []).append((weight, dtype))
        else:
            found[id(weight)] = place
    for device, some in missing.items():
        block = Block([(weight.tensor.shape, dtype) for weight, dtype in some], device)
        for at, (weight, _) in enumerate(some):
            tensor = block.tensors[at]
            found[id(weight)] = place = Place(tensor, array(tensor), block, at)
            if use is not None:
                weight._places[use] = place
    return [found[id(weight)] for weight, _ in wanted]


def gradients_of(
    found: Sequence[tuple[Weight, torch.Tensor]], wire: torch.dtype | None
) -> tuple[dict[str, Array], list[Copies]]:
    """The memory of the host from which gradients are sent, in the type ``wire`` or their own, and the copies to it that
    have begun."""
    gradients = {weight.name: memory(narrowed(one, wire)) for weight, one in found if _staging.is_here(one)}
    elsewhere = [(weight, one.detach()) for weight, one in found if not _staging.is_here(one)]
    if not elsewhere:
        return gradients, []
    if wire == torch.float16:
        elsewhere = [(weight, narrowed(one, wire)) for weight, one in elsewhere]
    places = beside("gradient", [(weight, wire or one.dtype) for weight, one in elsewhere])
    copies = _staging.bring(places, [one for _, one in elsewhere])
    gradients.update({weight.name: place.array for (weight, _), place in zip(elsewhere, places)})
    return gradients, copies


def narrowed(tensor: torch.Tensor, wire: torch.dtype | None) -> torch.Tensor:
    """The tensor in the type in which it travels."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if wire is None:
        return tensor
    narrow = tensor.to(wire)
    if wire == torch.float16 and bool(torch.isinf(narrow).any()) and not bool(torch.isinf(tensor).any()):
        text = "expected wire=torch.bfloat16, which has float32's range, or gradients below 65504"
        raise Refused(f"gradients of up to {float(tensor.abs().max()):.3g} in wire=torch.float16; {text}")
    return narrow


def note(weights: Iterable[Weight]) -> None:
    """The contents of these tensors are the job's values."""
    all_weights = list(weights)
    for weight, checksum in zip(all_weights, _begin_checksums(all_weights)()):
        weight.noted = checksum


def forget(weights: Iterable[Weight]) -> None:
    """The contents of these tensors are not known any more."""
    for weight in weights:
        weight.noted = None


def begin_changed(weights: Iterable[Weight], own: Held | None = None) -> Callable[[], list[Weight]]:
    """Begins to look for weights that the program has changed since they were noted: by ``copy_``, by ``.data``, through
    NumPy. Only the contents tell: neither ``.data`` nor NumPy counts a version of the tensor. ``own`` is the memory of
    the weights, where it is known."""
    weights = list(weights)
    noted = [weight for weight in weights if weight.noted is not None]
    sums = _begin_checksums(noted, own if len(noted) == len(weights) else None)
    return lambda: [weight for weight, checksum in zip(noted, sums()) if weight.noted != checksum]


def _begin_checksums(weights: Sequence[Weight], own: Held | None = None) -> Callable[[], list[int]]:
    """Begins to compute a checksum of the contents of each tensor, where it is. A device is not waited for."""
    if own is not None:
        return own.checksums
    places = [weight.destination() for weight in weights]
    elsewhere = [at for at, place in enumerate(places) if place is None]
    if not elsewhere:
        return lambda: _pserver.checksums(places)
    tensors = [weights[at].tensor.detach() for at in elsewhere]
    sums = [tensor.contiguous().view(BITS[tensor.element_size()]).sum() for tensor in tensors]
    # They come in one copy.
    of_devices, copies = _staging.read(torch.stack([one.to(sums[0].device) for one in sums]))

    def finish() -> list[int]:
        copies.wait()
        found = dict(zip(elsewhere, of_devices.tolist()))
        here = iter(_pserver.checksums([place for place in places if place is not None]))
        return [found[at] if at in found else next(here) for at in range(len(places))]

    return finish


def fetch(client: Client, weights: Iterable[Weight]) -> None:
    """Fetches the newest values of weights, and notes them."""
    values = Fetch(client, list(weights))
    if values.names:
        call = StepCall()
        try:
            values.start(client, call)
            values.finish(call.wait_sums())
        except BaseException:
            # After an interrupt nothing writes weights any more.
            call.cancel()
            with suppress(Error):
                call.wait()
            raise


def kept(use: str, weights: Iterable[Weight]) -> str | None:
    """The use, where a weight is of a device, beside which memory is kept: pinned memory is slow to make. Of weights of
    the host memory is not kept."""
    return None if all(_staging.is_here(weight.tensor) for weight in weights) else use


class Places:
    """Where the values of weights are fetched to: the parameters' memory, or memory of the host from which
    :meth:`finish` copies them. ``is_staged``: always the latter; ``use``: that of the last time of this use, which is
    over. Without a use it is new memory."""

    def __init__(self, weights: Iterable[Weight], is_staged: bool = False, use: str | None = None) -> None:
        self.written: list[Weight] = []
        """Those whose own memory is written."""
        self.staged: list[Weight] = []
        self.arrays: dict[str, Array] = {}
        """Those of ``written``, in this order, and then those of ``staged``."""
        for weight in weights:
            place = None if is_staged else weight.destination()
            if place is not None:
                self.written.append(weight)
                self.arrays[weight.name] = place
            else:
                self.staged.append(weight)
        wanted = [(weight, weight.tensor.dtype) for weight in self.staged]
        self._places = beside(use, wanted)
        for weight, one in zip(self.staged, self._places):
            # The last value may still be on its way to the device.
            one.block.copies.wait()
            self.arrays[weight.name] = one.array

    @torch.no_grad()
    def finish(self, into: Sequence[torch.Tensor] | None = None) -> None:
        """Copies the values that were staged, to ``into`` instead of the parameters if it is given. Autograd learns of
        every tensor that was written."""
        if self.staged:
            _staging.give(self._places, into or [weight.tensor for weight in self.staged])
        torch.autograd.graph.increment_version([weight.tensor for weight in self.written])


class Fetch:
    """Values on their way to weights."""

    def __init__(self, client: Client, weights: Sequence[Weight], own: Held | None = None) -> None:
        self.names = [weight.name for weight in weights]
        self.written = weights
        """Those whose own memory is written: the first ones of ``names``."""
        self.own = own or client._hold_plain(self.names, [weight.tensor for weight in weights], True)
        """The memory of the weights, if all values go there."""
        self._places: Places | None = None
        if self.own is None:
            self._places = Places(weights, use="value")
            self.names, self.written = list(self._places.arrays), self._places.written

    def start(
        self,
        client: Client,
        call: StepCall,
        gradients: Held | None = None,
        rate: float | None = None,
        settings: Settings | None = None,
        is_of_step: bool = False,
    ) -> None:
        """Starts the call that fetches, and sends gradients of the same parameters in the order of ``names``, if there are
        some."""
        into = self.own if self._places is None else client._hold(self._places.arrays, True)
        # A part of the values may come before a failure.
        forget(self.written)
        client._start_held(call, gradients, into, rate, settings, is_of_step)

    def finish(self, sums: list[int]) -> None:
        """Notes the values, which have these checksums."""
        for weight, checksum in zip(self.written, sums):
            weight.noted = checksum
        if self._places is None:
            # Autograd learns of every tensor that was written.
            torch.autograd.graph.increment_version([weight.tensor for weight in self.written])
            return
        forget(self._places.staged)
        self._places.finish()
        note(self._places.staged)

    def fail(self) -> None:
        """Notes what is there of values some of which may have come."""
        note(self.written)
