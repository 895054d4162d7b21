"""One optimizer step: whole where it is synchronous, from the steady state where it is not."""

from dataclasses import replace

import pytest

from asyncpipe.runtime.plan.forecast import forecast_one_step
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.tests.support.models.hand_plans import chain


def plan_of(*costs: tuple[float, float]) -> Plan:
    """A chain of stages with these forward and backward milliseconds."""
    plan = chain(len(costs)).plan
    stages = zip(plan.stages, costs, strict=True)
    return replace(
        plan,
        stages=tuple(
            replace(stage, forward_ms=forward_ms, backward_ms=backward_ms)
            for stage, (forward_ms, backward_ms) in stages
        ),
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 5, 8])
def test_a_steady_step_takes_what_its_slowest_stage_takes(stages, micro_batches):
    slow = stages // 2
    costs = [(3.0, 5.0) if stage == slow else (1.0, 2.0) for stage in range(stages)]
    step = forecast_one_step(plan_of(*costs), "async-1f1b", micro_batches)
    assert step.step_ms == pytest.approx(8.0 * micro_batches)
    assert step.start_ms > step.timeline.start_ms and step.end_ms <= step.timeline.end_ms


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_synchronous_step_is_the_whole_timeline(schedule):
    step = forecast_one_step(plan_of((1, 2), (1, 2), (1, 2)), schedule, 4)
    assert (step.start_ms, step.end_ms) == (step.timeline.start_ms, step.timeline.end_ms)
    assert step.step_ms == (4 + 3 - 1) * 3
    assert step.idle_share == pytest.approx(2 / 6)
