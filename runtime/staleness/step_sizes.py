"""An optimizer's steps so far -> the size that a step of each weight usually has.

    sgd        C = lr_max (sqrt(r / (1 - G^n)) + eps)      r <- G r + (1 - G) v^2,  G = 0.999
    sutskever  C = sqrt(r / (1 - G^n)) + eps               its v has the learning rate in it
    adam(w)    C = sqrt(q / (1 - b2^n)) + eps              q <- b2 q + (1 - b2) (step)^2

v is the velocity after each of n steps, lr_max the largest learning rate so far, the coming step's
included, and step = lr / (1 - b1^t) m / (sqrt(s / (1 - b2^t)) + eps_adam), without decay. These are
FTPipe's, but that q has no bias here: with it C is too small for some 1 / (1 - b2) steps, in which
late gradients count for next to nothing. n counts the updates of r or q. Of SGD without momentum
every late micro-batch counts with its own gradient in v's place, this one included, and k of them
as one step: G^(1/k) for G.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..optimizers.sutskever import Sutskever
from .optimizer_step import Rule
from .protocol import Outlook, State

G = 0.999
EPSILON = 1e-8

Live = Mapping[str, Tensor]
Rules = Mapping[str, Rule]


class StepSizes(Protocol):
    """Sizes of steps by weight, told of every step of the optimizer."""

    squares: dict[Tensor, Tensor]
    """A running mean of each weight's squared steps, velocities or gradients."""

    def of(self, weight: Tensor, rule: Rule, gradient: Tensor) -> Tensor:
        """C of a weight, as large as it, for a late micro-batch's share of a gradient."""
        ...

    def begin(self, live: Live, rules: Rules) -> None:
        """The optimizer begins a step, at the learning rates of the rules."""
        ...

    def end(self, live: Live, rules: Rules) -> None:
        """The step is made."""
        ...

    def state(self, live: Live) -> State:
        """What there is of each weight, between two steps."""
        ...

    def load(self, live: Live, state: State) -> None:
        """Takes up what `state` gave."""
        ...


def step_sizes(optimizer: Optimizer, outlook: Outlook, step_every: int) -> StepSizes:
    """Those of the optimizer, whose windows have `step_every` micro-batches."""
    if not isinstance(optimizer, SGD | Sutskever):
        return _OfAdam(optimizer)
    has_momentum = any(group["momentum"] for group in optimizer.param_groups)
    return _OfVelocity(optimizer, outlook) if has_momentum else _OfGradients(outlook, step_every)


