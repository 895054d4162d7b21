"""How far the weights that a forward read are from those its gradient meets, from a part of them.

A copy of all weights would be what asynchronous training avoids; some thousand values of each
tensor, at equal distances, tell their mean square well enough to watch a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .versions import Weights

SAMPLED = 2048
"""The values that are looked at of each tensor, at most."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Squared norms over all weights of a stage, estimated: of the difference, and of the live
    weights. Tensors without dimensions, so that no device is waited for."""

    difference: Tensor
    live: Tensor


def sampled(weights: Weights) -> list[Tensor]:
    """A part of each tensor's values, copied."""
    return [_part(weight).clone() for weight in weights.values()]


def gap_to(live: Weights, read: list[Tensor]) -> Gap:
    """The gap between the live weights and what `sampled` took of those that a forward read.

    >>> import torch
    >>> before = sampled({"w": torch.ones(100, 100)})
    >>> gap = gap_to({"w": torch.full((100, 100), 3.0)}, before)
    >>> float(gap.difference), float(gap.live)
    (40000.0, 90000.0)
    """
    differences, squares = [], []
    for weight, earlier in zip(live.values(), read, strict=True):
        part = _part(weight)
        share = weight.numel() / part.numel()
        differences.append(share * (part - earlier).double().square().sum())
        squares.append(share * part.double().square().sum())
    return Gap(sum(differences[1:], differences[0]), sum(squares[1:], squares[0]))


def _part(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))]
