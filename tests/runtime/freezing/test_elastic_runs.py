"""Elastic runs train as a plain loop that freezes at the same steps, on any pipelines."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.runtime.errors import AsyncPipeError, PlanError
from asyncpipe.runtime.freezing.elastic import FILE, read_elastic
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.plan.trust import TrustError
from asyncpipe.runtime.training.checkpointing import Stopped
from asyncpipe.tests.runtime.freezing.test_freezing_runs import (
    DEPTHS,
    assert_equal,
    loop,
    settings,
    train,
)
from asyncpipe.tests.support.models.blocks import write_elastic
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

NAME = "phases/f01_2p"
GROWN: dict[str, Any] = {"elastic": True, "grow": "batch", "steps": 13}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "blocks"
    write_elastic(folder, "2,1", ",".join(f"{depth}={depth}" for depth in DEPTHS.values()))
    return folder


def test_shorter_pipelines_are_cut_at_some_of_the_named_places(tmp_path: Path) -> None:
    cuts = ("blocks.0", "blocks.1", "blocks.3")
    write_elastic(tmp_path / "blocks", "4,2", "1=2", cuts)
    first, shorter = read_elastic(tmp_path / "blocks").phases
    assert (first.stages, shorter.depth, shorter.stages) == (4, 2, 2)
    _, last = read_plan(tmp_path / "blocks" / shorter.folder).stages
    assert last.parameters[0] in [f"{block}.norm.weight" for block in cuts]


def test_the_phases_are_what_is_left_to_train(blocks: Path) -> None:
    elastic = read_elastic(blocks)
    assert elastic.processes == 2 and elastic.micro_batches == 4
    assert [phase.depth for phase in elastic.phases] == [0, *DEPTHS.values()]
    assert [phase.stages for phase in elastic.phases][0] == 2
    assert elastic.phases[-1].stages == 1
    first, *later = (read_plan(blocks / phase.folder) for phase in elastic.phases)
    for plan, phase in zip(later, elastic.phases[1:], strict=True):
        assert len(plan.stages) == phase.stages
        trained = sum(stage.memory.gradients for stage in plan.stages)
        assert trained < sum(stage.memory.gradients for stage in first.stages)
        assert phase.peak_bytes <= elastic.phases[0].peak_bytes
    steps = [phase.step_ms for phase in elastic.phases]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("schedule", "grow", "last"),
    [
        ("1f1b", "replicas", "1 stage x 2 replicas"),
        ("gpipe", "replicas", "1 stage x 2 replicas"),
        ("1f1b", "off", "1 stage x 1 replica, 1 of 2 processes idle"),
    ],
)
def test_an_elastic_run_is_the_plain_loop(
    blocks: Path, tmp_path: Path, schedule: str, grow: str, last: str
) -> None:
    given = {"schedule": schedule, "elastic": True, "grow": grow, "clip": 0.5}
    lines = train(blocks, tmp_path / "run", **given)
    plain = loop(blocks, (0, 0), 4, schedule=schedule, clip=0.5)
    assert_equal(lines, tmp_path / "run", plain)
    depths = [line["frozen_blocks"] for line in lines if line["event"] == "step"]
    assert depths == [0, 0, 1, 1, 3, 3, 4, 4, 4]
    notes = [line["text"] for line in lines if line.get("about") == "phase"]
    assert len(notes) == 3
    assert notes[-1] == f"4 blocks frozen: {last}, after step 6"
    if grow == "off":
        idle = [line["idle"][1] for line in lines if line["event"] == "step"]
        assert all(share < 1 for share in idle[:4]) and idle[4:] == [1.0] * 5


@pytest.mark.parametrize(
    ("schedule", "scale", "power"), [("1f1b", "none", 0.0), ("gpipe", "linear", 1.0)]
)
def test_a_run_whose_steps_grow_is_the_plain_loop(
    blocks: Path, tmp_path: Path, schedule: str, scale: str, power: float
) -> None:
    given = {"schedule": schedule, "clip": 0.5, "warmup": 3, "decay": "linear", **GROWN}
    lines = train(blocks, tmp_path / "run", scale_lr=scale, **given)

    def rate(read: int, own: int) -> float:
        """Of 13 steps of 4 micro-batches, the last 9 are 4 of 8 and half of one."""
        at = read // 4
        scheduled = (at + 1) / 3 if at < 3 else 1 - (at - 3) / 10
        return scheduled * (2**power if at >= 4 else 1.0) * (0.5 if at == 12 else 1.0)

    frozen = {2: 1, 4: 3, 5: 4}
    changes = {"grown": {4: (8, 8), 8: (4, 8)}, "rate": rate}
    plain = loop(blocks, (0, 0), 4, depths=frozen, made=9, changes=changes, **given)
    assert_equal(lines, tmp_path / "run", plain)
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["frozen_blocks"] for line in steps] == [0, 0, 1, 1, 3, 4, 4, 4, 4]
    read = [round(line["epoch"] / steps[0]["epoch"], 2) for line in steps]
    assert read == [1, 2, 3, 4, 6, 8, 10, 12, 13]
    assert steps[4]["lr"] == pytest.approx(0.01 * 2**power * 0.9)
    note = next(line["text"] for line in lines if "2 replicas" in line.get("text", ""))
    assert note == "3 blocks frozen: 1 stage x 2 replicas, 32 samples per step, after step 4"
    (planned,) = (line["text"] for line in lines if line.get("about") == "phases")
    assert planned.startswith(
        "planned for --grow replicas without --cache, but this run has --grow batch without --cache"
    )


def test_an_elastic_run_follows_gradients_as_any_run(blocks: Path, tmp_path: Path) -> None:
    given = {"schedule": "1f1b", "freeze": "gradnorm:1/2"}
    plain, elastic = (
        train(blocks, tmp_path / str(is_elastic), elastic=is_elastic, **given)
        for is_elastic in (False, True)
    )
    pairs = zip(
        *([x for x in lines if x["event"] == "step"] for lines in (plain, elastic)), strict=True
    )
    for one, other in pairs:
        assert other["frozen_blocks"] == one["frozen_blocks"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert other.get("block_norms", []) == pytest.approx(one.get("block_norms", []), rel=1e-9)


@pytest.mark.parametrize("batch", [{}, GROWN | {"decay": "cosine"}], ids=["kept", "grown"])
def test_an_elastic_run_is_resumed_in_the_right_phase(
    blocks: Path, tmp_path: Path, batch: dict[str, Any]
) -> None:
    given = {"schedule": "1f1b", "elastic": True, "save_every": 2, "keep_last": 9, **batch}
    whole = train(blocks, tmp_path / "whole", **given)
    for step in (4, 6, 8):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:06}"
        lines = train(blocks, tmp_path / f"from{step}", resume=str(checkpoint), **given)
        made, expected = (
            [[line["step"], line["loss"], line["lr"], line["epoch"]] for line in run]
            for run in (
                [line for line in lines if line["event"] == "step"],
                [line for line in whole if line["event"] == "step" and line["step"] > step],
            )
        )
        assert made == expected


SEEING = """
import gc
from torch import nn

