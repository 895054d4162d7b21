"""Cost graphs of a model on 1, 2, 4 .. tensor ranks, and a cluster -> the fastest layout of all.

A layout has p stages, t tensor ranks for each, r replicas, shards of the optimizer, a schedule, and
stages that recompute. For t tensor ranks the search is one over pipelines and replicas
(`choose_devices.py`) on other devices: t equal devices of a host are one, which takes the time of a
rank's parts and the sums. So all bounds and limits apply to it.

    devices   t = 1: g0 g1 g2 g3    t = 2: (g0 g1) (g2 g3)    t = 4: (g0 g1 g2 g3)

The shapes of each t are solved in the order of a bound that costs nothing (`shape_bounds.py`). A
shape whose bound is above the best step so far is left out, so the bound of all layouts is the
smallest of the solved and the left-out ones.

Shards of the optimizer only lower the memory. A shape is solved with the most shards that are
legal, and then with fewer, and the fewest of those that are as fast are taken. Likewise for tensor
ranks: among layouts within `TIE`, the one with the fewest devices, then tensor ranks, then stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import networkx as nx

from ...runtime.errors import PlanError
from ...runtime.formatting import counted, write_share
from ...runtime.plan.findings import BestLayout, Candidate
from ...runtime.plan.sharing import GRADIENTS
from ...runtime.schedule.asynchronous import ASYNCHRONOUS
from ..graph.rank_model import Device, RankConfig
from ..solvers.relaxed_order import relaxed_order_ms
from .choose_devices import DeviceChoice, shapes
from .cluster import Cluster
from .device_layouts import LayoutResult, Search, Shape, search_of, shape_name
from .infeasible import NothingFits
from .shape_bounds import Totals
from .solve import QUICK

TIE = 0.01
_PROVED = 0.01  # a gap to the bound that is small enough
_MOST_PROVED, _MOST_WORK = 4, 1_000  # shapes for the exact method, and groups x stages of each
_FEW_DEVICES = 16  # up to this number, layouts that leave devices idle are solved too


@dataclass(frozen=True)
class Axes:
    """The alternatives of a search.

    schedules: the schedules
    zeros: the stages of ZeRO that the schedules and the optimizer permit, rising
    stages: the number of stages; None for any
    """

    schedules: Sequence[str]
    zeros: Sequence[int] = (0,)
    stages: int | None = None


@dataclass(frozen=True)
class Found:
    """The fastest layout for a number of tensor ranks.

    tensor_parallel, zero, schedule: its axes besides the shape of `result`
    search, result: its devices, and the plan on them
    bound_ms: no layout with these tensor ranks has a shorter step
    is_proved: the exact method has solved it
    """

    tensor_parallel: int
    zero: int
    schedule: str
    search: Search
    result: LayoutResult
    bound_ms: float
    is_proved: bool = False

    @property
    def shape(self) -> Shape:
        return self.result.layout.shape

    @property
    def step_ms(self) -> float:
        return self.result.solution.step_ms

    @property
    def devices(self) -> int:
        return sum(self.shape) * self.tensor_parallel

    @property
    def peak_bytes(self) -> int:
        return int(max(self.result.solution.evaluation.rank_bytes))

    @property
    def recomputing(self) -> int:
        """The number of stages that recompute."""
        return sum(load.recomputes for load in self.result.solution.loads)

    @property
    def name(self) -> str:
        """In words: `4 stages x 2 tensor ranks x 2 replicas, zero 1, 1f1b, recompute in 3`."""
        stages, *replicas = shape_name(self.shape).split(" x ")
        ranks = self.tensor_parallel
        split = [f"{ranks} tensor ranks"] if ranks > 1 else []
        words = [" x ".join([stages, *split, *replicas])]
        words += [f"zero {self.zero}"] if self.zero else []
        words += [self.schedule] if len(self.shape) > 1 else []
        again = self.recomputing
        if again:
            words += ["recompute" if again == len(self.shape) else f"recompute in {again}"]
        return ", ".join(words)


@dataclass(frozen=True)
class _OfGraph:
    """The shapes for one number of tensor ranks, each group of which is a device of `cluster`."""

    graph: nx.DiGraph
    cluster: Cluster
    tensor_parallel: int
    axes: Axes
    options: Mapping[str, Any]

    def candidates(self) -> Iterator[tuple[float, str, Shape]]:
        """Schedules and shapes with a bound of their step, rising."""
        totals, link = Totals.of(self.graph, self.cluster), self.cluster.fastest_link
        candidates = []
        for order, schedule in enumerate(self.axes.schedules):
            how = self.search(schedule, 0, QUICK).how
            unequal = schedule in ASYNCHRONOUS and min(self.axes.zeros) < GRADIENTS
            for shape in shapes(len(self.cluster.devices), self.axes.stages, unequal=unequal):
                if self.axes.stages in (None, len(shape)) and _may_run(schedule, shape):
                    setting = RankConfig((Device(),) * len(shape), replicas=shape, **{**how})
                    least_ms = totals.least_ms(setting, shape, link)
                    candidates.append((least_ms, sum(shape), len(shape), order, schedule, shape))
        for least_ms, *_, schedule, shape in sorted(candidates):
            yield least_ms, schedule, shape

    def search(self, schedule: str, zero: int, method: str) -> Search:
        running = {**self.options, "schedule": schedule, "zero": zero}
        running.pop("method", None)
        return search_of(self.graph, self.cluster, self.axes.stages, method, running)

    def solved(self, schedule: str, shape: Shape, method: str) -> Found:
        """The fastest layout of a shape, with the lowest level of ZeRO among equally fast ones.
        Raises PlanError if none fits.
        """
        zeros = [zero for zero in self.axes.zeros if _may_share(zero, shape)] or [0]
        most = self._with_shards(schedule, shape, zeros[-1], method)
        for zero in zeros[:-1]:
            try:
                fewer = self._with_shards(schedule, shape, zero, method)
            except PlanError:
                continue
            if fewer.step_ms <= most.step_ms * (1 + TIE):
                return replace(fewer, bound_ms=min(most.bound_ms, fewer.bound_ms))
        return most

    def fitting(self, schedule: str, shape: Shape) -> Found:
        """A shape by the chain DP; by the exact method, which knows other orders of the groups, if
        no cut of the given order fits. Raises PlanError if it does not fit.
        """
        try:
            return self.solved(schedule, shape, QUICK)
        except PlanError as error:
            if self.is_large(shape) or self.is_impossible(shape, error):
                raise
        return self.solved(schedule, shape, "exact")

    def is_large(self, shape: Shape) -> bool:
        """The exact method would take long."""
        return len(shape) > 1 and len(self.graph) * len(shape) > _MOST_WORK

    def is_impossible(self, shape: Shape, error: PlanError) -> bool:
        """The shape is refused because nothing fits, whatever the order of the groups."""
        if not isinstance(error, NothingFits) or len(shape) == 1:
            return True
        are_alike = len({(each.kind, each.memory_bytes) for each in self.cluster.devices}) == 1
        return are_alike and relaxed_order_ms(error.problem, math.inf) == math.inf

    def _with_shards(self, schedule: str, shape: Shape, zero: int, method: str) -> Found:
        search = self.search(schedule, zero, method)
        tried = search.tried(shape, is_asked=True)
        result = tried.least
        bound_ms = min(each.solution.step_bound_ms for each in tried.results)
        return Found(self.tensor_parallel, zero, schedule, search, result, bound_ms)

    def proved(self, solved: Sequence[Found]) -> list[Found]:
        """The same shapes, with those whose bounds are the smallest solved again by the exact
        method, which proves more than the chain DP and may find faster cuts.
        """
        found = list(solved)
        for _ in range(_MOST_PROVED):
            at = min(range(len(found)), key=lambda at: found[at].bound_ms)
            weakest, best_ms = found[at], min(each.step_ms for each in found)
            is_close = weakest.bound_ms * (1 + _PROVED) >= best_ms
            if is_close or weakest.is_proved or self.is_large(weakest.shape):
                break
            again = self.solved(weakest.schedule, weakest.shape, "exact")
            faster = min(again, weakest, key=lambda each: each.step_ms)
            bound_ms = max(again.bound_ms, weakest.bound_ms)
            found[at] = replace(faster, bound_ms=bound_ms, is_proved=True)
        return found


def best_of(
    graph: nx.DiGraph,
    cluster: Cluster,
    tensor_parallel: int,
    axes: Axes,
    options: Mapping[str, Any],
) -> Found:
    """The fastest layout of a cost graph of one tensor rank, whose times include the sums.

    `options` are those of `solve`. Raises PlanError if no layout fits.
    """
    of_graph = _OfGraph(graph, cluster.in_groups(tensor_parallel), tensor_parallel, axes, options)
    solved: list[Found] = []
    refused: PlanError | None = None
    left_out_ms = math.inf
    number = len(of_graph.cluster.devices)
    for least_ms, schedule, shape in of_graph.candidates():
        is_slower = solved and least_ms > min(found.step_ms for found in solved) * (1 + TIE)
        if is_slower or (number > _FEW_DEVICES and sum(shape) < number):
            left_out_ms = min(left_out_ms, least_ms)
            continue
        try:
            found = of_graph.fitting(schedule, shape)
        except PlanError as error:
            refused = refused or error
            if of_graph.is_large(shape) and not of_graph.is_impossible(shape, error):
                left_out_ms = min(left_out_ms, least_ms)
            continue
        solved.append(replace(found, bound_ms=max(found.bound_ms, least_ms)))
    if not solved:
        raise refused or PlanError("no device can be used.")
    solved = of_graph.proved(solved)
    best = reduce(better, solved)
    return replace(best, bound_ms=min(left_out_ms, *(found.bound_ms for found in solved)))


def better(one: Found, other: Found) -> Found:
    """The faster layout; of two that are about as fast the one with less of everything."""
    limit_ms = min(one.step_ms, other.step_ms) * (1 + TIE)
    near = [found for found in (one, other) if found.step_ms <= limit_ms]
    return min(near, key=lambda found: (*_modesty(found), found.step_ms))


def _modesty(found: Found) -> tuple[int, ...]:
    return found.devices, found.tensor_parallel, len(found.shape), found.zero


def _may_share(zero: int, shape: Shape) -> bool:
    """Gradients are shared out only by replicas of whole pipelines, and nothing by one replica."""
    return zero == 0 or (max(shape) > 1 and (zero < GRADIENTS or len(set(shape)) == 1))


def _may_run(schedule: str, shape: Shape) -> bool:
    """A single stage has no pipeline, so only one of the schedules is tried."""
    return len(shape) > 1 or schedule in ("1f1b", *ASYNCHRONOUS)


# --- the number of tensor ranks ---------------------------------------------------------------


@dataclass(frozen=True)
class LayoutChoice:
    """The fastest layout of all numbers of tensor ranks.

    found: the fastest layout for each number that fits
    refused: the error of each other number
    """

    found: Mapping[int, Found]
    refused: Mapping[int, PlanError]

    @property
    def best(self) -> Found:
        return reduce(better, self.found.values())

    @property
    def bound_ms(self) -> float:
        """A lower bound of the step of every layout."""
        return min(found.bound_ms for found in self.found.values())

    @property
    def why(self) -> str:
        """The step with one tensor rank, or with several if one is best, in words."""
        best = self.best
        others = [number for number in self.found if (number > 1) != (best.tensor_parallel > 1)]
        if not others:
            if best.tensor_parallel > 1 and 1 in self.refused:
                return "without tensor ranks it does not fit"
            return ""
        other = min((self.found[number] for number in others), key=lambda found: found.step_ms)
        ranks = other.tensor_parallel
        without = "without tensor ranks" if ranks == 1 else f"with {ranks} tensor ranks"
        more = other.step_ms / best.step_ms - 1
        if abs(more) < TIE:
            return f"{without} as fast: {other.name}"
        change = "longer" if more > 0 else "shorter"
        return f"{without} {write_share(abs(more))} {change}: {other.name}"

    def devices(self, method: str) -> DeviceChoice:
        """The devices of the fastest layout, to be planned by `method`."""
        best = self.best
        search = replace(best.search, method=method)
        return DeviceChoice(search, best.result, {best.shape: best.result}, None)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The fastest layouts of the other numbers of tensor ranks, and why some are none."""
        best = self.best
        others = [
            _candidate(found, found.step_ms / best.step_ms - 1)
            for found in self.found.values()
            if found is not best
        ]
        return (
            *others,
            *(
                Candidate(counted(number, "tensor rank"), 0, 0.0, 0.0, 0, 0, 0.0, note=_note(error))
                for number, error in self.refused.items()
            ),
        )

    def row(self, devices: int) -> BestLayout:
        best = self.best
        return BestLayout(
            devices, best.name, best.step_ms, self.bound_ms, best.peak_bytes, self.why
        )


