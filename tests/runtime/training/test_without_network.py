"""`--transport none`: ranks compute on tensors that they make themselves, and nothing that a run
leaves can be mistaken for trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.launch.launch import run as run_here
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.comparison import as_json, compare, network_costs, render_comparison
from asyncpipe.runtime.training.pipeline import Pipeline
from asyncpipe.runtime.transports.left_out import LeftOutTransport
from asyncpipe.runtime.transports.protocol import Channel
from asyncpipe.tests.support.models.hand_folders import exact_settings, write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "noisy", noisy=True)
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(folder: Path, output: Path, **given: Any) -> Path:
    usual = {"micro_batches": 2, "clip": 1.0, "dtype": "float32"}
    run(exact_settings(folder, output, **(usual | given)), FACTORY)
    return output


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("noisy", {"schedule": "1f1b"}),
        ("mlp", {"schedule": "async-1f1b", "clip_by": "global"}),
        ("text", {"schedule": "1f1b", "replicas": 2, "boundary_dtype": "bfloat16"}),
        ("text", {"schedule": "async-1f1b", "staleness": "stash+delay-rate", "optimizer": "sgd"}),
        ("mlp", {"schedule": "ddp", "replicas": 2, "precision": "float16"}),
    ],
    ids=["random", "async", "tied and replicas", "tied and async", "ddp"],
)
def test_ranks_compute_all_steps_and_leave_nothing_trained(
    folders: Path, tmp_path: Path, name: str, given: dict[str, Any]
) -> None:
    data = {"data": str(folders / "text.txt")} if name == "text" else {}
    output = train(folders / name, tmp_path / "run", transport="none", **data, **given)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "warning"
    assert "losses are meaningless" in lines[0]["text"]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert not any({"sent_bytes", "summed_elements"} & step.keys() for step in steps)
    assert not events_of(output, "eval") and lines[-1]["weights"] == ""
    left = {path.name for path in output.iterdir()}
    assert left.isdisjoint({"weights", "checkpoints"}) and "report.html" in left


@pytest.mark.parametrize(
    "given",
    [
        {"save_every": 1},
        {"save_to": "memory://runs"},
        {"export_hf": "exported"},
        {"resume": "auto"},
        {"eval_every": 1},
        {"check_replicas": 1, "replicas": 2},
        {"callbacks": "mine.py:make"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_keeps_or_judges_weights_is_refused(
    folders: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    name = next(iter(given)).replace("_", "-")
    with pytest.raises(AsyncPipeError, match=f"--{name}.*--transport none") as refused:
        make_job(exact_settings(folders / "mlp", tmp_path / "run", transport="none", **given))
    assert refused.value.cure


def test_one_process_has_no_network_to_leave_out(folders: Path, tmp_path: Path) -> None:
    alone = exact_settings(folders / "mlp", tmp_path / "run", transport="none", schedule="single")
    with pytest.raises(AsyncPipeError, match="1 process"):
        run_here(alone, FACTORY)
    with pytest.raises(AsyncPipeError, match="--transport none"):
        Pipeline(folders / "mlp", loss="cross_entropy", transport="none")


def test_a_comparison_says_what_communication_costs(folders: Path, tmp_path: Path) -> None:
    outputs = [train(folders / "mlp", tmp_path / name, transport=name) for name in ("gloo", "none")]
    comparison = compare(outputs[::-1])
    (cost,) = network_costs(comparison.runs, comparison.names)
    assert (cost.with_name, cost.without_name) == ("gloo", "none")
    assert comparison.sentences == (str(cost),)
    assert str(cost) in render_comparison(comparison)
    assert json.loads(as_json(comparison))["communication"][0]["with_ms"] == cost.with_ms
    other = train(folders / "mlp", tmp_path / "other", transport="gloo", micro_batches=4)
    assert compare([outputs[1], other]).sentences == ()


def test_waits_that_any_network_has_are_not_a_cost_of_communication(tmp_path: Path) -> None:
    """200 ms with the network and 150 without: the busiest rank waits 20 ms for the schedule."""
    parts = {"bubble": 0.1, "imbalance": 0.0, "communication": 0.15, "data": 0.0, "overhead": 0.0}
    waiting = parts | {"imbalance": 0.3}
    runs = []
    for name, step_ms in (("none", 150.0), ("shm", 200.0)):
        end = {"event": "end", "step_ms": step_ms, "idle_parts_by_rank": [waiting, parts]}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(end) + "\n")
        (folder / "config.toml").write_text(f'folder = "x"\ntransport = "{name}"\n')
        runs.append(read_run(folder))
    (cost,) = network_costs(runs, ("B", "A"))
    assert (cost.schedule_ms, cost.communication_ms) == pytest.approx((20.0, 30.0))
    assert str(cost).startswith("Communication costs 30.00 ms of a step (15%): a step takes 200")
    (reversed_cost,) = network_costs(
        [replace(run, end=run.end | {"step_ms": 350.0 - run.end["step_ms"]}) for run in runs],
        ("B", "A"),
    )
    assert "no cost of communication can be seen" in str(reversed_cost)


def test_what_is_made_has_the_shape_and_dtype_of_its_channel() -> None:
    transport = LeftOutTransport(1, torch.device("cpu"))
    for dtype, value in ((torch.bfloat16, 0), (torch.int64, 0), (torch.bool, True)):
        channel = Channel("activation", "h", 0, 1, 0, 1, 0, dtype, (2, 3))
        made = transport.wait(transport.recv(channel, 0))
        assert torch.equal(made, torch.full((2, 3), value, dtype=dtype))
