"""The step that an optimizer is in: everything that the next step begins without, in one object.

A step ends when another object takes its place, by one assignment. So an interrupt comes before the end or after it,
and never leaves some buckets and tables in a step that has ended for others.
"""

import torch

from ._buckets import Bucket, Sending
from ._weights import Weight


class StepState:
    """The progress of a step."""

    def __init__(self, buckets: list[Bucket], how: Sending) -> None:
        self.buckets = buckets
        self.how = how
        self.prepared: list[Bucket] = []
        """Buckets whose gradients a backward pass has found, and whose calls are not started."""
        self.has_failed = False
        """It failed, and servers may have a part of it."""
        self.has_norm = False
        """Servers have its norm."""
        self.replaced: list[Weight] = []
        """Weights in which its values have replaced changes of the program."""
        self.is_held = False
        """A part of it would be refused, so the rest of the backward pass sends nothing."""
        self.sent_before: list[tuple[torch.Tensor | None, int]] | None = None
        """The gradients of the step before, if its call was interrupted after its end: a repetition has these too."""

    def following(self) -> "StepState":
        """The step after it."""
        how = self.how._replace(factor=1.0, is_void=False)
        return StepState([bucket.again() for bucket in self.buckets], how)


class Steps:
    """The current step of an optimizer, which its tables look at too."""

    def __init__(self, first: StepState) -> None:
        self.current = first
