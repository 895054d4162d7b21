"""The closed forms of staleness are what schedules count and what ledgers of real runs say."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.config.asynchronous_options import delays_of, describe_delays
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.schedule.asynchronous import Delays, async_1f1b, capped, depths
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.schedule.interleaved import fold
from asyncpipe.runtime.schedule.schedule import Schedule
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.processes.executor import train_together

Entry = tuple[int, int, int, int]


def counted(schedule: Schedule) -> set[Entry]:
    """Stage, micro-batch and both versions, by counting the steps in the lists."""
    met: dict[tuple[int, int], list[int]] = {}
    for action in (action for row in schedule.ranks for action in row):
        if action.version is not None:
            met.setdefault((action.stage, action.index), []).append(action.version)
    return {(stage, t, *seen) for (stage, t), seen in met.items()}


@st.composite
def asynchronous(draw: st.DrawFn) -> Schedule:
    stages, every = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    falling = sorted(draw(st.tuples(*[st.integers(0, 12)] * stages)), reverse=True)
    made = async_1f1b(stages, every * draw(st.integers(1, 6)), every, falling)
    ranks = draw(st.integers(1, stages))
    return made if ranks == stages else fold(made, [stage % ranks for stage in range(stages)])


@given(asynchronous())
@settings(max_examples=60)
def test_the_closed_form_is_what_counting_gives_at_any_depth_on_any_ranks(made: Schedule) -> None:
    assert set(delays_of(made).ledger(made.micro_batches)) == counted(made)


@given(st.integers(0, 30), st.integers(1, 12))
def test_the_delays_of_a_step_have_the_mean_w_over_k_and_are_at_most_its_ceiling(
    ahead: int, every: int
) -> None:
    delays = Delays((ahead,), every)
    first = every * -(-ahead // every)
    steady = [delays.delay(0, t) for t in range(first, first + every)]
    assert sum(steady) == every * delays.mean(0) == ahead
    assert max(steady) == delays.most(0)
    assert max(delays.delay(0, t) for t in range(first)) <= delays.most(0) if first else True


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 6), st.sampled_from(["1x", "2x", "3"]))
def test_a_cap_is_kept_and_is_reached_where_stages_would_go_beyond_it(
    stages: int, every: int, cap: int, ahead: str
) -> None:
    free = depths(stages, ahead)
    ahead_of = capped(free, every, cap)
    assert max(Delays(ahead_of, every).most(stage) for stage in range(stages)) == min(
        cap, Delays(free, every).most(0)
    )
    assert list(ahead_of) == sorted(ahead_of, reverse=True)
    assert all(0 <= less <= usual for less, usual in zip(ahead_of, free, strict=True))


def test_two_buffers_hold_the_version_of_every_forward_of_2bw() -> None:
    for stages in range(1, 6):
        for every in range(stages, 9):
            free = Delays(depths(stages), every)
            two = Delays(depths(stages), every, two_from=0)
            for t in range(6 * every):
                for stage in range(stages):
                    # What 2bw computes with was made by the time of the forward.
                    assert two.forward(stage, t) == max(0, free.backward(t) - 1)
                    assert two.forward(stage, t) <= free.forward(stage, t)


@pytest.mark.parametrize(("every", "ahead"), [(1, None), (2, "2x"), (3, "1"), (2, "4,4,1")])
def test_ledgers_of_segments_that_drain_are_the_closed_form_with_the_ramp_anew(
    every: int, ahead: str | None
) -> None:
    model = chain(3)
    edges = forward_edges(model.plan)
    made = async_1f1b(3, 4 * every, every, depths(3, ahead))
    for schedule in (made, fold(made, (0, 1, 0))):
        trained = train_together(
            model,
            lower(schedule, edges, grad_edges=gradient_edges(model.plan)),
            segments=2,
            optimize=partial(torch.optim.SGD, lr=0.1),
        )
        first, second = delays_of(schedule), delays_of(schedule, None, 4 * every, 4)
        expected = {*first.ledger(4 * every), *second.ledger(4 * every)}
        assert trained.ledger == expected
        assert all(second.has(*entry) for entry in trained.ledger if entry[1] >= 4 * every)
        assert not all(first.has(*entry) for entry in trained.ledger)


def test_stages_alike_are_told_together() -> None:
    assert describe_delays(async_1f1b(1, 1, 1)) == "stage 0: none"
    assert describe_delays(async_1f1b(3, 12, step_every=12)) == (
        "stage 0: 0.167 steps (max 1), stage 1: 0.0833 steps (max 1), stage 2: none"
    )
