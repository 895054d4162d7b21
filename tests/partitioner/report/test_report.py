"""report.html: one page that says what the plan says, stands alone, and is well formed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.report import render_report
from asyncpipe.partitioner.report.charts import cost_bars, curves, memory_bars
from asyncpipe.runtime.formatting import write_bytes, write_gap, write_ms, write_share
from asyncpipe.runtime.plan.findings import Candidate
from asyncpipe.runtime.plan.forecast import compared_schedules, forecast_one_step, spec_bytes
from asyncpipe.runtime.plan.plan import Boundary, Plan, TensorSpec, read_plan
from asyncpipe.runtime.reports.model_strip import model_strip
from asyncpipe.runtime.reports.planned_steps import planned_steps
from asyncpipe.tests.support.oracles.html_pages import all_of, by_id, check_alone, parsed, text_of


class Tied(nn.Module):
    """A skip over two stages, and an embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        start = hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden + start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report") / "tied_4p"
    inputs = {"ids": torch.randint(32, (4, 8))}
    asyncpipe.partition(
        Tied(),
        inputs,
        stages=4,
        output=made,
        profile="analytic",
        loss="cross_entropy",
        explain=True,
    )
    return made


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return read_plan(folder)


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_the_page_is_well_formed(page):
    assert all_of(parsed(page), "h1")


def test_the_page_refers_to_nothing_outside_itself(page):
    check_alone(page, scripts=2)


def test_the_json_in_the_page_is_that_of_the_plan(page, folder, plan):
    tree = parsed(page)
    assert json.loads(by_id(tree, "plan").text) == json.loads((folder / "plan.json").read_text())
    simulated = json.loads(by_id(tree, "simulated").text)
    for step in simulated["steps"]:
        found = forecast_one_step(plan, step["schedule"], plan.setting.micro_batches)
        assert (step["step_ms"], step["idle_share"]) == (found.step_ms, found.idle_share)
    assert len(simulated["by_micro_batches"]) == len(curves(plan).samples)


def test_the_same_plan_gives_the_same_bytes(page, folder, plan):
    code = {stage.file: (folder / stage.file).read_text() for stage in plan.stages}
    assert render_report(plan, code) == render_report(plan, code) == page


def test_title_command_status_and_hash_are_shown(page, plan):
    tree = parsed(page)
    (heading,) = all_of(tree, "h1")
    assert text_of(heading) == "tied in 4 stages"
    assert plan.command in text_of(all_of(tree, "pre", "command")[0])
    (pairs,) = all_of(tree, "dl", "facts")
    names, values = (map(text_of, all_of(pairs, tag)) for tag in ("dt", "dd"))
    facts = dict(zip(names, values, strict=True))
    assert facts["graph hash"] == plan.hashes["graph"][:12]
    assert facts["method"] == plan.method
    assert facts["asyncpipe"].startswith(asyncpipe.__version__)
    status = text_of(all_of(tree, "span", "status")[0])
    assert status == (
        "✓ proven optimal" if plan.optimal else f"{write_gap(plan.gap)} above the optimum"
    )


def test_the_five_cards_hold_the_numbers_of_the_plan(page, plan):
    cards = [text_of(card) for card in all_of(parsed(page), "div", "card")]
    assert len(cards) == 5
    gain, slowest, step, idle, sent = cards
    assert f"{plan.even_split_ms / plan.bottleneck_ms:.2f}×" in gain
    assert write_ms(plan.bottleneck_ms) in slowest and write_ms(plan.lower_bound_ms) in slowest
    assert write_ms(forecast_one_step(plan, plan.setting.schedule, 8).step_ms) in step
    for number in (8, 16, 32):
        assert write_share(forecast_one_step(plan, "1f1b", number).idle_share) in idle
    most = max(spec_bytes(boundary.tensor, plan.sizes) for boundary in plan.boundaries)
    assert write_bytes(most) in sent


