"""What a late gradient should have done by now, at once: spike compensation (Kosson et al.,
"Pipelined Backpropagation at Scale", MLSys 2021, section 3.1).

    v <- m v + g        w <- w - lr (a v + b g),  a = m^D,  b = (1 - m^D) / (1 - m)

A gradient in momentum m moves the weights by 1, m, m^2, .. of itself in the steps after it. One
that comes D steps late has missed the first D of these moves: their sum b is made at its first
step, and the velocity goes on with a of its moves. D is the mean delay of the gradients of a step
(`delays.py`); at 0 the step is SGD's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..versions import WeightVersions
from .optimizer_step import at_step, rules
from .protocol import Staleness


class SpikeCompensation(Staleness):
    """`spike-compensation`: SGD's momentum with more weight on the newest gradient."""

    decides = frozenset({"step"})
    needs = frozenset({"sgd's momentum"})

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        optimizer, version = self.optimizer, weights.version + 1
        taus = {name: self.situation.tau(version, name) for name in weights.live}
        if optimizer is None or not any(taus.values()):
            yield
            return
        rule = rules(optimizer, weights.live)
        before: dict[str, tuple[Tensor, Tensor]] = {}
        rates: dict[str, float] = {}

        @torch.no_grad()
        def remember() -> None:
            before.update(
                {
                    name: (weight.clone(), torch.add(weight.grad, weight, alpha=rule[name].decay))
                    for name, weight in weights.live.items()
                    if weight.grad is not None and taus[name]
                }
            )
            rates.update({name: rule[name].lr for name in before})

        with at_step(optimizer, remember):
            yield
        with torch.no_grad():
            for name, (start, gradient) in before.items():
                live, momentum = weights.live[name], float(rule[name].options["momentum"])
                velocity: Tensor = optimizer.state[live]["momentum_buffer"]
                passed = momentum ** taus[name]
                at_once = (1 - passed) / (1 - momentum)
                move = velocity.mul(passed).add_(gradient, alpha=at_once)
                live.copy_(start.sub_(move, alpha=rates[name]))
