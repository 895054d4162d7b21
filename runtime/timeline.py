"""Events of all ranks, simulated or measured -> how long, how idle, how much in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .schedule import Action, count_in_flight


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one rank, from when to when."""

    rank: int
    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every rank did what; the events of a rank follow one another.

    A rank is idle while it is in no event, from the first start of all to the last end of all.
    """

    name: str
    ranks: int
    events: tuple[Event, ...]

    @property
    def start_ms(self) -> float:
        return min((event.start_ms for event in self.events), default=0.0)

    @property
    def end_ms(self) -> float:
        return max((event.end_ms for event in self.events), default=0.0)

    @property
    def makespan_ms(self) -> float:
        return self.end_ms - self.start_ms

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The part of the makespan that each rank is idle, 0 to 1."""
        return tuple(
            _idle_share(self.of_rank(rank), self.start_ms, self.end_ms)
            for rank in range(self.ranks)
        )

    @property
    def idle_share(self) -> float:
        """The mean of `idle_shares`."""
        return sum(self.idle_shares) / self.ranks

    @property
    def steady_idle_share(self) -> float:
        """The mean idle share from optimizer step to optimizer step, fill and drain left out.

        Counted are the whole steps of each rank after every rank has made its first and before
        any has begun its last forward. Where there are none (a synchronous schedule, or too
        short a segment) it is `idle_share`.
        """
        windows = self._steady_windows()
        if windows is None:
            return self.idle_share
        shares = (
            _idle_share(self.of_rank(rank), begin, end)
            for rank, (begin, end, _) in enumerate(windows)
        )
        return sum(shares) / self.ranks

    @property
    def idle_ms_a_step(self) -> tuple[float, ...]:
        """What each rank is idle in one optimizer step: in the steady state where there is one,
        else the whole timeline's, shared out among its steps."""
        windows = self._steady_windows()
        if windows is None:
            steps = [max(1, len(self._step_ends(rank))) for rank in range(self.ranks)]
            windows = [(self.start_ms, self.end_ms, count) for count in steps]
        return tuple(
            _idle_share(self.of_rank(rank), begin, end) * (end - begin) / steps
            for rank, (begin, end, steps) in enumerate(windows)
        )

    def between(self, begin_ms: float, end_ms: float) -> Timeline:
        """What lies between two moments; what reaches beyond is cut."""
        events = (
            replace(
                event,
                start_ms=max(event.start_ms, begin_ms),
                end_ms=min(event.end_ms, end_ms),
            )
            for event in self.events
            if event.start_ms < end_ms and event.end_ms > begin_ms
        )
        return replace(self, events=tuple(events))

    @property
    def steady_step(self) -> tuple[float, float]:
        """From when to when one optimizer step goes in the steady state: between two step ends
        of the first rank. The whole timeline where there is none, as for a synchronous schedule.
        """
        steps = [self._step_ends(rank) for rank in range(self.ranks)]
        steady_from = max((ends[0] for ends in steps if ends), default=0.0)
        steady_to = min(self._last_forward(rank) for rank in range(self.ranks))
        inside = [end for end in steps[0] if steady_from <= end <= steady_to]
        return (inside[-2], inside[-1]) if len(inside) >= 2 else (self.start_ms, self.end_ms)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage held between forward and backward."""
        stages = 1 + max((event.action.stage for event in self.events), default=-1)
        rows = ([event.action for event in self.of_rank(rank)] for rank in range(self.ranks))
        return count_in_flight(rows, stages)

    def of_rank(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]

    def _step_ends(self, rank: int) -> list[float]:
        """When the optimizer steps of the rank's first stage to step ended."""
        steps = [event for event in self.of_rank(rank) if event.action.kind == "S"]
        return [event.end_ms for event in steps if event.action.stage == steps[0].action.stage]

    def _steady_windows(self) -> list[tuple[float, float, int]] | None:
        """From when to when, and over how many steps, each rank is in the steady state."""
        steps = [self._step_ends(rank) for rank in range(self.ranks)]
        if not all(steps):
            return None
        steady_from = max(ends[0] for ends in steps)
        steady_to = min(self._last_forward(rank) for rank in range(self.ranks))
        inside = [[end for end in ends if steady_from <= end <= steady_to] for ends in steps]
        if any(len(ends) < 2 for ends in inside):
            return None
        return [(ends[0], ends[-1], len(ends) - 1) for ends in inside]

    def _last_forward(self, rank: int) -> float:
        return max(
            (event.start_ms for event in self.of_rank(rank) if event.action.kind == "F"),
            default=self.start_ms,
        )


def _idle_share(events: Iterable[Event], begin_ms: float, end_ms: float) -> float:
    if end_ms <= begin_ms:
        return 0.0
    busy_ms = sum(
        max(0.0, min(event.end_ms, end_ms) - max(event.start_ms, begin_ms)) for event in events
    )
    return max(0.0, 1 - busy_ms / (end_ms - begin_ms))