def _note(error: PlanError) -> str:
    return "does not fit" if isinstance(error, NothingFits) else error.what


def _candidate(found: Found, more: float) -> Candidate:
    solution = found.result.solution
    return Candidate(
        name=found.name,
        stages=len(found.shape),
        bottleneck_ms=solution.bottleneck_ms,
        step_ms=found.step_ms,
        peak_bytes=found.peak_bytes,
        crossing_bytes=solution.crossing_bytes,
        gap=found.step_ms / found.bound_ms - 1,
        note=f"{write_share(abs(more))} {'more' if more > 0 else 'less'} time per step, on "
        f"{counted(found.devices, 'device')}",
    )


def choose_layout(
    graphs: Mapping[int, nx.DiGraph],
    cluster: Cluster,
    axes: Axes,
    options: Mapping[int, Mapping[str, Any]],
    known: Mapping[int, PlanError] = MappingProxyType({}),
) -> LayoutChoice:
    """The fastest layout on a cluster, from the cost graph of a rank's parts for each number of
    tensor ranks, and the options of `solve` for it; `known`: why other numbers are impossible.
    Raises PlanError if none fits.
    """
    found: dict[int, Found] = {}
    refused = dict(known)
    for number, graph in graphs.items():
        try:
            found[number] = best_of(graph, cluster, number, axes, options[number])
        except PlanError as error:
            refused[number] = error
    if not found:
        raise min(refused.items())[1]
    return LayoutChoice(found, refused)


def by_devices(
    graphs: Mapping[int, nx.DiGraph],
    cluster: Cluster,
    axes: Axes,
    options: Mapping[int, Mapping[str, Any]],
    whole: LayoutChoice,
) -> tuple[BestLayout, ...]:
    """The fastest layout on the first 1, 2, 4 .. devices of the cluster, and on all of them."""
    rows = []
    for number in numbers_up_to(len(cluster.devices))[:-1]:
        part = cluster.first(number)
        known = {ranks: graph for ranks, graph in graphs.items() if part.groups(ranks)}
        try:
            rows.append(choose_layout(known, part, axes, options).row(number))
        except PlanError:
            continue
    return (*rows, whole.row(len(cluster.devices)))


def numbers_up_to(most: int) -> list[int]:
    """1, 2, 4 .. and `most`.

    >>> numbers_up_to(6)
    [1, 2, 4, 6]
    """
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*powers, most]
