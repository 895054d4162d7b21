"""A problem and a placement -> what each stage and each rank costs: the one evaluation of plans.

All methods are compared by it, and their own faster sums are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..runtime.plan import StageMemory
from .cost import Costs, Link, StageSums, stage_sums
from .problem import Placement, Problem
from .setting import Setting


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Times of one stage for one micro-batch, and the bytes of its memory while it trains.

    `backward_ms` has the second forward in it where the stage `recomputes`, and `weight_ms`, what
    of it a schedule may put off. `update_ms` is the share of the optimizer's step, where the load
    has that. `activation_bytes` are of one micro-batch, those in `memory` of all in flight.
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
    weight_ms: float = 0.0
    update_ms: float = 0.0

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
    """The stages of a placement and its ranks: milliseconds of one micro-batch, peak bytes.

    `score_ms` is what methods make small: the bottleneck, or for a synchronous schedule a bound
    below the step (`Setting.score_ms`); inf where a stage does not fit its rank.
    """

    stages: tuple[StageLoad, ...]
    rank_ms: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    fits: bool
    score_ms: float

    @property
    def bottleneck_ms(self) -> float:
        """The slowest rank's milliseconds; of a plan that does not `fit` too."""
        return max(self.rank_ms)


def evaluate(problem: Problem, placement: Placement, in_flight: tuple[int, ...] = ()) -> Evaluation:
    """What the placement costs under the formulas of `cost.py` and `setting.py`.

    Several stages of one rank share its time and memory. Replicas of a stage share its
    micro-batches and sum their gradients once a step. `in_flight` are the micro-batches that each
    stage holds, where they do not follow from the schedule's name.
    """
    ranks = placement.ranks_of_stage
    first_rank = [ranks_of_one[0] for ranks_of_one in ranks]
    setting = problem.setting.at(first_rank)
    if in_flight:
        setting = replace(setting, held=in_flight)
    sums_seen: dict[int, StageSums] = {}
    sums: list[StageSums] = []
    for stage, of_stage in enumerate(ranks):
        seen = problem.seen_by(of_stage)
        if id(seen) not in sums_seen:
            sums_seen[id(seen)] = stage_sums(seen, placement.stage_of, len(ranks), first_rank)
        sums.append(sums_seen[id(seen)][stage])
    again = _recomputing(setting, sums, first_rank)
    loads = []
    scores_ms: list[float] = []
    work_ms = np.bincount(placement.stage_of, weights=problem.least_work_ms, minlength=len(ranks))
    rank_ms, rank_bytes = np.zeros(problem.stages), np.zeros(problem.stages)
    transient_bytes = np.zeros(problem.stages)
    for stage, of_stage in enumerate(ranks):
        link = problem.link_among(of_stage)
        load = _stage_load(setting, stage, sums[stage], link, len(of_stage), again[stage])
        loads.append(load)
        if placement.ranks is None:
            before_ms, after_ms = work_ms[:stage].sum(), work_ms[stage + 1 :].sum()
            scores_ms.append(float(setting.score_ms(stage, sums[stage], before_ms, after_ms)))
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
        score_ms=max(scores_ms, default=setting.rounds * max(rank_ms.tolist())),
    )


def _recomputing(
    setting: Setting, sums: Sequence[StageSums], rank_of_stage: Sequence[int]
) -> list[bool]:
    """Which stages run their forward again. Of several on a rank that does not hold them all,
    those do, one after the other, that free the most bytes for a millisecond."""
    again = [bool(setting.recomputes(stage, of_stage)) for stage, of_stage in enumerate(sums)]
    if setting.recompute != "auto" or not setting.is_limited or not setting.rank_of_stage:
        return again
    for rank in set(rank_of_stage):
        own = [stage for stage, at in enumerate(rank_of_stage) if at == rank]
        sizes = {
            stage: [
                float(setting.memory_bytes(stage, sums[stage], recompute=recompute))
                for recompute in (False, True)
            ]
            for stage in own
        }

        def gain(stage: int, sizes: dict[int, list[float]] = sizes) -> float:
            plain, again_bytes = sizes[stage]
            return (plain - again_bytes) / max(1e-9, float(sums[stage].forward_ms))

        room = setting.devices[own[0]].memory_bytes
        waiting = [stage for stage in own if not again[stage] and setting.in_flight(stage) > 1]
        waiting.sort(key=gain, reverse=True)
        while waiting and sum(sizes[stage][again[stage]] for stage in own) > room:
            again[waiting.pop(0)] = True
    return again


def crossing_bytes(costs: Costs, placement: Placement) -> int:
    """Bytes that go from rank to rank for one micro-batch, both directions together; to each of
    several readers, and within a rank not at all."""
    first_rank = [ranks[0] for ranks in placement.ranks_of_stage]
    at = [first_rank[stage] for stage in placement.stage_of]
    total = 0.0
    for value in costs.values:
        others = {at[reader] for reader in value.readers} - {at[value.owner]}
        total += len(others) * (value.forward_bytes + value.backward_bytes)
    return int(total)


def _stage_load(
    setting: Setting, stage: int, sums: StageSums, link: Link, replicas: int, recomputes: bool
) -> StageLoad:
    exchange_ms = float(setting.exchange_ms(link, sums.param_bytes, replicas))
    own_ms = (1 - 1 / replicas) * float(sums.update_ms)  # of an update, which is not shared
    share = setting.shares_at(stage)
    backward_ms = sums.backward_ms - sums.update_ms + (sums.forward_ms if recomputes else 0.0)
    return StageLoad(
        forward_ms=float(sums.forward_ms) * share,
        backward_ms=float(backward_ms) * share,
        send_ms=float(sums.send_ms) * share,
        receive_ms=float(sums.receive_ms) * share,
        load_ms=float(setting.time_ms(stage, sums, again=recomputes)) / replicas
        + own_ms
        + exchange_ms,
        recomputes=recomputes,
        in_flight=setting.in_flight(stage),
        param_bytes=int(sums.param_bytes + sums.frozen_bytes),
        activation_bytes=int(sums.saved_bytes),
        transient_bytes=int(sums.transient_bytes),
        memory=setting.memory(stage, sums, recompute=recomputes),
        weight_ms=float(sums.weight_ms) * share,
        update_ms=float(sums.update_ms),
    )
