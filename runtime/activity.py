"""What a rank does, from moment to moment -> seconds of each kind, spans to draw, and what it does
now.

Activities nest: a step that waits for the gradient norm of all ranks is a `meet` within an `S`.
Every moment belongs to the innermost activity, or to none, which is the executor's own time; so
the seconds of all kinds add up to the time that passed. Another thread may read `now` and
`finished` at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .schedule import Action

Kind = Literal["F", "B", "W", "S", "norm", "data", "receive", "send", "taken", "meet", "other"]

COMPUTING: tuple[Kind, ...] = ("F", "B", "W", "S", "norm")
_WORDS = {"F": "forward", "B": "backward", "W": "backward (weights)"}


@dataclass(frozen=True, slots=True)
class Message:
    """What travels between two stages on different ranks, again and again: `kind` is that of its
    channel."""

    kind: str
    name: str
    source: int
    target: int
    source_rank: int
    target_rank: int
    size_bytes: int

    def describe(self, index: int) -> str:
        """`the activation "hidden" of micro-batch 5`."""
        unit = "micro-batch" if self.kind in ("activation", "gradient") else "step"
        return f'the {self.kind} "{self.name}" of {unit} {index}'


class Activity(NamedTuple):
    """One thing that a rank does: an action, the norm of a stage's gradients before the optimizer
    steps (`norm`), reading micro-batch `index` or the samples that the subject names (`data`), the
    wait for a message to come (`receive`), giving one to the transport (`send`), the wait until it
    was taken (`taken`), the wait for all ranks (`meet`), or something else, in words."""

    kind: Kind
    subject: Action | Message | str = ""
    index: int = 0  # type: ignore[assignment]  # no need of the tuple's method of that name

    @property
    def stage(self) -> int:
        """The stage that computes; -1 where none does."""
        return self.subject.stage if isinstance(self.subject, Action) else -1

    @property
    def peer(self) -> int | None:
        """The rank that is waited for, if it is one."""
        if not isinstance(self.subject, Message):
            return None
        is_receive = self.kind == "receive"
        return self.subject.source_rank if is_receive else self.subject.target_rank

    def __str__(self) -> str:
        """To be put behind a rank.

        >>> print(Activity("B", Action(1, "B", 3), 3))
        is in backward of micro-batch 3 (stage 1)
        """
        if isinstance(self.subject, Action):
            stage = f"(stage {self.subject.stage})"
            if self.kind == "norm":
                return f"takes the norm of gradients {stage}"
            if self.kind == "S":
                return f"is in the optimizer step {stage}"
            return f"is in {_WORDS[self.kind]} of micro-batch {self.index} {stage}"
        if isinstance(self.subject, Message):
            what = self.subject.describe(self.index)
            if self.kind == "receive":
                return f"waits for {what} from rank {self.peer}"
            return f"waits for rank {self.peer} to take {what}"
        if self.kind == "data":
            return f"reads the data of {self.subject or f'micro-batch {self.index}'}"
        return f"waits for all ranks: {self.subject}" if self.kind == "meet" else f"{self.subject}"


NOTHING = Activity("other", "is between two actions")


class Span(NamedTuple):
    """An activity from when to when, in seconds of `time.perf_counter`; `first_micro_batch` is the
    number of its segment's first one, `step` the first step that the segment makes."""

    activity: Activity
    start_s: float
    end_s: float
    first_micro_batch: int = 0
    step: int = 1


Spent = dict[tuple[Kind, int], float]
"""Kind of activity and stage (-1: of none) -> seconds."""


class _During:
    """Begins and ends an activity; one that an exception leaves stays as it was."""

    __slots__ = ("_activities", "_activity")

    def __init__(self, activities: Activities, activity: Activity) -> None:
        self._activities, self._activity = activities, activity

    def __enter__(self) -> None:
        self._activities.begin(self._activity)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._activities.end()


class Activities:
    """What one rank does now, and what it has done.

    An exception leaves what was under way as it was, so that one can tell what it was.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.finished = 0
        self.first_micro_batch, self.step = 0, 1
        self.spans: list[Span] | None = None
        self._clock = clock
        self._open: list[tuple[Activity, float]] = []
        self._spent: Spent = {}
        self._since_s = self._free_since_s = clock()

    @property
    def now(self) -> tuple[Activity, float]:
        """What the rank does, and for how many seconds; for any thread."""
        try:
            activity, start_s = self._open[-1]
        except IndexError:
            activity, start_s = NOTHING, self._free_since_s
        return activity, self._clock() - start_s

    def begin(self, activity: Activity) -> None:
        now_s = self._charge()
        self._open.append((activity, now_s))

    def end(self) -> None:
        """Ends the innermost activity."""
        now_s = self._charge()
        activity, start_s = self._open.pop()
        self._free_since_s = now_s
        self.finished += 1
        if self.spans is not None:
            self.spans.append(Span(activity, start_s, now_s, self.first_micro_batch, self.step))

    def during(self, activity: Activity) -> _During:
        """Within, the rank does this."""
        return _During(self, activity)

    def take(self) -> Spent:
        """The seconds since it was last called, by kind and stage; what belongs to no activity is
        `other`."""
        self._charge()
        spent, self._spent = self._spent, {}
        return spent

    def _charge(self) -> float:
        """Gives the time since the last call to the innermost activity."""
        now_s = self._clock()
        if self._open:
            activity = self._open[-1][0]
            key = activity.kind, activity.stage
        else:
            key = "other", -1
        self._spent[key] = self._spent.get(key, 0.0) + now_s - self._since_s
        self._since_s = now_s
        return now_s
