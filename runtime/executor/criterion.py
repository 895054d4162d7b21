"""A criterion outside the model -> the loss of a micro-batch.

The criterion gets the model's outputs in the structure of the model. It runs at the last stage that
makes one of them, to which the others are sent. Parameters and buffers among the outputs are not
sent, nor is any output by a folder of an older version: to read one of these is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, PlanError
from ..formatting import kind_of
from ..plan.plan import Plan
from ..plan.structure import rebuilt
from .run import TARGET, Criterion, LossOf, Values, loss_stage, output_names


def loss_of_stage(plan: Plan, stage: int, criterion: Criterion | None) -> LossOf | None:
    """The function that computes the loss at a stage; None for other stages.

    A criterion runs at the last stage that makes a model output, and may read what this stage
    returns. Raises PlanError if no stage makes the loss.
    """
    if stage != loss_stage(plan):
        return None
    if plan.loss is not None:
        name = plan.loss
        return lambda outputs, fed: outputs[name]
    if criterion is None:
        return None
    others: Values = {
        name: _elsewhere(name, other.index, stage)
        for other in plan.stages
        for name in output_names(plan) & set(other.outputs)
    }

    def loss_of(outputs: Values, fed: Values) -> Tensor:
        result = rebuilt(plan.outputs, {**others, **outputs}, plan.sizes)
        loss = criterion(result, fed[TARGET])
        has_gradient = any(value.requires_grad for value in outputs.values())
        _verify_loss(loss, torch.is_grad_enabled() and has_gradient)
        return loss.reshape(())

    return loss_of


def _elsewhere(name: str, stage: int, here: int) -> Tensor:
    """Stands for an output of another stage: any use of it raises DataError."""

    class Elsewhere(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise DataError(
                f"the criterion reads {name}, an output of the model that stage {stage} makes, but "
                f"it runs at stage {here} and gets what that stage returns.",
                "Compute this part of the loss in forward if it is a parameter or buffer; or "
                "partition the model again: asyncpipe-partition.",
            )

    return torch.empty(0).as_subclass(Elsewhere)


def _verify_loss(loss: Any, needs_gradient: bool) -> None:
    """Raises DataError unless a criterion has returned a trainable loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        is_plain = loss is None or isinstance(loss, int | float)
        kind = repr(loss) if is_plain else kind_of(loss)
        if isinstance(loss, Tensor):
            kind = f"a tensor {list(loss.shape)}{' of complex numbers' * loss.is_complex()}"
        raise DataError(
            f"the criterion returned {kind}, but a loss is a tensor of one real number.",
            "Return for example losses.mean().",
        )
    if needs_gradient and not loss.requires_grad:
        raise DataError(
            "the criterion returned a loss without a gradient, so that nothing would be trained.",
            "Compute the loss without detach(), item() or torch.no_grad().",
        )


def may_draw(criterion: Criterion | None) -> bool:
    """True for a criterion of the user's; those of this package draw no random numbers."""
    own = __name__.partition(".")[0]
    return criterion is not None and getattr(criterion, "__module__", "").partition(".")[0] != own


def check_loss(plan: Plan, criterion: Criterion | None) -> None:
    """Raises PlanError where neither the model nor a criterion makes a loss."""
    if plan.loss is None and criterion is None:
        raise PlanError(
            f"{plan.name} makes no loss of its own, and no criterion was given.",
            "Name one with --criterion, such as cross_entropy.",
        )
