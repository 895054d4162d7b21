"""Runs of a comparison are those of asyncpipe-train, are made once, and are shown as they are."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.distributed.process_groups import stay_alone
from asyncpipe.runtime.errors import AsyncPipeError, DataError, ScheduleError
from asyncpipe.runtime.experiments.compare import MethodComparison, arms, compare, read_runs
from asyncpipe.runtime.experiments.method_plots import comparison_page, draw
from asyncpipe.runtime.experiments.method_rows import COLUMNS, ComparedRun, cells, rows, time_to
from asyncpipe.runtime.experiments.trial import Curve, read_method, step_ends_ms, train_alone
from asyncpipe.runtime.launch.job import make_folder, make_job, run_rank
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.oracles.html_pages import all_of, check_alone, parsed, text_of
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

COMMON: Mapping[str, Any] = {
    "micro_batches": 2,
    "steps": 6,
    "eval_batches": 2,
    "lr": 0.05,
    "optimizer": "sgd",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    return folder


def settings_of(folders: Path, model: str = "mlp", **options: Any) -> Settings:
    return Settings(folder=str(folders / model), **{**COMMON, **options})


def loss_of_training(settings: Settings, output: Path) -> float:
    """What asyncpipe-train evaluates to at the end of the same run."""
    settings = replace(settings, output=str(output), eval_every=0, ranks=1, threads=1)
    job = make_folder(make_job(settings))
    run_rank(job, stay_alone(job.config, job.plan, job.code), FACTORY)
    loss: float = events_of(output, "eval")[-1]["loss"]
    return loss


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "single"},
        {"schedule": "async-1f1b", "staleness": "stash", "optimizer": "adamw", "clip": 0.5},
        {"schedule": "async-1f1b", "staleness": "none", "sync_start": "2", "momentum": 0.9},
        {"schedule": "async-1f1b", "staleness": "stash", "sync_end": "40%", "clip": 0.5},
        {"schedule": "async-1f1b", "micro_batches": 1, "ahead": "2x", "flush_every": 4},
    ],
)
def test_a_run_ends_at_the_loss_of_asyncpipe_train_however_often_it_is_evaluated(
    folders: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = settings_of(folders, **options)
    often = train_alone(replace(settings, eval_every=1), tmp_path)
    assert often.steps == (1, 2, 3, 4, 5, 6)
    assert often.last == loss_of_training(settings, tmp_path / "run")
    assert often.last == train_alone(settings, tmp_path).last
    assert len(set(often.evaluated)) == 6
    assert math.isclose(train_alone(settings, tmp_path).trained[0], sum(often.trained) / 6)


def test_a_run_computes_with_the_threads_that_were_asked_for(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    before = torch.get_num_threads()
    for threads in (3, None):
        train_alone(settings_of(folders, schedule="single", threads=threads, steps=1), tmp_path)
    assert asked == [3, before, before, before]


def test_tied_weights_of_late_stages_are_evaluated_in_flight(folders: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    settings = settings_of(
        folders, "text", schedule="async-1f1b", data=str(text), steps=4, micro_batches=1
    )
    often = train_alone(replace(settings, eval_every=1), tmp_path)
    assert often.last == loss_of_training(settings, tmp_path / "run")


def test_a_run_whose_loss_is_no_number_ends_early_and_is_last_in_the_table(
    folders: Path, tmp_path: Path
) -> None:
    settings = settings_of(folders, steps=40, eval_every=1, output=str(tmp_path))
    comparison = compare(settings, ["sync", "stash,lr=1e6,weight_decay=1"])
    assert [row.method for row in comparison.rows] == ["sync", "stash,lr=1e+06,weight-decay=1"]
    [broken] = comparison.rows[1].runs
    assert "Stopped" in broken.curve.end
    headings = [column.heading for column in COLUMNS]
    assert cells(comparison.rows[1])[headings.index("loss")] == "-"


@pytest.fixture(scope="module")
def compared(
    folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Settings, MethodComparison]:
    output = tmp_path_factory.mktemp("comparison")
    settings = settings_of(folders, output=str(output), eval_every=2, lr=None)
    return settings, compare(settings, METHODS, lrs=(0.05, 0.1), seeds=(1, 2))


METHODS = ["sync", "stash", "none:adamw,lr=0.001,sync-start=50%"]


def test_the_table_has_the_best_rate_the_mean_the_spread_and_the_gap_of_each_method(
    compared: tuple[Settings, MethodComparison], tmp_path: Path
) -> None:
    settings, comparison = compared
    sync, stash = (
        {
            lr: [
                train_alone(
                    replace(settings, schedule=schedule, lr=lr, seed=seed, output=None), tmp_path
                ).last
                for seed in (1, 2)
            ]
            for lr in (0.05, 0.1)
        }
        for schedule in ("single", "async-1f1b")
    )
    best_of_sync, (lr, best) = (
        min(map(sum, sync.values())) / 2,
        min(stash.items(), key=lambda item: sum(item[1])),
    )
    row = next(row for row in comparison.rows if row.method == "stash")
    assert (row.lr, row.tried, row.seeds) == (lr, (0.05, 0.1), 2)
    assert row.loss == sum(best) / 2
    assert row.spread == max(best) - min(best)
    assert row.gap == row.loss - best_of_sync
    assert row.share == pytest.approx(row.loss / best_of_sync - 1)
    lone = next(row for row in comparison.rows if row.optimizer == "adamw")
    assert (lone.method, lone.gap, lone.lr) == ("none,lr=0.001,sync-start=50%", None, 0.001)
    table = (comparison.folder / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(comparison.rows)
    assert all(f" {text} " in table[2] or not text for text in cells(comparison.rows[0]))


def test_what_was_run_is_not_run_again(
    compared: tuple[Settings, MethodComparison], tmp_path: Path
) -> None:
    settings, comparison = compared
    assert (comparison.made, comparison.repeated) == (10, 0)
    shutil.copy(comparison.folder / "runs.jsonl", tmp_path)
    settings = replace(settings, output=str(tmp_path))
    lines = (comparison.folder / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 10
    again = compare(settings, METHODS, lrs=(0.05, 0.1), seeds=(1, 2))
    assert (again.made, again.repeated) == (0, 10)
    assert again.rows == comparison.rows
    more = compare(settings, [*METHODS, "stash:muon"], lrs=(0.05, 0.1), seeds=(1,))
    assert (more.made, more.repeated) == (2, 5)
    assert compare(replace(settings, warmup=3), ["sync"], lrs=(0.05,)).made == 1


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"key": "12"}\n')
    with pytest.raises(DataError, match="runs.jsonl: line 1 has no method"):
        read_runs(path)


def test_the_plot_has_a_line_for_each_method_against_steps_and_against_time(
    compared: tuple[Settings, MethodComparison],
) -> None:
    _, comparison = compared
    text = (comparison.folder / "curves.svg").read_text()
    root = ElementTree.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"

    def of_class(part: ElementTree.Element, name: str) -> list[ElementTree.Element]:
        return [path for path in part.iter(f"{svg}path") if path.attrib["class"].startswith(name)]

    charts = root.findall(f"{svg}svg")
    by_step, by_time = (of_class(chart, "line") for chart in charts)
    assert len(by_step) == len(by_time) == len(comparison.rows)
    assert len(of_class(root, "band")) == 2 * len(comparison.rows)
    dashes = re.findall(r"^\.line\d+ .*dasharray: ([^;]+);", text, re.MULTILINE)
    assert dashes[0] == "none"  # and later lines let those below show through
    assert len(set(dashes)) == len(dashes) == len(comparison.rows)

    def ends(line: ElementTree.Element) -> float:
        points = [point.split() for point in line.attrib["d"][1:].split("L")]
        assert len(points) == 3
        assert [float(x) for x, _ in points] == sorted(float(x) for x, _ in points)
        return float(points[-1][0])

    assert len({ends(line) for line in by_step}) == 1
    last = [ends(line) for line in by_time]
    sync = [row.method.startswith("sync") for row in comparison.rows]
    assert max(last) == next(x for x, is_sync in zip(last, sync, strict=True) if is_sync)
    assert len(set(last)) == len(comparison.rows)
    labels = [f"lr {row.lr:g}: {row.loss:.4f}" for row in comparison.rows]
    assert all(label in text for label in labels)
    page = (comparison.folder / "comparison.html").read_text()
    check_alone(page, scripts=0)
    assert [len(all_of(chart, "g", "curve")) for chart in all_of(parsed(page), "svg", "chart")] == [
        len(comparison.rows)
    ] * 2
    keys = [text_of(entry) for entry in all_of(parsed(page), "li")]
    assert all(any(label in key for key in keys) for label in labels)


def test_nothing_is_drawn_of_runs_that_ended_early() -> None:
    run = ComparedRun("k", "stash", "sgd", 0.1, 1, 2, 1, 4, Curve((), (), (), "the loss is nan"))
    found = rows([run], lambda run: (1.0,) * 4)
    text = draw(found, lambda run: (1.0,) * 4, title="a < b")
    assert "<path" not in text
    page = comparison_page(found, lambda run: (1.0,) * 4, title="a < b")
    assert "No run has finished." in text_of(parsed(page)) and not all_of(parsed(page), "svg")
    assert ElementTree.fromstring(text)[0].text == "a < b"


def with_costs(plan: Plan, *, transfer_ms: float) -> Plan:
    stages = tuple(
        replace(stage, forward_ms=1.0 + 0.3 * (index % 3), backward_ms=2.0 + 0.5 * (index % 2))
        for index, stage in enumerate(plan.stages)
    )
    hops = tuple((stage, stage + 1, transfer_ms) for stage in range(len(stages) - 1))
    return replace(plan, stages=stages, setting=replace(plan.setting, transfer_ms=hops))


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("ahead", [None, "2x"])
def test_simulated_times_are_those_of_the_whole_schedule(
    folders: Path, every: int, ahead: str | None
) -> None:
    settings = settings_of(
        folders, micro_batches=every, steps=60, schedule="async-1f1b", ahead=ahead
    )
    job = make_job(settings)
    job = replace(job, planned=with_costs(job.planned, transfer_ms=0.7))
    plan = job.planned
    whole = make_schedule(
        "async-1f1b",
        stages=len(plan.stages),
        micro_batches=60 * every,
        step_every=every,
        ahead=ahead,
    )
    ends = [0.0] * 60
    for event in forecast_step(plan, whole, every, steps=60).timeline.events:
        if event.action.kind == "S":
            ends[event.action.index - 1] = max(ends[event.action.index - 1], event.end_ms)
    # The stages may take turns of two steps, about their mean pace.
    assert step_ends_ms(job) == pytest.approx(ends, rel=0.005)


def test_synchronous_steps_take_those_of_1f1b_and_the_rest_begins_after_them(folders: Path) -> None:
    job = make_job(settings_of(folders, steps=10, schedule="async-1f1b", sync_start="30%"))
    job = replace(job, planned=with_costs(job.planned, transfer_ms=0.2))
    flushed = forecast_step(job.planned, "1f1b", 2).step_ms

    def ends_of(**options: Any) -> tuple[float, ...]:
        return step_ends_ms(replace(job, config=replace(job.config, **options)))

    ends = ends_of()
    assert ends[:3] == pytest.approx([flushed, 2 * flushed, 3 * flushed])
    rest = ends_of(steps=7, sync_start=None)
    assert ends[3:] == pytest.approx([3 * flushed + end for end in rest])
    last = ends_of(sync_start=None, sync_end="3")
    assert last == pytest.approx([*rest, *(rest[-1] + each for each in ends[:3])])
    sync = ends_of(schedule="single")
    assert sync == pytest.approx([step * flushed for step in range(1, 11)])
    assert ends[-1] < sync[-1]
    size = job.config.micro_batch_size or 0
    assert ends_of(micro_batch_size=2 * size)[0] > 1.9 * ends[0]


def test_a_gap_is_to_the_best_of_the_synchronous_runs() -> None:
    losses = {"sync": 2.0, "sync,momentum=0.9": 1.0, "sync,momentum=0.5": 3.0, "stash": 1.5}
    runs = [
        ComparedRun(name, name, "muon", 0.1, 1, 2, 1, 1, Curve((1,), (loss,), (loss,)))
        for name, loss in losses.items()
    ]
    table = rows(runs, lambda run: (10,))
    assert [(row.method, row.gap) for row in table] == [
        *(("sync,momentum=0.9", 0.0), ("stash", 0.5), ("sync", 1.0), ("sync,momentum=0.5", 2.0))
    ]


def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations() -> None:
    run = ComparedRun("k", "stash", "sgd", 0.1, 1, 2, 1, 4, Curve((2, 4), (3.0, 2.0), (3.0, 2.0)))
    assert time_to([run], 2.5, lambda run: (10, 20, 30, 40)) == 30
    assert time_to([run], 3.5, lambda run: (10, 20, 30, 40)) == 20
    assert time_to([run], 1.9, lambda run: (10, 20, 30, 40)) is None


@pytest.mark.parametrize(
    "text",
    [
        "sync",
        "stash",
        "stash+msnag:muon",
        "none,lr=0.003,sync-start=5%",
        "stash:adamw,betas=0.9/0.99",
    ],
)
def test_a_method_is_written_as_it_is_read(text: str) -> None:
    assert str(read_method(text)) == text
    assert read_method(str(read_method(text))) == read_method(text)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("stsh", ScheduleError, "Did you mean stash"),
        ("stash:adamv", SettingsError, "Did you mean adam"),
        ("stash,lrr=1", SettingsError, "Did you mean lr"),
        ("stash,lr=fast", SettingsError, "is not a number"),
        ("stash,betas=0.9", SettingsError, "is not 2 values"),
    ],
)
def test_a_method_that_is_not_known_is_refused_in_a_sentence(
    text: str, kind: type[AsyncPipeError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        read_method(text)
    assert words in f"{caught.value.what} {caught.value.cure}"


def test_what_does_not_fit_the_model_is_refused_before_anything_is_run(
    folders: Path, tmp_path: Path
) -> None:
    settings = settings_of(folders, output=str(tmp_path))
    with pytest.raises(SettingsError, match="refresh-every"):
        compare(settings, ["sync", "stash:sgd,refresh-every=3"])
    assert not (tmp_path / "runs.jsonl").exists()


def test_arms_are_all_combinations_but_of_what_a_method_has_of_its_own() -> None:
    methods = [read_method("sync"), read_method("stash:muon,lr=0.5")]
    made = arms(
        Settings(folder="x"), methods, optimizers=("sgd", "adamw"), lrs=(1, 2, 3), seeds=(1, 2)
    )
    assert len(made) == 2 * (2 * 3 + 1)
    assert {arm.settings.schedule for arm in made} == {"single", "async-1f1b"}
    assert [arm.settings.lr for arm in made if not arm.method.is_sync] == [0.5, 0.5]


def test_json_lines_are_runs(compared: tuple[Settings, MethodComparison]) -> None:
    _, comparison = compared
    for line in (comparison.folder / "runs.jsonl").read_text().splitlines():
        assert json.loads(line)["curve"]["steps"] == [2, 4, 6]


def test_a_stage_that_ran_ahead_once_more_would_be_seen(folders: Path, tmp_path: Path) -> None:
    deeper = settings_of(folders, schedule="async-1f1b", micro_batches=1, ahead="2x")
    usual = replace(deeper, ahead=None)
    assert async_1f1b(2, 2, 1).in_flight == (2, 1)
    assert train_alone(deeper, tmp_path).last != train_alone(usual, tmp_path).last
