"""Stages that a plan has on several ranks train as the plain model would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.errors import PlanError, ScheduleError
from asyncpipe.runtime.launch.launch import schedule_text
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.plan.trust import remember
from asyncpipe.tests.runtime.training.test_replicas import assert_same_training
from asyncpipe.tests.support.models.hand_folders import (
    PlainMlp,
    PlainText,
    exact_settings,
    write_mlp,
    write_text,
)
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of


def replicate(folder: Path, plan: Plan, *shape: int) -> Path:
    """Rewrites the plan with as many ranks for each stage."""
    ranks = iter(range(sum(shape)))
    stages = tuple(
        replace(stage, ranks=tuple(next(ranks) for _ in range(count)))
        for stage, count in zip(plan.stages, shape, strict=True)
    )
    (folder / "plan.json").write_text(replace(plan, stages=stages).to_json())
    remember(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    replicate(folder / "mlp", write_mlp(folder / "mlp"), 2, 1)
    replicate(folder / "last", write_mlp(folder / "last"), 1, 2)
    replicate(folder / "mlp4", write_mlp(folder / "mlp4", stages=4), 1, 2, 1, 1)
    replicate(folder / "text", write_text(folder / "text"), 2, 1)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def settings(folder: Path, output: Path, **given: Any) -> Settings:
    return exact_settings(folder, output, **({"micro_batches": 5} | given))


def train(folder: Path, output: Path, **given: Any) -> Path:
    run(settings(folder, output, **given), FACTORY)
    return output


def test_a_stage_on_two_ranks_trains_as_the_plain_model(folders: Path, tmp_path: Path) -> None:
    # Clipping tells all ranks the norm, which counts a replicated stage once; the last micro-batch
    # is smaller, and the last of three steps has a single one, so that one rank has none.
    given = {"micro_batches": None, "global_batch_size": 18, "micro_batch_size": 4, "clip": 0.1}
    given |= {"samples": 39, "remainder": "proportional"}
    one = train(folders / "mlp", tmp_path / "one", schedule="single", **given)
    two = train(folders / "mlp", tmp_path / "two", check_replicas=1, trace="1", **given)
    assert_same_training(one, two, PlainMlp())
    (facts,) = events_of(two, "start")
    assert facts["ranks"].startswith("3 processes, stage 0 on ranks 0-1 · shm (one host)")
    assert facts["schedule"].endswith(
        "gradients as single-device training, summed over stage 0 on ranks 0-1)"
    )
    assert facts["data"].endswith("ranks 0, 1 read inputs, rank 2 reads targets")
    assert not events_of(two, "warning")
    (end,) = events_of(two, "end")
    assert len(end["idle_parts_by_rank"]) == 3
    trace = json.loads((two / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}
    (timelines,) = events_of(two, "timelines")
    assert all(drawn.count("rank") == 3 for drawn in timelines["drawn"])
    lines = (two / "schedule.txt").read_text().splitlines()
    assert lines[-2:] == [
        "rank 1: 0F1@v0 0F3@v0 0B1@v0 0B3@v0 0S1",
        "rank 2: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1F3@v0 1B3@v0 1F4@v0 1B4@v0 1S1",
    ]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_of_several_stages_is_summed_over_all_their_replicas(
    folders: Path, tmp_path: Path, zero: int
) -> None:
    given = {"data": str(folders / "text.txt"), "clip": 0.5}
    one = train(folders / "text", tmp_path / "one", schedule="single", **given)
    two = train(
        folders / "text",
        tmp_path / "two",
        transport="gloo",
        check_replicas=1,
        schedule="gpipe",
        zero=zero,
        **given,
    )
    assert_same_training(one, two, PlainText())


@pytest.mark.parametrize("transport", ["shm", "gloo", "mpi"])
@pytest.mark.parametrize("name", ["last", "mlp4"])
def test_over_every_transport_it_does(
    folders: Path, tmp_path: Path, name: str, transport: str
) -> None:
    one = train(folders / name, tmp_path / "one", schedule="single")
    two = train(folders / name, tmp_path / "two", transport=transport, recompute="all")
    assert_same_training(one, two, PlainMlp())


def test_a_schedule_file_may_have_the_replicas_of_the_plan(folders: Path, tmp_path: Path) -> None:
    text = schedule_text(settings(folders / "mlp", tmp_path / "x"))
    (tmp_path / "own.txt").write_text(text)
    given = settings(folders / "mlp", tmp_path / "x", schedule=str(tmp_path / "own.txt"))
    assert schedule_text(given) == text
    with pytest.raises(
        ScheduleError, match="has stage 0 on ranks 0-1, but the run one rank a stage"
    ):
        schedule_text(replace(given, replicas=1))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"schedule": "async-1f1b"},
            "has stage 0 on ranks 0-1, but .* no replicas under async-1f1b",
        ),
        ({"schedule": "auto"}, "no replicas under auto"),
        ({"schedule": "zb-h1"}, "no replicas under zb-h1"),
        ({"ranks": 2}, "--ranks 2, but the plan has stage 0 on ranks 0-1: 3 ranks"),
    ],
)
def test_what_does_not_go_with_them_is_refused(
    folders: Path, tmp_path: Path, given: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingsError, match=match) as error:
        run(settings(folders / "mlp", tmp_path / "run", **given), FACTORY)
    assert "--replicas 1 for one rank a stage" in error.value.cure


def test_gradients_of_micro_batches_that_replicas_do_not_share_have_no_owner(
    folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="has stage 0 on ranks 0-1, which have micro-batches"):
        run(settings(folders / "mlp", tmp_path / "run", zero=2), FACTORY)


def test_too_few_micro_batches_are_refused(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="1 micro-batches are too few"):
        run(settings(folders / "mlp", tmp_path / "run", micro_batches=1), FACTORY)


@pytest.mark.parametrize(
    ("ranks", "cure"), [(2, "--replicas 1"), (4, "--replicas 2"), (5, "Use 3 ranks")]
)
def test_another_number_of_ranks_is_refused(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, cure: str
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(
        PlanError, match=f"2 stages on 3 ranks under 1f1b, {ranks} ranks were"
    ) as told:
        run(settings(folders / "mlp", tmp_path / "run"), FACTORY)
    assert cure in told.value.cure


def test_one_rank_a_stage_is_trained_on_request_with_a_warning(
    folders: Path, tmp_path: Path
) -> None:
    made = train(folders / "mlp", tmp_path / "run", replicas=1, steps=1, dry_run=True)
    (facts,) = events_of(made, "start")
    assert facts["ranks"].startswith("2 processes · ")
    (warning,) = events_of(made, "warning")
    assert warning.startswith("the plan has stage 0 on 2 ranks, but this run has 1 replica")
