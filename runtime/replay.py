"""A stage's forward -> what it takes to run it a second time, to the same last bit.

Instead of all that backward needs, only the arguments of a forward are kept, the state of the
generator that it drew from, and its module's buffers where they change: a second forward begins
with the values that the first one found, and what it writes to them is thrown away, so running
statistics are updated once. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


class WrittenArguments:
    """The arguments that a module's forward writes to in place.

    What it is given belongs to others too: to the stage that made it, to other readers, to a
    second forward; and a leaf cannot be written to. So it gets copies of those, and in the first
    forward, which tells them from the others, copies of all.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._written: set[int] | None = None

    @contextmanager
    def guarded(self, arguments: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Around a forward: what to call it with. Raises RuntimeError for an argument that was
        not written to in the first forward, and is now."""
        known = self._written
        given = tuple(
            argument.clone() if known is None or number in known else argument
            for number, argument in enumerate(arguments)
        )
        before = [argument._version for argument in given]
        yield given
        written = {
            number for number, argument in enumerate(given) if argument._version != before[number]
        }
        if known is None:
            self._written = written
        elif not written <= known:
            name = self._names[min(written - known)]
            raise RuntimeError(
                f"{name} is written to in place, which it was not in the first forward; "
                "write to a copy of it"
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
