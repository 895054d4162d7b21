"""A model whose own backward cannot run: the cut fails with an error that names the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.errors import CaptureError


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class Changed(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).exp()
        other = self.b(hidden)  # backward reads what is changed below
        hidden.add_(1)
        return self.c(other + hidden).square().mean()


class Detached(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))).detach().square().mean()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("not differentiable")  # the line of the author's backward


class OwnFunction(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(Failing.apply(self.a(x)))).square().mean()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_own_backward.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize("profile", ["measured", "analytic"])
@pytest.mark.parametrize(
    ("model", "words", "place"),
    [
        (Changed, "the backward of Changed itself fails at", "backward reads what is changed"),
        (OwnFunction, "ValueError: not differentiable", "the line of the author's backward"),
        (Detached, "Detached cannot be trained: none of its outputs has a gradient", ""),
    ],
)
def test_a_backward_that_fails_is_told_with_its_line(
    model: type[nn.Module], words: str, place: str, profile: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError) as raised:
        asyncpipe.partition(
            model(), {"x": torch.randn(4, 8)}, stages=2, output=tmp_path / "x", profile=profile
        )
    assert words in raised.value.what and raised.value.cure
    assert (line_of(place) if place else "") in raised.value.what
    assert not (tmp_path / "x").exists()
