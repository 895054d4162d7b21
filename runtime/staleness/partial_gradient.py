"""A step tried on the gradients that are there: look-ahead by a part of the coming gradient.

With k micro-batches a step, more than a stage runs ahead, the forwards that a step will overtake
begin when the stage has c of the k gradients of that step. So they read what the optimizer makes
of the weights with the mean of those c in the place of the mean of all k, clipped as that would be;
the error is that of the k - c others, and not of the whole step as in a prediction by momentum. It
is `aggmsnag` with the gathered sum times k / c, for any optimizer; with Muon that is the
orthogonalised update that is about to be made. Own proposal. For c = 0 it is `msnag`.
"""

from __future__ import annotations

from ..versions import WeightVersions
from .msnag import AggregatedMsnag


class PartialGradient(AggregatedMsnag):
    """`partial-gradient`: a forward reads a step made with the mean of the gradients so far."""

    def scale_of_known(self, weights: WeightVersions) -> float:
        return self.situation.step_every / weights.gathered
