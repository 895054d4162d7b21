"""The operations between ranks, timed as nccl-tests times them.

All ranks begin a call together; its time is that of the slowest rank. Messages and asyncpipe's own
operations run over the transport of the ranks, the others over a backend of torch.distributed. The
events of rings are written as text and as a trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import count
from math import isqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ..distributed.cpu_affinity import allowed_cpus
from ..distributed.process_groups import World
from ..executor.instrumented import Activity, Kind, Span, StageMessage
from ..formatting import write_bytes
from ..monitoring.gather import clock_offset_s
from ..monitoring.trace import RankTrace, chrome_trace, from_plain, to_plain
from ..reports.rendering import write_page
from ..transports.protocol import Transport
from .collectives import Case, Prepared, Wires, prepare, wrong_in
from .endpoints import GroupLinks, TransportLinks
from .operation_facts import DTYPES, OPERATIONS, REDUCERS
from .options import BenchOptions, names_in, sizes_in
from .products import PRODUCTS, Factors, Product, product_bytes
from .ring import PointToPoint, RingEvent, RingResult, ring_elements
from .session import Session
from .support import Prober, cases


@dataclass(frozen=True)
class BenchRow:
    """The times of one operation.

    op, dtype, reduce, count: as in `Case`.
    over: the transport or backend that carried it.
    size_bytes: the bytes of the tensor; of the parts for all ranks, where each has one.
    root: the rank that sends to all or receives from all; -1 if there is none.
    median_us, min_us, p99_us: times of a call, of the slowest rank.
    alg_gb_s: size by median time.
    bus_gb_s: algbw by the share of the size that each link carries; None for products.
    wrong: the elements, or objects, of all ranks that are wrong; None if not compared.
    """

    op: str
    over: str
    size_bytes: int
    count: int
    dtype: str
    reduce: str
    root: int
    median_us: float
    min_us: float
    p99_us: float
    alg_gb_s: float
    bus_gb_s: float | None
    wrong: int | None


@dataclass(frozen=True)
class RingRow:
    """The two phases of a ring all-reduce, in its call of median time.

    size_bytes, dtype, reduce: as in BenchRow.
    scatter_reduce_us, all_gather_us: the time of each phase, of the slowest rank.
    sent: the bytes that each rank sent.
    formula: the bytes that each rank sends by the formula.
    """

    size_bytes: int
    dtype: str
    reduce: str
    scatter_reduce_us: float
    all_gather_us: float
    sent: list[int]
    formula: list[int]


@dataclass(frozen=True)
class ProductRow:
    """The bytes that a product moved.

    op, dtype: as in BenchRow.
    side: the rows and columns of A, B and C.
    sent: the bytes that all ranks sent of each matrix.
    formula: the same by the formula.
    """

    op: str
    dtype: str
    side: int
    sent: dict[str, int]
    formula: dict[str, int]


@dataclass(frozen=True)
class _TimedCall:
    """A timed call: its moments on this rank, and what it returned."""

    begin_s: float
    end_s: float
    returned: Any


def run_rank(session: Session, options: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the bench on one rank; `options` has the fields of BenchOptions."""
    given = BenchOptions(**options)
    # Ranks that share the cores of a host would wait for each other's threads.
    torch.set_num_threads(max(1, len(allowed_cpus()) // session.info.local_ranks))
    if session.group is None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    backend = "nccl" if session.device.type == "cuda" and dist.is_nccl_available() else "gloo"
    prober = Prober(session, backend)
    about = {
        "ranks": session.ranks,
        "hosts": list(session.hosts),
        "backend": backend,
        "transport": session.transport,
        "device": session.device.type,
    }
    if given.support:
        attempts = cases(session, names_in(given.op, OPERATIONS), DTYPES, REDUCERS)
        return about | {"support": [_facts(case, prober.fault(case)) for case in attempts]}
    return about | _BenchRank(session, given, backend).run(prober)


def _facts(case: Case, fault: str) -> dict[str, str]:
    return {"op": case.op, "dtype": case.dtype, "reduce": case.reduce, "fault": fault}


def sized(case: Case, size_bytes: int) -> Case:
    """The case with tensors of about that size: whole elements, parts and square matrices."""
    facts = OPERATIONS[case.op]
    parts = case.ranks if facts.has_parts else 1
    elements = max(1, size_bytes // (case.item_bytes * parts))
    return replace(case, count=isqrt(elements) ** 2 if case.op in PRODUCTS else elements)


class _BenchRank:
    """One rank of a bench. All methods are collective."""

    def __init__(self, session: Session, given: BenchOptions, backend: str) -> None:
        self._session = session
        self._given = given
        self._backend = backend
        self._ops = names_in(given.op, OPERATIONS)
        group = session.group if backend == "gloo" else dist.new_group(backend=backend)
        self._transport: Transport | None = None
        if session.transport == "gloo" and session.device.type == "cpu":
            links: PointToPoint = GroupLinks(group, timeout_s=session.timeout_s)
        else:
            self._transport = session.open_transport()
            links = TransportLinks(self._transport, session.ranks)
        lanes = [
            GroupLinks(dist.new_group(backend=backend), timeout_s=session.timeout_s)
            for _ in range(given.threads * any("threads" in op for op in self._ops))
        ]
        self._wires = Wires(group, links, lanes, given.endpoint)
        self._spans: list[Span] = []
        self._numbers = count()
        self._rows: list[BenchRow] = []
        self._rings: list[RingRow] = []
        self._products: list[ProductRow] = []
        self._ring_events: list[list[RingEvent]] = []

    def run(self, prober: Prober) -> dict[str, Any]:
        given, refused = self._given, []
        self._write_files("", "")  # a file that cannot be written is found before the work
        dtypes, reductions = names_in(given.dtype, DTYPES), names_in(given.reduce, REDUCERS)
        for case in cases(self._session, self._ops, dtypes, reductions):
            if fault := prober.fault(case):
                refused.append(_facts(case, fault))
                continue
            for size_bytes in sizes_in(given.sizes):
                self._time(sized(case, size_bytes))
        if self._transport is not None:
            self._transport.close()
        trace = trace_of(self._session, self._spans) if given.trace else ""
        self._write_files(trace, "".join(f"{line}\n" for line in event_lines(self._ring_events)))
        return {
            "rows": [asdict(row) for row in self._rows],
            "refused": refused,
            "rings": [asdict(row) for row in self._rings],
            "products": [asdict(row) for row in self._products],
        }

    def _write_files(self, trace: str, events: str) -> None:
        for flag, file, text in (
            ("--trace", self._given.trace, trace),
            ("--events", self._given.events, events),
        ):
            if file and self._session.rank == 0:
                write_page(Path(file), text, f"Give {flag} another file.")

    def _time(self, case: Case) -> None:
        prepared = prepare(case, self._wires)
        calls = self._calls(prepared)
        own_s = [call.end_s - call.begin_s for call in calls]
        own_wrong = wrong_in(prepared) if self._given.check else None
        by_rank = self._session.gathered([own_s, own_wrong])
        times_s = [max(slowest) for slowest in zip(*(times for times, _ in by_rank), strict=True)]
        order = sorted(range(len(times_s)), key=lambda call: times_s[call])
        facts = OPERATIONS[case.op]
        median_s = times_s[order[len(order) // 2]]
        rate = case.size_bytes / median_s / 1e9
        self._rows.append(
            BenchRow(
                op=case.op,
                over=self._session.transport if facts.over_links else self._backend,
                size_bytes=case.size_bytes,
                count=case.count,
                dtype=case.dtype,
                reduce=case.reduce,
                root=facts.root,
                median_us=1e6 * median_s,
                min_us=1e6 * times_s[order[0]],
                p99_us=1e6 * times_s[order[math.ceil(0.99 * len(order)) - 1]],
                alg_gb_s=rate,
                bus_gb_s=None if facts.bus_factor is None else rate * facts.bus_factor(case.ranks),
                wrong=sum(wrong for _, wrong in by_rank) if self._given.check else None,
            )
        )
        self._note_spans(case, calls)
        self._note_own(case, calls[order[len(order) // 2]].returned)

    def _calls(self, prepared: Prepared) -> list[_TimedCall]:
        session, warmup = self._session, self._given.warmup
        calls = []
        for number in range(warmup + self._given.iterations):
            prepared.reset()
            session.barrier()
            begin_s = perf_counter()
            returned = prepared.call()
            if session.device.type == "cuda":
                torch.cuda.synchronize(session.device)
            if number >= warmup:
                calls.append(_TimedCall(begin_s, perf_counter(), returned))
        return calls

    def _note_spans(self, case: Case, calls: Sequence[_TimedCall]) -> None:
        if not self._given.trace:
            return
        words = f"{case.op} {case.reduce} {case.dtype} {write_bytes(case.size_bytes)}"
        for call in calls:
            number = next(self._numbers)
            activity = Activity("other", " ".join(words.split()))
            self._spans.append(Span(activity, call.begin_s, call.end_s, step=number))
            if isinstance(call.returned, RingResult):
                self._spans += ring_spans(call.returned, case.rank, case.ranks, number)

    def _note_own(self, case: Case, returned: Any) -> None:
        """Notes what one of asyncpipe's own operations says about itself."""
        session = self._session
        if isinstance(returned, RingResult):
            plain = session.gathered([returned.sent_bytes, [astuple(e) for e in returned.events]])
            events = [[RingEvent(*event) for event in of_rank] for _, of_rank in plain]
            phases = [phase_seconds(of_rank) for of_rank in events]
            scatter_us, gather_us = (1e6 * max(times) for times in zip(*phases, strict=True))
            sent = [sent_bytes for sent_bytes, _ in plain]
            formula = [
                case.item_bytes * ring_elements(case.count, case.ranks, rank)
                for rank in range(case.ranks)
            ]
            self._rings.append(
                RingRow(
                    case.size_bytes, case.dtype, case.reduce, scatter_us, gather_us, sent, formula
                )
            )
            if case.size_bytes == max(row.size_bytes for row in self._rings):
                self._ring_events = events
        elif isinstance(returned, Product):
            by_rank = session.gathered(returned.sent)
            total = {matrix: sum(sent[matrix] for sent in by_rank) for matrix in returned.sent}
            side = isqrt(case.count)
            formula_bytes = product_bytes(
                case.op, Factors(side, side, side, case.torch_dtype), case.ranks
            )
            self._products.append(ProductRow(case.op, case.dtype, side, total, formula_bytes))


def phase_seconds(events: Sequence[RingEvent]) -> tuple[float, float]:
    """The seconds of the scatter-reduce and of the all-gather of one rank."""
    end_s = max(event.end_s for event in events)
    ends = [event.end_s for event in events if event.phase == "scatter-reduce"]
    border_s = max(ends, default=0.0)
    return border_s, end_s - border_s


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
