"""Steps that make up for those in flight: error feedback (arXiv 2606.30634, section 4).

    x <- x - (1 + tau) u_t + tau u_(t-1)        u_t: what the optimizer takes off without decay

This is a look-ahead that stores where it looks: with y <- y - u_t, x is always y - tau u_t, where
the last step would lead if it were made tau times more. So a run is judged and saved at
y = x + tau u_t (`settled`). Weight decay acts on x and is no part of u. tau is the mean delay of
the gradients of a step (`delays.py`); where it changes, in a ramp, what is taken back is what the
last step did too much.
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
        self._looks_ahead: dict[str, float] = {}
        """Tau of the last step, of each weight that it was made too far of."""

    def state(self, weights: WeightVersions) -> State:
        ahead = {
            name: torch.tensor(steps, dtype=torch.float64)
            for name, steps in self._looks_ahead.items()
        }
        return {"last": self._last, "ahead": ahead} if self._last else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._last = dict(state["last"])
        self._looks_ahead = {name: float(steps) for name, steps in state["ahead"].items()}

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        optimizer, version = self.optimizer, weights.version + 1
        delays = {name: self.situation.tau(version, name) for name in weights.live}
        changed = {name for name, delay in delays.items() if delay or name in self._last}
        if optimizer is None or not changed:
            yield
            return
        rule = rules(optimizer, weights.live)
        before: dict[str, Tensor] = {}

        @torch.no_grad()
        def remember() -> None:
            for name in changed:
                weight = weights.live[name]
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
                    live.add_(last, alpha=self._looks_ahead[name])
                live.sub_(update, alpha=delays[name])
                self._last[name], self._looks_ahead[name] = update, delays[name]

    @contextmanager
    def settled(self, weights: WeightVersions) -> Iterator[None]:
        stored = {name: weights.live[name].detach().clone() for name in self._last}
        with torch.no_grad():
            for name, last in self._last.items():
                weights.live[name].add_(last, alpha=self._looks_ahead[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in stored.items():
                    weights.live[name].copy_(weight)
