"""The report page of a run: everything that the run recorded until its end, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.formatting import write_ms
from asyncpipe.runtime.monitoring.records import keeps_loss
from asyncpipe.runtime.monitoring.run_files import METRICS, RunRecords, read_run
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.reports.charts import (
    HEIGHT,
    LEFT,
    WIDTH,
    Series,
    chart,
    ticks_around,
    ticks_up_to,
)
from asyncpipe.runtime.reports.comparison import as_json, compare, render_comparison
from asyncpipe.runtime.reports.measures import (
    IDLE_PARTS,
    after_first_step,
    other_series,
    rank_idle,
    rank_memory,
    stage_times,
    status_of,
    step_times,
    summary_of,
)
from asyncpipe.runtime.reports.page import REPORT, render_run, reported
from asyncpipe.runtime.reports.run_drawings import loss_charts, other_charts
from asyncpipe.tests.support.models.hand_folders import FAILING, write_mlp
from asyncpipe.tests.support.oracles.html_pages import all_of, by_id, check_alone, parsed, text_of
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

ROOT = Path(__file__).parent.parent.parent.parent
MODEL = ROOT / "generated_models" / "residual_mlp_2p"
DATA = f"{ROOT / 'examples' / 'residual_mlp.py'}:data"
M = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on two ranks: `sync`, traced, and `async`."""
    folder = tmp_path_factory.mktemp("runs")
    same: dict[str, Any] = {"folder": str(MODEL), "data": DATA, "threads": 1, "micro_batches": M}
    traced = {"steps": 8, "log_every": 2, "trace": "2", "eval_every": 4}
    run(Settings(**same, **traced, output=str(folder / "sync")), FACTORY)
    late = {"steps": 12, "log_every": 1, "schedule": "async-1f1b", "lr": 0.002}
    run(Settings(**same, **late, output=str(folder / "async")), FACTORY)
    return folder


@pytest.fixture(params=["sync", "async"])
def ran(request: pytest.FixtureRequest, folder: Path) -> RunRecords:
    return read_run(folder / request.param)


