"""One call of a pipeline's `run`: what may be said about it, and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypedDict

from torch import Tensor

from .channels import Sizes
from .errors import ScheduleError
from .feed import FeedOnce
from .mailbox import Mailbox
from .program import Program
from .report import Observer, Recorder
from .schedule import Action, Schedule
from .staleness import Passage

May = Callable[[int], bool]


class RunOptions(TypedDict, total=False):
    """What may be said about one run.

    `first_micro_batch` is the number of the schedule's first micro-batch (0). Without `training`
    only the forwards are carried out, in eval mode and without gradients; weights, versions and
    random numbers are left alone. `sizes` are the micro-batches' sizes if not the plan's, for all
    or for each one of the schedule; the loss of one with fewer samples counts less, so that the
    gradient is that of the mean over all samples of a step; `step_samples` says how many these are
    where others do micro-batches of the same step. `record` keeps the time of each action.
    The loss is multiplied by `loss_scale` for backwards. Without `step` a synchronous schedule ends
    before its steps, and the next run adds its gradients to what is there. `may` says whether a
    step, counted from 1 in the schedule, is to be made; once one is not, no later one is, on any
    rank.
    """

    first_micro_batch: int
    observer: Observer | None
    training: bool
    sizes: Sizes | Sequence[Sizes] | None
    step_samples: int | None
    record: bool
    loss_scale: float
    step: bool
    may: May | None


@dataclass
class Run:
    """What the actions of one call share: `split` and `turning` are stages and indices, as the keys
    of what is kept of the weights that forwards `read`."""

    schedule: Schedule
    program: Program
    training: bool
    feed: FeedOnce
    mailbox: Mailbox
    recorder: Recorder
    passages: dict[tuple[int, int], Passage]
    loss_divisors: Sequence[int | Fraction]
    read: dict[tuple[int, int], list[Tensor]]
    split: frozenset[tuple[int, int]]
    turning: frozenset[tuple[int, int]]
    first_micro_batch: int
    loss_scale: float
    may: May | None

    def leaves_out(self, action: Action) -> bool:
        """Whether an action belongs to a step that is not to be made."""
        if self.may is None:
            return False
        is_step = action.kind == "S"
        return not self.may(
            action.index if is_step else action.index // self.schedule.step_every + 1
        )


def sizes_of_each(sizes: Sizes | Sequence[Sizes], schedule: Schedule) -> tuple[Sizes, ...]:
    """Those of every micro-batch of the schedule. Raises ScheduleError where some are missing."""
    if isinstance(sizes, Mapping):
        return (sizes,) * schedule.micro_batches
    if len(sizes) != schedule.micro_batches:
        raise ScheduleError(
            f"The schedule has {schedule.micro_batches} micro-batches, and sizes were given for "
            f"{len(sizes)}."
        )
    return tuple(sizes)
