"""Why a plan is as it is: sentences with numbers, and the plans that it was compared with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another plan that was considered, and why it was not chosen.

    name: its method, shape or schedule
    stages: the number of its stages
    bottleneck_ms, step_ms: its slowest stage for one micro-batch, and its step
    peak_bytes: the peak memory of its fullest rank
    crossing_bytes: bytes sent between ranks for one micro-batch, in both directions
    gap: the share by which its objective is above the proven lower bound
    seconds: the duration of the search for it; not written to plan.json
    note: why it was not chosen
    """

    name: str
    stages: int
    bottleneck_ms: float
    step_ms: float
    peak_bytes: int
    crossing_bytes: int
    gap: float
    seconds: float = 0.0
    note: str = ""


TOPICS = {
    "cut": "Why each cut is where it is",
    "bound": "What limits the plan",
    "change": "What would change the plan",
}
"""The topics of an explanation, with their headings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of the explanation: a sentence with its numbers.

    topic: a key of `TOPICS`: "cut", "bound" or "change"
    about: the name of the cut, bound or change
    text: the sentence
    bottleneck_ms: the slowest stage of the plan that the sentence describes, or the bound if it
        describes one
    """

    topic: str
    about: str
    text: str
    bottleneck_ms: float | None = None


@dataclass(frozen=True, slots=True)
class BestLayout:
    """The fastest layout on a number of devices.

    devices: the number of devices that may be used
    layout: stages, tensor ranks, replicas, shards, schedule and recomputation in words
    step_ms, step_bound_ms: its predicted step, and a lower bound for all layouts on these devices
    peak_bytes: the peak memory of its fullest rank
    why: what other numbers of tensor ranks would give
    """

    devices: int
    layout: str
    step_ms: float
    step_bound_ms: float
    peak_bytes: int
    why: str
