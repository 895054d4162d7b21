"""How far an asynchronous run goes ahead by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pytest import approx

from asyncpipe.runtime.config.resolve import sized_plan
from asyncpipe.runtime.config.run_ahead import with_ahead
from asyncpipe.runtime.plan.plan import Plan, StageMemory, TensorSpec
from asyncpipe.runtime.plan.setting import PlanSetting, RankSpec
from asyncpipe.runtime.process import memory_bytes
from asyncpipe.runtime.schedule.asynchronous import async_1f1b, depths
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.run_ahead import times_ahead
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.tests.support.models.plans import connected, plan_by_hand, stage_by_hand
from asyncpipe.tests.support.run_configs import run_config


def test_varying_actions_need_more_forwards_ahead_the_more_they_vary() -> None:
    costs = ActionCosts.equal(2)
    assert [times_ahead(costs, 64, spread) for spread in (0.0, 0.1, 0.4)] == sorted(
        times_ahead(costs, 64, spread) for spread in (0.0, 0.1, 0.4)
    )
    assert times_ahead(costs, 64, 0.4) > times_ahead(costs, 64, 0.0)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("step_every", [1, 3, 4, 8, 16])
def test_no_gradient_becomes_later_by_a_step(stages: int, step_every: int) -> None:
    times = times_ahead(ActionCosts.equal(stages), step_every, 0.5)
    for usual, ahead in zip(depths(stages), depths(stages, f"{times}x"), strict=True):
        assert -(-ahead // step_every) == -(-usual // step_every)


def test_a_slow_link_is_hidden() -> None:
    slow = ActionCosts.equal(2, transfer_ms=2.5)
    times = times_ahead(slow, 16, 0.05)

    def idle(multiple: int) -> float:
        made = async_1f1b(2, 320, 16, [multiple, 0])
        return simulate(made, slow).steady_idle_share

    assert idle(1) > 0.3 and idle(times) < 0.05


def test_what_does_not_fit_is_left_out() -> None:
    assert times_ahead(ActionCosts.equal(2), 64, 0.4, fits=lambda warmup: warmup[0] <= 2) == 2
    assert times_ahead(ActionCosts.equal(2), 64, 0.4, fits=lambda warmup: False) == 1


def test_a_simulation_with_a_spread_has_the_mean_of_one_without() -> None:
    single = make_schedule("single", stages=2, micro_batches=400)
    costs = ActionCosts.equal(2)
    exact, varied = (simulate(single, costs, spread=spread) for spread in (0.0, 0.3))
    assert varied.makespan_ms != exact.makespan_ms
    assert varied.makespan_ms == approx(exact.makespan_ms, rel=0.03)


def a_plan(*, limit: int | None = None, activations: int = 0, **setting: Any) -> Plan:
    """Two stages one after the other, with measured times."""
    hidden = TensorSpec("hidden", "float32", ("batch", 4), requires_grad=True)
    stages = connected(
        [stage_by_hand(0, ("x",), ("hidden",)), stage_by_hand(1, ("hidden",), ("loss",))],
        {"hidden": hidden},
    )
    in_flight, memory = (2, 1), StageMemory(activations=activations)
    return plan_by_hand(
        "net",
        stages=tuple(
            replace(stage, in_flight=count, memory=memory)
            for stage, count in zip(stages, in_flight, strict=True)
        ),
        sizes={"batch": 2},
        inputs=(TensorSpec("x", "float32", ("batch", 4)),),
        values=(hidden,),
        outputs="loss",
        loss="loss",
        state_keys=(),
        setting=PlanSetting(
            spread=setting.pop("spread", 0.05),
            ranks=(RankSpec("cpu", limit),) * 2,
            **setting,
        ),
    )


def ahead_of(plan: Plan, **options: Any) -> str | None:
    given = {"micro_batches": 8, "micro_batch_size": 2, "schedule": "async-1f1b"}
    given |= {"staleness": "none"}
    config = run_config(**(given | options))
    return with_ahead(config, sized_plan(plan, config), plan).ahead


def test_a_run_goes_ahead_as_the_measured_times_of_its_plan_ask() -> None:
    assert ahead_of(a_plan()) == "2x" and ahead_of(a_plan(spread=0.2)) == "4x"
    assert ahead_of(a_plan(), micro_batches=1) is None


def test_a_run_keeps_the_usual_number_where_something_else_is_asked_or_nothing_is_known() -> None:
    assert ahead_of(a_plan(spread=0.0)) is None
    assert ahead_of(a_plan(), schedule="2bw", staleness="2bw") is None
    assert ahead_of(a_plan(), schedule="1f1b", staleness=None) is None
    assert ahead_of(a_plan(), staleness_cap=1) is None
    assert ahead_of(a_plan(), ranks=1) is None
    assert ahead_of(a_plan(), ahead="1") == "1" and ahead_of(a_plan(), ahead="1x") == "1x"


def test_more_forwards_ahead_have_to_fit_into_memory() -> None:
    """Stage 0 holds two micro-batches of 50 bytes in the plan, three at 2x."""
    assert ahead_of(a_plan(limit=150, activations=100)) == "2x"
    assert ahead_of(a_plan(limit=149, activations=100)) is None
    # Micro-batches twice as large as planned hold twice as much.
    assert ahead_of(a_plan(limit=299, activations=100), micro_batch_size=4) is None
    assert ahead_of(a_plan(limit=300, activations=100), micro_batch_size=4) == "2x"
    assert ahead_of(a_plan(activations=100), device="cuda") is None
    assert ahead_of(a_plan(activations=2 * memory_bytes()), device="cpu") is None
