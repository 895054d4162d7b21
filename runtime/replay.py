"""A stage's forward -> what it takes to run it a second time, to the same last bit.

Instead of all that backward needs, only the arguments of a forward are kept, the state of the
generator that it drew from, and its module's buffers where they change: a second forward begins
with the values that the first one found, and what it writes to them is thrown away, so running
statistics are updated once. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .errors import AsyncPipeError

Found = Mapping[str, tuple[Tensor, int]]


class Buffers:
    """The buffers of one module, of which forwards change some."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[str] = set()

    @contextmanager
    def remembered(self) -> Iterator[dict[str, Tensor]]:
        """Around a forward: the values that it found, of those that forwards change."""
        found = self.now()
        with torch.no_grad():
            values = {name: buffer.clone() for name, (buffer, _) in found.items()}
        yield values
        now = self.now()
        self._changing |= {name for name in found if not _same(found[name], now.get(name))}
        for name in values.keys() - self._changing:
            del values[name]

    def now(self) -> Found:
        """The buffers, and how often each was written to."""
        return {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}

    def check(self, then: Found, values: Mapping[str, Tensor]) -> None:
        """Raises AsyncPipeError if a buffer without a remembered value is not as it was `then`."""
        now = self.now()
        for name in then.keys() - values.keys():
            if not _same(then[name], now.get(name)):
                raise AsyncPipeError(
                    f"buffer {name} has changed between a forward and its recomputation, and had "
                    "not in any forward before.",
                    "Partition again with --recompute none.",
                )


@contextmanager
def nothing_saved() -> Iterator[None]:
    """A forward inside is that of a training run, kernel for kernel, but keeps nothing for a
    backward."""

    def forget(_: Tensor) -> None:
        return None

    def never(_: Any) -> Tensor:
        raise AssertionError("a forward that saved nothing was asked for a backward")

    with saved_tensors_hooks(forget, never):
        yield


def _same(then: tuple[Tensor, int], now: tuple[Tensor, int] | None) -> bool:
    return now is not None and now[0] is then[0] and now[1] == then[1]
