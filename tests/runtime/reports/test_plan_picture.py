"""The picture of a plan: its modules as a strip, and the memory of each rank over a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asyncpipe.runtime.formatting import write_bytes, write_ms
from asyncpipe.runtime.plan.forecast import forecast_one_step, spec_bytes, step_volumes
from asyncpipe.runtime.plan.plan import Boundary, Plan, read_plan
from asyncpipe.runtime.reports.gantt import Window
from asyncpipe.runtime.reports.memory_over_time import rank_memory_over_time
from asyncpipe.runtime.reports.model_strip import STRIP_WIDTH, model_strip
from asyncpipe.runtime.reports.picture import picture
from asyncpipe.runtime.reports.planned_steps import planned_steps
from asyncpipe.tests.support.oracles.html_pages import all_of, text_of

ROOT = Path(__file__).parent.parent.parent.parent
GPT2 = ROOT / "docs" / "images" / "gpt2_4p"
MLP = ROOT / "generated_models" / "residual_mlp_2p"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan(GPT2)


def test_modules_stand_in_order_and_are_as_wide_as_their_times(plan: Plan) -> None:
    strip = model_strip(plan)
    boxes = [box for stage in strip.stages for box in stage.modules]
    parts = [part for stage in plan.stages for part in stage.parts]
    for one, other in zip(boxes, boxes[1:], strict=False):
        assert one.x + one.width == pytest.approx(other.x, abs=0.02)
    assert boxes[0].x >= 0 and boxes[-1].x + boxes[-1].width <= STRIP_WIDTH
    least = min(box.width for box in boxes)
    total_ms = sum(part.forward_ms + part.backward_ms for part in parts)
    room = sum(box.width for box in boxes) - least * len(boxes)
    for box, part in zip(boxes, parts, strict=True):
        share = (part.forward_ms + part.backward_ms) / total_ms
        assert box.width == pytest.approx(least + room * share, abs=0.5)
        assert box.label in ("", part.name, part.name.removeprefix("transformer."))


def test_cuts_have_the_bytes_of_their_tensors(plan: Plan) -> None:
    strip = model_strip(plan)
    assert len(strip.cuts) == len(plan.stages) - 1
    for stage, cut in enumerate(strip.cuts):
        size = sum(
            spec_bytes(boundary.tensor, plan.sizes)
            for boundary in plan.stages[stage].sends
            if stage + 1 in boundary.targets
        )
        assert cut.label == write_bytes(size)
        assert cut.x == strip.stages[stage + 1].x


def test_skips_are_above_and_tied_weights_below(plan: Plan) -> None:
    first, *others = plan.stages
    skip = Boundary(plan.boundaries[0].tensor, 0, (1, 2, 3))
    strip = model_strip(replace(plan, stages=(replace(first, sends=(skip,)), *others)))
    kinds = [arc.kind for arc in strip.arcs]
    assert kinds.count("skip") == 2 and kinds.count("tied") == 1
    assert all(0 < arc.y < strip.top for arc in strip.arcs if arc.kind == "skip")
    assert all(strip.bottom < arc.y <= strip.height for arc in strip.arcs if arc.kind == "tied")
    assert len({arc.y for arc in strip.arcs if arc.kind == "skip"}) == 2
    assert "lm_head.weight" in next(arc.title for arc in strip.arcs if arc.kind == "tied")
    assert [stage.is_slowest for stage in strip.stages] == [False, False, False, True]


def test_a_module_names_its_slowest_operation_and_the_line_of_the_author() -> None:
    first, last = model_strip(read_plan(MLP)).stages
    block = next(box for box in first.modules if box.title.startswith("blocks.0 "))
    source = (ROOT / "examples" / "residual_mlp.py").read_text().splitlines()
    _, _, place = block.title.rpartition("residual_mlp.py:")
    assert "operations, the slowest Linear " in block.title
    assert "self.up" in source[int(place.rstrip(")")) - 1]
    assert "add (residual_mlp.py:" in " ".join(box.title for box in last.modules)


def test_plans_made_before_parts_had_operations_are_drawn(plan: Plan, tmp_path: Path) -> None:
    raw = json.loads(plan.to_json())
    for stage in raw["stages"]:
        for part in stage["parts"]:
            del part["operations"], part["slowest"]
    raw["stages"][1]["parts"] = []
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    old = model_strip(read_plan(tmp_path))
    assert [stage.width for stage in old.stages] == pytest.approx(
        [stage.width for stage in model_strip(plan).stages], abs=12
    )
    (whole,) = old.stages[1].modules
    assert whole.title.startswith("transformer.h.2-6 in stage 1: forward ")
    assert "operations, the slowest" not in old.stages[0].modules[-1].title


def test_a_plan_without_times_has_modules_of_equal_width(plan: Plan) -> None:
    stages = tuple(
        replace(
            stage,
            parts=tuple(replace(part, forward_ms=0.0, backward_ms=0.0) for part in stage.parts),
        )
        for stage in plan.stages
    )
    boxes = [
        box for stage in model_strip(replace(plan, stages=stages)).stages for box in stage.modules
    ]
    assert len({round(box.width, 1) for box in boxes}) == 1
    assert boxes[-1].x + boxes[-1].width == pytest.approx(STRIP_WIDTH - 4, abs=0.1)


def test_labels_of_many_narrow_stages_do_not_overlap(plan: Plan) -> None:
    one = plan.stages[1]
    tensor = plan.boundaries[0].tensor
    many = tuple(
        replace(one, index=at, sends=(Boundary(tensor, at, (at + 1,)),) if at < 63 else ())
        for at in range(64)
    )
    strip = model_strip(replace(plan, stages=many, shared=()))
    for y in {cut.label_y for cut in strip.cuts}:
        row = sorted(cut.label_x for cut in strip.cuts if cut.label_y == y)
        assert all(other - one >= 50 for one, other in zip(row, row[1:], strict=False))
    assert max(cut.label_y for cut in strip.cuts) < strip.height
    for stage in strip.stages:
        assert all(6 * len(line) <= stage.width for line in stage.lines)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async-1f1b"])
def test_memory_at_each_moment_is_what_is_in_flight_then(plan: Plan, schedule: str) -> None:
    step = forecast_one_step(plan, schedule, 8)
    window = Window(step.timeline, step.start_ms, step.end_ms)
    for rank, stage in enumerate(plan.stages):
        events = step.timeline.of_rank(rank)
        moments = list(rank_memory_over_time(plan, events, window))
        ends = [moment.start_ms for moment in moments[1:]] + [step.end_ms]
        assert moments[0].start_ms == step.start_ms
        for moment, end_ms in zip(moments, ends, strict=True):
            middle_ms = (moment.start_ms + end_ms) / 2
            begun = sum(e.action.kind == "F" and e.start_ms <= middle_ms for e in events)
            ended = sum(e.action.kind == "B" and e.end_ms <= middle_ms for e in events)
            busy = any(e.start_ms <= middle_ms < e.end_ms for e in events)
            assert moment.sizes["activations"] == (begun - ended) * stage.activation_bytes
            assert moment.sizes["transient"] == busy * stage.memory.transient
            assert moment.sizes["parameters"] == stage.memory.parameters


def test_the_peak_over_the_planned_step_is_that_of_the_plan(plan: Plan) -> None:
    (step,) = planned_steps(plan, (plan.setting.schedule,))
    for stage, row in zip(plan.stages, step.memory.rows, strict=True):
        assert row.peak_bytes == stage.peak_bytes
        assert row.peak == write_bytes(stage.peak_bytes)


def test_a_recomputed_forward_is_in_memory_during_backward_only(plan: Plan) -> None:
    first, *others = plan.stages
    kept, again = 1000, first.activation_bytes
    memory = replace(first.memory, activations=first.in_flight * kept + again)
    recomputed = replace(plan, stages=(replace(first, recompute=True, memory=memory), *others))
    step = forecast_one_step(recomputed, "1f1b", 8)
    events = step.timeline.of_rank(0)
    moments = rank_memory_over_time(
        recomputed, events, Window(step.timeline, step.start_ms, step.end_ms)
    )
    sizes = {moment.sizes["activations"] for moment in moments}
    assert max(sizes) == first.in_flight * kept + again
    assert {size % kept for size in sizes} <= {0, again % kept}


def test_volumes_count_each_tensor_and_its_gradient(plan: Plan) -> None:
    size = 8 * spec_bytes(plan.boundaries[0].tensor, plan.sizes)
    assert step_volumes(plan) == {
        pair: size for at in range(3) for pair in ((at, at + 1), (at + 1, at))
    }
    first, *others = plan.stages
    frozen = replace(first.sends[0], tensor=replace(first.sends[0].tensor, requires_grad=False))
    without = replace(plan, stages=(replace(first, sends=(frozen,)), *others))
    assert (1, 0) not in step_volumes(without) and (0, 1) in step_volumes(without)


def test_the_picture_has_the_stages_the_step_and_the_memory(plan: Plan) -> None:
    tree = ElementTree.fromstring(picture(plan))
    texts = [text_of(one) for one in all_of(tree, "text")]
    for stage in plan.stages:
        assert f"stage {stage.index}" in texts
        assert any(text.startswith(write_ms(stage.load_ms)) for text in texts)
        assert f"peak {write_bytes(stage.peak_bytes)}" in texts
    assert {"lm_head", "h.2", "192.0 KiB"} <= set(texts)
    assert any(text.endswith("tied weights") for text in texts)
    assert picture(plan) == picture(plan)


def test_names_from_outside_stay_text_in_the_picture(plan: Plan) -> None:
    name = "</title></svg><b id=out>&\x1b\u202e"
    first, *others = plan.stages
    part = replace(first.parts[0], name=name, slowest=name)
    stages = (replace(first, modules=(name,), parts=(part, *first.parts[1:])), *others)
    tree = ElementTree.fromstring(picture(replace(plan, name=name, stages=stages)))
    assert not [one for one in tree.iter() if one.get("id") == "out"]
    assert "\\u202e" in text_of(all_of(tree, "title")[0])
