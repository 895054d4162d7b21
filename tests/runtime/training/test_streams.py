"""Data without numbers: every rank reads the same stream, and a resumed run continues in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.data.streams import packed_state, unpacked_state
from asyncpipe.runtime.distributed.failure import RankError
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import (
    Trained,
    assert_goes_on_as,
    assert_same,
    train,
)

OWN = f"""
import random
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

POINTS = torch.randn(21, {WIDTH})

def sample(index):
    noise = random.gauss(0, 1) * (torch.rand({WIDTH}) < 0.5)
    return {{"x": POINTS[index] + noise, "target": index % {CLASSES}}}

class Stream(IterableDataset):
    def __iter__(self):
        # Divides itself between the workers of a DataLoader, as streams of Hugging Face do.
        first = 5 if get_worker_info() is not None else 0
        for index in range(21):
            yield sample((index + first) % 21)

class Kept(Stream):
    '''Starts every later pass at a place that it was given, as the streams of Hugging Face do.'''
    def __init__(self):
        self.place = self.start = 0
    def __iter__(self):
        self.place = self.start
        while self.place < 21:
            self.place += 1
            with open("reads.txt", "a") as file:
                file.write(f"{{self.place - 1}} ")
            yield sample(self.place - 1)
    def state_dict(self):
        return {{"place": self.place}}
    def load_state_dict(self, state):
        self.place = self.start = state["place"]

class Sized(Stream):
    def __len__(self):
        return 21

def stream():
    return Stream()
def generator():
    for index in range(21):
        yield sample(index)
def kept():
    return Kept()
def sized():
    return Sized(), Stream()
def pair():
    return generator(), generator()
def loader():
    return DataLoader(Stream(), batch_size=3)
def loader_with_workers():
    return DataLoader(Stream(), batch_size=None, num_workers=1)
def kept_loader():
    return DataLoader(Kept(), batch_size=3)
def empty():
    return iter([])
def splits():
    return {{"train": Stream(), "test": Stream()}}

once = (sample(index) for index in range(21))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "mlp2"
    write_mlp(made)
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own") / "own.py"
    made.write_text(OWN)
    return made


Run = Callable[..., Trained]


@pytest.fixture
def run(folder: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def made(function: str, name: str = "run", **given: Any) -> Trained:
        usual = {"data": f"{own}:{function}", "micro_batch_size": 2, "save_every": 0}
        return train(folder, tmp_path / name, **(usual | given))

    return made


def texts(trained: Trained, event: str) -> list[str]:
    return [each["text"] for each in trained.records if each["event"] == event]


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "workers": 3},
        {"function": "generator"},
        {"function": "kept", "workers": 1},
        {"function": "sized"},
    ],
    ids=["two ranks", "workers", "a generator", "a stream with a state", "one with a length"],
)
def test_every_rank_reads_the_same_stream(run: Run, given: dict[str, Any]) -> None:
    alone = run("stream", "alone", schedule="single")
    found = run(given.get("function", "stream"), **{"schedule": "1f1b"} | _without(given))
    assert found.of("loss") == alone.of("loss")
    assert_same(found.weights, alone.weights)
    assert not texts(found, "warning")


def _without(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "function"}


def test_batches_of_a_loader_are_divided_into_micro_batches(run: Run) -> None:
    alone = run("loader", "alone", schedule="single")
    found = run("loader", "found", schedule="1f1b")
    assert found.of("loss") == alone.of("loss")
    assert len({*alone.of("loss").values()}) == 6


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"schedule": "single"}, {"schedule": "ddp"}),
        ({"schedule": "2bw", "ranks": 1}, {"schedule": "2bw", "micro_batches": 2, "workers": 1}),
    ],
    ids=["ddp", "2bw"],
)
def test_replicas_share_out_a_stream(run: Run, one: dict[str, Any], two: dict[str, Any]) -> None:
    alone = run("stream", "alone", **one)
    found = run("stream", "found", replicas=2, **two)
    assert found.of("loss") == pytest.approx(alone.of("loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "schedule"),
    [("kept", "1f1b"), ("kept", "async-1f1b"), ("kept_loader", "1f1b"), ("stream", "1f1b")],
)
def test_a_resumed_run_goes_on_in_the_stream(
    run: Run, folder: Path, own: Path, function: str, schedule: str
) -> None:
    given = {"data": f"{own}:{function}", "micro_batch_size": 2, "schedule": schedule}
    whole = run(function, "whole", save_every=2, schedule=schedule)
    Path("reads.txt").unlink(missing_ok=True)
    resumed = assert_goes_on_as(whole, folder, 4, **given)
    notes = [text for text in texts(resumed, "note") if "skipped" in text]
    assert len(notes) == (function == "stream")
    if function == "kept":
        # 32 samples before: the second pass goes on at sample 11 of 21, and ends with sample 5. The
        # two ranks have read sample 8 twice each, to compare the first samples.
        assert Path("reads.txt").read_text().split().count("8") == 4


def test_a_stream_that_ends_at_once_is_refused(run: Run) -> None:
    with pytest.raises(RankError, match="has no samples"):
        run("empty")


def test_an_iterator_can_be_read_only_once(run: Run) -> None:
    with pytest.raises(RankError, match="gives a generator, which can be read once only") as caught:
        run("once")
    assert "IterableDataset" in caught.value.cure


@pytest.mark.parametrize("function", ["sized", "pair", "splits"])
def test_an_evaluation_reads_a_whole_stream(run: Run, function: str) -> None:
    trained = run(function, eval_batches=None)
    (evaluated,) = [each for each in trained.records if each["event"] == "eval"]
    assert (evaluated["samples"], evaluated["length"]) == (21, 21)
    trained = run(function, "part", eval_batches=3)
    (evaluated,) = [each for each in trained.records if each["event"] == "eval"]
    assert (evaluated["samples"], evaluated["length"]) == (6, 6)


def test_a_state_survives_json() -> None:
    state = {
        "seen": 3,
        7: (b"x", [None, True, 2.5, "word"]),
        "generator": torch.Generator().manual_seed(3).get_state(),
        "array": torch.arange(6.0).reshape(2, 3).numpy(),
    }
    found = unpacked_state(json.loads(json.dumps(packed_state(state))))
    assert found["seen"] == 3 and found[7] == state[7]
    assert torch.equal(found["generator"], state["generator"])
    assert (found["array"] == state["array"]).all()
    with pytest.raises(TypeError, match="cannot hold an object"):
        packed_state({"a": [object()]})
