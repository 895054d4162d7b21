"""Models whose forward runs where a tracer of torch functions cannot see, each with its input."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Example = tuple[nn.Module, dict[str, Any]]
WIDTH = 8
_logger = logging.getLogger(__name__)
_lock = threading.Lock()


def example(kind: type[nn.Module]) -> Example:
    """A model of random weights, and four rows for it."""
    torch.manual_seed(0)
    return kind(), {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))}


@torch.jit.script
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return torch.relu(x) * gate / x.size(0)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)


class Script(_Two):
    """A function of torch.jit.script."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(gated(self.first(x), x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, states: Tensor, scale: float = 1.0) -> Tensor:
        normed = self.norm(states)
        hidden = gated(self.up(normed), states)
        hidden = F.dropout(hidden, 0.2, self.training)
        return states + self.drop(hidden) * scale


class Blocks(nn.Module):
    """Blocks that are alike, with dropout as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, scale=0.5)
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


class Recomputed(Blocks):
    """The same with the blocks' activations computed again in backward."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return {"logits": self.head(x)}


class Vmap(_Two):
    """Rows that are mapped over, a mask by two nested maps, and an index of each row."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = torch.vmap(lambda row: row / (row.norm() + row.var(correction=0)))(hidden)
        scaled = torch.vmap(lambda row, place: row[place])(scaled, scaled.argsort(-1))
        rows, columns = torch.arange(x.shape[0]), torch.arange(WIDTH)
        allowed = torch.vmap(torch.vmap(torch.ge, in_dims=(None, 0)), in_dims=(0, None))
        return self.last(scaled.masked_fill(~allowed(rows, columns), 0.0))


class Slopes(_Two):
    """Derivatives inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.jvp(torch.sin, (self.first(x),), (x,))[1]
        return self.last(slope) + torch.func.grad(lambda w: (w**3).sum())(x)


class Numpy(_Two):
    """A buffer that becomes an array and a tensor again, and an array of no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        weights = np.sqrt(self.steps.numpy() + 1)
        window = torch.tensor(np.hanning(WIDTH).astype("float32"))
        return self.last(self.first(x) * torch.from_numpy(weights) + window)


class NumpyMask(_Two):
    """Activations that become an array and a tensor again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        values = hidden.detach().numpy()
        mask = torch.from_numpy((values > values.mean()).astype(np.float32))
        return self.last(hidden * mask)


class Number(_Two):
    """Numbers that are taken out of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        count = max(int((x > 0).sum()), 1)
        return self.last(self.first(x) / count) * x.abs().max().item()


class State(_Two):
    """Buffers that change, and one that is reassigned, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(gated(self.first(x), x))
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(hidden - self.mean)


class Noisy(_Two):
    """Statements without tensors, and regions."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("a warning of forward", stacklevel=2)
        _logger.warning("a line of forward's log")
        with _lock:
            hidden = gated(self.first(x), x)
        with torch.no_grad():
            mean = hidden.mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.last(hidden)
        return hidden.float() * mean


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


cube = Cube.apply


class Stored(_Two):
    """An autograd function whose apply was stored."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(cube(self.first(x)))


class StoredUnseen(_Two):
    """The same, together with code that the tracer cannot see."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(cube(gated(self.first(x), x)))


class Decides(_Two):
    """A branch on values, after what the tracer cannot see: no graph can hold it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated(self.first(x), x)
        if hidden.sum() > 0:
            return self.last(hidden)
        return hidden


class Wrong(_Two):
    """Shapes that do not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[:, 1:])


class Positions(nn.Module):
    """Works for five tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.places = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        return gated(words + self.places, words)


class Pair(_Two):
    """Two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(gated(self.first(x), y)) - y


def build() -> Example:
    """For the command line: --model dynamo_cases.py:build."""
    return example(Blocks)
