"""Replicas of a pipeline train as one pipeline with all their micro-batches would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.tensors import read_tensors
from asyncpipe.runtime.training.launch import run
from asyncpipe.runtime.training.settings import Settings
from asyncpipe.tests.runtime.handmade import PlainMlp, PlainText, write_mlp, write_text
from asyncpipe.tests.runtime.silent_reporter import FACTORY, events_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(folder: Path, output: Path, **given: Any) -> Path:
    options: dict[str, Any] = {
        "steps": 3,
        "log_every": 1,
        "threads": 1,
        "pin": "none",
        "dtype": "float64",
        "micro_batches": 2,
    }
    run(Settings(folder=str(folder), output=str(output), **(options | given)), FACTORY)
    return output


def assert_same_training(one: Path, other: Path, model: torch.nn.Module) -> None:
    for event, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        expected = [line[name] for line in events_of(one, event)]
        found = [line[name] for line in events_of(other, event)]
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=False), (event, name)
    names = dict(model.named_parameters())
    weights = read_tensors(one / "weights", names)
    for name, tensor in read_tensors(other / "weights", names).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-12, atol=1e-12, msg=name)


def test_two_pipelines_train_as_one_with_twice_the_micro_batches(
    folders: Path, tmp_path: Path
) -> None:
    given = {"data": str(folders / "text.txt"), "clip": 0.5}
    one = train(folders / "text", tmp_path / "one", schedule="single", micro_batches=4, **given)
    two = train(
        folders / "text", tmp_path / "two", replicas=2, check_replicas=1, trace="1", **given
    )
    assert_same_training(one, two, PlainText())
