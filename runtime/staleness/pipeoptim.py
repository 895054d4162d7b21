"""PipeOptim: forwards at predicted weights, backwards at live ones.

Guan et al., "PipeOptim: ensuring effective 1F1B schedule with optimizer-dependent weight
prediction", 2023: a forward reads p - s lr u, where u is the direction of the optimizer's last step
(SGD's velocity, Adam's m' / (sqrt(s') + eps)) and s the p - i - 1 steps until the backward of
stage i. With more micro-batches a step, and after a start, s is the steps that there really are.
"""

from __future__ import annotations

from ..versions import WeightVersions
from .lwp import LinearByVelocity
from .protocol import Passage, Reads


class PipeOptim(LinearByVelocity):
    """`pipeoptim`: a forward reads the weights predicted for its backward, that the live ones."""

    decides = frozenset({"forward", "backward", "horizon"})
    needs = frozenset({"direction"})

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> Reads:
        return Reads.LIVE
