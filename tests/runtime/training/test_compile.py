"""`--compile`: the numbers of stages that are run as they are written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils

from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.executor.loading import run_stage, stage_builder
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import train

ASYNC: dict[str, Any] = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "noisy", noisy=True)
    return folder


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "single", "recompute": "0"},
        ASYNC | {"staleness": "stash+msnag", "optimizer": "adamw"},
    ],
)
def test_compiled_stages_have_the_numbers_of_plain_ones(
    folder: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    """With dropout and batch norm, in training and in evaluation."""
    options = {"steps": 3, "save_every": 0, "eval_batches": 2, "lr": 0.01, **given}
    plain = train(folder / "noisy", tmp_path / "plain", **options)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = train(folder / "noisy", tmp_path / "compiled", compile=True, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > made
    for step, loss in plain.of("loss").items():
        assert math.isclose(compiled.of("loss")[step], loss, rel_tol=1e-5)
    assert compiled.weights.keys() == plain.weights.keys()
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], tensor, rtol=1e-4, atol=1e-5)

    def evaluated(records: list[dict[str, Any]]) -> list[float]:
        return [each["loss"] for each in records if each["event"] == "eval"]

    assert evaluated(compiled.records) == pytest.approx(evaluated(plain.records), rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_generated_stage_is_one_graph(case: str, tmp_path: Path) -> None:
    plan = read_plan(cut(CASES[case], 2, tmp_path / "cut"))
    values: dict[str, Any] = dict(CASES[case].example_inputs)
    for spec in plan.stages:
        stage = stage_builder(tmp_path / "cut", spec)()
        stage.compile(backend="eager", fullgraph=True)  # fails where a graph would break
        values |= run_stage(spec, stage, values)


def test_frozen_blocks_do_not_use_up_the_versions_that_torch_keeps(
    folder: Path, tmp_path: Path
) -> None:
    torch._dynamo.utils.counters.clear()
    options = {"steps": 2, "save_every": 0, "schedule": "single", "compile": True}
    with torch._dynamo.config.patch(recompile_limit=1):
        train(folder / "noisy", tmp_path / "run", freeze="1=1", freeze_every=1, **options)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 4 and not counted["unimplemented"]


def test_a_schedule_that_splits_backwards_and_a_missing_compiler_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    from torch._inductor import config

    with pytest.raises(AsyncPipeError, match="--compile, but zb-h1 splits backwards"):
        train(folder / "noisy", tmp_path / "run", compile=True, schedule="zb-h1")
    # monkeypatch would hide the entry at its end, since the configuration is no ordinary module.
    missing = config.patch({"cpp.cxx": ("/nowhere/c++",)})
    with missing, pytest.raises(AsyncPipeError, match=r"--compile needs a C\+\+ compiler"):
        train(folder / "noisy", tmp_path / "run", compile=True, schedule="single")
