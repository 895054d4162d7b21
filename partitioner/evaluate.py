"""A problem and a placement -> what each stage and each rank costs: the one evaluation of plans.

All methods are compared by it, and their own faster sums are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..runtime.plan import StageMemory
from .cost import Link, StageSums, stage_sums
from .problem import Placement, Problem
from .setting import Setting


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Times of one stage for one micro-batch, and the bytes of its memory while it trains.

    `backward_ms` has the second forward in it where the stage `recomputes`. `activation_bytes`
    are of one micro-batch, those in `memory` of all that is in flight.
    """

    forward_ms: float
    backward_ms: float
    send_ms: float
    receive_ms: float
    load_ms: float
    recomputes: bool
    in_flight: int
    param_bytes: int
    activation_bytes: int
    transient_bytes: int
    memory: StageMemory

    @property
    def peak_bytes(self) -> int:
        return self.memory.total

    @property
    def work_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def talk_ms(self) -> float:
        return self.send_ms + self.receive_ms


@dataclass(frozen=True)
class Evaluation:
    """The stages of a placement and its ranks: milliseconds of one micro-batch, peak bytes."""

    stages: tuple[StageLoad, ...]
    rank_ms: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    fits: bool

    @property
    def bottleneck_ms(self) -> float:
        """The slowest rank's milliseconds; of a plan that does not `fit` too."""
        return max(self.rank_ms)


def evaluate(problem: Problem, placement: Placement) -> Evaluation:
    """What the placement costs under the formulas of `cost.py` and `setting.py`.

    Several stages of one rank share its time and memory. Replicas of a stage share its
    micro-batches and sum their gradients once a step.
    """
    ranks = placement.ranks_of_stage
    first_rank = [ranks_of_one[0] for ranks_of_one in ranks]
    setting = replace(
        problem.setting, devices=tuple(problem.setting.devices[rank] for rank in first_rank)
    )
    loads = []
    rank_ms, rank_bytes = np.zeros(problem.stages), np.zeros(problem.stages)
    transient_bytes = np.zeros(problem.stages)
    sums_seen: dict[int, StageSums] = {}
    for stage, of_stage in enumerate(ranks):
        seen = problem.seen[of_stage[0]]
        if id(seen) not in sums_seen:
            sums_seen[id(seen)] = stage_sums(seen, placement.stage_of, len(ranks), first_rank)
        load = _stage_load(setting, stage, sums_seen[id(seen)][stage], seen.link, len(of_stage))
        loads.append(load)
        for rank in of_stage:
            rank_ms[rank] += load.load_ms
            rank_bytes[rank] += load.peak_bytes - load.transient_bytes
            transient_bytes[rank] = max(transient_bytes[rank], load.transient_bytes)
    peaks = rank_bytes + transient_bytes
    room = [device.memory_bytes for device in problem.setting.devices]
    return Evaluation(
        stages=tuple(loads),
        rank_ms=tuple(rank_ms.tolist()),
        rank_bytes=tuple(int(size) for size in peaks),
        fits=all(size <= most for size, most in zip(peaks, room, strict=True)),
    )


def _stage_load(
    setting: Setting, stage: int, sums: StageSums, link: Link, replicas: int
) -> StageLoad:
    recomputes = bool(setting.recomputes(stage, sums))
    exchange_ms = float(setting.exchange_ms(link, sums.param_bytes, replicas))
    backward_ms = sums.backward_ms + (sums.forward_ms if recomputes else 0.0)
    return StageLoad(
        forward_ms=float(sums.forward_ms) * setting.replicas,
        backward_ms=float(backward_ms) * setting.replicas,
        send_ms=float(sums.send_ms) * setting.replicas,
        receive_ms=float(sums.receive_ms) * setting.replicas,
        load_ms=float(setting.time_ms(stage, sums, again=recomputes)) / replicas + exchange_ms,
        recomputes=recomputes,
        in_flight=setting.in_flight(stage),
        param_bytes=int(sums.param_bytes),
        activation_bytes=int(sums.saved_bytes),
        transient_bytes=int(sums.transient_bytes),
        memory=setting.memory(stage, sums, recompute=recomputes),
    )
