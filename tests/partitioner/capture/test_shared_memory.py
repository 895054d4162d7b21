"""Parameters and buffers that forward reaches past the module that registers them are those of the
module, and tensors that share memory with one that changes are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError

Work = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).sum(0)


class Within(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
        return x * scale + mean


class Elsewhere(nn.Module):
    """Holds its scale and its mean a second time, in `own`, where `find` finds them for `work`."""

    def __init__(
        self, hold: Callable[..., Any], find: Callable[[Any], Any], work: Work, trains: bool
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.full((6,), 2.0), requires_grad=trains)
        self.mean = nn.Buffer(torch.ones(6))
        self.own = hold(self.scale, self.mean)
        self.find, self.work, self.within = find, work, Within()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.work(self, self.first(x).relu(), *self.find(self.own)))


def applied(model: nn.Module, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    return x * scale + mean


def applied_by_a_function(model: nn.Module, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    return Scaled.apply(x, scale) + mean


def applied_by_a_module(model: Any, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    return model.within(x, scale, mean)


def applied_to_each_row(model: nn.Module, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * scale + mean)(x)


def changed(model: nn.Module, x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    if model.training:
        mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
    return (x - model.mean) * scale


# How the two are held, and how forward finds them.
LIST: tuple[Any, Any] = (lambda *both: [*both], lambda own: own)
HELD = [
    LIST,
    (lambda *both: both, lambda own: own),
    (lambda *both: dict(enumerate(both)), lambda own: (own[0], own[1])),
    (lambda *both: SimpleNamespace(both=both), lambda own: own.both),
    (lambda *both: lambda: both, lambda own: own()),
]


@pytest.mark.parametrize(
    ("held", "work", "trains"),
    [
        *((held, applied, True) for held in HELD),
        (LIST, applied, False),
        *((LIST, work, True) for work in (applied_by_a_function, applied_by_a_module)),
        *((LIST, work, True) for work in (applied_to_each_row, changed)),
    ],
)
def test_what_is_registered_is_trained_wherever_forward_finds_it(
    held: tuple[Any, Any], work: Work, trains: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Elsewhere(*held, work, trains)
    asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    for one in (model, pipe):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(X).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(pipe.state_dict(), model.state_dict(), rtol=0, atol=0)


class Two(nn.Module):
    """Two layers, and what `share` gives the second tensors in the memory of the first."""

    def __init__(self, share: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mean = nn.Buffer(torch.zeros(6))
        self.plain = torch.zeros(6)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.detach().mean(0))
        return self.b(self.a(x)) + self.mean + self.plain


def same_numbers(model: Any) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def kept_row(model: Any) -> None:
    model.plain = model.a.weight.detach()[2]


def kept_row_through_numpy(model: Any) -> None:
    model.plain = torch.from_numpy(model.a.weight.detach().numpy()[2])


def kept_mean(model: Any) -> None:
    model.plain = model.mean[:]


def buffer_of_a_bias(model: Any) -> None:
    model.mean = nn.Buffer(model.a.bias.data)


def common_column(model: Any) -> None:
    both = torch.randn(6, 11)
    model.a.weight, model.b.weight = nn.Parameter(both[:, :6]), nn.Parameter(both[:, 5:])


def columns(model: Any) -> None:
    both = torch.randn(6, 12)
    model.a.weight, model.b.weight = nn.Parameter(both[:, :6]), nn.Parameter(both[:, 6:])


def rows(model: Any) -> None:
    both = torch.randn(12, 6)
    model.a.weight, model.b.weight = nn.Parameter(both[:6]), nn.Parameter(both[6:])


def kept_row_of_what_is_frozen(model: Any) -> None:
    model.a.weight.requires_grad_(False)
    kept_row(model)


@pytest.mark.parametrize(
    ("share", "pair"),
    [
        (same_numbers, "a.weight and b.weight"),
        (kept_row, "a.weight and plain"),
        (kept_row_through_numpy, "a.weight and plain"),
        (kept_mean, "mean and plain"),
        (buffer_of_a_bias, "a.bias and mean"),
        (common_column, "a.weight and b.weight"),
    ],
)
def test_tensors_in_the_memory_of_one_that_changes_are_named(
    share: Callable[[Any], None], pair: str
) -> None:
    with pytest.raises(CaptureError, match=rf"^{pair} are two tensors in the same memory"):
        capture(Two(share), {"x": X})


@pytest.mark.parametrize("share", [columns, rows, kept_row_of_what_is_frozen])
def test_no_common_number_or_none_that_changes_is_allowed(share: Callable[[Any], None]) -> None:
    capture(Two(share), {"x": X})
