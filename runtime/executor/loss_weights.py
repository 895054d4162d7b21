"""The weight of each micro-batch's loss in the loss of its step.

The loss of a step is that of the plain model for the whole batch, however it is split. It is the
mean over its samples; where a cross entropy leaves out targets, the mean over those that count
(`plan/targets.py`); or a sum. The stage that makes the loss reads the targets of a whole step
before the first backward of the step, and replicas add up their numbers.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..plan.plan import Plan
from ..plan.targets import LABELS, CountedTargets, is_mean
from ..schedule.schedule import Action, Numbering
from .run import TARGET, Criterion, FeedOnce, Program, Values, loss_stage

_IGNORED = -100
"""The value of targets that torch's cross entropy ignores by default."""

_LOOKS = 64
"""The micro-batches in which such targets are looked for."""

SumOfCopies = Callable[[Tensor], Tensor]
"""Adds up a tensor over the ranks with the same stages."""


class LossTargets:
    """The targets that the loss of a pipeline counts: those that the plan names, or those that a
    criterion outside the model is seen to count when it is called first.

    stage: the stage that makes the loss
    counted: these targets; None if the loss is not known to count any
    is_sum: the loss is a sum over samples
    is_open: the criterion has not been called yet
    sum_of_copies: adds up over replicas; None without others

    Arguments:
    warn: called with a warning.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        criterion: Criterion | None,
        *,
        sum_of_copies: SumOfCopies | None = None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.stage = loss_stage(plan)
        self.counted, self.is_sum = plan.targets, plan.loss_is_sum
        self._weights: Tensor | None = None
        if plan.targets is not None and plan.targets.class_weights and self.stage in modules:
            self._weights = modules[self.stage].get_buffer(plan.targets.class_weights)
        self.is_open = plan.loss is None and criterion is not None
        self.sum_of_copies = sum_of_copies
        self._criterion, self._warn = criterion, warn
        self._looks = _LOOKS if plan.loss is not None else 0

    def criterion(self, outputs: Any, target: Tensor) -> Tensor:
        """Calls the criterion."""
        assert self._criterion is not None
        if not self.is_open:
            return self._criterion(outputs, target)
        with _Losses() as losses:
            loss = self._criterion(outputs, target)
        call = _only_call(loss, losses.calls)
        self.is_sum = call is not None and call.arguments["reduction"] == "sum"
        self.counted, self._weights = _counted(call, target)
        self.is_open, self._looks = False, 0 if self.is_sum else _LOOKS * bool(losses.calls)
        return loss

    def of(self, values: Values) -> float | None:
        """The number of a micro-batch's targets that count; None if the loss counts none, or if the
        values have no targets."""
        if self.counted is None or self.counted.input not in values:
            return None
        return self.counted.number(values, self._weights)

    @property
    def weighs(self) -> bool:
        """True unless micro-batches are weighted by their samples alone."""
        return self.is_sum or self.counted is not None

    def of_copies(self, number: float, samples: float) -> tuple[float, float]:
        """The targets that count and the samples of a step in all replicas; no targets if the loss
        of one is known to count none. Once that is so of all, they no longer ask each other."""
        assert self.sum_of_copies is not None
        is_other = not self.weighs and not self.is_open
        content = torch.tensor([number, samples, is_other, 1], dtype=torch.float64)
        total, present, others, copies = self.sum_of_copies(content).tolist()
        if others == copies:
            self.sum_of_copies = None
        return 0.0 if others else float(total), float(present)

    def warn_of_ignored(self, values: Values) -> None:
        """Warns once of targets to be ignored, in the first micro-batches, if the loss is not known
        to be their mean."""
        if self.counted is not None or not self._looks:
            return
        self._looks -= 1
        name = next((name for name in LABELS if name in values), None)
        if name is not None and bool((values[name] == _IGNORED).any()):
            self._looks = 0
            self._warn(
                f"{name} has targets of {_IGNORED}, but the loss is not known to be one cross "
                "entropy of all targets. So micro-batches with few targets count as much as "
                "others, which they do not in the loss of the whole batch. Compute the loss by one "
                "call of torch.nn.functional.cross_entropy (and partition a model with such a loss "
                "again), or give --micro-batches 1."
            )


class _Call(NamedTuple):
    """A call of a loss function of torch."""

    function: Any
    arguments: Mapping[str, Any]
    result: Tensor


class _Losses(TorchFunctionMode):
    """Inside, keeps the calls of loss functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__module__", "") == F.__name__:
            arguments = signature(func).bind(*args, **(kwargs or {}))
            arguments.apply_defaults()
            if "reduction" in arguments.arguments:
                self.calls.append(_Call(func, arguments.arguments, result))
        return result


def _only_call(loss: Any, calls: Sequence[_Call]) -> _Call | None:
    """The call whose result is the loss, if there is no other."""
    if len(calls) != 1 or not isinstance(loss, Tensor) or loss.is_complex():
        return None
    result, own = calls[0].result.detach(), loss.detach()
    if result.numel() != 1 or own.numel() != 1:
        return None
    own = own.to(result).reshape(result.shape)
    # The mean over no targets is not a number.
    return calls[0] if torch.allclose(result, own, 0, 0, equal_nan=True) else None


