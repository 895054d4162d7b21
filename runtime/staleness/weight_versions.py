"""The weights of one stage over time: the live ones, and copies with other values for single
passes.

Version v is the result of v optimizer steps, which always step the live weights in place. A pass of
a micro-batch may read other values: older, predicted or corrected ones. A `View` describes these
values. They are filled into leaves, once for all micro-batches that read the view, and the leaves
are kept in a ring of buffers. After the backward of a bound micro-batch its gradients are added to
the live `.grad`, so the order of additions is the order of the backwards.

Leaves with the values of the live weights need no copy: they share their memory until a step. If a
micro-batch still reads them then, they keep this memory, and the live weights move to a buffer
with the same values, which the optimizer steps. So a version is copied only if a step overtakes it,
and the newest version is never in memory twice.

Every forward that a step overtakes reads leaves, so no graph in flight holds the live weights when
they move. Under a graph that holds them this would be wrong: the backward of `x @ W`, LayerNorm,
convolutions and BatchNorm reads through the parameter, not the memory it had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.hooks import RemovableHandle

Weights = Mapping[str, Tensor]
IsFinal = Callable[[Tensor], None]
"""Called with a live weight when the gradient of its window is complete."""


@dataclass(frozen=True, slots=True)
class View:
    """Values of a stage's weights that a pass reads. Equal views have equal values."""

    of: str
    """The kind of values, for example live or a prediction."""
    version: int
    """The version that the values are computed from."""
    horizon: float = 0
    """The number of steps ahead of that version."""
    fill: Callable[[Weights], None] = field(compare=False, default=lambda leaves: None)
    """Writes the values into leaves, without autograd, while that version is live."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The live versions of a stage at the forward and at the backward of a micro-batch."""

    stage: int
    micro_batch: int
    forward_version: int
    backward_version: int

    @property
    def delay(self) -> int:
        """The number of optimizer steps between the forward and the backward."""
        return self.backward_version - self.forward_version


@dataclass(eq=False)
class _Copy:
    """Leaves with the values of one view."""

    leaves: dict[str, Tensor]
    content: View
    users: set[Hashable] = field(default_factory=set)
    """The micro-batches and held views bound to the leaves."""
    shares_live: bool = False
    """The leaves share the memory of the live weights."""


