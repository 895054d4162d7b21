"""Spans of all ranks -> a trace for ui.perfetto.dev or chrome://tracing, and a timeline of one
step.

The trace has Chrome's JSON format: one process per rank, with tracks for computation, optimizer,
waits, data and sends. A message is an arrow from its send to the wait that received it, and a bar
on a track of the receiver while it was in transit.

`--trace` selects the steps: a range, or the last n. While an asynchronous pipeline drains, ranks
run out of work, so there the last n are those before a drain, and all ranks are shown for the time
in which rank 0 runs them. Without `--trace`, one late step is recorded for its timeline alone; in
an asynchronous run it is one before the pipeline drains. Where the stages change during a run, the
trace marks these moments, and the timeline is that of the last ones.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from ..config.asynchronous_options import asynchronous_steps
from ..config.segments import segments
from ..config.settings import RunConfig
from ..distributed.process_groups import World
from ..executor.instrumented import COMPUTING, Activities, Activity, Kind, Span, StageMessage
from ..schedule.schedule import Action, Numbering, Schedule
from ..schedule.simulate import Event, Timeline
from .gather import clock_offset_s

TRACKS: dict[str, tuple[Kind, ...]] = {
    "compute": ("F", "B", "W"),
    "optimizer": ("S", "norm"),
    "waits": ("receive", "taken", "meet", "exchange"),
    "data": ("data",),
    "sends": ("send",),
    "other": ("other",),
    "writing": ("writing",),
}
"""Name of a track -> the kinds of activity on it; its position is its number."""

_TRACK_OF = {kind: place for place, kinds in enumerate(TRACKS.values()) for kind in kinds}
_Key = tuple[int, StageMessage, int]
_WITHIN = ("meet", "exchange", "writing", "other")
"""Kinds of activity that may lie within an optimizer step without being a part of it."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The recorded spans of one rank.

    rank, stages: the rank and its stages; it has none outside of a pipeline.
    spans: the spans, on the clock of rank 0.
    """

    rank: int
    stages: tuple[int, ...]
    spans: tuple[Span, ...]

    def between(self, begin_s: float, end_s: float) -> RankTrace:
        """The spans that began between two moments."""
        spans = tuple(span for span in self.spans if begin_s <= span.start_s <= end_s)
        return replace(self, spans=spans)


def chrome_trace(
    ranks: Sequence[RankTrace], moments: Iterable[tuple[float, str]] = ()
) -> dict[str, Any]:
    """The trace as a value for `json.dump`; times are microseconds since the first span. `moments`
    are what is marked over all ranks, and when."""
    begin_s = min((span.start_s for rank in ranks for span in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += _names(rank)
        events += (_slice(rank.rank, span, begin_s) for span in rank.spans)
    events += _messages(ranks, begin_s)
    for at_s, name in moments:
        place = {"ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": _us(at_s - begin_s)}
        events.append(place | {"name": name, "cat": "phase"})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def measured_timeline(ranks: Sequence[RankTrace], steps: Iterable[int]) -> Timeline:
    """The computation of the ranks in the segments that begin with these steps, in milliseconds;
    waits within an optimizer step are cut out."""
    wanted = set(steps)
    events = []
    for place, rank in enumerate(ranks):
        spans = [span for span in rank.spans if span.step in wanted]
        waits = [span for span in spans if span.activity.kind in _WITHIN]
        for span in spans:
            if span.activity.kind == "cache":  # within a forward
                continue
            if span.activity.kind in COMPUTING and isinstance(span.activity.subject, Action):
                for start_s, end_s in _without(span, waits):
                    event = Event(place, span.activity.subject, 1e3 * start_s, 1e3 * end_s)
                    events.append(event)
    return Timeline("measured", len(ranks), tuple(events))


def _without(span: Span, waits: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """The pieces of a span outside the waits."""
    start_s = span.start_s
    for wait in waits:
        if span.start_s <= wait.start_s and wait.end_s <= span.end_s:
            if wait.start_s > start_s:
                yield start_s, wait.start_s
            start_s = wait.end_s
    yield start_s, span.end_s


def _names(rank: RankTrace) -> Iterator[dict[str, Any]]:
    name = f"rank {rank.rank}"
    if rank.stages:
        stages = ", ".join(map(str, rank.stages))
        name += f" (stage{'s' if len(rank.stages) > 1 else ''} {stages})"
    yield {"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": name}}
    order = {"sort_index": rank.rank}
    yield {"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": order}
    for place, track in enumerate(TRACKS):
        of_track = {"ph": "M", "pid": rank.rank, "tid": place}
        yield of_track | {"name": "thread_name", "args": {"name": track}}
        yield of_track | {"name": "thread_sort_index", "args": {"sort_index": place}}


def _slice(rank: int, span: Span, begin_s: float) -> dict[str, Any]:
    activity = span.activity
    return {
        "ph": "X",
        "name": _name(span),
        "cat": activity.kind,
        "pid": rank,
        "tid": _TRACK_OF[activity.kind],
        "ts": _us(span.start_s - begin_s),
        "dur": _us(span.end_s - span.start_s),
        "args": _facts(span),
    }


def _name(span: Span) -> str:
    activity, subject = span.activity, span.activity.subject
    if isinstance(subject, Action):
        if activity.kind == "norm":
            return f"norm stage {subject.stage}"
        if subject.kind == "S":
            return f"step {_step(span, subject)} stage {subject.stage}"
        return f"{subject.kind}{subject.index} stage {subject.stage}"
    if isinstance(subject, StageMessage):
        if activity.kind == "receive":
            end = f"{subject.unit_of_ends} {subject.source}"
            return f"wait for {subject.name} {activity.index} of {end}"
        verb = "send" if activity.kind == "send" else "taken:"
        return f"{verb} {_message(subject, activity.index)}"
    return f"data {activity.index}" if activity.kind == "data" else subject


def _message(message: StageMessage, index: int) -> str:
    return f"{message.name} {index} to {message.unit_of_ends} {message.target}"


def _facts(span: Span) -> dict[str, Any]:
    subject = span.activity.subject
    if isinstance(subject, Action):
        if subject.kind == "S":
            return {"stage": subject.stage, "step": _step(span, subject)}
        facts = {"stage": subject.stage, "micro_batch": span.numbers.number(subject.index)}
        # Versions count from 0 in a segment, and steps from 1 in a run.
        version = {} if subject.version is None else {"version": span.step - 1 + subject.version}
        return facts | version
    if isinstance(subject, StageMessage):
        index = span.activity.index
        of_micro_batch = subject.kind in ("activation", "gradient")
        unit = {"micro_batch": span.numbers.number(index)} if of_micro_batch else {"step": index}
        return unit | {
            "kind": subject.kind,
            "source": subject.source,
            "target": subject.target,
            "bytes": subject.size_bytes,
        }
    if span.activity.kind == "data":
        return {"micro_batch": span.numbers.number(span.activity.index)}
    return {}


def _step(span: Span, action: Action) -> int:
    return span.step - 1 + action.index


def _messages(ranks: Sequence[RankTrace], begin_s: float) -> Iterator[dict[str, Any]]:
    """Arrows and bars of the messages whose two ends were recorded."""
    sent = dict(_ends(ranks, "send"))
    for number, (key, (rank, wait)) in enumerate(_ends(ranks, "receive")):
        if key not in sent:
            continue
        source_rank, send = sent[key]
        name = _message(key[1], key[2])
        shared = {"name": name, "cat": "message", "id": number}
        begin_us = _us(send.start_s - begin_s)
        # An arrow ends in the slice that contains its end; a slice does not contain its own end.
        end_us = max(begin_us, _us(wait.end_s - begin_s - min(5e-7, wait.end_s - wait.start_s) / 2))
        sends, waits = _TRACK_OF["send"], _TRACK_OF["receive"]
        yield shared | {"ph": "s", "pid": source_rank, "tid": sends, "ts": begin_us}
        yield shared | {"ph": "f", "bp": "e", "pid": rank, "tid": waits, "ts": end_us}
        under_way = shared | {"cat": "under way", "pid": rank, "tid": waits}
        yield under_way | {"ph": "b", "ts": begin_us, "args": {"bytes": key[1].size_bytes}}
        yield under_way | {"ph": "e", "ts": end_us}


def _ends(ranks: Sequence[RankTrace], kind: Kind) -> Iterator[tuple[_Key, tuple[int, Span]]]:
    """The spans of one end of messages, by the identity of the message."""
    for rank in ranks:
        for span in rank.spans:
            subject = span.activity.subject
            if span.activity.kind == kind and isinstance(subject, StageMessage):
                yield (span.step, subject, span.activity.index), (rank.rank, span)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def to_plain(spans: Iterable[Span]) -> list[list[Any]]:
    """Spans as lists for JSON; `from_plain` reads them."""
    plain = []
    for span in spans:
        activity, subject = span.activity, span.activity.subject
        content: Any = subject
        if isinstance(subject, Action):
            content = ["action", subject.stage, subject.kind, subject.index, None, subject.version]
        elif isinstance(subject, StageMessage):
            content = ["message", subject.kind, subject.name, *_numbers(subject)]
        times = [span.start_s, span.end_s, astuple(span.numbers), span.step]
        plain.append([activity.kind, content, activity.index, *times])
    return plain


def from_plain(plain: Iterable[Sequence[Any]], *, later_s: float = 0.0) -> Iterator[Span]:
    """The spans of another rank, whose clock is `later_s` behind."""
    for kind, about, index, start_s, end_s, numbers, step in plain:
        subject: Action | StageMessage | str = about if isinstance(about, str) else ""
        if not isinstance(about, str):
            of, *parts = about
            subject = Action(*parts) if of == "action" else StageMessage(*parts)
        activity = Activity(kind, subject, index)
        yield Span(activity, start_s + later_s, end_s + later_s, Numbering(*numbers), step)


def _numbers(message: StageMessage) -> tuple[int, ...]:
    ranks = message.source_rank, message.target_rank
    return message.source, message.target, *ranks, message.size_bytes


def drawn_steps(config: RunConfig, stages: int) -> range:
    """The steps, counted from 1, that are recorded without `--trace`: the last, or in an
    asynchronous run two and those by which the last stage is ahead of the first, before a
    synchronous end."""
    asynchronous = asynchronous_steps(config, config.steps)
    if not asynchronous:
        return range(config.steps, config.steps + 1)
    ahead, last = -(-stages // config.micro_batches), asynchronous.stop
    first = max(1, last - 1 - ahead)
    return range(first, min(first + 1 + ahead, last) + 1)


def steady_steps(config: RunConfig, schedule: Schedule, start: int = 0) -> range:
    """The last n steps of rank 0, as `--trace` requests, with all ranks at work: after the first
    step of a segment and before it drains. Fewer if no segment has as many; none if `--trace` is a
    range. The run begins after step `start`.
    """
    if not config.is_async or not config.trace or "-" in config.trace:
        return range(0)
    count, ahead = len(config.trace_steps), steps_ahead(schedule)
    asynchronous = asynchronous_steps(config, config.steps)
    start = max(start, asynchronous.start)
    # A segment begins at every multiple of these, so earlier segments can be skipped.
    often = config.eval_every or config.flush_every or config.save_every
    if often:
        start = max(start, (asynchronous.stop // often - 2 - 2**14 // often) * often)
    best = range(0)
    for segment in takewhile(
        lambda each: each.steps.start in asynchronous, segments(config, start)
    ):
        last = segment.steps.stop - ahead
        steady = range(max(segment.steps.start + 2, last + 1 - count), last + 1)
        if len(steady) >= len(best):
            best = steady
    return best


def steps_ahead(schedule: Schedule) -> int:
    """The maximum number of steps by which a rank of an asynchronous pipeline is ahead of
    rank 0."""
    return -(-max(schedule.in_flight) // schedule.step_every)


class Tracing:
    """Records some steps on one rank; only steps after `start`, where the run begins."""

    def __init__(
        self, config: RunConfig, activities: Activities, schedule: Schedule, start: int = 0
    ) -> None:
        wanted = config.trace_steps or drawn_steps(config, schedule.stages)
        self._shown = steady_steps(config, schedule, start)
        if self._shown:
            wanted = range(self._shown.start, self._shown.stop + steps_ahead(schedule))
        self._shown_until_s = math.inf
        self._steps = range(max(wanted.start, start + 1), wanted.stop)
        self._is_kept = config.trace is not None
        self._activities = activities
        self._began_s = self._ended_s = 0.0
        self._taken: list[Span] = []
        self._phases: list[tuple[float, str]] = []
        self._start = start
        self.step_is_over(start)

    def begin_phase(self, config: RunConfig, start: int, about: str) -> None:
        """Continues after a step with other stages of a synchronous run, which may have fewer steps
        than before; `about` describes them."""
        wanted = config.trace_steps or drawn_steps(config, 1)
        has_begun = self._began_s > 0
        first = self._steps.start if has_begun else max(wanted.start, start + 1)
        self._steps, self._start = range(first, wanted.stop), start
        self._phases.append((perf_counter(), about))
        if not has_begun:
            self.step_is_over(start)

    def step_is_over(self, step: int) -> None:
        """Notes that this rank has completed a step; its last action may still be running."""
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
        """Merges the ranks' spans. Collective.

        Returns, on rank 0, the file `trace.json` if requested, and the timeline of a recorded step
        (of the first replica and tensor ranks); None on the other ranks.
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
                () if self._phases else world.grid.stages_of(rank, schedule),
                tuple(from_plain(json.loads(part), later_s=later_s)),
            )
            for rank, (part, (_, later_s)) in enumerate(zip(parts, lengths, strict=True))
        ]
        if self._shown:
            ranks = [rank.between(self._began_s, self._shown_until_s) for rank in ranks]
        first = ranks[:: world.tensor_ranks][: len(schedule.ranks)]
        timeline = self._one_step(first, schedule)
        if not self._is_kept:
            return None, timeline
        file = folder / "trace.json"
        moments = [each for each in self._phases if self._began_s <= each[0] <= self._ended_s]
        file.write_text(json.dumps(chrome_trace(ranks, moments)), encoding="utf-8")
        return str(file), timeline

    def _one_step(self, ranks: list[RankTrace], schedule: Schedule) -> Timeline:
        if schedule.synchronous:
            last = self._steps[-1:]
            return measured_timeline(ranks, last if self._start in range(last.start) else ())
        segments = {span.step for rank in ranks for span in rank.spans}
        timeline = measured_timeline(ranks, segments)
        # A step may be in pieces, around its waits.
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
