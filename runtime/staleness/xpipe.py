"""XPipe: the first micro-batch of a step predicts for all of them.

Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN training", 2019: with T
micro-batches a step, stage i of p stages, and Adam's direction m' / (sqrt(s') + eps),

    forward   round((p + T - floor(i / 2) - 2) / T) steps ahead of the weights that the step's
              first micro-batch meets at its forward
    backward  round((T + floor(i / 2) - 1) / T) steps ahead of those that it meets at its backward

where halves are rounded to even numbers. All micro-batches of the step read these weights, so that
one that goes forward later reads an older prediction, not a shorter one. At delay 0 it looks a
step ahead too.
"""

from __future__ import annotations

from functools import partial

import torch

from ..versions import View, Weights, WeightVersions
from .lwp import LinearByVelocity
from .protocol import Passage, Reads


class XPipe(LinearByVelocity):
    """`xpipe`: the micro-batches of a step share one prediction a pass."""

    decides = frozenset({"forward", "backward", "horizon"})
    needs = frozenset({"direction"})

    def __init__(self) -> None:
        self._shared: View | None = None
        self._step: int | None = None

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        if self.situation.synchronous:
            return None
        if passage.backward_version != self._step:
            self._step = passage.backward_version
            self._share(weights, self.look_ahead(weights, self.steps_of_forward))
        return self._shared

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> View | Reads:
        # All backwards of a step meet the same version.
        steps = 0 if self.situation.synchronous else self.steps_of_backward
        return self.look_ahead(weights, steps) or Reads.LIVE

    @property
    def steps_of_forward(self) -> int:
        of_step, stage = self.situation.step_every, self.situation.stage
        return round((self.situation.stages + of_step - stage // 2 - 2) / of_step)

    @property
    def steps_of_backward(self) -> int:
        of_step, stage = self.situation.step_every, self.situation.stage
        return round((of_step + stage // 2 - 1) / of_step)

    def _share(self, weights: WeightVersions, view: View | None) -> None:
        """Holds a prediction; who reads it once its version is gone copies what is held."""
        if self._shared is not None:
            weights.released(self._shared)
        self._shared = view
        if view is not None:
            copied = partial(_copy, weights.hold(view))
            self._shared = View(view.of, view.version, view.horizon, copied)


def _copy(source: Weights, leaves: Weights) -> None:
    torch._foreach_copy_(list(leaves.values()), list(source.values()))