def test_every_stage_shows_the_costs_of_the_plan(page, plan):
    bars = [text_of(bar) for bar in all_of(parsed(page), "div", "bar")]
    count = len(plan.stages)
    times, even, memory = bars[:count], bars[count : 2 * count], bars[2 * count :]
    for stage, bar in zip(plan.stages, times, strict=True):
        assert bar.startswith(f"stage {stage.index}") and write_ms(stage.load_ms) in bar
        assert write_ms(stage.forward_ms).removesuffix(" ms") in bar
    for pair, bar in zip(plan.even_split, even, strict=True):
        assert write_ms(sum(pair)) in bar
    for stage, bar in zip(plan.stages, memory, strict=True):
        assert bar.startswith(f"rank {stage.index}") and write_bytes(stage.peak_bytes) in bar


def test_bars_are_as_long_as_what_they_stand_for(plan):
    costs = cost_bars(plan)
    longest = max(plan.even_split_ms, *(stage.load_ms for stage in plan.stages))
    assert costs.line == pytest.approx(100 * plan.lower_bound_ms / longest)
    for stage, row in zip(plan.stages, costs.rows, strict=True):
        lengths = {part.kind: part.percent for part in row.segments}
        assert lengths["forward"] == pytest.approx(100 * stage.forward_ms / longest)
        assert sum(lengths.values()) == pytest.approx(100 * stage.load_ms / longest)
    memory = memory_bars(plan)
    fullest = max(stage.peak_bytes for stage in plan.stages)
    for stage, row in zip(plan.stages, memory.rows, strict=True):
        parts = {part.kind: part.percent for part in row.segments}
        assert parts["optimizer"] == pytest.approx(100 * stage.memory.optimizer / fullest)
        assert sum(parts.values()) == pytest.approx(100 * stage.peak_bytes / fullest)


def limited(plan: Plan, limit: int) -> Plan:
    ranks = tuple(replace(rank, memory_bytes=limit) for rank in plan.setting.ranks)
    return replace(plan, setting=replace(plan.setting, ranks=ranks, memory_limit=limit))


def test_what_does_not_fit_is_shown_as_overflow_and_nothing_else_is(plan):
    peaks = [stage.peak_bytes for stage in plan.stages]
    limit = sorted(peaks)[-2]
    rows = memory_bars(limited(plan, limit)).rows
    over = [row for row in rows if row.over_from is not None]
    assert [row.label for row in over] == [f"rank {peaks.index(max(peaks))}"]
    assert over[0].over_from + over[0].over_percent == pytest.approx(100)
    assert f"{write_bytes(max(peaks) - limit)} over {write_bytes(limit)}" in over[0].title
    tree = parsed(render_report(limited(plan, limit), {}))
    assert len(all_of(tree, "span", "over")) == 1
    assert text_of(all_of(tree, "span", "warn")[0]).startswith("✗")
    assert len(all_of(tree, "span", "device")) == len(rows)
    roomy = parsed(render_report(limited(plan, max(peaks)), {}))
    assert not all_of(roomy, "span", "over") and not all_of(roomy, "span", "warn")


def test_a_limit_far_away_is_said_and_does_not_shrink_the_bars(plan):
    bars = memory_bars(limited(plan, 80 * 2**30))
    assert bars.note == "The limit of 80.0 GiB is beyond the scale."
    assert max(sum(part.percent for part in row.segments) for row in bars.rows) == pytest.approx(
        100
    )
    assert all(row.limit is None and "of 80.0 GiB" in row.title for row in bars.rows)


def test_stages_of_one_rank_share_a_bar(plan):
    first, *others, last = plan.stages
    shared = replace(plan, stages=(first, *others, replace(last, ranks=(0,))))
    row = memory_bars(shared).rows[0]
    transient = max(first.memory.transient, last.memory.transient)
    without = first.peak_bytes - first.memory.transient + last.peak_bytes - last.memory.transient
    assert row.value == write_bytes(without + transient)


