"""The table of docs/schedules.md is what the schedules and the simulator do."""

import re
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from asyncpipe.runtime.schedule import Schedule
from asyncpipe.runtime.schedules import ASYNCHRONOUS, SCHEDULES, make_schedule
from asyncpipe.runtime.simulate import Costs, simulate

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"
TABLE = {
    name: cells
    for name, *cells in re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$",
        DOCUMENT.read_text(),
        re.MULTILINE,
    )
}


def value(formula: str, **numbers: int) -> Any:
    return eval(formula, {"ceil": ceil, "min": min} | numbers)


def kept_versions(schedule: Schedule, stage: int) -> int:
    """The most versions that are the newest or were some in-flight micro-batch's at forward."""
    newest, used, most = 0, dict[int, int](), 1
    for action in (action for row in schedule.ranks for action in row if action.stage == stage):
        match action.kind:
            case "F":
                used[action.index] = newest
            case "B":
                del used[action.index]
            case _:
                newest += 1
        most = max(most, len({newest, *used.values()}))
    return most


def staleness(schedule: Schedule, stage: int) -> int:
    """The most steps between a forward and its backward."""
    versions: dict[int, list[int]] = {}
    for row in schedule.ranks:
        for action in row:
            if action.stage == stage and action.version is not None:
                versions.setdefault(action.index, []).append(action.version)
    return max(backward - forward for forward, backward in versions.values())


def test_the_table_has_every_schedule_and_no_other() -> None:
    assert tuple(TABLE) == SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_cell_of_the_table_is_what_happens(name: str) -> None:
    idle, in_flight, versions, late = TABLE[name]
    for p in range(1, 6):
        for m in range(1, 9):
            steps = 2 * p + 3 if name in ASYNCHRONOUS else 1
            made = make_schedule(name, stages=p, micro_batches=m * steps, step_every=m)
            timeline = simulate(made, Costs.equal(p))
            numbers = {"p": p, "m": m, "k": m}
            assert timeline.steady_idle_share == approx(value(idle, **numbers), abs=1e-9)
            for j in range(p):
                numbers["j"] = j
                assert timeline.peak_in_flight[j] == value(in_flight, **numbers)
                assert kept_versions(made, j) == value(versions, **numbers)
                assert staleness(made, j) == value(late, **numbers)


def test_the_fill_and_drain_of_a_segment_are_as_documented() -> None:
    formula = re.search(r"segment of n steps, `([^`]+)`", DOCUMENT.read_text())
    assert formula
    for p, n, k in ((2, 5, 3), (4, 7, 2), (5, 1, 1)):
        made = make_schedule("async-1f1b", stages=p, micro_batches=n * k, step_every=k)
        assert simulate(made, Costs.equal(p)).idle_share == approx(value(formula[1], p=p, n=n, k=k))
