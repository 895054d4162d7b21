"""Staleness methods + a stage's weight versions -> the leaves that each pass reads.

A forward reads the live weights unless a method says otherwise, or its backward will have to read
something else than is live by then: then it reads leaves of its own. Before the backward those
keep their values, get those of the backward's view, or, where the forward is run a second time,
give way to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod

from .delays import Delays
from .schedule import Schedule
from .staleness.protocol import Outlook, Passage, Reads, Situation, Staleness, State, Steps
from .versions import LedgerEntry, View, Weights, WeightVersions


class Binder:
    """The staleness methods of one stage, applied to its weights. `shared` has the stages that hold
    each of them that others hold too."""

    def __init__(
        self,
        weights: WeightVersions,
        methods: Sequence[Staleness],
        shared: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.weights = weights
        self._shared = shared or {}
        self.methods = tuple(methods)
        self._forward = [m for m in methods if "forward" in m.decides]
        self._backward = [m for m in methods if "backward" in m.decides]
        self._keeps = any(m.keeps_forward for m in methods)
        self._to_load: State = {}

    @property
    def is_live(self) -> bool:
        """Whether all passes read the live weights."""
        return not (self._forward or self._backward)

    @property
    def kept_bytes(self) -> int:
        """What there is of the stage's weights beside the live ones: the leaves that there were at
        once, and the tensors that methods keep between two steps."""
        live = self.weights.live.values()
        kept = {id(t): t.nbytes for m in self.methods for t in m.kept()}
        kept |= {id(weight): 0 for weight in live}
        return self.weights.ring_size * sum(t.nbytes for t in live) + sum(kept.values())

    def attach(self, steps: Steps) -> None:
        """Gives the methods the stage's optimizer."""
        follows = any(method.follows_schedule for method in self.methods)
        for method in self.methods:
            method.steps = Outlook(steps, self.weights, self.lr_scale, follows)

    def begin(self, schedule: Schedule) -> None:
        """Called before a segment's first action."""
        ahead = (0,) * schedule.stages
        if not schedule.synchronous:
            ahead = tuple(most - 1 for most in schedule.in_flight)
        delays = Delays(ahead, schedule.step_every, first_version=self.weights.version)
        situation = Situation(self.weights.stage, delays, schedule.synchronous, self._shared)
        for method in self.methods:
            situation = method.situated(situation, _of(method, self._to_load))
        for method in self.methods:
            method.begin(situation)
            if state := _of(method, self._to_load):
                method.load(self.weights, state)
        self._to_load = {}

    @property
    def has_settled(self) -> bool:
        """Whether a method computes with other weights than those that the training has come to."""
        return any(type(m).settled is not Staleness.settled for m in self.methods)

    def state(self) -> State:
        """What the methods keep over a drain, `method.part` -> tensors by weight."""
        return {
            f"{method.name}.{part}": tensors
            for method in self.methods
            for part, tensors in method.state(self.weights).items()
        }

    def load(self, state: State) -> None:
        """Gives the methods what `state` gave; they take it up when the next segment begins, for
        only then they know their situation."""
        self._to_load = state

    def forward(self, passage: Passage, *, repeats: bool) -> Weights | None:
        """The leaves that a forward reads, None for the live weights. With `repeats` it is run a
        second time for the backward."""
        weights = self.weights
        view = next((v for m in self._forward if (v := m.forward_view(weights, passage))), None)
        leaves = None
        if view is not None or self._binds(passage, repeats=repeats):
            # What every pass fills anew needs one set of leaves, however many are in flight.
            is_again = repeats and passage.straddles
            is_refilled = not self._keeps and (self._backward or is_again)
            slot = "refilled" if is_refilled else None
            leaves = weights.bind(passage.micro_batch, view or weights.live_view, slot=slot)
        weights.went_forward(passage.micro_batch)
        return leaves

    def backward(self, passage: Passage, *, repeats: bool) -> Weights | None:
        """Makes what a micro-batch has saved, or what its second forward reads, that of its
        backward; the leaves of the latter, None for the live weights."""
        weights, micro_batch = self.weights, passage.micro_batch
        reads = self._reads(passage)
        if reads is Reads.AS_SAVED:
            # With no step in between both passes read the same, also if it was predicted.
            reads = Reads.LIVE if repeats and passage.straddles else Reads.FORWARD
        if reads is Reads.FORWARD:
            return weights.bound_to(micro_batch)
        view = reads if isinstance(reads, View) else weights.live_view
        if not repeats:
            weights.refill(micro_batch, view)
        elif reads is not Reads.LIVE or (self._keeps and passage.straddles):
            weights.rebind(micro_batch, view)
        else:
            weights.unbind(micro_batch)
        return weights.bound_to(micro_batch)

    def finish(self, passage: Passage) -> LedgerEntry:
        """A micro-batch's backward is over: its gradients join those of its window."""
        gradients = self.weights.bound_to(passage.micro_batch)
        if gradients is not None and self.weights.is_late(passage.micro_batch):
            for method in self.methods:
                method.after_backward(self.weights, passage, gradients)
        return self.weights.went_backward(passage.micro_batch)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surrounds a step, and counts it."""
        weights = self.weights
        for method in self.methods:
            method.transform_gradient(weights)
        with ExitStack() as around:
            # First, since methods too may write to live weights after the step.
            if weights.in_flight and not self._backward:
                around.enter_context(weights.unseen_by_autograd())
            for method in self.methods:
                around.enter_context(method.stepping(weights))
            yield
        weights.stepped()
        for method in self.methods:
            method.after_step(weights)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, the live weights are those that the training has come to."""
        with ExitStack() as inside:
            for method in self.methods:
                inside.enter_context(method.settled(self.weights))
            yield

    def lr_scale(self, version: int, name: str | None = None) -> float:
        """The factor on the learning rate of the step that makes `version`, for the stage's own
        weights or for a shared one that is named."""
        return prod(method.lr_scale(version, name) for method in self.methods)

    def _reads(self, passage: Passage) -> View | Reads:
        return next(
            (m.backward_reads(self.weights, passage) for m in self._backward), Reads.AS_SAVED
        )

    def _binds(self, passage: Passage, *, repeats: bool) -> bool:
        """Whether a forward that reads the values of the live weights needs leaves of its own."""
        return passage.straddles and (self._keeps or (bool(self._backward) and not repeats))


def _of(method: Staleness, state: State) -> State:
    """The parts of one method."""
    prefix = f"{method.name}."
    return {
        key.removeprefix(prefix): tensors
        for key, tensors in state.items()
        if key.startswith(prefix)
    }
