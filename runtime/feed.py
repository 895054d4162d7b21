"""A plan and what the data give -> what a rank's stages read, and how the loss is made.

A feed is asked for whole micro-batches by number. It gives the model inputs that this rank's
stages read; where the loss is made by a criterion outside the model, also the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import sizes_of
from .errors import DataError, PlanError
from .plan import Plan
from .structure import names_in, rebuilt

Values = Mapping[str, Tensor]
Feed = Callable[[int], Values]
"""A micro-batch's number -> the model inputs that this rank's stages read, and the `target`."""
Criterion = Callable[[Any, Tensor], Tensor]
"""The model's output in its own structure and the target -> the loss."""
LossOf = Callable[[Values, Values], Tensor]
"""A stage's outputs and the feed's values -> the loss."""

TARGET = "target"
"""The name under which a feed gives what the criterion compares with."""


def needed_inputs(plan: Plan, stages: Sequence[int], *, criterion: bool = False) -> tuple[str, ...]:
    """What a feed must give on a rank with these stages; with `criterion` the target, last."""
    read = {name for stage in stages for name in plan.stages[stage].inputs}
    names = tuple(spec.name for spec in plan.inputs if spec.name in read)
    has_target = criterion and plan.loss is None and _loss_stage(plan) in stages
    return (*names, TARGET) if has_target else names


def loss_of_stage(plan: Plan, stage: int, criterion: Criterion | None) -> LossOf | None:
    """How a stage makes the loss, None if it does not.

    A criterion works at the last stage that makes a model output; outputs that other stages make
    are None to it. Raises PlanError when no stage makes the loss.
    """
    if stage != _loss_stage(plan):
        return None
    if plan.loss is not None:
        name = plan.loss
        return lambda outputs, fed: outputs[name]
    if criterion is None:
        return None
    absent = dict.fromkeys(output_names(plan))

    def loss_of(outputs: Values, fed: Values) -> Tensor:
        result = rebuilt(plan.outputs, {**absent, **outputs}, plan.sizes)
        loss = criterion(result, fed[TARGET])
        has_gradient = any(value.requires_grad for value in outputs.values())
        _verify_loss(loss, torch.is_grad_enabled() and has_gradient)
        return loss

    return loss_of


def _verify_loss(loss: Any, needs_gradient: bool) -> None:
    """Raises DataError unless a criterion has returned what can be trained with."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise DataError(
            f"the criterion returned {shape}, but a loss is a tensor of one number.",
            "Return for example losses.mean().",
        )
    if needs_gradient and not loss.requires_grad:
        raise DataError(
            "the criterion returned a loss without a gradient, so that nothing would be trained.",
            "Compute the loss without detach(), item() or torch.no_grad().",
        )


def output_names(plan: Plan) -> frozenset[str]:
    """The names of the values in the model's output."""
    return frozenset(names_in(plan.outputs))


class FeedOnce:
    """Asks a feed once for each micro-batch, however many stages of the rank read it."""

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        needed: Sequence[str],
        stages: int,
        device: torch.device,
        rank: int,
    ) -> None:
        self.plan = plan
        self.feed = feed
        self.needed = needed
        self.stages = stages
        self.device = device
        self.rank = rank
        self._kept: dict[int, tuple[int, Values]] = {}

    def __call__(self, micro_batch: int) -> Values:
        """The values of a micro-batch on the device, for the next stage of this rank.

        Raises DataError when the feed lacks one, or has it in a shape that does not fit the plan.
        """
        if not self.needed:
            return {}
        left, values = self._kept.pop(micro_batch, (self.stages, {}))
        if left == self.stages:
            values = self._ask(micro_batch)
        if left > 1:
            self._kept[micro_batch] = left - 1, values
        return values

    def _ask(self, micro_batch: int) -> Values:
        given = self.feed(micro_batch)
        for name in self.needed:
            if name not in given:
                raise DataError(
                    f'Micro-batch {micro_batch} has no "{name}" on rank {self.rank}; '
                    f"it has {', '.join(given) or 'nothing'}."
                )
        sizes_of(self.plan, {name: given[name] for name in self.needed})
        return {name: given[name].to(self.device) for name in self.needed}


def _loss_stage(plan: Plan) -> int:
    """The stage that makes the loss, or after which a criterion does."""
    names = output_names(plan) if plan.loss is None else {plan.loss}
    stages = [spec.index for spec in plan.stages if names & set(spec.outputs)]
    if not stages:
        wanted = " or ".join(sorted(names)) or "an output"
        raise PlanError(f"No stage of {plan.name} makes {wanted}.")
    return stages[-1]
