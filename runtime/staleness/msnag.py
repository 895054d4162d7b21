"""Prediction by the optimizer's own momentum, which goes on while gradients are on their way.

Multi-step Nesterov accelerated gradient (FTPipe, USENIX ATC 2021; Hakimi et al., "DANA", 2019): a
forward whose backward is n steps later reads the weights that n steps of the optimizer would make
if no gradients came. They do come, but the momentum that is there now is known. Formulas:
`prediction/`.
"""

from __future__ import annotations

from ..versions import Weights, WeightVersions
from .predicted import Predicted
from .prediction import step_ahead


class Msnag(Predicted):
    """`msnag`: a forward reads what the optimizer makes of the weights without gradients."""

    needs = frozenset({"inertia"})

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None and self.steps.optimizer is not None
        factors = self.steps.expected_lr(steps)
        step_ahead(
            self.steps.optimizer, weights.live, leaves, factors, self.known_gradients(weights)
        )

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        """What is known of the coming step's gradients, None where that is nothing."""
        return None


class AggregatedMsnag(Msnag):
    """`aggmsnag`: the first step that is predicted has the gradients gathered for it so far.

    They are read where they are, and stay as they are: weight decay is added to a copy.
    """

    needs = frozenset()

    def view_name(self, weights: WeightVersions) -> str:
        return f"{super().view_name(weights)} of {weights.gathered}"

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        if not weights.gathered:
            return None
        found = {name: weight.grad for name, weight in weights.live.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}
