"""References of the staleness methods that predict weights.

Each is written from its paper's formula over a stage's snapshots, one weight at a time. Predictions
by momentum take their steps one after the other, as the optimizer does. The runtime sums them up
first, so the two differ in the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from asyncpipe.tests.support.oracles.async_simulation import Reference, StageHistory, Values, tau_of

State = dict[str, Any]


class Rates:
    """Learning rates: the factor of each version's step on the optimizer's own, and whether
    predictions know them ahead."""

    def __init__(
        self, factors: Callable[[int], float] = lambda version: 1.0, *, known: bool = False
    ) -> None:
        self.factors = factors
        self.known = known

    def ahead(self, at: int, steps: int) -> list[float]:
        """Those of the steps that a prediction takes at version `at`."""
        return [self.factors(at + 1 + (i if self.known else 0)) for i in range(steps)]


class PredictedReference(Reference):
    """A forward reads what `move` makes of each weight in the steps until its backward.

    `kind` is the optimizer's name; `stashed` says whether a backward reads its forward's weights
    though that is run again. Gradients that predict are clipped by the norm `clip` of the stage's.
    """

    def __init__(
        self,
        kind: str,
        rates: Rates | None = None,
        *,
        stashed: bool = True,
        clip: float = math.inf,
    ) -> None:
        self.clip = clip
        self.kind = kind
        self.rates = rates or Rates()
        self.stashed = stashed

    def rate(self, history: StageHistory, version: int, name: str) -> float:
        return self.rates.factors(version) * self.scale(history, version, name)

    def scale(self, history: StageHistory, version: int, name: str) -> float:
        """The factor of another method on the rate of a weight in the step to `version`."""
        return 1.0

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        return self.predicted(history, t, at, now - at)

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return None if self.stashed or not repeats or at == now else history.weights[now]

    def predicted(self, history: StageHistory, t: int, at: int, steps: int) -> Values:
        if steps == 0:
            return history.weights[at]
        moved = {}
        for name, weight in history.weights[at].items():
            options = history.options[name]
            rates = [
                options["lr"] * factor * self.scale(history, version, name)
                for version, factor in enumerate(self.rates.ahead(at, steps), at + 1)
            ]
            gradient = self.gathered(history, t, name)
            state = dict(history.states[at].get(name, {}))
            moved[name] = self.move(weight, gradient, state, options, rates)
        return moved

    def gathered(self, history: StageHistory, t: int, name: str) -> Tensor | None:
        return None

    def move(
        self,
        weight: Tensor,
        gradient: Tensor | None,
        state: State,
        options: State,
        rates: list[float],
    ) -> Tensor:
        raise NotImplementedError


class MsnagReference(PredictedReference):
    """`msnag`: the optimizer's steps with zero gradients."""

    def move(
        self,
        weight: Tensor,
        gradient: Tensor | None,
        state: State,
        options: State,
        rates: list[float],
    ) -> Tensor:
        nothing = torch.zeros_like(weight)
        for step, rate in enumerate(rates):
            arriving = gradient if step == 0 and gradient is not None else nothing
            weight = STEPS[self.kind](weight, arriving, state, options, rate)
        return weight


class MsnagAndDelayRateReference(MsnagReference):
    """`msnag` with `delay-rate`, whose rates it expects."""

    def scale(self, history: StageHistory, version: int, name: str) -> float:
        return 1 / (1 + tau_of(history, version, name))


class StockReference(PredictedReference):
    """`msnag` by torch's Muon and AdamW themselves, with zero gradients, on copies."""

    def move(
        self,
        weight: Tensor,
        gradient: Tensor | None,
        state: State,
        options: State,
        rates: list[float],
    ) -> Tensor:
        copy = nn.Parameter(weight.clone())
        stock = (Muon if "ns_steps" in options else AdamW)([copy])
        stock.param_groups[0].update({k: v for k, v in options.items() if k != "params"})
        stock.state[copy] = deepcopy(state)
        for rate in rates:
            copy.grad = torch.zeros_like(weight) if gradient is None else gradient
            stock.param_groups[0]["lr"], gradient = rate, None
            stock.step()
        return copy.detach()


