"""The name of a precision -> torch's autocast around forwards, and what it does to boundaries.

Weights, gradients and the optimizer stay as they are; under autocast torch computes matrix products
and the like in half the bytes. Forwards are in a region of autocast, backwards are not, and what is
computed is what one region around the whole model would compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """What forwards compute in on a kind of device; without a `dtype` in that of the weights."""

    dtype: torch.dtype | None = None
    device_type: str = "cpu"

    @property
    def name(self) -> str:
        """As after `--precision`."""
        return "full" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def computing(self) -> AbstractContextManager[object]:
        """Around a forward and its loss."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """Within, a weight is cast once for the forwards of all micro-batches that read it.

        In a region of its own each forward would make copies of all weights, and those of every
        micro-batch in flight would be kept for its backward.
        """
        if self.dtype is None:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def forget_casts(self) -> None:
        """To be called when weights have changed."""
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def argument(self, tensor: Tensor) -> Tensor:
        """What a stage's forward is given for a boundary tensor."""
        if self.dtype is None or not tensor.requires_grad:
            return tensor
        # Of leaves autocast keeps one cast for all readers, as of weights, and their gradients
        # would be added in its dtype. In the uncut model a boundary tensor is no leaf.
        return tensor.view_as(tensor)


FULL = Precision()
"""Computing in the dtype of the weights."""
