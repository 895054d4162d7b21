"""A run with the network and one without it -> what communication costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..formatting import write_ms, write_share
from ..monitoring.run_files import RunRecords
from .measures import is_without_network, rank_idle, step_times

_DECIDES = (
    *(
        "folder",
        "schedule",
        "ranks",
        "replicas",
        "tensor_parallel",
        "staleness",
        "micro_batches",
        "micro_batch_size",
    ),
    *("global_batch_size", "seq", "device", "dtype", "precision", "boundary_dtype", "threads"),
    *("recompute", "compile", "optimizer"),
)
"""The options on which the computation of a step depends: the two runs have the same."""


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """What communication costs in a step, in milliseconds.

    with_name, without_name: the run with the network, and the one without it.
    with_ms, without_ms: their steps.
    schedule_ms: the part of the difference in which the busiest rank waits on any network, because
        of the schedule or of unequal stages.
    """

    with_name: str
    without_name: str
    with_ms: float
    without_ms: float
    schedule_ms: float

    @property
    def communication_ms(self) -> float:
        """The rest of the difference."""
        return max(0.0, self.with_ms - self.without_ms - self.schedule_ms)

    def __str__(self) -> str:
        if self.without_ms >= self.with_ms:
            return (
                f"A step takes {self._times}: no cost of communication can be seen. Repeat both "
                "runs when nothing else runs here."
            )
        share = write_share(self.communication_ms / self.with_ms)
        return (
            f"Communication costs {write_ms(self.communication_ms)} of a step ({share}): a step "
            f"takes {self._times}, and {write_ms(self.schedule_ms)} of the difference are waits "
            "that the schedule and unequal stages cause on any network."
        )

    @property
    def _times(self) -> str:
        return (
            f"{write_ms(self.with_ms)} with the network ({self.with_name}) and "
            f"{write_ms(self.without_ms)} without it ({self.without_name})"
        )


def network_costs(runs: Sequence[RunRecords], names: Sequence[str]) -> tuple[NetworkCost, ...]:
    """For each run without the network, its comparison with the first run that differs in nothing
    else on which a step depends."""
    named = list(zip(runs, names, strict=True))
    costs = []
    for alone, without_name in named:
        if not is_without_network(alone):
            continue
        for run, with_name in named:
            if not is_without_network(run) and _is_alike(run, alone):
                costs.append(_cost(run, with_name, alone, without_name))
                break
    return tuple(cost for cost in costs if cost is not None)


def _is_alike(run: RunRecords, other: RunRecords) -> bool:
    return all(run.config.get(name) == other.config.get(name) for name in _DECIDES)


def _cost(
    run: RunRecords, with_name: str, alone: RunRecords, without_name: str
) -> NetworkCost | None:
    with_ms, without_ms = step_times(run).measured, step_times(alone).measured
    ranks = [rank for rank in rank_idle(run) if run.end and alone.end]
    if not ranks or not with_ms > 0:
        return None
    # Without the network a step is as long as the work of the busiest rank, which waits for none.
    busiest = min(ranks, key=lambda rank: rank.total).parts
    waits_ms = with_ms * (busiest.get("bubble", 0.0) + busiest.get("imbalance", 0.0))
    schedule_ms = min(waits_ms, max(0.0, with_ms - without_ms))
    return NetworkCost(with_name, without_name, with_ms, without_ms, schedule_ms)
