"""A module that no graph can hold is kept as one operation, without being named."""

from __future__ import annotations

import enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.profile import measure
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.runtime.executor.precision import Precision, dtypes_of_folder

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


class Kind(enum.Enum):
    SOFT = 1
    HARD = 2


def clipped(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


class Slot:
    __slots__ = ("limit",)

    def __init__(self, limit: float) -> None:
        self.limit = limit


class Clip(nn.Module):
    """Clips at a limit that it keeps in one of several ways."""

    def __init__(self, how: str, limit: float = 100.0) -> None:
        super().__init__()
        self.how = how
        self.kept: Any = None
        limit = limit * 1.0  # a new object
        if how == "private":
            self._limit = limit
        if how == "in a dict":
            self.settings = {"limit": limit}
        if how == "in a tensor":
            self.kept = torch.tensor(limit)
        if how == "in a buffer":
            self.register_buffer("unsaved", torch.tensor(limit), persistent=False)
        if how == "in an enumeration":
            self.kept = Kind.HARD if limit < 50 else Kind.SOFT
        if how == "in a partial":
            self.kept = partial(clipped, limit=limit)
        if how == "in a closure":
            self.kept = lambda x: clipped(x, limit)
        if how == "in a slot":
            self.kept = Slot(limit)
        if how == "in a method":
            self._limit = limit
            self.kept = self.clip

    def clip(self, x: Tensor) -> Tensor:
        return clipped(x, self._limit)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "private":
            return clipped(x, self._limit)
        if self.how == "in a dict":
            return clipped(x, self.settings["limit"])
        if self.how == "in a tensor":
            return torch.minimum(x, self.kept)
        if self.how == "in a buffer":
            return torch.minimum(x, self.unsaved)
        if self.how == "in an enumeration":
            return clipped(x, 20.0) if self.kept is Kind.HARD else x
        if self.how == "in a slot":
            return clipped(x, self.kept.limit)
        return self.kept(x)


HOWS = (
    "private", "in a dict", "in a tensor", "in a buffer", "in an enumeration", "in a partial",
    "in a closure", "in a method", "in a slot",
)  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_a_module_is_not_made_again_with_a_default_that_shows_only_for_some_values(
    how: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Clip(how, 20.0), nn.Linear(6, 6))
    with pytest.raises(PlanError, match="builds no module with the same tensors and attributes"):
        asyncpipe.partition(
            model, X, stages=2, output=tmp_path, profile="analytic", leaves=["Clip"]
        )


@pytest.mark.parametrize("how", HOWS)
def test_it_is_made_with_the_default_that_it_has(how: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Clip(how), nn.Linear(6, 6))
    asyncpipe.partition(model, X, stages=2, output=tmp_path, profile="analytic", leaves=["Clip"])
    pipe = asyncpipe.load(tmp_path)
    torch.testing.assert_close(pipe(900 * X), model(900 * X))


class Hides(nn.Module):
    """Its layer is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 6)]
        nn.init.eye_(self.layers[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_module_that_hides_weights_is_not_made_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Hides(), nn.Linear(6, 6))
    with pytest.raises(PlanError, match="builds no module"):
        asyncpipe.partition(
            model, X, stages=2, output=tmp_path, profile="analytic", leaves=["Hides"]
        )


class Named(Clip):
    """Has its arguments as attributes too."""

    def __init__(self, how: str, limit: float | None = None) -> None:
        super().__init__(how, 100.0 if limit is None else limit)
        self.limit = limit


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("limit", [None, 20.0])
def test_it_is_made_with_the_arguments_that_it_has(
    how: str, limit: float | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Named(how, limit), nn.Linear(6, 6))
    asyncpipe.partition(model, X, stages=2, output=tmp_path, profile="analytic", leaves=["Named"])
    text = (tmp_path / "stage_1.py").read_text()
    assert f'Named("{how}"' in text and ("limit=20.0" in text) == (limit is not None)
    torch.testing.assert_close(asyncpipe.load(tmp_path)(900 * X), model(900 * X))


class Stores(nn.Module):
    """Keeps what it last computed with, also tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = {"x": x.detach(), "order": torch.randperm(4)}
        return torch.relu(x)


def test_a_module_is_copied_without_fake_tensors_that_it_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of torch 2.13 would damage the memory of the process."""
    copied: list[dict[str, Tensor]] = []
    copy = measure._own_copy

    def watched(module: nn.Module, device: torch.device) -> nn.Module:
        copied.extend(part.last for part in module.modules() if isinstance(part, Stores))
        return copy(module, device)

    monkeypatch.setattr(measure, "_own_copy", watched)
    model = nn.Sequential(nn.Linear(6, 6), Stores(), nn.Linear(6, 6))
    asyncpipe.partition(model, X, stages=2, output=tmp_path, profile="analytic", leaves=["Stores"])
    assert copied and all(kept == {} for kept in copied)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,))


class Attending(nn.Module):
    """Without parameters before it: torch trains no flex attention on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None, :, None]  # [batch, 1 head, 6 tokens, 1]
        attended = flex_attention(heads, heads, heads, lambda s, b, h, i, j: s - (i - j).abs())
        return attended.flatten(1)


class Operators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attending = Attending()
        self.first = nn.Linear(6, 6)
        self.branching = Branching()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branching(self.first(self.attending(x))))


def test_operators_that_take_functions_are_kept_whole_and_still_compile(tmp_path: Path) -> None:
    model = Operators()
    plan = asyncpipe.partition(
        model, {"x": X}, stages=2, output=tmp_path / "cut", profile="measured"
    )
    attending, branching = plan.notes[:2]
    assert attending.startswith("Attending is kept as one operation: ")
    assert branching.startswith("Branching is kept as one operation: ")
    assert "passes a function (<lambda>) to a function" in branching
    dtypes = dtypes_of_folder(tmp_path / "cut", plan, Precision(torch.bfloat16))
    assert set(dtypes.values()) == {torch.bfloat16}
    pipe = asyncpipe.load(tmp_path / "cut")
    for sign in (1.0, -1.0):
        other = sign * torch.ones(5, 6)
        torch.testing.assert_close(pipe(x=other), model(x=other))


class Recomputing(torch.autograd.Function):
    """The checkpoint of guided-diffusion and of its many copies."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.parameters = run, tensors[:count], tensors[count:]
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.inputs]
        with torch.enable_grad():
            result = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(result, [*inputs, *ctx.parameters], gradient)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def _forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return Recomputing.apply(self._forward, 1, x, *self.parameters())


def test_a_method_as_an_argument_of_a_function_keeps_its_module_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3))
    plan = asyncpipe.partition(model, X, stages=2, output=tmp_path, profile="analytic")
    assert "passes a function (_forward) to a function" in plan.notes[0]
    text = "".join((tmp_path / f"stage_{stage}.py").read_text() for stage in range(2))
    assert text.count("Block()") == 2
