"""A lower bound of the step over all topological orders, with the memory of each stage.

A group that is an ancestor or descendant of every other group has the same place in every order. So
a stage has a row of these fixed groups and all groups between them, and may have some of those
around them. The relaxation counts the former alone, without transfers:

    best[s][i] = min over j <= i of max(best[s - 1][j], score_s(fixed groups j to i - 1))

is at most the step of every plan whose first s stages have the first i fixed groups. For the score
of a stage bounds the step for any costs, thus also for these: of the stage, and of what is before
and after it, only the groups that are there in every order. And the step with all costs is not
shorter: it is a longest path (`planning/step_time.py`), and more groups and transfers lengthen its
parts; their memory may make a stage recompute. The score itself may fall with more transfers: what
a rank does while it waits for a gradient shortens that wait.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..graph.costs import Ints, StageSums
from ..graph.problem import Problem, Rules
from .bounds import is_fixed
from .chain import interval_sums
from .reductions import contracted

_ROUNDING = 1e-9
_TRANSFERS = ("send_ms", "receive_ms", "sent_bytes", "received_bytes", "root_bytes", "tied_bytes")


def relaxed_order_ms(problem: Problem, limit_ms: float) -> float:
    """The bound for plans whose stages wait for one another; inf if no plan at all fits into the
    memory. 0 if no group is fixed, or if the bound is above the limit, the score of some plan.
    """
    fixed = np.array(is_fixed(problem.costs))
    at = np.flatnonzero(fixed)
    if not len(at):
        return 0.0
    begins = fixed | np.concatenate([[False], fixed[:-1]])
    begins[0] = True
    piece_of = np.cumsum(begins) - 1
    pieces = Problem(
        contracted(problem.costs, piece_of), problem.setting, Rules(np.ones(1, dtype=bool))
    )
    done = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
    before_ms = np.concatenate([[0.0], done[at[:-1] + 1]])
    after_ms = done[-1] - np.concatenate([done[at[1:]], [done[-1]]])
    place = piece_of[at]  # of each fixed group among the pieces
    ends = {int(piece) + 1: number for number, piece in enumerate(place)}
    first = _first_pieces(pieces, limit_ms)
    best = np.full((problem.stages + 1, len(at) + 1), np.inf)
    best[:, 0] = 0.0
    distinct = {id(seen): seen for seen in pieces.seen}
    for column in zip(*(interval_sums(seen, first) for seen in distinct.values()), strict=True):
        end = column[0][0]
        if end not in ends:
            continue
        number = ends[end]
        starts = np.arange(int(np.searchsorted(place, first[end])), number + 1)
        sums = {
            key: _of_starts(of_all, place[starts] - first[end])
            for key, (_, of_all) in zip(distinct, column, strict=True)
        }
        scores = {
            position: problem.setting.score_ms(
                *(position, sums[id(pieces.seen[position])], before_ms[starts], after_ms[number])
            )
            for position in set(pieces.like)
        }
        for stage in range(problem.stages):
            held = np.maximum(best[stage, starts], scores[pieces.like[stage]]).min(initial=np.inf)
            # The stage may have no fixed group.
            best[stage + 1, number + 1] = min(float(held), best[stage, number + 1])
    bound_ms = float(best[problem.stages, len(at)])
    return bound_ms if bound_ms <= limit_ms * (1 + _ROUNDING) else 0.0


def _first_pieces(pieces: Problem, limit_ms: float) -> Ints:
    """For each end, the first start whose work alone is within the limit."""
    done = np.concatenate([[0.0], np.cumsum(pieces.least_work_ms)])
    most_ms = limit_ms / pieces.setting.rounds * (1 + _ROUNDING)
    starts = np.searchsorted(done, done - most_ms, side="left")
    windows: Ints = np.minimum(starts, np.maximum(np.arange(len(done)) - 1, 0))
    return windows


def _of_starts(sums: StageSums, chosen: Ints) -> StageSums:
    """The sums for some of the starts, without transfers."""
    values = {each.name: getattr(sums, each.name) for each in fields(sums)}
    counted: dict[str, Any] = {
        name: value[chosen] for name, value in values.items() if isinstance(value, np.ndarray)
    }
    return replace(sums, **counted | dict.fromkeys(_TRANSFERS, np.zeros(len(chosen))))
