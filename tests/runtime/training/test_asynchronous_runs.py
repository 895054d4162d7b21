"""Asynchronous training of generated folders: flushes, a synchronous start, samples, and what is
said of staleness. All stages are on one rank, in the order in which several would step."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from asyncpipe.runtime.config.asynchronous_options import describe_copies
from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.segments import make_segment, segments
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import StageMemory, read_plan
from asyncpipe.runtime.schedule.asynchronous import Delays, async_1f1b
from asyncpipe.runtime.schedule.interleaved import fold
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.runtime.training.run_summary import describe_algorithm
from asyncpipe.tests.support.models.hand_folders import PlainMlp, write_mlp
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of
from asyncpipe.tests.support.run_configs import run_config

STAGES, EVERY = 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp"
    write_mlp(folder, stages=STAGES)
    return folder


def options(given: dict[str, Any]) -> dict[str, Any]:
    usual = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": EVERY, "log_every": 1}
    length = {} if "samples" in given else {"steps": 8}
    return usual | {"threads": 1, "eval_batches": 0} | length | given


def train(folder: Path, output: Path, **given: Any) -> list[dict[str, Any]]:
    """The lines of the run's metrics."""
    run(Settings(folder=str(folder), output=str(output), **options(given)), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_of(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines if line["event"] == "step"]


def weights(output: Path) -> dict[str, torch.Tensor]:
    files = sorted((output / "weights").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def delays_of_steps(ends: list[int], steps: int) -> list[float]:
    """The mean delay of each step where the pipeline drains after the steps in `ends`."""
    found: list[float] = []
    for start, end in zip([0, *ends], [*ends, steps], strict=True):
        delays = Delays(tuple(range(STAGES - 1, -1, -1)), EVERY, start * EVERY, start)
        each = [entry[3] - entry[2] for entry in delays.ledger((end - start) * EVERY)]
        per_step = STAGES * EVERY
        found += [sum(each[at : at + per_step]) / per_step for at in range(0, len(each), per_step)]
    return found


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, []),
        ({"flush_every": 3}, [3, 6]),
        ({"eval_every": 4, "eval_batches": 1}, [4]),
        ({"sync_start": "25%"}, [1, 2]),
        ({"sync_start": "1", "sync_end": "25%"}, [1, 6, 7]),
    ],
)
def test_metrics_have_the_delays_of_the_ledger(
    folder: Path, tmp_path: Path, given: dict[str, Any], ends: list[int]
) -> None:
    lines = train(folder, tmp_path / "run", **given)
    assert steps_of(lines, "delay_mean") == pytest.approx(delays_of_steps(ends, 8), abs=1e-4)
    found = lines[-1]["staleness"]
    assert found["delay_max"] == max(steps_of(lines, "delay_max")) <= 2
    assert found["passages"] == 8 * EVERY * STAGES and found["unexpected"] == 0


def test_a_version_that_the_closed_form_does_not_have_is_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = OptimizerStepper.on_ledger_entry

    def wrong(self: OptimizerStepper, entry: Any) -> None:
        is_one = (entry.stage, entry.micro_batch) == (0, 9)
        told(self, replace(entry, forward_version=entry.forward_version - 1) if is_one else entry)

    monkeypatch.setattr(OptimizerStepper, "on_ledger_entry", wrong)
    lines = train(folder, tmp_path / "run")
    assert lines[-1]["staleness"]["unexpected"] == 1


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_start_as_long_as_the_run_is_the_synchronous_run(
    folder: Path, tmp_path: Path, clip: float
) -> None:
    lines = train(folder, tmp_path / "async", sync_start="8", clip=clip, optimizer="adamw")
    plain = train(folder, tmp_path / "sync", schedule="single", clip=clip, optimizer="adamw")
    for name in ("loss", "lr", "grad_norm"):
        assert steps_of(lines, name) == steps_of(plain, name)
    assert set(steps_of(lines, "delay_max")) == {0}
    expected = weights(tmp_path / "sync")
    for name, value in weights(tmp_path / "async").items():
        assert torch.equal(value, expected[name])


def test_a_start_is_synchronous_and_what_follows_is_not(folder: Path, tmp_path: Path) -> None:
    lines = train(folder, tmp_path / "async", sync_start="3")
    plain = train(folder, tmp_path / "sync", schedule="single")
    assert steps_of(lines, "loss")[:4] == steps_of(plain, "loss")[:4]
    assert steps_of(lines, "loss")[-1] != steps_of(plain, "loss")[-1]


