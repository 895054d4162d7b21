"""Weight stashing (PipeDream, SOSP 2019, section 3.3): backward with the forward's weights."""

from __future__ import annotations

from ..versions import WeightVersions
from .protocol import Passage, Reads, Staleness


class Stash(Staleness):
    """`stash`: a micro-batch that straddles a step reads the same weights both ways."""

    decides = frozenset({"backward"})
    keeps_forward = True

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> Reads:
        return Reads.FORWARD
