"""How many copies of a stage's weights its staleness methods keep: for plans, and before a run.

What passes read that is not live lies in leaves (`versions.py`): those of a forward that is kept
until its backward, one set for each weights that are in flight; or one set that is filled again for
each pass. Beside leaves a method may keep tensors of its own. Tests hold this arithmetic against
what the methods' runs have at their peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Keeps:
    """What one method keeps: whether forwards read `predicted` weights, whether what they read is
    `kept` until the backward or `refilled` for it, and how many copies there are `beside`, in
    every late stage, and `everywhere`, in those that are not late too; whether a prediction is made
    of what is `gathered` for the next step, whether one is read `always`, also where no step lies
    in between, and whether a backward reads one that is not its forward's (`twice`)."""

    predicted: bool = False
    kept: bool = False
    refilled: bool = False
    beside: int = 0
    everywhere: int = 0
    gathered: bool = False
    always: bool = False
    twice: bool = False


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
    "msnag": Keeps(predicted=True),
    "aggmsnag": Keeps(predicted=True, gathered=True),
    "partial-gradient": Keeps(predicted=True, gathered=True),
    "nag": Keeps(predicted=True, always=True),
    "lwp": Keeps(predicted=True),
    "lwp-w": Keeps(predicted=True, beside=1),
    "spectrain": Keeps(predicted=True, refilled=True, always=True, twice=True),
    "xpipe": Keeps(predicted=True, refilled=True, always=True, twice=True, everywhere=1),
    "pipeoptim": Keeps(predicted=True, refilled=True),
    "nesterov-last": Keeps(),
    "schedule-aware": Keeps(),
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
    beside = sum(method.everywhere + (method.beside if ahead else 0) for method in methods)
    predicted = any(method.predicted for method in methods)
    gathered = any(method.gathered for method in methods)
    always = any(method.always for method in methods)
    refilled = any(method.refilled for method in methods)
    kept = any(method.kept for method in methods)
    if not (ahead or always):
        return beside
    if not kept and refilled:
        return beside + 1 + (recomputes and any(method.twice for method in methods))
    if not kept and recomputes:
        return beside + (1 + always if predicted else 0)
    if not kept and not predicted:
        return beside
    views = views_in_flight(
        ahead, step_every, predicted=predicted, gathered=gathered, always=always
    )
    return beside + views + (recomputes and refilled)


@lru_cache
def views_in_flight(
    ahead: int,
    step_every: int,
    *,
    predicted: bool = False,
    gathered: bool = False,
    always: bool = False,
) -> int:
    """The most different weights at once that micro-batches in flight read in their forward, of
    those with a step between forward and backward: versions, at most ceil(ahead / step_every) + 1;
    or predictions, which differ by how far they look ahead too, and maybe by what is gathered for
    the next step. With `always` the others read a prediction of one step.

    >>> [views_in_flight(ahead, 2) for ahead in range(5)]
    [0, 1, 2, 3, 3]
    """

    def read(micro_batch: int) -> tuple[int, int, int] | None:
        version, done = divmod(max(0, micro_batch - ahead), step_every)
        horizon = micro_batch // step_every - version
        if not (horizon or always):
            return None
        return version, max(1, horizon) if predicted else 0, done if gathered else 0

    # All that is in flight when a micro-batch goes forward: a window over the micro-batches.
    views = [read(t) for t in range(2 * step_every + 2 * ahead + 1)]
    in_flight = Counter(views[:ahead])
    most = 0
    for first, entering in enumerate(views[ahead:]):
        in_flight[entering] += 1
        most = max(most, len(in_flight) - (None in in_flight))
        in_flight[views[first]] -= 1
        if not in_flight[views[first]]:
            del in_flight[views[first]]
    return most