@pytest.mark.parametrize("staleness", ["stash", "stash+error-feedback"])
def test_an_end_is_that_of_the_run_when_it_resumes_synchronously(
    folder: Path, tmp_path: Path, staleness: str
) -> None:
    given: dict[str, Any] = {"optimizer": "adamw", "clip": 0.05, "decay": "cosine", "lr": 0.01}
    given |= {"save_every": 3, "staleness": staleness}
    lines = train(folder, tmp_path / "end", sync_end="2", **given)
    start = train(folder, tmp_path / "start", **given)
    checkpoint = tmp_path / "start" / "checkpoints" / "step-000006"
    given |= {"schedule": "single", "ranks": None, "staleness": None}
    rest = train(folder, tmp_path / "resumed", resume=str(checkpoint), **given)
    for name in ("loss", "lr", "grad_norm"):
        assert steps_of(lines, name) == steps_of(start, name)[:6] + steps_of(rest, name)
    assert steps_of(lines, "loss")[-1] != steps_of(start, "loss")[-1]
    expected = weights(tmp_path / "resumed")
    for name, value in weights(tmp_path / "end").items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("staleness", ["stash+error-feedback", "stash"])
def test_weights_that_look_ahead_come_back_where_a_run_resumes_at_its_end(
    folder: Path, tmp_path: Path, staleness: str
) -> None:
    given: dict[str, Any] = {"save_every": 8, "eval_batches": 1}
    lines = train(folder, tmp_path / "run", staleness="stash+error-feedback", **given)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000008"
    again = train(folder, tmp_path / "again", resume=str(checkpoint), staleness=staleness, **given)
    first, second = (
        [line["loss"] for line in of_one if line["event"] == "eval"] for of_one in (lines, again)
    )
    assert second[-1] == pytest.approx(first[-1], rel=1e-6)
    expected = weights(tmp_path / "run")
    for name, value in weights(tmp_path / "again").items():
        torch.testing.assert_close(value, expected[name])


def test_a_flush_after_every_step_is_synchronous(folder: Path, tmp_path: Path) -> None:
    lines = train(folder, tmp_path / "async", flush_every=1)
    plain = train(folder, tmp_path / "sync", schedule="single")
    assert steps_of(lines, "loss") == steps_of(plain, "loss")


@pytest.mark.parametrize("schedule", ["async-1f1b", "single"])
def test_a_short_last_step_counts_as_much_less(folder: Path, tmp_path: Path, schedule: str) -> None:
    """7 samples of 8: 7/8 of the gradient of their mean, at 7/8 of the learning rate."""
    given = {"schedule": schedule, "optimizer": "sgd", "lr": 0.5, "momentum": 0.0, "decay": "none"}
    given |= {"samples": (2 * EVERY + 1) * 4 + 3}
    train(folder, tmp_path / "drop", **given)
    lines = train(folder, tmp_path / "short", remainder="proportional", **given)
    assert steps_of(lines, "step") == [1, 2, 3]
    job = make_job(Settings(folder=str(folder), **options(given)))
    data = open_data(job.config, job.task, job.plan, Path())
    order = SampleOrder(len(data.train), job.config.seed)
    last = Feed(data.train, order, StepBatch((7,), first_sample=16), job.task.fields)(0)
    model = PlainMlp()
    model.load_state_dict(weights(tmp_path / "drop"))
    nn.functional.cross_entropy(model(last["x"]), last["target"]).backward()
    after = weights(tmp_path / "short")
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        expected = weight - 0.5 * (7 / 8) * (weight.grad * 7 / 8)
        torch.testing.assert_close(after[name], expected.detach())


def test_samples_make_steps_over_epochs_without_a_drain(folder: Path) -> None:
    job = make_job(Settings(folder=str(folder), **options({"samples": 20_000})))
    assert job.config.steps == 20_000 // (4 * EVERY)
    assert len(list(segments(job.config))) == 2  # of 4096 micro-batches at most
    again = make_job(replace(job.config, output=None))
    assert again.config.steps == job.config.steps


def test_staleness_is_told_before_the_run_and_at_its_end(folder: Path, tmp_path: Path) -> None:
    lines = train(
        folder, tmp_path / "run", ahead="2x", flush_every=4, sync_start="1", sync_end="25%"
    )
    facts = events_of(tmp_path / "run", "start")[0]
    (line,) = [line for line in lines if line["event"] == "start"]
    assert line["methods"] == ["stash"]
    assert facts["staleness"] == (
        "stage 0: 3 steps, stage 1: 2 steps, stage 2: 1 step, stage 3: none"
    )
    assert facts["schedule"].endswith(
        "drained at evaluations and every 4 steps; synchronous 1f1b for the first 1 step and "
        "the last 2 steps; --ahead 2x"
    )


