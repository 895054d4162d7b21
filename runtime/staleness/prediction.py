"""An optimizer's state + learning rates -> its weights some steps from now.

`step_ahead` predicts the optimizer's own steps without further gradients, `extrapolate` continues
in the direction of its last step. `groups_of` collects the weights that one formula applies to.

Adam, AdamW, NAdam and SOAP, with m and s the moments of a weight p, t the steps taken, and no
further gradients:

    p <- (1 - lr decay) p
    p <- p - lr f(t + i) b1^i m / (sqrt(b2^i s / (1 - b2^(t + i))) + eps)     for i = 1 .. n

where f is 1 / (1 - b1^(t + i)), or NAdam's replacement of it. Coupled decay is a gradient, which
both moments average. FTPipe leaves s unchanged. Then n = 7 steps are up to 0.35% shorter than the
optimizer's own at b2 = 0.999, and up to 16% at b2 = 0.95. Here s decays as m does, so a prediction
equals the optimizer's steps exactly.

The steps of SGD and Sutskever's SGD are linear in the weight p, the velocity v and the first step's
gradient g, with or without weight decay. So n of them make a p + b v + c g with three numbers,
which follow from the optimizer's own recurrence of one step: one pass over memory, however many
steps. Without decay that is FTPipe's p - lr v (u - u^(n+1)) / (1 - u) for momentum u.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ..errors import ScheduleError
from ..optimizers.param_groups import APART, Joint
from ..optimizers.soap import Soap, Sutskever, rotated
from ..tensor_files import as_real
from .weight_versions import Weights

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that an optimizer steps alike, complex ones as real tensors."""

    leaves: list[Tensor]
    """Copies of the weights, which receive the prediction."""
    states: list[State]
    """The optimizer's state of each weight; empty for a weight that was never stepped."""
    gradients: list[Tensor] | None
    """The known gradients of the first step, or None."""
    options: Mapping[str, Any]
    """The options of the optimizer's parameter group."""
    rates: tuple[float, ...]
    """The learning rates of the steps to predict."""

    def read(self, key: str) -> list[Tensor]:
        """A tensor of each weight's state; zeros where it is missing."""
        values = (state.get(key) for state in self.states)
        return [
            torch.zeros_like(leaf) if value is None else value
            for leaf, value in zip(self.leaves, values, strict=True)
        ]

    @property
    def steps_taken(self) -> list[float]:
        """The number of steps of each weight; waits for the device once if a fused optimizer counts
        there."""
        known = [state["step"] for state in self.states if state]
        counts = iter(torch.stack(known).tolist() if known else ())
        return [next(counts) if state else 0.0 for state in self.states]

    def without(self, left_out: Sequence[bool]) -> Group:
        """The group without some of its weights."""
        places = [place for place, is_left_out in enumerate(left_out) if not is_left_out]
        return replace(
            self,
            leaves=[self.leaves[place] for place in places],
            states=[self.states[place] for place in places],
            gradients=self.gradients and [self.gradients[place] for place in places],
        )


Formula = Callable[[Group], None]


def groups_of(
    optimizer: Optimizer,
    live: Weights,
    leaves: Weights,
    factors: Sequence[float],
    gradients: Weights | None,
    others: Mapping[str, Sequence[float]],
) -> Iterator[tuple[Optimizer, Group]]:
    """The groups, each with its optimizer. Copies the live weights to the leaves, including weights
    that no optimizer steps."""
    torch._foreach_copy_(list(leaves.values()), list(live.values()))
    names = {id(weight): name for name, weight in live.items()}
    for part in optimizer.parts if isinstance(optimizer, Joint) else (optimizer,):
        for options in part.param_groups:
            base = float(options.get("initial_lr", options["lr"]))
            of_group = others.get(options.get(APART, ""), factors)
            alike: dict[tuple[float, ...], list[Tensor]] = {}
            for weight in options["params"]:
                if (name := names.get(id(weight))) is not None:
                    rates = tuple(base * factor for factor in others.get(name, of_group))
                    alike.setdefault(rates, []).append(weight)
            for rates, weights in alike.items():
                copies = [as_real(leaves[names[id(weight)]]) for weight in weights]
                yield (
                    part,
                    Group(
                        copies,
                        [_real_state(part.state.get(weight, {})) for weight in weights],
                        _gradients([names[id(w)] for w in weights], copies, gradients),
                        options,
                        rates,
                    ),
                )


def _real_state(state: State) -> State:
    return {
        key: as_real(value) if isinstance(value, Tensor) else value for key, value in state.items()
    }


