"""The tables of docs/schedules.md are what the schedules and the simulator do."""

import re
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS
from asyncpipe.runtime.schedule.builders import SCHEDULES, make_schedule
from asyncpipe.runtime.schedule.schedule import Schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.tasks import Tasks

DOCUMENT = Path(__file__).parents[3] / "docs" / "schedules.md"


def rows(columns: int) -> dict[str, list[str]]:
    """Those of all tables of formulas with so many columns, by their schedule."""
    cells = r" \| ".join([r"`([^`]+)`"] * columns)
    found = re.findall(rf"^\| {cells} \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: formulas for name, *formulas in found}


TABLE, STALE = rows(5), rows(3)


def value(formula: str, **numbers: int) -> Any:
    return eval(formula, {"ceil": ceil, "min": min, "max": max} | numbers)


def kept_versions(schedule: Schedule, stage: int) -> int:
    """The most versions that are the newest or were some in-flight micro-batch's at forward."""
    newest, used, most = 0, dict[int, int](), 1
    for action in (action for row in schedule.ranks for action in row if action.stage == stage):
        match action.kind:
            case "F":
                used[action.index] = newest
            case "B":
                del used[action.index]
            case "S":
                newest += 1
        most = max(most, len({newest, *used.values()}))
    return most


def staleness(schedule: Schedule, stage: int) -> int:
    """The most steps between a forward and the end of its backward."""
    versions: dict[int, list[int]] = {}
    for row in schedule.ranks:
        for action in row:
            if action.stage == stage and action.version is not None:
                versions.setdefault(action.index, []).append(action.version)
    return max(max(seen) - min(seen) for seen in versions.values())


def test_the_table_has_every_schedule_and_no_other() -> None:
    assert tuple(TABLE) == SCHEDULES


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ASYNCHRONOUS])
def test_idle_shares_and_activations_are_as_documented(name: str) -> None:
    stages_a_rank, idle, live, condition = TABLE[name]
    checked = 0
    for p in range(1, 6):
        for m in range(1, 11):
            for v in (1, 2, 3):
                numbers = {"p": p, "m": m, "v": v}
                stages = p if name == "single" else p * value(stages_a_rank, **numbers)
                ranks = 1 if name == "single" else p
                if not value(condition, **numbers):
                    continue
                made = make_schedule(name, stages=stages, micro_batches=m, ranks=ranks)
                tasks = Tasks(ActionCosts.equal(stages), made.rank_of_stage, m)
                order = tasks.rows_of(made)
                steady = tasks.steady(order)
                assert steady is not None
                work = 3 * m * stages / ranks
                assert 1 - work / steady.period_ms == approx(value(idle, **numbers), abs=1e-9)
                for r, peak in enumerate(tasks.peaks(order)):
                    expected = value(live, r=r, **numbers)
                    assert peak / (stages / ranks) == approx(expected)
                checked += 1
    assert checked >= 10


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_every_cell_of_an_asynchronous_schedule_is_what_happens(name: str) -> None:
    _, idle, live, condition = TABLE[name]
    versions, late = STALE[name]
    caps = (0, 1, 2, 3) if "S" in idle else (None,)
    for p, k, cap in product(range(1, 6), range(1, 9), caps):
        numbers = {"p": p, "m": k, "k": k, "S": cap or 0}
        if not value(condition, **numbers):
            continue
        made = make_schedule(
            name,
            stages=p,
            micro_batches=k * (2 * p + 3),
            step_every=k,
            staleness_cap=cap,
        )
        timeline = simulate(made, ActionCosts.equal(p))
        assert timeline.steady_idle_share == approx(value(idle, **numbers), abs=1e-9)
        for r in range(p):
            numbers["r"] = r
            assert timeline.peak_in_flight[r] == value(live, **numbers)
            assert kept_versions(made, r) == value(versions, **numbers)
            assert staleness(made, r) == value(late, **numbers)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ASYNCHRONOUS])
def test_a_synchronous_schedule_has_one_version_and_nothing_is_late(name: str) -> None:
    made = make_schedule(name, stages=4, micro_batches=5)
    for stage in range(4):
        assert kept_versions(made, stage) == 1
        assert staleness(made, stage) == 0


def test_the_fill_and_drain_of_a_segment_are_as_documented() -> None:
    formula = re.search(r"segment of n steps, `([^`]+)`", DOCUMENT.read_text())
    assert formula
    for p, n, k in ((2, 5, 3), (4, 7, 2), (5, 1, 1)):
        made = make_schedule("async-1f1b", stages=p, micro_batches=n * k, step_every=k)
        assert simulate(made, ActionCosts.equal(p)).idle_share == approx(
            value(formula[1], p=p, n=n, k=k)
        )
