"""Backward with an estimate of the forward's weights: PipeMare (MLSys 2021), technique T2.

    delta <- gamma delta + (1 - gamma) (w_new - w_old)        at every step
    backward at  w - horizon delta                            horizon: steps since the forward
    gamma = D^(1/tau), D = 0.135 (e^-2)                       tau = W/k, the stage's mean delay

Instead of the versions that a stash keeps, one average of the last steps: the weights moved by
about `horizon delta` since. A backward without a step in between reads live weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..versions import View, Weights, WeightVersions
from .protocol import Passage, Reads, Staleness, State, filled

D = 0.135


class PipeMare(Staleness):
    """`pipemare`: the backward reads what the forward's weights probably were."""

    decides = frozenset({"backward"})

    def __init__(self) -> None:
        self._delta: dict[str, Tensor] = {}

    def state(self, weights: WeightVersions) -> State:
        return {"delta": self._delta} if self._delta else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._delta = filled(weights, state["delta"])

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> View | Reads:
        if not passage.straddles or not self._delta:
            return Reads.LIVE

        def fill(leaves: Weights) -> None:
            values = list(leaves.values())
            torch._foreach_copy_(values, list(weights.live.values()))
            torch._foreach_sub_(values, list(self._delta.values()), alpha=passage.horizon)

        return View("the forward's, as pipemare has it", weights.version, passage.horizon, fill)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if not self.situation.delay or not weights.live:
            yield
            return
        live = list(weights.live.values())
        with torch.no_grad():
            moved = [weight.neg() for weight in live]
            yield
            moved = [weight + before for weight, before in zip(live, moved, strict=True)]
            if not self._delta:
                self._delta = {
                    name: torch.zeros_like(weight) for name, weight in weights.live.items()
                }
            delta = list(self._delta.values())
            gamma = D ** (self.situation.step_every / self.situation.ahead)
            torch._foreach_mul_(delta, gamma)
            torch._foreach_add_(delta, moved, alpha=1 - gamma)
