"""A module that no graph can hold is kept as one operation, without being named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Positive(nn.Module):
    """Multiplies by how many numbers are positive, which is a value and not a size."""

    def __init__(self, scale: float, bias: bool = False) -> None:
        super().__init__()
        self.scale, self.bias = scale, bias
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        count = int((x > 0).sum())
        return self.linear(x) * count * self.scale, None, x.mean() * count


class Counted(nn.Module):
    """Its constructor cannot be guessed: the module around it has to be kept."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.total = sum(numbers)

    def forward(self, x: Tensor) -> Tensor:
        return x * int((x > 0).sum()) / self.total


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted([1, 2])
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.counted(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Positive(0.1), Positive(0.2)])
        self.around = Around()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        means = []
        for layer in self.layers:
            x, _, mean = layer(x)
            means.append(mean)
        return {"logits": self.last(self.around(x)), "means": torch.stack(means)}


def test_modules_that_take_values_out_of_tensors_are_kept_whole(tmp_path: Path) -> None:
    model = Model()
    plan = asyncpipe.partition(
        model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic"
    )
    text = "".join((tmp_path / "cut" / f"stage_{stage}.py").read_text() for stage in range(2))
    assert "import Around" in text or "import Positive" in text
    assert "Positive(0.1)" in text and "Positive(0.2)" in text
    assert "Counted(" not in text
    pipe = asyncpipe.load(tmp_path / "cut")
    other = torch.randn(5, 6)
    torch.testing.assert_close(pipe(x=other), model(x=other))
    line = Positive.forward.__code__.co_firstlineno + 1
    assert plan.notes[0].startswith("Around is kept as one operation: cannot trace Counted.forward")
    assert plan.notes[1].startswith("Positive is kept as one operation: ")
    assert f'test_automatic_leaves.py:{line}: "count = int((x > 0).sum())"' in plan.notes[1]


class Ragged(nn.Module):
    """The shape of its result depends on values: the caller has to stay around it."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x[: int((row > 0).sum()) + 1] for row in x[:2]]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ragged = Ragged()

    def forward(self, x: Tensor) -> Tensor:
        return sum(part.sum(0) for part in self.ragged(x)) + x


def test_what_is_kept_widens_until_the_shapes_of_results_follow_from_sizes() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.linear = Rows(), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.rows(x))

    captured = capture(Whole(), {"x": X})
    called = [node.target for node in captured.graph.nodes if node.op == "call_module"]
    assert called == ["rows", "linear"]
    assert len(captured.notes) == 1 and captured.notes[0].startswith("Rows is kept")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.around = Around()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) * int((x > 0).sum())


def test_the_root_is_never_kept_nor_most_of_a_model() -> None:
    class Most(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    for model in (Counted([1, 2]), Most()):
        with pytest.raises(CaptureError, match="depends on tensor values"):
            capture(model, {"x": X}, method="tracer")


def test_a_fault_of_the_model_stays_the_error_of_its_line() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.linear = Faulty(), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.first(x))

    with pytest.raises(CaptureError, match=r"Faulty.forward at .*raised AttributeError"):
        capture(Wrong(), {"x": X})


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.no_such_method()


class Checked(nn.Module):
    """Ends with an error if its layer computes something else than a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.linear.weight.T + self.linear.bias
        result = self.linear(x)
        if not torch.allclose(result, product, atol=1e-4):
            raise ArithmeticError
        return result


def test_a_module_that_reads_its_values_runs_with_the_values_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Checked(), nn.Linear(6, 6), nn.Tanh())
    (note,) = capture(model, {"input": X}).notes
    assert note.startswith("Checked is kept as one operation: ")


def _longformer() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=80, attention_window=[64, 64],
    )  # fmt: skip
    tokens = torch.randint(3, 61, (2, 10))
    return LongformerForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def test_a_layer_of_transformers_is_made_from_its_configuration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = _longformer()
    asyncpipe.partition(
        model.train(), inputs, stages=2, output=tmp_path / "cut", profile="analytic"
    )
    text = "".join((tmp_path / "cut" / f"stage_{stage}.py").read_text() for stage in range(2))
    assert "import LongformerConfig\n" in text
    assert "LongformerSelfAttention(" in text and "hidden_size=16," in text
