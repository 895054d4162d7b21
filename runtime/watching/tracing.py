"""Some steps of a run -> the spans of all ranks in one file, and the timeline of one step.

The steps are those that `--trace` names: from one to another, or the last so many. While an
asynchronous pipeline drains, ranks have less and less to do, so of such a run those are the last
before a drain, and all ranks are shown from when to when rank 0 makes them. Without `--trace` one
late step is recorded for its timeline alone: of an asynchronous run one before the pipeline drains.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from time import perf_counter

from ..activity import Activities, Span
from ..launching.world import World
from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import RankTrace, chrome_trace, from_plain, measured_timeline, to_plain
from ..training.segments import segments
from ..training.settings import Settings
from .clocks import clock_offset_s


def drawn_steps(settings: Settings, stages: int) -> range:
    """The steps that are recorded where none were asked for, counted from 1: the last, or of an
    asynchronous run two and those by which the last stage is ahead of the first."""
    if not settings.is_async:
        return range(settings.steps, settings.steps + 1)
    ahead = -(-stages // (settings.micro_batches or 1))
    first = max(1, settings.steps - 1 - ahead)
    return range(first, min(first + 1 + ahead, settings.steps) + 1)


def steady_steps(settings: Settings, schedule: Schedule, start: int = 0) -> range:
    """The last so many steps of rank 0, as `--trace` says, with all ranks at work: after the first
    step of a segment and before it drains. Fewer where no segment has so many, and none where
    other steps are meant. The first `start` steps are not made.

    >>> from ..asynchronous import async_1f1b
    >>> settings = Settings(folder="x", schedule="async-1f1b", steps=20, trace="3", eval_every=16)
    >>> steady_steps(settings, async_1f1b(4, 1, step_every=1))
    range(10, 13)
    """
    if not settings.is_async or not settings.trace or "-" in settings.trace:
        return range(0)
    count, ahead = len(settings.trace_steps), steps_ahead(schedule)
    # At a multiple of these a segment begins, so nobody has to count from the first.
    often = settings.eval_every or settings.flush_every or settings.save_every
    if often:
        start = max(start, (settings.steps // often - 2 - 2**14 // often) * often)
    best = range(0)
    for segment in segments(settings, start):
        last = segment.steps.stop - ahead
        steady = range(max(segment.steps.start + 2, last + 1 - count), last + 1)
        if not segment.synchronous and len(steady) >= len(best):
            best = steady
    return best


def steps_ahead(schedule: Schedule) -> int:
    """The most steps that a rank of an asynchronous pipeline is ahead of rank 0."""
    return -(-max(schedule.in_flight) // schedule.step_every)


class Tracing:
    """Records some steps on one rank, of a pipeline with a schedule; none up to `start`, which were
    made before."""

    def __init__(
        self, settings: Settings, activities: Activities, schedule: Schedule, start: int = 0
    ) -> None:
        wanted = settings.trace_steps or drawn_steps(settings, schedule.stages)
        self._shown = steady_steps(settings, schedule, start)
        if self._shown:
            wanted = range(self._shown.start, self._shown.stop + steps_ahead(schedule))
        self._shown_until_s = math.inf
        self._steps = range(max(wanted.start, start + 1), wanted.stop)
        self._is_kept = settings.trace is not None
        self._activities = activities
        self._began_s = self._ended_s = 0.0
        self._taken: list[Span] = []
        self.step_is_over(start)

    def step_is_over(self, step: int) -> None:
        """This rank has made a step; its last action may still be under way."""
        if not self._steps:
            return
        if step == self._steps[0] - 1:
            self._began_s, self._activities.spans = perf_counter(), []
        if self._shown and step == self._shown[-1]:
            self._shown_until_s = perf_counter()
        if step == self._steps[-1]:
            self._ended_s = perf_counter()
        elif step == self._steps[-1] + 1:
            self._stop()

    def write(
        self, world: World, schedule: Schedule, folder: Path
    ) -> tuple[str | None, Timeline] | None:
        """Puts the ranks' spans together: on rank 0 the file `trace.json`, if it was asked for, and
        the timeline of a recorded step (of replicas the first one's); None elsewhere. Collective.
        """
        self._stop()
        own = json.dumps(to_plain(self._taken)).encode()
        offset_s = clock_offset_s(world)
        lengths = [struct.unpack("<qd", part) for part in world.gathered(_length(own, offset_s))]
        longest = max(length for length, _ in lengths)
        parts = world.gathered(own.ljust(longest))
        if world.rank != 0:
            return None
        ranks = [
            RankTrace(
                rank,
                world.grid.stages_of(rank, schedule),
                tuple(from_plain(json.loads(part), later_s=later_s)),
            )
            for rank, (part, (_, later_s)) in enumerate(zip(parts, lengths, strict=True))
        ]
        if self._shown:
            ranks = [rank.between(self._began_s, self._shown_until_s) for rank in ranks]
        timeline = self._one_step(ranks[: len(schedule.ranks)], schedule)
        if not self._is_kept:
            return None, timeline
        file = folder / "trace.json"
        file.write_text(json.dumps(chrome_trace(ranks)), encoding="utf-8")
        return str(file), timeline

    def _one_step(self, ranks: list[RankTrace], schedule: Schedule) -> Timeline:
        if schedule.synchronous:
            return measured_timeline(ranks, self._steps[-1:])
        segments = {span.step for rank in ranks for span in rank.spans}
        timeline = measured_timeline(ranks, segments)
        # A step may be in pieces, around what it waited for.
        ends = {
            event.action: event.end_ms for event in timeline.of_rank(0) if event.action.kind == "S"
        }
        moments = sorted(ends.values())
        if len(moments) < 2:
            return timeline
        return timeline.between(*(moments[-2:] if self._is_kept else moments[:2]))

    def _stop(self) -> None:
        spans, self._activities.spans = self._activities.spans, None
        self._taken += [
            span for span in spans or () if self._began_s <= span.start_s <= self._ended_s
        ]


def _length(content: bytes, offset_s: float) -> bytes:
    return struct.pack("<qd", len(content), offset_s)
