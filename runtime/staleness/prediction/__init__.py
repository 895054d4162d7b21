"""An optimizer's state + learning rates -> where the weights will be some steps from now.

Two predictions: what the optimizer itself would do if no more gradients came (`step_ahead`), and
its last step's direction, gone on in a line (`extrapolate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer

from ...errors import ScheduleError
from ...optimizers.soap import Soap
from ...optimizers.sutskever import Sutskever
from ...versions import Weights
from .groups import Formula, Group, groups_of
from .moments import adam, adam_direction, nadam, soap
from .momentum import muon, sgd, sgd_direction, sutskever, sutskever_direction

__all__ = ["Group", "extrapolate", "step_ahead"]

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
    """Writes into the leaves what the optimizer would make of the live weights in steps without
    gradients, the first with `gradients`, if they are given; a weight that is not among them has
    zeros. Neither the weights nor the optimizer's state are changed.

    `factors` has for each step what the base learning rate is multiplied by, and `others` the same
    for weights of which it is not that. Weight decay goes on.
    Raises ScheduleError for an optimizer without a formula.
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
    the direction of the optimizer's last one, its weight decay left out; else as `step_ahead`."""
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
                f"There is no prediction of this kind for the steps of {type(part).__name__}.",
                "lwp-w, which goes by the weights alone.",
            )
        formula(group)
