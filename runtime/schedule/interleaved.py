"""Synchronous schedules with several stages per rank, split backwards or replicated stages.

`fold` puts a schedule with a rank for every stage on fewer ranks, and `side_by_side` makes several
pipelines of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise, repeat

from ..errors import ScheduleError
from .dependencies import DependencyRule
from .schedule import Action, Kind, Schedule, alternate, one_step, shared_delay
from .simulate import ActionCosts


def interleaved(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """Stages distributed round-robin; rank r runs (v-1) g + 2 (p-1-r) forwards ahead, then
    alternates a forward and a backward, then drains.

    Stage j is on rank j mod p, so a micro-batch passes all ranks v times and the pipeline fills in
    1/v of the time. Micro-batches run in groups of g = p, and a group passes the v stages of a rank
    before the next group begins. If m is not a multiple of p, there are m // p groups of nearly the
    same size, or one.

    With equal stages, m at least p and a multiple of p, a rank is idle for (p-1) (T_f + T_b) / v of
    a step, where T_f + T_b is the work of one rank on one micro-batch. Source: Narayanan et al.,
    "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
    section 2.2.2.

    >>> print(interleaved(4, 2, ranks=2))
    rank 0: 0F0@v0 0F1@v0 2F0@v0 2F1@v0 2B0@v0 2B1@v0 0B0@v0 0B1@v0 0S1 2S1
    rank 1: 1F0@v0 1F1@v0 3F0@v0 3B0@v0 3F1@v0 3B1@v0 1B0@v0 1B1@v0 1S1 3S1
    """
    groups = _groups(micro_batches, max(1, micro_batches // ranks))
    chunks, largest = stages // ranks, max(map(len, groups))
    rows = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forwards = _in_groups("F", own, groups)
        backwards = _in_groups("B", own[::-1], groups)
        ahead = min((chunks - 1) * largest + 2 * (ranks - 1 - rank), len(forwards))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += forward, backward
        rows.append(row + backwards[len(forwards) - ahead :])
    return one_step("interleaved", rows, [stage % ranks for stage in range(stages)])


def looped_bfs(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """As `interleaved` with one group: all forwards, then all backwards.

    All micro-batches pass one stage of the rank, then its next one, and back. The idle time is that
    of `interleaved`, for every m of at least p. Source: Lamy-Poirier, "Breadth-first pipeline
    parallelism", MLSys 2023.

    >>> print(looped_bfs(4, 2, ranks=2))
    rank 0: 0F0@v0 0F1@v0 2F0@v0 2F1@v0 2B0@v0 2B1@v0 0B0@v0 0B1@v0 0S1 2S1
    rank 1: 1F0@v0 1F1@v0 3F0@v0 3F1@v0 3B0@v0 3B1@v0 1B0@v0 1B1@v0 1S1 3S1
    """
    groups = _groups(micro_batches, 1)
    own_of = [range(rank, stages, ranks) for rank in range(ranks)]
    rows = [_in_groups("F", own, groups) + _in_groups("B", own[::-1], groups) for own in own_of]
    return one_step("looped-bfs", rows, [stage % ranks for stage in range(stages)])


def _groups(micro_batches: int, count: int) -> list[range]:
    """All micro-batches, in groups whose sizes differ by one at most.

    >>> _groups(7, 2)
    [range(0, 4), range(4, 7)]
    """
    small, larger = divmod(micro_batches, count)
    sizes = [small + (group < larger) for group in range(count)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def _in_groups(kind: Kind, stages: range, groups: list[range]) -> list[Action]:
    return [Action(stage, kind, i) for group in groups for stage in stages for i in group]


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1f1b with split backwards: rank r delays a W by r micro-batches, so that each rank holds p of
    them.

    A backward is B, which the previous stage waits for, and W, which only the optimizer waits for;
    W fills bubbles. With T_f, T_i and T_w of a rank's work on a micro-batch, and equal stages, a
    rank is idle for (p-1) (T_f + T_i - T_w) of a step from m = p micro-batches on, if T_i is at
    least T_w and no rank waits for another to step. Source: Qi et al., "Zero bubble pipeline
    parallelism", ICLR 2024, section 2.

    >>> print(zb_h1(2, 3))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0W0@v0 0F2@v0 0B1@v0 0W1@v0 0B2@v0 0W2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1W0@v0 1F2@v0 1B2@v0 1W1@v0 1W2@v0 1S1
    """
    rows = (_alternate(j, micro_batches, stages - 1 - j, j) for j in range(stages))
    return one_step("zb-h1", rows, range(stages))


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """As `zb_h1` with twice the warm-up and twice the delay of W.

    A rank is idle for (p-1) (T_f + T_i - 2 T_w) of a step from m = 2p-1 micro-batches on, with the
    activations of 2p-1 micro-batches.

    >>> print(zb_h2(2, 3))
    rank 0: 0F0@v0 0F1@v0 0F2@v0 0B0@v0 0W0@v0 0B1@v0 0W1@v0 0B2@v0 0W2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1W0@v0 1W1@v0 1W2@v0 1S1
    """
    rows = (_alternate(j, micro_batches, 2 * (stages - 1 - j), 2 * j) for j in range(stages))
    return one_step("zb-h2", rows, range(stages))


