"""Metrics of every rank, step by step -> records on rank 0, without a barrier; and clock offsets.

After each step a rank sends a few numbers to rank 0 and continues; a thread of rank 0 receives them
in the order of steps. So monitoring never delays an asynchronous pipeline.

Clocks: `time.perf_counter` is one clock for all processes of a Linux host. Between hosts a rank
asks rank 0 for its time repeatedly, as NTP does, and uses the answer with the shortest round trip,
assuming that rank 0 read its clock halfway. The error is at most half of that round trip.
"""

from __future__ import annotations

import hashlib
import math
import queue
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.process_groups import World
from ..errors import TransportError
from ..executor.instrumented import CACHE_FIGURES, COMPUTING, PURPOSES, Kind, Spent
from ..executor.weight_binding import Gap
from ..schedule.asynchronous import Delays
from ..staleness.weight_versions import LedgerEntry

_UNDER_WAY = 64


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's metrics of one step; NaN where unknown.

    loss: its replica's part of the step's loss.
    optimizer_s: seconds in optimizers, without time in which other processes had its core.
    mem_bytes, base_bytes: peak memory, and the part of it from before the rank's stages were
        loaded.
    loss_scale: the loss scale of the next step.
    skipped: the number of skipped steps so far.
    passages: the backwards of the step's micro-batches at the rank's stages.
    delays, worst_delay: the sum and the maximum of their delays by the ledger.
    unexpected: those at other versions than the closed form of the schedule gives.
    waiting_s, sending_s, data_s, overhead_s, exchange_s, writing_s: idle seconds since its last
        step, by reason.
    summed: the elements of its gradients that were summed over replicas; 0 on all but the first of
        several replicas.
    asked, hits, taken_bytes: the figures of a cache since its last step, as in CACHE_FIGURES.
    sent: the bytes that it sent since its last step, by purpose as in PURPOSES.
    squares: for each stage the squared norm of its gradients; tied parameters count at their owner,
        and all count at the first of several replicas.
    gaps, weights: for each stage sums over the same passages, where measured: of the squared norms
        of the difference between a forward's weights and the live ones, and of the live ones.
    stage_s: seconds since its last step in actions of each kind and stage, by kind as in COMPUTING.
    """

    step: float
    loss: float = math.nan
    optimizer_s: float = 0.0
    mem_bytes: float = 0.0
    base_bytes: float = 0.0
    loss_scale: float = 1.0
    skipped: float = 0.0
    passages: float = 0.0
    delays: float = 0.0
    worst_delay: float = 0.0
    unexpected: float = 0.0
    waiting_s: float = 0.0
    sending_s: float = 0.0
    data_s: float = 0.0
    overhead_s: float = 0.0
    exchange_s: float = 0.0
    writing_s: float = 0.0
    summed: float = 0.0
    asked: float = 0.0
    hits: float = 0.0
    taken_bytes: float = 0.0
    sent: tuple[float, ...] = (0.0,) * len(PURPOSES)
    squares: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    stage_s: tuple[float, ...] = ()

    @property
    def busy_s(self) -> float:
        return sum(self.stage_s)

    @property
    def idle_s(self) -> float:
        waits_s = self.waiting_s + self.exchange_s
        return waits_s + self.sending_s + self.data_s + self.overhead_s + self.writing_s

    @property
    def wall_s(self) -> float:
        return self.busy_s + self.idle_s

    def caching(self, cached: Mapping[str, int]) -> RankFigures:
        """The same with the figures of a cache."""
        asked, hits, taken_bytes = (cached.get(name, 0) for name in CACHE_FIGURES)
        return replace(self, asked=asked, hits=hits, taken_bytes=taken_bytes)

    def to_list(self) -> list[float]:
        numbers = astuple(self)[:_NAMED]
        return [*numbers, *self.sent, *self.squares, *self.gaps, *self.weights, *self.stage_s]

    @classmethod
    def of_list(cls, values: Sequence[Any]) -> RankFigures:
        """The inverse of `to_list`."""
        end = _NAMED + len(PURPOSES)
        stages = (len(values) - end) // _OF_STAGES
        of_stages = [tuple(values[at : at + stages]) for at in range(end, end + 3 * stages, stages)]
        squares, gaps, weights = of_stages if stages else ((), (), ())
        return replace(
            cls(*values[:_NAMED]),
            sent=tuple(values[_NAMED:end]),
            squares=squares,
            gaps=gaps,
            weights=weights,
            stage_s=tuple(values[end + 3 * stages :]),
        )


_NAMED = len(fields(RankFigures)) - 5
"""The number of fields that are one number."""
_OF_STAGES = 3 + len(COMPUTING)
"""The numbers of each stage."""

_THE_END = RankFigures(step=-1)
"""Sent in place of a step's metrics by a rank that makes no more steps."""


def figures_of(spent: Spent, sent: Mapping[str, int], stages: int, **known: Any) -> RankFigures:
    """The metrics of a step with these times and bytes."""

    def of(kind: Kind) -> float:
        return spent.get((kind, -1), 0.0)

    return RankFigures(
        **known,
        waiting_s=of("receive") + of("taken") + of("meet"),
        sending_s=of("send"),
        data_s=of("data"),
        overhead_s=of("other"),
        exchange_s=of("exchange"),
        writing_s=of("writing"),
        sent=tuple(float(sent.get(purpose, 0)) for purpose in PURPOSES),
        stage_s=tuple(spent.get((kind, j), 0.0) for kind in COMPUTING for j in range(stages)),
    )


