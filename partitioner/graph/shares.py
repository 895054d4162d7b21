"""Replicas of a stage that share out its optimizer state and gradients (`--zero`) -> the bytes of
the replica that has most.

Parameters have owners as a whole, the largest ones first, each with the replica that has least so
far (`runtime/sharding/owners.py`). So the fullest replica owns at least an equal share, and at
least the largest parameter: the larger of both is counted. A run counts the owners themselves.
"""

from __future__ import annotations

import numpy as np

from ...runtime.plan.sharing import GRADIENTS, MESSAGE_BYTES, UNDER_WAY
from .costs import Floats, StageSums


def owned_bytes(sums: StageSums, replicas: int) -> Floats:
    """Bytes of the parameters that the fullest of the replicas owns."""
    if replicas == 1:
        return sums.param_bytes
    return np.maximum(sums.param_bytes / replicas, sums.largest_param_bytes)


def gradient_bytes(sums: StageSums, replicas: int, zero: int) -> Floats:
    """Bytes of the gradients on the fullest of the replicas: those of its own parameters and of
    tied ones, which are exchanged with other stages; the largest other one while backward makes it;
    and the messages under way."""
    if replicas == 1 or zero < GRADIENTS:
        return sums.param_bytes
    kept = owned_bytes(sums, replicas) + np.asarray(sums.tied_bytes)
    passing = np.asarray(sums.largest_param_bytes) + UNDER_WAY * MESSAGE_BYTES
    most: Floats = np.minimum(sums.param_bytes, kept + passing)
    return most
