"""`--ema`: an exponential moving average of the weights, which is evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .protocol import StageContext, Staleness, State
from .weight_versions import WeightVersions


class MovingAverage(Staleness):
    """Averages the live weights after every step: a <- decay a + (1 - decay) w.

    The average begins as the weights after the first step. Its numbers are those of torch's
    AveragedModel with `get_ema_multi_avg_fn(decay)`. Buffers are those of the last step.

    Where stages step together, the last of a rank's stages steps all of them, so that the average
    follows the optimizer; otherwise it follows what methods do after the step, too.
    """

    name = "ema"

    def __init__(self, decay: float) -> None:
        make: Any = get_ema_multi_avg_fn  # torch has no types for it
        self._update = make(decay)
        self._average: dict[str, Tensor] = {}
        self._follows = False

    def begin(self, context: StageContext) -> None:
        super().begin(context)
        if self.steps is not None and not self._follows:
            self.steps.steps.follow(self._follow)
            self._follows = True

    def state(self, weights: WeightVersions) -> State:
        return {"average": self._average} if self._average else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._average = {
            name: state["average"].get(name, weight.detach()).clone()
            for name, weight in weights.live.items()
        }

    def _follow(self) -> None:
        if self.context.synchronous and self.steps is not None:
            self._observe(self.steps.weights)

    def after_step(self, weights: WeightVersions) -> None:
        if not self.context.synchronous:
            self._observe(weights)

    @torch.no_grad()
    def _observe(self, weights: WeightVersions) -> None:
        live = {name: weight.detach() for name, weight in weights.live.items()}
        if self._average:
            self._update(list(self._average.values()), list(live.values()), 1)
        else:
            self._average = {name: weight.clone() for name, weight in live.items()}

    @contextmanager
    def eval_weights(self, weights: WeightVersions) -> Iterator[None]:
        with weights.restored():
            with torch.no_grad():
                for name, average in self._average.items():
                    weights.live[name].copy_(average)
            yield
