"""The values that a data function may return, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.own_data import own_parts
from asyncpipe.runtime.data.samples import Columns
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.training.batches import Data, open_data
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp, write_text

COUNT = 20
X = torch.arange(COUNT * WIDTH, dtype=torch.float32).reshape(COUNT, WIDTH)
Y = torch.arange(COUNT) % CLASSES
FIELDS = ("x", "target")


class Rows(Dataset[dict[str, Any]]):
    """A map-style data set whose samples are dicts, with the target under any name."""

    def __init__(self, target: str = "target", **more: Any) -> None:
        self.target, self.more = target, more

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], self.target: int(Y[index]), **self.more}


class Splits(dict[str, Any]):
    """A dict of its own kind, as DatasetDict of Hugging Face is."""


class ListColumns:
    """As a Dataset of Hugging Face: rows of Python lists, and no class of torch."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index].tolist(), "label": int(Y[index]), "text": "words", "idx": index}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_mlp(tmp_path_factory.mktemp("plans") / "mlp")


@pytest.fixture
def opened(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Data]:
    """The data of a function that returns this value."""

    def open_value(value: Any) -> Data:
        monkeypatch.setattr(f"{__name__}.returned", lambda: value, raising=False)
        settings, task = resolve(Settings(folder="x", data=f"{__name__}:returned"), plan)
        return open_data(settings, task, plan, Path("x"))

    return open_value


