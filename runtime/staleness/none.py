"""Live weights everywhere: a backward may read newer weights than its forward did.

No memory is spent. The saved activations are the forward's, the weights in the gradient formulas
those of the backward's time. PACI (2026) trains so with k >= p.
"""

from __future__ import annotations

from .protocol import Staleness


class LiveWeights(Staleness):
    """`none`: steps in place under the micro-batches in flight."""

    leaves = frozenset({"forward", "backward"})
