"""One stage's weights through time: the live ones, and leaves with other values for passes.

Version v is what v optimizer steps made. The optimizer always steps the live weights in place. A
pass of a micro-batch may read other values than the live ones have by then: older, predicted or
corrected ones. What it reads is a view; a view's values are filled into leaves of their own, once
for all micro-batches that read it, and the leaves are kept in a ring of buffers. The gradients of
a bound micro-batch are added to the live `.grad` after its backward, so the order of additions is
that of the backwards.

Re-pointing `param.data` instead would be wrong: the backward of `x @ W`, LayerNorm, convolutions
and BatchNorm reads through the parameter, not the storage it had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class View:
    """Values of a stage's weights that a pass reads. Equal views have equal values.

    `of` says what is made from which `version`, looking `horizon` steps ahead; `fill` writes the
    values into leaves, without autograd, while that version is live.
    """

    of: str
    version: int
    horizon: float = 0
    fill: Callable[[Weights], None] = field(compare=False, default=lambda leaves: None)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Which versions a micro-batch met at a stage: when it went forward, and when backward."""

    stage: int
    micro_batch: int
    forward_version: int
    backward_version: int

    @property
    def delay(self) -> int:
        """Optimizer steps taken between the forward and the backward."""
        return self.backward_version - self.forward_version


@dataclass(eq=False)
class _Copy:
    """Leaves, the view whose values they have, and who is bound to them."""

    leaves: dict[str, Tensor]
    content: View
    users: set[Hashable] = field(default_factory=set)


