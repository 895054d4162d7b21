"""Arguments and results of forward that are not single tensors keep their structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import CaptureError, DataError
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY


class Points(NamedTuple):
    near: Tensor
    far: Tensor


@dataclass
class Batch:
    pixels: Tensor
    points: Points
    scale: float = 1.0
    mask: Tensor | None = None


def x(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def both(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(value)))


class TakesDict(Base):
    def forward(self, batch: dict[str, Any], masks: list[Tensor]) -> Tensor:
        return self.both(batch["pixels"] * masks[0]) + batch["deep"][1] * masks[1]


class TakesRecord(Base):
    def forward(self, batch: Batch) -> Tensor:
        value = batch.pixels * batch.scale + batch.points.near
        if batch.mask is not None:
            value = value * batch.mask
        return self.both(value) - batch.points.far


class TakesConstants(Base):
    def forward(
        self, x: Tensor, scale: float = 1.0, mode: str = "add", flip: bool = False, mask: Any = None
    ) -> Tensor:
        value = self.both(x * scale)
        value = value + x if mode == "add" else value * x
        value = -value if flip else value
        return value if mask is None else value * mask


class TakesByPosition(Base):
    def forward(self, x: Tensor, /, *more: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
        for other in more:
            x = x + other
        return self.both(x) * scale + sum(named.values())


def test_a_dict_a_tuple_and_a_list_of_tensors_are_inputs(tmp_path: Path) -> None:
    inputs = {
        "batch": {"pixels": x(), "deep": (3, x(1)), "none": None},
        "masks": [x(2), x(3)],
    }
    pipe = assert_same(TakesDict(), inputs, tmp_path)
    names = [spec.name for spec in pipe.plan.inputs]
    assert names == ["batch_pixels", "batch_deep_1", "masks_0", "masks_1"]
    assert pipe.plan.arguments == {
        "batch": {"pixels": "batch_pixels", "deep": [3, "batch_deep_1"], "none": None},
        "masks": {"$list": ["masks_0", "masks_1"]},
    }
    forward = (tmp_path / "cut" / "stage_0.py").read_text()
    assert "batch_pixels: Tensor" in forward and "masks_0: Tensor" in forward


def test_a_dataclass_with_a_named_tuple_in_it_is_an_input(tmp_path: Path) -> None:
    batch = Batch(x(), Points(x(1), x(2)), 0.5)
    pipe = assert_same(TakesRecord(), {"batch": batch}, tmp_path)
    with pytest.raises(DataError, match="batch.scale was captured with 0.5 and is 2.0 now"):
        pipe(batch=Batch(x(), Points(x(1), x(2)), 2.0))
    with pytest.raises(DataError, match="batch.mask was captured with None and is a tensor"):
        pipe(batch=Batch(x(), Points(x(1), x(2)), 0.5, x()))
    # What has the same fields is as good: a plan imports no class of the user.
    given = {"pixels": x(), "points": (x(1), x(2)), "scale": 0.5, "mask": None}
    assert torch.equal(pipe(batch=given), pipe(batch=batch))


def test_a_constant_is_fixed_and_another_value_is_refused(tmp_path: Path) -> None:
    inputs = {"x": x(), "scale": 2.0, "mode": "mul", "flip": True, "mask": None}
    pipe = assert_same(TakesConstants(), inputs, tmp_path)
    assert torch.equal(pipe(x=x()), pipe(**inputs))  # a plan knows its constants
    with pytest.raises(DataError, match="scale was captured with 2.0 and is 3.0 now"):
        pipe(x=x(), scale=3.0)
    with pytest.raises(DataError, match="mode was captured with 'mul' and is 'add' now"):
        pipe(x=x(), mode="add")
    with pytest.raises(DataError, match="mask was captured with None and is a tensor of shape"):
        pipe(x=x(), mask=x())
    assert "scale is fixed at 2.0: it is not a tensor" in pipe.plan.notes
    card = (tmp_path / "cut" / "stage_0.py").read_text()
    assert "fixed" in card and "scale is fixed at 2.0" in card


def test_what_is_not_given_has_the_default_of_forward(tmp_path: Path) -> None:
    pipe = assert_same(TakesConstants(), {"x": x()}, tmp_path)
    with pytest.raises(DataError, match="takes x; got x, scale"):
        pipe(x=x(), scale=3.0)


def test_positional_arguments_and_any_number_of_them(tmp_path: Path) -> None:
    pipe = assert_same(TakesByPosition(), (x(), x(1), x(2)), tmp_path)
    assert pipe.plan.arguments == {"x": "x", "*more": ["more_0", "more_1"]}
    with pytest.raises(DataError, match="more was captured with 2 items and is 1 items now"):
        pipe(x(), x(1))


def test_arguments_by_any_name(tmp_path: Path) -> None:
    model = TakesByPosition()
    inputs = {"x": x(), "more": (x(1),), "bias": x(2), "scale": 0.5}
    pipe = cut(model, inputs, tmp_path)
    expected = model(x(), x(1), bias=x(2), scale=0.5)
    assert torch.equal(pipe(x(), x(1), bias=x(2), scale=0.5), expected)


def test_an_object_that_hides_tensors_is_refused(tmp_path: Path) -> None:
    class Hidden:
        def __init__(self) -> None:
            self.pixels = x()

    with pytest.raises(CaptureError, match="the input batch is a Hidden, which holds tensors"):
        cut(TakesRecord(), {"batch": Hidden()}, tmp_path)


# Results


@dataclass
class Result:
    first: Tensor
    second: Tensor | None = None


class Output(ModelOutput):
    pass


@dataclass
class HiddenOutput(ModelOutput):
    logits: Any = None
    hidden: Any = None
    nothing: Any = None


class Returns(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.first(x))
        out = self.second(hidden)
        match self.kind:
            case "dict":
                return {"out": out, "nested": {"hidden": [hidden, (out, None)]}, "none": None}
            case "numbers":
                return {"out": out, "count": 3, "name": "mean", "on": True, "rate": 0.5}
            case "named":
                return Points(out, hidden)
            case "keys":
                return {0: out, 1: hidden}
            case "list":
                return [out, hidden, [out]]
            case "twice":
                return out, out, {"again": out}
            case "input":
                return out, x, {"x": x}
            case "parameter":
                return out, self.first.weight, self.second.bias
            case "size":
                return out, x.shape[0], 2 * x.shape[0] + 1


@pytest.mark.parametrize(
    "kind", ["dict", "numbers", "keys", "list", "twice", "input", "parameter", "size"]
)
def test_a_result_has_the_structure_of_the_original(kind: str, tmp_path: Path) -> None:
    assert_same(Returns(kind), {"x": x()}, tmp_path)


def test_a_named_tuple_comes_back_with_its_names(tmp_path: Path) -> None:
    model = Returns("named")
    found = cut(model, {"x": x()}, tmp_path)(x())
    assert torch.equal(found.near, model(x()).near)
    assert type(found).__name__ == "Points" and found._fields == ("near", "far")


def test_a_dataclass_comes_back_as_a_dict_of_its_fields(tmp_path: Path) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Result:
            return Result(self.both(x))

    found = cut(Model(), {"x": x()}, tmp_path)(x())
    assert found.keys() == {"first", "second"}
    assert found["second"] is None


def test_an_output_of_transformers_comes_back_without_what_is_none(tmp_path: Path) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> HiddenOutput:
            hidden = self.first(x)
            return HiddenOutput(logits=self.second(hidden), hidden=(hidden, hidden))

    found = cut(Model(), {"x": x()}, tmp_path)(x())
    assert found.keys() == {"logits", "hidden"}
    assert len(found["hidden"]) == 2


def test_a_size_in_the_result_follows_the_input(tmp_path: Path) -> None:
    pipe = cut(Returns("size"), {"x": x()}, tmp_path)
    assert pipe(torch.randn(7, 8))[1:] == (7, 15)


def test_the_plan_of_nested_arguments_is_read_back(tmp_path: Path) -> None:
    inputs = {"batch": Batch(x(), Points(x(1), x(2)), 0.5)}
    plan = asyncpipe.partition(
        TakesRecord(), inputs, stages=2, output=tmp_path / "cut", profile="analytic"
    )
    assert asyncpipe.load(tmp_path / "cut").plan == plan


DATA = """
import torch

