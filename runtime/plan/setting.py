"""The run that a plan was made for: its options, ranks, links and step time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSpec:
    """A rank as the plan assumes it.

    device: the name of its device
    memory_bytes: the memory of the device; None for no limit
    host: the host of the rank; "" if all ranks are on one
    number: the place of the device among those of its host in the device file; None if left open
    """

    device: str
    memory_bytes: int | None = None
    host: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """The configuration of the run that the plan's costs and cuts were computed for.

    schedule, micro_batches, recompute, staleness, optimizer, zero: the options of those names
    memory_limit: bytes of each rank; None for no limit
    ranks: the processes in order, of which tensor ranks are neighbors; empty for equal ranks on
        this host
    transfer_ms: (source, target, milliseconds) of transfers that overlap with computation
    latency_ms: the part of every transfer's time that is independent of its bytes
    step_ms: the time of a step of `micro_batches` under the schedule
    spread: the standard deviation of the measured time of an action, as a share of it; 0 if unknown
    step_bound_ms: a proven lower bound of `step_ms` for all plans
    """

    schedule: str = "async-1f1b"
    micro_batches: int = 8
    recompute: str = "none"
    staleness: str = "none"
    optimizer: str = "adamw"
    memory_limit: int | None = None
    ranks: tuple[RankSpec, ...] = ()
    transfer_ms: tuple[tuple[int, int, float], ...] = ()
    latency_ms: float = 0.0
    step_ms: float = 0.0
    step_bound_ms: float = 0.0
    zero: int = 0
    spread: float = 0.0
