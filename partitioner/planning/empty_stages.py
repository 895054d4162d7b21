"""A plan with stages that hold no parameters -> one that is as good and has none of these.

Where one layer is the bottleneck, many plans are equally good, and a search may return one with a
stage that only applies a tanh. Boundaries move to the next group with parameters, from the first
stage on or from the last one back. The result is taken if it is as good, within the share of the
time that a plan may give up for tidy cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..graph.problem import Problem
from .step_time import Step

_ROUNDING = 1e-9


def without_empty_stages(
    problem: Problem, step: Step, step_with: Callable[[Sequence[int]], Step]
) -> Step:
    """The plan with parameters in every stage, or `step` where there is none that is as good, its
    stages are not intervals of the groups, or it proves nothing and serves for comparison.

    step_with: the step of a placement by the stage of each group.
    """
    owns, stage_of = problem.costs.has_params, np.array(step.placement.stage_of)
    stages, placement = problem.stages, step.placement
    proves = placement.bound_ms is not None or placement.order_optimum_ms is not None
    is_in_order = placement.ranks is None and bool((np.diff(stage_of) >= 0).all())
    has_all = len({*stage_of[owns].tolist()}) == stages
    if has_all or not is_in_order or not proves or problem.rules.must_cut:
        return step
    limit_ms = step.step_ms * (1 + problem.rules.prefer_modules) * (1 + _ROUNDING)
    cuts = [0, *(np.flatnonzero(np.diff(stage_of)) + 1).tolist(), len(stage_of)]
    found = [step]
    for moved in _moved(cuts, np.flatnonzero(owns).tolist(), problem.rules.may_cut.tolist()):
        counts = [end - start for start, end in pairwise(moved)]
        other = step_with(np.repeat(np.arange(stages), counts).tolist())
        if other.evaluation.fits and other.step_ms <= limit_ms:
            found.append(
                replace(other, placement=replace(placement, stage_of=other.placement.stage_of))
            )
    return min(found[1:] or found, key=lambda other: other.step_ms)


def _moved(
    cuts: Sequence[int], owners: Sequence[int], may_cut: Sequence[bool]
) -> Iterator[list[int]]:
    """The cuts moved to the right, and to the left, until every stage has one of the `owners`.

    >>> owners, may_cut = [0, 2, 4, 6], [True] * 8
    >>> list(_moved([0, 1, 2, 4, 7], owners, may_cut))
    [[0, 1, 3, 5, 7]]
    """
    total = cuts[-1]
    if (right := _to_the_right(cuts, owners, may_cut)) is not None:
        yield right
    mirrored = [total - cut for cut in reversed(cuts)]
    own = [total - 1 - owner for owner in reversed(owners)]
    left = _to_the_right(mirrored, own, may_cut[::-1])
    if left is not None and (back := [total - cut for cut in reversed(left)]) != right:
        yield back


def _to_the_right(
    cuts: Sequence[int], owners: Sequence[int], may_cut: Sequence[bool]
) -> list[int] | None:
    """The cuts, each as far to the right as the stage before it needs; None if the last stage has
    no owner then."""
    moved = [0]
    for cut in cuts[1:-1]:
        first = next((owner for owner in owners if owner >= moved[-1]), None)
        if first is None:
            return None
        least = max(cut, first + 1)
        legal = next((at for at in range(least, cuts[-1]) if may_cut[at]), None)
        if legal is None:
            return None
        moved.append(legal)
    return [*moved, cuts[-1]] if any(owner >= moved[-1] for owner in owners) else None
