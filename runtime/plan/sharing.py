"""The levels of `--zero`, and the messages in which replicas share out gradients and weights."""

from __future__ import annotations

OPTIMIZER_STATE = 1
"""The level of `--zero` from which the optimizer's state is shared out."""
GRADIENTS = 2
"""The level that shares out gradients too."""
MESSAGE_BYTES = 4 << 20
"""The most bytes of a message that has weights, or the gradients of a micro-batch, of several
parameters: small, because messages are memory that owners are to save."""
UNDER_WAY = 2
"""The messages of gradients, or of weights, that are under way at once."""


def passes_over_gradients(zero: int, micro_batches: int) -> float:
    """The bytes that replicas exchange in a step as a multiple of one all-reduce of the gradients.

    A reduction to the owners and a broadcast of the new weights send as much as an all-reduce.
    `GRADIENTS` reduces after each of the micro-batches of a replica.

    >>> [passes_over_gradients(zero, 4) for zero in (0, 1, 2)]
    [1.0, 1.0, 2.5]
    """
    return (micro_batches + 1) / 2 if zero >= GRADIENTS else 1.0
