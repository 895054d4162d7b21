"""A model whose results differ by mode is captured for training alone, which is said where it
matters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError, CaptureError, PlanError
from asyncpipe.runtime.plan.plan import read_plan

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
Y = torch.arange(4) % 3


@dataclass
class Result:
    logits: Tensor
    aux: Tensor | None = None


class Auxiliary(nn.Module):
    """Heads of training: as a tuple, a dict, an optional field, or a loss."""

    def __init__(self, how: str = "tuple") -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.1)
        self.how = how

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.dropout(torch.relu(self.a(x)))
        logits = self.b(h)
        if self.how == "record":
            return Result(logits, self.head(h) if self.training else None)
        if not self.training:
            return {"logits": logits} if self.how in ("dict", "loss") else logits
        if self.how == "loss":
            return {"loss": F.cross_entropy(logits, y), "logits": logits}
        aux = self.head(h)
        return {"logits": logits, "aux": aux} if self.how == "dict" else (logits, aux)


HOWS = ["tuple", "dict", "record", "loss"]


@pytest.mark.parametrize("how", HOWS)
def test_the_refusal_names_both_structures_and_the_cure(how: str) -> None:
    with pytest.raises(CaptureError, match="in training and .* in evaluation") as caught:
        capture(Auxiliary(how), {"x": X, "y": Y})
    assert "--mode train" in caught.value.cure and "--leaf" not in caught.value.cure


class Decoded(nn.Module):
    """YOLO decodes its boxes in evaluation alone, with sizes that it reads from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.b(torch.relu(self.a(x)))
        return out if self.training else out[: int(out.argmax()) + 1]


def test_where_evaluation_alone_fails_the_refusal_says_so(tmp_path: Path) -> None:
    given = {"x": X, "y": Y}
    with pytest.raises(CaptureError, match="depends on tensor values") as caught:
        capture(Decoded(), given)
    assert "\nEvaluation alone fails. Capture it for training alone: --mode" in str(caught.value)
    plan = asyncpipe.partition(
        Decoded(), given, stages=2, mode="train", output=tmp_path / "cut", profile="analytic"
    )
    assert plan.mode == "train"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stages", [2, 4])
def test_training_alone_is_exact(how: str, stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Auxiliary(how)
    inputs = {"x": X, "y": Y}
    plan = asyncpipe.partition(
        model, inputs, stages=stages, output=tmp_path / "cut", profile="analytic", mode="train"
    )
    assert plan.mode == read_plan(tmp_path / "cut").mode == "train"
    assert any("training alone" in note for note in plan.notes)
    assert "--mode train" in plan.command
    pipe = asyncpipe.load(tmp_path / "cut").train()
    torch.manual_seed(1)
    expected = model(**inputs)
    torch.manual_seed(1)
    found = pipe(**inputs)
    if isinstance(expected, Result):
        expected = {"logits": expected.logits, "aux": expected.aux}
        found = found if isinstance(found, dict) else vars(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_caller_keeps_its_gradients(tmp_path: Path) -> None:
    model, own = Auxiliary(), torch.full((16, 12), 5.0)
    model.a.weight.grad = own
    asyncpipe.partition(
        model, {"x": X, "y": Y}, stages=2, mode="train", output=tmp_path / "cut", profile="analytic"
    )
    assert model.a.weight.grad is own and bool((own == 5).all())


def test_stages_for_training_alone_do_not_evaluate(tmp_path: Path) -> None:
    model = Auxiliary("loss")
    plan = asyncpipe.partition(
        model, {"x": X, "y": Y}, stages=2, output=tmp_path / "cut", profile="analytic", mode="train"
    )
    pipe = asyncpipe.load(tmp_path / "cut")
    for refused in (
        pipe.eval,
        lambda: pipe.train(False),
        lambda: resolve(Settings(folder=str(tmp_path / "cut"), eval_every=5), plan),
        lambda: resolve(Settings(folder=str(tmp_path / "cut"), save_every=5, keep_best=1), plan),
    ):
        with pytest.raises(PlanError, match="partitioned for training alone"):
            refused()
    settings, _ = resolve(Settings(folder=str(tmp_path / "cut"), data="clusters"), plan)
    assert settings.eval_batches == 0


def test_a_plan_for_both_modes_says_nothing_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 3))
    plan = asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    assert plan.mode == "both" and '"mode"' not in (tmp_path / "cut" / "plan.json").read_text()
    with pytest.raises(AsyncPipeError, match="mode"):
        asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "other", mode="eval")


class Decides(nn.Module):
    """Another shape in each mode, which meets what both modes have."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :6] if self.training else x


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(12, 12), Decides(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(self.a(x))
        return self.b(F.pad(h, (0, 6)) if self.training else h)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_value_may_have_another_shape_in_each_mode(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Wide()
    asyncpipe.partition(model, (X,), stages=stages, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)


class PatchDropout(nn.Module):
    """As vit-pytorch has it: training keeps some of the patches."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        samples = torch.arange(x.shape[0])[:, None]
        kept = torch.randn(x.shape[0], x.shape[1]).topk(6, dim=-1).indices
        return x[samples, kept]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Linear(4, 8), PatchDropout(), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def test_modules_on_other_shapes_in_each_mode_are_for_training_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = Patches(), torch.randn(4, 9, 4)
    with pytest.raises(CaptureError) as caught:
        asyncpipe.partition(model, (images,), stages=2, output=tmp_path / "both")
    assert "f32[batch, 6, 8] in training, and f32[batch, 9, 8] in eval" in caught.value.what
    assert "--mode train" in caught.value.cure and "--leaf" not in caught.value.cure
    asyncpipe.partition(
        model, (images,), stages=2, output=tmp_path / "cut", profile="analytic", mode="train"
    )
    pipe = asyncpipe.load(tmp_path / "cut")
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    torch.testing.assert_close(pipe(images), expected, rtol=0, atol=0)
