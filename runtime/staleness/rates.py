"""Smaller steps where gradients are late: PipeMare's T1 and the discount by delay.

    pipemare-rate   lr / tau^p, p = 1 - min(step / K, 1)    PipeMare (MLSys 2021), technique T1
    delay-rate      lr / (1 + tau)                          after Zhang et al. (IJCAI 2016)

tau is the mean delay of the gradients that a step uses (`delays.py`). At tau 0, and for T1 at tau
1 and below, the rate is the schedule's. The weight decay of a step shrinks with its rate.
"""

from __future__ import annotations

from .protocol import Staleness


class PipeMareRate(Staleness):
    """`pipemare-rate`: the rate of late stages begins lower, and rises to the schedule's over
    `Steps.annealing_steps` steps."""

    decides = frozenset({"rate"})

    def lr_scale(self, version: int, name: str | None = None) -> float:
        if self.steps is None:
            return 1.0
        power = 1 - min((version - 1) / self.steps.annealing_steps, 1.0)
        return float(max(1.0, self.situation.tau(version, name)) ** -power)


class DelayRate(Staleness):
    """`delay-rate`: the later a stage's gradients, the smaller its steps, throughout."""

    decides = frozenset({"rate"})

    def lr_scale(self, version: int, name: str | None = None) -> float:
        return 1 / (1 + self.situation.tau(version, name))
