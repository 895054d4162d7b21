"""Figures of every rank, step by step -> records on rank 0, without a barrier.

At its step each rank sends a handful of numbers to rank 0 and goes on; on rank 0 a thread takes
them in, in the order of steps. An asynchronous pipeline is not held up by being watched.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from dataclasses import astuple, dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..activity import COMPUTING, Kind, Spent
from ..errors import TransportError
from ..launching.world import World

_UNDER_WAY = 64


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank says about one step; NaN where it does not know.

    `loss` is its replica's part of the step's. `squared_norm` is of the gradients of the rank's
    stages, tied parameters with their owner, all with the first of several replicas.
    `stage_s` are the seconds since its last step in actions of each kind and stage, kind by kind
    as in COMPUTING; the others those in which it was idle, and why. `optimizer_s` were spent in
    optimizers, without time that other processes had its core for. `base_bytes` of `mem_bytes` were
    there before the rank's stages. `loss_scale` is that of the next
    step, `skipped` the number of steps left out so far. `passages` are the backwards
    of the step's micro-batches at the rank's stages, `delays` the sum and `worst_delay` the largest
    of their delays by the ledger, and `unexpected` those at other versions than the closed form's.
    `gap_squared` and `weights_squared` are sums over the same passages, where they were taken: of
    the squared norms of what lies between a forward's weights and the live ones, and of the live
    ones'.
    """

    step: float
    loss: float = math.nan
    squared_norm: float = math.nan
    optimizer_s: float = 0.0
    mem_bytes: float = 0.0
    base_bytes: float = 0.0
    loss_scale: float = 1.0
    skipped: float = 0.0
    passages: float = 0.0
    delays: float = 0.0
    worst_delay: float = 0.0
    unexpected: float = 0.0
    gap_squared: float = 0.0
    weights_squared: float = 0.0
    waiting_s: float = 0.0
    sending_s: float = 0.0
    data_s: float = 0.0
    overhead_s: float = 0.0
    stage_s: tuple[float, ...] = ()

    @property
    def busy_s(self) -> float:
        return sum(self.stage_s)

    @property
    def idle_s(self) -> float:
        return self.waiting_s + self.sending_s + self.data_s + self.overhead_s

    @property
    def wall_s(self) -> float:
        return self.busy_s + self.idle_s

    def to_list(self) -> list[float]:
        return [*astuple(self)[:_NAMED], *self.stage_s]


_NAMED = len(fields(RankFigures)) - 1
"""Fields but for `stage_s`."""

_THE_END = RankFigures(step=-1)
"""What a rank says instead of a step's figures, when it makes no more."""


def figures_of(spent: Spent, stages: int, **known: float) -> RankFigures:
    """The figures of a step in which a rank spent its time so."""

    def of(kind: Kind) -> float:
        return spent.get((kind, -1), 0.0)

    return RankFigures(
        **known,
        waiting_s=of("receive") + of("taken") + of("meet"),
        sending_s=of("send"),
        data_s=of("data"),
        overhead_s=of("other"),
        stage_s=tuple(spent.get((kind, j), 0.0) for kind in COMPUTING for j in range(stages)),
    )


class Gather:
    """`send` on every rank; on rank 0 `take` gives the figures of all ranks for each step."""

    def __init__(self, world: World, stages: int) -> None:
        self._world = world
        self._numbers = _NAMED + len(COMPUTING) * stages
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._receiver: threading.Thread | None = None
        self._own: queue.SimpleQueue[RankFigures] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[list[RankFigures]] = queue.SimpleQueue()
        self._to_send = 0

    def start(self, steps: int) -> None:
        """Begins to take in the figures of `steps` steps."""
        self._to_send = steps
        if self._world.rank == 0:
            self._receiver = threading.Thread(target=self._receive, args=(steps,), daemon=True)
            self._receiver.start()

    def send(self, figures: RankFigures) -> None:
        """Passes this rank's figures on and returns at once."""
        self._to_send -= 1
        self._pass_on(figures)

    def _pass_on(self, figures: RankFigures) -> None:
        if self._world.rank == 0:
            self._own.put(figures)
            return
        content = torch.zeros(self._numbers, dtype=torch.float64)
        told = figures.to_list()
        content[: len(told)] = torch.tensor(told, dtype=torch.float64)
        work = dist.isend(content, dst=0, group=self._world.metrics)
        assert work is not None
        self._under_way.append((work, content))
        if len(self._under_way) > _UNDER_WAY:
            self._under_way.popleft()[0].wait()

    def take(self, *, wait_s: float = 0.0) -> list[RankFigures] | None:
        """The figures of the next step, one entry a rank, or None if some are still missing.

        With `wait_s` they must come within that time, or TransportError is raised.
        """
        try:
            return self._complete.get(timeout=wait_s) if wait_s else self._complete.get_nowait()
        except queue.Empty:
            if wait_s:
                raise TransportError(
                    f"rank 0 waits for the figures of the other ranks ({wait_s:g} s)."
                ) from None
            return None

    def finish(self) -> None:
        """Returns when all that this rank sent has arrived, and all that it was sent. All ranks
        have made equally many steps, which may be fewer than was said."""
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
                    return  # The rank is gone; the pipeline says so.
                told = content.tolist()
                own = RankFigures(*told[:_NAMED])
                figures.append(replace(own, stage_s=tuple(told[_NAMED:])))
            if figures[0].step == _THE_END.step:
                return
            self._complete.put(figures)
