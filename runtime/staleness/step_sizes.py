"""An optimizer's steps so far -> the usual size C of a step of each weight, after FTPipe (ATC
2021).

    sgd        C = lr_max (sqrt(r / (1 - G^n)) + eps)      r <- G r + (1 - G) v^2,  G = 0.999
    sutskever  C = sqrt(r / (1 - G^n)) + eps               its v has the learning rate in it
    adam(w)    C = sqrt(q / (1 - b2^n)) + eps              q <- b2 q + (1 - b2) (step)^2

v is the velocity after each of n steps, lr_max the largest learning rate so far, including that of
the next step, and step = lr / (1 - b1^t) m / (sqrt(s / (1 - b2^t)) + eps_adam), without decay. n
counts the updates of r or q. Unlike FTPipe's, q has no bias here: with it C is too small for about
1 / (1 - b2) steps, in which late gradients would hardly count. For SGD without momentum, the
gradient of every late micro-batch takes the place of v, the current one included, and k of them
count as one step: G^(1/k) for G.

All sizes are real; those of a complex weight have its shape as real and imaginary parts.

`rules` and `at_step` give corrections the rates and decay of a step at the time the optimizer
begins it: only then the learning rate is certain, since a schedule and other methods change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Muon, NAdam, Optimizer

from ..optimizers.param_groups import Joint
from ..optimizers.soap import Soap, Sutskever
from ..tensor_files import as_real
from .protocol import OptimizerView, State

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How an optimizer updates a weight."""

    optimizer: Optimizer
    """The optimizer that steps the weight, one of several in a `Joint`."""
    options: Options
    """The options of the weight's parameter group."""
    decoupled: bool
    """Weight decay is decoupled, w <- (1 - lr decay) w; otherwise it is a part of the gradient."""

    @property
    def lr(self) -> float:
        """The current learning rate; inside a step, that of the step."""
        return float(self.options["lr"])

    @property
    def decay(self) -> float:
        return float(self.options.get("weight_decay", 0.0))

    def scheduled_lr(self, outlook: OptimizerView) -> float:
        """The scheduled learning rate of the next step."""
        return float(self.options.get("initial_lr", self.options["lr"])) * outlook.future_lr(1)[0]

    def decayed(self, weight: Tensor) -> Tensor:
        """A copy of the weight after the decoupled decay of the next step."""
        return weight * (1 - self.lr * self.decay) if self.decoupled else weight.clone()


def rules(optimizer: Optimizer, live: Mapping[str, Tensor]) -> dict[str, UpdateRule]:
    """The update rule of each of a stage's live weights, by name."""
    parts = optimizer.parts if isinstance(optimizer, Joint) else (optimizer,)
    by_identity = {
        id(weight): UpdateRule(part, group, _is_decoupled(part, group))
        for part in parts
        for group in part.param_groups
        for weight in group["params"]
    }
    return {name: by_identity[id(weight)] for name, weight in live.items()}


