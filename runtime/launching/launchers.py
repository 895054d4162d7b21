"""The environment of a process -> its rank among the others, as its launcher says.

torchrun, srun, Open MPI and MPICH (and Intel MPI) each say in environment variables who a
process is; the command run by itself starts its ranks as torchrun does. What a launcher does not
say, such as where rank 0 is under mpirun, the user does with `--master-addr`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

DEFAULT_PORT = 29500
"""Where ranks of several hosts meet when nothing names a port; torchrun's default too."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which process this is, of how many, on all hosts and on this one; and where rank 0 is.

    `head` is "" when nothing says it. `shares_store` when torch's elastic agent has the store that
    the ranks meet at; it starts them again up to `restarts` times, and this is the `attempt`-th.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    head: str = "127.0.0.1"
    port: int = 0
    launcher: str = ""
    shares_store: bool = False
    attempt: int = 0
    restarts: int = 0

    @property
    def all_local(self) -> bool:
        return self.local_ranks == self.ranks


ALONE = Place(rank=0, ranks=1, local_rank=0, local_ranks=1)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher; `job` are those that all processes of a run agree on."""

    name: str
    rank: str
    ranks: str
    local_rank: str
    local_ranks: str
    job: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID",),
    ),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    # Before Slurm's: in a Slurm job MPICH's mpirun has one task a host start its ranks. Those of
    # srun --mpi=pmi2 have PMI_RANK as well, but no MPI_LOCALRANKID.
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
    _Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def find_place(
    environment: Mapping[str, str],
    *,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Place | None:
    """The place that a launcher gave this process, or None when no launcher started it.

    A lone task of srun, as in an interactive job, is no rank: the command starts its own there.
    `master_addr` and `master_port` come before what the launcher says; the head is "" when there
    are several hosts and nothing says where rank 0 is.

    >>> find_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}).rank
    1
    """
    for launcher in _LAUNCHERS:
        needed = {launcher.rank, launcher.ranks}
        if "SLURM_PROCID" in environment:
            needed.add(launcher.local_rank)
        if needed <= environment.keys():
            if launcher.name == "srun" and environment[launcher.ranks] == "1":
                return None
            return _place(launcher, environment, master_addr, master_port)
    return None


def _place(
    launcher: _Launcher,
    environment: Mapping[str, str],
    master_addr: str | None,
    master_port: int | None,
) -> Place:
    rank, ranks = int(environment[launcher.rank]), int(environment[launcher.ranks])
    local_rank = int(environment.get(launcher.local_rank, rank))
    local_ranks = _local_ranks(launcher, environment, ranks)
    head = master_addr or environment.get("MASTER_ADDR")
    if head is None and launcher.name == "srun":
        head = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if head is None:
        head = "127.0.0.1" if local_ranks == ranks else ""
    port = master_port or environment.get("MASTER_PORT")
    if port is None:
        job = ".".join(environment[name] for name in launcher.job if name in environment)
        port = _port_of(job, on_one_host=local_ranks == ranks)
    return Place(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        head=head,
        port=int(port),
        launcher=launcher.name,
        **(_of_agent(environment) if launcher.name == "torchrun" else {}),
    )


def _of_agent(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "shares_store": environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "attempt": int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "restarts": int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)),
    }


def _local_ranks(launcher: _Launcher, environment: Mapping[str, str], ranks: int) -> int:
    said = environment.get(launcher.local_ranks)
    if launcher.name == "srun":
        node = int(environment.get("SLURM_NODEID", "0"))
        by_node = tasks_per_node(said or environment.get("SLURM_TASKS_PER_NODE", ""))
        if node < len(by_node):
            return by_node[node]
        by_option = environment.get("SLURM_NTASKS_PER_NODE", "")
        return min(ranks, int(by_option)) if by_option.isdigit() else ranks
    return int(said) if said else ranks


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's short form, node by node.

    >>> tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(chain.from_iterable(repeat(int(n), int(times or 1)) for n, times in parts))


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm node list.

    >>> first_host("gpu-a[03-05,11],gpu-b1"), first_host("r[1-2]n[01-16]-ib")
    ('gpu-a03', 'r1n01-ib')
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else None


def _port_of(job: str, *, on_one_host: bool) -> int:
    """A port that all processes of one job agree on without being told; below those that
    systems give to clients."""
    if not job and not on_one_host:
        return DEFAULT_PORT
    name = job or str(os.getppid())
    return 20_000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10_000