class AggMsnagReference(MsnagReference):
    """`aggmsnag`: the first step has the sum of the gradients that the stage has by then."""

    def accumulated(self, history: StageHistory, gradients: Values) -> None:
        if gradients:
            sums = history.notes.setdefault("sums", [{}])
            sums.append({name: gradient.clone() for name, gradient in gradients.items()})

    def gathered(self, history: StageHistory, t: int, name: str) -> Tensor | None:
        done = max(0, t - history.ahead)
        # The step of a weight that several stages hold has the gradients of another window.
        if done % history.step_every == 0 or name in history.shared:
            return None
        sums = {
            n: self.scaled(history, total, done)
            for n, total in history.notes["sums"][done].items()
            if n not in history.shared
        }
        norm = sqrt(sum(float(total.square().sum()) for total in sums.values()))
        return sums[name] * min(1.0, self.clip / norm) if name in sums else None

    def scaled(self, history: StageHistory, total: Tensor, done: int) -> Tensor:
        return total


class PartialGradientReference(AggMsnagReference):
    """`partial-gradient`: their mean, as an estimate of the window's."""

    def scaled(self, history: StageHistory, total: Tensor, done: int) -> Tensor:
        k = history.step_every
        return total * k / (done % k)


class StockPartialGradientReference(PartialGradientReference):
    """The same by torch's Muon and AdamW."""

    move = StockReference.move


class NagReference(MsnagReference):
    """`nag`: a step ahead where `msnag` looks at the live weights."""

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        return self.predicted(history, t, at, max(1, now - at))


class NesterovLastReference(PredictedReference):
    """`nesterov-last` with nothing else: p - lr (g + u v) where v is the new velocity."""

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        return history.weights[at]

    @torch.no_grad()
    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        if history.stage < history.stages - 1:
            return
        for name, parameter in module.named_parameters():
            if parameter.grad is None or name in history.shared:
                continue
            options, before = history.options[name], history.weights[-1][name]
            gradient = parameter.grad + options["weight_decay"] * before
            velocity = optimizer.state[parameter]["momentum_buffer"]
            parameter.copy_(before - options["lr"] * (gradient + options["momentum"] * velocity))


class LwpReference(PredictedReference):
    """`lwp`, and with Adam the direction of XPipe and PipeOptim."""

    def move(
        self,
        weight: Tensor,
        gradient: Tensor | None,
        state: State,
        options: State,
        rates: list[float],
    ) -> Tensor:
        if not state:
            return weight
        if self.kind == "sgd":
            return weight - sum(rates) * state["momentum_buffer"]
        if self.kind == "sutskever":
            return weight - len(rates) * state["momentum_buffer"]
        beta1, beta2 = options["betas"]
        first = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
        second = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
        return weight - sum(rates) * first / (second.sqrt() + options["eps"])


class LwpWReference(PredictedReference):
    """`lwp-w`: the difference of the last two versions, as often as there are steps."""

    def predicted(self, history: StageHistory, t: int, at: int, steps: int) -> Values:
        newest, before = history.weights[at], history.weights[max(0, at - 1)]
        return {n: newest[n] + steps * (newest[n] - before[n]) for n in newest}