def test_replicas_of_a_stage_share_its_time(plan):
    first, *others = plan.stages
    load_ms = (first.forward_ms + first.backward_ms) / 2 + 0.25
    pair = replace(first, ranks=(0, 1), load_ms=load_ms)
    shared = replace(plan, stages=(pair, *others), setting=replace(plan.setting, ranks=()))
    row = cost_bars(shared).rows[0]
    lengths = {part.kind: part.percent for part in row.segments}
    assert lengths["transfers"] / lengths["forward"] == pytest.approx(0.5 / first.forward_ms)
    alone = replace(shared, stages=(replace(pair, sends=()),), shared=())
    step = forecast_one_step(alone, "async-1f1b", 8)
    assert step.step_ms == pytest.approx(8 * load_ms + first.exchange_ms)
    assert model_strip(shared).stages[0].title.startswith("stage 0 × 2 ranks")


def test_every_schedule_has_a_tab_and_one_is_open(page, plan):
    tree = parsed(page)
    tabs = all_of(tree, "input")
    assert [tab.get("id") for tab in tabs] == [f"tab-{name}" for name in compared_schedules(plan)]
    assert [tab.get("id") for tab in tabs if "checked" in tab.attrib] == [
        f"tab-{plan.setting.schedule}"
    ]
    labels = {label.get("for") for label in all_of(tree, "label")}
    style = all_of(tree, "style")[0].text
    for name in compared_schedules(plan):
        assert f"tab-{name}" in labels
        assert f"#tab-{name}:checked ~ #panel-{name}" in style
        assert all_of(by_id(tree, f"panel-{name}"), "svg")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_drawn_step_has_every_action_once_and_in_its_place(plan, schedule):
    step = next(one for one in planned_steps(plan) if one.schedule == schedule)
    count = plan.setting.micro_batches
    for row in step.drawing.rows:
        for kind in "FB":
            boxes = [box for box in step.drawing.boxes if box.kind == kind and box.y == row.y]
            assert [box.label for box in boxes if box.label] == [
                str(number) for number, box in enumerate(boxes) if box.label
            ]
            assert len(boxes) == count
    in_rows = sorted(
        (box for box in step.drawing.boxes if box.kind != "S"), key=lambda b: (b.y, b.x)
    )
    for one, other in zip(in_rows, in_rows[1:], strict=False):
        assert one.y < other.y or one.x + one.width <= other.x + 0.05
    assert max(box.x + box.width for box in step.drawing.boxes) == pytest.approx(
        step.drawing.end_x, abs=3.1
    )


def test_a_drawn_asynchronous_step_is_busy_for_what_is_not_idle(plan):
    step = next(one for one in planned_steps(plan) if one.schedule == "async-1f1b")
    least_ms = max(
        plan.setting.micro_batches
        * (stage.forward_ms + stage.backward_ms + stage.forward_talk_ms + stage.backward_talk_ms)
        + stage.exchange_ms
        for stage in plan.stages
    )
    assert least_ms * (1 - 1e-9) <= step.step_ms <= 1.1 * least_ms
    busy = sum(box.width for box in step.drawing.boxes)
    width = step.drawing.end_x - step.drawing.left
    assert 1 - busy / (width * len(step.drawing.rows)) == pytest.approx(step.idle_share, abs=0.02)
    assert min(box.x for box in step.drawing.boxes) >= step.drawing.left
    assert max(box.x + box.width for box in step.drawing.boxes) <= step.drawing.end_x + 3.1


def test_curves_of_2bw_leave_out_what_it_does_not_support(plan):
    of_2bw = replace(plan, setting=replace(plan.setting, schedule="2bw", micro_batches=8))
    assert curves(of_2bw).schedules == ("1f1b", "async-1f1b")


def test_curves_show_what_the_simulator_finds(page, plan):
    found = curves(plan)
    for sample in found.samples:
        step = forecast_one_step(plan, sample.schedule, sample.micro_batches)
        assert (sample.step_ms, sample.idle_share) == (step.step_ms, step.idle_share)
    for chart in found.charts:
        for line in chart.lines:
            assert all(0 <= point.y <= chart.bottom for point in line.points)
    idle = found.charts[0].lines[0].points
    assert idle[0].y < idle[-1].y  # more micro-batches, less idle, further down
    cells = {text_of(cell) for cell in all_of(parsed(page), "td")}
    assert {write_ms(sample.step_ms) for sample in found.samples} <= cells


