"""Random numbers drawn by the user's code: the same on all ranks and in every run, or refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.own_data import own_parts
from asyncpipe.runtime.distributed.failure import RankError
from asyncpipe.runtime.launch import launch
from asyncpipe.runtime.rng import drawing_from
from asyncpipe.tests.support.models.hand_folders import WIDTH, write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import (
    Trained,
    assert_goes_on_as,
    assert_same,
    train,
)
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

DRAWS = f"""
import random
import numpy as np
import torch
import asyncpipe

OFFSET = torch.randn({WIDTH}) + random.gauss(0, 1) + float(np.random.normal())

class Samples:
    def __init__(self, count):
        self.points = torch.randn(count, {WIDTH}) + random.random() + np.random.rand()
    def __len__(self):
        return len(self.points)
    def __getitem__(self, index):
        mask = torch.rand({WIDTH}) < 0.5
        noise = random.gauss(0, 1) + float(np.random.normal())
        x = torch.where(mask, self.points[index] + OFFSET, torch.tensor(noise))
        return {{"x": x.float(), "target": int(mask[:3].sum())}}

def data():
    return Samples(21), Samples(9)

def columns():
    labels = [0, 1, 2, 3] * 5
    random.shuffle(labels)
    points = torch.randn(20, {WIDTH}) + torch.from_numpy(np.random.rand(20, 1)).float()
    return {{"x": points, "target": torch.tensor(labels)}}

def criterion(outputs, target):
    loss = torch.nn.functional.cross_entropy(outputs, target)
    return loss * (1 + 0.1 * torch.rand(()) + 0.1 * random.random() + 0.1 * np.random.rand())

class Log(asyncpipe.Reporter):
    def on_step(self, record):
        torch.rand(3), random.random(), np.random.rand()

def log(settings, folder):
    torch.rand(3), random.random(), np.random.rand()
    return Log()
"""
KEPT_STATE = f"""
import numpy as np
import torch

class Samples:
    def __init__(self, *seed):
        self.own = np.random.default_rng(*seed)
    def __len__(self):
        return 20
    def __getitem__(self, index):
        value = float(self.own.normal())
        return {{"x": torch.full(({WIDTH},), value), "target": int(value > 0)}}

class Fields:
    def __len__(self):
        return 20
    def get(self, indices, fields):
        count = len(indices)
        made = {{}}
        if "x" in fields:
            made["x"] = torch.randn(count, {WIDTH})
        if "target" in fields:
            made["target"] = torch.randint(4, (count,))
        return made

def seeded():
    return Samples(0)
def entropy():
    return Samples()
def fields():
    return Fields()
"""
EACH_ITS_OWN = f"""
import os
import torch
def torch_columns():
    torch.manual_seed(os.getpid())
    return {{"x": torch.randn(20, {WIDTH}), "target": torch.zeros(20, dtype=torch.int64)}}
def a_few():
    found = [{{"x": torch.zeros({WIDTH}), "target": 0}} for _ in range(20)]
    for place in range(0, 20, 2):
        found[place]["target"] = os.getpid() % 10_000
    return found
def evaluation():
    held_out = [{{"x": torch.zeros({WIDTH}), "target": os.getpid() % 10_000}} for _ in range(4)]
    return torch_points(), held_out
def torch_points():
    return {{"x": torch.zeros(20, {WIDTH}), "target": torch.zeros(20, dtype=torch.int64)}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "mlp2"
    write_mlp(made)
    return made


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own") / "draws.py"
    made.write_text(DRAWS)
    return made


def train_drawing(folder: Path, draws: Path, output: Path, **given: Any) -> Trained:
    own = {name: f"{draws}:{name}" for name in ("data", "criterion", "log")}
    return train(folder, output, **({"eval_batches": 2, "eval_every": 4} | own | given))


@pytest.fixture(scope="module")
def alone(folder: Path, draws: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_drawing(folder, draws, tmp_path_factory.mktemp("runs") / "a", schedule="single")


def evaluated(trained: Trained) -> list[float]:
    return [each["loss"] for each in trained.records if each["event"] == "eval"]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "single"},
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "log": None},
        {"schedule": "gpipe", "recompute": "all"},
        {"schedule": "1f1b", "data": "columns"},
    ],
    ids=["again", "two ranks", "no trackers", "recomputed", "columns"],
)
def test_what_own_code_draws_is_the_same_on_any_ranks(
    folder: Path, draws: Path, alone: Trained, tmp_path: Path, options: dict[str, Any]
) -> None:
    if options.get("data"):
        options = options | {"data": f"{draws}:columns", "eval_batches": 0}
        alone = train_drawing(folder, draws, tmp_path / "a", **options | {"schedule": "single"})
    found = train_drawing(folder, draws, tmp_path / "b", **options)
    assert found.of("loss") == alone.of("loss")
    assert evaluated(found) == evaluated(alone)
    assert_same(found.weights, alone.weights)
    generators = {name: value for name, value in alone.state.items() if "random.0" in name}
    assert generators
    for name, value in generators.items():
        assert torch.equal(found.state[name], value), name


