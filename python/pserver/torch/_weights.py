"""Tensors of a model beside their names at the servers: what is sent of them, and where fetched values go."""

from collections.abc import Iterable

import torch

from .. import _pserver
from .._client import Array, Client
from .._errors import Refused

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
        self._stage: tuple[torch.Tensor, Array] | None = None
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

    def gradient(self, wire: torch.dtype | None = None, factor: float = 1.0) -> Array | None:
        """The gradient times ``factor``, if there is one, in the type ``wire`` or its own."""
        found = self.tensor.grad
        if found is None:
            return None
        if found.is_sparse:
            text = "expected a dense one, or pserver.torch.Embedding, whose gradients are rows"
            raise Refused(f'parameter "{self.name}": a sparse gradient; {text}')
        return self.sent(found if factor == 1.0 else found * factor, wire)

    def zeros(self) -> Array:
        """A gradient without effect on the sum."""
        return array(torch.zeros(self.tensor.shape, dtype=self.tensor.dtype, device="cpu"))

    @staticmethod
    def sent(tensor: torch.Tensor, wire: torch.dtype | None) -> Array:
        """The tensor's memory where it can be sent as it is, else that of a copy."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if wire is not None:
            narrow = tensor.to(wire)
            if wire == torch.float16 and bool(torch.isinf(narrow).any()) and not bool(torch.isinf(tensor).any()):
                text = "expected wire=torch.bfloat16, which has float32's range, or gradients below 65504"
                raise Refused(f"gradients of up to {float(tensor.abs().max()):.3g} in wire=torch.float16; {text}")
            tensor = narrow
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        return array(tensor if tensor.is_contiguous() else tensor.contiguous())

    def stage(self, reuses: bool) -> tuple[torch.Tensor, Array]:
        """A tensor of the host beside this one, for a value that is on its way, and its memory. ``reuses``: one at a time
        is."""
        made, tensor = self._stage, self.tensor
        if not reuses or made is None or made[0].shape != tensor.shape or made[0].dtype != tensor.dtype:
            stage = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made = stage, array(stage)
        if reuses:
            self._stage = made
        return made

    def destination(self) -> Array | None:
        """The parameter's memory, if a value can be written there."""
        value = self.tensor
        if not value.is_cpu or not value.is_contiguous():
            return None
        if value.data_ptr() != self._address:
            self._address, self._array = value.data_ptr(), array(value.detach())
        return self._array


def note(weights: Iterable[Weight]) -> None:
    """The contents of these tensors are the job's values."""
    all_weights = list(weights)
    for weight, checksum in zip(all_weights, _checksums(all_weights)):
        weight.noted = checksum


def forget(weights: Iterable[Weight]) -> None:
    """The contents of these tensors are not known any more."""
    for weight in weights:
        weight.noted = None


def changed(weights: Iterable[Weight]) -> list[Weight]:
    """Weights that the program has changed since they were noted: by ``copy_``, by ``.data``, through NumPy. Only the
    contents tell: neither ``.data`` nor NumPy counts a version of the tensor."""
    noted = [weight for weight in weights if weight.noted is not None]
    return [weight for weight, checksum in zip(noted, _checksums(noted)) if weight.noted != checksum]


def _checksums(weights: list[Weight]) -> list[int]:
    """A checksum of the contents of each tensor, computed where it is."""
    places = [weight.destination() for weight in weights]
    elsewhere = [at for at, place in enumerate(places) if place is None]
    if not elsewhere:
        return _pserver.checksums(places)
    # All sums are computed before the first is asked for, so that a device is waited for once.
    tensors = [weights[at].tensor.detach() for at in elsewhere]
    sums = [tensor.contiguous().view(BITS[tensor.element_size()]).sum() for tensor in tensors]
    found = dict(zip(elsewhere, map(int, sums)))
    here = iter(_pserver.checksums([place for place in places if place is not None]))
    return [found[at] if at in found else next(here) for at in range(len(places))]


def fetch(client: Client, weights: Iterable[Weight], is_of_step: bool = False) -> list[Weight]:
    """Fetches the values of weights, with ``is_of_step`` those that this trainer's gradients have made, and notes them.
    Returns then the weights that the program had changed since they were noted: their values are the job's now."""
    places = Places(weights, reuses=True)
    if not places.arrays:
        return []
    elsewhere = [weight for weight, _ in places.staged]
    were_changed = changed(elsewhere) if is_of_step else []
    if not is_of_step:
        # A part of the values may come before a failure.
        forget(places.written)
    sums = dict(zip(places.arrays, client._pull_watched(places.arrays, is_of_step)))
    for weight in places.written:
        before, after = sums[weight.name]
        # A fetch of the step that failed, and which this one repeats, may have brought the value.
        if weight.noted not in (None, before) and before != after:
            were_changed.append(weight)
        weight.noted = after
    forget(elsewhere)
    places.finish()
    note(elsewhere)
    return were_changed


class Places:
    """Where the values of weights are fetched to: the parameters' memory, or memory of the host from which
    :meth:`finish` copies them. ``is_staged``: always the latter; ``reuses``: that of the last time, which is over."""

    def __init__(self, weights: Iterable[Weight], is_staged: bool = False, reuses: bool = False) -> None:
        self.arrays: dict[str, Array] = {}
        self.staged: list[tuple[Weight, torch.Tensor]] = []
        self.written: list[Weight] = []
        """Those whose own memory is written."""
        for weight in weights:
            place = None if is_staged else weight.destination()
            if place is None:
                stage, place = weight.stage(reuses)
                self.staged.append((weight, stage))
            else:
                self.written.append(weight)
            self.arrays[weight.name] = place

    @torch.no_grad()
    def finish(self) -> None:
        """Copies the values that were staged. Autograd learns of every tensor that was written."""
        if self.staged:
            # One call for all: of small tensors most of a copy is its call.
            torch._foreach_copy_([weight.tensor for weight, _ in self.staged], [stage for _, stage in self.staged])
        torch.autograd.graph.increment_version([weight.tensor for weight in self.written])
