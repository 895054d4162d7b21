"""Calls that forward makes in uncommon ways, as the generated code writes them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.codegen.layout import write_imports
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.tests.support.models.operators import Calling
from asyncpipe.tests.support.oracles.generated_equality import assert_same

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Dimension(enum.IntEnum):
    FEATURES = 1


class Reduction(enum.StrEnum):
    MEAN = "mean"


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def with_two_columns_of_zeros(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, np.array([0, 3])] = 0
    return copy


ARGUMENTS: dict[str, Callable[[Any], Tensor]] = {
    "bool as a dtype": lambda x: x * torch.ones(8, dtype=bool),
    "float as a dtype": lambda x: x.to(float).to(torch.float32),
    "int as a dtype": lambda x: x + torch.zeros(8, dtype=int),
    "complex as a dtype": lambda x: (x * torch.ones(8, dtype=complex)).real.float(),
    "type of a tensor": lambda x: x * x.type(torch.LongTensor),
    "range": lambda x: x[:, range(8)],
    "array as an index": lambda x: x[:, np.arange(8)[::-1].copy()],
    "array of rows as an index": lambda x: x[:, np.arange(8).reshape(2, 4)].reshape(-1, 8),
    "array of bool as an index": lambda x: x[:, np.ones(8, dtype=bool)],
    "array as an index of an assignment": with_two_columns_of_zeros,
    "number of an enumeration": lambda x: x + x.sum(Dimension.FEATURES, keepdim=True),
    "word of an enumeration": lambda x: x + F.mse_loss(x, 2 * x, reduction=Reduction.MEAN),
    "infinite complex number": lambda x: torch.where(x > 99, complex("inf"), x).real,
    "complex number": lambda x: (x * (1 + 2j)).real,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_that_torch_takes_is_written(name: str, tmp_path: Path) -> None:
    assert_same(Calls(ARGUMENTS[name]), {"x": X}, tmp_path)


def test_a_function_of_torch_keeps_its_name_where_a_package_wraps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda x, dim, index: own(x, dim, index))
    model = Calls(lambda x: torch.index_select(x, 1, torch.arange(8).flip(0)))
    assert_same(model, {"x": X}, tmp_path)
    stages = [file.read_text() for file in (tmp_path / "cut").glob("stage_*.py")]
    assert sum(text.count("torch.index_select(") for text in stages) == 1


def test_tensors_that_stand_for_sizes_are_written_as_numbers(tmp_path: Path) -> None:
    def turned_twice(x: Tensor) -> Tensor:
        order = torch.cat((torch.tensor([1, 0]), torch.arange(2, x.ndim)))
        return x.permute(*order).contiguous().permute(*order)

    assert_same(Calls(turned_twice), {"x": X}, tmp_path)
    stages = [file.read_text() for file in (tmp_path / "cut").glob("stage_*.py")]
    assert sum(text.count("permute(1, 0)") for text in stages) == 2


class Changes(Calls):
    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__(torch.relu)
        self.change = change
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


def masked(model: Any) -> None:
    model.first.weight.data *= model.mask


def of_norm_one(model: Any) -> None:
    model.first.weight.data = torch.renorm(model.first.weight.data, p=2, dim=0, maxnorm=1.0)


def limited(model: Any) -> None:
    model.second.bias.data = model.second.bias.data.clamp(-0.1, 0.1)


def fading(model: Any) -> None:
    model.mask.data = 0.9 * model.mask.data
    model.first.weight.data *= model.mask


@pytest.mark.parametrize("change", [masked, of_norm_one, limited, fading])
def test_data_that_forward_assigns_is_copied_into_the_tensor(
    change: Callable[[Any], object], tmp_path: Path
) -> None:
    """As masked convolutions and layers with a limited norm do."""
    assert_same(Changes(change), {"x": X}, tmp_path)


MADE: dict[str, Callable[[], Tensor]] = {
    "FloatTensor": lambda: torch.FloatTensor([1.0, 2.0]),
    "Tensor, moved": lambda: torch.Tensor([1.0, 2.0]).to("cpu"),
    "view": lambda: torch.FloatTensor([[1.0], [2.0]]).view(2),
    "from_numpy": lambda: torch.from_numpy(np.array([1.0, 2.0], dtype=np.float32)),
    "as_tensor": lambda: torch.as_tensor(np.array([1.0, 2.0], dtype=np.float32)),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
}


class Sums(Calls):
    def __init__(self, made: Callable[[], Tensor]) -> None:
        super().__init__(torch.relu)
        self.made = made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = self.made()
        hidden = self.first(x)
        total += hidden.mean()
        total[0] *= 2.0
        hidden = self.second(torch.relu(hidden))
        total.add_(hidden.square().mean())
        return hidden, total


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_that_each_call_makes_and_changes_is_made_in_each_call(
    name: str, tmp_path: Path
) -> None:
    assert_same(Sums(MADE[name]), {"x": X}, tmp_path)


def shared(model: Any) -> None:
    model.second.weight.data = model.first.weight.data


def turned(model: Any) -> None:
    model.first.weight.data = model.first.weight.data.t()


@pytest.mark.parametrize("change", [shared, turned])
def test_data_in_the_memory_of_another_tensor_is_refused(change: Callable[[Any], object]) -> None:
    """An optimizer that steps one of them would step both."""
    with pytest.raises(CaptureError, match="assigns the data"):
        capture(Changes(change), {"x": X}, method="tracer")


def test_a_module_whose_name_python_would_change_in_a_class_is_imported_outside() -> None:
    assert "from package.__arch.net import Net" in write_imports(
        "", [("package.__arch.net", "Net")]
    )
    with pytest.raises(PlanError, match="cannot import"):
        write_imports("", [("package.__arch.net", "")])  # each use would name the module


def test_operators_are_written_with_torch_ops_and_the_modules_that_register_them(
    tmp_path: Path,
) -> None:
    assert_same(Calling(), {"x": X[:, :6].clone()}, tmp_path / "same")
    asyncpipe.partition(
        Calling(), {"x": X[:, :6]}, stages=2, output=tmp_path / "cut", profile="analytic"
    )
    files = [(tmp_path / "cut" / f"stage_{stage}.py").read_text() for stage in range(2)]
    text = "".join(files)
    assert "torch.ops.aten.slice(" in text and "torch.ops.asyncpipe_tests.scaled" in text
    assert "torch.ops.asyncpipe_tests_too.twice" in text
    for file in files:
        calls = "torch.ops.asyncpipe_tests" in file
        assert ("import asyncpipe.tests.support.models.operators\n" in file) == calls


def test_an_operator_that_no_module_registers_is_refused(tmp_path: Path) -> None:
    place: dict[str, Any] = {"torch": torch}
    exec('library = torch.library.Library("asyncpipe_tests_nowhere", "DEF")', place)
    place["library"].define("once(Tensor x) -> Tensor")
    place["library"].impl("once", lambda x: x * 1, "CompositeImplicitAutograd")
    called = Calls(torch.ops.asyncpipe_tests_nowhere.once)
    with pytest.raises(PlanError, match="torch.ops.asyncpipe_tests_nowhere.once: no module") as e:
        asyncpipe.partition(called, {"x": X}, stages=2, output=tmp_path, profile="analytic")
    assert "--leaf" in e.value.cure
