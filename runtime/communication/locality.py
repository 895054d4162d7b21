"""The same ranks in several splits over hosts, timed: does it matter who is whose neighbor?

The ranks are processes on real hosts, or on this machine. With emulated hosts, each rank opens its
sockets in the network of the host that the split gives it, so that the same processes measure all
splits, alternately: what else the machine does meets all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch

from ..config.settings import SettingsError
from ..distributed.interfaces import VARIABLES, address_of
from ..distributed.ranks import given_rank_info
from .hosts import Host, hosts, in_network
from .locality_result import SplitTimes, result_of
from .locality_steps import step_times
from .options import LocalityOptions, RankOptions
from .ring import ring_all_reduce
from .session import Session, run_task
from .splits import (
    ALL,
    Split,
    hosts_of,
    lone_ranks,
    members_of,
    ring_seconds,
    uses_per_step,
    written,
)
from .tcp_links import TcpRing, connect_ring, listen

_TASK = "locality"
_LOOPBACK = "127.0.0.1"


def compare_splits(options: LocalityOptions, where: RankOptions) -> dict[str, Any] | None:
    """Times all splits; returns the result as JSON values, and None in a rank other than 0 of a
    launcher.

    Raises SettingsError for splits that the hosts do not have, HostsError where hosts cannot be
    emulated.
    """
    splits = options.all_of(where.ranks)
    if options.splits == ALL and not splits:
        raise SettingsError(
            f"{where.ranks} ranks cannot be split over {options.hosts} hosts.",
            f"--ranks {options.hosts} or more, or fewer --hosts.",
        )
    if options.mbit_s is not None:
        return result_of(options, _on_emulated_hosts(options, splits, where))
    if options.model is not None:
        raise SettingsError(
            "--model trains on emulated hosts only, and --emulate is missing.",
            "--emulate 200mbit; on real hosts run asyncpipe-train in each split.",
        )
    if given_rank_info(where) is None:
        for split in splits:
            if len(split) > 1:
                raise SettingsError(
                    f"the split {written(split)} has {len(split)} hosts, and this is one.",
                    "--emulate 200mbit, or start the ranks on several hosts (docs/launching.md).",
                )
        where = replace(where, ranks=max(map(sum, splits)))
    times = run_task(_TASK, _task(options, splits, ()), where)
    return None if times is None else result_of(options, [SplitTimes(**each) for each in times])


def _on_emulated_hosts(
    options: LocalityOptions, splits: Sequence[Split], where: RankOptions
) -> list[SplitTimes]:
    if (info := given_rank_info(where)) is not None:
        raise SettingsError(
            f"--emulate makes hosts of this machine, but these ranks were started by "
            f"{info.launcher}.",
            "Omit --emulate to use the hosts of the ranks, or start the command alone.",
        )
    with hosts(_names(splits), mbit_s=options.mbit_s) as made:
        if options.model is not None:
            return [step_times(options, split, made, where) for split in splits]
        with in_network(made[0].process):  # raises where a rank could not do it either
            pass
        times: dict[str, SplitTimes] = {}
        for ranks in dict.fromkeys(map(sum, splits)):
            task = _task(options, [split for split in splits if sum(split) == ranks], made)
            raw = run_task(_TASK, task, replace(where, ranks=ranks))
            times |= {each["split"]: SplitTimes(**each) for each in raw}
        return [times[written(split)] for split in splits]


def _names(splits: Sequence[Split]) -> list[str]:
    return [f"h{number}" for number in range(1, max(map(len, splits)) + 1)]


def _task(
    options: LocalityOptions, splits: Sequence[Split], made: Sequence[Host]
) -> dict[str, Any]:
    return {
        **asdict(options),
        "splits": ",".join(map(written, splits)),
        "networks": [[host.name, host.address, host.process] for host in made],
    }


def run_rank(session: Session, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Times the splits as one of the ranks; the result is complete on every rank."""
    given = LocalityOptions(**{k: v for k, v in options.items() if k != "networks"})
    networks = [(name, address, process) for name, address, process in options["networks"]]
    splits = given.all_of(session.ranks)
    tensor = torch.ones(given.size_bytes // 4)
    torch.set_num_threads(1)
    rings = {}
    seconds: dict[Split, list[float]] = {split: [] for split in splits}
    try:
        for split in splits:
            rings[split] = _open_ring(session, split, networks)
        for repeat in range(-1, given.repeat):
            for split in splits:
                session.barrier()
                start_s = perf_counter()
                if (ring := rings[split]) is not None:
                    ring_all_reduce(ring, tensor, endpoint=given.endpoint, checks_lengths=False)
                if repeat >= 0:  # the first one only warms up
                    seconds[split].append(0.0 if ring is None else perf_counter() - start_s)
    finally:
        for ring in filter(None, rings.values()):
            ring.close()
    of_ranks = session.gathered([seconds[split] for split in splits])
    names = [name for name, _, _ in networks] or list(dict.fromkeys(session.hosts))
    return [
        asdict(_times(given, split, names, [of_rank[number] for of_rank in of_ranks]))
        for number, split in enumerate(splits)
    ]


def _times(
    options: LocalityOptions,
    split: Split,
    names: Sequence[str],
    of_ranks: Sequence[Sequence[float]],
) -> SplitTimes:
    serial = options.is_serial
    return SplitTimes(
        written(split),
        sum(split),
        tuple(names[: len(split)]),
        lone_ranks(split),
        uses_per_step(split, is_serial=serial),
        tuple(map(max, zip(*of_ranks, strict=True))),
        options.mbit_s
        and ring_seconds(split, options.size_bytes, options.mbit_s, is_serial=serial),
    )


def _open_ring(
    session: Session, split: Split, networks: Sequence[tuple[str, str, int]]
) -> TcpRing | None:
    """This rank's sockets in the ring of a split; None for a split without this rank."""
    if networks:
        members: tuple[int, ...] | None = tuple(range(session.ranks))
    else:
        members = members_of(split, session.hosts)
    if members is None:
        counts = [f"{ranks} on {host}" for host, ranks in Counter(session.hosts).items()]
        raise SettingsError(
            f"the split {written(split)} does not fit the ranks, {', '.join(counts)}.",
            "Start as many ranks on each host, or give --emulate 200mbit.",
        )
    is_member = session.rank in members
    place = members.index(session.rank) if is_member else 0
    address = _own_address()
    network: AbstractContextManager[None] = nullcontext()
    if networks and is_member:
        _, address, process = networks[hosts_of(split)[place]]
        network = in_network(process)
    with network:
        listener = listen(address) if is_member else None
        ends = session.gathered(listener.getsockname()[:2] if listener else None)
        if listener is None:
            return None
        target = tuple(ends[members[(place + 1) % len(members)]])
        return connect_ring(place, len(members), listener, target, session.timeout_s)


def _own_address() -> str:
    """The address over which the other ranks reach this one."""
    return address_of(os.environ.get(VARIABLES[0])) or _LOOPBACK