def _alternate(stage: int, micro_batches: int, ahead: int, put_off: int) -> Iterator[Action]:
    for index in range(min(ahead, micro_batches)):
        yield Action(stage, "F", index)
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(stage, "F", index + ahead)
        yield Action(stage, "B", index)
        if index >= put_off:
            yield Action(stage, "W", index - put_off)
    for index in range(max(0, micro_batches - put_off), micro_batches):
        yield Action(stage, "W", index)


def zb_v(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """Rank r has stages r and 2p-1-r: a micro-batch passes down the ranks and up again.

    A rank is idle for (p-1) (T_i - T_w) of a step, in the terms of `zb_h1`, from m = 2p
    micro-batches on, with the activations of p micro-batches, if T_f is not above T_i either.
    Source: Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, appendix on
    the V schedule.
    >>> print(zb_v(2, 2, ranks=1))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 1W0@v0 0F1@v0 0B0@v0 0W0@v0 1F1@v0 1B1@v0 1W1@v0 0B1@v0 0W1@v0 0S1 1S1
    """  # noqa: E501
    rows = (
        [action for action in _v_row(rank, ranks, micro_batches) if action.index < micro_batches]
        for rank in range(ranks)
    )
    return one_step("zb-v", rows, [*range(ranks), *reversed(range(ranks))])


def _v_row(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The phases of the paper's figure; a lower case letter is an action of the rank's first stage.

    A schedule of few micro-batches is a longer one without the missing micro-batches.
    """
    whole = max(micro_batches, 2 * ranks)
    phases = [
        ("f", 2 * (ranks - rank) - 1),
        ("Ff", rank),
        ("FBW", ranks - rank),
        ("fbwFBW", whole - ranks),
        ("bB", rank),
        ("bw", ranks - rank),
        ("W", rank),
        ("w", rank),
    ]
    numbers = {letter: count() for letter in "fbwFBW"}
    for letters, times in phases:
        for letter in "".join(repeat(letters, times)):
            stage = rank if letter.islower() else 2 * ranks - 1 - rank
            kind: Kind = {"F": "F", "B": "B", "W": "W"}[letter.upper()]  # type: ignore[assignment]
            yield Action(stage, kind, next(numbers[letter]))


REPLICATED: tuple[str, ...] = ("gpipe", "1f1b")
"""The schedules whose stages may have replicas."""


def replicated(name: str, micro_batches: int, replicas: Sequence[Sequence[int]]) -> Schedule:
    """The schedule of that name for stages on the given ranks. Raises ScheduleError for a name that
    is not in REPLICATED, and if a replica would have no micro-batch.

    PipeDream (Narayanan et al., SOSP 2019, section 3.2) distributes the micro-batches of a stage to
    its r replicas round-robin: replica i mod r runs forward and backward of micro-batch i. How far
    each runs ahead follows from Little's law: where every rank is busy for T with a micro-batch of
    its share, a stage of r replicas completes one every T / r of its time, so from its forward at
    stage j to its backward there a micro-batch is under way for T * R_j, with R_j = r_j + ... +
    r_{p-1}, and so many are in flight in a stage that takes one every T. A replica of stage j holds

        c_j = ceil(R_j / r_j)

    of them: ceil(ranks / replicas of the input stage) at the first one, PipeDream's NOAM, and p - j
    where no stage is replicated. Such a schedule cannot deadlock. A replica makes F(j, i) when B(j,
    i - c_j r_j) is over, and B(j, i) when F(j, i + (c_j - 1) r_j) is. So before B(s, i) comes, of a
    later stage t, F(t, i + (c_t - 1) r_t), and before that B(s, i + (c_t - 1) r_t - c_s r_s), where

        (c_t - 1) r_t < R_t < R_s <= c_s r_s:

    every backward waits for earlier ones alone. `gpipe` makes all its forwards first.

    >>> print(replicated("1f1b", 3, [[0, 1], [2]]))
    rank 0: 0F0@v0 0F2@v0 0B0@v0 0B2@v0 0S1
    rank 1: 0F1@v0 0B1@v0 0S1
    rank 2: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1S1
    """
    if name not in REPLICATED:
        raise ScheduleError(
            f"single stages have no replicas under {name}.",
            f"--schedule {' or '.join(REPLICATED)}",
        )
    most = max(map(len, replicas))
    if micro_batches < most:
        raise ScheduleError(
            f"{micro_batches} micro-batches are too few for a stage with {most} replicas: each "
            "needs at least one.",
            f"--micro-batches {most}",
        )
    depths = in_flight(name, micro_batches, [len(ranks) for ranks in replicas])
    rows: dict[int, list[Action]] = {}
    for stage, ranks in enumerate(replicas):
        for first, rank in enumerate(ranks):
            own = range(first, micro_batches, len(ranks))
            rows[rank] = [
                action._replace(index=own[action.index])
                for action in alternate(stage, len(own), depths[stage] - 1, len(own))
                if action.kind != "S"
            ]
    in_order = [rows[rank] for rank in sorted(rows)]
    return one_step(name, in_order, [ranks[0] for ranks in replicas], replicas)


def side_by_side(schedule: Schedule, replicas: int) -> Schedule:
    """So many replicas of a pipeline as one schedule, in which a step of a stage waits for the
    window of all of them.

    This schedule serves to check and to simulate the waits between replicas; in a run, each
    pipeline executes its own schedule. None of the waits can deadlock: take a legal order of the
    actions of one pipeline, and run each action in all replicas before the next one. Then the
    backwards of a window are over in all replicas before the first of them steps.

    >>> from asyncpipe.runtime.schedule.builders import async_1f1b
    >>> print(side_by_side(async_1f1b(1, 2, step_every=1), 2))
    rank 0: 0F0@v0 0B0@v0 0S1 0F2@v1 0B2@v1 0S2
    rank 1: 0F1@v0 0B1@v0 0S1 0F3@v1 0B3@v1 0S2
    """
    own = len(schedule.ranks)

    def row(actions: Iterable[Action], replica: int) -> Iterator[Action]:
        for action in actions:
            index = action.index * replicas + replica
            yield action if action.kind == "S" else action._replace(index=index)

    return replace(
        schedule,
        micro_batches=schedule.micro_batches * replicas,
        step_every=schedule.step_every * replicas,
        ranks=tuple(
            tuple(row(actions, replica))
            for replica in range(replicas)
            for actions in schedule.compute.ranks
        ),
        replicas=tuple(
            tuple(rank + replica * own for replica in range(replicas))
            for rank in schedule.rank_of_stage
        ),
    )


def in_flight(name: str, micro_batches: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches that a replica of each stage holds, by the replicas of each.

    >>> in_flight("1f1b", 8, (2, 1, 1)), in_flight("1f1b", 8, (1, 3)), in_flight("gpipe", 8, (1, 3))
    ((2, 2, 1), (4, 1), (8, 3))
    """
    own = [-(-micro_batches // count) for count in shape]
    if name == "gpipe":
        return tuple(own)
    ranks = [sum(shape[stage:]) for stage in range(len(shape))]
    return tuple(
        min(most, -(-left // count)) for most, left, count in zip(own, ranks, shape, strict=True)
    )


_FIRST = {"S": 0, "W": 1, "B": 2, "F": 3}


def fold(
    schedule: Schedule, rank_of_stage: Sequence[int], costs: ActionCosts | None = None
) -> Schedule:
    """The schedule, which has one stage on every rank, with its stages on the given ranks.

    Every stage keeps exactly its own order of forwards, backwards and steps, and so its weight
    versions. The order of a rank is found by running the schedule with `costs`, by default equal
    ones: of the next actions of its stages that wait for nothing, the rank takes a backward before
    a forward, and an earlier micro-batch before a later one. Since this order was run, the ranks
    cannot deadlock.

    The dependencies are those of a chain of stages, any two of which may share parameters; they
    include those of all other models. An action is examined when it is its stage's next and again
    for each action that it waits for, so the time is proportional to the number of actions.

    Raises ScheduleError if the ranks do not fit the stages.

    >>> from asyncpipe.runtime.schedule.builders import async_1f1b
    >>> print(fold(async_1f1b(2, 2, step_every=1), [0, 0]))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 1S1 0F1@v0 0B0@v0 0S1 1F1@v1 1B1@v1 1S2 0B1@v1 0S2
    """
    assert not schedule.is_lowered and len(schedule.ranks) == schedule.stages
    placed = sorted(set(rank_of_stage))
    if len(rank_of_stage) != schedule.stages or placed != list(range(len(placed))):
        raise ScheduleError(
            f"{schedule.stages} stages cannot be on ranks {list(rank_of_stage)}: each needs one, "
            "and ranks are counted from 0 without a gap."
        )
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of_stage))]
    for action in _played(schedule, rank_of_stage, costs or ActionCosts.equal(schedule.stages)):
        rows[rank_of_stage[action.stage]].append(action)
    return replace(schedule, ranks=tuple(map(tuple, rows)), rank_of_stage=tuple(rank_of_stage))


def _played(
    schedule: Schedule, rank_of_stage: Sequence[int], costs: ActionCosts
) -> Iterator[Action]:
    """The actions in the order in which they begin, if each rank does one at a time."""
    rule, every = DependencyRule(schedule), schedule.step_every
    delays = [shared_delay(schedule, [stage]) for stage in range(schedule.stages)]
    rows = [iter(row) for row in schedule.ranks]
    done: set[Action] = set()
    waiting: dict[Action, list[Action]] = defaultdict(list)
    ready: dict[int, list[tuple[int, int, int, Action]]] = defaultdict(list)
    under_way: list[tuple[float, int, Action]] = []

    def needed(action: Action) -> list[Action]:
        if action.kind != "S":
            return rule.dependencies(action)
        # Its own backwards are before it in its row; later stages have done more of theirs.
        ends = [every * (action.index - late) for late in delays[: action.stage]]
        return [Action(earlier, "B", end - 1) for earlier, end in enumerate(ends) if end > 0]

    def look_at(action: Action) -> None:
        for other in needed(action):
            if other not in done:
                waiting[other].append(action)
                return
        first = _FIRST[action.kind], action.index, -action.stage
        heappush(ready[rank_of_stage[action.stage]], (*first, action))

    for row in rows:
        look_at(next(row))
    idle, now_ms = set(rank_of_stage), 0.0
    while True:
        for rank in sorted(rank for rank in idle if ready[rank]):
            action = heappop(ready[rank])[-1]
            yield action
            idle.remove(rank)
            heappush(under_way, (now_ms + costs.of(action), rank, action))
        if not under_way:
            return
        now_ms = under_way[0][0]
        while under_way and under_way[0][0] == now_ms:
            _, rank, action = heappop(under_way)
            idle.add(rank)
            done.add(action.unversioned)
            for freed in (next(rows[action.stage], None), *waiting.pop(action.unversioned, ())):
                if freed is not None:
                    look_at(freed)
