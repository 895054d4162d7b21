"""Weight stashing (PipeDream, SOSP 2019, section 3.3): backward with the forward's weights."""

from __future__ import annotations

from ..versions import Weights, WeightVersions
from .protocol import Passage, Staleness


class Stash(Staleness):
    """`stash`: a micro-batch that straddles a step reads a copy of its version, both ways."""

    def before_forward(self, weights: WeightVersions, passage: Passage) -> Weights | None:
        return weights.bind(passage.micro_batch) if passage.straddles else None
