"""Steps that make up for those in flight: error feedback (arXiv 2606.30634, section 4).

    x <- x - (1 + tau) u_t + tau u_(t-1)        u_t: what the optimizer takes off without decay

This is a look-ahead that stores where it looks: with y <- y - u_t, x is always y - tau u_t, where
the last step would lead if it were made tau times more. So a run is judged and saved at
y = x + tau u_t (`settled`). Weight decay acts on x and is no part of u. tau is the stage's delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..versions import WeightVersions
from .optimizer_step import at_step, rules
from .protocol import Staleness, State


class ErrorFeedback(Staleness):
    """`error-feedback`: every step is made 1 + tau times, and what the last one did too much is
    taken back."""

    decides = frozenset({"step", "horizon"})

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._looks_ahead = 0

    def state(self, weights: WeightVersions) -> State:
        ahead = {name: torch.tensor(self._looks_ahead) for name in self._last}
        return {"last": self._last, "ahead": ahead} if self._last else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._last = dict(state["last"])
        self._looks_ahead = max(int(steps) for steps in state["ahead"].values())

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        optimizer, delay = self.optimizer, self.situation.delay
        if optimizer is None or not (delay or self._last):
            yield
            return
        rule = rules(optimizer, weights.live)
        before: dict[str, Tensor] = {}

        @torch.no_grad()
        def remember() -> None:
            for name, weight in weights.live.items():
                # Without a gradient a weight is not stepped at all.
                is_stepped = weight.grad is not None
                before[name] = rule[name].decayed(weight) if is_stepped else weight.clone()

        with at_step(optimizer, remember):
            yield
        with torch.no_grad():
            for name, start in before.items():
                live = weights.live[name]
                update = start.sub_(live)
                if (last := self._last.get(name)) is not None:
                    live.add_(last, alpha=self._looks_ahead)
                live.sub_(update, alpha=delay)
                self._last[name] = update
        self._looks_ahead = delay

    @contextmanager
    def settled(self, weights: WeightVersions) -> Iterator[None]:
        stored = {name: weights.live[name].detach().clone() for name in self._last}
        with torch.no_grad():
            for name, last in self._last.items():
                weights.live[name].add_(last, alpha=self._looks_ahead)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in stored.items():
                    weights.live[name].copy_(weight)
