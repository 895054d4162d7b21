"""What every rank does when nothing goes on any more -> who waits for whom, in a sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..activity import NOTHING
from ..errors import AsyncPipeError

_PAST = {
    "is": "was",
    "waits": "waited",
    "reads": "read",
    "takes": "took",
    "loads": "loaded",
    "prepares": "prepared",
    "writes": "wrote",
    "sends": "sent",
    "compares": "compared",
    "tells": "told",
}


class StallError(AsyncPipeError):
    """A run in which no rank gets anything done any more."""

    comes_again = False


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank says about itself: what it does (`kind` and, to be put behind its number,
    `text`), which rank it waits for, and for how long it has done so; `finished` counts what it
    has done so far, the last of it `idle_s` ago."""

    rank: int
    pid: int
    host: str
    kind: str
    text: str
    peer: int | None
    for_s: float
    finished: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Sighting:
    """A rank's state as another sees it, `silent_s` after it was told. `trouble` is what the
    system says of a process that tells nothing any more, such as `is stopped`."""

    state: RankState
    silent_s: float = 0.0
    trouble: str = ""

    @property
    def idle_s(self) -> float:
        """How long the rank has finished nothing, as far as one can see."""
        return self.state.idle_s + self.silent_s

    @property
    def is_waiting(self) -> bool:
        return not self.trouble and self.state.kind in ("receive", "send", "taken", "meet")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the rank does something before, between or after its actions that takes as long
        as it takes; those who wait for it do so with a limit of their own."""
        return not self.trouble and self.state.kind == "other" and self.state.text != str(NOTHING)


def describe_stall(sightings: Mapping[int, Sighting], seconds: float, step: int) -> str:
    """Who waits for whom and for what, and what those do that wait for nobody.

    `sightings` has what is known of each rank, by rank.
    """
    waiting = {rank: seen for rank, seen in sightings.items() if seen.is_waiting}
    active = {rank: seen for rank, seen in sightings.items() if rank not in waiting}
    parts = []
    of_peer: dict[int | None, list[int]] = defaultdict(list)
    for rank, seen in waiting.items():
        of_peer[seen.state.peer].append(rank)
    for peer in sorted(of_peer, key=lambda peer: (peer not in active, peer is None, peer)):
        told, *others = of_peer[peer]
        parts.append(f"rank {told} {waiting[told].state.text}")
        if peer in active:
            parts.append(_doing(peer, active.pop(peer)))
        if others:
            whom = "all ranks" if peer is None else f"rank {peer}"
            parts.append(f"{_ranks(others)} for {whom}")
    parts += [_doing(rank, seen) for rank, seen in active.items()]
    return f"no progress for {seconds:.0f} s at step {step}. {'; '.join(parts)}."


def culprits(sightings: Mapping[int, Sighting]) -> list[int]:
    """The ranks that wait for nobody; all where each waits for another."""
    found = [rank for rank, seen in sightings.items() if not seen.is_waiting]
    return found or list(sightings)


def usual_cause(seen: Sighting) -> str:
    """What is most often behind it."""
    state = seen.state
    if "stopped" in seen.trouble:
        return f"go on with: kill -CONT {state.pid} (on {state.host})"
    if seen.trouble:
        return f"see: py-spy dump --pid {state.pid} (on {state.host})"
    if state.kind == "data":
        return "usual cause: the data loader, or the disk or network it reads from"
    if state.kind in ("F", "B", "W", "S"):
        return "usual cause: the code of the stage, or too little memory"
    if seen.is_waiting:
        return "usual cause: a network that lost a message"
    return "usual cause: a slow disk"


def _doing(rank: int, seen: Sighting) -> str:
    for_s = f"for {seen.state.for_s + seen.silent_s:.0f} s"
    if not seen.trouble:
        return f"rank {rank} {seen.state.text} {for_s}"
    did = in_the_past(seen.state.text)
    return f"rank {rank} {seen.trouble} for {seen.silent_s:.0f} s, when it {did}"


def in_the_past(text: str) -> str:
    """What a rank did when it was last seen; `text` is an activity's.

    >>> in_the_past("waits for all ranks: the norm of all gradients")
    'waited for all ranks: the norm of all gradients'
    """
    verb, _, rest = text.partition(" ")
    return f"{_PAST.get(verb, verb)} {rest}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]} waits"
    return f"ranks {', '.join(numbers)} wait"
