"""The interface of all planning methods: a `Problem` -> a `Placement` -> its `Evaluation`.

`evaluate` is the only evaluation of plans: it compares all methods, and their own faster sums are
tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from ...runtime.errors import PlanError
from ...runtime.plan.plan import StageMemory
from .costs import Bools, Costs, Floats, Link, StageSums, Value, seen_over, slowest_link, stage_sums
from .rank_model import RankConfig


class DoesNotFit(PlanError):
    """A method found no plan within the memory of the ranks."""


@dataclass(frozen=True)
class Rules:
    """Where cuts may lie.

    may_cut: whether a cut before position c (0..n) is allowed
    prefer_modules: share of the bottleneck that may be given up to cut between blocks
    must_cut: positions of demanded cuts, rising
    is_quick: cuts are not moved for a shorter simulated step
    """

    may_cut: Bools
    prefer_modules: float = 0.0
    must_cut: tuple[int, ...] = ()
    is_quick: bool = False


@dataclass(frozen=True)
class Problem:
    """Put the groups of `costs` on the ranks of `setting`, in the order of its devices."""

    costs: Costs
    setting: RankConfig
    rules: Rules

    @property
    def stages(self) -> int:
        return self.setting.stages

    @cached_property
    def least_work_ms(self) -> Floats:
        """Forward and backward of every group on the rank that is fastest at it."""
        least_ms: Floats = np.minimum.reduce([seen.work_ms for seen in self.seen])
        return least_ms

    @cached_property
    def seen(self) -> tuple[Costs, ...]:
        """The costs as each position sees them; equal positions share one object."""
        distinct: dict[object, Costs] = {}
        setting = self.setting
        costs_at = []
        for position, device in enumerate(setting.devices):
            joins = (setting.links or ())[max(position - 1, 0) : position + 1]
            key = (device.kind, device.speed, setting.replicas_at(position), joins)
            if key not in distinct:
                distinct[key] = setting.seen_at(self.costs, position)
            costs_at.append(distinct[key])
        return tuple(costs_at)

    @property
    def is_simple(self) -> bool:
        """The score of a stage depends only on its device and links, not on its position."""
        setting = self.setting
        is_load = setting.is_asynchronous or setting.by_load
        never_twice = not setting.is_limited and setting.recompute != "all"
        return is_load and never_twice and not setting.replicas

    @cached_property
    def like(self) -> tuple[int, ...]:
        """For each position, the first position at which every stage has the same score."""
        simple = self.is_simple
        first: dict[object, int] = {}
        return tuple(
            first.setdefault((id(seen), device.pays_transfers, simple or position), position)
            for position, (seen, device) in enumerate(
                zip(self.seen, self.setting.devices, strict=True)
            )
        )

    @cached_property
    def exchanges(self) -> dict[int, Value]:
        """The values that are gradients of tied parameters, by their index among all values."""
        return {index: value for index, value in enumerate(self.costs.values) if value.is_exchange}

    def seen_by(self, ranks: Sequence[int]) -> Costs:
        """The costs for consecutive ranks that share a stage: those of the first rank, with
        transfers into the first and out of the last."""
        first, last, link = ranks[0], ranks[-1], self.costs.link
        if first == last or not self.setting.links:
            return self.seen[first]
        left, right = self.setting.links_at(first, link)[0], self.setting.links_at(last, link)[1]
        key = first, left, right
        if key not in self._seen_by_several:
            self._seen_by_several[key] = seen_over(self.seen[first], *key[1:])
        return self._seen_by_several[key]

    @cached_property
    def _seen_by_several(self) -> dict[tuple[int, Link, Link], Costs]:
        return {}

    def link_among(self, ranks: Sequence[int]) -> Link:
        """The slowest link between consecutive ranks."""
        links = (self.setting.links or ())[ranks[0] : ranks[-1]]
        return slowest_link(links or (self.costs.link,))


@dataclass(frozen=True, slots=True)
class Placement:
    """The stage of every group and the ranks of every stage.

    stage_of: the stage of each group, in the groups' order; no edge leads to an earlier stage and
        no stage is empty
    ranks: the ranks of each stage; None if stage j is on rank j. Several stages may name one rank;
        a stage with several ranks is replicated
    bound_ms: proven lower bound of the bottleneck of every plan with one stage per rank
    order_optimum_ms: optimal bottleneck among plans that cut the given order; None if not proved
    """

    stage_of: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...] | None = None
    bound_ms: float | None = None
    order_optimum_ms: float | None = None

    @property
    def stages(self) -> int:
        return max(self.stage_of) + 1

    @property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        return self.ranks or tuple((stage,) for stage in range(self.stages))

    @property
    def is_replicated(self) -> bool:
        """Some stage is on several ranks."""
        return any(len(ranks) > 1 for ranks in self.ranks_of_stage)


class PlanningMethod(Protocol):
    """A method that places groups. Raises PlanError if it finds no placement that fits."""

    def __call__(self, problem: Problem) -> Placement: ...


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Times of one stage for one micro-batch, and its memory during training.

    backward_ms: includes the second forward if the stage recomputes
    talk_ms: time of sending and receiving together
    weight_ms: the part of the backward that a schedule may postpone
    update_ms: the part of the optimizer's step that counts in the load
    activation_bytes: activations of one micro-batch; `memory` counts all micro-batches in flight
    summing_ms: time in which replicas sum their gradients, once per step
    unshared: its memory without `zero`, if replicas share memory out; otherwise None
    """

    forward_ms: float
    backward_ms: float
    send_ms: float
    receive_ms: float
    talk_ms: float
    load_ms: float
    recomputes: bool
    in_flight: int
    param_bytes: int
    activation_bytes: int
    transient_bytes: int
    memory: StageMemory
    weight_ms: float = 0.0
    update_ms: float = 0.0
    summing_ms: float = 0.0
    unshared: StageMemory | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of the stage."""
        return (self.unshared or self.memory).gradients

    @property
    def peak_bytes(self) -> int:
        return self.memory.total

    @property
    def work_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Evaluation:
    """Times of one micro-batch and peak memory of each stage and each rank of a placement.

    fits: every rank has enough memory
    score_ms: the objective of searches: the bottleneck, or for a synchronous schedule a lower bound
        of the step (`RankConfig.score_ms`); inf if a stage does not fit its rank
    """

    stages: tuple[StageLoad, ...]
    rank_ms: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    fits: bool
    score_ms: float

    @property
    def bottleneck_ms(self) -> float:
        """Milliseconds of the slowest rank, even if the plan does not fit."""
        return max(self.rank_ms)


def evaluate(problem: Problem, placement: Placement, in_flight: tuple[int, ...] = ()) -> Evaluation:
    """The cost of the placement by the formulas of `costs.py` and `rank_model.py`.

    Several stages of one rank share its time and memory. Replicas of a stage share its
    micro-batches and sum their gradients once per step. `in_flight` is the number of micro-batches
    that each stage holds, for schedules where it depends on the placement.
    """
    ranks = placement.ranks_of_stage
    first_rank = [ranks_of_one[0] for ranks_of_one in ranks]
    setting = problem.setting.at(first_rank)
    if in_flight:
        setting = replace(setting, in_flight_at=in_flight)
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
    setting: RankConfig, sums: Sequence[StageSums], rank_of_stage: Sequence[int]
) -> list[bool]:
    """Which stages recompute their forward. If several stages exceed the memory of their rank,
    those that free the most bytes per millisecond recompute first."""
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
    """Bytes sent between ranks for one micro-batch, in both directions together. Each reading rank
    counts; transfers within a rank are free."""
    first_rank = [ranks[0] for ranks in placement.ranks_of_stage]
    at = [first_rank[stage] for stage in placement.stage_of]
    total = 0.0
    for value in costs.values:
        others = {at[reader] for reader in value.readers} - {at[value.owner]}
        total += len(others) * (value.forward_bytes + value.backward_bytes)
    return int(total)


def _stage_load(
    setting: RankConfig, stage: int, sums: StageSums, link: Link, replicas: int, recomputes: bool
) -> StageLoad:
    exchange_ms = float(setting.exchange_ms(link, sums.param_bytes, replicas))
    own_ms = (1 - 1 / replicas) * float(sums.update_ms)  # replicas do not share an update
    share = setting.shares_at(stage)
    backward_ms = sums.backward_ms - sums.update_ms + (sums.forward_ms if recomputes else 0.0)
    memory = setting.memory(stage, sums, recompute=recomputes, replicas=replicas)
    unshared = memory
    if setting.zero:
        unshared = replace(setting, zero=0).memory(stage, sums, recompute=recomputes)
    return StageLoad(
        forward_ms=float(sums.forward_ms) * share,
        backward_ms=float(backward_ms) * share,
        send_ms=float(sums.send_ms) * share,
        receive_ms=float(sums.receive_ms) * share,
        talk_ms=float(sums.talk_ms) * share,
        load_ms=float(setting.time_ms(stage, sums, again=recomputes)) / replicas
        + own_ms
        + exchange_ms,
        recomputes=recomputes,
        in_flight=setting.in_flight(stage),
        param_bytes=int(sums.param_bytes + sums.frozen_bytes),
        activation_bytes=int(sums.saved_bytes),
        transient_bytes=int(sums.beside_bytes),
        memory=memory,
        weight_ms=float(sums.weight_ms) * share,
        update_ms=float(sums.update_ms),
        summing_ms=setting.micro_batches * exchange_ms
        + float(setting.sum_gradients_ms(stage, sums.param_bytes)),
        unshared=None if unshared == memory else unshared,
    )
