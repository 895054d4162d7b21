"""Gradients moved to the live weights by a Taylor step: DC-ASGD (ICML 2017, equations 10 and 15).

    g <- g + lambda g g (w - w_f)                     w live, w_f the forward's, all elementwise
    constant    lambda = 0.04
    adaptive    lambda = 2 / sqrt(MS + 1e-7),  MS <- 0.95 MS + 0.05 g g

g g stands for the Hessian's diagonal, so g is a micro-batch's own gradient, not its share of the
window's mean. MS has the gradients of late micro-batches, this one included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..versions import Weights, WeightVersions
from .protocol import Passage, Staleness, State

CONSTANT = 0.04
ADAPTIVE, MEMORY, EPSILON = 2.0, 0.95, 1e-7


class DelayCompensated(Staleness):
    """`dc-asgd`: with one lambda for all weights."""

    decides = frozenset({"gradient"})
    needs = frozenset({"forward weights"})

    @torch.no_grad()
    def after_backward(self, weights: WeightVersions, passage: Passage, gradients: Weights) -> None:
        read, count = weights.read_by(passage.micro_batch), self.situation.step_every
        for name, leaf in gradients.items():
            if leaf.grad is None:
                continue
            own = leaf.grad * count
            moved = weights.live[name] - read[name]
            change = self._strength(name, own) * own * own * moved
            leaf.grad.add_(change.div_(count))

    def _strength(self, name: str, gradient: Tensor) -> Tensor | float:
        return CONSTANT


class AdaptivelyCompensated(DelayCompensated):
    """`dc-asgd-adaptive`: lambda is smaller where gradients are large."""

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}

    def state(self, weights: WeightVersions) -> State:
        return {"squares": self._squares} if self._squares else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._squares = dict(state["squares"])

    def _strength(self, name: str, gradient: Tensor) -> Tensor:
        mean = self._squares.setdefault(name, torch.zeros_like(gradient))
        mean.mul_(MEMORY).addcmul_(gradient, gradient, value=1 - MEMORY)
        return ADAPTIVE / (mean + EPSILON).sqrt_()
