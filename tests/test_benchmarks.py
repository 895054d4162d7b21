"""What the benchmarks rest on: a process that dies costs its case and not the run."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("workers")


@pytest.mark.parametrize(
    ("function", "cases", "limit_s", "why"),
    [
        (os._exit, [3], 60.0, "exit status 3"),
        (time.sleep, [0, 60], 8.0, "took over 8 s"),
    ],
)
def test_a_case_that_ends_its_process_is_named(
    workers: ModuleType,
    function: Callable[[Any], Any],
    cases: list[int],
    limit_s: float,
    why: str,
) -> None:
    answers = dict(workers.each(function, cases, processes=1, limit_s=limit_s))
    assert why in answers[cases[-1]].why
    assert all(answers[case] is None for case in cases[:-1])


def test_every_case_is_answered_once(workers: ModuleType) -> None:
    cases = [-3, 4, -5]
    answers = workers.each(abs, cases, processes=2, limit_s=60.0, cases_a_process=1)
    assert sorted(answers) == [(-5, 5), (-3, 3), (4, 4)]
