"""Whole runs in mixed precision: autocast, loss scale, cast boundaries, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.mixed_precision import describe_memory, precision_warning
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.training.stage_optimizer import make_optimizer
from asyncpipe.tests.support.models.hand_folders import PlainMlp, PlainText, write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

STEPS, MICRO_BATCHES = 6, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(folder: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """The step lines of its metrics."""
    given: dict[str, Any] = {
        "schedule": "single",
        "micro_batches": MICRO_BATCHES,
        "steps": STEPS,
        "log_every": 1,
        "threads": 1,
        "decay": "none",
        "warmup": 0,
        "eval_batches": 0,
    }
    if folder.name == "text":
        given["data"] = str(folder.parent / "words.txt")
    run(Settings(folder=str(folder), output=str(output), **(given | options)), FACTORY)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def plain(folder: Path, **options: Any) -> tuple[list[float], list[float], list[float]]:
    """torch's own loop with autocast, GradScaler and clipping: losses, norms and scales."""
    data = str(folder.parent / "words.txt") if folder.name == "text" else None
    asked = Settings(folder=str(folder), schedule="single", steps=STEPS, data=data, **options)
    job = make_job(replace(asked, decay="none", warmup=0))
    settings = job.config
    opened = open_data(settings, job.task, job.plan, Path())
    order = SampleOrder(len(opened.train), settings.seed)
    feed = Feed(opened.train, order, StepBatch.of(settings), job.task.fields)
    torch.manual_seed(7)
    model: nn.Module = PlainText() if folder.name == "text" else PlainMlp()
    optimizer = make_optimizer(model.parameters(), settings)
    dtype = getattr(torch, settings.precision)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=settings.loss_scale or 1.0, enabled=settings.is_scaled
    )
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        total = 0.0
        for i in range(MICRO_BATCHES):
            fields = feed(step * MICRO_BATCHES + i)
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, fields)
            scaler.scale(loss / MICRO_BATCHES).backward()
            total += loss.double().item() / MICRO_BATCHES
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings.clip or 1e9)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, norms, scales


def loss_of(model: nn.Module, fields: dict[str, Tensor]) -> Tensor:
    if isinstance(model, PlainMlp):
        return F.cross_entropy(model(fields["x"]), fields["target"])
    loss: Tensor = model(**fields)[0]
    return loss


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines]


