"""Runs whose blocks freeze when their outputs hardly change train as a plain loop that compares the
same outputs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncpipe
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.runtime.freezing.test_freezing_runs import (
    adamw,
    assert_equal,
    batches,
    frozen_in_blocks,
    frozen_in_mlp,
    micro_batches,
    plain_loop,
    train,
    trained,
)
from asyncpipe.tests.support.models.blocks import write_classifier, write_elastic, write_flat
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles import resumed_runs
from asyncpipe.tests.support.oracles.freezing_loop import PlainLoop, Plasticity
from asyncpipe.tests.support.processes.gloo_ranks import RankError, run_processes

STEPS = 12
RULE: dict[str, Any] = {"freeze": "plasticity:1/2", "freeze_every": 1, "steps": STEPS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_classifier(folder / "blocks", stages=3)
    write_classifier(folder / "four" / "blocks", stages=4)
    write_elastic(folder / "elastic" / "blocks", "2,1")
    write_mlp(folder / "mlp")
    return folder


def decided(plain: PlainLoop, paths: list[str], every: int) -> Plasticity:
    """Lets a loop decide by its own outputs for the first micro-batch, and runs it."""
    rule = Plasticity(plain.stages, plain.feed(0)["x"], paths, 0.5)
    of_depth = frozen_in_blocks if paths[0].startswith("blocks") else frozen_in_mlp

    def due() -> tuple[set[str], set[str]]:
        depth = rule()
        return of_depth(depth) if depth else (set(), set())

    plain.frozen = dict.fromkeys(range(every, STEPS, every), due)
    plain.run(STEPS)
    return rule


def assert_decided(lines: list[dict[str, Any]], rule: Plasticity, every: int) -> None:
    """The steps after each event have the depth and the distances that the loop found there."""
    steps = {line["step"]: line for line in lines if line["event"] == "step"}
    events = range(1, len(rule.depths) + 1)
    assert [steps[event * every + 1]["frozen_blocks"] for event in events] == rule.depths
    assert rule.depths[0] == 0 < rule.depths[-1]
    before = rule.depths[:-1]
    for event, depth, distances in zip(events[1:], before, rule.distances, strict=True):
        if depth < len(distances):  # nothing is compared when nothing can freeze any more
            found = steps[event * every + 1]["block_distances"]
            assert found == pytest.approx([0.0] * depth + distances[depth:], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({"schedule": "1f1b"}, 1),
        ({"schedule": "gpipe", "recompute": "all"}, 1),
        ({"schedule": "single"}, 1),
        ({"schedule": "async-1f1b"}, 2),
        ({"schedule": "zb-v", "ranks": 2}, 1),
    ],
    ids=lambda given: given["schedule"] if isinstance(given, dict) else "",
)
def test_a_run_decides_as_the_plain_loop(
    folders: Path, tmp_path: Path, given: dict[str, Any], every: int
) -> None:
    given = RULE | {"freeze_every": every} | given
    folder = folders / "four" / "blocks" if given["schedule"] == "zb-v" else folders / "blocks"
    lines = train(folder, tmp_path / "run", **given)
    stages = len(read_plan(folder).stages)
    ahead = (2, 1, 0) if given["schedule"] == "async-1f1b" else (0,) * stages
    plain = plain_loop(folder, ahead, 4, **given)
    rule = decided(plain, [f"blocks.{block}" for block in range(4)], every)
    assert_equal(lines, tmp_path / "run", plain)
    assert_decided(lines, rule, every)


@pytest.mark.parametrize("given", [{"schedule": "ddp"}, {"replicas": 2, "micro_batches": 2}])
def test_replicas_decide_as_one_pipeline(
    folders: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    given = RULE | {"global_batch_size": 16, "check_replicas": 1} | given
    lines = train(folders / "mlp", tmp_path / "run", **given)
    plain = plain_loop(folders / "mlp", (0, 0), 4, 2)
    rule = decided(plain, ["layers.0", "layers.1", "layers.2"], 1)
    assert_equal(lines, tmp_path / "run", plain)
    assert_decided(lines, rule, 1)


def test_an_elastic_run_decides_as_any_run(folders: Path, tmp_path: Path) -> None:
    given = RULE | {"schedule": "1f1b", "elastic": True}
    lines = train(folders / "elastic" / "blocks", tmp_path / "run", **given)
    plain = plain_loop(folders / "elastic" / "blocks", (0, 0), 4, **given)
    rule = decided(plain, [f"blocks.{block}" for block in range(4)], 1)
    assert_equal(lines, tmp_path / "run", plain)
    assert_decided(lines, rule, 1)


def test_to_compare_outputs_changes_nothing_else(folders: Path, tmp_path: Path) -> None:
    """A table with the same depths gives the same bits: weights, buffers, random numbers, versions
    of weights."""
    given: dict[str, Any] = {"schedule": "async-1f1b", "staleness": "stash+msnag"}
    given |= {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01, "steps": 14, "save_every": 14}
    given |= {"freeze_every": 2}
    compared = resumed_runs.train(
        folders / "blocks", tmp_path / "compared", freeze="plasticity:9/10", **given
    )
    depths = compared.of("frozen_blocks")
    assert 0 < depths[14]
    table = ",".join(f"{event}={depths[2 * event + 1]}" for event in range(1, 7))
    told = resumed_runs.train(folders / "blocks", tmp_path / "told", freeze=table, **given)
    assert told.of("loss") == compared.of("loss")
    resumed_runs.assert_same(told.weights, compared.weights)
    resumed_runs.assert_same(told.state, compared.state)


def test_a_run_resumed_between_events_is_the_run(folders: Path, tmp_path: Path) -> None:
    given = RULE | {"schedule": "1f1b", "save_every": 3, "dtype": "float64"}
    run = resumed_runs.train(folders / "blocks", tmp_path / "run", **given)
    depths, distances = run.of("frozen_blocks"), run.of("block_distances")
    assert depths[STEPS] > 0
    for step in (6, 9):
        resumed = resumed_runs.assert_goes_on_as(run, folders / "blocks", step, **given)
        assert resumed.of("frozen_blocks") == depths
        assert resumed.of("block_distances") == distances
    # On other stages and ranks it is the same run but for the last digits.
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000006"
    given |= {"schedule": "zb-v", "ranks": 2, "resume": str(checkpoint)}
    other = resumed_runs.train(folders / "four" / "blocks", tmp_path / "other", **given)
    for step, loss in other.of("loss").items():
        assert loss == pytest.approx(run.of("loss")[step], rel=1e-12)
        assert other.of("frozen_blocks")[step] == depths[step]
    for name, value in run.weights.items():
        torch.testing.assert_close(other.weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def own_loop(rank: int, folder: str, saved: str) -> dict[str, Any]:
    """A loop that freezes, and the same from what it has saved in the middle."""
    options: dict[str, Any] = {"loss": "cross_entropy", "dtype": "float64", "micro_batches": 4}
    options |= {"schedule": "1f1b", "freeze": "plasticity:1/2", "freeze_every": 1}
    pipe = asyncpipe.Pipeline(folder, **options)
    optimizer = adamw(pipe)
    losses = trained(pipe, optimizer, batches(STEPS)[:5])
    pipe.save(saved, optimizer=optimizer)
    losses += trained(pipe, optimizer, batches(STEPS)[5:])
    again = asyncpipe.Pipeline(folder, **options)
    own = adamw(again)
    again.load(saved, optimizer=own)
    repeated = trained(again, own, batches(STEPS)[5:])
    assert pipe.freezing is not None and again.freezing is not None
    return {
        "losses": losses,
        "repeated": repeated,
        "weights": pipe.state_dict(),
        "depth": (pipe.frozen, again.frozen),
        "evidence": (pipe.freezing.progress.evidence, again.freezing.progress.evidence),
    }


def test_a_loop_of_ones_own_compares_its_first_micro_batch(folders: Path, tmp_path: Path) -> None:
    found = run_processes(3, own_loop, str(folders / "blocks"), str(tmp_path / "saved"))
    assert not [each for each in found if isinstance(each, RankError)], found
    stages = [stage.double() for stage in asyncpipe.load(folders / "blocks").stages]
    plain = PlainLoop(stages, micro_batches(STEPS).__getitem__, 4, (0, 0, 0), lr=0.01, seed=1)
    rule = decided(plain, [f"blocks.{block}" for block in range(4)], 1)
    weights = {name: value for each in found for name, value in each["weights"].items()}
    for name, value in plain.state().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for each in found:
        assert each["losses"] == pytest.approx(plain.losses, rel=1e-12)
        assert each["repeated"] == each["losses"][5:]
        assert each["depth"] == (rule.depths[-1], rule.depths[-1])
        assert each["evidence"][0] == each["evidence"][1] == found[0]["evidence"][0]


def one_sample(rank: int, folder: str) -> None:
    pipe = asyncpipe.Pipeline(
        folder, loss="cross_entropy", micro_batches=4, freeze="plasticity", freeze_every=1
    )
    x, target = batches(1)[0]
    pipe.step((x[:4], target[:4]), optimizer=adamw(pipe))


def test_a_loop_with_micro_batches_of_one_sample_is_refused(folders: Path) -> None:
    (found,) = run_processes(1, one_sample, str(folders / "blocks"))
    assert isinstance(found, RankError) and "the first one has 1" in str(found), found


STREAM = """
import torch
from torch.utils.data import IterableDataset

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(16), torch.tensor(1)

def data():
    return Endless()
"""


def test_a_stream_and_a_phase_without_modules_are_refused(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "stream.py").write_text(STREAM)
    given = RULE | {"schedule": "single", "data": f"{tmp_path}/stream.py:data"}
    with pytest.raises(AsyncPipeError, match="stream.py:data is a stream, which gives them once"):
        train(folders / "blocks", tmp_path / "run", **given)
    shutil.copytree(folders / "elastic" / "blocks", tmp_path / "blocks")
    later = tmp_path / "blocks" / "phases" / "f02_1p"
    shutil.rmtree(later)
    write_flat(later)
    with pytest.raises(AsyncPipeError, match="outputs of blocks.2, but its code is written out"):
        train(tmp_path / "blocks", tmp_path / "later", **RULE, schedule="1f1b", elastic=True)
