"""How far stages of asynchronous schedules run ahead, and what it is limited by."""

from __future__ import annotations

import pytest

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import async_1f1b, depths, two_bw
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.validation import validate


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (None, (3, 2, 1, 0)),
        ("1x", (3, 2, 1, 0)),
        ("2x", (6, 4, 2, 0)),
        ("0", (0, 0, 0, 0)),
        ("2", (2, 2, 1, 0)),
        ("9", (3, 2, 1, 0)),
        ("5, 3, 3, 1", (5, 3, 3, 1)),
    ],
)
def test_ahead_is_a_multiple_a_limit_or_a_number_a_stage(
    ahead: str | None, expected: tuple[int, ...]
) -> None:
    assert depths(4, ahead) == expected
    made = make_schedule("async-1f1b", stages=4, micro_batches=8, step_every=2, ahead=ahead)
    assert made.in_flight == tuple(forwards + 1 for forwards in expected)
    validate(made, shared_stages=[(0, 3)])


@pytest.mark.parametrize(
    ("ahead", "what"),
    [
        ("two", "--ahead two is not a valid number"),
        ("1.5x", "--ahead 1.5x is not a valid number"),
        ("-1", "--ahead -1 is not a valid number"),
        ("3,2,1", "--ahead 3,2,1 has 3 numbers for 4 stages"),
        ("1,2,1,0", "stage 1 would run 2 forwards ahead, but stage 0 before it gives it no more"),
    ],
)
def test_an_ahead_that_cannot_be_is_refused_in_a_sentence(ahead: str, what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule("async-1f1b", stages=4, micro_batches=8, step_every=2, ahead=ahead)
    assert what in caught.value.what and caught.value.cure


def test_twice_as_far_ahead_hides_slow_links() -> None:
    slow = ActionCosts.equal(4, transfer_ms=1.5)
    usual, deeper = (
        simulate(
            make_schedule("async-1f1b", stages=4, micro_batches=64, step_every=8, ahead=ahead), slow
        ).steady_idle_share
        for ahead in (None, "2x")
    )
    assert usual == pytest.approx(3 / 7) and deeper < 0.01


def test_virtual_stages_are_async_1f1b_with_a_cap() -> None:
    for stages in range(1, 7):
        for every in (1, 2, 5):
            for cap in range(4):
                virtual, capped = (
                    make_schedule(
                        name,
                        stages=stages,
                        micro_batches=10,
                        step_every=every,
                        staleness_cap=cap,
                    )
                    for name in ("virtual_stages_1f1b", "async-1f1b")
                )
                assert virtual.ranks == capped.ranks
                validate(virtual, shared_stages=[(0, stages - 1)])


def test_the_cap_is_exact_where_the_ancestors_is_one_short() -> None:
    """16 stages and a cap of 8: FTPipe's rule gives the first stage 6."""
    made = make_schedule(
        "virtual-stages-1f1b", stages=16, micro_batches=32, step_every=1, staleness_cap=8
    )
    assert made.in_flight == (9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1)


def test_more_in_flight_at_later_stages_would_be_no_faster() -> None:
    for stages in range(2, 7):
        for limit in range(stages):
            least = [max(0, limit - stage) for stage in range(stages)]
            most = [min(stages - 1 - stage, limit) for stage in range(stages)]
            spans = [
                simulate(
                    async_1f1b(stages, 60, 1, ahead), ActionCosts.equal(stages)
                ).steady_idle_share
                for ahead in (least, most)
            ]
            assert spans[0] == pytest.approx(spans[1])


def test_2bw_is_async_1f1b_with_steps_of_as_many_micro_batches_as_stages() -> None:
    for stages in range(1, 6):
        for every in range(stages, 8):
            assert (
                two_bw(stages, every * 3, every).ranks == async_1f1b(stages, every * 3, every).ranks
            )


@pytest.mark.parametrize(
    ("every", "ahead", "what"),
    [
        (3, None, "enough for 4 stages when a step has 4 micro-batches or more, not 3"),
        (4, "2x", "enough for 6 forwards ahead when a step has 6 micro-batches or more, not 4"),
    ],
)
def test_2bw_with_shorter_steps_is_refused(every: int, ahead: str | None, what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule("2bw", stages=4, micro_batches=12, step_every=every, ahead=ahead)
    assert what in caught.value.what
    assert caught.value.cure.startswith("--micro-batches")
