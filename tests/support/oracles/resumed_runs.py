"""A run that is resumed at one of its checkpoints, and what it must equal: the run itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncpipe.runtime.checkpoint.folders import checkpoints_in, name_of, remove
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """The output of a run: losses and learning rates of its steps, its weights, and the state of
    its last checkpoint."""

    output: Path
    records: list[dict[str, Any]]
    weights: Tensors
    state: Tensors

    def of(self, name: str) -> dict[int, Any]:
        return {each["step"]: each.get(name) for each in self.records if each["event"] == "step"}


def tensors_in(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def train(folder: Path, output: Path, **given: Any) -> Trained:
    """A short run with a checkpoint every second step, all of which it keeps."""
    usual: dict[str, Any] = {"steps": 6, "micro_batches": 4, "save_every": 2, "keep_last": 99}
    usual |= {"log_every": 1, "threads": 1, "eval_batches": 0, "pin": "none"}
    run(Settings(folder=str(folder), output=str(output), **(usual | given)), FACTORY)
    return left_by(output)


def left_by(output: Path) -> Trained:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    newest = checkpoints_in(output)[:1]
    state = tensors_in(newest[0] / "state") if newest else {}
    return Trained(output, list(map(json.loads, lines)), tensors_in(output / "weights"), state)


def as_ended_at(trained: Trained, step: int, output: Path) -> Path:
    """A copy of a run's folder as if the run had been killed some time after a checkpoint."""
    shutil.copytree(trained.output, output)
    shutil.rmtree(output / "weights")
    for checkpoint in checkpoints_in(output):
        if checkpoint.name > name_of(step):
            remove(checkpoint)
    return output


def assert_same(found: Tensors, expected: Tensors) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_goes_on_as(trained: Trained, folder: Path, step: int, **given: Any) -> Trained:
    """Resumes the run after a step: losses, learning rates, weights and the whole last checkpoint
    must equal those of the uninterrupted run."""
    output = as_ended_at(trained, step, trained.output.with_name(f"resumed-{step}"))
    resumed = train(folder, output, resume="auto", **given)
    for name in ("loss", "lr", "grad_norm", "epoch"):
        assert resumed.of(name) == trained.of(name)
    assert_same(resumed.weights, trained.weights)
    assert_same(resumed.state, trained.state)
    return resumed
