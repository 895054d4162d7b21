"""The holders of a frozen tied parameter never wait for each other."""

from __future__ import annotations

from pathlib import Path

from asyncpipe.runtime.executor.loading import stage_builder
from asyncpipe.runtime.freezing.blocks import Blocks
from asyncpipe.runtime.freezing.stages import freeze_stage, plan_at
from asyncpipe.runtime.plan.forecast import forecast_step, tied_stages
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.training.clipping import share_of
from asyncpipe.tests.support.models.hand_folders import write_text


def test_the_holders_of_a_frozen_parameter_step_without_each_other(tmp_path: Path) -> None:
    plan, tied = write_text(tmp_path / "text"), ("wte.weight", "head.weight")
    blocks = Blocks(
        ("wte", "inner"),
        (tied[:1], ("inner.weight", "inner.bias")),
        ((), ()),
        ("norm.weight",),
        {tied[0]: tied},
    )
    builds = [stage_builder(tmp_path / "text", spec) for spec in plan.stages]
    frozen = plan_at(plan, blocks, 1, builds)
    assert (tied_stages(plan), tied_stages(frozen)) == ([(0, 1)], [])
    first = [
        min(
            event.start_ms
            for event in forecast_step(of, "1f1b", 2).timeline.events
            if event.action.kind == "S" and event.action.stage == 1
        )
        for of in (plan, frozen)
    ]
    assert first[1] < first[0]  # the last stage steps before the first one's backward is over
    head = builds[1]()
    assert list(share_of(plan, 1, head).shared_by_name) == ["head.weight"]
    freeze_stage(head, frozen.stages[1], blocks, 1)
    assert not share_of(frozen, 1, head).shared_by_name
    (tmp_path / "text" / "plan.json").write_text(frozen.to_json())
    assert read_plan(tmp_path / "text") == frozen and '"trains"' not in plan.to_json()
