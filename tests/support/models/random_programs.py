"""Random small programs of views, changes in place, reads and branches, as models.

A program is a list of operations on a growing list of values, f32[batch, width] each; whatever
numbers an operation has, it fits, so that hypothesis may take any part away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Operation = tuple[str, int, int]
_Make = Callable[[Tensor, Tensor], Tensor]

NEW: Mapping[str, _Make] = {
    "add": lambda v, w: v + w,
    "half": lambda v, w: v * 0.5,
    "copy": lambda v, w: v.clone(),
    "cat": lambda v, w: torch.cat([v, w], 1)[:, : v.shape[1]],
    # How a tensor lies in memory decides which number each place draws.
    "dropout": lambda v, w: v * F.dropout(torch.ones(v.shape), 0.5, True),
}
VIEWS: Mapping[str, _Make] = {
    "low": lambda v, w: v[:, : (v.shape[1] + 1) // 2],
    "high": lambda v, w: v[:, v.shape[1] // 2 :],
    "step": lambda v, w: v[:, ::2],
    "all": lambda v, w: v[:, :],
    "same": lambda v, w: v,
    "turned": lambda v, w: v.t().unsqueeze(0).squeeze(0).transpose(0, 1),
    "detached": lambda v, w: v.detach(),
    "narrow": lambda v, w: v.narrow(1, 0, 1),
    "reshaped": lambda v, w: v.reshape(-1, v.shape[1]),
}


def _augmented(v: Tensor, w: Tensor) -> Tensor:
    v += w * 0.5
    return v


def _column(v: Tensor, w: Tensor) -> Tensor:
    v[:, 0] = w[:, -1] * 2
    return v


def _part(v: Tensor, w: Tensor) -> Tensor:
    v[:, -1:] -= 1
    return v


def _masked(v: Tensor, w: Tensor) -> Tensor:
    v[w.detach() > 0.3] = 0.25
    return v


def _without_gradient(v: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        v.mul_(0.75)
    return v


def _out(v: Tensor, w: Tensor) -> Tensor:
    made = torch.empty_like(v.detach())
    torch.add(v.detach(), w.detach(), out=made)
    return made


CHANGES: Mapping[str, _Make] = {
    "statement": lambda v, w: v.add_(1),
    "augmented": _augmented,
    "column": _column,
    "part": _part,
    "masked": _masked,
    "no_grad": _without_gradient,
    "copy_": lambda v, w: v.copy_(w * 0.5),
    "zero": lambda v, w: v.zero_(),
    "hardtanh": lambda v, w: F.hardtanh(v * 1, inplace=True),
    "out": _out,
    "noise": lambda v, w: v.add_(torch.empty(w.shape).normal_()),
}
OTHERS = ("layer", "input", "state", "remember", "training")


class Program(nn.Module):
    """Runs the operations; the results are the last two values and the sum of all."""

    state: Tensor

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operations = operations
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.register_buffer("state", torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = [self.layers[0](x)]
        for name, first, second in self.operations:
            v, w = values[first % len(values)], values[second % len(values)]
            width = min(v.shape[1], w.shape[1])
            if name not in VIEWS and name not in OTHERS and width < v.shape[1]:
                v = v[:, :width]
            w = w[:, :width] if width < w.shape[1] else w
            values.append(self._step(name, x, v, w))
        total = torch.stack([value.mean() for value in values]).sum()
        return values[-1] * 1, values[len(values) // 2] + total, total

    def _step(self, name: str, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        for group in (NEW, VIEWS, CHANGES):
            if name in group:
                return group[name](v, w)
        if name == "layer":
            padded: Tensor = F.pad(v, (0, 6 - v.shape[1]))
            return self.layers[1](padded * 1)
        if name == "input":
            x += 1
            return x * 0.5
        if name == "state":
            return v * self.state[: v.shape[1]].clone()
        if name == "remember":
            self.state.mul_(0.5).add_(v.detach().mean())
            return v + 1
        if self.training:
            v.mul_(2)
        return v


def programs(longest: int = 8) -> st.SearchStrategy[tuple[Operation, ...]]:
    """Operations, changes and views more often than others."""
    names = st.sampled_from([*CHANGES, *VIEWS, *CHANGES, *NEW, *OTHERS])
    place = st.integers(0, 7)
    return st.lists(st.tuples(names, place, place), min_size=2, max_size=longest).map(tuple)