@pytest.mark.parametrize("name", ["mlp", "text"])
def test_bfloat16_trains_as_the_loop_under_autocast(
    name: str, folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": "bfloat16", "clip": 0.5, "micro_batches": MICRO_BATCHES}
    lines = train(folders / name, tmp_path / "run", **options)
    losses, norms, _ = plain(folders / name, **options)
    assert column(lines, "loss")[0] == losses[0]
    assert column(lines, "loss") == pytest.approx(losses, rel=1e-4)
    assert column(lines, "grad_norm") == pytest.approx(norms, rel=1e-3)
    assert "loss_scale" not in lines[0]


@pytest.mark.parametrize("name", ["mlp", "text"])
@pytest.mark.parametrize("loss_scale", [2.0**16, 2.0**22])
def test_float16_trains_and_skips_as_the_loop_with_gradscaler(
    name: str, loss_scale: float, folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "precision": "float16",
        "loss_scale": loss_scale,
        "clip": 0.5,
        "micro_batches": MICRO_BATCHES,
    }
    lines = train(folders / name, tmp_path / "run", **options)
    losses, norms, scales = plain(folders / name, **options)
    assert column(lines, "loss") == pytest.approx(losses, rel=1e-4)
    assert column(lines, "loss_scale") == scales
    is_skipped = [after < before for before, after in pairwise([loss_scale, *scales])]
    assert column(lines, "skipped") == [sum(is_skipped[: n + 1]) for n in range(STEPS)]
    for line, skipped, norm in zip(lines, is_skipped, norms, strict=True):
        assert line["grad_norm"] == (None if skipped else pytest.approx(norm, rel=1e-3))
    if loss_scale > 2**16:
        assert any(is_skipped) and not all(is_skipped)
    events = events_of(tmp_path / "run", "step")
    assert events[-1]["skipped"] == lines[-1]["skipped"]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bfloat16", "clip": 0.5},
        {"precision": "float16", "clip": 0.5, "loss_scale": 2.0**22},
        {"precision": "float16", "clip": 0.0, "loss_scale": 2.0**22},
        {"precision": "full", "clip": 0.5},
    ],
    ids=["bfloat16", "float16", "float16 unclipped", "full"],
)
def test_processes_scale_clip_and_skip_as_one(
    options: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    alone = train(folders / "text", tmp_path / "1", **options)
    together = train(folders / "text", tmp_path / "2", schedule="1f1b", **options)
    for name in ("loss", "grad_norm", "lr"):
        assert column(alone, name) == column(together, name), name
    if options["precision"] == "float16":
        assert column(alone, "skipped") == column(together, "skipped")
        assert 0 < together[-1]["skipped"] < STEPS
        assert column(alone, "loss_scale") == column(together, "loss_scale")


def test_processes_may_cast_what_they_send(folders: Path, tmp_path: Path) -> None:
    cast = {"schedule": "1f1b", "boundary_dtype": "bfloat16"}
    lines = train(folders / "text", tmp_path / "1", **cast)
    exact = train(folders / "text", tmp_path / "2")
    assert column(lines, "loss") != column(exact, "loss")
    assert column(lines, "loss") == pytest.approx(column(exact, "loss"), rel=1e-2)
    (facts,) = events_of(tmp_path / "1", "start")
    assert facts["precision"] == "boundaries have 50% of the bytes as planned"


def test_asynchronous_runs_compute_in_bfloat16(folders: Path, tmp_path: Path) -> None:
    options = {"schedule": "async-1f1b", "precision": "bfloat16", "clip": 0.5, "lr": 0.01}
    lines = train(folders / "text", tmp_path / "run", **options)
    assert lines[-1]["loss"] < lines[0]["loss"]


def refusal(folder: Path, **options: Any) -> SettingsError:
    with pytest.raises(SettingsError) as error:
        make_job(Settings(folder=str(folder), **options))
    return error.value


def test_what_does_not_go_together_is_said(folders: Path) -> None:
    refused = partial(refusal, folders / "mlp")
    error = refused(precision="bfloat16", dtype="float64")
    assert error.what.startswith("--precision bfloat16 casts float32 weights")
    error = refused(precision="float16", schedule="async-1f1b")
    assert "leave out the same steps" in error.what and "--precision bfloat16" in error.cure
    error = refused(precision="bfloat16", schedule="async-1f1b", staleness="none")
    assert error.cure == "--staleness stash, or --precision full."
    assert "--loss-scale 8, but nothing overflows" in refused(loss_scale=8.0).what
    error = refused(loss_scale=8.0, precision="bfloat16")
    assert "under --precision bfloat16 losses are not scaled" in error.what
    error = refused(boundary_dtype="bfloat16", schedule="single")
    assert "under single nothing is sent" in error.what
    with pytest.raises(SettingsError, match="Did you mean --precision bfloat16"):
        Settings(folder="x", precision="bf16")


def profiled(plan: Plan, dtype: str) -> Plan:
    stages = tuple(
        replace(stage, peak_bytes=3 << 20, memory=replace(stage.memory, activations=2 << 20))
        for stage in plan.stages
    )
    command = f"{plan.command} --dtype bfloat16" if dtype == "bfloat16" else plan.command
    return replace(plan, profile={"dtype": dtype}, stages=stages, command=command)


def test_a_plan_of_another_precision_is_said(folders: Path) -> None:
    plan = read_plan(folders / "mlp")
    full, half = Settings(folder="x"), Settings(folder="x", precision="float16")
    for settings, dtype in ((full, "float32"), (half, "bfloat16")):
        assert precision_warning(settings, profiled(plan, dtype)) == ""
        assert describe_memory(settings, profiled(plan, dtype)).endswith("(sum over all stages)")
    own = describe_memory(replace(full, optimizer="own.py:make"), profiled(plan, "float32"))
    assert own.endswith("(sum over all stages), without the state of own.py:make")
    command = "asyncpipe-partition --model tiny_mlp --stages 2"
    assert precision_warning(half, profiled(plan, "float32")) == (
        "the plan was profiled in float32, this run computes in float16: cuts and predictions are "
        f"those of float32. {command} --dtype bfloat16"
    )
    assert precision_warning(full, profiled(plan, "bfloat16")).endswith(f"bfloat16. {command}")
    assert describe_memory(half, profiled(plan, "float32")) == (
        "6.0 MiB predicted for float32 (sum over all stages), including 4.0 MiB of activations, "
        "about half of that under float16"
    )


def test_the_precision_is_said_before_a_run(folders: Path, tmp_path: Path) -> None:
    train(folders / "mlp", tmp_path / "run", precision="float16", steps=1)
    (facts,) = events_of(tmp_path / "run", "start")
    assert facts["precision"] == (
        "autocast to float16; weights and optimizer keep their dtypes · loss scale 65536 at first"
    )


def test_an_uneven_step_is_the_same_in_one_process_and_in_two(
    folders: Path, tmp_path: Path
) -> None:
    options = {
        "precision": "float16",
        "clip": 0.5,
        "global_batch_size": 7,
        "micro_batch_size": 2,
        "steps": 3,
    }
    alone = train(folders / "text", tmp_path / "1", **options)
    together = train(folders / "text", tmp_path / "2", schedule="1f1b", **options)
    for name in ("loss", "grad_norm", "loss_scale", "skipped"):
        assert column(alone, name) == column(together, name), name
