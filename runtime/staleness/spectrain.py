"""SpecTrain: both passes of a micro-batch read the weights of one time to come.

Chen, Yang and Cheng, "Efficient and robust parallel DNN training through model parallelism on
multi-GPU platform", 2018: stage i of p stages reads weights s versions ahead by SGD's velocity,

    forward  s = floor(i / 2) + p - i - 1        backward  s = floor(i / 2)

The backward comes p - i - 1 steps after the forward, so both mean the same time; where it comes
sooner (after a start) the forward looks less far. The paper steps after each micro-batch. With k a
step, that time is here still floor(i / 2) micro-batches after the backward, in whole steps.
"""

from __future__ import annotations

from ..versions import View, WeightVersions
from .lwp import LinearByVelocity
from .protocol import Passage, Reads


class SpecTrain(LinearByVelocity):
    """`spectrain`: both passes read weights predicted for the same time."""

    decides = frozenset({"forward", "backward", "horizon"})

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        return self.look_ahead(weights, passage.horizon + self._beyond(passage))

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> View | Reads:
        return self.look_ahead(weights, self._beyond(passage)) or Reads.LIVE

    def _beyond(self, passage: Passage) -> int:
        """Steps between the backward and the time that is meant."""
        situation, of_step = self.situation, self.situation.step_every
        if situation.synchronous:
            return 0
        return (passage.micro_batch % of_step + situation.stage // 2) // of_step
