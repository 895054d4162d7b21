"""Staleness methods + a stage's weight versions -> the weights that each pass reads.

A forward reads the live weights unless a method decides otherwise, or its backward must read other
weights than the live ones: then it reads leaves of its own. Before the backward the leaves keep
their values, receive the values of the backward's view, or are replaced if the forward is
recomputed.

`gap_to` estimates the distance between the weights that a forward read and those that its gradient
changes. A copy of all weights would be the memory that asynchronous training avoids; some thousand
values of each tensor, evenly spaced, estimate the mean square well enough to watch a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from ..schedule.asynchronous import Delays
from ..schedule.schedule import Schedule
from ..staleness.compose import METHODS
from ..staleness.protocol import (
    BackwardReads,
    OptimizerView,
    StageContext,
    Staleness,
    State,
    Steps,
    VersionPair,
)
from ..staleness.weight_versions import IsFinal, LedgerEntry, View, Weights, WeightVersions
from ..tensor_files import as_real


class WeightBinder:
    """The staleness methods of one stage, applied to its weights. `shared` maps each weight that
    other stages hold too to all stages that hold it."""

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
        self._corrects = any(
            type(m).after_backward is not Staleness.after_backward for m in methods
        )
        self._moved_by: Any = None
        self._to_load: State = {}

    @property
    def is_live(self) -> bool:
        """True if all passes read the live weights."""
        return not (self._forward or self._backward or self._corrects_live)

    @property
    def _corrects_live(self) -> bool:
        return not self._keeps and any(method.corrects_live for method in self.methods)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the stage's weights besides the live ones: the most leaves that existed at
        once, and the tensors that methods keep between two steps."""
        live = self.weights.live.values()
        bytes_of_tensor = {id(t): t.nbytes for m in self.methods for t in m.kept()}
        bytes_of_tensor |= {id(weight): 0 for weight in live}
        return self.weights.ring_size * sum(t.nbytes for t in live) + sum(bytes_of_tensor.values())

    def attach(self, steps: Steps) -> None:
        """Gives the methods the stage's optimizer."""
        self._moved_by = steps.optimizer if steps.moves_weights else None
        follows = any(method.follows_schedule for method in self.methods)
        for method in self.methods:
            method.steps = OptimizerView(steps, self.weights, self.lr_scale, follows)

    def begin(self, schedule: Schedule, *, micro_batches: int | None = None) -> None:
        """Called before a segment's first action. `micro_batches` are those of a step in all
        replicas of the pipeline."""
        ahead = (0,) * schedule.stages
        if not schedule.synchronous:
            ahead = tuple(most - 1 for most in schedule.in_flight)
        delays = Delays(ahead, schedule.step_every, first_version=self.weights.version)
        context = StageContext(
            self.weights.stage,
            delays,
            micro_batches or schedule.step_every,
            schedule.synchronous,
            self._shared,
            self._keeps,
        )
        for method in self.methods:
            context = method.in_context(context, _of(method.name, self._to_load))
        for method in self.methods:
            method.begin(context)
            if state := _of(method.name, self._to_load):
                method.load(self.weights, state)
        self._to_load = {}

    @property
    def has_eval_weights(self) -> bool:
        """True if other weights are trained than those to evaluate and to save."""
        if self._moved_by is not None:
            return True
        return any(type(m).eval_weights is not Staleness.eval_weights for m in self.methods)

    def state(self) -> State:
        """The methods' state between two segments, `method.key` -> tensors by weight."""
        return {
            f"{method.name}.{part}": tensors
            for method in self.methods
            for part, tensors in method.state(self.weights).items()
        }

    def state_for(self, weights: WeightVersions) -> State:
        """The state for a run in which fewer weights train, which are all that it has then."""
        return {
            part: kept
            for part, tensors in (self._to_load or self.state()).items()
            if (kept := {name: tensors[name] for name in tensors if name in weights.live})
        }

    def load(self, state: State) -> None:
        """Restores a `state` when the next segment begins, because the methods know their context
        only then. A method that the run no longer has leaves the weights at once."""
        self._to_load = state
        gone = {part.partition(".")[0] for part in state} - {m.name for m in self.methods}
        for name in gone & METHODS.keys():
            METHODS[name]().leave(self.weights, _of(name, state))

    def forward(self, pair: VersionPair, *, repeats: bool) -> Weights | None:
        """The leaves that a forward reads, None for the live weights. With `repeats` the backward
        recomputes it."""
        weights = self.weights
        view = next((v for m in self._forward if (v := m.forward_view(weights, pair))), None)
        leaves = None
        if view is not None or self._binds(pair, repeats=repeats):
            # Leaves that every pass refills are one set, however many are in flight.
            is_again = repeats and pair.crosses_step
            is_refilled = not self._keeps and (self._backward or is_again)
            slot = "refilled" if is_refilled else None
            leaves = weights.bind(pair.micro_batch, view or weights.live_view, slot=slot)
        elif pair.crosses_step and self._corrects_live:
            leaves = weights.bind_live(pair.micro_batch)
        weights.went_forward(pair.micro_batch)
        return leaves

    def backward(
        self, pair: VersionPair, *, repeats: bool, is_final: IsFinal | None = None
    ) -> Weights | None:
        """Prepares the weights of a micro-batch's backward: those it saved, or those that its
        recomputed forward reads. Returns the leaves of the latter, None for the live weights. With
        `is_final`, a gradient that no method corrects joins those of its window at once."""
        leaves = self._prepared(pair, repeats=repeats)
        is_corrected = self._corrects and self.weights.is_late(pair.micro_batch)
        if is_final is not None and leaves is not None and not is_corrected:
            self.weights.follow(leaves, is_final)
        return leaves

    def _prepared(self, pair: VersionPair, *, repeats: bool) -> Weights | None:
        weights, micro_batch = self.weights, pair.micro_batch
        if pair.crosses_step and self._corrects_live:
            return weights.bound_to(micro_batch)
        reads = self._reads(pair)
        if reads is BackwardReads.AS_SAVED:
            # With no step in between both passes read the same, also if it was predicted.
            reads = BackwardReads.LIVE if repeats and pair.crosses_step else BackwardReads.FORWARD
        if reads is BackwardReads.FORWARD:
            return weights.bound_to(micro_batch)
        view = reads if isinstance(reads, View) else weights.live_view
        if not repeats:
            weights.refill(micro_batch, view)
        elif reads is not BackwardReads.LIVE or (self._keeps and pair.crosses_step):
            weights.rebind(micro_batch, view)
        else:
            weights.unbind(micro_batch)
        return weights.bound_to(micro_batch)

    def finish(self, pair: VersionPair) -> LedgerEntry:
        """Ends a micro-batch's backward: adds its gradients to those of its window."""
        self.weights.unfollow()
        gradients = self.weights.bound_to(pair.micro_batch)
        if gradients is not None and self.weights.is_late(pair.micro_batch):
            for method in self.methods:
                method.after_backward(self.weights, pair, gradients)
        return self.weights.went_backward(pair.micro_batch)

    def corrected(self, pair: VersionPair, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that the stage sends to earlier stages, after `finish`."""
        for method in self.methods:
            if (factor := method.factor_on_sent(pair)) is not None:
                sent = {name: gradient * factor for name, gradient in sent.items()}
        return sent

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Wraps a step, and counts it."""
        weights = self.weights
        for method in self.methods:
            method.transform_gradient(weights)
        with ExitStack() as around:
            # First, since methods too may write to live weights after the step.
            if weights.in_flight and not self._backward:
                around.enter_context(weights.unseen_by_autograd())
            for method in self.methods:
                around.enter_context(method.stepping(weights))
            weights.begin_step()
            yield
        weights.stepped()
        for method in self.methods:
            method.after_step(weights)

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Inside, the live weights are those to evaluate and to save."""
        with ExitStack() as inside:
            for method in self.methods:
                # A run that is resumed after its last step begins no segment.
                if state := _of(method.name, self._to_load):
                    method.load(self.weights, state)
                inside.enter_context(method.eval_weights(self.weights))
            if self._moved_by is not None:
                inside.enter_context(_moved(self._moved_by, self.weights))
            yield

    def lr_scale(self, version: int, name: str | None = None) -> float:
        """The factor on the learning rate of the step that makes `version`, for the stage's own
        weights or for the shared weight `name`."""
        return prod(method.lr_scale(version, name) for method in self.methods)

    def _reads(self, pair: VersionPair) -> View | BackwardReads:
        return next(
            (m.backward_reads(self.weights, pair) for m in self._backward),
            BackwardReads.AS_SAVED,
        )

    def _binds(self, pair: VersionPair, *, repeats: bool) -> bool:
        """True if a forward that reads the values of the live weights needs leaves of its own."""
        return pair.crosses_step and (self._keeps or (bool(self._backward) and not repeats))


@contextmanager
def _moved(optimizer: Any, weights: WeightVersions) -> Iterator[None]:
    """Inside, an optimizer has moved the weights to those to evaluate."""
    with weights.restored():  # to the last bit, which `train()` need not do
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()


def _of(method: str, state: State) -> State:
    """The state of one method."""
    prefix = f"{method}."
    return {
        key.removeprefix(prefix): tensors
        for key, tensors in state.items()
        if key.startswith(prefix)
    }


SAMPLED = 2048
"""The most values sampled from each tensor."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Squared norms over all weights of a stage, estimated. Tensors without dimensions, so that the
    device is not synchronized."""

    difference: Tensor
    """The norm of the difference."""
    live: Tensor
    """The norm of the live weights."""


def sampled(weights: Weights) -> list[Tensor]:
    """A sample of each tensor's values, copied."""
    return [_part(weight).clone() for weight in weights.values()]


def gap_to(live: Weights, read: list[Tensor]) -> Gap:
    """The gap between the live weights and those that a forward read, as `sampled` then.

    >>> import torch
    >>> before = sampled({"w": torch.ones(100, 100)})
    >>> gap = gap_to({"w": torch.full((100, 100), 3.0)}, before)
    >>> float(gap.difference), float(gap.live)
    (40000.0, 90000.0)
    """
    differences, squares = [], []
    for weight, earlier in zip(live.values(), read, strict=True):
        part = _part(weight)
        share = as_real(weight).numel() / max(1, part.numel())
        differences.append(share * (part - earlier).double().square().sum())
        squares.append(share * part.double().square().sum())
    return Gap(sum(differences[1:], differences[0]), sum(squares[1:], squares[0]))


def _part(weight: Tensor) -> Tensor:
    numbers = as_real(weight).numel()
    return as_real(weight.detach().reshape(-1)[:: max(1, -(-numbers // SAMPLED))])
