"""From a model to its training: a plan with a stage on several ranks is found, foreseen and run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import asyncpipe
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.cluster import cluster_of_hosts
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.plan.forecast import describe_forecast, forecast_one_step, forecast_step
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.tests.support.processes.quick_python import bin_folder, run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

ROOT = Path(__file__).parent.parent
SIGNALS = f"{ROOT / 'examples' / 'signals.py'}"


def plan_of(folder: Path, method: str) -> Plan:
    source = load_model(f"{SIGNALS}:build")
    given: dict[str, Any] = {"schedule": "1f1b", "profile": "analytic", "micro_batches": 4}
    # Gradients would cross hosts if all three devices had all stages.
    given["devices"] = cluster_of_hosts("a:2,b:1")
    return asyncpipe.partition(
        source.model,
        source.example_inputs,
        name="signals",
        stages=3,
        method=method,
        output=folder,
        **given,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated") / "signals"


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return plan_of(folder, "pipedream")


def settings_of(folder: Path, output: Path, **options: Any) -> Settings:
    given: dict[str, Any] = {
        "micro_batches": 6,
        "steps": 3,
        "log_every": 1,
        "threads": 1,
        "pin": "none",
        "dtype": "float64",
        "criterion": "cross_entropy",
        "data": f"{SIGNALS}:data",
    }
    return Settings(folder=str(folder), output=str(output), **(given | options))


def figures(output: Path) -> list[float]:
    return [line[name] for line in events_of(output, "step") for name in ("loss", "grad_norm")]


def test_its_step_is_simulated_with_the_replicas_and_shorter_than_without(
    plan: Plan, tmp_path: Path
) -> None:
    assert plan.stage_replicas == ((0,), (1, 2))
    step = forecast_step(plan, "1f1b", plan.setting.micro_batches)
    assert plan.setting.step_ms == pytest.approx(step.step_ms)
    assert step.timeline.ranks == 3
    assert forecast_one_step(plan, "1f1b", 8).timeline.ranks == 3
    assert "predicted 1f1b step on 3 ranks" in describe_forecast(plan)
    chain = plan_of(tmp_path / "chain", "chain")
    assert plan.setting.step_ms < chain.setting.step_ms
    assert plan.setting.step_bound_ms <= plan.setting.step_ms


def test_it_trains_as_one_process_does(folder: Path, plan: Plan, tmp_path: Path) -> None:
    run(settings_of(folder, tmp_path / "one", schedule="single"), FACTORY)
    run(settings_of(folder, tmp_path / "three", check_replicas=1), FACTORY)
    found = figures(tmp_path / "three")
    assert found == pytest.approx(figures(tmp_path / "one"), rel=1e-9)
    (end,) = events_of(tmp_path / "three", "end")
    assert 0 < end["simulated_step_ms"]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_under_torchrun_it_does_too(
    folder: Path, plan: Plan, tmp_path: Path, transport: str
) -> None:
    given = ["--steps", "3", "--micro-batches", "6", "--criterion", "cross_entropy"]
    given += ["--data", f"{SIGNALS}:data", "--threads", "1", "--dtype", "float64"]
    given += ["--log-every", "1", "--transport", transport, "--output", str(tmp_path / "run")]
    agent = [bin_folder() / "torchrun", "--standalone", "--nproc-per-node", "3", "--no-python"]
    result = subprocess.run(
        [*agent, bin_folder() / "asyncpipe-train", folder, *given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 processes, stage 1 on ranks 1-2 by torchrun" in result.stdout
    run(settings_of(folder, tmp_path / "one", schedule="single"), FACTORY)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    expected = [line["loss"] for line in events_of(tmp_path / "one", "step")]
    assert losses == pytest.approx(expected, rel=1e-9)