class _Rates:
    """The largest learning rate that the schedule has had, by weight."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._largest: dict[Tensor, float] = {}

    def largest(self, weight: Tensor, rule: Rule) -> float:
        coming = rule.scheduled_lr(self._outlook)
        self._largest[weight] = max(coming, self._largest.get(weight, 0.0))
        return self._largest[weight]

    def see(self, live: Live, rules: Rules) -> None:
        for name, weight in live.items():
            self.largest(weight, rules[name])

    def state(self, live: Live) -> State:
        return {"largest_lr": _numbers(live, self._largest)}

    def load(self, live: Live, state: State) -> None:
        self._largest = {
            live[name]: float(rate) for name, rate in state.get("largest_lr", {}).items()
        }


class _Counted:
    """Running means of squares, and of how many."""

    def __init__(self, rates: _Rates | None) -> None:
        self._rates = rates
        self.squares: dict[Tensor, Tensor] = {}
        self._counts: dict[Tensor, int] = {}

    def state(self, live: Live) -> State:
        rates = self._rates.state(live) if self._rates else {}
        counts = _numbers(live, self._counts)
        return {"squares": _by_name(live, self.squares), "counts": counts, **rates}

    def load(self, live: Live, state: State) -> None:
        self.squares = {live[name]: square for name, square in state.get("squares", {}).items()}
        self._counts = {live[name]: int(count) for name, count in state.get("counts", {}).items()}
        if self._rates:
            self._rates.load(live, state)


class _OfVelocity(_Counted):
    def __init__(self, optimizer: Optimizer, outlook: Outlook) -> None:
        super().__init__(None if isinstance(optimizer, Sutskever) else _Rates(outlook))
        self._optimizer = optimizer

    def of(self, weight: Tensor, rule: Rule, gradient: Tensor) -> Tensor:
        squares = self.squares.get(weight)
        if squares is None:
            return torch.zeros_like(weight)
        mean = squares / (1 - G ** self._counts[weight])
        rate = 1.0 if self._rates is None else self._rates.largest(weight, rule)
        return mean.sqrt_().add_(EPSILON).mul_(rate)

    def begin(self, live: Live, rules: Rules) -> None:
        if self._rates is not None:
            self._rates.see(live, rules)

    def end(self, live: Live, rules: Rules) -> None:
        for weight in live.values():
            velocity = self._optimizer.state[weight].get("momentum_buffer")
            if velocity is not None:
                self._counts[weight] = self._counts.get(weight, 0) + 1
                squares = self.squares.setdefault(weight, torch.zeros_like(velocity))
                squares.mul_(G).addcmul_(velocity, velocity, value=1 - G)


class _OfGradients(_Counted):
    _rates: _Rates

    def __init__(self, outlook: Outlook, step_every: int) -> None:
        super().__init__(_Rates(outlook))
        self._step_every = step_every

    def of(self, weight: Tensor, rule: Rule, gradient: Tensor) -> Tensor:
        memory, own = float(G ** (1 / self._step_every)), gradient * self._step_every
        squares = self.squares.setdefault(weight, torch.zeros_like(gradient))
        squares.mul_(memory).addcmul_(own, own, value=1 - memory)
        self._counts[weight] = count = self._counts.get(weight, 0) + 1
        mean = squares / (1 - memory**count)
        return mean.sqrt_().add_(EPSILON).mul_(self._rates.largest(weight, rule))

    def begin(self, live: Live, rules: Rules) -> None:
        self._rates.see(live, rules)

    def end(self, live: Live, rules: Rules) -> None:
        pass


class _OfAdam(_Counted):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(None)
        self._optimizer = optimizer
        self._lr: dict[Tensor, float] = {}

    def of(self, weight: Tensor, rule: Rule, gradient: Tensor) -> Tensor:
        squares = self.squares.get(weight)
        if squares is None:
            return torch.zeros_like(weight)
        beta = float(rule.options["betas"][1])
        mean = squares / (1 - beta ** self._counts[weight])
        return mean.sqrt_().add_(EPSILON)

    def begin(self, live: Live, rules: Rules) -> None:
        self._lr = {
            weight: rules[name].lr for name, weight in live.items() if weight.grad is not None
        }

    def end(self, live: Live, rules: Rules) -> None:
        for name, weight in live.items():
            if weight not in self._lr:
                continue
            state, options = self._optimizer.state[weight], rules[name].options
            (beta1, beta2), done = options["betas"], float(state["step"])
            spread = (state["exp_avg_sq"] / (1 - beta2**done)).sqrt_().add_(options["eps"])
            step = (state["exp_avg"] / spread).mul_(self._lr[weight] / (1 - beta1**done))
            squares = self.squares.setdefault(weight, torch.zeros_like(step))
            squares.mul_(beta2).addcmul_(step, step, value=1 - beta2)
            self._counts[weight] = self._counts.get(weight, 0) + 1
        self._lr = {}


def _by_name(live: Live, tensors: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[weight] for name, weight in live.items() if weight in tensors}


def _numbers(live: Live, numbers: Mapping[Tensor, float]) -> dict[str, Tensor]:
    """Numbers of weights as tensors that keep every bit."""
    return {
        name: torch.tensor(numbers[weight], dtype=torch.float64)
        for name, weight in live.items()
        if weight in numbers
    }
