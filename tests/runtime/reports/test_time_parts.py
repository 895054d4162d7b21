"""The parts of the ranks' time of a run whose stages change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.measures import rate_of
from asyncpipe.runtime.reports.time_parts import parts_of

SHARES = ("busy", "waiting", "sending", "data", "overhead", "exchange", "writing")


def step(at: int, step_ms: float, actions: dict[str, list[float]], **shares: list[float]) -> Any:
    ranks = len(shares["busy"])
    parts = {f"{name}_shares": shares.get(name, [0.0] * ranks) for name in SHARES}
    rate = {"samples_per_s": 160 * 1000 / step_ms}
    return {"event": "step", "step": at, "step_ms": step_ms, "action_ms": actions, **parts, **rate}


def test_the_parts_and_the_throughput_of_an_elastic_run_are_those_of_all_phases(
    tmp_path: Path,
) -> None:
    """5 steps of 20 ms on two stages, then 5 of 10 ms on one stage next to an idle process."""
    two = {"F": [1.0, 2.0], "B": [2.0, 4.0], "S": [2.0, 4.0]}
    records = [
        step(1, 99.0, two, busy=[1.0, 1.0]),
        step(6, 20.0, two, busy=[0.4, 0.8], waiting=[0.5, 0.1], data=[0.1, 0.1]),
        step(11, 10.0, {"F": [1.0], "B": [1.0], "S": [2.0]}, busy=[0.8, 0.0], waiting=[0.2, 1.0]),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "config.toml").write_text("elastic = true\n")
    first = {"forward": 0.15, "backward": 0.3, "optimizer": 0.15, "waiting": 0.3, "data": 0.1}
    second = {"forward": 0.15, "backward": 0.15, "optimizer": 0.1, "waiting": 0.6, "data": 0.0}
    expected = {name: (2 * first[name] + second[name]) / 3 for name in first}
    run = read_run(tmp_path)
    assert parts_of(run) == pytest.approx(expected | {"exchange": 0.0, "other": 0.0})
    assert rate_of(run) == pytest.approx(10 * 160 / 0.15)
