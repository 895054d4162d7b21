"""One rank's run -> its checkpoints, when they are due; and where it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..activity import Activities, Activity
from ..errors import PlanError
from ..schedules import ASYNCHRONOUS
from ..training.settings import Settings
from .contents import Rank, Wanted, put, state_of, weights_of
from .finding import Found
from .folders import STATE, Facts
from .resuming import differences
from .saving import Part, Saver


class Checkpoints:
    """The checkpoints of one rank's run; every rank has one, and all call the same methods. There
    is one of `first_step` already; -1 of a new run."""

    def __init__(
        self,
        settings: Settings,
        rank: Rank,
        saver: Saver,
        activities: Activities,
        *,
        unused: Mapping[str, Tensor],
        length: int,
        first_step: int,
    ) -> None:
        self._settings, self._rank, self._saver = settings, rank, saver
        self._activities, self._unused, self._length = activities, unused, length
        self._saved = first_step

    def is_due(self, step: int) -> bool:
        """Whether one is to be written after a step: every so many, and after the last."""
        every = self._settings.save_every
        return every > 0 and (step % every == 0 or step == self._settings.steps)

    def save(
        self,
        step: int,
        *,
        samples: int,
        schedule: str,
        trainer: Mapping[str, Any],
        evaluation: float | None,
        seconds: float,
    ) -> None:
        """Copies what there is after a step, and has it written. Raises CheckpointError where the
        one before could not be."""
        if step == self._saved:
            return
        self._saved = step
        self._saver.finish()
        rank, world = self._rank, self._rank.world
        with self._activities.during(Activity("other", "copies what a checkpoint will have")):
            part = Part(weights_of(rank, self._unused), state_of(rank))
        facts = Facts(
            plan=rank.plan.name,
            step=step,
            samples=samples,
            length=self._length,
            stages=len(rank.plan.stages),
            ranks=world.ranks,
            replicas=world.replicas,
            schedule=schedule,
            evaluation=evaluation,
            seconds=seconds,
            trainer=trainer,
            settings=asdict(self._settings),
        )
        self._saver.save(part, facts)

    def poll(self) -> None:
        """Tells of what was written meanwhile."""
        self._saver.poll()

    def finish(self) -> None:
        """Waits until the last one is on disk. Raises CheckpointError."""
        self._saver.finish()


def resume(rank: Rank, found: Found) -> None:
    """Lets a rank whose stages have the checkpoint's weights go on after its step. Raises
    CheckpointError where its files cannot be read."""
    from .storage import read_tensors

    state = read_tensors(found.path / STATE, Wanted(rank))
    facts = found.facts
    was_async = facts.settings.get("schedule") in ASYNCHRONOUS
    each_has_own = rank.is_async and was_async and facts.stages == len(rank.plan.stages)
    put(rank, state, facts.step, each_has_own=each_has_own)


def check_steps(settings: Settings, found: Found) -> None:
    """Raises PlanError for a checkpoint that is beyond the run's last step."""
    if found.facts.step > settings.steps:
        raise PlanError(
            f"{found.path} is of step {found.facts.step}, and the run has {settings.steps} steps.",
            f"--steps {found.facts.step} or more, or --init-from {found.path} for a new run.",
        )


def describe_resumption(found: Found, settings: Settings, length: int) -> list[str]:
    """Where a run goes on, in data of `length` samples, and what is other than it was before."""
    facts = found.facts
    told = [
        f"after step {facts.step} of {settings.steps}, {facts.samples:,} samples "
        f"({facts.samples / length:.2f} epochs) · {found.path}"
    ]
    if changed := differences(facts.settings, settings):
        told.append(f"with {', '.join(changed)}")
    if facts.length != length:
        told.append(
            f"the data have {length:,} samples, and had {facts.length:,}: in another order, so "
            "that some come twice in this epoch and some not at all"
        )
    return told
