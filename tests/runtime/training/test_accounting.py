"""The accounts of a run: the bytes that it hands to the transport are exactly the plan's,
and every moment of a step has one reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.executor.loading import load
from asyncpipe.runtime.monitoring.records import PARTS_OF_TIME
from asyncpipe.runtime.plan.forecast import traffic
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.rng import GeneratorState
from asyncpipe.tests.support.models.hand_folders import exact_settings, write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

M, STEPS = 4, 3
ONE_EACH = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "mlp4", stages=4)
    write_mlp(folder / "noisy", noisy=True)
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(folder: Path, output: Path, **given: Any) -> list[dict[str, Any]]:
    usual = {"micro_batches": M, "steps": STEPS, "dtype": "float32", "eval_batches": 2}
    run(exact_settings(folder, output, **(usual | given)), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "step"]


def between_ranks(plan: Plan, rank_of_stage: tuple[int, ...]) -> int:
    """The plan's bytes of one micro-batch in each direction."""
    return sum(
        each.sent
        for each in traffic(plan)
        if rank_of_stage[each.source] != rank_of_stage[each.target]
    )


@pytest.mark.parametrize(
    ("name", "rank_of_stage", "given"),
    [
        ("mlp4", ONE_EACH, {"schedule": "1f1b"}),
        ("mlp4", ONE_EACH, {"schedule": "gpipe", "boundary_dtype": "bfloat16"}),
        ("mlp4", (0, 1, 0, 1), {"schedule": "interleaved", "ranks": 2}),
        ("mlp4", (0, 1, 1, 0), {"schedule": "zb-v", "ranks": 2}),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) else None,
)
def test_a_step_sends_the_bytes_of_the_plan_for_each_micro_batch(
    folders: Path, tmp_path: Path, name: str, rank_of_stage: tuple[int, ...], given: dict[str, Any]
) -> None:
    lines = train(folders / name, tmp_path / "run", **given)
    planned = M * between_ranks(read_plan(folders / name), rank_of_stage)
    planned //= 2 if "boundary_dtype" in given else 1
    expected = {"activation": planned, "gradient": planned}
    assert planned and [step["sent_bytes"] for step in steps_of(lines)] == [expected] * STEPS
    assert lines[-1]["event"] == "end" and lines[-1]["sent_bytes"] == expected


def test_the_steps_of_an_asynchronous_run_send_the_same_together(
    folders: Path, tmp_path: Path
) -> None:
    lines = train(folders / "mlp4", tmp_path / "run", schedule="async-1f1b", micro_batches=1)
    planned = STEPS * between_ranks(read_plan(folders / "mlp4"), ONE_EACH)
    for purpose in ("activation", "gradient"):
        assert sum(step["sent_bytes"].get(purpose, 0) for step in steps_of(lines)) == planned


def test_replicas_and_tied_weights_are_counted_by_their_purpose(
    folders: Path, tmp_path: Path
) -> None:
    """Each holder of the tied weight sends its gradient to the other; each replica gives all
    gradients, and a number for each that says whether it has one, to the sums."""
    given = {"data": str(folders / "text.txt"), "replicas": 2}
    lines = train(folders / "text", tmp_path / "run", **given)
    plan = read_plan(folders / "text")
    trained = [
        parameter
        for stage in load(folders / "text").stages
        for parameter in stage.parameters()
        if parameter.requires_grad
    ]
    tied = load(folders / "text").stages[0].get_parameter("wte.weight")
    elements = sum(parameter.numel() for parameter in trained)
    boundary = 2 * M * between_ranks(plan, (0, 1))
    for step in steps_of(lines):
        assert step["sent_bytes"] == {
            "activation": boundary,
            "gradient": boundary,
            "tied": 2 * 2 * tied.nbytes,
            "replicas": 2 * 4 * (elements + len(trained)),
        }
        assert step["summed_elements"] == elements
        assert step["syncs_per_s"] == pytest.approx(1000 / step["step_ms"])
        assert len(step["exchange_s"]) == 4 and min(step["exchange_s"]) > 0


def test_the_state_of_generators_is_a_purpose_of_its_own(folders: Path, tmp_path: Path) -> None:
    lines = train(folders / "noisy", tmp_path / "run", steps=1)
    state = GeneratorState.seeded(torch.device("cpu"), 0, False).state
    planned = M * between_ranks(read_plan(folders / "noisy"), (0, 1))
    (step,) = steps_of(lines)
    assert step["sent_bytes"] == {
        "activation": planned,
        "gradient": planned,
        "generator state": M * len(state),
    }


def test_a_run_of_one_rank_sends_and_exchanges_nothing(folders: Path, tmp_path: Path) -> None:
    lines = train(folders / "mlp", tmp_path / "run", schedule="single")
    lacking = {"sent_bytes", "summed_elements", "syncs_per_s", "exchange_s", "exchange_shares"}
    assert not any(lacking & step.keys() for step in steps_of(lines))
    assert "exchange" not in lines[-1]["idle_parts"] and "sent_bytes" not in lines[-1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_writing_counts_apart_from_waiting_and_the_parts_make_a_whole(
    folders: Path, tmp_path: Path, replicas: int
) -> None:
    """A log that takes 30 ms a step, and a checkpoint after each step."""
    lines = train(
        folders / "mlp",
        tmp_path / "run",
        steps=4,
        save_every=1,
        replicas=replicas,
        log=f"{write_slow_log(tmp_path)}:make",
    )
    for step in steps_of(lines)[1:]:
        assert step["writing_s"][0] >= 0.03
        for rank in range(2 * replicas):
            shares = [step.get(f"{part}_shares", [0.0] * 4)[rank] for part in PARTS_OF_TIME]
            assert sum(shares) == pytest.approx(1, abs=5e-4)
            assert step["writing_s"][rank] > 0
    end = events_of(tmp_path / "run", "end")[0]
    assert end["idle_parts"]["writing"] > 0
    assert sum(end["idle_parts"].values()) == pytest.approx(end["idle"], abs=1e-12)


def write_slow_log(folder: Path) -> Path:
    path = folder / "slow_log.py"
    path.write_text(
        "import time\n"
        "from asyncpipe import Reporter\n\n"
        "class Slow(Reporter):\n"
        "    def on_step(self, record):\n"
        "        time.sleep(0.03)\n\n"
        "def make(config, folder):\n"
        "    return Slow()\n"
    )
    return path
