"""The memory that a run is predicted to have is the one that a plan for that run counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncpipe
from asyncpipe.runtime.config.mixed_precision import describe_memory
from asyncpipe.runtime.config.resolve import sized_plan
from asyncpipe.runtime.config.run_memory import memory_in_run
from asyncpipe.runtime.config.segments import make_segment
from asyncpipe.runtime.config.settings import RunConfig, Settings
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.tests.support.models.blocks import WIDTH, Classifier
from asyncpipe.tests.support.run_configs import run_config

SYNCHRONOUS = {"schedule": "1f1b", "optimizer": "adamw", "micro_batches": 8}
RUNS = {
    "as planned": (SYNCHRONOUS, {}),
    "momentum": (SYNCHRONOUS | {"optimizer": "momentum"}, {"optimizer": "sgd", "momentum": 0.9}),
    "gpipe": (SYNCHRONOUS | {"schedule": "gpipe"}, {"schedule": "gpipe"}),
    "recomputing": (SYNCHRONOUS | {"recompute": "all"}, {"recompute": "all"}),
    "stash": (
        {"schedule": "async-1f1b", "staleness": "stash", "micro_batches": 1},
        {"schedule": "async-1f1b", "staleness": "stash", "micro_batches": 1},
    ),
}


def planned(folder: Path, options: dict[str, Any], batch: int = 4) -> Plan:
    torch.manual_seed(7)
    return asyncpipe.partition(
        Classifier(torch.nn.LayerNorm),
        {"x": torch.randn(batch, WIDTH)},
        stages=3,
        cut_at=("blocks.0", "blocks.2"),
        loss="cross_entropy",
        name="blocks",
        output=str(folder),
        profile="analytic",
        save_weights=False,
        **options,
    )


def config(**given: Any) -> RunConfig:
    return run_config(**{**SYNCHRONOUS, "micro_batch_size": 4, "steps": 20, **given})


def in_run(plan: Plan, options: RunConfig) -> Plan:
    sized = sized_plan(plan, options)
    return memory_in_run(
        sized, plan, options, make_segment(sized, options, steps=8 if options.is_async else 1)
    )


@pytest.mark.parametrize("run", RUNS)
def test_memory_is_that_of_a_plan_for_the_run(run: str, tmp_path: Path) -> None:
    options, chosen = RUNS[run]
    base = planned(tmp_path / "base", SYNCHRONOUS)
    expected = planned(tmp_path / "other", options)
    for ours, theirs in zip(in_run(base, config(**chosen)).stages, expected.stages, strict=True):
        for part in ("parameters", "gradients", "optimizer", "versions", "activations"):
            assert getattr(ours.memory, part) == getattr(theirs.memory, part), (ours.index, part)
        assert ours.peak_bytes == ours.memory.total


def test_activations_follow_the_size_of_micro_batches(tmp_path: Path) -> None:
    base = planned(tmp_path / "base", SYNCHRONOUS)
    wide = planned(tmp_path / "wide", SYNCHRONOUS, batch=16)
    ours = in_run(base, config(micro_batch_size=16))
    for stage, expected in zip(ours.stages, wide.stages, strict=True):
        assert stage.memory.activations == pytest.approx(expected.memory.activations, rel=0.02)


def test_a_plan_with_recomputation_has_the_memory_of_a_run_without(tmp_path: Path) -> None:
    recomputing = planned(tmp_path / "again", SYNCHRONOUS | {"recompute": "all"})
    kept = planned(tmp_path / "kept", SYNCHRONOUS)
    for ours, expected in zip(
        in_run(recomputing, config(recompute="none")).stages, kept.stages, strict=True
    ):
        assert ours.memory.activations == expected.memory.activations


def test_copies_of_a_deep_warm_up_are_counted(tmp_path: Path) -> None:
    base = planned(tmp_path / "base", SYNCHRONOUS)
    options = config(schedule="async-1f1b", staleness="stash", micro_batches=1, ahead="6,3,0")
    copies = [stage.memory.versions for stage in in_run(base, options).stages]
    sizes = [stage.gradient_bytes for stage in base.stages]
    assert copies == [6 * sizes[0], 3 * sizes[1], 0]


def test_memory_of_soap_is_said_to_lack_its_bases(tmp_path: Path) -> None:
    base = planned(tmp_path / "base", SYNCHRONOUS)
    text = describe_memory(Settings(folder="x", optimizer="soap"), base)
    assert text.endswith("without the bases of soap")
    assert "bases" not in describe_memory(Settings(folder="x", optimizer="adamw"), base)