def test_another_seed_draws_other_numbers(
    folder: Path, draws: Path, alone: Trained, tmp_path: Path
) -> None:
    other = train_drawing(folder, draws, tmp_path / "b", schedule="single", seed=2)
    assert other.of("loss") != alone.of("loss")


def test_replicas_read_what_one_process_reads(
    folder: Path, draws: Path, alone: Trained, tmp_path: Path
) -> None:
    found = train_drawing(folder, draws, tmp_path / "b", schedule="ddp", replicas=2)
    assert found.of("loss") == pytest.approx(alone.of("loss"), rel=1e-5)


def test_two_ranks_that_draw_go_on_as_if_nothing_had_happened(
    folder: Path, draws: Path, tmp_path: Path
) -> None:
    own = {name: f"{draws}:{name}" for name in ("data", "criterion")}
    whole = train(folder, tmp_path / "whole", **own)
    assert_goes_on_as(whole, folder, 4, **own)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("torch_columns", r"sample \d+ has other values"),
        ("a_few", r"sample \d*[02468] has other values"),
        ("evaluation", "sample 0 of the evaluation data has other values"),
    ],
)
def test_ranks_that_make_other_data_are_named_with_the_sample(
    folder: Path, tmp_path: Path, function: str, words: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(EACH_ITS_OWN)
    with pytest.raises(RankError, match=rf"ranks 0 and 1 read different data: {words}") as no:
        train(folder, tmp_path / "run", data=f"{own}:{function}")
    assert "sort the elements of a set" in no.value.cure


def test_samples_that_a_resumed_run_would_not_repeat_are_warned_of(
    folder: Path, tmp_path: Path
) -> None:
    (own := tmp_path / "own.py").write_text(KEPT_STATE)
    alone, found = (
        train(folder, tmp_path / schedule, data=f"{own}:seeded", schedule=schedule, steps=12)
        for schedule in ("single", "1f1b")
    )
    for trained in (alone, found):
        warnings = [each["text"] for each in trained.records if each["event"] == "warning"]
        assert sum("read again with the same seed" in text for text in warnings) == 1
    assert found.of("loss") == alone.of("loss")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("entropy", "ranks 0 and 1 read different data: sample"),
        ("fields", "has other values when rank 1 asks for some of its fields alone"),
    ],
)
def test_samples_whose_parts_do_not_belong_together_are_refused(
    folder: Path, tmp_path: Path, function: str, words: str
) -> None:
    (own := tmp_path / "own.py").write_text(KEPT_STATE)
    with pytest.raises(RankError, match=words):
        train(folder, tmp_path / "run", data=f"{own}:{function}")


def test_data_do_not_depend_on_what_was_drawn_before(draws: Path) -> None:
    first, again = (
        [random.random(), np.random.rand(), torch.rand(1)] and own_parts(f"{draws}:data", 1)
        for _ in range(2)
    )
    other = own_parts(f"{draws}:data", 2)
    points = [made[0].samples.points for made in (first, again, other)]
    assert torch.equal(points[0], points[1])
    assert not torch.equal(points[0], points[2])


def test_samples_of_several_shapes_are_refused_with_a_cure(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "def data():\n"
        f"    return [{{'x': torch.zeros({WIDTH} + i % 2), 'target': 0}} for i in range(20)]\n"
    )
    with pytest.raises(
        RankError, match="in another, but all samples of a micro-batch have one shape"
    ) as no:
        train(folder, tmp_path / "run", data=f"{own}:data")
    assert "partition with an example of it" in no.value.cure


def test_generators_go_on_where_they_were_and_differ_from_each_other() -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn()
    before = drawn()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn()
    with drawing_from(1, "a"):
        first = drawn()
    with pytest.raises(KeyError), drawing_from(1, "a"):
        assert drawn() == first
        raise KeyError
    with drawing_from(1, "b"):
        other = drawn()
    assert drawn() == before
    assert len({*first, *other}) == 6


@pytest.mark.parametrize("order", [None, "random"])
def test_a_set_is_iterated_in_one_order_by_all_ranks_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str | None
) -> None:
    """With `random` each rank has an order of its own, as under the user's torchrun. The ranks are
    real interpreters: forks of one have one order."""
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "def data():\n"
        "    words = {f'word {number}' for number in range(40)}\n"
        "    labels = torch.tensor([int(word.split()[1]) % 4 for word in words])\n"
        f"    return {{'x': torch.zeros(40, {WIDTH}), 'target': labels}}\n"
    )
    given = {"data": f"{own}:data", "steps": 1, "micro_batches": 2, "threads": 1, "seed": 7}
    settings = Settings(folder=str(folder), output=str(tmp_path / "run"), **given)
    if order is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        launch.run(settings, FACTORY)
        return
    monkeypatch.setenv("PYTHONHASHSEED", order)
    with pytest.raises(RankError, match=r"read different data: sample \d+ has other") as no:
        launch.run(settings, FACTORY)
    assert "sort the elements of a set" in no.value.cure


def test_sets_have_one_order_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import os\ndef data():\n    raise KeyError(os.environ['PYTHONHASHSEED'])\n")
    with pytest.raises(RankError, match="KeyError: '7'"):
        train(folder, tmp_path / "run", data=f"{own}:data", seed=7)