made = []

class Seen:
    def __init__(self):
        self.events = []

    def on_step(self, record):
        alive = sum(type(each) is nn.Parameter for each in gc.get_objects())
        self.events.append(("step", record.step, record.frozen[0], alive))

    def on_checkpoint(self, step):
        self.events.append(("checkpoint", step))

    def on_end(self, summary):
        (made_once,) = made
        print(self.events, file=open(made_once, "w"))

def seen(config, folder):
    made.append(folder / "seen")
    return Seen()
"""


def test_callbacks_and_the_trace_go_on_over_the_phases(blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "seeing.py").write_text(SEEING)
    given = {"callbacks": f"{tmp_path}/seeing.py:seen", "trust": True, "save_every": 2}
    given |= {"schedule": "1f1b", "elastic": True, "keep_last": 9, "trace": "4-6"}
    train(blocks, tmp_path / "run", **given)
    depths = [0, 0, 1, 1, 3, 3, 4, 4, 4]
    expected = [[("step", at, depth)] for at, depth in enumerate(depths, 1)]
    for step in (2, 4, 6, 8, 9):
        expected[step - 1].append(("checkpoint", step))
    seen = ast.literal_eval((tmp_path / "run" / "seen").read_text())
    assert [event[:3] for event in seen] == sum(expected, [])
    alive = [event[3] for event in seen if event[0] == "step" and event[2] > 1]
    assert len(set(alive)) == 1  # the whole model trains in two phases, and is in memory once
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    (phase,) = [event for event in events if event["ph"] == "i"]
    assert phase["name"] == "3 blocks frozen: 1 stage x 2 replicas, after step 4"
    steps = [event for event in events if event["name"].startswith("step ")]
    made = sorted((event["args"]["step"], event["args"]["stage"], event["pid"]) for event in steps)
    assert made == [(4, 0, 0), (4, 1, 1), (5, 0, 0), (5, 0, 1), (6, 0, 0), (6, 0, 1)]
    assert all((event["ts"] > phase["ts"]) == (event["args"]["step"] > 4) for event in steps)
    lines = train(blocks, tmp_path / "grown", **(given | GROWN | {"trace": "3"}))
    assert lines[-1]["event"] == "end" and lines[-1]["trace"]


STOPPING = """
import os, signal, time
from torch.nn.functional import cross_entropy

