"""An optimizer and copies of its weights -> the groups that a formula of a prediction is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...optimizers.joint import Joint
from ...versions import Weights

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that an optimizer steps alike.

    `leaves` hold their values, and are given the prediction. `rates` are the learning rates of the
    steps to predict, `gradients` what the first of them has of gradients. A weight that was never
    stepped has an empty state.
    """

    leaves: list[Tensor]
    states: list[State]
    gradients: list[Tensor] | None
    options: Mapping[str, Any]
    rates: tuple[float, ...]

    def read(self, key: str) -> list[Tensor]:
        """A tensor of each weight's state, zeros where there is none yet."""
        found = (state.get(key) for state in self.states)
        return [
            torch.zeros_like(leaf) if value is None else value
            for leaf, value in zip(self.leaves, found, strict=True)
        ]

    @property
    def steps_taken(self) -> list[float]:
        """Of each weight; one wait for the device where a fused optimizer counts on it."""
        known = [state["step"] for state in self.states if state]
        counts = iter(torch.stack(known).tolist() if known else ())
        return [next(counts) if state else 0.0 for state in self.states]

    def without(self, left_out: Sequence[bool]) -> Group:
        """The group less some of its weights."""
        kept = [place for place, is_left_out in enumerate(left_out) if not is_left_out]
        return replace(
            self,
            leaves=[self.leaves[place] for place in kept],
            states=[self.states[place] for place in kept],
            gradients=self.gradients and [self.gradients[place] for place in kept],
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
    """The groups, each with the optimizer that it is of. The leaves get the values of the live
    weights, also those of weights that nobody steps."""
    torch._foreach_copy_(list(leaves.values()), list(live.values()))
    names = {id(weight): name for name, weight in live.items()}
    for part in optimizer.parts if isinstance(optimizer, Joint) else (optimizer,):
        for options in part.param_groups:
            base = float(options.get("initial_lr", options["lr"]))
            alike: dict[tuple[float, ...], list[Tensor]] = {}
            for weight in options["params"]:
                if (name := names.get(id(weight))) is not None:
                    rates = tuple(base * factor for factor in others.get(name, factors))
                    alike.setdefault(rates, []).append(weight)
            for rates, weights in alike.items():
                of_group = [leaves[names[id(weight)]] for weight in weights]
                yield (
                    part,
                    Group(
                        of_group,
                        [part.state.get(weight, {}) for weight in weights],
                        _gradients([names[id(w)] for w in weights], of_group, gradients),
                        options,
                        rates,
                    ),
                )


def _gradients(
    names: Sequence[str], leaves: Sequence[Tensor], gradients: Weights | None
) -> list[Tensor] | None:
    if gradients is None:
        return None
    return [
        gradients[name] if name in gradients else torch.zeros_like(leaf)
        for name, leaf in zip(names, leaves, strict=True)
    ]
