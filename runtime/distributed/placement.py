"""Ranks and hosts -> their description in words, and a warning if they differ from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..config.batch_layout import describe_stages, in_words
from ..plan.plan import Plan
from ..schedule.schedule import Schedule
from ..transports.choose import TransportChoice
from .cpu_affinity import Machine
from .grid import Grid

_FEW = 8


def describe_ranks(grid: Grid, transport: TransportChoice, machine: Machine) -> str:
    """The number of processes, their launcher and transport, and the cores of each."""
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
    ranks = grid.processes
    origin = f" ({machine.threads_from})" if machine.threads_from == "OMP_NUM_THREADS" else ""
    if ranks == 1:
        return f"1 process, all stages in it · {threads} of {machine.cores} cores{origin}"
    hosts = dict.fromkeys(machine.host_of_rank)
    several = len(hosts) > 1
    whole = f", {grid.replicas} replicas of {grid.ranks}" if grid.replicas > 1 else ""
    split = f" × {grid.tensor_ranks} tensor ranks" if grid.tensor_ranks > 1 else ""
    if split:
        whole = whole or f", {grid.ranks}"
    if grid.ranks_of_stage:
        whole = f", {describe_stages(grid.ranks_of_stage)}"
    if grid.ranks == 1:
        whole = ", all stages in each"
        split = f", split over {grid.tensor_ranks} tensor ranks" if split else ""
    head = f"{ranks} processes{whole}{split}" + (f" on {len(hosts)} hosts" if several else "")
    if machine.launcher:
        head += f" by {machine.launcher}"
    means = transport.between(machine.interface if several else "")
    where = f" of {machine.host_of_rank[0]}" if several else ""
    if machine.pins:
        shown = machine.pins if len(machine.pins) <= _FEW else (*machine.pins[:3], "..")
        cores = f"pinned to cores {', '.join(shown)}{where}"
    else:
        cores = f"{machine.cores} cores on {'these hosts' if several else 'this machine'}"
    return f"{head} · {means} · {threads} each{origin}, {cores}"


def describe_placement(
    plan: Plan, schedule: Schedule, machine: Machine, tensor_ranks: int = 1
) -> str:
    """The ranks of each host and the boundaries that cross hosts; "" for a single host."""
    hosts = machine.host_of_rank
    if len(set(hosts)) < 2:
        return ""
    pairs = {
        (boundary.source, target) for boundary in plan.boundaries for target in boundary.targets
    }
    first = hosts[::tensor_ranks]  # of the tensor ranks of a stage
    crossing = sum(
        any(first[ranks[source]] != first[ranks[target]] for ranks in schedule.placements)
        for source, target in pairs
    )
    verb = "crosses" if crossing == 1 else "cross"
    return f"{_ranks_of_hosts(hosts)} · {crossing} of {len(pairs)} boundaries {verb} hosts"


def placement_warnings(plan: Plan, machine: Machine, grid: Grid) -> Iterator[str]:
    """Warnings of other replicas than planned, of ranks on other hosts, and of tensor ranks on
    several."""
    copies = "" if grid.ranks_of_stage else replicas_warning(plan, grid.replicas)
    misplaced, apart = placement_warning(plan, machine), tensor_ranks_warning(grid, machine)
    yield from filter(None, (copies, misplaced, apart))


def tensor_ranks_warning(grid: Grid, machine: Machine) -> str:
    """A warning if tensor ranks of a stage are on several hosts; "" otherwise."""
    hosts = machine.host_of_rank
    groups = map(grid.tensor_group_of, range(len(hosts)))
    apart = next((ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1), None)
    if apart is None:
        return ""
    first, last = apart[0], apart[-1]
    return (
        f"--tensor-parallel {grid.tensor_ranks}, but ranks {first} and {last}, which share out one "
        f"stage, are on {hosts[first]} and {hosts[last]}: every split layer sums over the network. "
        "Use a number that divides the ranks of a host."
    )


def placement_warning(plan: Plan, machine: Machine) -> str:
    """A warning if the ranks are on other hosts than the plan assumes; "" otherwise."""
    planned = [spec.host for spec in plan.setting.ranks]
    hosts = machine.host_of_rank
    if len(set(planned)) < 2 or len(planned) != len(hosts):
        return ""
    if _pattern(planned) == _pattern(hosts):
        return ""
    return (
        f"the plan was made for {_ranks_of_hosts(planned)}, but there are "
        f"{_ranks_of_hosts(hosts)}: other boundaries cross hosts than planned."
    )


def replicas_warning(plan: Plan, replicas: int) -> str:
    """A warning for a plan with replicated stages when the run replicates whole pipelines; ""
    otherwise."""
    replicated = [stage for stage in plan.stages if len(stage.ranks) not in (1, replicas)]
    if not replicated:
        return ""
    stages = ", ".join(f"stage {stage.index} on {len(stage.ranks)} ranks" for stage in replicated)
    return (
        f"the plan has {stages}, but this run has {in_words(replicas)} of each stage, so a step "
        "takes longer than predicted."
    )


def _pattern(hosts: Sequence[str]) -> list[int]:
    """Hosts as numbers in the order of their first rank."""
    known = list(dict.fromkeys(hosts))
    return [known.index(host) for host in hosts]


def _ranks_of_hosts(hosts: Sequence[str]) -> str:
    """`ranks 0-1 on a, 2 on b`."""
    parts = []
    for host, group in groupby(range(len(hosts)), key=lambda rank: hosts[rank]):
        own = list(group)
        parts.append(f"{own[0]}-{own[-1]} on {host}" if len(own) > 1 else f"{own[0]} on {host}")
    return f"ranks {', '.join(parts)}"
