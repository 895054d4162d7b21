"""Weights that are one step old for all alike: PipeDream-2BW (ICML 2021, section 3.1).

    w[b+1] = w[b] - step(mean of the gradients of window b, forward and backward at w[b-1])

Window b has the k micro-batches of step b+1, and k is more than any stage runs ahead. Then at
least version b-1 is live at the window's first forward, and all stages can read it: the delay is
one step at every stage, whatever their number. Version b-1 is kept past the step that makes b, over
a drain too, so the rule is the same everywhere; window 0, and one that follows synchronous steps,
reads what is live.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..versions import View, Weights, WeightVersions
from .protocol import Passage, Reads, Situation, Staleness, State, filled


class TwoBuffered(Staleness):
    """`2bw`: a whole window reads the weights before the newest, forward and backward."""

    decides = frozenset({"forward", "backward"})
    needs = frozenset({"whole windows"})
    keeps_forward = True

    def __init__(self) -> None:
        self._kept: View | None = None

    def state(self, weights: WeightVersions) -> State:
        return {} if self._kept is None else {"before": weights.held(self._kept)}

    def load(self, weights: WeightVersions, state: State) -> None:
        before = filled(weights, state["before"])

        def fill(leaves: Weights) -> None:
            torch._foreach_copy_(list(leaves.values()), list(before.values()))

        self._kept = View("live", weights.version - 1, fill=fill)
        weights.hold(self._kept)

    def situated(self, situation: Situation, state: State) -> Situation:
        if situation.synchronous:
            return situation
        is_kept = self._kept is not None or bool(state)
        first = situation.delays.first_version
        delays = replace(situation.delays, two_from=first - 1 if is_kept else first)
        return replace(situation, delays=delays)

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        # Ahead of the step before its window, what is live is what the window reads.
        return None if self.situation.synchronous or passage.straddles else self._kept

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> Reads:
        return Reads.FORWARD

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if self._kept is not None:
            weights.released(self._kept)
            self._kept = None
        if not self.situation.synchronous:
            self._kept = weights.live_view
            weights.hold(self._kept)
        yield
