"""A partition whose number of tensor ranks is to be chosen -> the same with the fastest layout.

The model is captured, and split and profiled for each number of tensor ranks that the hosts have
devices for. `planning/parallel_layouts.py` compares the layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx

from ..runtime.errors import PlanError
from ..runtime.plan.findings import BestLayout, Candidate
from ..runtime.schedule.builders import AUTO
from .capture_and_profile import (
    Captured,
    Compilation,
    as_one_rank,
    capture_source,
    cost_graphs,
    in_tensor_groups,
    profiled_parts,
    solve_options,
)
from .graph.costs import LOCALHOST
from .graph.rank_model import Device
from .planning.choose_devices import DeviceChoice
from .planning.cluster import ANY_HOST, Cluster, make_setting
from .planning.compare_methods import ALL
from .planning.infeasible import explained
from .planning.options import PartitionOptions
from .planning.parallel_layouts import Axes, by_devices, choose_layout
from .planning.tensor_groups import link_of_sums
from .profile.profiler import Profile

Profiled = tuple[Captured, Profile]

_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "gpipe")
_MOST_ACTIONS = 512  # devices x micro-batches for which an order is computed in a search


@dataclass(frozen=True)
class LaidOut:
    """A job with the tensor ranks, stages, shards and schedule of the fastest layout.

    profiled: its captured model with costs
    devices: its devices
    rows: the fastest layout of each number of devices
    candidates: the fastest layouts of other numbers of tensor ranks
    """

    job: Compilation
    profiled: Profiled
    devices: DeviceChoice
    rows: tuple[BestLayout, ...]
    candidates: tuple[Candidate, ...]


def laid_out(job: Compilation) -> LaidOut:
    """The fastest layout on the devices of the job.

    Raises PlanError if no devices are named, and if no layout fits.
    """
    cluster = job.cluster or _equal(job.options)
    known = capture_source(job.source, job.options)
    profiled: dict[int, Profiled] = {}
    graphs: dict[int, nx.DiGraph] = {}
    solving: dict[int, dict[str, Any]] = {}
    refused: dict[int, PlanError] = {}
    for number in cluster.group_sizes:
        try:
            part = _with_tensor_ranks(job, cluster, number)
            captured, profile = profiled_parts(part, known)
            with as_one_rank(part, captured):
                graph = cost_graphs(part, captured, profile).of(profile)
            solving[number] = solve_options(part, captured, graph)
        except PlanError as error:
            if number == 1:
                raise
            refused[number] = error
            continue
        graphs[number], profiled[number] = graph, (captured, profile)
    axes = _axes(_with_tensor_ranks(job, cluster, 1), cluster)
    with explained():
        choice = choose_layout(graphs, cluster, axes, solving, refused)
    rows = by_devices(graphs, cluster, axes, solving, choice)
    best = choice.best
    chosen = _with_tensor_ranks(job, cluster, best.tensor_parallel)
    options = replace(
        chosen.options, stages=len(best.shape), zero=best.zero, schedule=best.schedule
    )
    job.end_phase("layouts", f"{best.name} of {_count(len(graphs))}", "plan")
    method = "auto" if job.options.method == ALL else job.options.method
    return LaidOut(
        replace(chosen, options=options),
        profiled[best.tensor_parallel],
        choice.devices(method),
        rows,
        choice.candidates,
    )


def _count(numbers: int) -> str:
    return f"{numbers} number{'s' * (numbers > 1)} of tensor ranks"


def _equal(options: PartitionOptions) -> Cluster:
    """Equal devices of this host."""
    if options.ranks is None:
        raise PlanError(
            "--tensor-parallel auto chooses among devices, but none are named.",
            "--ranks 4, --hosts h1:8,h2:8 or --devices FILE",
        )
    return Cluster((Device(),) * options.ranks, {ANY_HOST: LOCALHOST})


def _with_tensor_ranks(job: Compilation, cluster: Cluster, number: int) -> Compilation:
    """The job for so many tensor ranks, with room for as many stages as there are groups."""
    divides = job.options.sequence_parallel and number > 1
    options = replace(
        job.options, tensor_parallel=number, sequence_parallel=divides, devices=cluster, ranks=None
    )
    grouped = in_tensor_groups(replace(job, options=options, cluster=cluster))
    assert grouped.cluster is not None
    inside = link_of_sums(None, number) if job.cluster is None else grouped.cluster.inside
    return replace(
        grouped,
        cluster=replace(grouped.cluster, inside=inside),
        ranks=options.stages or len(grouped.cluster.devices),
    )


def _axes(job: Compilation, cluster: Cluster) -> Axes:
    """The schedules to compare, and the shards that their runs permit, unless the user names one of
    them.
    """
    options = job.options
    schedules: tuple[str, ...] = (options.schedule or "async-1f1b",)
    if options.schedule == AUTO:
        few = len(cluster.devices) * options.micro_batches <= _MOST_ACTIONS
        schedules = (*_SCHEDULES, *([AUTO] if few else []))
    zeros = (options.zero,) if options.zero else tuple(filter(_may_share(job), (0, 1, 2)))
    return Axes(schedules, zeros, options.stages)


def _may_share(job: Compilation) -> Callable[[int], bool]:
    def may(zero: int) -> bool:
        try:
            make_setting(1, **replace(job.options, zero=zero).running)
        except PlanError:
            return False
        return True

    return may