class WeightVersions:
    """The weights of one stage and their versions.

    - `live`: the trainable parameters by name
    - `version`: the number of steps taken
    - `gathered`: the number of micro-batches whose gradients the next step already has
    - `copies_made`: how often all weights were copied or computed
    - `copies_held`: the number of copies that have memory of their own now
    - `ring_size`: the largest number of such copies that existed at once
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
        self._followed: list[RemovableHandle] = []

    @property
    def copies_held(self) -> int:
        return sum(not copy.shares_live for copy in self._copies.values())

    @property
    def in_flight(self) -> frozenset[int]:
        """The micro-batches whose forward is over and whose backward is not."""
        return frozenset(self._in_flight)

    @property
    def live_view(self) -> View:
        """The weights as they are now."""
        return View("live", self.version, fill=self._fill_with_live)

    def went_forward(self, micro_batch: int) -> None:
        """Records the version that the forward read; for a prediction, the live version."""
        read, version = self._read.get(micro_batch), self.version
        if read is not None and read.content.of == "live":
            version = read.content.version
        self._in_flight[micro_batch] = version

    def follow(self, leaves: Weights, is_final: IsFinal) -> None:
        """Until `unfollow`, adds the gradient of each leaf to the live one as soon as a backward
        has made it, and calls `is_final`."""

        def accumulated(name: str) -> Callable[[Tensor], None]:
            def act(leaf: Tensor) -> None:
                self._add_gradients({name: leaf})
                is_final(self.live[name])

            return act

        for name, leaf in leaves.items():
            handle = leaf.register_post_accumulate_grad_hook(accumulated(name))  # type: ignore[no-untyped-call]
            self._followed.append(handle)

    def unfollow(self) -> None:
        """Ends what `follow` began."""
        while self._followed:
            self._followed.pop().remove()

    def add_gradients(self, micro_batch: int) -> None:
        """Adds the gradients that a bound micro-batch has so far to the live ones."""
        if copy := self._bound.get(micro_batch):
            self._add_gradients(copy.leaves)

    def went_backward(self, micro_batch: int) -> LedgerEntry:
        """Adds a bound micro-batch's gradients to the live ones, and releases its leaves."""
        self.add_gradients(micro_batch)
        self._let_go(micro_batch, self._bound.pop(micro_batch, None))
        self._let_go(micro_batch, self._read.pop(micro_batch, None))
        self.gathered += 1
        forward_version = self._in_flight.pop(micro_batch)
        return LedgerEntry(self.stage, micro_batch, forward_version, self.version)

    def bind(self, micro_batch: int, view: View, *, slot: Hashable = None) -> Weights:
        """Leaves with the values of a view, for the forward of a micro-batch. Binds to one `slot`
        share leaves; the default slot is the view."""
        copy = self._filled(view if slot is None else slot, view)
        copy.users.add(micro_batch)
        self._read[micro_batch] = self._bound[micro_batch] = copy
        return copy.leaves

    def bind_live(self, micro_batch: int) -> Weights:
        """Leaves that have the memory of the live weights, also after steps: the gradients of the
        micro-batch stay apart from those of others until its backward is over."""
        leaves = {name: _sharing(weight) for name, weight in self.live.items()}
        self._bound[micro_batch] = _Copy(leaves, self.live_view, shares_live=True)
        return leaves

    def rebind(self, micro_batch: int, view: View) -> Weights:
        """Leaves of another view, for the recomputed forward of a micro-batch and its backward."""
        is_live = view == self.live_view
        copy = self._filled(view if is_live else ("second forward", view.of), view)
        copy.users.add(micro_batch)
        self._bound[micro_batch] = copy
        return copy.leaves

    def refill(self, micro_batch: int, view: View) -> None:
        """Fills the leaves of a micro-batch in flight with other values, which its backward
        reads."""
        if copy := self._bound.get(micro_batch):
            self._refill(copy, view)

    def unbind(self, micro_batch: int) -> None:
        """Lets the recomputed forward of a micro-batch and its backward read the live weights."""
        self._let_go(micro_batch, self._bound.pop(micro_batch, None))
        self._read.pop(micro_batch, None)

    def is_late(self, micro_batch: int) -> bool:
        """True if the forward of a micro-batch in flight read an older version than the live
        one."""
        return self._in_flight[micro_batch] < self.version

    def read_by(self, micro_batch: int) -> Weights:
        """The weights that the forward of a micro-batch in flight read."""
        copy = self._read.get(micro_batch)
        return self.live if copy is None else copy.leaves

    def bound_to(self, micro_batch: int) -> Weights | None:
        """The leaves that receive a micro-batch's gradients; None for the live weights."""
        copy = self._bound.get(micro_batch)
        return None if copy is None else copy.leaves

    def hold(self, view: View) -> Weights:
        """Keeps the values of a view until they are `released`, for forwards of later versions."""
        copy = self._filled(view, view)
        copy.users.add(view)
        return copy.leaves

    def leaves_of(self, view: View) -> Weights:
        """The values of a held view."""
        return self._copies[view].leaves

    def released(self, view: View) -> None:
        """Releases a held view."""
        if copy := self._copies.get(view):
            copy.users.discard(view)
            self._drop_unused()

    def begin_step(self) -> None:
        """Called before the live weights change. Moves them to other memory if a micro-batch or a
        held view reads theirs."""
        copy = self._copies.get(self.live_view)
        if copy is None or not (self.live and copy.shares_live and copy.users):
            return
        memory = self._buffer()
        with torch.no_grad():
            self._fill_with_live(memory)
            for name, weight in self.live.items():
                _share_memory(weight, memory[name])
        copy.shares_live = False
        self.copies_made += 1

    def stepped(self) -> None:
        """Counts a step: drops the gradients that it used, and the copies that nothing is bound
        to."""
        for parameter in self.live.values():
            parameter.grad = None
        self.version += 1
        self.gathered = 0
        self._drop_unused()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the live weights may change; after it they are what they were."""
        stored = {name: weight.detach().clone() for name, weight in self.live.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in stored.items():
                    self.live[name].copy_(weight)

    def unseen_by_autograd(self) -> AbstractContextManager[None]:
        """Inside, autograd ignores writes to the live weights.

        A backward of a micro-batch in flight then computes with the changed weights instead of
        raising an error.
        """
        return _unsafe_preserve_version_counter(tuple(self.live.values()))

    def _filled(self, slot: Hashable, view: View) -> _Copy:
        copy = self._copies.get(slot)
        if copy is not None:
            self._refill(copy, view)
            return copy
        if slot == self.live_view and all(map(_has_own_memory, self.live.values())):
            leaves = {name: _sharing(weight) for name, weight in self.live.items()}
            copy = self._copies[slot] = _Copy(leaves, view, shares_live=True)
            return copy
        copy = self._copies[slot] = _Copy(self._buffer(), view)
        self._fill(copy, view)
        return copy

    def _buffer(self) -> dict[str, Tensor]:
        """Leaves with memory of their own, and any values."""
        if self._free:
            return self._free.pop()
        self.ring_size += 1
        return {
            name: torch.empty_like(weight).requires_grad_() for name, weight in self.live.items()
        }

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
                del self._copies[slot]
                if not copy.shares_live:
                    self._free.append(copy.leaves)


def _has_own_memory(weight: Tensor) -> bool:
    """False for a weight in the buffer of an optimizer that flattens weights, which cannot move."""
    return weight.untyped_storage().nbytes() == weight.nbytes


def _sharing(weight: Tensor) -> Tensor:
    """A leaf in the memory of a weight. Its version counter ignores writes to the weight, which
    come after `begin_step`."""
    leaf = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return _share_memory(leaf, weight).requires_grad_()


def _share_memory(target: Tensor, source: Tensor) -> Tensor:
    storage, offset = source.untyped_storage(), source.storage_offset()
    return target.set_(storage, offset, source.size(), source.stride())