def _counted(call: _Call | None, target: Tensor) -> tuple[CountedTargets | None, Tensor | None]:
    """The targets that a criterion counts and the weights of their classes, if its loss is the mean
    over all of them, or over all but the first position."""
    if call is None or call.function not in (F.cross_entropy, F.nll_loss):
        return None, None
    read, weights = call.arguments["target"], call.arguments["weight"]
    if not is_mean(call.arguments) or read.is_floating_point():
        return None, None
    for moved in (None, *range(min(2, target.dim()))[::-1]):
        smoothed = weights is not None and bool(call.arguments.get("label_smoothing"))
        counted = CountedTargets(TARGET, call.arguments["ignore_index"], moved, smoothed=smoothed)
        if torch.equal(counted.read(target).flatten().to(read), read.flatten()):
            return counted, None if weights is None else weights.detach()
    return None, None


class LossWeights:
    """The weights of a run's micro-batches at the stage that makes the loss.

    Arguments:
    feed: gives the values of a micro-batch before they are asked for.
    program: the actions of the rank; none of an evaluation, whose losses are not weighted here.
    samples: those of each micro-batch.
    step_samples: the samples of a step, if other ranks run micro-batches of it.
    """

    def __init__(
        self,
        targets: LossTargets,
        feed: FeedOnce,
        numbers: Numbering,
        program: Program,
        samples: Sequence[int],
        step_samples: int | None,
    ) -> None:
        self._targets, self._feed, self._of, self._samples = targets, feed, numbers, samples
        self._divisors = loss_divisors(samples, numbers.of_step, step_samples)
        self._own: dict[int, list[int]] = defaultdict(list)
        for action in program:
            if action.kind == "F" and action.stage == targets.stage:
                self._own[action.index // numbers.of_step].append(action.index)
        self._counts: dict[int, float] = {}
        self._steps: dict[int, tuple[Fraction, Fraction]] = {}

    def before(self, action: Action) -> None:
        """Counts the targets of a step before its first forward at the stage, if it is known by
        then which ones count."""
        if self._own and action.kind == "F" and action.stage == self._targets.stage:
            if not self._samples[action.index] or not self._targets.is_open:
                self._count(action.index, {})

    def weighed(self, index: int, loss: Tensor | None, fed: Values) -> Tensor | None:
        """The loss of a micro-batch so that the mean over the samples of a step is its loss."""
        if loss is None:
            return None
        self._count(index, fed)
        if self._of.in_all > 1:
            self._targets.warn_of_ignored(fed)
        total, present = self._steps[index // self._of.of_step]
        if not total:
            return loss
        if not (count := self._counts[index]):
            return torch.zeros_like(loss)
        factor = (1 if self._targets.is_sum else Fraction(count) / total) * present
        factor /= self._samples[index]
        return loss if factor == 1 else loss * float(factor)

    def reported(self, index: int, loss: Tensor, fed: Values) -> tuple[Tensor, float | None]:
        """The loss of a micro-batch that an observer gets, and the targets that it is the mean of;
        None for the mean over samples."""
        if self._own:
            return loss, None
        if self._targets.is_sum:
            return loss / max(1, self._samples[index]), None
        return loss, self._targets.of(fed)

    def divisor(self, action: Action) -> int | Fraction | None:
        """The divisor of the mean loss of a micro-batch; None if none of its targets count."""
        index = action.index
        total, present = self._steps.get(index // self._of.of_step, (Fraction(0), Fraction(0)))
        if action.stage != self._targets.stage or not total:
            return self._divisors[index]
        if not (count := self._counts.pop(index)):
            return None
        if self._targets.is_sum:
            return 1
        # A step with fewer samples than others counts in proportion.
        share = Fraction(self._divisors[index]) * self._samples[index] / present
        divisor = share * total / Fraction(count)
        # Weights of classes are any numbers of floating point; a tensor is divided by 64 bits.
        return divisor if divisor.denominator < 1 << 32 else Fraction(float(divisor))

    def _count(self, index: int, fed: Values) -> None:
        """Counts the targets of the step of a micro-batch, once; `fed` are its own values."""
        step, targets = index // self._of.of_step, self._targets
        if step in self._steps:
            return
        own = [each for each in sorted(self._own[step]) if self._samples[each]]
        present: float = sum(self._samples[each] for each in own)
        is_whole = len(self._own[step]) == self._of.in_all
        total = 0.0
        is_known = len(own) == 1 and not targets.is_sum if is_whole else not targets.sum_of_copies
        if targets.weighs and not is_known:
            for each in own:
                self._counts[each] = count = self._number(each, fed if each == index else {})
                total += count
        if not is_whole and targets.sum_of_copies is not None:
            total, present = targets.of_copies(total, present)
        self._steps[step] = Fraction(total), Fraction(present)

    def _number(self, index: int, fed: Values) -> float:
        """The weight of a micro-batch: its targets that count, or its samples."""
        if self._targets.is_sum:
            return self._samples[index]
        values = fed or self._feed.unplaced(self._of.number(index))
        return self._targets.of(values) or 0.0


def loss_divisors(
    batches: Sequence[int], step_every: int, step_samples: int | None = None
) -> tuple[int | Fraction, ...]:
    """Divisors of the mean loss of each micro-batch, so that the sum over one step is the mean over
    all its samples; `batches` are the micro-batches' samples, `step_samples` those of a step if it
    has more.

    >>> loss_divisors([4, 4], 2), loss_divisors([3, 1], 2), loss_divisors([4, 4], 2, 16)
    ((2, 2), (Fraction(4, 3), 4), (4, 4))
    """
    divisors: list[int | Fraction] = []
    for first in range(0, len(batches), step_every):
        of_step = batches[first : first + step_every]
        total = step_samples or sum(of_step)
        for samples in of_step:
            parts = max(1, samples)  # one without samples does not run
            divisors.append(Fraction(total, parts) if total % parts else total // parts)
    return tuple(divisors)
