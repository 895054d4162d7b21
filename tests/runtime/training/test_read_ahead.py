"""Worker processes read ahead what the rank would read, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.distributed.failure import RankError
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.process import is_alive
from asyncpipe.runtime.training.batches import ReadError
from asyncpipe.runtime.training.read_ahead import ReadAhead, Workers
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import (
    Trained,
    assert_goes_on_as,
    assert_same,
    left_by,
    train,
)
from asyncpipe.tests.support.processes.quick_python import bin_folder

DRAWS = f"""
import multiprocessing
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

POINTS = torch.randn(21, {WIDTH})

class Samples:
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        noise = random.gauss(0, 1) + float(np.random.normal())
        mask = torch.rand({WIDTH}) < 0.5
        x = torch.where(mask, POINTS[index], torch.tensor(noise))
        return {{"x": x.float(), "target": index % {CLASSES}}}

def data():
    return Samples(21), Samples(9)

def begin(worker):
    with open("begun.txt", "a") as file:
        file.write(f"{{worker}} of {{get_worker_info().num_workers}}\\n")

def loaders():
    loader = DataLoader(Samples(21), shuffle=True, num_workers=2, worker_init_fn=begin)
    return loader, DataLoader(Samples(9))

class Fails(Samples):
    def __getitem__(self, index):
        if index == 17:
            raise ValueError("a broken image")
        return super().__getitem__(index)

def fails():
    return Fails(21)

class Ends(Samples):
    def __getitem__(self, index):
        if index == 17 and multiprocessing.parent_process() is not None:
            raise SystemExit(3)
        return super().__getitem__(index)

def ends():
    return Ends(21)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "mlp2"
    write_mlp(made)
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own") / "own.py"
    made.write_text(DRAWS)
    return made


def trained(folder: Path, own: Path, output: Path, **given: Any) -> Trained:
    usual = {"data": f"{own}:data", "eval_batches": None, "eval_every": 3}
    return train(folder, output, **(usual | given))


