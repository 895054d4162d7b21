"""A problem and its downsets -> the best plan whose score is within a limit, or the proof of none.

    best[s][I] = min over downsets J < I of max(best[s - 1][J], score of stage s on I - J)

with best[0][{}] = 0. This is the recurrence of Tarnawski et al., "Efficient Algorithms for Device
Placement of DNN Graph Operators" (NeurIPS 2020, section 4), exact for plans with one stage per rank
and no backward edge. Three windows, all exact for scores within the limit T, make it fast:

- slack: the work of I is at most that of s stages filled to T, and the remaining work is at most
  that of the other stages filled to T;
- pairs: the work of I - J is within T;
- scores above T are dropped.

So the result is the optimum if the optimum is within T, and otherwise the proof that it is above.
Where devices may come in any order, a state s is not the number of stages but the number of used
devices of each kind (`SearchStates`). All pairs of a block of downsets are evaluated together
(`interval_sums.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..graph.costs import Costs, Floats, Ints
from ..graph.problem import Problem
from ..graph.rank_model import RankConfig
from .bounds import ratios
from .interval_sums import Downsets, PairSums, WorkWindows

_ROUNDING = 1e-9
_PAIRS_AT_ONCE = 400_000


@dataclass(frozen=True)
class StageState:
    """The cost of a stage at one place of the pipeline: position `position` of `setting`."""

    setting: RankConfig
    position: int
    costs: Costs


@dataclass(frozen=True)
class SearchStates:
    """The states of a search and its steps (from, to, index in `stages`), from < to.

    reach: the work, in times of the fastest device, that the stages up to each state complete in a
        time of 1
    ends: the states in which a plan may be complete
    """

    stages: tuple[StageState, ...]
    steps: tuple[tuple[int, int, int], ...]
    reach: Floats
    total: float
    ends: tuple[int, ...]


@dataclass(frozen=True)
class SearchResult:
    """The smallest score, inf if all are above the limit, and its stages.

    A stage is an index in `SearchStates.stages` and its groups. `fewer_ms` is the smallest score of
    plans that stop in an earlier state.
    """

    score_ms: float
    stages: tuple[tuple[int, Ints], ...] = ()
    fewer_ms: float = np.inf


def in_order(problem: Problem) -> SearchStates:
    """One stage on each position, from the first to the last."""
    stages = tuple(
        StageState(problem.setting, position, seen) for position, seen in enumerate(problem.seen)
    )
    steps = tuple((state, state + 1, like) for state, like in enumerate(problem.like))
    reach = np.concatenate([[0.0], np.cumsum(ratios(problem))])
    return SearchStates(stages, steps, reach, float(reach[-1]), (problem.stages,))


def in_any_order(
    problem: Problem, kinds: Sequence[Sequence[int]], length: int | None
) -> SearchStates:
    """`length` stages on devices in any order, with at most as many stages of each kind as it has
    positions; with None any number of stages, where no score depends on that number.

    The state is the number of used devices of each kind.
    """
    setting, speeds = problem.setting, ratios(problem)[[positions[0] for positions in kinds]]
    longest = length or sum(map(len, kinds))
    stages = []
    for positions in kinds:
        alike = replace(setting, devices=(setting.devices[positions[0]],) * longest)
        stages += [StageState(alike, place, problem.seen[positions[0]]) for place in range(longest)]
    counts = sorted(itertools.product(*(range(len(positions) + 1) for positions in kinds)), key=sum)
    counts = [count for count in counts if sum(count) <= longest]
    number = {count: state for state, count in enumerate(counts)}
    steps = [
        (
            number[(*count[:kind], count[kind] - 1, *count[kind + 1 :])],
            number[count],
            kind * longest + (sum(count) - 1 if length else 0),
        )
        for count in counts
        for kind in range(len(kinds))
        if count[kind]
    ]
    reach = np.array(counts) @ speeds
    ends = [state for state, count in enumerate(counts) if sum(count) == length or not length]
    return SearchStates(tuple(stages), tuple(steps), reach, float(reach.max()), tuple(ends))


def windows(problem: Problem, walk: SearchStates, limit_ms: float) -> WorkWindows:
    """The slack windows of the states."""
    work_ms = limit_ms / problem.setting.rounds
    total = float(problem.least_work_ms.sum())
    blur = _ROUNDING * total
    return WorkWindows(
        total - (walk.total - walk.reach) * work_ms - blur, walk.reach * work_ms + blur
    )


def num_pairs(problem: Problem, downsets: Downsets, limit_ms: float) -> int:
    """An upper bound of the number of pairs that a search within the limit evaluates."""
    most_ms = limit_ms / problem.setting.rounds * (1 + _ROUNDING)
    starts = np.searchsorted(downsets.work, downsets.work - most_ms)
    return int((np.arange(len(downsets)) - starts).sum())


def search(
    problem: Problem,
    walk: SearchStates,
    downsets: Downsets,
    limit_ms: float,
    *,
    may_be_empty: bool = False,
) -> SearchResult:
    """The best plan within the limit. With `may_be_empty`, stages may have no groups, and only the
    score is returned.
    """
    inside = windows(problem, walk, limit_ms)
    if inside.low[0] > 0:
        return SearchResult(np.inf)
    downsets = downsets.within(inside)
    table = _Table(problem, walk, downsets, limit_ms)
    table.fill(inside, may_be_empty=may_be_empty)
    end = min(walk.ends, key=lambda state: float(table.best[state, -1]))
    score_ms = float(table.best[end, -1])
    if score_ms == np.inf or may_be_empty:
        return SearchResult(score_ms)
    return SearchResult(score_ms, tuple(table.stages(end)), float(table.best[:end, -1].min()))


class _Table:
    """best[s][I] of the recurrence."""

    def __init__(
        self, problem: Problem, walk: SearchStates, downsets: Downsets, limit_ms: float
    ) -> None:
        self.problem, self.walk, self.downsets = problem, walk, downsets
        self.limit_ms = limit_ms * (1 + _ROUNDING)
        self.window_ms = self.limit_ms / problem.setting.rounds
        self.total_ms = float(problem.least_work_ms.sum())
        kinds = {id(stage.costs): stage.costs for stage in walk.stages}
        self.kind_of = list(kinds)
        setting = problem.setting
        memory = setting.is_limited or bool(setting.replicas) or setting.recompute == "all"
        self.pairs = PairSums(list(kinds.values()), downsets, memory=memory)
        self.best = np.full((len(walk.reach), len(downsets)), np.inf)
        self.best[0, 0] = 0.0

    def fill(self, inside: WorkWindows, *, may_be_empty: bool) -> None:
        work = self.downsets.work
        if may_be_empty:
            self.best[inside.low <= 0, 0] = 0.0  # the first stages may be the empty ones
        alive = np.zeros(len(work), dtype=bool)
        alive[0] = True
        start = 1
        while start < len(work):
            first = int(np.searchsorted(work, work[start] - self.window_ms * (1 + _ROUNDING)))
            before = first + np.flatnonzero(alive[first:start])
            count = int(np.clip(_PAIRS_AT_ONCE // (len(before) + 1), 16, 512))
            rows = np.arange(start, min(start + count, len(work)))
            columns = np.concatenate([before, rows])
            self._fill_rows(inside, rows, columns, may_be_empty=may_be_empty)
            alive[rows] = np.isfinite(self.best[:, rows]).any(axis=0)
            start += len(rows)

    def _fill_rows(
        self, inside: WorkWindows, rows: Ints, columns: Ints, *, may_be_empty: bool
    ) -> None:
        work = self.downsets.work[rows]
        reached = [
            (source, target, stage, selected)
            for source, target, stage in self.walk.steps
            if len(
                selected := np.flatnonzero(
                    (work >= inside.low[target]) & (work <= inside.high[target])
                )
            )
        ]
        scores = self._scores(rows, columns, {stage for _, _, stage, _ in reached})
        # In the order of the states, so that those of the same rows are complete.
        for source, target, stage, selected in sorted(reached, key=lambda step: step[1]):
            scores_ms = np.maximum(self.best[source, columns], scores[stage][selected]).min(axis=1)
            if may_be_empty:
                scores_ms = np.minimum(scores_ms, self.best[source, rows[selected]])
            scores_ms[scores_ms > self.limit_ms] = np.inf
            self.best[target, rows[selected]] = np.minimum(
                self.best[target, rows[selected]], scores_ms
            )

    def _scores(self, rows: Ints, columns: Ints, stages: set[int]) -> dict[int, Floats]:
        """The scores of the stages from columns to rows; inf where there is none."""
        sums = dict(zip(self.kind_of, self.pairs.sums(rows, columns), strict=True))
        legal = self.pairs.legal(rows, columns)
        before_ms = self.downsets.work[None, columns]
        after_ms = self.total_ms - self.downsets.work[rows, None]
        scores = {}
        for index in sorted(stages):
            stage = self.walk.stages[index]
            score_ms = stage.setting.score_ms(
                stage.position, sums[id(stage.costs)], before_ms, after_ms
            )
            scores[index] = np.where(legal, score_ms, np.inf)
        return scores

    def stages(self, state: int) -> list[tuple[int, Ints]]:
        """The stages of the best plan, traced back from its end."""
        row, stages = len(self.downsets) - 1, []
        while row:
            columns = np.flatnonzero(np.isfinite(self.best[:, :row]).any(axis=0))
            rows = np.array([row])
            into = [step for step in self.walk.steps if step[1] == state]
            scores = self._scores(rows, columns, {stage for _, _, stage in into})
            choices = [
                np.maximum(self.best[source, columns], scores[stage][0])
                for source, _, stage in into
            ]
            chosen = int(np.argmin([choice.min() for choice in choices]))
            state, _, stage = into[chosen]
            column = int(columns[choices[chosen].argmin()])
            stages.append((stage, self._between(column, row)))
            row = column
        return stages[::-1]

    def _between(self, column: int, row: int) -> Ints:
        bits = self.downsets.bits[:, row] & ~self.downsets.bits[:, column]
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
        return np.flatnonzero(flags[: self.downsets.num_groups])
