"""Every synchronous schedule at small sizes: makespan and live activations are the closed forms.

p ranks, v stages per rank, m micro-batches. The unit of time is the work of a rank on one
micro-batch, and the unit of activations is those of a whole rank, whatever the number of its
stages. The forms are those of the papers, collected in the module docstrings of the schedules.
"""

from __future__ import annotations

import pytest
from pytest import approx

from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.schedule import Schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.tasks import Steady, Tasks
from asyncpipe.runtime.schedule.validation import validate
from asyncpipe.tests.support.models.small_schedules import synchronous

P, M = range(1, 6), range(1, 11)
SIZES = [(p, m) for p in P for m in M]
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (2.0, 1.0, 1.0), (1.0, 3.0, 0.5)]


def costs_of(schedule: Schedule, times: tuple[float, float, float]) -> ActionCosts:
    stages = schedule.stages
    v = stages / len(schedule.ranks)
    forward, inputs, weights = (ms / v for ms in times)
    return ActionCosts(
        (forward,) * stages,
        (inputs + weights,) * stages,
        (0.0,) * stages,
        weight_ms=(weights,) * stages,
    )


def steady(schedule: Schedule, times: tuple[float, float, float]) -> Steady:
    tasks = Tasks(costs_of(schedule, times), schedule.rank_of_stage, schedule.micro_batches)
    found = tasks.steady(tasks.rows_of(schedule))
    assert found is not None
    return found


def makespan_ms(schedule: Schedule, times: tuple[float, float, float]) -> float:
    return simulate(schedule, costs_of(schedule, times)).makespan_ms


def live(schedule: Schedule) -> list[float]:
    """The most live activations of each rank, in those of a whole rank."""
    tasks = Tasks(
        ActionCosts.equal(schedule.stages), schedule.rank_of_stage, schedule.micro_batches
    )
    v = schedule.stages / len(schedule.ranks)
    return [peak / v for peak in tasks.peaks(tasks.rows_of(schedule))]


@pytest.mark.parametrize("p", P)
def test_every_schedule_is_legal_and_never_stuck_with_up_to_three_stages_a_rank(p: int) -> None:
    for m in M:
        for v in (1, 2, 3):
            for made in synchronous(p * v, m):
                if len(made.ranks) == p:
                    validate(made)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("times", TIMES)
def test_interleaving_makes_the_bubble_v_times_smaller(
    v: int, times: tuple[float, float, float]
) -> None:
    work = sum(times)
    for p, m in SIZES:
        made, breadth = (
            make_schedule(name, stages=p * v, micro_batches=m, ranks=p)
            for name in ("interleaved", "looped-bfs")
        )
        if m >= p:
            assert makespan_ms(made, times) == approx((m + (p - 1) / v) * work)
            assert makespan_ms(breadth, times) == approx((m + (p - 1) / v) * work)
            assert steady(made, times).period_ms == approx((m + (p - 1) / v) * work)
        else:
            # A micro-batch has to go round v times, and m of them are fewer than fill the ranks.
            assert makespan_ms(made, times) == approx((p + (m - 1) / v) * work)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_holds_what_megatron_holds(v: int) -> None:
    for p, m in SIZES:
        made = make_schedule("interleaved", stages=p * v, micro_batches=m, ranks=p)
        largest = -(-m // max(1, m // p))
        assert live(made) == [
            approx(min(m, ((v - 1) * largest + 2 * (p - 1 - r) + 1) / v)) for r in range(p)
        ]
        assert live(make_schedule("looped-bfs", stages=p * v, micro_batches=m, ranks=p)) == [m] * p


def test_one_stage_a_rank_interleaved_is_as_long_as_1f1b() -> None:
    for p, m in SIZES:
        made = make_schedule("interleaved", stages=p, micro_batches=m, ranks=p)
        other = make_schedule("1f1b", stages=p, micro_batches=m)
        assert makespan_ms(made, TIMES[0]) == makespan_ms(other, TIMES[0])


@pytest.mark.parametrize("times", TIMES)
def test_zb_h1_has_the_weights_of_one_micro_batch_a_rank_less_bubble(
    times: tuple[float, float, float],
) -> None:
    forward, inputs, weights = times
    for p, m in SIZES:
        made = make_schedule("zb-h1", stages=p, micro_batches=m)
        assert live(made) == [min(m, p)] * p
        if m >= p:
            expected = m * sum(times) + (p - 1) * (forward + inputs - weights)
            assert makespan_ms(made, times) == approx(expected)
            assert steady(made, times).period_ms == approx(expected)


@pytest.mark.parametrize("times", TIMES)
def test_zb_h2_has_two_of_them_less(times: tuple[float, float, float]) -> None:
    forward, inputs, weights = times
    for p, m in SIZES:
        made = make_schedule("zb-h2", stages=p, micro_batches=m)
        assert live(made) == [min(m, 2 * p - 1)] * p
        if m >= 2 * p - 1:
            expected = m * sum(times) + (p - 1) * (forward + inputs - 2 * weights)
            assert steady(made, times).period_ms == approx(expected)


@pytest.mark.parametrize("times", TIMES)
def test_zb_v_has_no_bubble_between_steps_if_both_parts_take_as_long(
    times: tuple[float, float, float],
) -> None:
    forward, inputs, weights = times
    for p, m in SIZES:
        made = make_schedule("zb-v", stages=2 * p, micro_batches=m, ranks=p)
        assert max(live(made)) == min(m, p)
        if m >= 2 * p and forward <= inputs:
            expected = m * sum(times) + (p - 1) * (inputs - weights)
            assert steady(made, times).period_ms == approx(expected)
        if m >= 2 * p and forward == inputs == weights:
            ends_together = m * sum(times) + (p - 1) * forward / 2
            assert makespan_ms(made, times) == approx(ends_together)


def test_a_swapped_pair_is_seen_in_the_makespan() -> None:
    made = make_schedule("zb-h1", stages=3, micro_batches=4)
    tasks = Tasks(costs_of(made, TIMES[0]), made.rank_of_stage, 4)
    rows = tasks.rows_of(made)
    place = next(k for k, task in enumerate(rows[2]) if tasks.kind(task) == 2)
    rows[2][place + 1 : place + 3] = rows[2][place + 2], rows[2][place + 1]
    changed = tasks.steady(rows)
    assert changed is None or changed.period_ms > steady(made, TIMES[0]).period_ms