class SpecTrainReference(LwpReference):
    """`spectrain`: forward and backward look to floor(j / 2) micro-batches after the backward."""

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        return self.predicted(history, t, at, self.meant(history, t) - at)

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return self.predicted(history, t, now, self.meant(history, t) - now)

    def meant(self, history: StageHistory, t: int) -> int:
        return (t + history.stage // 2) // history.step_every


class XPipeReference(LwpReference):
    """`xpipe`: all micro-batches of a step read the prediction of the first one."""

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        k, p, j = history.step_every, history.stages, history.stage
        first = self.version(history, t - t % k)
        return self.predicted(history, t, first, round((p + k - j // 2 - 2) / k))

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        k = history.step_every
        return self.predicted(history, t, now, round((k + history.stage // 2 - 1) / k))


class PipeOptimReference(LwpReference):
    """`pipeoptim`: a predicted forward, a live backward."""

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return history.weights[now]


def _sgd(weight: Tensor, gradient: Tensor, state: State, options: State, rate: float) -> Tensor:
    """v <- u v + g + decay p; p <- p - lr v."""
    gradient = gradient + options["weight_decay"] * weight
    state["momentum_buffer"] = options["momentum"] * _of(state, "momentum_buffer", weight)
    state["momentum_buffer"] = state["momentum_buffer"] + gradient
    return weight - rate * state["momentum_buffer"]


def _sutskever(
    weight: Tensor, gradient: Tensor, state: State, options: State, rate: float
) -> Tensor:
    """v <- u v + lr (g + decay p); p <- p - v."""
    gradient = gradient + options["weight_decay"] * weight
    state["momentum_buffer"] = options["momentum"] * _of(state, "momentum_buffer", weight)
    state["momentum_buffer"] = state["momentum_buffer"] + rate * gradient
    return weight - state["momentum_buffer"]


def _adam(weight: Tensor, gradient: Tensor, state: State, options: State, rate: float) -> Tensor:
    """Kingma and Ba, algorithm 1; decay is a gradient."""
    gradient = gradient + options["weight_decay"] * weight
    first, spread = _moments(weight, gradient, state, options)
    return weight - rate * first / (1 - options["betas"][0] ** state["step"]) / spread


def _adamw(weight: Tensor, gradient: Tensor, state: State, options: State, rate: float) -> Tensor:
    """Loshchilov and Hutter, algorithm 2; decay is a step of its own."""
    decayed = weight - rate * options["weight_decay"] * weight
    return _adam(decayed, gradient, state, {**options, "weight_decay": 0.0}, rate)


def _nadam(weight: Tensor, gradient: Tensor, state: State, options: State, rate: float) -> Tensor:
    """Dozat, with the momentum of step t u(t) = b1 (1 - 0.96^(t psi) / 2)."""
    beta1, psi = options["betas"][0], options["momentum_decay"]
    decayed = weight - rate * options["weight_decay"] * weight
    first, spread = _moments(weight, gradient, state, options)

    def momentum(t: float) -> float:
        return beta1 * (1 - 0.96 ** (t * psi) / 2)

    t = state["step"]
    so_far = prod(momentum(i) for i in range(1, int(t) + 1))
    now, later = 1 - momentum(t), momentum(t + 1)
    used = now * gradient / (1 - so_far) + later * first / (1 - so_far * later)
    return decayed - rate * used / spread


def _moments(
    weight: Tensor, gradient: Tensor, state: State, options: State
) -> tuple[Tensor, Tensor]:
    """The first moment with its bias, and what divides it."""
    beta1, beta2 = options["betas"]
    state["step"] = float(state.get("step", 0.0)) + 1
    first = state["exp_avg"] = beta1 * _of(state, "exp_avg", weight) + (1 - beta1) * gradient
    second = beta2 * _of(state, "exp_avg_sq", weight) + (1 - beta2) * gradient * gradient
    state["exp_avg_sq"] = second
    return first, second.sqrt() / sqrt(1 - beta2 ** state["step"]) + options["eps"]


def _of(state: State, key: str, weight: Tensor) -> Tensor:
    value = state.get(key)
    return torch.zeros_like(weight) if value is None else value


STEPS: dict[str, Callable[[Tensor, Tensor, State, State, float], Tensor]] = {
    "sgd": _sgd,
    "sutskever": _sutskever,
    "adam": _adam,
    "adamw": _adamw,
    "nadam": _nadam,
}
"""Optimizer -> one step of it: weight, gradient, state (which is changed), options and rate."""
