"""SGD, Sutskever's SGD and Muon, some steps ahead.

The steps of both kinds of SGD are linear in the weight p, the velocity v and the first step's
gradient g, weight decay or not. So n of them make a p + b v + c g with three numbers, which follow
from the optimizer's own recurrence of one step: one pass over memory, however many steps. Without
decay that is FTPipe's p - lr v (u - u^(n+1)) / (1 - u) for momentum u.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from .groups import Group

Combination = tuple[float, float, float]
"""How much of a weight, of its velocity and of its gradient."""

_WEIGHT: Combination = (1.0, 0.0, 0.0)
_VELOCITY: Combination = (0.0, 1.0, 0.0)
_GRADIENT: Combination = (0.0, 0.0, 1.0)
_NOTHING: Combination = (0.0, 0.0, 0.0)


def sgd(group: Group) -> None:
    """torch's SGD: v <- u v + h, p <- p - lr v, with Nesterov p - lr (h + u v); h = g + decay p."""
    momentum, nesterov = group.options["momentum"], group.options.get("nesterov", False)

    def step(
        weight: Combination, velocity: Combination, gradient: Combination, rate: float
    ) -> tuple[Combination, Combination]:
        velocity = _sum((momentum, velocity), (1.0, gradient))
        used = _sum((1.0, gradient), (momentum, velocity)) if nesterov else velocity
        return _sum((1.0, weight), (-rate, used)), velocity

    _combine(group, step)


def sutskever(group: Group) -> None:
    """Sutskever's SGD: v <- u v + lr (g + decay p), p <- p - v."""
    momentum = group.options["momentum"]

    def step(
        weight: Combination, velocity: Combination, gradient: Combination, rate: float
    ) -> tuple[Combination, Combination]:
        velocity = _sum((momentum, velocity), (rate, gradient))
        return _sum((1.0, weight), (-1.0, velocity)), velocity

    _combine(group, step)


def sgd_direction(group: Group) -> None:
    """p - v for each learning rate of torch's SGD."""
    torch._foreach_add_(group.leaves, group.read("momentum_buffer"), alpha=-sum(group.rates))


def sutskever_direction(group: Group) -> None:
    """p - v for each step of Sutskever's SGD, whose v has the learning rates in it."""
    torch._foreach_add_(group.leaves, group.read("momentum_buffer"), alpha=-len(group.rates))


def muon(group: Group) -> None:
    """Muon: v <- u v + (1 - u) g, p <- (1 - lr decay) p - lr size O, where O is (1 - u) g + u v
    made orthogonal (without Nesterov v).

    Without gradients v keeps its direction, so that every step has the same O: a prediction is one
    orthogonalisation, two with a gradient. O and not v is what lies ahead; predictions by v are
    worse than none (marin-community/marin #6431, 2026).
    """
    options, rates = group.options, group.rates
    gradients: Sequence[Tensor | None] = group.gradients or [None] * len(group.leaves)
    decays = [1 - rate * options["weight_decay"] for rate in rates]
    velocities = group.read("momentum_buffer")
    for leaf, velocity, gradient in zip(group.leaves, velocities, gradients, strict=True):
        directions = _muon_directions(velocity, gradient, options, len(rates))
        for direction, rate, decay in zip(directions, rates, decays, strict=True):
            leaf.mul_(decay)
            leaf.add_(direction, alpha=-_adjust_lr(rate, options["adjust_lr_fn"], leaf.shape))


def _muon_directions(
    velocity: Tensor, gradient: Tensor | None, options: Any, steps: int
) -> list[Tensor]:
    momentum, nesterov = options["momentum"], options["nesterov"]
    velocity = velocity * momentum
    if gradient is not None:
        velocity.add_(gradient, alpha=1 - momentum)
    first = velocity * momentum if nesterov else velocity
    if gradient is not None and nesterov:
        first.add_(gradient, alpha=1 - momentum)
    directions = [_orthogonal(first, options)]
    if steps > 1:
        same = directions[0] if gradient is None else _orthogonal(velocity, options)
        directions += [same] * (steps - 1)
    return directions


def _orthogonal(matrix: Tensor, options: Any) -> Tensor:
    return _zeropower_via_newtonschulz(
        matrix, options["ns_coefficients"], options["ns_steps"], options["eps"]
    )


def _combine(
    group: Group,
    step: Callable[[Combination, Combination, Combination, float], tuple[Combination, Combination]],
) -> None:
    """Takes the group's steps on combinations, and then those of its tensors that came out."""
    weight, velocity, gradient = _WEIGHT, _VELOCITY, _GRADIENT
    for rate in group.rates:
        decayed = _sum((1.0, gradient), (group.options["weight_decay"], weight))
        weight, velocity = step(weight, velocity, decayed, rate)
        gradient = _NOTHING
    of_weight, of_velocity, of_gradient = weight
    if of_weight != 1:
        torch._foreach_mul_(group.leaves, of_weight)
    torch._foreach_add_(group.leaves, group.read("momentum_buffer"), alpha=of_velocity)
    if group.gradients is not None:
        torch._foreach_add_(group.leaves, group.gradients, alpha=of_gradient)


def _sum(*terms: tuple[float, Combination]) -> Combination:
    weight, velocity, gradient = (
        sum(factor * combination[place] for factor, combination in terms) for place in range(3)
    )
    return weight, velocity, gradient
