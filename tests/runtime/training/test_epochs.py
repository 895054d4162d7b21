"""`--epochs N` trains on N times the samples of the data, whichever rank opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.checkpoint.resuming import with_options_of_run
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.datasets import SAMPLES
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.launch import run as run_here
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
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
    write_mlp(folder.parent / "mlp4", stages=4)
    write_mlp(folder.parent / "noisy", noisy=True)
    write_text(folder.parent / "text")
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
    """150 samples in steps of 8: 18 whole steps and one of 6 samples, and all that depends on
    their number."""
    options: dict[str, Any] = {"data": points, "decay": "linear"}
    run(given(folder, tmp_path / "epochs", epochs=3.0, **options), FACTORY)
    options |= {"samples": 150, "remainder": "proportional"}
    run(given(folder, tmp_path / "samples", **options), FACTORY)
    found, expected = steps(tmp_path / "epochs"), steps(tmp_path / "samples")
    assert len(found) == 19 and found[-1]["epoch"] == 3.0
    assert [each["loss"] for each in found] == [each["loss"] for each in expected]
    assert [each["lr"] for each in found] == [each["lr"] for each in expected]
    again = read_config(tmp_path / "epochs" / "config.toml")
    assert again["epochs"] == 3.0 and not again.keys() & {"steps", "samples"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"schedule": "1f1b", "replicas": 2, "micro_batches": 2, "clip": 0.1}),
        ("mlp", {"schedule": "async-1f1b", "flush_every": 1, "ranks": 1}),
        ("mlp", {"schedule": "auto", "ranks": 1}),
        ("mlp4", {"schedule": "zb-v", "ranks": 2}),
        ("noisy", {"schedule": "gpipe", "batch_norm": "mini-batch", "epochs": 1.08}),
        ("text", {"schedule": "ddp", "replicas": 2}),
        ("text", {"schedule": "1f1b", "replicas": 2, "micro_batches": 2, "check_replicas": 1}),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) else None,
)
def test_an_epoch_that_steps_do_not_divide_trains_alike_on_any_ranks(
    folder: Path, tmp_path: Path, points: str, name: str, options: dict[str, Any]
) -> None:
    """53 samples in 3 steps of 16 and one of 5: of its 4 micro-batches one is smaller and two are
    empty, so that the second of two replicas has none."""
    usual: dict[str, Any] = {"dtype": "float64", "data": points, "micro_batches": 4, "pin": "none"}
    usual |= {"epochs": 1.06, "optimizer": "sgd", "lr": 0.1, "clip": 0.0}
    if name == "text":  # 123 samples in 7 steps of 16, and one of 11: each holder of the tied
        (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 97)
        usual |= {"data": str(tmp_path / "text.txt"), "epochs": 1.0}
    folders = folder.parent
    usual |= {key: options[key] for key in ("clip", "batch_norm", "epochs") if key in options}
    run(given(folders / name, tmp_path / "plain", **usual), FACTORY)
    run(given(folders / name, tmp_path / "run", **(usual | options)), FACTORY)
    expected, found = steps(tmp_path / "plain"), steps(tmp_path / "run")
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected])
    assert [each["epoch"] for each in found] == [each["epoch"] for each in expected]
    assert found[-1]["epoch"] == usual["epochs"] != 3 * 16 / 50
    names = [key for key in read_plan(folders / name).state_keys if key != "head.weight"]
    weights = [read_tensors(tmp_path / made / "weights", names) for made in ("plain", "run")]
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor, rtol=1e-12, atol=1e-12, msg=key)


def test_what_whole_steps_leave_over_can_be_dropped(
    folder: Path, tmp_path: Path, points: str
) -> None:
    options: dict[str, Any] = {"data": points, "epochs": 0.56, "remainder": "drop"}
    run(given(folder, tmp_path / "run", **options), FACTORY)
    assert [each["epoch"] for each in steps(tmp_path / "run")] == [0.16, 0.32, 0.48]


def test_ranks_in_processes_agree_on_the_steps(folder: Path, tmp_path: Path, points: str) -> None:
    options: dict[str, Any] = {"schedule": "async-1f1b", "data": points, "epochs": 2.0}
    run(given(folder, tmp_path / "run", pin="none", **options), FACTORY)
    assert [each["step"] for each in steps(tmp_path / "run")] == list(range(1, 14))


def test_a_finished_run_of_epochs_is_left_alone_and_a_longer_one_continues(
    folder: Path, tmp_path: Path, points: str
) -> None:
    output = tmp_path / "run"
    run(given(folder, output, data=points, epochs=2.0, save_every=5), FACTORY)
    own = {"folder": str(folder), "output": str(output), "resume": "auto", "trust": True}
    run(Settings(**with_options_of_run(own)), FACTORY)
    assert "all 13 steps" in events_of(output, "note")[-1][1]
    run(Settings(**with_options_of_run(own | {"epochs": 3.0})), FACTORY)
    found = steps(output)
    assert [each["step"] for each in found] == list(range(1, 21))
    assert found[12]["epoch"] == 2.0 and found[-1]["epoch"] == 3.0
    run(Settings(**with_options_of_run(own | {"epochs": 4.0, "micro_batches": 3})), FACTORY)
    assert steps(output)[-1]["epoch"] == 4.0  # 50 samples in 4 steps of 12 and one of 2


def test_an_error_in_the_data_and_a_second_length_are_told(
    folder: Path, tmp_path: Path, points: str
) -> None:
    output = tmp_path / "run"
    for name, value in (("samples", 100), ("steps", 7)):
        with pytest.raises(AsyncPipeError, match=f"--epochs 2, but --{name} is {value}"):
            run(given(folder, output, epochs=2.0, **{name: value}), FACTORY)
    with pytest.raises(AsyncPipeError, match=r"--dry-run leaves .*--epochs 2"):
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
