"""Tensors of a model beside their names at the servers: what is sent of them, and where fetched values go."""

from collections.abc import Iterable

import torch

from .._client import Array
from .._errors import Refused

NUMPY_TYPES = {torch.float32, torch.float64, torch.float16}
HALVES = {torch.float16, torch.bfloat16}


def array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor of the host. NumPy has no bfloat16, which goes by DLPack. A number is one
    element at servers."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    return tensor.numpy() if tensor.dtype in NUMPY_TYPES else tensor


class Weight:
    """A parameter of the model and its name at the servers."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self._address = 0
        self._array: Array = None

    @property
    def dtype(self) -> torch.dtype:
        """The type at the servers, which update half precision in float32."""
        return torch.float32 if self.tensor.dtype in HALVES else self.tensor.dtype

    def value(self) -> Array:
        """The present value as servers have it."""
        return array(self.tensor.detach().to("cpu", self.dtype).contiguous())

    def gradient(self, wire: torch.dtype | None = None) -> Array | None:
        """The gradient, if there is one, in the type ``wire`` or its own."""
        found = self.tensor.grad
        if found is None:
            return None
        if found.is_sparse:
            text = "expected a dense one, or pserver.torch.Embedding, whose gradients are rows"
            raise Refused(f'parameter "{self.name}": a sparse gradient; {text}')
        return self.sent(found, wire)

    def zeros(self) -> Array:
        """A gradient without effect on the sum."""
        return array(torch.zeros(self.tensor.shape, dtype=self.tensor.dtype, device="cpu"))

    @staticmethod
    def sent(tensor: torch.Tensor, wire: torch.dtype | None) -> Array:
        """The tensor's memory where it can be sent as it is, else that of a copy."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if wire is not None:
            tensor = tensor.to(wire)
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        return array(tensor if tensor.is_contiguous() else tensor.contiguous())

    def destination(self) -> Array | None:
        """The parameter's memory, if a value can be written there."""
        value = self.tensor
        if not value.is_cpu or not value.is_contiguous():
            return None
        if value.data_ptr() != self._address:
            self._address, self._array = value.data_ptr(), array(value.detach())
        return self._array


class Places:
    """Where the values of weights are fetched to: the parameters' memory, or memory of the host from which
    :meth:`finish` copies them. ``is_staged``: always the latter."""

    def __init__(self, weights: Iterable[Weight], is_staged: bool = False) -> None:
        self.arrays: dict[str, Array] = {}
        self.staged: list[tuple[Weight, torch.Tensor]] = []
        self._written: list[torch.Tensor] = []
        for weight in weights:
            place = None if is_staged else weight.destination()
            if place is None:
                stage = torch.empty(weight.tensor.shape, dtype=weight.tensor.dtype, device="cpu")
                self.staged.append((weight, stage))
                place = array(stage)
            else:
                self._written.append(weight.tensor)
            self.arrays[weight.name] = place

    @torch.no_grad()
    def finish(self) -> None:
        """Copies the values that were staged. Autograd learns of every tensor that was written."""
        for weight, stage in self.staged:
            weight.tensor.copy_(stage)
        torch.autograd.graph.increment_version(self._written)
