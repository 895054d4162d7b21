"""Methods that choose the weights of a backward, and methods that step more carefully.

A method that predicts nothing keeps, averages or ignores older weights (`stash`, `2bw`, `pipemare`,
`none`), scales the learning rate by the delay (`pipemare-rate`, `delay-rate`), or averages late
gradients for longer (`delay-momentum`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..optimizers.param_groups import APART
from .protocol import BackwardReads, StageContext, Staleness, State, VersionPair, filled
from .weight_versions import View, Weights, WeightVersions


class Stash(Staleness):
    """`stash`: a micro-batch in flight during a step reads the same weights in both passes.

    Weight stashing, PipeDream (SOSP 2019, section 3.3).
    """

    decides = frozenset({"backward"})
    keeps_forward = True

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> BackwardReads:
        return BackwardReads.FORWARD


class LiveWeights(Staleness):
    """`none`: the optimizer steps in place under the micro-batches in flight.

    A backward may read newer weights than its forward did: the saved activations are those of the
    forward, and the weights in the gradient formulas are live. This needs no memory. PACI (2026)
    trains this way with k >= p.
    """

    leaves = frozenset({"forward", "backward"})


class TwoBuffered(Staleness):
    """`2bw`: a whole window reads the weights before the newest ones, in forward and backward.

    PipeDream-2BW (ICML 2021, section 3.1): the delay is one step at every stage.

        w[b+1] = w[b] - step(mean of the gradients of window b, forward and backward at w[b-1])

    Window b has the k micro-batches of step b+1, and k is more than any stage runs ahead. Then at
    least version b-1 is live at the window's first forward, and all stages can read it, whatever
    their number. Version b-1 is kept until after the step that makes b, over a drain too, so the
    rule holds everywhere. Window 0, and a window after synchronous steps, reads the live weights.
    """

    decides = frozenset({"forward", "backward"})
    needs = frozenset({"whole windows"})
    keeps_forward = True

    def __init__(self) -> None:
        self._kept: View | None = None

    def state(self, weights: WeightVersions) -> State:
        return {} if self._kept is None else {"before": weights.leaves_of(self._kept)}

    def load(self, weights: WeightVersions, state: State) -> None:
        before = filled(weights, state["before"])

        def fill(leaves: Weights) -> None:
            torch._foreach_copy_(list(leaves.values()), list(before.values()))

        self._kept = View("live", weights.version - 1, fill=fill)
        weights.hold(self._kept)

    def in_context(self, context: StageContext, state: State) -> StageContext:
        if context.synchronous:
            return context
        is_kept = self._kept is not None or bool(state)
        first = context.delays.first_version
        delays = replace(context.delays, two_from=first - 1 if is_kept else first)
        return replace(context, delays=delays)

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        # Before the last step ahead of its window, the live weights are those it reads.
        return None if self.context.synchronous or pair.crosses_step else self._kept

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> BackwardReads:
        return BackwardReads.FORWARD

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if self._kept is not None:
            weights.released(self._kept)
            self._kept = None
        if not self.context.synchronous:
            self._kept = weights.live_view
            weights.hold(self._kept)
        yield


D = 0.135


class PipeMare(Staleness):
    """`pipemare`: the backward reads an estimate of the forward's weights.

    PipeMare (MLSys 2021), technique T2:

        delta <- gamma delta + (1 - gamma) (w_new - w_old)        at every step
        backward at  w - n delta                                  n: steps since the forward
        gamma = D^(1/tau), D = 0.135 (e^-2)                       tau = W/k, the stage's mean delay

    Instead of the versions that a stash keeps, one average of the last steps: the weights moved by
    about `n delta` since the forward. A backward without a step since its forward reads live
    weights.
    """

    decides = frozenset({"backward"})

    def __init__(self) -> None:
        self._delta: dict[str, Tensor] = {}

    def state(self, weights: WeightVersions) -> State:
        return {"delta": self._delta} if self._delta else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._delta = filled(weights, state["delta"])

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> View | BackwardReads:
        if not pair.crosses_step or not self._delta:
            return BackwardReads.LIVE

        def fill(leaves: Weights) -> None:
            values = list(leaves.values())
            torch._foreach_copy_(values, list(weights.live.values()))
            torch._foreach_sub_(values, list(self._delta.values()), alpha=pair.delay)

        return View("the forward weights by pipemare", weights.version, pair.delay, fill)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if not self.context.delay or not weights.live:
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
            gamma = D ** (self.context.step_every / self.context.ahead)
            torch._foreach_mul_(delta, gamma)
            torch._foreach_add_(delta, moved, alpha=1 - gamma)


class PipeMareRate(Staleness):
    """`pipemare-rate`: late stages begin with a lower learning rate, which rises to the schedule's
    within `Steps.annealing_steps` steps.

    PipeMare (MLSys 2021), technique T1: lr / tau^p with p = 1 - min(step / K, 1), where tau is the
    mean delay of the gradients that a step uses (`StageContext.tau`). At tau 1 and below the rate
    is the schedule's. Weight decay shrinks with the rate.
    """

    decides = frozenset({"rate"})

    def lr_scale(self, version: int, name: str | None = None) -> float:
        if self.steps is None:
            return 1.0
        power = 1 - min((version - 1) / self.steps.annealing_steps, 1.0)
        return float(max(1.0, self.context.tau(version, name)) ** -power)


class DelayRate(Staleness):
    """`delay-rate`: the later a stage's gradients, the smaller its steps, throughout the run.

    lr / (1 + tau), after Zhang et al. (IJCAI 2016); tau as in `PipeMareRate`. Weight decay shrinks
    with the rate.
    """

    decides = frozenset({"rate"})

    def lr_scale(self, version: int, name: str | None = None) -> float:
        return 1 / (1 + self.context.tau(version, name))


class HiddenDelayRate(DelayRate):
    """`hidden-delay-rate`: `delay-rate` for the hidden matrices, which Muon or SOAP steps; the rate
    of embeddings, the output layer, norms and biases, which AdamW steps, stays.

    A step of AdamW is small where late gradients disagree, one of Muon has a fixed size.
    """

    needs = frozenset({"hidden matrices"})

    def lr_scale(self, version: int, name: str | None = None) -> float:
        return 1.0 if name is not None else super().lr_scale(version)


LONGEST = 0.99


class DelayMomentum(Staleness):
    """`delay-momentum`: the later a stage's gradients, the longer Adam averages them.

    The momentum of each stage in "Nesterov method for asynchronous pipeline parallel optimization"
    (Ajanthan et al., ICML 2025), there for NAdam without a stash: stage i of p has

        b1 = 0.9 + 0.09 (p - i) / p                   i = 1 .. p

    In its order stage i runs W = p - i forwards ahead. For any b1 and any order this is

        b1 <- b1 + max(0, 0.99 - b1) W / (W_1 + 1)    W_1: of the first stage

    A shared weight has the largest W of the stages that hold it. The momentum of an asynchronous
    segment is constant, also in its first steps, whose delays are shorter.
    """

    decides = frozenset({"momentum"})
    needs = frozenset({"moments"})

    def begin(self, context: StageContext) -> None:
        super().begin(context)
        for group in self.optimizer.param_groups if self.optimizer else ():
            usual, second = group.setdefault("initial_betas", group["betas"])
            holders = context.shared.get(group.get(APART, ""), (context.stage,))
            ahead = max(context.delays.ahead[stage] for stage in holders)
            share = ahead / (max(context.delays.ahead) + 1)
            group["betas"] = (usual + max(0.0, LONGEST - usual) * share, second)
