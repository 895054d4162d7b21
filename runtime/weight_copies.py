"""How many copies of a stage's weights its staleness methods keep: for plans, and before a run.

What passes read that is not live lies in leaves (`versions.py`): those of a forward that is kept
until its backward, one set for each weights that are in flight; or one set that is filled again for
each pass. Beside leaves a method may keep tensors of its own. Tests hold this arithmetic against
what the methods' runs have at their peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Keeps:
    """What one method keeps: whether forwards read `predicted` weights, whether what they read is
    `kept` until the backward or `refilled` for it, and how many copies there are `beside`, in
    every late stage, and `everywhere`, in those that are not late too."""

    predicted: bool = False
    kept: bool = False
    refilled: bool = False
    beside: int = 0
    everywhere: int = 0


KEEPS: Mapping[str, Keeps] = {
    "none": Keeps(),
    "stash": Keeps(kept=True),
    # One version, and where windows overlap the next one too.
    "2bw": Keeps(beside=1, everywhere=1),
    # The mean step, and the weights before a step while it is made.
    "pipemare": Keeps(refilled=True, beside=2),
    "pipemare-rate": Keeps(),
    "delay-rate": Keeps(),
    # Squares of steps, and what the decay of the window loses.
    "gap-aware": Keeps(beside=2),
    "gap-aware-loss": Keeps(kept=True, refilled=True, beside=2),
    "dc-asgd": Keeps(),
    "dc-asgd-adaptive": Keeps(beside=1),
    # The last step, and the weights before one while it is made.
    "error-feedback": Keeps(beside=2),
    "spike-compensation": Keeps(beside=2),
}
"""Name of a staleness method -> what it keeps."""


def weight_copies(names: str, ahead: int, step_every: int, *, recomputes: bool = False) -> int:
    """The most copies of a stage's weights, beside the live ones, under methods joined by +, where
    it runs `ahead` forwards ahead and steps after every `step_every`-th backward.

    >>> weight_copies("none", 3, 1), weight_copies("stash", 3, 1), weight_copies("stash", 3, 8)
    (0, 4, 1)
    >>> weight_copies("2bw", 3, 4), weight_copies("2bw", 0, 4)
    (2, 1)
    """
    methods = [KEEPS[name] for name in names.split("+")]
    everywhere = sum(method.everywhere for method in methods)
    if not ahead:
        return everywhere
    beside = everywhere + sum(method.beside for method in methods)
    predicted = any(method.predicted for method in methods)
    if any(method.kept for method in methods):
        rebound = recomputes and any(method.refilled for method in methods)
        return beside + views_in_flight(ahead, step_every, predicted=predicted) + rebound
    if any(method.refilled for method in methods) or (predicted and recomputes):
        return beside + 1
    return beside + (views_in_flight(ahead, step_every, predicted=True) if predicted else 0)


@lru_cache
def views_in_flight(ahead: int, step_every: int, *, predicted: bool = False) -> int:
    """The most different weights at once that micro-batches in flight read in their forward, of
    those with a step between forward and backward: versions, at most ceil(ahead / step_every) + 1;
    or predictions, which differ by how far they look ahead too.

    >>> [views_in_flight(ahead, 2) for ahead in range(5)]
    [0, 1, 2, 3, 3]
    """

    def read(micro_batch: int) -> tuple[int, int]:
        version = max(0, micro_batch - ahead) // step_every
        return version, micro_batch // step_every - version

    return max(
        len(
            {
                (version, horizon if predicted else 1)
                for version, horizon in map(read, range(t, t + ahead + 1))
                if horizon
            }
        )
        for t in range(2 * step_every + ahead + 1)
    )