@pytest.fixture(scope="module")
def alone(folder: Path, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(folder, own, tmp_path_factory.mktemp("runs") / "a", schedule="single")


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b", "workers": 3, "prefetch": 1},
        {"schedule": "1f1b", "data": "loaders"},
    ],
    ids=["two ranks", "workers of the DataLoader"],
)
def test_workers_change_no_number(
    folder: Path,
    own: Path,
    alone: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "data" in given:
        given = given | {"data": f"{own}:{given['data']}"}
    assert_alike(trained(folder, own, tmp_path / "b", **given), alone)
    if "loaders" in given.get("data", ""):
        assert {"0 of 2", "1 of 2"} == set(Path("begun.txt").read_text().splitlines())


def assert_alike(found: Trained, alone: Trained) -> None:
    assert found.of("loss") == alone.of("loss")
    evaluations = [
        [each["loss"] for each in run.records if each["event"] == "eval"] for run in (found, alone)
    ]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 2
    assert_same(found.weights, alone.weights)


def test_workers_of_a_single_process_change_no_number(
    folder: Path, own: Path, alone: Trained, tmp_path: Path
) -> None:
    """The command in a process of its own: workers are forks, and other tests leave threads."""
    options = (
        "--schedule single --workers 1 --steps 6 --micro-batches 4 --eval-every 3 --log-every 1 "
        "--threads 1 --pin none"
    )
    command = [bin_folder() / "asyncpipe-train", folder, "--data", f"{own}:data"]
    command += ["--output", tmp_path / "b", *options.split()]
    subprocess.run(command, check=True, capture_output=True)
    assert_alike(left_by(tmp_path / "b"), alone)


def test_an_asynchronous_run_reads_ahead_too(folder: Path, own: Path, tmp_path: Path) -> None:
    usual = {"schedule": "async-1f1b", "micro_batches": 1, "steps": 9, "save_every": 0}
    runs = [
        trained(folder, own, tmp_path / str(workers), workers=workers, **usual)
        for workers in (0, 2)
    ]
    assert runs[0].of("loss") == runs[1].of("loss")


def test_a_resumed_run_reads_on_where_the_last_one_ended(
    folder: Path, own: Path, tmp_path: Path
) -> None:
    given = {"data": f"{own}:data", "workers": 2}
    assert_goes_on_as(train(folder, tmp_path / "whole", **given), folder, 4, **given)


def test_an_error_in_a_worker_is_told_as_in_the_rank(
    folder: Path, own: Path, tmp_path: Path
) -> None:
    messages = []
    for workers in (0, 2):
        with pytest.raises(RankError) as caught:
            train(folder, tmp_path / str(workers), data=f"{own}:fails", workers=workers)
        messages.append(caught.value.what)
    assert "ValueError: a broken image" in messages[1] and "own.py:" in messages[1]
    assert messages[0] == messages[1]


def test_a_worker_that_ends_is_named(folder: Path, own: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="DataLoader worker") as caught:
        train(folder, tmp_path / "run", data=f"{own}:ends", workers=1)
    assert "A data-loading process has ended" in caught.value.cure


# The object


def squares(number: int) -> dict[str, Tensor]:
    if number == 13:
        raise DataError("there is no thirteenth", "Ask for another.")
    return {"square": torch.tensor([number**2]), "process": torch.tensor(os.getpid())}


@pytest.fixture
def reading() -> Iterator[ReadAhead]:
    made = ReadAhead(squares, lambda: range(2, 12, 2), Workers(2, 2))
    yield made
    made.close()


def workers_now() -> list[int]:
    return [process.pid for process in active_children() if process.pid]


def test_micro_batches_may_be_asked_for_in_another_order(reading: ReadAhead) -> None:
    found = [int(reading(number)["square"]) for number in (2, 6, 4, 10, 8)]
    assert found == [4, 36, 16, 100, 64]


def test_workers_end_with_the_last_micro_batch_and_start_again(reading: ReadAhead) -> None:
    for _ in range(2):
        assert reading(2)["process"] != os.getpid()
        pids = workers_now()
        assert len(pids) == 2
        for number in (4, 6, 8, 10):
            reading(number)
        assert not workers_now() and not any(map(is_alive, pids))


def test_a_micro_batch_that_was_not_announced_is_read_by_the_rank(reading: ReadAhead) -> None:
    assert reading(5)["process"] == os.getpid()
    assert reading(4)["process"] != os.getpid()


def test_an_error_keeps_its_class_and_its_sentences() -> None:
    reading = ReadAhead(squares, lambda: [12, 13], Workers(1, 1))
    reading(12)
    with pytest.raises(DataError) as caught:
        reading(13)
    assert (caught.value.what, caught.value.cure) == ("there is no thirteenth", "Ask for another.")
    reading.close()


def test_a_worker_that_is_killed_is_named() -> None:
    def slow(number: int) -> dict[str, Tensor]:
        time.sleep(30 if number else 0)
        return {}

    reading = ReadAhead(slow, lambda: range(3), Workers(1, 1))
    reading(0)
    os.kill(workers_now()[0], signal.SIGKILL)
    with pytest.raises((ReadError, RuntimeError), match="DataLoader worker"):
        reading(1)
        time.sleep(1)
    reading.close()


def test_workers_leave_signals_to_the_rank_and_global_numbers_as_they_are() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    reading = ReadAhead(squares, lambda: range(1, 9), Workers(1, 1))
    reading(1)
    assert torch.equal(torch.rand(1), expected)
    (pid,) = workers_now()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(pid, number)
    assert [int(reading(number)["square"]) for number in range(2, 9)] == [
        number**2 for number in range(2, 9)
    ]


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    def hangs(number: int) -> dict[str, Tensor]:
        (tmp_path / f"{number}").touch()
        time.sleep(number)
        return {}

    reading = ReadAhead(hangs, lambda: [0, 1000], Workers(1, 1))
    reading(0)
    (pid,) = workers_now()
    while not (tmp_path / "1000").exists():
        time.sleep(0.01)
    reading.close()
    assert not is_alive(pid)
