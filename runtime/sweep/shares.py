"""A machine and how many runs at once -> what each computes with.

Runs share the cores as ranks do (`launching/pinning.py`): each is kept to cores of its own, and its
ranks share these. Where cores cannot be parted, each rank computes with fewer threads. GPUs are
shared out evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..launching.pinning import Cpus, share_cores
from ..launching.topology import Topology
from ..training.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several runs at once has: its CPUs, none meaning all, and what its environment
    has besides."""

    cpus: Cpus = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)


def share_machine(
    jobs: int, topology: Topology, *, ranks: int = 1, gpus: Sequence[str] | None = None
) -> tuple[Share, ...]:
    """The share of each of `jobs` runs at once, of `ranks` ranks at most; `gpus` are those that
    are to be shared out, as CUDA_VISIBLE_DEVICES names them.

    Raises SettingsError for more runs than GPUs.
    """
    if jobs == 1:
        return (Share(),)
    if gpus is not None and len(gpus) < jobs:
        raise SettingsError(
            f"--jobs {jobs}, but {len(gpus) or 'no'} GPUs visible: each run needs its own.",
            f"--jobs {max(1, len(gpus))}",
        )
    cpus = share_cores(topology, jobs)
    threads = max(1, topology.usable // (jobs * ranks))
    return tuple(
        Share(
            cpus[job] if cpus else frozenset(),
            ({} if cpus else {"OMP_NUM_THREADS": str(threads)})
            | (
                {"CUDA_VISIBLE_DEVICES": ",".join(_part(gpus, job, jobs))}
                if gpus is not None
                else {}
            ),
        )
        for job in range(jobs)
    )


def _part(items: Sequence[str], index: int, parts: int) -> Sequence[str]:
    return items[len(items) * index // parts : len(items) * (index + 1) // parts]