def _gradients(
    names: Sequence[str], leaves: Sequence[Tensor], gradients: Weights | None
) -> list[Tensor] | None:
    if gradients is None:
        return None
    return [
        as_real(gradients[name].resolve_conj()) if name in gradients else torch.zeros_like(leaf)
        for name, leaf in zip(names, leaves, strict=True)
    ]


Tensors = list[Tensor] | tuple[Tensor, ...]
Factors = Callable[[float, Mapping[str, Any], Mapping[str, Any]], Iterator[tuple[float, float]]]
"""Steps taken, a weight's state and its group's options -> for each future step its shares of the
gradient and of the first moment."""


def adam(group: Group) -> None:
    """Adam and AdamW; their options say whether decay is decoupled."""
    _step_ahead(group, _adam_factors)


def nadam(group: Group) -> None:
    """NAdam: its own momentum of each step, the gradient of the step counted twice."""
    _step_ahead(group, _nadam_factors)


def soap(group: Group) -> None:
    """SOAP: AdamW in the current eigenbases, whatever refreshes lie ahead.

    The first gradient of a weight only gives its bases: that step leaves the weight alone.
    """
    fresh = [
        not state and min(leaf.shape) <= group.options["largest"]
        for leaf, state in zip(group.leaves, group.states, strict=True)
    ]
    if any(fresh):
        # Nothing has a direction yet; the steps after the first decay.
        for rate in group.rates[1:]:
            waiting = [leaf for leaf, is_fresh in zip(group.leaves, fresh, strict=True) if is_fresh]
            torch._foreach_mul_(waiting, 1 - rate * group.options["weight_decay"])
        group = group.without(fresh)
        if not group.leaves:
            return
    # Decay shrinks weights and what was added to them alike, so both can be kept apart.
    turned = replace(
        group,
        leaves=[torch.zeros_like(leaf) for leaf in group.leaves],
        states=[
            {**state, "exp_avg": rotated(state["exp_avg"], state)} if state else state
            for state in group.states
        ],
        gradients=group.gradients
        and [rotated(g, s) for g, s in zip(group.gradients, group.states, strict=True)],
        options={**group.options, "decoupled_weight_decay": True},
    )
    _step_ahead(turned, _adam_factors)
    for rate in group.rates:
        torch._foreach_mul_(group.leaves, 1 - rate * group.options["weight_decay"])
    moved = [rotated(d, s, back=True) for d, s in zip(turned.leaves, group.states, strict=True)]
    torch._foreach_add_(group.leaves, moved)


def adam_direction(group: Group) -> None:
    """p - m' / (sqrt(s') + eps) for each learning rate, with bias-corrected m' and s'."""
    beta1, beta2 = group.options["betas"]
    # A weight that was never stepped has neither moments nor a bias.
    counts = [max(1.0, steps) for steps in group.steps_taken]
    spread = torch._foreach_sqrt(group.read("exp_avg_sq"))
    torch._foreach_div_(spread, [sqrt(1 - beta2**steps) for steps in counts])
    torch._foreach_add_(spread, group.options["eps"])
    rate = sum(group.rates)
    scales = [-rate / (1 - beta1**steps) for steps in counts]
    torch._foreach_addcdiv_(group.leaves, group.read("exp_avg"), spread, scales)