def read(data: Any, *indices: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = data.get(indices, FIELDS)
    return made


HALF = slice(0, COUNT // 2)


@pytest.mark.parametrize(
    "value",
    [
        Rows(),
        Rows("label"),
        Rows("labels"),
        Rows("label", idx=3, text="words"),
        ListColumns(),
        TensorDataset(X, Y),
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X, Y.tolist()),
        [(x, y) for x, y in zip(X, Y, strict=True)],
        {"x": X, "label": Y},
        DataLoader(Rows(), batch_size=3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_of_every_form_are_the_same(opened: Callable[[Any], Data], value: Any) -> None:
    data = opened(value)
    assert data.evaluation is None
    assert len(data.train) == COUNT
    batch = read(data.train, 3, 18, 0)
    assert torch.equal(batch["x"], X[[3, 18, 0]])
    assert torch.equal(batch["target"], Y[[3, 18, 0]])


@pytest.mark.parametrize(
    "value",
    [
        random_split(Rows(), [15, 5], torch.Generator().manual_seed(0)),
        (Rows(), Rows()),
        [Rows(), Rows()],
        (ListColumns(), ListColumns()),
        [ListColumns(), ListColumns()],
        Splits(train=ListColumns(), test=ListColumns()),
        {"train": Rows(), "validation": Rows(), "test": []},
        {"train": (X, Y), "eval": (X, Y)},
        ((X, Y), (X[HALF], Y[HALF])),
        ({"x": X, "target": Y}, {"x": X[HALF], "target": Y[HALF]}),
        [DataLoader(Rows()), DataLoader(Rows())],
        (DataLoader(Rows()), Rows()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pair_is_training_and_evaluation_data(opened: Callable[[Any], Data], value: Any) -> None:
    data = opened(value)
    assert data.evaluation is not None
    for part in (data.train, data.evaluation):
        batch = read(part, 0, 1)
        assert batch["x"].shape == (2, WIDTH)
        assert torch.equal(batch["target"], (batch["x"][:, 0] / WIDTH).long() % CLASSES)


def test_random_split_keeps_its_parts(opened: Callable[[Any], Data]) -> None:
    train, held_out = random_split(Rows(), [15, 5], torch.Generator().manual_seed(0))
    data = opened([train, held_out])
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (15, 5)
    assert torch.equal(read(data.evaluation, *range(5))["x"], X[list(held_out.indices)])


def test_a_list_of_two_equal_tensors_is_two_samples(tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text(
        "import torch\ndef data():\n    return [torch.ones(3), torch.zeros(3)]\n"
    )
    part, held_out = own_parts(f"{own}:data", 0)
    assert held_out is None
    assert len(part.samples) == 2


class Frame(list):  # type: ignore[type-arg]
    """As pandas has it: indexed by columns."""

    columns, iloc = ("x", "y"), None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (random_split(Rows(), [10, 5, 5]), "a list of 3 Subset"),
        ({"test": Rows()}, "gives the splits test, but none to train on"),
        ((X, Y[:7]), r"the columns differ in length \(\[0\] 20, \[1\] 7\)"),
        ((X, X, Y, Y[:5]), r"the columns differ in length"),
        (3, "gives an int, not a sequence"),
        (Rows, "gives the class Rows, not an object of it"),
        ({"x": X, "target": np.array(["one"] * COUNT)}, "target of a sample .* has the type str_"),
        (Frame("xy"), "gives a Frame, not a sequence of samples"),
        ([{"x": object(), "target": 0}] * 3, "x of a sample .* has the type object"),
        (
            [{"x": X[0], "left": 0, "right": 1}] * 3,
            "has x, left, right, but the model reads target",
        ),
    ],
)
def test_a_form_that_means_nothing_is_refused(
    opened: Callable[[Any], Data], value: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read(opened(value).train, 0, 1)


@pytest.mark.parametrize("x", [X.clone().requires_grad_(), X.to_sparse(), X.double().numpy()])
def test_a_sample_is_a_tensor_of_numbers_alone(opened: Callable[[Any], Data], x: Any) -> None:
    columns = {"x": x, "target": Y.int(), "name": np.array(["one"] * COUNT)}
    batch = read(opened(columns).train, 2, 1)
    assert torch.equal(batch["x"], X[[2, 1]]) and not batch["x"].requires_grad


def test_labels_are_found_under_label_where_the_model_reads_labels(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_text(tmp_path_factory.mktemp("plans") / "text")
    row = {"input_ids": [1, 2, 3], "label": [4, 5, 6]}
    monkeypatch.setattr(f"{__name__}.returned", lambda: [row] * 4, raising=False)
    settings, task = resolve(Settings(folder="x", data=f"{__name__}:returned"), plan)
    data = open_data(settings, task, plan, Path("x"))
    batch = data.train.get([0, 1], ["input_ids", "labels"])
    assert batch["labels"].tolist() == [[4, 5, 6]] * 2


# The sampler of a DataLoader


def indices_of(order: SampleOrder, epochs: int) -> list[list[int]]:
    return [order.samples(epoch * order.length, order.length) for epoch in range(epochs)]


def test_a_loader_that_does_not_shuffle_keeps_its_order(opened: Callable[[Any], Data]) -> None:
    order = opened(DataLoader(Rows(), batch_size=3)).order(1)
    assert indices_of(order, 2) == [list(range(COUNT))] * 2


def test_a_loader_that_shuffles_has_the_order_of_its_data_set(
    opened: Callable[[Any], Data],
) -> None:
    order = opened(DataLoader(Rows(), batch_size=3, shuffle=True)).order(1)
    assert indices_of(order, 2) == indices_of(SampleOrder(COUNT, 1), 2)


class Counting:
    """A sampler with a state of its own: other indices in each epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        yield from (self.epochs, 0, self.epochs + 1)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] + [0.0] * (COUNT - 2) + [3.0], 8)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Rows(), sampler=weighted()),
        lambda: DataLoader(Rows(), sampler=SubsetRandomSampler(range(5, 13))),
        lambda: DataLoader(Rows(), sampler=RandomSampler(Rows(), replacement=True, num_samples=8)),
        lambda: DataLoader(Rows(), sampler=Counting()),
        lambda: DataLoader(Rows(), batch_sampler=[[3, 1], [4, 1, 5]]),
    ],
)
def test_the_order_of_a_sampler_depends_on_seed_and_position_alone(
    opened: Callable[[Any], Data], loader: Callable[[], DataLoader[Any]]
) -> None:
    torch.manual_seed(0)
    expected = indices_of(opened(loader()).order(1), 3)
    torch.manual_seed(1)
    later = opened(loader()).order(1)
    assert later.samples(2 * later.length + 1, 2) == expected[2][1:3]
    assert later.digest(0) == opened(loader()).order(1).digest(0)


def test_a_sampler_chooses_its_samples(opened: Callable[[Any], Data]) -> None:
    drawn = indices_of(opened(DataLoader(Rows(), sampler=weighted())).order(1), 9)
    assert {index for epoch in drawn for index in epoch} == {0, COUNT - 1}
    batches = DataLoader(Rows(), batch_sampler=[[3, 1], [4, 1, 5]])
    assert indices_of(opened(batches).order(1), 2) == [[3, 1, 4, 1, 5]] * 2
    counted = indices_of(opened(DataLoader(Rows(), sampler=Counting())).order(1), 2)
    assert counted == [[1, 0, 2], [2, 0, 3]]


def test_the_sampler_of_evaluation_data_chooses_them(opened: Callable[[Any], Data]) -> None:
    loaders = [
        DataLoader(Rows(), sampler=SubsetRandomSampler(chosen))
        for chosen in (range(0, 15), range(15, 20))
    ]
    data = opened(loaders)
    assert data.evaluation is not None
    assert sorted(read(data.evaluation, *range(5))["x"][:, 0] / WIDTH) == [15, 16, 17, 18, 19]


class Shrinking:
    def __init__(self) -> None:
        self.length = 4

    def __iter__(self) -> Iterator[int]:
        self.length -= 1
        yield from range(self.length)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Shrinking(), "gives 2 samples in epoch 1, but 3 before"),
        ([], "gives 0 samples in epoch 0"),
        ([1, 77], "gives sample 77, but there are 20"),
    ],
)
def test_a_sampler_that_does_not_fit_is_refused(
    opened: Callable[[Any], Data], sampler: Any, words: str
) -> None:
    data = opened(DataLoader(Rows(), sampler=sampler))
    with pytest.raises(DataError, match=words):
        indices_of(data.order(1), 2)


def test_a_sampler_for_each_rank_is_refused(opened: Callable[[Any], Data]) -> None:
    sampler: Any = DistributedSampler(Rows(), num_replicas=2, rank=1)
    batches = BatchSampler(SequentialSampler(Rows()), 2, False)
    batches.sampler = sampler
    for loader in (DataLoader(Rows(), sampler=sampler), DataLoader(Rows(), batch_sampler=batches)):
        with pytest.raises(DataError, match="DistributedSampler, which gives every rank other"):
            opened(loader)


# Collate functions


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": pad_sequence([sample["x"] for sample in samples], batch_first=True),
        "target": torch.tensor([sample["target"] for sample in samples]),
    }


def test_the_collate_function_of_a_loader_joins_a_micro_batch(
    opened: Callable[[Any], Data],
) -> None:
    samples: Any = [{"x": torch.ones(length), "target": length} for length in (3, 5, 2, 4)]
    data = opened(DataLoader(samples, batch_size=2, collate_fn=padded))
    assert read(data.train, 0, 2)["x"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert read(data.train, 1, 3)["x"].shape == (2, 5)


def test_a_collate_function_may_return_a_tuple_and_must_keep_all_samples(
    opened: Callable[[Any], Data],
) -> None:
    data = opened(DataLoader(Rows(), collate_fn=lambda rows: tuple(padded(rows).values())))
    assert torch.equal(read(data.train, 4, 2)["x"], X[[4, 2]])
    data = opened(DataLoader(Rows(), collate_fn=lambda rows: padded(rows[1:])))
    with pytest.raises(DataError, match=r"made x of shape \(2, 16\) from 3 samples"):
        read(data.train, 0, 1, 2)


def test_code_that_changes_the_current_folder_leaves_the_run_where_it_was(tmp_path: Path) -> None:
    """At its import and at its call; a file that it reads there is found."""
    (tmp_path / "at_call").mkdir()
    (tmp_path / "at_call" / "rows.txt").write_text("1 2 3")
    (tmp_path / "mine.py").write_text(
        f"import os\nimport torch\nos.chdir({str(tmp_path)!r})\n\n"
        "def data():\n    os.chdir('at_call')\n"
        "    rows = [float(n) for n in open('rows.txt').read().split()]\n"
        "    return {'x': torch.tensor(rows)}\n"
    )
    before = os.getcwd()
    train, _ = own_parts(f"{tmp_path / 'mine.py'}:data", 1)
    assert os.getcwd() == before and isinstance(train.samples, Columns)