class WeightVersions:
    """The weights of one stage and their versions.

    `version` is the number of steps taken, `copies_made` the number of times that leaves were
    filled, `copies_held` how many copies exist now and `ring_size` how many there ever were at
    once; `gathered` are the micro-batches whose gradients the next step has already.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self.stage = stage
        self.live = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.version = 0
        self.gathered = 0
        self.copies_made = 0
        self.ring_size = 0
        self._in_flight: dict[int, int] = {}
        self._copies: dict[Hashable, _Copy] = {}
        self._read: dict[int, _Copy] = {}
        self._bound: dict[int, _Copy] = {}
        self._free: list[dict[str, Tensor]] = []

    @property
    def copies_held(self) -> int:
        return len(self._copies)

    @property
    def in_flight(self) -> frozenset[int]:
        """The micro-batches that went forward, and whose backward is not over."""
        return frozenset(self._in_flight)

    @property
    def live_view(self) -> View:
        """The weights as they are now."""
        return View("live", self.version, fill=self._fill_with_live)

    def went_forward(self, micro_batch: int) -> None:
        """Notes the version that the forward read; a prediction counts as what was live."""
        read, version = self._read.get(micro_batch), self.version
        if read is not None and read.content.of == "live":
            version = read.content.version
        self._in_flight[micro_batch] = version

    def add_gradients(self, micro_batch: int) -> None:
        """Adds what a bound micro-batch has of gradients so far to the live ones."""
        if copy := self._bound.get(micro_batch):
            self._add_gradients(copy.leaves)

    def went_backward(self, micro_batch: int) -> LedgerEntry:
        """Adds a bound micro-batch's gradients to the live ones, and lets go of its leaves."""
        self.add_gradients(micro_batch)
        self._let_go(micro_batch, self._bound.pop(micro_batch, None))
        self._let_go(micro_batch, self._read.pop(micro_batch, None))
        self.gathered += 1
        forward_version = self._in_flight.pop(micro_batch)
        return LedgerEntry(self.stage, micro_batch, forward_version, self.version)

    def bind(self, micro_batch: int, view: View, *, slot: Hashable = None) -> Weights:
        """Leaves with the values of a view, for the forward of a micro-batch. Those in one `slot`,
        by default those of equal views, are the same."""
        copy = self._filled(view if slot is None else slot, view)
        copy.users.add(micro_batch)
        self._read[micro_batch] = self._bound[micro_batch] = copy
        return copy.leaves

    def rebind(self, micro_batch: int, view: View) -> Weights:
        """Leaves of another view, for the second forward of a micro-batch and for its backward."""
        copy = self._filled(("second forward", view.of), view)
        copy.users.add(micro_batch)
        self._bound[micro_batch] = copy
        return copy.leaves

    def refill(self, micro_batch: int, view: View) -> None:
        """Gives the leaves of a micro-batch in flight other values, which its backward reads."""
        if copy := self._bound.get(micro_batch):
            self._refill(copy, view)

    def unbind(self, micro_batch: int) -> None:
        """The second forward of a micro-batch and its backward are to read the live weights."""
        self._let_go(micro_batch, self._bound.pop(micro_batch, None))
        self._read.pop(micro_batch, None)

    def is_late(self, micro_batch: int) -> bool:
        """Whether the forward of a micro-batch in flight read an older version than is live."""
        return self._in_flight[micro_batch] < self.version

    def read_by(self, micro_batch: int) -> Weights:
        """What the forward of a micro-batch in flight read."""
        copy = self._read.get(micro_batch)
        return self.live if copy is None else copy.leaves

    def bound_to(self, micro_batch: int) -> Weights | None:
        """The leaves that a micro-batch's gradients are made for, None for the live weights."""
        copy = self._bound.get(micro_batch)
        return None if copy is None else copy.leaves

    def hold(self, view: View) -> Weights:
        """Keeps the values of a view until they are `released`, for forwards of later versions."""
        copy = self._filled(view, view)
        copy.users.add(view)
        return copy.leaves

    def held(self, view: View) -> Weights:
        """What is held of a view."""
        return self._copies[view].leaves

    def released(self, view: View) -> None:
        """Lets go of a view that was held."""
        if copy := self._copies.get(view):
            copy.users.discard(view)
            self._drop_unused()

    def stepped(self) -> None:
        """A step was taken: drops the gradients it used, and copies that nobody is bound to."""
        for parameter in self.live.values():
            parameter.grad = None
        self.version += 1
        self.gathered = 0
        self._drop_unused()

    def unseen_by_autograd(self) -> AbstractContextManager[None]:
        """Inside, writing to the live weights does not count as a change.

        A backward of a micro-batch in flight then computes with the weights as they are by then,
        instead of raising an error.
        """
        return _unsafe_preserve_version_counter(tuple(self.live.values()))

    def _filled(self, slot: Hashable, view: View) -> _Copy:
        copy = self._copies.get(slot)
        if copy is not None:
            self._refill(copy, view)
            return copy
        if self._free:
            leaves = self._free.pop()
        else:
            leaves = {
                name: torch.empty_like(weight).requires_grad_()
                for name, weight in self.live.items()
            }
            self.ring_size += 1
        copy = self._copies[slot] = _Copy(leaves, view)
        self._fill(copy, view)
        return copy

    def _refill(self, copy: _Copy, view: View) -> None:
        if copy.content != view:
            self._fill(copy, view)

    @torch.no_grad()
    def _fill(self, copy: _Copy, view: View) -> None:
        if copy.leaves:
            with _unsafe_preserve_version_counter(tuple(copy.leaves.values())):
                view.fill(copy.leaves)
        copy.content = view
        self.copies_made += 1

    def _fill_with_live(self, leaves: Weights) -> None:
        torch._foreach_copy_(list(leaves.values()), list(self.live.values()))

    @torch.no_grad()
    def _add_gradients(self, leaves: Weights) -> None:
        for name, leaf in leaves.items():
            weight = self.live[name]
            if leaf.grad is not None:
                if weight.grad is None:
                    weight.grad = leaf.grad
                else:
                    weight.grad += leaf.grad
                leaf.grad = None

    def _let_go(self, micro_batch: int, copy: _Copy | None) -> None:
        if copy is not None:
            copy.users.discard(micro_batch)
            self._drop_unused()

    def _drop_unused(self) -> None:
        for slot, copy in list(self._copies.items()):
            if not copy.users and copy.content.version != self.version:
                self._free.append(self._copies.pop(slot).leaves)
