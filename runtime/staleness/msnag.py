"""Prediction by the optimizer's own momentum, which goes on while gradients are on their way.

Multi-step Nesterov accelerated gradient (FTPipe, USENIX ATC 2021; Hakimi et al., "DANA", 2019): a
forward whose backward is n steps later reads the weights that n steps of the optimizer would make
if no gradients came. They do come, but the momentum that is there now is known. Formulas:
`prediction/`.
"""

from __future__ import annotations

import torch

from ..versions import Weights, WeightVersions
from .predicted import Predicted
from .prediction import step_ahead


class Msnag(Predicted):
    """`msnag`: a forward reads what the optimizer makes of the weights without gradients."""

    needs = frozenset({"inertia"})

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None and self.steps.optimizer is not None
        step_ahead(
            self.steps.optimizer,
            weights.live,
            leaves,
            self.steps.expected_lr(steps),
            self.known_gradients(weights),
            others=self.factors_of_shared(steps),
        )

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        """What is known of the coming step's gradients, None where that is nothing."""
        return None


class AggregatedMsnag(Msnag):
    """`aggmsnag`: the first step that is predicted has the gradients gathered for it so far.

    They are read where they are, and stay as they are: weight decay is added to a copy. They are
    clipped as if they were all that the step will have. Of a weight that several stages hold none
    count, for its step has the gradients of an earlier window.
    """

    needs = frozenset()

    def view_name(self, weights: WeightVersions) -> str:
        return f"{super().view_name(weights)} of {weights.gathered}"

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        if not weights.gathered:
            return None
        known = {
            name: weight.grad
            for name, weight in weights.live.items()
            if weight.grad is not None and name not in self.situation.shared
        }
        if not known or self.steps is None:
            return None
        scale = self.scale_of_known(weights)
        scale *= self.steps.clip_factor(list(known.values()), scale)
        if scale == 1.0:
            return known
        return dict(zip(known, torch._foreach_mul(list(known.values()), scale), strict=True))

    def scale_of_known(self, weights: WeightVersions) -> float:
        """What the gradients gathered are multiplied by to stand for those of the whole step."""
        return 1.0
