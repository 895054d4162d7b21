"""Checkpoints of runs with several ranks: real processes, replicas, other stages and transports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.checkpoint.folders import checkpoints_in, read_facts
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.oracles.resumed_runs import as_ended_at, assert_goes_on_as, train

BLOCKING = """
import pathlib
from torch.nn.functional import cross_entropy
def criterion(outputs, target):
    pathlib.Path("{path}").mkdir(parents=True, exist_ok=True)
    return cross_entropy(outputs, target)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    for stages in (2, 4):
        write_mlp(folder / f"noisy{stages}", stages=stages, noisy=True)
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "clip": 0.5},
        {"schedule": "interleaved", "ranks": 2},
        {"schedule": "async-1f1b", "micro_batches": 1, "clip": 0.5, "clip_by": "known"},
    ],
    ids=["1f1b", "interleaved", "async-1f1b"],
)
def test_ranks_go_on_as_if_nothing_had_happened(
    folders: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = train(folders / "noisy4", tmp_path / "whole", **options)
    facts = read_facts(checkpoints_in(whole.output)[0])
    assert (facts.ranks, facts.stages, facts.step) == (options.get("ranks", 4), 4, 6)
    assert_goes_on_as(whole, folders / "noisy4", 4, **options)


def test_gradients_of_tied_weights_on_two_ranks_are_kept(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "async-1f1b", "staleness": "stash+error-feedback"}
    options |= {"data": str(folders / "text.txt"), "optimizer": "sgd", "lr": 0.01}
    options |= {"ahead": "3,0", "transport": "gloo"}
    whole = train(folders / "text", tmp_path / "whole", **options)
    assert {"shared.wte.weight.6", "live.wte.weight@1"} <= whole.state.keys()
    assert_goes_on_as(whole, folders / "text", 4, **options)


def test_gradients_of_tied_weights_in_three_replicas_are_kept(
    folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "async-1f1b", "micro_batches": 2, "replicas": 3}
    options |= {"data": str(folders / "text.txt"), "optimizer": "sgd", "lr": 0.01}
    options |= {"ahead": "3,0", "check_replicas": 1}
    whole = train(folders / "text", tmp_path / "whole", **options)
    assert {"shared.wte.weight.5", "shared.wte.weight.6"} <= whole.state.keys()
    assert_goes_on_as(whole, folders / "text", 4, **options)


def test_an_asynchronous_run_of_replicas_goes_on_in_one_pipeline_and_back(
    folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "2bw", "data": str(folders / "text.txt"), "lr": 0.01}
    two = {"replicas": 2, "micro_batches": 2}
    one = train(folders / "text", tmp_path / "one", **options)
    for start, there in (
        (one, two),
        (train(folders / "text", tmp_path / "two", **options | two), {}),
    ):
        ended = as_ended_at(start, 4, start.output.with_name(f"{start.output.name} ended"))
        moved = train(folders / "text", ended, resume="auto", **options | there)
        assert moved.of("loss") == pytest.approx(one.of("loss"), rel=1e-6)
        for name, tensor in one.weights.items():
            torch.testing.assert_close(moved.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_replicas_go_on_each_with_its_own_statistics(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "ddp", "replicas": 2, "check_replicas": 1}
    whole = train(folders / "noisy2", tmp_path / "whole", **options)
    first, second = (
        whole.weights["norms.1.running_mean"],
        whole.state["buffer.1.norms.1.running_mean"],
    )
    assert not torch.equal(first, second)
    assert_goes_on_as(whole, folders / "noisy2", 2, **options)


def test_a_run_of_replicas_goes_on_in_one_process_and_back(folders: Path, tmp_path: Path) -> None:
    data = str(folders / "text.txt")
    one = train(folders / "text", tmp_path / "one", schedule="single", data=data, lr=0.01)
    ended = as_ended_at(one, 4, tmp_path / "ended")
    options: dict[str, Any] = {"replicas": 2, "micro_batches": 2, "data": data, "lr": 0.01}
    moved = train(folders / "text", ended, resume="auto", transport="gloo", **options)
    assert moved.of("loss") == pytest.approx(one.of("loss"), rel=1e-6)
    assert moved.of("epoch") == one.of("epoch")
    for name, tensor in one.weights.items():
        torch.testing.assert_close(moved.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_what_one_rank_cannot_write_ends_all_with_its_sentence(
    folders: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    part = output / "checkpoints" / ".step-000002.part" / "state"
    # Rank 0 clears what it finds at the start; this comes after that.
    blocker = tmp_path / "blocker.py"
    blocker.write_text(BLOCKING.format(path=part / "rank-00001.safetensors"))
    with pytest.raises(AsyncPipeError) as error:
        train(folders / "noisy2", output, criterion=f"{blocker}:criterion", schedule="1f1b")
    assert error.value.what == (
        f"rank 1 cannot write {output}/checkpoints/step-000002: Is a directory."
    )
    assert not checkpoints_in(output)
