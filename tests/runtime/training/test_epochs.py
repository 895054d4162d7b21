"""`--epochs N` trains on N times the samples of the data, whichever rank opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.checkpoint.resuming import with_options_of_run
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.datasets import SAMPLES
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.launch import run as run_here
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

DATA = """
import torch

def points():
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()

def broken():
    raise ValueError("no points")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp"
    write_mlp(folder)
    return folder


@pytest.fixture
def points(tmp_path: Path) -> str:
    path = tmp_path / "points_of_epochs.py"
    path.write_text(DATA)
    return f"{path}:points"


def given(folder: Path, output: Path, **options: Any) -> Settings:
    usual: dict[str, Any] = {"schedule": "single", "micro_batches": 2, "micro_batch_size": 4}
    usual |= {"threads": 1, "log_every": 1, "folder": str(folder), "output": str(output)}
    return Settings(**(usual | options))


def steps(output: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


def test_epochs_are_the_steps_of_that_many_samples(
    folder: Path, tmp_path: Path, points: str
) -> None:
    """150 samples in steps of 8: 18 whole steps, and all that depends on their number."""
    run(given(folder, tmp_path / "epochs", data=points, epochs=3.0, decay="linear"), FACTORY)
    run(given(folder, tmp_path / "samples", data=points, samples=150, decay="linear"), FACTORY)
    found, expected = steps(tmp_path / "epochs"), steps(tmp_path / "samples")
    assert len(found) == 18 and found[-1]["epoch"] == pytest.approx(144 / 50)
    assert [each["loss"] for each in found] == [each["loss"] for each in expected]
    assert [each["lr"] for each in found] == [each["lr"] for each in expected]
    again = read_config(tmp_path / "epochs" / "config.toml")
    assert again["epochs"] == 3.0 and not again.keys() & {"steps", "samples"}


def test_a_part_of_an_epoch_and_the_left_over_micro_batches_are_trained_too(
    folder: Path, tmp_path: Path, points: str
) -> None:
    options: dict[str, Any] = {"data": points, "epochs": 0.56, "remainder": "proportional"}
    run(given(folder, tmp_path / "run", **options), FACTORY)
    assert [each["epoch"] for each in steps(tmp_path / "run")] == [0.16, 0.32, 0.48, 0.56]


def test_ranks_in_processes_agree_on_the_steps(folder: Path, tmp_path: Path, points: str) -> None:
    options: dict[str, Any] = {"schedule": "async-1f1b", "data": points, "epochs": 2.0}
    run(given(folder, tmp_path / "run", pin="none", **options), FACTORY)
    assert [each["step"] for each in steps(tmp_path / "run")] == list(range(1, 13))


def test_a_finished_run_of_epochs_is_left_alone_and_a_longer_one_continues(
    folder: Path, tmp_path: Path, points: str
) -> None:
    output = tmp_path / "run"
    run(given(folder, output, data=points, epochs=2.0, save_every=5), FACTORY)
    own = {"folder": str(folder), "output": str(output), "resume": "auto", "trust": True}
    run(Settings(**with_options_of_run(own)), FACTORY)
    assert "all 12 steps" in events_of(output, "note")[-1][1]
    run(Settings(**with_options_of_run(own | {"epochs": 3.0})), FACTORY)
    assert [each["step"] for each in steps(output)] == list(range(1, 19))


def test_an_error_in_the_data_and_a_second_length_are_told(
    folder: Path, tmp_path: Path, points: str
) -> None:
    output = tmp_path / "run"
    for name, value in (("samples", 100), ("steps", 7)):
        with pytest.raises(AsyncPipeError, match=f"--epochs 2, but --{name} is {value}"):
            run(given(folder, output, epochs=2.0, **{name: value}), FACTORY)
    with pytest.raises(AsyncPipeError, match=r"--dry-run does not open .*--epochs 2"):
        run_here(given(folder, output, data=points, epochs=2.0, dry_run=True), FACTORY)
    broken = points.replace(":points", ":broken")
    with pytest.raises(AsyncPipeError, match=r"points_of_epochs\.py:9"):
        run(given(folder, output, data=broken, epochs=2.0), FACTORY)


def test_a_dry_run_counts_the_steps_of_built_in_data(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    samples = SAMPLES - int(SAMPLES * 0.1)
    for length in ({"epochs": 1.0}, {"samples": samples}, {"samples": 2 * samples}):
        run_here(given(folder, output, optimizer="adamw", dry_run=True, **length), FACTORY)
    of_epochs, of_samples, of_more = (facts["optimizer"] for facts in events_of(output, "start"))
    assert " · warmup " in of_epochs
    assert of_epochs == of_samples != of_more