def lateness(
    passages: Sequence[LedgerEntry], gaps: Mapping[int, Sequence[Gap]], expected: Delays
) -> dict[str, Any]:
    """The metrics of a step about late gradients, by their names in RankFigures.

    gaps: those of each stage.
    """
    stages = range(len(expected.ahead))
    return {
        "passages": len(passages),
        "delays": sum(entry.delay for entry in passages),
        "worst_delay": max((entry.delay for entry in passages), default=0),
        "unexpected": sum(not expected.has(*astuple(entry)) for entry in passages),
        "gaps": tuple(sum(float(gap.difference) for gap in gaps.get(j, ())) for j in stages),
        "weights": tuple(sum(float(gap.live) for gap in gaps.get(j, ())) for j in stages),
    }


class Gather:
    """Sends metrics from every rank; on rank 0, `take` returns those of all ranks for each step."""

    def __init__(self, world: World, stages: int) -> None:
        self._world = world
        self._numbers = _NAMED + len(PURPOSES) + _OF_STAGES * stages
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiver: threading.Thread | None = None
        self._own: queue.SimpleQueue[RankFigures] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[list[RankFigures]] = queue.SimpleQueue()
        self._to_send = 0

    def start(self, steps: int) -> None:
        """Starts receiving the metrics of `steps` steps."""
        self._to_send = steps
        if self._world.rank == 0:
            self._receiver = threading.Thread(target=self._receive, args=(steps,), daemon=True)
            self._receiver.start()

    def send(self, figures: RankFigures) -> None:
        """Sends this rank's metrics without blocking."""
        self._to_send -= 1
        self._pass_on(figures)

    def _pass_on(self, figures: RankFigures) -> None:
        if self._world.rank == 0:
            self._own.put(figures)
            return
        content = torch.zeros(self._numbers, dtype=torch.float64)
        values = figures.to_list()
        content[: len(values)] = torch.tensor(values, dtype=torch.float64)
        work = dist.isend(content, dst=0, group=self._world.metrics)
        assert work is not None
        self._under_way.append((work, content))
        if len(self._under_way) > _UNDER_WAY:
            self._under_way.popleft()[0].wait()

    def take(self, *, wait_s: float = 0.0) -> list[RankFigures] | None:
        """The metrics of the next step, one entry per rank, or None if some are still missing.

        With `wait_s`, waits for them and raises TransportError after that time.
        """
        try:
            return self._complete.get(timeout=wait_s) if wait_s else self._complete.get_nowait()
        except queue.Empty:
            if wait_s:
                raise TransportError(
                    f"rank 0 timed out after {wait_s:g} s waiting for the metrics of the others."
                ) from None
            return None

    def finish(self) -> None:
        """Waits until all messages that this rank sends or receives have arrived. All ranks have
        made the same number of steps, which may be smaller than the announced one."""
        if self._to_send:
            self._pass_on(_THE_END)
        if self._receiver is not None:
            self._receiver.join()
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _receive(self, steps: int) -> None:
        content = torch.zeros(self._numbers, dtype=torch.float64)
        for _ in range(steps):
            figures = [self._own.get()]
            for rank in range(1, self._world.ranks):
                try:
                    dist.recv(content, src=rank, group=self._world.metrics)
                except RuntimeError:
                    return  # The rank is gone, which the pipeline reports.
                figures.append(RankFigures.of_list(content.tolist()))
            if figures[0].step == _THE_END.step:
                return
            self._complete.put(figures)


_ROUNDS = 8


def clock_offset_s(world: World, clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds to add to this rank's clock to get rank 0's. Every rank calls it."""
    hosts = world.gathered(_host())
    if world.control is None:
        return 0.0
    offset_s = 0.0
    for rank in range(1, world.ranks):
        if hosts[rank] != hosts[0]:
            if world.rank == 0:
                _answer(world, rank, clock)
            elif world.rank == rank:
                offset_s = _ask(world, clock)
    return offset_s


def _host() -> bytes:
    """Identifies a running host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.is_file() else str(time.time())
    return hashlib.sha256(name.encode()).digest()


def _answer(world: World, rank: int, clock: Callable[[], float]) -> None:
    content = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        dist.recv(content, src=rank, group=world.control)
        content[0] = clock()
        dist.send(content, dst=rank, group=world.control)


def _ask(world: World, clock: Callable[[], float]) -> float:
    content = torch.zeros(1, dtype=torch.float64)
    answers = []
    for _ in range(_ROUNDS):
        asked_s = clock()
        dist.send(content, dst=0, group=world.control)
        dist.recv(content, src=0, group=world.control)
        got_s = clock()
        answers.append((got_s - asked_s, float(content) - (asked_s + got_s) / 2))
    return min(answers)[1]


def base_bytes(modules: Mapping[int, nn.Module], device: str) -> float:
    """The peak memory of this process without the tensors of these modules."""
    loaded = [tensor for module in modules.values() for tensor in module.state_dict().values()]
    return max(0.0, peak_memory_bytes(device) - sum(int(each.nbytes) for each in loaded))


def peak_memory_bytes(device: str) -> float:
    """The peak memory of this process, or of its tensors on a GPU."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
