"""A short part of `benchmarks/resume_stress.py`, and that it would see a single bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncpipe.tests.support.processes.quick_python import bin_folder

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("resume_stress")


@pytest.mark.parametrize(
    ("kind", "seed"), [("1f1b, 2 stages, random samples and criterion", 1), ("ddp, 2 replicas", 3)]
)
def test_a_run_that_is_killed_and_damaged_ends_with_the_same_bits(
    stress: ModuleType, tmp_path: Path, kind: str, seed: int
) -> None:
    place = stress.Place(tmp_path / "place", stress.KINDS[kind])
    expected = stress.undisturbed(place, "whole", bin_folder())
    row = stress.chain(place, "run", expected, seed=seed, kills=2, scripts=bin_folder())
    assert row["kills"] and not row["different"] and not row["orphans"]
    assert any("optimizer" in name for name in expected)
    assert any("random" in name for name in expected)


def test_one_bit_is_seen(stress: ModuleType) -> None:
    tensor = torch.ones(3)
    near = torch.nextafter(tensor, torch.full((3,), 2.0))
    found = {"a": tensor, "b": torch.tensor(float("nan")), "c": 1, "d": torch.tensor(0.0)}
    assert stress.differences(found, dict(found)) == []
    other = {"a": near, "b": found["b"], "c": 1.5, "d": torch.tensor(-0.0), "e": 1}
    assert stress.differences(found, other) == ["a", "c", "d", "e"]