def test_the_copies_of_weights_are_told_before_the_run(folder: Path) -> None:
    planned = read_plan(folder)
    plan = replace(
        planned,
        stages=tuple(
            replace(stage, memory=StageMemory(gradients=2**20)) for stage in planned.stages
        ),
    )
    settings = run_config(folder=str(folder), **options({"staleness": "stash"}))
    one_each = async_1f1b(4, 4, step_every=1)
    assert describe_copies(plan, one_each, settings) == (
        "rank 0: 3 copies, 3.0 MiB, rank 1: 2 copies, 2.0 MiB, rank 2: 1 copy, 1.0 MiB"
    )
    assert describe_copies(plan, fold(one_each, (0, 0, 1, 1)), settings) == (
        "rank 0: 5 copies, 5.0 MiB, rank 1: 1 copy, 1.0 MiB"
    )
    assert describe_copies(plan, one_each, replace(settings, staleness="none")) == ""


def test_stages_that_run_far_ahead_are_planned_in_time(folder: Path) -> None:
    job = make_job(Settings(folder=str(folder), **options({"ahead": "1300x"})))
    schedule = make_segment(job.plan, job.config, steps=1)
    start = time.process_time()
    describe_copies(job.plan, schedule, job.config)
    assert time.process_time() - start < 1.0


def test_without_staleness_nothing_is_said_to_be_old(folder: Path) -> None:
    job = make_job(Settings(folder=str(folder), **options({"staleness_cap": 0})))
    schedule = make_segment(job.plan, job.config, steps=1)
    assert "no stale weights" in describe_algorithm(schedule, job.config)


def test_2bw_has_its_own_versions_of_the_weights(folder: Path) -> None:
    resolved = make_job(
        Settings(folder=str(folder), **options({"schedule": "2bw", "micro_batches": 4}))
    )
    assert resolved.config.staleness == "2bw"
    assert make_segment(resolved.plan, resolved.config, steps=2).name == "2bw"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"schedule": "single", "ahead": "2x"}, "--ahead 2x, but under single all stages wait"),
        ({"schedule": "1f1b", "flush_every": 2}, "--flush-every 2, but under 1f1b all stages"),
        ({"sync_start": "9"}, "--sync-start 9 is not a number or a share of the 8 steps"),
        ({"sync_start": "5 %"}, "--sync-start 5 % is not a number of steps"),
        ({"sync_end": "120%"}, "--sync-end 120% is not a number or a share of the 8 steps"),
        (
            {"sync_start": "5", "sync_end": "50%"},
            "--sync-start 5 and --sync-end 50% are 9 steps, but there are 8",
        ),
        ({"schedule": "single", "sync_end": "2"}, "--sync-end 2, but under single all stages wait"),
        ({"samples": 7}, "--samples 7 are fewer than the 8 of one step"),
        ({"samples": 70, "steps": 7}, "--samples 70 are 8 steps, but --steps is 7"),
        ({"remainder": "proportional"}, "--remainder proportional, but --steps leaves none"),
        ({"schedule": "2bw", "staleness": "stash"}, "2bw has its own versions"),
        ({"schedule": "2bw"}, "2bw needs at least 4 micro-batches per step"),
        (
            {"schedule": "2bw", "micro_batches": 4, "staleness_cap": 0},
            "--staleness-cap 0, but under 2bw the weights of all stages are one step old",
        ),
        ({"staleness": "2bw", "micro_batches": 4, "staleness_cap": 0}, "--staleness-cap 0, but"),
        (
            {"ahead": "999999x"},
            "lets a stage run 2999997 forwards ahead, but the pipeline drains after 4096",
        ),
        ({"ahead": "5000,3,2,1"}, "lets a stage run 5000 forwards ahead"),
        ({"ahead": "2000x", "micro_batches": 5000}, "drains after 5000 micro-batches"),
        ({"ahead": "1,2,3,4"}, "stage 1 would run 2 forwards ahead"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    folder: Path, given: dict[str, Any], what: str
) -> None:
    with pytest.raises(AsyncPipeError) as caught:
        job = make_job(Settings(folder=str(folder), **options(given)))
        make_segment(job.plan, job.config, steps=1)
    assert what in caught.value.what and caught.value.cure
