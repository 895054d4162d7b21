"""Spans of all ranks -> a trace for ui.perfetto.dev or chrome://tracing, and a timeline.

The trace is Chrome's JSON format: a process a rank, a track for what it computes, its optimizer,
its waits, its data and its sends. A message is an arrow from its send to the wait that took it,
and a bar on a track of the receiver for as long as it was under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .activity import COMPUTING, Activity, Kind, Message, Span
from .schedule import Action
from .timeline import Event, Timeline

TRACKS: dict[str, tuple[Kind, ...]] = {
    "compute": ("F", "B", "W"),
    "optimizer": ("S", "norm"),
    "waits": ("receive", "taken", "meet"),
    "data": ("data",),
    "sends": ("send",),
    "other": ("other",),
}
"""Name of a track -> the kinds of activity on it; its place is its number."""

_TRACK_OF = {kind: place for place, kinds in enumerate(TRACKS.values()) for kind in kinds}
_Key = tuple[int, Message, int]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded, on the clock of rank 0, and the stages that it has."""

    rank: int
    stages: tuple[int, ...]
    spans: tuple[Span, ...]

    def between(self, begin_s: float, end_s: float) -> RankTrace:
        """What began between two moments."""
        spans = tuple(span for span in self.spans if begin_s <= span.start_s <= end_s)
        return replace(self, spans=spans)


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """The trace as a value for `json.dump`; times are microseconds from the first span on."""
    begin_s = min((span.start_s for rank in ranks for span in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += _names(rank)
        events += (_slice(rank.rank, span, begin_s) for span in rank.spans)
    events += _messages(ranks, begin_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def measured_timeline(ranks: Sequence[RankTrace], steps: Iterable[int]) -> Timeline:
    """What the ranks computed in the segments that begin with these steps, in milliseconds; what
    is no computing within a step is left out of it."""
    wanted = set(steps)
    events = []
    for rank in ranks:
        spans = [span for span in rank.spans if span.step in wanted]
        waits = [span for span in spans if span.activity.kind in ("meet", "other")]
        for span in spans:
            if span.activity.kind in COMPUTING and isinstance(span.activity.subject, Action):
                for start_s, end_s in _without(span, waits):
                    event = Event(rank.rank, span.activity.subject, 1e3 * start_s, 1e3 * end_s)
                    events.append(event)
    return Timeline("measured", len(ranks), tuple(events))


def _without(span: Span, waits: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """The pieces of a span that lie in none of the waits."""
    start_s = span.start_s
    for wait in waits:
        if span.start_s <= wait.start_s and wait.end_s <= span.end_s:
            if wait.start_s > start_s:
                yield start_s, wait.start_s
            start_s = wait.end_s
    yield start_s, span.end_s


def _names(rank: RankTrace) -> Iterator[dict[str, Any]]:
    stages = ", ".join(map(str, rank.stages))
    name = f"rank {rank.rank} (stage{'s' if len(rank.stages) > 1 else ''} {stages})"
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
    if isinstance(subject, Message):
        if activity.kind == "receive":
            return f"wait for {subject.name} {activity.index} of stage {subject.source}"
        verb = "send" if activity.kind == "send" else "taken:"
        return f"{verb} {subject.name} {activity.index} to stage {subject.target}"
    return f"data {activity.index}" if activity.kind == "data" else subject


def _facts(span: Span) -> dict[str, Any]:
    subject = span.activity.subject
    if isinstance(subject, Action):
        if subject.kind == "S":
            return {"stage": subject.stage, "step": _step(span, subject)}
        facts = {"stage": subject.stage, "micro_batch": span.first_micro_batch + subject.index}
        # Versions count from 0 in a segment, and steps from 1 in a run.
        version = {} if subject.version is None else {"version": span.step - 1 + subject.version}
        return facts | version
    if isinstance(subject, Message):
        index = span.activity.index
        of_micro_batch = subject.kind in ("activation", "gradient")
        unit = (
            {"micro_batch": span.first_micro_batch + index} if of_micro_batch else {"step": index}
        )
        return unit | {
            "kind": subject.kind,
            "source": subject.source,
            "target": subject.target,
            "bytes": subject.size_bytes,
        }
    if span.activity.kind == "data":
        return {"micro_batch": span.first_micro_batch + span.activity.index}
    return {}


def _step(span: Span, action: Action) -> int:
    return span.step - 1 + action.index


def _messages(ranks: Sequence[RankTrace], begin_s: float) -> Iterator[dict[str, Any]]:
    """Arrows and bars of the messages of which both ends were recorded."""
    sent = dict(_ends(ranks, "send"))
    for number, (key, (rank, wait)) in enumerate(_ends(ranks, "receive")):
        if key not in sent:
            continue
        source_rank, send = sent[key]
        name = f"{key[1].name} {key[2]} to stage {key[1].target}"
        shared = {"name": name, "cat": "message", "id": number}
        begin_us = _us(send.start_s - begin_s)
        # An arrow ends in the slice that lies around its end; the end of a slice is outside it.
        end_us = max(begin_us, _us(wait.end_s - begin_s - min(5e-7, wait.end_s - wait.start_s) / 2))
        sends, waits = _TRACK_OF["send"], _TRACK_OF["receive"]
        yield shared | {"ph": "s", "pid": source_rank, "tid": sends, "ts": begin_us}
        yield shared | {"ph": "f", "bp": "e", "pid": rank, "tid": waits, "ts": end_us}
        under_way = shared | {"cat": "under way", "pid": rank, "tid": waits}
        yield under_way | {"ph": "b", "ts": begin_us, "args": {"bytes": key[1].size_bytes}}
        yield under_way | {"ph": "e", "ts": end_us}


def _ends(ranks: Sequence[RankTrace], kind: Kind) -> Iterator[tuple[_Key, tuple[int, Span]]]:
    """The spans of one end of messages, by what tells a message from all others."""
    for rank in ranks:
        for span in rank.spans:
            subject = span.activity.subject
            if span.activity.kind == kind and isinstance(subject, Message):
                yield (span.step, subject, span.activity.index), (rank.rank, span)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def to_plain(spans: Iterable[Span]) -> list[list[Any]]:
    """Spans as lists for JSON; `from_plain` reads them."""
    plain = []
    for span in spans:
        activity, subject = span.activity, span.activity.subject
        told: Any = subject
        if isinstance(subject, Action):
            told = ["action", subject.stage, subject.kind, subject.index, None, subject.version]
        elif isinstance(subject, Message):
            told = ["message", subject.kind, subject.name, *_numbers(subject)]
        times = [span.start_s, span.end_s, span.first_micro_batch, span.step]
        plain.append([activity.kind, told, activity.index, *times])
    return plain


def from_plain(plain: Iterable[Sequence[Any]], *, later_s: float = 0.0) -> Iterator[Span]:
    """The spans of another rank, whose clock is `later_s` behind."""
    for kind, told, index, start_s, end_s, first_micro_batch, step in plain:
        subject: Action | Message | str = told if isinstance(told, str) else ""
        if not isinstance(told, str):
            of, *parts = told
            subject = Action(*parts) if of == "action" else Message(*parts)
        activity = Activity(kind, subject, index)
        yield Span(activity, start_s + later_s, end_s + later_s, first_micro_batch, step)


def _numbers(message: Message) -> tuple[int, ...]:
    ranks = message.source_rank, message.target_rank
    return message.source, message.target, *ranks, message.size_bytes