calls = []

def criterion(output, target):
    calls.append(0)
    if len(calls) == 13:  # in step 4, and the ranks agree before it ends
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    return cross_entropy(output, target)
"""


def test_a_run_that_is_stopped_at_a_transition_leaves_a_checkpoint_of_it(
    blocks: Path, tmp_path: Path
) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING)
    given = {"schedule": "1f1b", "elastic": True, "criterion": f"{tmp_path}/stopping.py:criterion"}
    with pytest.raises(Stopped):
        run(settings(blocks, tmp_path / "run", trust=True, **given), FACTORY)
    (checkpoint,) = checkpoints_in(tmp_path / "run")
    assert checkpoint.name == "step-000004"


def test_the_edited_code_of_a_phase_runs_only_when_it_is_trusted(
    blocks: Path, tmp_path: Path
) -> None:
    shutil.copytree(blocks, tmp_path / "blocks")
    for stage in (tmp_path / "blocks" / "phases").glob("*/stage_0.py"):
        stage.write_text(f'{stage.read_text()}open("{tmp_path}/ran", "w")\n')
    given = {"schedule": "1f1b", "elastic": True}
    with pytest.raises(TrustError, match="phases/.* was not made on this machine"):
        train(tmp_path / "blocks", tmp_path / "run", **given)
    assert not (tmp_path / "ran").exists()


def test_a_run_without_phases_is_refused(blocks: Path, tmp_path: Path) -> None:
    given = {"schedule": "1f1b", "elastic": True}
    with pytest.raises(AsyncPipeError, match="--elastic, but no blocks freeze"):
        run(settings(blocks, tmp_path / "a", freeze=None, freeze_every=None, **given), FACTORY)
    with pytest.raises(AsyncPipeError, match="cannot share out 3 micro-batches"):
        run(settings(blocks, tmp_path / "a", **{**given, "micro_batches": 3}), FACTORY)
    with pytest.raises(AsyncPipeError, match="--elastic, but --schedule is async-1f1b"):
        run(settings(blocks, tmp_path / "a", **{**given, "schedule": "async-1f1b"}), FACTORY)
    grown = {**given, "micro_batches": 3, "grow": "batch"}
    with pytest.raises(AsyncPipeError, match="--scale-lr sqrt, but all steps have the same"):
        run(settings(blocks, tmp_path / "a", scale_lr="sqrt", **given), FACTORY)
    with pytest.raises(AsyncPipeError, match="--grow batch, but the number of replicas"):
        run(settings(blocks, tmp_path / "a", **{**grown, "elastic": False}), FACTORY)
    with pytest.raises(AsyncPipeError, match="10 samples in micro-batches of 4"):
        run(
            settings(blocks, tmp_path / "a", global_batch_size=10, micro_batch_size=4, **grown),
            FACTORY,
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "phases",
    [
        [],
        [{"depth": 1, "folder": "", "stages": 2}],
        [{"depth": 0, "folder": "../elsewhere", "stages": 2}],
        [{"depth": 0, "folder": "", "stages": 2}, {"depth": 1, "folder": "/tmp", "stages": 1}],
        [{"depth": 0, "folder": "", "stages": 1}, {"depth": 1, "folder": NAME, "stages": 2}],
        [{"depth": 0, "folder": "", "stages": 3}],
    ],
)  # fmt: skip
def test_phases_that_cannot_be_are_refused(tmp_path: Path, phases: list[dict[str, object]]) -> None:
    known = [phase | {"step_ms": 1.0, "peak_bytes": 1} for phase in phases]
    text = json.dumps({"processes": 2, "micro_batches": 4, "phases": known})
    (tmp_path / FILE).write_text(text)
    with pytest.raises(PlanError, match="is not a list of phases"):
        read_elastic(tmp_path)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"elastic": "4,3"}, "3 after 4, but each length"),
        ({"elastic": "4,4"}, "4 after 4, but each length"),
        ({"elastic": "2,1"}, "begins with 2, but --stages is 4"),
        ({"elastic": "4,2", "schedule": None}, "--schedule is not given"),
        ({"elastic": "4,2", "ranks": 4}, "--ranks is given"),
        ({"freeze": "schedule:1/3"}, "requires --elastic"),
    ],
)
def test_lengths_that_cannot_be_are_refused(given: dict[str, object], error: str) -> None:
    options: dict[str, Any] = {"stages": 4, "schedule": "1f1b", **given}
    with pytest.raises(PlanError, match=error):
        PartitionOptions(**options)
