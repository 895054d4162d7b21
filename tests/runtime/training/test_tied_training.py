"""A run of a model with tied weights: one parameter stays one, whatever scales stages' steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.distributed.equality import find_difference
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.executor.tied_parameters import shared_weights
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.training.clipping import squared_norm_alike
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.tests.support.models.hand_folders import write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "weight_decay": 0.1}
SCALED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clipped by stage": {"clip": 0.05, "clip_by": "stage"},
    "clipped in proportion": {"clip": 0.05, "clip_by": "proportion"},
    "delay-rate": SGD | {"staleness": "stash+delay-rate"},
    "hidden-delay-rate": {"optimizer": "muon", "staleness": "stash+hidden-delay-rate"},
    "delay-momentum": {"optimizer": "nadam", "staleness": "none+delay-momentum"},
    "pipemare-rate": SGD | {"staleness": "none+pipemare-rate"},
    "error-feedback": SGD | {"staleness": "stash+error-feedback"},
    "spike-compensation": SGD | {"staleness": "stash+spike-compensation"},
    "nesterov-last": SGD | {"staleness": "stash+nesterov-last"},
    "gap-aware": SGD | {"staleness": "stash+gap-aware"},
    "gap-aware and decay": {"staleness": "stash+gap-aware", "weight_decay": 0.5, "lr": 0.05},
    "dc-asgd-adaptive": SGD | {"staleness": "stash+dc-asgd-adaptive"},
    "predictions": {"staleness": "stash+msnag+delay-rate", "clip": 0.05},
    "soap": {"optimizer": "soap", "lr": 0.01, "refresh_every": 3},
    "a synchronous start": {"staleness": "stash+delay-rate", "sync_start": "3", "flush_every": 4},
    "a synchronous end": {"staleness": "stash+error-feedback", "sync_end": "3", "clip": 0.05},
    "2bw": {"schedule": "2bw", "staleness": "2bw+error-feedback+delay-rate", "micro_batches": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "text"
    write_text(folder)
    return folder


def train(folder: Path, output: Path, **given: Any) -> list[dict[str, Any]]:
    """The lines of the metrics of a run of both stages on one rank."""
    usual = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 1, "steps": 10, "threads": 1}
    usual["eval_batches"] = 4
    run(Settings(folder=str(folder), output=str(output), **usual | given), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SCALED)
def test_the_weights_that_are_saved_are_those_that_were_evaluated(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """A run ends with an error where the copies of a tied weight are not the same bits."""
    trained = train(folder, tmp_path / "run", **SCALED[name])
    again = train(
        folder, tmp_path / "again", init_from=str(tmp_path / "run" / "weights"), steps=0, warmup=0
    )
    assert not events_of(tmp_path / "run", "warning")
    losses = [
        next(line["loss"] for line in lines if line["event"] == "eval")
        for lines in (trained, again)
    ]
    assert losses[0] == losses[1]


def test_weights_that_come_apart_are_not_silent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = OptimizerStepper._step

    def wrong(
        self: OptimizerStepper, stage: int, version: int, factor: float, *shared: Any
    ) -> None:
        for parameter in self.shares[stage].shared:
            if parameter.grad is not None and (stage, version) == (1, 4):
                parameter.grad.mul_(1.001)
        step(self, stage, version, factor, *shared)

    monkeypatch.setattr(OptimizerStepper, "_step", wrong)
    with pytest.raises(AsyncPipeError, match="one shared parameter, but their values differ"):
        train(folder, tmp_path / "run", save_every=5, eval_batches=0)
    (warning,) = events_of(tmp_path / "run", "warning")
    assert warning.startswith("wte.weight of stage 0 and head.weight of stage 1 are one shared")
    lines = (tmp_path / "run.events").read_text().splitlines()
    events = [json.loads(line)[0] for line in lines]
    assert "step" in events[events.index("warning") :]  # already at the checkpoint
    assert list((tmp_path / "run" / "weights").glob("*.safetensors"))


def test_a_comparison_names_the_parameter(folder: Path) -> None:
    plan = read_plan(folder)
    first, second = nn.Module(), nn.Module()
    first.wte, second.head = nn.Linear(3, 2), nn.Linear(3, 2)
    second.head.load_state_dict(first.wte.state_dict())
    modules = {0: first, 1: second}
    assert find_difference(plan, modules, World()) is None
    with torch.no_grad():
        second.head.weight[0, 0] = torch.nextafter(second.head.weight[0, 0], torch.tensor(9.0))
    assert "head.weight of stage 1" in str(find_difference(plan, modules, World()))
    assert shared_weights(plan, 1) == {"head.weight": (0, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_holders_must_agree_on_has_the_same_bits_with_any_threads_and_strides(
    dtype: torch.dtype,
) -> None:
    """One gradient in two would not show that a sum depends on either, so there are ten."""
    generator = torch.Generator().manual_seed(1)
    threads = torch.get_num_threads()
    try:
        for _ in range(10):
            gradient = torch.randn(40, 2048, generator=generator).to(dtype)
            found = set()
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found |= {
                    float(squared_norm_alike(each))
                    for each in (gradient, gradient.T.contiguous().T)
                }
            assert len(found) == 1
            total = float(gradient.double().square().sum())
            assert found.pop() == pytest.approx(total, rel=1e-12)
    finally:
        torch.set_num_threads(threads)
