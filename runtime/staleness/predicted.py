"""What the methods have in common whose forwards read predicted weights."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from ..versions import View, Weights, WeightVersions
from .protocol import Passage, Staleness


class Predicted(Staleness):
    """A forward reads the weights as they are expected to be at its backward."""

    decides = frozenset({"forward", "horizon"})
    expects_rates = True

    def forward_view(self, weights: WeightVersions, passage: Passage) -> View | None:
        return self.look_ahead(weights, passage.horizon)

    def look_ahead(self, weights: WeightVersions, steps: int) -> View | None:
        """The weights some steps from now; None if that is now, or where nothing is stepped."""
        if steps == 0 or self.steps is None or self.steps.optimizer is None:
            return None
        fill = partial(self.predict, weights, steps)
        return View(self.view_name(weights), weights.version, steps, fill)

    def factors_of_shared(self, steps: int) -> dict[str, tuple[float, ...]]:
        """The expected learning rates of the weights that several stages hold."""
        assert self.steps is not None
        return {name: self.steps.expected_lr(steps, name) for name in self.situation.shared}

    def view_name(self, weights: WeightVersions) -> str:
        """What a prediction is made from, besides a version and the number of steps."""
        return type(self).__name__

    @abstractmethod
    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        """Writes the prediction into the leaves."""