def _step_ahead(group: Group, factors: Factors) -> None:
    (beta1, beta2), options = group.options["betas"], group.options
    decay, is_decoupled = options["weight_decay"], options.get("decoupled_weight_decay", False)
    first: Tensors = group.read("exp_avg")
    second: Tensors = group.read("exp_avg_sq")
    # Both moments are these times a power of their beta, until there is a gradient to average.
    kept1 = kept2 = 1.0
    roots = torch._foreach_sqrt(second)
    counts = group.steps_taken
    steps_of_weights = [
        factors(steps, state, options) for steps, state in zip(counts, group.states, strict=True)
    ]
    for ahead, rate in enumerate(group.rates, 1):
        gradients: Tensors | None = group.gradients if ahead == 1 else None
        if decay and is_decoupled:
            torch._foreach_mul_(group.leaves, 1 - rate * decay)
        elif decay:
            decayed = torch._foreach_mul(group.leaves, decay)
            gradients = torch._foreach_add(decayed, gradients) if gradients else decayed
        kept1, kept2 = kept1 * beta1, kept2 * beta2
        if gradients is not None:
            first = torch._foreach_mul(first, kept1)
            torch._foreach_add_(first, gradients, alpha=1 - beta1)
            second = torch._foreach_mul(second, kept2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            kept1 = kept2 = 1.0
            roots = torch._foreach_sqrt(second)
        spread = torch._foreach_mul(
            roots, [sqrt(kept2 / (1 - beta2 ** (steps + ahead))) for steps in counts]
        )
        torch._foreach_add_(spread, options["eps"])
        of_gradient, of_first = zip(*map(next, steps_of_weights), strict=True)
        if gradients is not None and any(of_gradient):
            scales = [-rate * factor for factor in of_gradient]
            torch._foreach_addcdiv_(group.leaves, gradients, spread, scales)
        scales = [-rate * factor * kept1 for factor in of_first]
        torch._foreach_addcdiv_(group.leaves, first, spread, scales)


def _adam_factors(
    steps: float, state: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[float, float]]:
    while True:
        steps += 1
        yield 0.0, 1 / (1 - options["betas"][0] ** steps)


def _nadam_factors(
    steps: float, state: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[float, float]]:
    def momentum(step: float) -> float:
        decayed = 0.96 ** (step * options["momentum_decay"])
        return float(options["betas"][0] * (1 - 0.5 * decayed))

    product = float(state.get("mu_product", 1.0))
    while True:
        steps += 1
        product *= momentum(steps)
        later = momentum(steps + 1)
        yield (1 - momentum(steps)) / (1 - product), later / (1 - product * later)


Combination = tuple[float, float, float]
"""The shares of a weight, of its velocity and of its gradient."""

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
    orthogonalized (without Nesterov, v).

    Without gradients v keeps its direction, so every step has the same O: a prediction needs one
    orthogonalization, two with a gradient. O and not v is the future step; predictions by v are
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
    directions = [orthogonal(first, options)]
    if steps > 1:
        same = directions[0] if gradient is None else orthogonal(velocity, options)
        directions += [same] * (steps - 1)
    return directions


def orthogonal(matrix: Tensor, options: Any) -> Tensor:
    """The matrix with all singular values close to one, as Muon's options say."""
    return _zeropower_via_newtonschulz(
        matrix, options["ns_coefficients"], options["ns_steps"], options["eps"]
    )


def _combine(
    group: Group,
    step: Callable[[Combination, Combination, Combination, float], tuple[Combination, Combination]],
) -> None:
    """Takes the group's steps on combinations, then applies the resulting combination to its
    tensors."""
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


_STEPS: dict[type[Optimizer], Formula] = {
    SGD: sgd,
    Sutskever: sutskever,
    Adam: adam,
    AdamW: adam,
    NAdam: nadam,
    Muon: muon,
    Soap: soap,
}
_DIRECTIONS: dict[type[Optimizer], Formula] = {
    SGD: sgd_direction,
    Sutskever: sutskever_direction,
    Adam: adam_direction,
    AdamW: adam_direction,
    NAdam: adam_direction,
}


def step_ahead(
    optimizer: Optimizer,
    live: Weights,
    leaves: Weights,
    factors: Sequence[float],
    gradients: Weights | None = None,
    *,
    others: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Writes into the leaves the live weights after steps of the optimizer without gradients, the
    first with `gradients` if given; weights without one have zeros. Does not change the weights or
    the optimizer's state.

    `factors` has the factor on the base learning rate of each step, and `others` the same for
    weights, or parameter groups set `APART`, with other factors. Weight decay applies as in the
    optimizer. Raises ScheduleError for an optimizer without a formula.
    """
    _apply(_STEPS, optimizer, live, leaves, factors, gradients, others)


def extrapolate(
    optimizer: Optimizer,
    live: Weights,
    leaves: Weights,
    factors: Sequence[float],
    *,
    others: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Writes into the leaves the live weights after as many steps as there are `factors`, each in
    the direction of the optimizer's last one, without weight decay; otherwise as `step_ahead`."""
    _apply(_DIRECTIONS, optimizer, live, leaves, factors, None, others)


def _apply(
    formulas: dict[type[Optimizer], Formula],
    optimizer: Optimizer,
    live: Weights,
    leaves: Weights,
    factors: Sequence[float],
    gradients: Weights | None,
    others: Mapping[str, Sequence[float]] | None,
) -> None:
    for part, group in groups_of(optimizer, live, leaves, factors, gradients, others or {}):
        formula = next((formulas[kind] for kind in type(part).__mro__ if kind in formulas), None)
        if formula is None:
            raise ScheduleError(
                f"the steps of {type(part).__name__} cannot be predicted by this method.",
                "Use lwp-w, which needs only the weights.",
            )
        formula(group)
