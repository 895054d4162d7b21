"""A stage's forward -> what it takes to run it a second time, to the same last bit.

Instead of all that backward needs, only the arguments of a forward are kept, the state of the
generator that it drew from, and its module's buffers where they change: a second forward begins
with the values that the first one found, and what it writes to them is thrown away, so running
statistics are updated once. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Buffers:
    """The buffers of one module, of which forwards change some.

    A batch norm writes to its statistics without counting it as a change, but in every forward:
    the values before and after the first one tell these, versions all others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[str] = set()
        self._is_first = True

    @contextmanager
    def remembered(self, earlier: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Around a forward: the values that it found, of those that forwards change.

        Where one changes that had not before, `earlier` forwards found the same value.
        """
        with torch.no_grad():
            found = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        before = self._versions()
        values = dict(found)
        yield values
        changed = {name for name, version in self._versions().items() if version != before[name]}
        if self._is_first:
            now = dict(self._module.named_buffers())
            changed |= {name for name in found if not torch.equal(found[name], now[name])}
            self._is_first = False
        for name in changed - self._changing:
            for other in earlier:
                other.setdefault(name, found[name])
        self._changing |= changed
        for name in values.keys() - self._changing:
            del values[name]

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Which tensor each buffer is, and how often it was written to."""
        return {
            name: (id(buffer), buffer._version) for name, buffer in self._module.named_buffers()
        }


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