def write_run(folder: Path, *records: dict[str, Any], config: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.toml").write_text(config)
    return folder


def steps(
    count: int, loss: Any = lambda step: 1 / step, *, ms: float = 100.0, **more: Any
) -> Iterator[dict[str, Any]]:
    for step in range(1, count + 1):
        yield {
            "event": "step",
            "step": step,
            "loss": loss(step),
            "elapsed_s": step * ms / 1000,
            "step_ms": ms,
            "tok_per_s": 1e5 / ms,
        } | more


def test_every_run_leaves_its_page_which_stands_alone(folder: Path) -> None:
    for name, files in (("sync", frozenset({"trace.json"})), ("async", frozenset[str]())):
        page = (folder / name / REPORT).read_text()
        check_alone(page, scripts=1, files=files)
        assert page == render_run(read_run(folder / name))
        tree = parsed(page)
        assert text_of(all_of(tree, "h1")[0]).endswith(name)
        assert [text_of(one) for one in all_of(tree, "span", "optimal")] == [
            f"✓ {read_run(folder / name).last_step} steps"
        ]
    links = [one.get("href") for one in all_of(parsed((folder / "sync" / REPORT).read_text()), "a")]
    assert links == ["trace.json"] and (folder / "sync" / links[0]).is_file()
    assert not (folder / "async" / "trace.json").exists()


def test_predictions_are_the_plans_and_stand_beside_what_was_measured(ran: RunRecords) -> None:
    plan = read_plan(MODEL)
    for stage, times in zip(plan.stages, stage_times(ran), strict=True):
        assert times.forward.predicted == pytest.approx(stage.forward_ms)
        assert times.backward.predicted == pytest.approx(stage.backward_ms)
        assert times.forward.measured > 0 and times.backward.measured > 0 and times.optimizer_ms > 0
    copies = (1, 0) if ran.start["methods"] else (0, 0)  # the plan is for live weights
    for stage, kept, row in zip(plan.stages, copies, rank_memory(ran), strict=True):
        assert row.stages.predicted == stage.peak_bytes + kept * stage.gradient_bytes
        assert 0 < row.stages.measured < row.process_bytes
    cells = [text_of(cell) for cell in all_of(parsed(render_run(ran)), "td")]
    for times in stage_times(ran):
        start = cells.index(f"stage {times.stage}")
        assert cells[start + 1 : start + 3] == [
            write_ms(times.forward.predicted),
            write_ms(times.forward.measured),
        ]
    assert step_times(ran).measured == ran.end["step_ms"]


def test_what_actions_took_adds_up_to_what_ranks_computed(folder: Path) -> None:
    """`action_ms` times how many there are in a step is the busy part of the rank's own time. That
    is not in the record, but the longest of the ranks' times is, at each step."""
    for record in read_run(folder / "sync").steps:
        own_ms = []
        for rank in range(2):
            action_ms = {kind: times[rank] for kind, times in record["action_ms"].items()}
            busy_ms = M * (action_ms["F"] + action_ms["B"]) + action_ms["S"]
            own_ms.append(busy_ms / record["busy_shares"][rank])
        assert max(own_ms) <= 1.05 * record["step_ms"]
        assert sum(own_ms) >= 0.95 * record["step_ms"]


def test_one_measured_step_is_drawn_above_the_simulated_one(ran: RunRecords) -> None:
    drawn = ran.drawn
    assert drawn is not None
    for timeline in (drawn.measured, drawn.simulated):
        assert timeline.ranks == 2
        for rank in range(2):
            events = timeline.of_rank(rank)
            count = {
                kind: len({e.action for e in events if e.action.kind == kind}) for kind in "FBS"
            }
            # An asynchronous rank may be a micro-batch ahead or behind where the step is cut out.
            assert abs(count["F"] - M) <= 1 and abs(count["B"] - M) <= 1 and count["S"] >= 1
            ordered = sorted(events, key=lambda event: event.start_ms)
            for one, other in zip(ordered, ordered[1:], strict=False):
                assert one.end_ms <= other.start_ms + 0.002
    page = parsed(render_run(ran))
    captions = [text_of(one).partition(":")[0] for one in all_of(page, "figcaption")]
    assert captions[1:3] == ["Measured", "Predicted"]
    assert len(all_of(page, "path", "activations")) == 2  # of each rank
    assert {"stage 0", "stage 1"} <= {text_of(one) for one in all_of(page, "text", "strong")}


def test_the_idle_bars_are_the_split_of_the_run(ran: RunRecords) -> None:
    for rank, idle in enumerate(rank_idle(ran)):
        assert idle.parts == pytest.approx(ran.end["idle_parts_by_rank"][rank])
    bars = [text_of(one) for one in all_of(parsed(render_run(ran)), "div", "bar")]
    assert [bar.split(" ")[:2] for bar in bars] == [["rank", "0"], ["rank", "1"]] or len(bars) == 2


def test_delays_and_whatever_numbers_methods_add_have_their_charts(
    folder: Path, tmp_path: Path
) -> None:
    late = read_run(folder / "async")
    assert {"delay_mean", "delay_max"} <= other_series(late).keys()
    headings = {text_of(one) for one in all_of(parsed(render_run(late)), "h3")}
    assert "Mean delay of the weights in steps" in headings
    made = read_run(write_run(tmp_path / "new", *steps(5, gap=0.5, gap_by_stage=[1.0, 2.0])))
    assert [len(other_series(made)[name]) for name in ("gap", "gap_by_stage")] == [1, 2]
    assert "delay_mean" not in other_series(made)
    assert other_series(read_run(write_run(tmp_path / "plain", *steps(5)))) == {}


def test_configuration_environment_and_facts_are_told(folder: Path) -> None:
    page = parsed((folder / "async" / REPORT).read_text())
    told = [text_of(one) for one in all_of(page, "dt")]
    texts = [text_of(one) for one in all_of(page, "dd")]
    pairs = dict(zip(told, texts, strict=True))
    assert pairs["schedule"] == "async-1f1b" and pairs["steps"] == "12" and pairs["lr"] == "0.002"
    assert {"torch", "python", "asyncpipe", "cpu", "host", "started"} <= pairs.keys()
    assert "2 processes" in pairs["processes"]
    block = json.loads(by_id(page, "run").text or "")
    assert block == json.loads(json.dumps(summary_of(read_run(folder / "async"))))


def test_a_run_that_fails_leaves_a_page_that_says_why(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    (tmp_path / "own.py").write_text(FAILING)
    given = {
        "folder": str(tmp_path / "mlp"),
        "output": str(tmp_path / "run"),
        "criterion": f"{tmp_path / 'own.py'}:criterion",
        "steps": 50,
        "micro_batches": 4,
        "log_every": 1,
        "threads": 1,
    }
    with pytest.raises(AsyncPipeError) as failed:
        run(Settings(**given), FACTORY)
    ran = read_run(tmp_path / "run")
    assert ran.failure == failed.value.what and not ran.end
    assert status_of(ran) in ("ended after step 1 of 50", "ended after step 2 of 50")
    page = parsed((tmp_path / "run" / REPORT).read_text())
    assert failed.value.what in [text_of(one) for one in all_of(page, "p")]
    assert all_of(page, "path", "line0") and "evaluation" not in text_of(page)


def test_a_page_is_made_of_whatever_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not contain a run"):
        read_run(tmp_path)
    for number, records in enumerate(([], [{"event": "start"}], list(steps(1)), list(steps(3)))):
        made = read_run(write_run(tmp_path / str(number), *records))
        check_alone(render_run(made), scripts=1)
        assert status_of(made) == f"not at its end: step {made.last_step}"


@pytest.mark.parametrize("drawn", [[], 7, [[0, 0, "F", 0, 0.0]], [[0, 0, "F", 0, 0.0, math.inf]]])
def test_a_timeline_that_is_none_is_not_drawn(tmp_path: Path, drawn: Any) -> None:
    good = [[0, 0, "F", 0, 0.0, 1.0]]
    record = {"event": "timelines", "simulated": good, "measured": drawn}
    assert read_run(write_run(tmp_path, *steps(2), record)).drawn is None
    assert read_run(write_run(tmp_path, record | {"measured": good})).drawn is not None


def test_a_line_that_was_cut_off_is_counted_and_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, *steps(3)) / METRICS
    path.write_text(path.read_text()[:-30])
    made = read_run(tmp_path)
    assert (made.last_step, made.damaged) == (2, 1)
    assert "1 line of metrics.jsonl could not be read" in render_run(made)
    with pytest.raises(KeyboardInterrupt), reported(tmp_path):
        raise KeyboardInterrupt
    made = read_run(tmp_path)
    assert (made.last_step, made.damaged, made.failure) == (2, 1, "interrupted")


def test_steps_made_again_after_a_restart_stand_for_those_before(tmp_path: Path) -> None:
    first = {"event": "start", "time_s": 1000.0}
    again = {"event": "start", "time_s": 1010.0}
    note = {"event": "note", "about": "checkpoint", "text": "step 3", "step": 3, "time_s": 1000.3}
    later = [record | {"loss": 7.0} for record in steps(6) if record["step"] > 3]
    resumed = {"event": "note", "about": "resumed", "text": "after step 3", "time_s": 1011.0}
    made = read_run(write_run(tmp_path, first, *steps(5), note, again, resumed, *later))
    assert [record["step"] for record in made.steps] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in made.steps][3:] == [7.0] * 3
    assert [record["elapsed_s"] for record in made.steps] == sorted(
        record["elapsed_s"] for record in steps(6)
    )
    found = [(one.kind, one.step, round(one.elapsed_s, 3), one.text) for one in made.events]
    assert found == [
        ("checkpoint", 3, 0.3, "step 3"),
        ("started again", 5, 10.0, ""),
        ("resumed", 5, 11.0, "after step 3"),
    ]
    cells = [text_of(cell) for cell in all_of(parsed(render_run(made)), "td")]
    assert "checkpoint" in cells and "started again" in cells


