"""Delays of stages -> how often each refreshes the bases of its SOAP.

A basis that turns with the gradients matters more where gradients are later, so the stages with
more delay refresh more often at the cost of the others (Jung et al., arXiv 2602.03515, who have the
idea; the shares are ours).
"""

from __future__ import annotations

from collections.abc import Sequence


def refresh_periods(delays: Sequence[int], every: int) -> tuple[int, ...]:
    """Steps between refreshes of each stage, whose gradients are `delays` steps late.

    Each has a share of all refreshes that is as 1 + its delay. Together the stages refresh no more
    often than if all did so `every` steps, and without delays all do.

    >>> refresh_periods([3, 2, 1, 0], 10)
    (7, 9, 13, 25)
    >>> refresh_periods([1, 1], 10)
    (10, 10)
    """
    total = sum(1 + delay for delay in delays)
    return tuple(-(-every * total // (len(delays) * (1 + delay))) for delay in delays)