def test_every_stage_has_its_modules_tensors_and_code(page, folder, plan):
    tree = parsed(page)
    for stage in plan.stages:
        details = by_id(tree, f"stage-{stage.index}")
        cells = [text_of(cell) for cell in all_of(details, "td")]
        for part in stage.parts:
            assert part.name in cells and f"{part.forward_ms:.2f}" in cells
        assert sum(part.forward_ms for part in stage.parts) == pytest.approx(stage.forward_ms)
        assert sum(part.backward_ms for part in stage.parts) == pytest.approx(stage.backward_ms)
        for name in (*stage.inputs, *stage.outputs):
            assert name in cells
        code = all_of(details, "pre", "code")[0]
        assert "".join(code.itertext()) == (folder / stage.file).read_text()
        assert {"k", "s", "d"} <= {one.get("class") for one in all_of(code, "i")}


def test_the_explanation_of_the_plan_is_on_the_page(page, plan):
    assert {finding.topic for finding in plan.findings} == {"cut", "bound", "change"}
    text = text_of(all_of(parsed(page), "main")[0])
    for finding in plan.findings:
        assert finding.text in text


def test_candidates_have_a_table_where_there_are_some(plan):
    assert "<h2>Other plans</h2>" not in render_report(replace(plan, candidates=()), {})
    metis = Candidate("metis", 4, 12.5, 100.0, 3 << 20, 5 << 10, 0.25, 1.0, "made acyclic")
    tree = parsed(render_report(replace(plan, candidates=(metis,)), {}))
    cells = [text_of(cell) for cell in all_of(tree, "td")]
    start = cells.index("metis")
    assert cells[start : start + 8] == [
        *("metis", "4", "12.50 ms", "100.0 ms", "3.0 MiB", "5.0 KiB", "25%", "made acyclic")
    ]


def test_light_dark_and_print_each_have_their_style(page):
    style = all_of(parsed(page), "style")[0].text
    assert "@media (prefers-color-scheme: dark)" in style and "@media print" in style
    used = set(re.findall(r"var\((--[\w-]+)\)", style))
    light, dark = style.split("prefers-color-scheme: dark")
    defined = set(re.findall(r"(--[\w-]+):", light))
    assert used <= defined
    assert {"--ink", "--back", "--forward", "--line"} <= set(re.findall(r"(--[\w-]+):", dark))


def test_whatever_may_be_wide_scrolls_in_its_own_box(page, plan):
    tree = parsed(page)
    parents = {child: parent for parent in tree.iter() for child in parent}
    drawings = [svg for svg in all_of(tree, "svg") if svg.get("aria-hidden") is None]
    assert len(drawings) == 1 + 2 * len(compared_schedules(plan)) + 2
    for element in (*all_of(tree, "table"), *drawings):
        assert parents[element].get("class") == "wide"


def test_names_from_outside_cannot_leave_their_place(plan):
    name = "</script></style><b id=out>&"
    spec = TensorSpec(name, "float32", ("batch", 4))
    first, *others = plan.stages
    stages = (replace(first, modules=(name,), sends=(Boundary(spec, 0, (1,)),)), *others)
    hostile = replace(plan, name=name, command=name, notes=(name,), stages=stages)
    tree = parsed(render_report(hostile, {first.file: f'"""{name}"""\n'}))
    assert not [one for one in tree.iter() if one.get("id") == "out"]
    assert json.loads(by_id(tree, "plan").text)["command"] == name
    assert text_of(all_of(tree, "h1")[0]).startswith("</script></style><b id=out>&")


def test_one_stage_has_a_page_too(tmp_path):
    asyncpipe.partition(
        Tied(),
        {"ids": torch.randint(32, (4, 8))},
        stages=1,
        output=tmp_path / "one",
        profile="analytic",
        loss="cross_entropy",
    )
    tree = parsed((tmp_path / "one" / "report.html").read_text())
    assert text_of(all_of(tree, "h1")[0]) == "tied in 1 stage"
    assert not all_of(tree, "path", "skip") and len(all_of(tree, "div", "card")) == 5