def samples(kind):
    made = torch.Generator().manual_seed(5)
    rows = [torch.randn(3, 8, generator=made) for _ in range(12)]
    inputs = [{"pixels": a, "points": (b, c), "scale": 0.5, "mask": None} for a, b, c in rows]
    if kind == "dicts":
        return [{"batch": value, "target": value["pixels"]} for value in inputs]
    return [(value, value["pixels"]) for value in inputs]

def dicts():
    return samples("dicts")

def tuples():
    return samples("tuples")

def columns():
    rows = torch.stack([torch.stack([i["pixels"], *i["points"]]) for i, _ in tuples()])
    batch = {"pixels": rows[:, 0], "points": (rows[:, 1], rows[:, 2])}
    return {"batch": batch, "target": rows[:, 0]}
"""


def test_data_of_the_users_is_nested_as_the_arguments_are(tmp_path: Path) -> None:
    inputs = {"batch": Batch(x(), Points(x(1), x(2)), 0.5)}
    cut(TakesRecord(), inputs, tmp_path, loss="mse")
    (tmp_path / "data.py").write_text(DATA)
    weights = []
    for kind in ("dicts", "tuples", "columns"):
        run(
            Settings(
                folder=str(tmp_path / "cut"), output=str(tmp_path / kind), schedule="single",
                data=f"{tmp_path}/data.py:{kind}", steps=2, micro_batches=2, threads=1,
            ),
            FACTORY,
        )  # fmt: skip
        folder = tmp_path / kind / "weights"
        weights.append(asyncpipe.load(tmp_path / "cut", weights=folder).state_dict())
    assert not torch.equal(weights[0]["first.weight"], TakesRecord().first.weight)
    for other in weights[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights[0].items())
