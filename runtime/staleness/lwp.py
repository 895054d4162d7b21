"""Linear weight prediction (Kosson et al., "Pipelined backpropagation at scale", MLSys 2021): the
last step's direction, as many times as there are steps of delay.

    LWP-v:  p - (lr_1 + .. + lr_n) v        LWP-w:  p + n (p - the weights before the last step)

v is the momentum buffer of SGD. `lwp-w` asks nothing of the optimizer; of Muon it goes on with the
last orthogonalised update, which is the prediction of marin-community/marin #6431 (2026). It holds
the last step: memory of the weights once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..versions import Weights, WeightVersions
from .predicted import Predicted
from .prediction import extrapolate
from .protocol import State, filled


class LinearByVelocity(Predicted):
    """`lwp`: a forward reads the weights moved on by SGD's momentum buffer."""

    needs = frozenset({"velocity"})

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None and self.steps.optimizer is not None
        extrapolate(
            self.steps.optimizer,
            weights.live,
            leaves,
            self.steps.expected_lr(steps),
            others=self.factors_of_shared(steps),
        )


class LinearByWeights(Predicted):
    """`lwp-w`: a forward reads the weights moved on by their last step; before the second step the
    live ones."""

    expects_rates = False

    def __init__(self) -> None:
        self._last_step: list[Tensor] = []

    def state(self, weights: WeightVersions) -> State:
        if not self._last_step:
            return {}
        return {"last_step": dict(zip(weights.live, self._last_step, strict=True))}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._last_step = list(filled(weights, state["last_step"]).values())

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        moved = list(leaves.values())
        torch._foreach_copy_(moved, list(weights.live.values()))
        if self._last_step:
            torch._foreach_add_(moved, self._last_step, alpha=steps)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        live = [weight.detach() for weight in weights.live.values()]
        if not (live and self.situation.ahead):
            yield
            return
        if self._last_step:
            torch._foreach_copy_(self._last_step, live)
        else:
            self._last_step = [weight.clone() for weight in live]
        yield
        torch._foreach_neg_(self._last_step)
        torch._foreach_add_(self._last_step, live)
