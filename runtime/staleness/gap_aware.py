"""Gradients divided by how far the weights went meanwhile: gap-aware (ICLR 2020, section 4; on
stages as in FTPipe, ATC 2021).

    gap = |w_f - w|                      between the forward's and the live weights, elementwise
    penalty = 1 + gap / C                C: the size of a step (`step_sizes.py`)
    g <- g / penalty

So a gap of one usual step halves a gradient. It is done to each micro-batch whose forward read an
older version than is live, with its own gap; others have penalty 1. The weight decay of a step is
multiplied by the mean of 1/penalty over the micro-batches of its window: what that takes off is
added to the gradient, or given back to the weight before a decoupled decay. A weight that several
stages hold decays whole, for its gaps differ from stage to stage.

`gap-aware` measures against what the forward read, and the backward read the same. `gap-aware-loss`
has the backward read live weights, through a second forward, and keeps the forward's for the gap
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..versions import Weights, WeightVersions
from .optimizer_step import at_step, rules
from .protocol import Passage, Reads, Situation, Staleness, State
from .step_sizes import StepSizes, step_sizes


class GapAware(Staleness):
    """`gap-aware`: late gradients count less, the more the weights have moved."""

    decides = frozenset({"gradient"})
    needs = frozenset({"forward weights", "known step sizes"})

    def __init__(self) -> None:
        self._sizes: StepSizes | None = None
        self._lost: dict[str, Tensor] = {}
        """Mean of 1/penalty over the window, less one, of weights that decay."""

    def begin(self, situation: Situation) -> None:
        super().begin(situation)
        if self._sizes is None and self.optimizer is not None and situation.delay:
            assert self.steps is not None
            self._sizes = step_sizes(self.optimizer, self.steps, situation.step_every)

    def state(self, weights: WeightVersions) -> State:
        return {} if self._sizes is None else self._sizes.state(weights.live)

    def load(self, weights: WeightVersions, state: State) -> None:
        if self._sizes is not None:
            self._sizes.load(weights.live, state)

    def kept(self) -> Iterator[Tensor]:
        yield from super().kept()
        if self._sizes is not None:
            yield from self._sizes.squares.values()

    @torch.no_grad()
    def after_backward(self, weights: WeightVersions, passage: Passage, gradients: Weights) -> None:
        if self._sizes is None or self.optimizer is None:
            return
        rule, read = rules(self.optimizer, weights.live), weights.read_by(passage.micro_batch)
        for name, leaf in gradients.items():
            if leaf.grad is None:
                continue
            live = weights.live[name]
            gap = read[name].sub(live).abs_()
            # Without any step yet, both are zero.
            size = self._sizes.of(live, rule[name], leaf.grad)
            size = size.clamp_(min=torch.finfo(size.dtype).tiny)
            penalty = gap.div_(size).add_(1)
            leaf.grad.div_(penalty)
            if rule[name].decay and name not in self.situation.shared:
                lost = (1 - penalty).div_(penalty).div_(self.situation.step_every)
                before = self._lost.get(name)
                self._lost[name] = lost if before is None else before.add_(lost)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if self._sizes is None or self.optimizer is None:
            yield
            return
        rule = rules(self.optimizer, weights.live)

        @torch.no_grad()
        def act() -> None:
            for name, lost in self._lost.items():
                live, own = weights.live[name], rule[name]
                if live.grad is None:
                    continue
                if own.decoupled:
                    # The step multiplies by 1 - rate, and all in all 1 - rate (1 + lost) is due.
                    rate = own.lr * own.decay
                    live.sub_(live * lost, alpha=rate / (1 - rate))
                else:
                    live.grad.add_(live * lost, alpha=own.decay)
            self._lost.clear()
            sizes.begin(weights.live, rule)

        sizes = self._sizes
        with at_step(self.optimizer, act):
            yield
        with torch.no_grad():
            sizes.end(weights.live, rule)


class GapAwareLoss(GapAware):
    """`gap-aware-loss`: the gradient is of the live weights, for activations of the old ones."""

    decides = frozenset({"gradient", "backward"})
    needs = frozenset({"recomputation", "known step sizes"})
    keeps_forward = True

    def backward_reads(self, weights: WeightVersions, passage: Passage) -> Reads:
        return Reads.LIVE
