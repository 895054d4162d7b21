"""Sums over all that a group of a graph needs, or that needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost import Floats

Edges = Sequence[tuple[int, int]]


def backwards(edges: Edges) -> Edges:
    """The edges turned round, in an order for `sum_over_reached`; each goes to a later position."""
    return sorted(((target, source) for source, target in edges), reverse=True)


def sum_over_reached(edges: Edges, amounts: Floats) -> Floats:
    """For each group the amounts of all from which it is reached, itself too; every edge comes
    after those into its source."""
    count = len(amounts)
    index = np.arange(count)
    reached = np.zeros((count, -(-count // 8)), dtype=np.uint8)
    reached[index, index // 8] = 1 << (index % 8)
    for source, target in edges:
        reached[target] |= reached[source]
    rows = (np.unpackbits(row, count=count, bitorder="little") for row in reached)
    return np.array([row @ amounts for row in rows])