@contextmanager
def at_step(optimizer: Optimizer, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` when the optimizer begins a step inside the context."""
    handle = optimizer.register_step_pre_hook(lambda *_: act())
    try:
        yield
    finally:
        handle.remove()


def _is_decoupled(optimizer: Optimizer, group: Options) -> bool:
    if isinstance(optimizer, NAdam):
        return bool(group["decoupled_weight_decay"])
    return isinstance(optimizer, Adafactor | AdamW | Muon | Soap)


G = 0.999
EPSILON = 1e-8

Live = Mapping[str, Tensor]
Rules = Mapping[str, UpdateRule]


class StepSizes(Protocol):
    """Step sizes by weight, updated at every step of the optimizer."""

    squares: dict[Tensor, Tensor]
    """A running mean of each weight's squared steps, velocities or gradients."""

    def of(self, weight: Tensor, rule: UpdateRule, gradient: Tensor) -> Tensor:
        """C of a weight, in its real shape, for a late micro-batch's share of a gradient."""
        ...

    def last_step(self, weight: Tensor, rule: UpdateRule) -> Tensor | None:
        """The absolute change of a weight in the last step, from the optimizer's state; None if it
        made none."""
        ...

    def begin(self, live: Live, rules: Rules) -> None:
        """Called when the optimizer begins a step, with the learning rates of the rules."""
        ...

    def end(self, live: Live, rules: Rules) -> None:
        """Called after the step, also if the optimizer made none."""
        ...

    def state(self, live: Live) -> State:
        """The state of each weight between two steps."""
        ...

    def load(self, live: Live, state: State) -> None:
        """Restores a `state`."""
        ...


def step_sizes(optimizer: Optimizer, outlook: OptimizerView, step_every: int) -> StepSizes:
    """The step sizes of an optimizer, whose windows have `step_every` micro-batches."""
    if not isinstance(optimizer, SGD | Sutskever):
        return _OfAdam(optimizer)
    has_momentum = any(group["momentum"] for group in optimizer.param_groups)
    return _OfVelocity(optimizer, outlook) if has_momentum else _OfGradients(outlook, step_every)


class _Rates:
    """The largest scheduled learning rate so far, by weight."""

    def __init__(self, outlook: OptimizerView) -> None:
        self._outlook = outlook
        self._largest: dict[Tensor, float] = {}

    def largest(self, weight: Tensor, rule: UpdateRule) -> float:
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
    """Running means of squares, with the number of updates of each."""

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


def _stepped(live: Live, rules: Rules) -> dict[Tensor, float]:
    """The weights that a step changes, with its learning rates."""
    return {w: rules[name].lr for name, w in live.items() if w.grad is not None}


class _OfVelocity(_Counted):
    def __init__(self, optimizer: Optimizer, outlook: OptimizerView) -> None:
        super().__init__(None if isinstance(optimizer, Sutskever) else _Rates(outlook))
        self._optimizer = optimizer
        self._begun: dict[Tensor, float] = {}
        self._last: dict[Tensor, float] = {}

    def last_step(self, weight: Tensor, rule: UpdateRule) -> Tensor | None:
        if weight not in self._last:
            return None
        velocity: Tensor = self._optimizer.state[weight]["momentum_buffer"]
        return as_real(velocity).abs().mul_(self._last[weight] if self._rates else 1.0)

    def of(self, weight: Tensor, rule: UpdateRule, gradient: Tensor) -> Tensor:
        squares = self.squares.get(weight)
        if squares is None:
            return torch.zeros_like(as_real(weight))
        mean = squares / (1 - G ** self._counts[weight])
        rate = 1.0 if self._rates is None else self._rates.largest(weight, rule)
        return mean.sqrt_().add_(EPSILON).mul_(rate)

    def begin(self, live: Live, rules: Rules) -> None:
        self._begun = _stepped(live, rules)
        if self._rates is not None:
            self._rates.see(live, rules)

    def end(self, live: Live, rules: Rules) -> None:
        self._last, self._begun = self._begun, {}
        for weight in live.values():
            velocity = self._optimizer.state[weight].get("momentum_buffer")
            if velocity is not None:
                velocity = as_real(velocity)
                self._counts[weight] = self._counts.get(weight, 0) + 1
                squares = self.squares.setdefault(weight, torch.zeros_like(velocity))
                squares.mul_(G).addcmul_(velocity, velocity, value=1 - G)


class _OfGradients(_Counted):
    _rates: _Rates

    def __init__(self, outlook: OptimizerView, step_every: int) -> None:
        super().__init__(_Rates(outlook))
        self._step_every = step_every

    def of(self, weight: Tensor, rule: UpdateRule, gradient: Tensor) -> Tensor:
        memory, own = float(G ** (1 / self._step_every)), gradient * self._step_every
        squares = self.squares.setdefault(weight, torch.zeros_like(gradient))
        squares.mul_(memory).addcmul_(own, own, value=1 - memory)
        self._counts[weight] = count = self._counts.get(weight, 0) + 1
        mean = squares / (1 - memory**count)
        return mean.sqrt_().add_(EPSILON).mul_(self._rates.largest(weight, rule))

    def last_step(self, weight: Tensor, rule: UpdateRule) -> Tensor | None:
        raise AssertionError("without momentum nothing remembers the last step")

    def begin(self, live: Live, rules: Rules) -> None:
        self._rates.see(live, rules)

    def end(self, live: Live, rules: Rules) -> None:
        pass


class _OfAdam(_Counted):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(None)
        self._optimizer = optimizer
        self._begun: dict[Tensor, float] = {}
        self._last: dict[Tensor, float] = {}

    def last_step(self, weight: Tensor, rule: UpdateRule) -> Tensor | None:
        if weight not in self._last:
            return None
        step = self._step(weight, rule, self._last[weight])
        if rule.decoupled and rule.decay:
            # w_new = (1 - lost) w_old - step
            lost = self._last[weight] * rule.decay
            step = step.add_(as_real(weight), alpha=lost).div_(1 - lost)
        return step.abs_()

    def of(self, weight: Tensor, rule: UpdateRule, gradient: Tensor) -> Tensor:
        squares = self.squares.get(weight)
        if squares is None:
            return torch.zeros_like(as_real(weight))
        beta = float(rule.options["betas"][1])
        mean = squares / (1 - beta ** self._counts[weight])
        return mean.sqrt_().add_(EPSILON)

    def begin(self, live: Live, rules: Rules) -> None:
        self._begun = _stepped(live, rules)

    def end(self, live: Live, rules: Rules) -> None:
        self._last, self._begun = self._begun, {}
        for name, weight in live.items():
            if weight not in self._last:
                continue
            step, beta2 = (
                self._step(weight, rules[name], self._last[weight]),
                rules[name].options["betas"][1],
            )
            squares = self.squares.setdefault(weight, torch.zeros_like(step))
            squares.mul_(beta2).addcmul_(step, step, value=1 - beta2)
            self._counts[weight] = self._counts.get(weight, 0) + 1

    def _step(self, weight: Tensor, rule: UpdateRule, lr: float) -> Tensor:
        """The optimizer's last step of a weight at this learning rate, without its decay."""
        state, options = self._optimizer.state[weight], rule.options
        (beta1, beta2), done = options["betas"], float(state["step"])
        spread = (as_real(state["exp_avg_sq"]) / (1 - beta2**done)).sqrt_().add_(options["eps"])
        step: Tensor = (as_real(state["exp_avg"]) / spread).mul_(lr / (1 - beta1**done))
        return step


def _by_name(live: Live, tensors: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[weight] for name, weight in live.items() if weight in tensors}


def _numbers(live: Live, numbers: Mapping[Tensor, float]) -> dict[str, Tensor]:
    """Numbers of weights as tensors that keep every bit."""
    return {
        name: torch.tensor(numbers[weight], dtype=torch.float64)
        for name, weight in live.items()
        if weight in numbers
    }
