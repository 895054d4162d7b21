"""One stage's weights through time: the live ones, and copies of versions still in flight.

Version v is what v optimizer steps made. The optimizer always steps the live weights in place. A
micro-batch whose forward and backward lie on both sides of a step may bind a copy of the weights
that its forward saw: leaves of their own, made once per version. With W forwards ahead and k
micro-batches a step at most ceil(W / k) + 1 copies exist at a time; they are kept in a ring of
buffers. The gradients of a bound micro-batch are added to the live `.grad` after its backward, so
the order of additions is that of the backwards.

Re-pointing `param.data` instead would be wrong: the backward of `x @ W`, LayerNorm, convolutions
and BatchNorm reads through the parameter, not the storage it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

Weights = Mapping[str, Tensor]


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


@dataclass
class _Copy:
    """The leaves of one version, and the micro-batches in flight that are bound to them."""

    leaves: dict[str, Tensor]
    users: set[int] = field(default_factory=set)


class WeightVersions:
    """The weights of one stage and their versions.

    `version` is the number of steps taken, `copies_made` the number of times that all weights
    were copied, `copies_held` how many copies exist now and `ring_size` how many there ever were
    at once.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self.stage = stage
        self.live = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.version = 0
        self.copies_made = 0
        self.ring_size = 0
        self._in_flight: dict[int, int] = {}
        self._copies: dict[int, _Copy] = {}
        self._bound: dict[int, _Copy] = {}
        self._free: list[dict[str, Tensor]] = []

    @property
    def copies_held(self) -> int:
        return len(self._copies)

    @property
    def in_flight(self) -> frozenset[int]:
        """The micro-batches that went forward, and whose backward is not over."""
        return frozenset(self._in_flight)

    def went_forward(self, micro_batch: int) -> None:
        self._in_flight[micro_batch] = self.version

    def add_gradients(self, micro_batch: int) -> None:
        """Adds what a bound micro-batch has of gradients so far to the live ones."""
        if copy := self._bound.get(micro_batch):
            self._add_gradients(copy.leaves)

    def went_backward(self, micro_batch: int) -> LedgerEntry:
        """Adds a bound micro-batch's gradients to the live ones, and lets go of its version."""
        self.add_gradients(micro_batch)
        if copy := self._bound.pop(micro_batch, None):
            copy.users.discard(micro_batch)
            self._drop_unused()
        forward_version = self._in_flight.pop(micro_batch)
        return LedgerEntry(self.stage, micro_batch, forward_version, self.version)

    def bind(self, micro_batch: int) -> Weights:
        """Leaves with the values that the weights have now, for the forward of a micro-batch."""
        copy = self._copies.get(self.version)
        if copy is None:
            copy = self._copies[self.version] = _Copy(self._copy_live())
        copy.users.add(micro_batch)
        self._bound[micro_batch] = copy
        return copy.leaves

    def stepped(self) -> None:
        """A step was taken: drops the gradients it used, and copies that nobody is bound to."""
        for parameter in self.live.values():
            parameter.grad = None
        self.version += 1
        self._drop_unused()

    def unseen_by_autograd(self) -> AbstractContextManager[None]:
        """Inside, writing to the live weights does not count as a change.

        A backward of a micro-batch in flight then computes with the weights as they are by then,
        instead of raising an error.
        """
        return _unsafe_preserve_version_counter(tuple(self.live.values()))

    @torch.no_grad()
    def _copy_live(self) -> dict[str, Tensor]:
        if self._free:
            leaves = self._free.pop()
        else:
            leaves = {
                name: torch.empty_like(weight).requires_grad_()
                for name, weight in self.live.items()
            }
            self.ring_size += 1
        torch._foreach_copy_(list(leaves.values()), list(self.live.values()))
        self.copies_made += 1
        return leaves

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

    def _drop_unused(self) -> None:
        for version, copy in list(self._copies.items()):
            if not copy.users and version != self.version:
                self._free.append(self._copies.pop(version).leaves)
