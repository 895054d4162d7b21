"""The transfers of a run match their forecast: dtypes and sizes, and stages that step together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncpipe.runtime.config.segments import make_segment, waiting_stages
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.executor.mailbox import plan_channels
from asyncpipe.runtime.executor.precision import BoundaryDtypes
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.forecast import Forecast, forecast_step
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.training.run_summary import forecast_run, with_transfers_of_run
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.run_configs import run_config

HALF = BoundaryDtypes(crossing=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("generated") / "case_3p"
    return cut(CASES["gpt2"], 3, target, schedule="1f1b", micro_batches=4)


def slow(plan: Plan) -> Plan:
    """The plan with transfers that take a second for what they carry, and a tenth for each."""
    setting = replace(plan.setting, latency_ms=100.0)
    stages = []
    for stage in plan.stages:
        messages = [*stage.sends, *stage.receives]
        back = [boundary for boundary in messages if boundary.tensor.requires_grad]
        stages.append(
            replace(
                stage,
                forward_talk_ms=1000.0 + 100.0 * len(messages),
                backward_talk_ms=1000.0 + 100.0 * len(back),
            )
        )
    return replace(plan, stages=tuple(stages), setting=setting)


def crossing_bytes(plan: Plan, stage: int, dtypes: BoundaryDtypes) -> int:
    """The bytes that the channels of a run carry into and out of a stage in a forward."""
    channels = plan_channels(
        plan,
        range(len(plan.stages)),
        sizes=plan.sizes,
        shared_specs={},
        state_bytes=0,
        dtypes=dtypes,
    )
    return sum(
        channel.dtype.itemsize * torch.Size(channel.shape).numel()
        for channel in channels
        if channel.kind == "activation" and stage in (channel.source, channel.target)
    )


def test_transfers_take_what_is_left_of_their_bytes(folder: Path) -> None:
    plan = slow(read_plan(folder))
    found = with_transfers_of_run(plan, plan, HALF)
    for stage, before in zip(found.stages, plan.stages, strict=True):
        messages = len(before.sends) + len(before.receives)
        share = (stage.forward_talk_ms - 100.0 * messages) / 1000.0
        carried = crossing_bytes(plan, stage.index, HALF)
        assert share == pytest.approx(carried / crossing_bytes(plan, stage.index, BoundaryDtypes()))
        assert share == pytest.approx(0.5)
    assert with_transfers_of_run(plan, plan, BoundaryDtypes()) == plan


def test_transfers_grow_with_the_sizes_of_a_run(folder: Path) -> None:
    plan = slow(read_plan(folder))
    larger = replace(plan, sizes={**plan.sizes, "batch": 3 * plan.sizes["batch"]})
    found = with_transfers_of_run(larger, plan, BoundaryDtypes())
    for stage, before in zip(found.stages, plan.stages, strict=True):
        assert stage.forward_talk_ms == pytest.approx(before.forward_talk_ms + 2000.0)


def foreseen(folder: Path, dtypes: BoundaryDtypes, **options: object) -> Forecast:
    given = {"schedule": "1f1b", "micro_batches": 4, "steps": 2, "clip": 0.0} | options
    job = make_job(Settings(folder=str(folder), data="random", **given))  # type: ignore[arg-type]
    schedule = make_segment(job.plan, job.config, steps=1)
    plan = replace(slow(job.plan), shared=())  # of tied weights ranks wait anyway
    found = forecast_run(plan, job.planned, job.config, 16, schedule, dtypes)
    assert found is not None
    return found


def test_a_forecast_knows_the_dtype_of_boundaries(folder: Path) -> None:
    as_planned, half = (foreseen(folder, dtypes) for dtypes in (BoundaryDtypes(), HALF))
    assert half.step_ms < 0.7 * as_planned.step_ms


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_replicas_sum_their_gradients_in_every_step_of_the_forecast(
    folder: Path, schedule: str
) -> None:
    plan = slow(read_plan(folder))
    carried = (crossing_bytes(plan, stage, BoundaryDtypes()) for stage in range(3))
    byte_ms = 2000.0 / (2 * min(carried))  # the slowest of the transfers, forward and back

    def step_ms(replicas: int, summing_ms: tuple[float, ...] = (0.0,) * 3) -> float:
        return forecast_step(plan, schedule, 4, replicas=replicas, step_ms=summing_ms).step_ms

    for replicas in (2, 4):
        rings = tuple(
            2 * (replicas - 1) * (100.0 + byte_ms * stage.memory.gradients / replicas)
            for stage in plan.stages
        )
        assert step_ms(1) < step_ms(replicas) == pytest.approx(step_ms(1, rings))


def test_a_stage_that_clips_with_others_steps_later_in_the_forecast(folder: Path) -> None:
    plan = replace(slow(read_plan(folder)), shared=())

    def step_ms(clip: float) -> float:
        settings = run_config(schedule="1f1b", clip=clip)
        return forecast_step(
            plan,
            "1f1b",
            4,
            step_ms=(0.0, 0.0, 5000.0),  # the last stage has its gradients first
            shared_stages=waiting_stages(plan, settings),
        ).step_ms

    assert step_ms(1.0) > step_ms(0.0) + 1000.0


def test_ranks_that_clip_together_wait_for_each_other(folder: Path) -> None:
    plan = read_plan(folder)
    for schedule, clip, all_wait in (("1f1b", 1.0, True), ("1f1b", 0.0, False)):
        settings = run_config(schedule=schedule, clip=clip)
        assert (waiting_stages(plan, settings) == ((0, 1, 2),)) == all_wait
    asynchronous = run_config(schedule="async-1f1b", clip=1.0)
    assert waiting_stages(plan, asynchronous) != ((0, 1, 2),)
