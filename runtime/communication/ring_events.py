"""The events of rings as text, and the spans of operations for a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..distributed.process_groups import World
from ..executor.instrumented import Activity, Kind, Span, StageMessage
from ..monitoring.gather import clock_offset_s
from ..monitoring.trace import RankTrace, chrome_trace, from_plain, to_plain
from .ring import RingEvent, RingResult
from .session import Session


def event_lines(by_rank: Sequence[Sequence[RingEvent]]) -> list[str]:
    """`[job,rank] phase op : seconds` for the end of each send and wait of the scatter-reduce and
    of the all-reduce, in seconds since the rank began. The job is always 1.

    >>> event_lines([[RingEvent("scatter-reduce", 0, "send", 0.0, 0.25)]])
    ['[1,0] scatter-reduce-0 send : 0.250000']
    """
    lines = []
    for rank, events in enumerate(by_rank):
        for event in events:
            if event.op == "done":
                lines.append(f"[1,{rank}] all-reduce done : {event.end_s:.6f}")
            elif event.phase == "scatter-reduce" and event.op != "reduce":
                name = f"{event.phase}-{event.step} {event.op}"
                lines.append(f"[1,{rank}] {name} : {event.end_s:.6f}")
    return lines


def ring_spans(ring: RingResult, rank: int, ranks: int, number: int) -> Iterator[Span]:
    """The spans of one ring all-reduce of this rank; `number` distinguishes it from others."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for event in ring.events:
        ends = {"send": (rank, after), "wait": (before, rank)}.get(event.op)
        kind: Kind = "other"
        subject: StageMessage | str = f"{event.op} {event.step}"
        if ends is not None:
            kind = "send" if event.op == "send" else "receive"
            subject = StageMessage("message", event.phase, *ends, *ends, event.size_bytes)
        if event.op != "done":
            times = ring.start_s + event.start_s, ring.start_s + event.end_s
            yield Span(Activity(kind, subject, event.step), *times, step=number)


def trace_of(session: Session, spans: Sequence[Span]) -> str:
    """The trace of all ranks, as text for ui.perfetto.dev. Collective."""
    later_s = clock_offset_s(World(session.info, session.group))
    by_rank = session.gathered([to_plain(spans), later_s])
    ranks = [
        RankTrace(rank, (), tuple(from_plain(plain, later_s=offset_s)))
        for rank, (plain, offset_s) in enumerate(by_rank)
    ]
    return json.dumps(chrome_trace(ranks))
