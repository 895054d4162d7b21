"""Patterns of published models that once were refused for another reason, or stopped with a
traceback: the smallest model of each, exact or refused with its cause."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.runtime.stage import Stage

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


class SpatialTransformer(Two):
    """PointNet makes its identity with torch.autograd.Variable."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.from_numpy(np.array([1, 0, 0], dtype=np.float32))
        start = torch.autograd.Variable(start).view(1, 3).repeat(x.size(0), 1)
        return super().forward(x) + torch.autograd.Variable(start)


class Registered(nn.Module):
    """DGCNN has its batch norms as attributes, in a list and in its layers."""

    def __init__(self, through_list: bool) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.bns = nn.ModuleList([self.bn1, self.bn2])
        self.conv1 = nn.Sequential(nn.Linear(6, 6), self.bn1, nn.ReLU())
        self.last = nn.Linear(6, 3)
        self.through_list = through_list

    def forward(self, x: Tensor) -> Tensor:
        second = self.bns[1] if self.through_list else self.bn2
        return self.last(second(self.conv1(x)))


class Parallel(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.DataParallel(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))  # type: ignore[assignment]


class Grids(nn.Module):
    """YOLOv5's head keeps a grid for each scale in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.grid = [torch.zeros(1)] * 2

    def forward(self, x: Tensor) -> Tensor:
        scales = [self.conv(x)]
        scales.append(self.down(scales[0]))
        found = []
        for place, scale in enumerate(scales):
            if self.grid[place].shape[-2:] != scale.shape[-2:]:
                rows, columns = scale.shape[-2:]
                self.grid[place] = torch.arange(columns).expand(1, 1, rows, columns).float()
            found.append((scale.sigmoid() + self.grid[place]).flatten(2))
        return torch.cat(found, 2)


class Router(Two):
    """Routers of transformers make sure of their dtype in forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b.to(torch.float32)
        return super().forward(x)


def replaced_forward() -> nn.Module:
    model = Two()
    original = model.a.forward

    def doubled(_: nn.Module, x: Tensor) -> Tensor:
        return 2 * original(x)

    model.a.forward = MethodType(doubled, model.a)  # type: ignore[method-assign]
    return model


def quantized() -> nn.Module:
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.prepare_qat(model)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, sparse=True, mode="sum")
        self.words, self.last = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.relu(self.bag(tokens) + self.words(tokens).sum(1)))


IMAGE, TOKENS = torch.randn(2, 3, 8, 8), torch.randint(0, 20, (4, 5))


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (SpatialTransformer, X),
        (lambda: Registered(False), X),
        (lambda: Registered(True), X),
        (Parallel, X),
        (Grids, IMAGE),
        (Router, X),
        (replaced_forward, X),
        (quantized, X),
        (Sparse, TOKENS),
    ],
    ids=["variable", "twice", "list", "parallel", "grids", "router", "replaced", "qat", "sparse"],
)
def test_it_is_exact(build: Callable[[], nn.Module], given: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    asyncpipe.partition(model, (given,), stages=2, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    state = model.state_dict()
    assert list(pipe.state_dict()) == list(state)
    pipe.load_state_dict({name: value.clone() for name, value in state.items()})
    for training in (True, False):
        for module in (model, *pipe.stages):
            module.train(training)
        torch.testing.assert_close(pipe(given), model(given), rtol=0, atol=0)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


def test_einsum_is_traced_without_opt_einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed, it reads each size as a number."""
    seen = []

    class Product(Two):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.opt_einsum.enabled)
            return super().forward(x)

    switch = torch.backends.opt_einsum.m
    monkeypatch.setattr(switch, "is_available", lambda: True)
    monkeypatch.setattr(switch, "enabled", True)
    capture(Product(), {"x": X})
    assert set(seen) == {False, True}  # traces, and the model itself


class OwnGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.rng))


class Accuracy(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        out = super().forward(x)
        return F.cross_entropy(out, out.argmax(1)), {"mean": out.mean().item()}


class Stacks(Two):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[nn.Linear(6, 6)], [nn.Linear(6, 6)]]

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for layer in stack:
                x = layer(x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (OwnGenerator, r"OwnGenerator.forward at .*:\d+ draws from a torch.Generator of its own"),
        (Accuracy, r"forward of Accuracy returns a Python number"),
        (Stacks, r"a module that self.stacks holds in a plain list[^\n]*\n.*ModuleList"),
    ],
)
def test_it_is_refused_with_its_cause(build: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(build(), {"x": X})


def test_a_sparse_embedding_trains_with_dense_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sparse().train()
    plan = asyncpipe.partition(
        model, (TOKENS,), stages=1, output=tmp_path / "cut", profile="analytic"
    )
    module = asyncpipe.load(tmp_path / "cut").train().stages[0]
    stage = Stage(module, plan.stages[0], loss_of=lambda outputs, _: sum(outputs.values()).mean())
    stage.forward(0, {"tokens": TOKENS}, {})
    stage.backward(0, {}, loss_divisor=1)
    model(TOKENS).mean().backward()
    for mine, own in zip(module.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and own.grad is not None and not mine.grad.is_sparse
        torch.testing.assert_close(mine.grad, own.grad.to_dense())


class Slopes(Two):
    """ALiBi: a bias that is kept once it has been made of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(6), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", self.slopes * torch.arange(6), persistent=False)
        return self.b(self.a(x) + self.bias)


def test_a_buffer_that_is_made_of_another_once_is_exact(tmp_path: Path) -> None:
    model = Slopes()
    model(X)
    asyncpipe.partition(model, (X,), stages=2, output=tmp_path / "cut", profile="analytic")
    torch.testing.assert_close(asyncpipe.load(tmp_path / "cut")(X), model(X), rtol=0, atol=0)
