"""The targets that a cross entropy counts.

A cross entropy is the mean over the targets that are not `ignore_index`, often -100. Of padded or
masked text each micro-batch has another number of them, so the loss of a whole batch is the mean of
the losses of its micro-batches weighted by these numbers, not by their samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

LABELS = ("labels", "label", "targets", "target", "y")
"""Usual names of the input with the answers."""


@dataclass(frozen=True, slots=True)
class CountedTargets:
    """The targets whose number weights the loss of a micro-batch.

    input: the input of the model, or `target`, that has them
    ignored: the value of targets that do not count
    moved: the dimension whose first targets the loss does not read, because it compares each result
        with the target after it; None if it reads all
    class_weights: the buffer of the model with the weight of each class; None if all count alike
    smoothed: there are weights and label smoothing, which gives classes without weight a loss too
    """

    input: str
    ignored: int
    moved: int | None = None
    class_weights: str | None = None
    smoothed: bool = False

    def number(self, values: Mapping[str, Tensor], weights: Tensor | None = None) -> float:
        """The number of a micro-batch's targets that count, or the sum of the weights of their
        classes. Raises DataError where the loss cannot be weighted by it.

        >>> from torch import tensor
        >>> CountedTargets("labels", -100, moved=1).number({"labels": tensor([[3, 4, -100]])})
        1
        """
        targets = self.read(values[self.input])
        counts = targets != self.ignored
        if weights is None:
            return int(counts.sum())
        number = float(weights[targets[counts].to(weights.device)].sum())
        if self.smoothed and not number and bool(counts.any()):
            raise DataError(
                f"{self.input} of a micro-batch has only classes of weight 0. Label smoothing "
                "gives these a loss, which divided by their weight is not a number.",
                "Give larger micro-batches, a small weight, or no label smoothing.",
            )
        return number

    def read(self, targets: Tensor) -> Tensor:
        """The targets that the loss reads."""
        if self.moved is None:
            return targets
        return targets.narrow(self.moved, 1, max(0, targets.shape[self.moved] - 1))


def is_mean(arguments: Mapping[str, Any]) -> bool:
    """True for the arguments of a `cross_entropy` or `nll_loss` that is the mean over its targets;
    arguments that are not there have their defaults."""
    is_old = any(arguments.get(name) is not None for name in ("size_average", "reduce"))
    return arguments.get("reduction", "mean") == "mean" and not is_old
