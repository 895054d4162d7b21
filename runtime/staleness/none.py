"""Live weights everywhere: a backward may read newer weights than its forward did.

No memory is spent. The saved activations are the forward's, the weights in the gradient formulas
those of the backward's time. PACI (2026) trains so with k >= p.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..versions import WeightVersions
from .protocol import Staleness


class LiveWeights(Staleness):
    """`none`: steps in place under the micro-batches in flight."""

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if not weights.in_flight:
            yield
            return
        with weights.unseen_by_autograd():
            yield