def test_a_report_that_cannot_be_made_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, *steps(2))
    place = "asyncpipe.runtime.reports.page.render_run"
    monkeypatch.setattr(place, lambda run: 1 / 0)
    with reported(tmp_path):
        pass
    assert "ZeroDivisionError" in (tmp_path / "report-error.txt").read_text()


TEXTS = st.text(st.sampled_from("ab <&\"'\x00\x0b\x85\ud800\uffffé"), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(10**400)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
RECORDS: list[dict[str, Any]] = [
    {
        "event": "start",
        "facts": {"plan": "small"},
        "predicted": {"step_ms": 9.0, "forward_ms": [1.0, 2.0], "peak_bytes": [5, 6]},
        "micro_batches": 4,
        "environment": {"versions": {"torch": "2"}, "cpu": "one", "gpus": ["a"], "memory_bytes": 9},
        "time_s": 1e9,
    },
    *steps(
        3,
        action_ms={"F": [1.0, 1.0], "B": [2.0, 2.0], "S": [1.0, 1.0]},
        mem_bytes_by_rank=[9, 9],
        base_bytes_by_rank=[1, 1],
        waiting_shares=[0.1, 0.2],
        sending_shares=[0.1, 0.2],
        data_shares=[0.1, 0.2],
        overhead_shares=[0.1, 0.2],
        idle_share=0.5,
        delay_mean=0.5,
    ),
    {"event": "eval", "step": 3, "loss": 0.1},
    {"event": "note", "about": "checkpoint", "text": "written", "time_s": 1e9 + 1, "step": 2},
    {"event": "warning", "text": "careful", "time_s": 1e9 + 2},
    {
        "event": "timelines",
        "costs": "those of the plan",
        "simulated": [[0, 0, "F", 0, 0.0, 1.0], [1, 1, "B", 0, 1.0, 2.0]],
        "measured": [[0, 0, "F", 0, 0.0, 1.0], [1, 1, "S", 1, 1.0, 2.0]],
    },
    {
        "event": "end",
        "step_ms": 9.0,
        "idle": 0.1,
        "idle_parts_by_rank": [dict.fromkeys(IDLE_PARTS, 0.1)],
        "staleness": {"delay_max": 1},
    },
    {"event": "failure", "text": "no more"},
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that is in a value, as what holds it and where."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


CHANGES = st.lists(st.tuples(st.integers(0, 9999), VALUES), min_size=1, max_size=4)


# Hypothesis reads all modules for constants at its first draw.
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(changes=CHANGES)
def test_no_records_whatever_break_the_page(
    changes: list[tuple[int, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    records = json.loads(json.dumps(RECORDS))
    for place, value in changes:
        found = list(places(records))
        holder, key = found[place % len(found)]
        holder[key] = value
    folder = tmp_path_factory.mktemp("any")
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    parsed(render_run(read_run(folder)))
    render_comparison(compare([folder, folder]))


def test_text_from_outside_cannot_leave_its_place(tmp_path: Path) -> None:
    hostile = "</script></style><b id=out>&"
    control = "\x00\x1b\x85\uffff"
    records = [
        {
            "event": "start",
            "facts": {hostile: hostile},
            "environment": {"versions": {hostile: "1"}},
        },
        *steps(2, **{hostile: 1.0}),
        {"event": "warning", "text": hostile + control},
        {"event": "failure", "text": hostile},
    ]
    made = read_run(write_run(tmp_path, *records, config=f"data = '{hostile}'"))
    tree = parsed(render_run(made))
    assert not [one for one in tree.iter() if one.get("id") == "out"]
    assert json.loads(by_id(tree, "run").text or "")["config"]["data"] == hostile


def test_every_step_is_drawn_and_not_only_the_logged_ones(folder: Path) -> None:
    ran = read_run(folder / "sync")
    assert [record["step"] for record in ran.steps] == [1, 2, 4, 6, 8]
    assert [record["step"] for record in ran.losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    by_step, by_time = loss_charts(ran)
    assert [line.label for line in by_step.lines] == ["training", "evaluation"]
    assert len(by_step.lines[0].points) == len(by_time.lines[0].points) == 8
    assert (by_step.x_title, by_time.x_title) == ("step", "seconds after step 1")


def test_a_long_run_records_a_few_thousand_losses() -> None:
    assert all(map(keeps_loss, range(1, 4096)))
    assert sum(map(keeps_loss, range(1, 1_000_001))) < 25_000


def test_time_is_counted_from_the_end_of_the_first_step(tmp_path: Path) -> None:
    slow_start = [record | {"elapsed_s": record["elapsed_s"] + 5} for record in steps(4)]
    later = after_first_step(read_run(write_run(tmp_path / "whole", *slow_start)))
    assert [record["elapsed_s"] for record in later.losses] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    resumed = read_run(write_run(tmp_path / "resumed", *slow_start[2:]))
    assert after_first_step(resumed) == resumed
    (_, by_time) = loss_charts(read_run(tmp_path / "whole"))
    assert by_time.x_ticks[0] == (LEFT, "0")


def test_numbers_far_from_the_plan_are_explained(tmp_path: Path) -> None:
    start = {
        "event": "start",
        "predicted": {"step_ms": 100.0, "peak_bytes": [8 << 20]},
        "environment": {"cpus": 2},
    }

    def notes(ms: float, measured: int) -> list[str]:
        memory = {"mem_bytes_by_rank": [measured + 1000], "base_bytes_by_rank": [1000]}
        folder = tmp_path / f"{ms}-{measured}"
        made = read_run(write_run(folder, start, *steps(3, ms=ms, **memory)))
        texts = [text_of(one) for one in all_of(parsed(render_run(made)), "p")]
        return [text for text in texts if text.startswith(("The plan assumes", "The prediction"))]

    assert notes(110, 9 << 20) == []
    slow, large = notes(300, 80 << 20)
    assert slow.endswith("share CPU cores or memory bandwidth: 1 rank ran on 2 cores.")
    assert "tens of MiB for a model of any size" in large
    assert len(notes(110, 8 << 30)) == 0  # too much for what a process needs anyway


# --- several runs


def test_runs_are_compared_at_equal_steps_and_in_equal_time(tmp_path: Path) -> None:
    """One takes half as long for a step and learns half as much in it."""
    slow = write_run(tmp_path / "slow", *steps(10, lambda s: 10 - s, ms=200), config="lr = 0.1")
    fast = write_run(
        tmp_path / "fast", *steps(12, lambda s: 10 - s / 2), config="lr = 0.2\nseed = 1"
    )
    compared = compare([slow, fast])
    assert (compared.names, compared.step, compared.seconds) == (("slow", "fast"), 10.0, 1.1)
    rows = {row[0]: row[1:] for row in compared.rows}
    assert rows["loss after 10 steps"] == ("0.0000", "5.0000")
    assert rows["loss 1.1 s after step 1"] == ("4.0000", "4.0000")
    assert rows["steps 1.1 s after step 1"] == ("6", "12")
    assert rows["tokens/s"] == ("500", "1,000")
    assert rows["step time"] == (write_ms(200), write_ms(100))
    assert compared.differences == (("lr", "0.1", "0.2"), ("seed", "", "1"))
    plain = json.loads(as_json(compared))
    assert [one["loss_at_equal_steps"] for one in plain["runs"]] == [0.0, 5.0]
    assert [one["steps_at_equal_time"] for one in plain["runs"]] == [6.0, 12.0]
    page = render_comparison(compared)
    check_alone(page, scripts=1)
    tree = parsed(page)
    lines = [len(all_of(tree, "path", f"line{number}")) for number in range(3)]
    assert lines[0] == lines[1] == 4 and lines[2] == 0  # the key, two charts of loss, one of rate
    assert json.loads(by_id(tree, "comparison").text or "") == plain


def test_real_runs_compare_and_tell_in_what_they_differ(folder: Path) -> None:
    compared = compare([folder / "sync", folder / "async"])
    assert compared.step == 8
    differing = {name for name, *_ in compared.differences}
    assert {"schedule", "lr", "steps", "staleness"} <= differing
    assert not {"seed", "folder", "torch", "host"} & differing
    assert all(cell for row in compared.rows if "predicted" not in row[0] for cell in row[:1])


def test_runs_that_have_nothing_compare_too(tmp_path: Path) -> None:
    compared = compare([write_run(tmp_path / "a" / "1"), write_run(tmp_path / "b" / "1")])
    assert compared.names == ("a/1", "b/1")
    parsed(render_comparison(compared))


# --- drawing

NUMBERS = st.floats(-1e9, 1e9)


@given(low=NUMBERS, length=st.floats(0, 1e9))
def test_ticks_lie_around_the_range_and_are_few(low: float, length: float) -> None:
    found = ticks_around(low, low + length)
    slack = 1e-9 * max(1.0, abs(low), length)
    assert found[0] <= low + slack and found[-1] >= low + length - slack
    assert 2 <= len(found) <= 12 and list(found) == sorted(set(found))


@given(most=st.floats(1e-6, 1e9))
def test_ticks_up_to_are_at_most_eleven_and_not_beyond(most: float) -> None:
    found = ticks_up_to(most)
    assert found[0] == 0 and found[-1] <= most * (1 + 1e-9) and 2 <= len(found) <= 11


@given(points=st.lists(st.tuples(NUMBERS, NUMBERS | st.just(math.nan)), max_size=60))
def test_every_point_lies_within_its_chart(points: list[tuple[float, float]]) -> None:
    made = chart("any", [Series("one", tuple(sorted(points, key=lambda p: p[0])))], x_unit="step")
    if not any(math.isfinite(y) for _, y in points):
        assert made is None
        return
    assert made is not None
    for point in made.lines[0].points:
        assert 0 <= point.x <= WIDTH and 0 <= point.y <= HEIGHT
    for x, _ in made.x_ticks:
        assert 0 <= x <= WIDTH


def test_a_long_line_is_drawn_with_its_ends_and_few_points() -> None:
    series = Series("loss", tuple((float(step), 1 / step) for step in range(1, 100_001)))
    made = chart("loss", [series], x_unit="step")
    assert made is not None
    (line,) = made.lines
    assert line.path.count("L") < 500 and len(line.points) < 50
    assert line.points[0].title.startswith("loss, step 1:")
    assert line.points[-1].title.startswith("loss, step 100000:")


def test_blocks_that_freeze_have_names_lines_and_a_word_about_the_plan(tmp_path: Path) -> None:
    records = [
        record | {"frozen_blocks": number, "block_distances": [0.5 / (10**block) / (1 + number)
                                                               for block in range(10)]}
        for number, record in enumerate(steps(4))
    ]  # fmt: skip
    run = read_run(write_run(tmp_path / "1", *records))
    (chart_of_blocks,) = [each for each in other_charts(run) if len(each.lines) > 1]
    assert [line.label for line in chart_of_blocks.lines] == [f"block {n}" for n in range(10)]
    assert len({line.path for line in chart_of_blocks.lines}) == 1  # all relative to the largest
    page = parsed(render_run(run))
    keys = [text_of(entry).strip() for entry in all_of(page, "li")]
    assert {f"block {n}" for n in range(10)} <= set(keys)
    drawn = {one.get("class") for one in all_of(page, "path")}
    assert drawn >= {f"line{n}" for n in range(8)} and not drawn & {"line8", "line9"}
    assert "3 blocks froze during the run." in text_of(page)
