"""Asynchronous schedules on fewer ranks than stages: the same to every stage, and never stuck."""

from __future__ import annotations

from collections.abc import Iterator
from cProfile import Profile
from itertools import combinations, product

import pytest

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import async_1f1b, depths
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.interleaved import fold
from asyncpipe.runtime.schedule.schedule import Action, Schedule, count_in_flight
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.validation import validate


def placements(stages: int) -> Iterator[tuple[int, ...]]:
    """In turn on every number of ranks; neighbours together; and down the ranks and up again."""
    for ranks in range(1, stages + 1):
        yield tuple(stage % ranks for stage in range(stages))
        yield tuple(stage * ranks // stages for stage in range(stages))
    half = range((stages + 1) // 2)
    yield (*half, *reversed(range(stages // 2)))


def small() -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    for stages in range(1, 6):
        for step_every, steps in product(range(1, 6), range(1, 11)):
            for ahead in (None, "2x", "1"):
                if step_every * steps <= 10:
                    made = async_1f1b(stages, step_every * steps, step_every, depths(stages, ahead))
                    for placed in set(placements(stages)):
                        yield made, placed


def row_of(schedule: Schedule, stage: int) -> list[Action]:
    return [action for row in schedule.ranks for action in row if action.stage == stage]


def test_every_stage_keeps_its_order_and_so_its_versions() -> None:
    for made, placed in small():
        folded = fold(made, placed)
        assert folded.rank_of_stage == placed and len(folded.ranks) == len(set(placed))
        for stage in range(made.stages):
            assert row_of(folded, stage) == list(made.ranks[stage])


@pytest.mark.parametrize("stages", range(1, 6))
def test_nothing_waits_in_a_circle_whichever_stages_share_a_parameter(stages: int) -> None:
    """`validate` plays every schedule with blocking and with buffered sends."""
    pairs = [*combinations(range(stages), 2), tuple(range(stages))]
    for number, (made, placed) in enumerate(each for each in small() if each[0].stages == stages):
        validate(fold(made, placed), shared_stages=[pairs[number % len(pairs)]])


def test_skips_between_stages_of_folded_ranks_never_stand_still() -> None:
    edges = [(0, 1), (0, 3), (1, 2), (2, 3), (0, 4), (3, 4)]
    for placed in set(placements(5)):
        for step_every in (1, 2, 5):
            validate(fold(async_1f1b(5, 10, step_every), placed), edges, shared_stages=[(0, 4)])


def test_a_rank_with_two_stages_is_hardly_idle() -> None:
    for stages, ranks in ((4, 2), (6, 3), (6, 2), (8, 4)):
        folded = make_schedule(
            "async-1f1b", stages=stages, micro_batches=64, step_every=4, ranks=ranks
        )
        assert simulate(folded, ActionCosts.equal(stages)).steady_idle_share < 0.1


def test_an_order_made_for_the_costs_is_no_slower_than_one_for_equal_costs() -> None:
    costs = ActionCosts((1.0, 9.0, 2.0, 2.0), (2.0, 18.0, 4.0, 4.0), (0.0,) * 4)
    made = async_1f1b(4, 48, 4)
    equal, fitted = fold(made, (0, 1, 1, 0)), fold(made, (0, 1, 1, 0), costs)
    spans = [simulate(each, costs).makespan_ms for each in (equal, fitted)]
    assert spans[1] <= spans[0]


def test_one_rank_has_no_more_in_flight_than_the_pipeline() -> None:
    made = async_1f1b(5, 30, 2)
    folded = fold(made, (0,) * 5)
    assert count_in_flight(folded.ranks, 5) == made.in_flight
    assert str(folded).startswith("rank 0: 0F0@v0 1F0@v0 2F0@v0")


def test_a_schedule_four_times_as_long_takes_about_four_times_the_work() -> None:
    """Counted in calls: a clock on a busy machine says little."""
    calls = []
    for micro_batches in (50, 200):
        profile = Profile()
        profile.runcall(fold, async_1f1b(8, micro_batches, 1), (0,) * 8)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 5 * calls[0]


@pytest.mark.parametrize("placed", [(0, 0, 2), (0, 1), (1, 1, 1)])
def test_ranks_that_do_not_fit_the_stages_are_refused(placed: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="3 stages cannot be on ranks"):
        fold(async_1f1b(3, 4, 2), placed)
