"""Functions of torch that want numbers get symbolic sizes: one plan holds for every length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.partitioner.capture.operations import traced


def across(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def spectrum(x: Tensor) -> Tensor:
    return torch.stft(x.sum(2), 4, 2, window=torch.hann_window(4), return_complex=True)


def weighed(x: Tensor) -> Tensor:
    """A sum that reads the length, and so fails with a wrong one."""
    return (x * torch.arange(x.shape[-1])).sum(-1)


def waves(x: Tensor, length: int | None) -> Tensor:
    window = torch.hann_window(4)
    return weighed(torch.istft(spectrum(x), 4, 2, window=window, length=length))[:, None] + x[:, 0]


def pairs(x: Tensor, rows: Tensor) -> Tensor:
    return x[:, rows[0]].mean(1) * x[:, rows[1]].mean(1)


def shaded(x: Tensor, values: Tensor) -> Tensor:
    return (x * values[:, None]).mean(1)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a maximum over windows": lambda x: weighed(F.max_pool1d(across(x), 3, 2, 1)),
    "rounded up": lambda x: weighed(F.max_pool1d(across(x), 2, ceil_mode=True)),
    "a module": lambda x: weighed(nn.MaxPool1d(2)(across(x))),
    "with indices": lambda x: F.max_unpool1d(*nn.MaxPool1d(2, return_indices=True)(across(x)), 2)[
        :, :, 0
    ],
    "the maximum of all": lambda x: F.max_pool1d(across(x), x.shape[1]).squeeze(2),
    "the mean of all": lambda x: F.avg_pool1d(across(x), x.shape[1]).squeeze(2),
    "in two dimensions": lambda x: F.avg_pool2d(x[:, None], (x.shape[1], 1)).flatten(1),
    "their maximum": lambda x: F.max_pool2d(x[:, None], (x.shape[1], 1)).flatten(1),
    "linspace": lambda x: shaded(x, torch.linspace(-1, 1, x.shape[1])),
    "logspace": lambda x: shaded(x, torch.logspace(0, 1, steps=x.shape[1])),
    "a window": lambda x: shaded(x, torch.hann_window(x.shape[1])),
    "frequencies": lambda x: shaded(x, torch.fft.fftfreq(x.shape[1])),
    "half of them": lambda x: shaded(
        torch.fft.rfft(x, dim=1), torch.fft.rfftfreq(x.shape[1])
    ).abs(),
    "the upper triangle": lambda x: pairs(x, torch.triu_indices(x.shape[1], x.shape[1], 1)),
    "the lower triangle": lambda x: pairs(x, torch.tril_indices(x.shape[1], x.shape[1], 2)),
    "a number": lambda x: x.sum(1) / torch.tensor(x.shape[1]),
    "numbers": lambda x: x.sum(1) / torch.as_tensor([x.shape[1], x.shape[1] / 2]).prod(),
    "a number like others": lambda x: x.sum(1) / x.new_tensor([[x.shape[1], 2]]).prod(),
    "a diagonal of ones": lambda x: (
        torch.zeros(x.shape[1], x.shape[1]).fill_diagonal_(1) @ x * x.shape[1]
    ).mean(1),
    "an index of slices in a list": lambda x: x[[slice(None), slice(-2, None)]].sum(1),
    "a grid": lambda x: F.grid_sample(
        x[:, None],
        F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), x[:, None].size(), False),
        align_corners=False,
    ).mean((1, 2)),
    "waves": lambda x: waves(x, None),
    "waves of a length": lambda x: waves(x, x.shape[1]),
    "a likelihood": lambda x: F.gaussian_nll_loss(x, x * 0, x.exp(), reduction="none").mean(1),
    "an old constructor": lambda x: (x + x.new(x.shape).fill_(2)).mean(1),
    "a distribution that draws with it": lambda x: torch.distributions.Laplace(
        x.mean(1), x.exp().mean(1)
    ).rsample(),
}


# torch has no rule for the shapes of these.
CALLS |= {
    "a share": lambda x: torch.distributions.Beta(x.exp().mean(1), x.exp().sum(1)).rsample(),
    "rounding": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).mean(1),
}


class Model(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.call(self.first(x)))
        return scores


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_holds_for_every_length(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(CALLS[name])
    plan = asyncpipe.partition(
        model,
        (torch.randn(4, 12, 8),),
        stages=2,
        output=tmp_path / "cut",
        profile="analytic",
        sequence_dim=1,
    )
    assert plan.inputs[0].shape == ("batch", "sequence", 8)
    stages = asyncpipe.load(tmp_path / "cut")
    for batch, length in ((4, 12), (3, 10), (2, 18)):
        x = torch.randn(batch, length, 8)
        results = []
        for module in (model, stages):
            torch.manual_seed(1)
            results.append(module(x))
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("offset", range(-4, 5))
@pytest.mark.parametrize("function", [torch.triu_indices, torch.tril_indices])
def test_a_triangle_has_as_many_places_as_torch_finds(
    function: Callable[..., Tensor], offset: int
) -> None:
    model = Model(lambda x: x[:, function(x.shape[1], x.shape[1], offset)[0]].mean(1))
    capture = asyncpipe.partitioner.capture.capture(
        model, {"x": torch.randn(3, 6, 8)}, sequence_dim=1
    )
    (node,) = (node for node in capture.graph.nodes if node.target is function)
    assert traced(function, None) is not function
    shape = node.meta["val"].shape
    assert shape[1].node.hint == function(6, 6, offset).shape[1]
