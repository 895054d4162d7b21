"""From the command's settings to weights: every kind of schedule trains as one process does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncpipe
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.segments import make_segment
from asyncpipe.runtime.config.settings import RunConfig, Settings, SettingsError
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.errors import AsyncPipeError, ScheduleError
from asyncpipe.runtime.launch.launch import schedule_text
from asyncpipe.runtime.monitoring.gather import RankFigures
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.plan.setting import RankSpec
from asyncpipe.runtime.schedule.finalists import Trial
from asyncpipe.runtime.schedule.schedule import Schedule, one_step
from asyncpipe.runtime.schedule.simulate import ActionCosts
from asyncpipe.runtime.schedule.text import from_text, to_text
from asyncpipe.runtime.training.remeasure import (
    Remeasuring,
    costs_of_steps,
    when_measured,
    with_split_backwards,
)
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("generated") / "mlp_4p"
    source = load_model("mlp")
    asyncpipe.partition(
        source.model,
        source.example_inputs,
        name="mlp",
        stages=4,
        output=output,
        profile="analytic",
    )
    return output


def settings_of(folder: Path, **options: Any) -> Settings:
    given: dict[str, Any] = {
        "micro_batches": 4,
        "steps": 3,
        "log_every": 1,
        "threads": 1,
        "criterion": "cross_entropy",
        "data": "clusters",
    }
    return Settings(folder=str(folder), **(given | options))


def losses(folder: Path, output: Path, **options: Any) -> list[float]:
    run(settings_of(folder, output=str(output), **options), FACTORY)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] in ("step", "eval")]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "ranks": 2},
        {"schedule": "zb-v"},
        {"schedule": "looped-bfs", "ranks": 2},
        {"schedule": "auto", "ranks": 2, "steps": 15},
    ],
    ids=lambda options: options["schedule"],
)
def test_several_stages_a_rank_train_as_one_process_does(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    steps = options.get("steps", 3)
    expected = losses(folder, tmp_path / "alone", schedule="single", steps=steps)
    found = losses(folder, tmp_path / "ranks", **options)
    # To the last bit: also a W that is put off is added in its micro-batch's turn.
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == steps + 1
    taken = from_text((tmp_path / "ranks" / "schedule.txt").read_text())
    assert len(taken.ranks) == 2 and taken.stages == 4
    if options["schedule"] == "auto":
        notes = events_of(tmp_path / "ranks", "note")
        assert len(notes) == 1 and notes[0][0] == "schedule"
        assert "recomputed from the times of steps 2 to 7" in notes[0][1]


def test_a_printed_schedule_is_edited_and_run(folder: Path, tmp_path: Path) -> None:
    printed = schedule_text(settings_of(folder, schedule="interleaved"))
    edited = printed.replace("name: interleaved", "# mine\nname: mine")
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(line for line in edited.splitlines() if "in flight" not in line))
    expected = losses(folder, tmp_path / "alone", schedule="single")
    assert losses(folder, tmp_path / "ranks", schedule=str(file)) == pytest.approx(expected)
    assert (tmp_path / "ranks" / "schedule.txt").read_text().startswith("name: mine\n")


def plan_and_config(folder: Path, **options: Any) -> tuple[Plan, RunConfig]:
    plan = read_plan(folder)
    return plan, resolve(settings_of(folder, **options), plan)[0]


@pytest.mark.parametrize(
    ("text", "options", "what", "cure"),
    [
        ("rank 0: 0F0 0B0 0S1", {"micro_batches": 1}, "has 1 stage, but the plan has 4", "Print"),
        ("{}", {"micro_batches": 5}, "has 4 micro-batches, but a step has 5", "-batches 4"),
        ("{}", {"ranks": 4}, "has 2 ranks, but --ranks is 4", "--ranks 2"),
        ("rank 0: hello", {}, "'hello' is not an action", "Actions look like"),
    ],
)
def test_a_file_that_is_not_of_this_run_is_refused(
    folder: Path, tmp_path: Path, text: str, options: dict[str, Any], what: str, cure: str
) -> None:
    own = schedule_text(settings_of(folder, schedule="interleaved"))
    (tmp_path / "x.txt").write_text(text.format(own))
    plan, config = plan_and_config(folder, schedule=str(tmp_path / "x.txt"), **options)
    with pytest.raises(ScheduleError) as caught:
        make_segment(plan, config, steps=1)
    assert what in caught.value.what and cure in caught.value.cure


def test_an_asynchronous_file_and_one_that_is_not_there_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    rows = [f"rank {j}: {j}F0 {j}B0 {j}S1 {j}F1 {j}B1 {j}S2" for j in range(4)]
    (tmp_path / "x.txt").write_text("\n".join(rows))
    plan, config = plan_and_config(folder, schedule=str(tmp_path / "x.txt"), micro_batches=2)
    with pytest.raises(ScheduleError, match="has 2 steps, but a schedule from a file makes one"):
        make_segment(plan, config, steps=1)
    with pytest.raises(SettingsError, match="there is no such file"):
        Settings(folder="x", schedule="no/such.txt")
    with pytest.raises(AsyncPipeError, match="Did you mean interleaved"):
        Settings(folder="x", schedule="interleave")


def test_auto_puts_stages_on_as_many_ranks_as_asked(folder: Path) -> None:
    for ranks in (1, 2, 3, 4):
        plan, config = plan_and_config(folder, schedule="auto", ranks=ranks)
        made = make_segment(plan, config, steps=1)
        assert len(made.ranks) == ranks and not made.split
        assert made == make_segment(plan, config, steps=1)


def test_auto_keeps_to_the_memory_of_the_plans_ranks(folder: Path) -> None:
    plan, config = plan_and_config(folder, schedule="auto", micro_batches=8)
    assert max(make_segment(plan, config, steps=1).in_flight) > 2
    small = []
    for stage in plan.stages:
        each = stage.memory.activations / stage.in_flight
        fixed = stage.memory.total - stage.memory.activations
        small.append(RankSpec("small", int(fixed + 2.5 * each)))
    limited = replace(plan, setting=replace(plan.setting, ranks=tuple(small)))
    assert max(make_segment(limited, config, steps=1).in_flight) == 2


def figures(step: int, whole: bool) -> list[RankFigures]:
    """Two ranks with one stage each: F 2 and B 4, or in two parts I 3 and W 2; stage 1 twice that.
    A step of 2 micro-batches, in seconds."""
    ranks = []
    for rank in range(2):
        times = [2.0, 4.0, 0.0, 1.0] if whole else [2.0, 3.0, 2.0, 1.0]
        stage_s = [0.0] * 8
        for kind, ms in enumerate(times):
            stage_s[2 * kind + rank] = 2e-3 * ms * (1 + rank)
        ranks.append(RankFigures(step, stage_s=tuple(stage_s)))
    return ranks


def test_costs_are_read_off_the_measured_steps() -> None:
    seen = [figures(step, whole=step < 6) for step in range(2, 8)]
    first = from_text("rank 0: 0F0 0F1 0B0 0B1 0S1\nrank 1: 1F0 1B0 1F1 1B1 1S1")
    found = costs_of_steps(seen, [1.5, 2.5], first)
    expected = ActionCosts((2, 4), (4, 8), (1.5, 2.5), {}, (2, 4), (1, 2))
    for name in ("forward_ms", "backward_ms", "step_ms", "weight_ms", "split_ms"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))


def test_the_schedule_is_computed_again_once_and_only_in_a_long_run(folder: Path) -> None:
    plan, config = plan_and_config(folder, schedule="auto", ranks=1, steps=20)
    first = make_segment(plan, config, steps=1)
    told: list[str] = []
    stage_s = tuple(1e-3 * (1 + kind) for kind in range(4) for _ in range(4))
    seen = [[RankFigures(step, stage_s=stage_s)] for step in range(2, 8)]

    def steps_of(config: RunConfig) -> Remeasuring:
        return Remeasuring(
            plan,
            config,
            World(),
            first,
            figures=lambda step: seen,
            optimizer_ms=lambda: [1.0],
            tell=lambda text, schedule: told.append(text),
        )

    steps = steps_of(config)
    taken = [steps.of_step(step) for step in range(1, 21)]
    assert [made.compute.ranks for made in taken[:5]] == [first.compute.ranks] * 5
    split = with_split_backwards(first.compute)
    assert [made.compute.ranks for made in taken[5:7]] == [split.ranks] * 2
    assert len(set(map(str, taken[7:]))) == 1 and len(told) == 1
    assert "after step 7" in when_measured(config)
    _, short = plan_and_config(folder, schedule="auto", ranks=1, steps=13)
    assert {str(steps_of(short).of_step(step)) for step in range(1, 14)} == {str(first)}
    assert "fewer than 14" in when_measured(short)
    assert len(told) == 1


@pytest.mark.parametrize("split_is_faster", [False, True])
def test_finalists_run_in_turn_and_the_one_with_the_shortest_steps_is_kept(
    folder: Path, split_is_faster: bool
) -> None:
    plan, config = plan_and_config(folder, schedule="auto", ranks=2, steps=60, micro_batches=16)
    told: list[tuple[str, Schedule]] = []
    taken: list[Schedule] = []
    resumed_with: list[str] = []

    def stage_s(step: int) -> tuple[float, ...]:
        """Of a step of 16 micro-batches: F 1 ms; B 2 ms whole, or 1 ms and a W of 1 ms."""
        parts = (16, 32, 0, 0) if step < 6 else (16, 16, 16, 0)
        return tuple(1e-3 * ms for ms in (*parts, 0, 0) for _ in range(4))

    def seen(until: int) -> list[list[RankFigures]]:
        """Steps of the faster kind wait a second less."""
        waits_s = [1.0 + (bool(made.split) != split_is_faster) for made in taken]
        return [
            [RankFigures(step, waiting_s=waits_s[step - 1], stage_s=stage_s(step))] * 2
            for step in range(2, until + 1)
        ]

    steps = Remeasuring(
        plan,
        config,
        World(),
        make_segment(plan, config, steps=1),
        figures=seen,
        optimizer_ms=lambda: [0.1, 0.1],
        tell=lambda text, schedule: told.append((text, schedule)),
    )
    for step in range(1, 61):
        taken.append(steps.of_step(step))
        resumed_with.append(steps.text_after(step))
    (_, expected), (text, kept) = told
    tried = {str(made): bool(made.split) for made in taken[7:-1]}
    assert set(tried.values()) == {False, True} and str(taken[7].compute) == str(expected)
    assert bool(taken[-1].split) == split_is_faster and str(taken[-1].compute) == str(kept)
    trial = Trial.first(len(tried), 60 - 7)
    last = 7 + trial.next(dict.fromkeys(range(len(tried)), 1.0)).end
    assert text.startswith(f"tried in steps 8 to {last}: ") and "; continues with " in text
    # A resumed run begins with the schedule that is expected to be the best, then with the kept.
    assert set(resumed_with[7:last]) == {to_text(expected)}
    assert set(resumed_with[last:]) == {to_text(kept)}


def test_whole_backwards_are_measured_whatever_the_first_schedule_splits(folder: Path) -> None:
    plan, config = plan_and_config(folder, schedule="auto", ranks=1, steps=20)
    split = with_split_backwards(make_segment(plan, config, steps=1))
    steps = Remeasuring(
        plan,
        config,
        World(),
        split,
        figures=lambda step: [],
        optimizer_ms=lambda: [1.0],
        tell=lambda text, schedule: None,
    )
    assert split.split and not steps.of_step(1).split
    assert not {action.kind for action in steps.of_step(5).ranks[0]} - {"F", "B", "S"}
    assert steps.of_step(6).split == split.split


def test_a_split_schedule_is_the_same_but_for_its_backwards() -> None:
    whole = from_text("rank 0: 0F0 0F1 0B1 0B0 0S1", edges=[])
    split = with_split_backwards(whole)
    assert [str(a.unversioned) for a in split.ranks[0]] == "0F0 0F1 0B1 0W1 0B0 0W0 0S1".split()
    assert split == one_step("custom", split.compute.ranks and [split.ranks[0][:-1]], [0])
