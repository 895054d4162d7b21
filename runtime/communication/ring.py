"""A ring all-reduce whose two phases can be watched, over any point-to-point links.

The elements are divided into as many chunks as there are ranks; the first `length % ranks` chunks
are one element longer.

    scatter-reduce   in step i, rank r sends chunk r - i, receives chunk r - i - 1, and reduces it
    all-gather       in step i, rank r sends chunk r - i + 1, and receives chunk r - i

Each phase has `ranks - 1` steps. Rank r sends every chunk twice, except for chunks r + 1 and r + 2,
which it sends once: 2 K (N - 1) / N of the K bytes exactly if N divides the length, and together
the ranks send 2 K (N - 1) whatever the length is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..errors import TransportError
from .operation_facts import REDUCERS, EndpointKind

RingPhase = Literal["scatter-reduce", "all-gather"]
RingOp = Literal["send", "wait", "reduce", "done"]
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, function) for name, function in REDUCERS.items()
}
"""Name of a reduction -> the function of two tensors; an average divides the sum afterwards."""


class PointToPoint(Protocol):
    """One rank's links to the others. All tensors are contiguous, and none is empty."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    def send(self, peer: int, tensor: Tensor) -> None:
        """Returns when the tensor may be written to again. May wait until `peer` receives it."""

    def recv(self, peer: int, tensor: Tensor) -> None:
        """Fills the tensor with the next one that `peer` sends."""

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        """Sends and receives at the same time. Returns the moment of `time.perf_counter` at which
        the send had ended."""


@dataclass(frozen=True, slots=True)
class RingEvent:
    """Something that a rank did.

    phase, step: the phase, and the step in it.
    op: send, wait until the chunk has arrived, reduce, or done: the whole all-reduce.
    start_s, end_s: in seconds since this rank began the all-reduce.
    size_bytes: the size of the chunk.
    """

    phase: RingPhase
    step: int
    op: RingOp
    start_s: float
    end_s: float
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RingResult:
    """The result of a ring all-reduce on one rank.

    tensor: the result, of the shape of the input.
    events: in the order in which they ended.
    start_s: the moment of `time.perf_counter` at which this rank began.
    sent_bytes: the bytes of the chunks that this rank sent.
    """

    tensor: Tensor
    events: tuple[RingEvent, ...]
    start_s: float
    sent_bytes: int


def chunk_lengths(length: int, ranks: int) -> list[int]:
    """The elements of each chunk.

    >>> chunk_lengths(7, 3)
    [3, 2, 2]
    """
    return [length // ranks + (chunk < length % ranks) for chunk in range(ranks)]


def ring_elements(length: int, ranks: int, rank: int) -> int:
    """The elements that a rank sends in a ring all-reduce.

    >>> [ring_elements(7, 3, rank) for rank in range(3)]
    [10, 9, 9]
    """
    if ranks == 1:
        return 0
    lengths = chunk_lengths(length, ranks)
    return 2 * length - lengths[(rank + 1) % ranks] - lengths[(rank + 2) % ranks]


def ring_all_reduce(
    links: PointToPoint,
    tensor: Tensor,
    *,
    reduce: str = "sum",
    endpoint: EndpointKind = "concurrent",
    checks_lengths: bool = True,
) -> RingResult:
    """Reduces the tensors of all ranks, and leaves the result on each of them. Collective.

    links: this rank's links; messages go only to the next rank and come from the one before.
    tensor: this rank's share, of any shape and dtype; it is not changed.
    reduce: a name of REDUCTIONS.
    endpoint: `concurrent` sends and receives at the same time. `serial` finishes one before it
        begins the other: even ranks send first, odd ranks receive first.
    checks_lengths: whether the ranks first compare the lengths of their tensors, which takes
        `ranks - 1` messages of 8 bytes. Without it, all must have the same length.

    Raises TransportError if the lengths differ, or if a neighbor is silent.
    """
    if checks_lengths:
        check_lengths(links, tensor.numel(), endpoint)
    ranks, rank = links.ranks, links.rank
    ring = _Ring(links, endpoint)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    chunks = torch.split(result.view(-1), chunk_lengths(result.numel(), ranks))
    arrived = torch.empty_like(chunks[0])
    for step in range(ranks - 1):
        own = chunks[(rank - step - 1) % ranks]
        incoming = arrived[: own.numel()]
        ring.step("scatter-reduce", step, chunks[(rank - step) % ranks], incoming)
        before_s = perf_counter()
        REDUCTIONS[reduce](own, incoming, out=own)
        ring.note("scatter-reduce", step, "reduce", before_s, incoming)
    if reduce == "avg":
        chunks[(rank + 1) % ranks].div_(ranks)
    for step in range(ranks - 1):
        ring.step("all-gather", step, chunks[(rank - step + 1) % ranks], chunks[rank - step])
    ring.note("all-gather", max(0, ranks - 2), "done", ring.start_s, result)
    return RingResult(result, tuple(ring.events), ring.start_s, ring.sent_bytes)


def check_lengths(links: PointToPoint, length: int, endpoint: EndpointKind = "concurrent") -> None:
    """Raises TransportError on every rank unless all have the same length. Collective."""
    ranks, rank = links.ranks, links.rank
    lengths = torch.full((ranks, 1), length)
    ring = _Ring(links, endpoint)
    for step in range(ranks - 1):
        ring.step("all-gather", step, lengths[(rank - step) % ranks], lengths[rank - step - 1])
    having: dict[int, list[int]] = defaultdict(list)
    for of_rank, number in enumerate(lengths.flatten().tolist()):
        having[number].append(of_rank)
    if len(having) > 1:
        groups = [
            f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}: {number}"
            for number, those in having.items()
        ]
        raise TransportError(
            f"an all-reduce needs as many elements on every rank ({'; '.join(groups)}).",
            "Give all ranks tensors of the same length.",
        )


@dataclass
class _Ring:
    """The neighbors of a rank, and what it has done so far."""

    links: PointToPoint
    endpoint: EndpointKind
    start_s: float = field(default_factory=perf_counter)
    events: list[RingEvent] = field(default_factory=list)
    sent_bytes: int = 0

    def step(self, phase: RingPhase, step: int, outgoing: Tensor, incoming: Tensor) -> None:
        """Sends to the next rank, and receives from the one before."""
        links = self.links
        target, source = (links.rank + 1) % links.ranks, (links.rank - 1) % links.ranks
        begin_s = perf_counter()
        if self.endpoint == "concurrent" and outgoing.numel() and incoming.numel():
            sent_s = links.exchange(target, outgoing, source, incoming)
            self.note(phase, step, "send", begin_s, outgoing, sent_s)
            self.note(phase, step, "wait", sent_s, incoming)
        else:
            # Ranks that all sent first would all wait for one that receives.
            order: tuple[RingOp, ...] = ("send", "wait")
            for op in order if links.rank % 2 == 0 else reversed(order):
                begin_s, moved = perf_counter(), outgoing if op == "send" else incoming
                if op == "send" and moved.numel():
                    links.send(target, moved)
                elif op == "wait" and moved.numel():
                    links.recv(source, moved)
                self.note(phase, step, op, begin_s, moved)
        self.sent_bytes += outgoing.nbytes

    def note(
        self,
        phase: RingPhase,
        step: int,
        op: RingOp,
        begin_s: float,
        tensor: Tensor,
        end_s: float | None = None,
    ) -> None:
        """Records something that ended at a moment, or now."""
        end_s = perf_counter() if end_s is None else end_s
        times = begin_s - self.start_s, end_s - self.start_s
        self.events.append(RingEvent(phase, step, op, *times, tensor.nbytes))
