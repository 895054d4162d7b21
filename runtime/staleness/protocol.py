"""What a staleness method is: hooks that the executor calls around a stage's actions.

The hooks are those in which all published methods can be written: which weights a forward reads,
what happens before a backward, how a window's gradient is changed, how far the learning rate is
scaled, and what is kept after a step. A method has one object a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..versions import Weights, WeightVersions


@dataclass(frozen=True, slots=True)
class Passage:
    """A micro-batch's way through a stage, known from the schedule before it begins."""

    micro_batch: int
    forward_version: int
    backward_version: int

    @property
    def straddles(self) -> bool:
        """Whether a step lies between the forward and the backward."""
        return self.backward_version > self.forward_version


class Staleness:
    """The hooks, each doing nothing: with live weights everywhere and no correction."""

    def before_forward(self, weights: WeightVersions, passage: Passage) -> Weights | None:
        """The leaves that the forward reads, None for the live weights."""
        return None

    def before_backward(self, weights: WeightVersions, passage: Passage) -> None:
        """Called when the gradients of the stage's outputs are there."""

    def transform_gradient(self, weights: WeightVersions) -> None:
        """May change the live `.grad` of a finished window, before it is clipped and used."""

    def lr_scale(self, version: int) -> float:
        """The factor on the learning rate of the step that makes `version`."""
        return 1.0

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        """Surrounds the optimizer's step on the live weights."""
        yield

    def after_step(self, weights: WeightVersions) -> None:
        """Called when `weights.version` is the new version."""
