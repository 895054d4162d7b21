"""Launcher's environment -> each process's rank and host.

The launchers torchrun, srun, Open MPI and MPICH (and Intel MPI) set environment variables with a
process's rank; without a launcher, the command starts its ranks as torchrun does. `--master-addr`
adds what a launcher leaves out, such as rank 0's address under mpirun. Ranks that are started by
hand have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the options of the same meaning; which
of them share a host is found in the rendezvous.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..config.settings import SettingsError

DEFAULT_PORT = 29500
"""The default port of the rendezvous across hosts, as in torchrun."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process's rank, globally and on its host, and rank 0's address.

    rank, ranks: the rank among all processes, and their number.
    local_rank, local_ranks: the same on this host; `local_ranks` is 0 until the ranks have met, if
        no launcher provides it.
    head, port: rank 0's address; `head` is "" if it is unknown.
    launcher: the name of the launcher.
    shares_store: True if torch's elastic agent serves the store of the rendezvous.
    attempt, restarts: the number of this attempt, and how often the agent restarts the ranks.
    file: the file in which the ranks meet, instead of at rank 0's address; "" for none.
    run: what torch's agent calls this run, so that no rank of another one enters it; "" if unknown.
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
    file: str = ""
    run: str = ""

    @property
    def all_local(self) -> bool:
        return self.local_ranks == self.ranks

    @property
    def meeting_place(self) -> str:
        """Where the ranks meet; "" if it is unknown."""
        if self.file:
            return f"file://{self.file}"
        return f"{self.head}:{self.port}" if self.head and self.port else ""


ALONE = RankInfo(rank=0, ranks=1, local_rank=0, local_ranks=1)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables of one launcher.

    job: variables with the same value in all processes of a run.
    """

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
    # Before Slurm's: in a Slurm job, MPICH's mpirun starts its ranks through one task per host.
    # Ranks of srun --mpi=pmi2 also have PMI_RANK, but no MPI_LOCALRANKID.
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


_HAND = replace(_LAUNCHERS[0], name="hand", job=())
"""Ranks that the user starts one by one, with some variables of torchrun's."""


class StartOptions(Protocol):
    """The options of a command that name this rank and the place where the ranks meet."""

    @property
    def rank(self) -> int | None: ...
    @property
    def world_size(self) -> int | None: ...
    @property
    def rendezvous(self) -> str | None: ...
    @property
    def master_addr(self) -> str | None: ...
    @property
    def master_port(self) -> int | None: ...


def given_rank_info(options: StartOptions) -> RankInfo | None:
    """The rank of this process by the options and the environment."""
    return find_rank_info(
        os.environ,
        rank=options.rank,
        world_size=options.world_size,
        rendezvous=options.rendezvous,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


def find_rank_info(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> RankInfo | None:
    """The rank that a launcher or the user gave this process, or None if it is not a rank.

    A lone task of srun, as in an interactive job, counts as no launcher: the command starts its own
    ranks there. The options override the environment, except for the rank of a launcher. The head
    is "" if there are several hosts and rank 0's address is unknown. Raises SettingsError for
    variables that are not what a launcher sets, and for options that contradict each other.

    >>> find_rank_info({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}).rank
    1
    """
    place = _place(rendezvous, master_addr, master_port)
    launcher = _launcher_of(environment)
    if rank is None and world_size is None and launcher is None:
        if rendezvous is not None:
            raise SettingsError(
                f"--rendezvous {rendezvous} is where ranks meet that are started one by one, but "
                "this process has no rank.",
                "Give --rank and --world-size too, or omit the option.",
            )
        return None
    if launcher is not None and launcher is not _HAND:
        info = _rank_info(launcher, environment, place)
        own, number = rank in (None, info.rank), world_size in (None, info.ranks)
        if own and number:
            return info
        raise SettingsError(
            f"{_typed('--rank', rank)}{_typed('--world-size', world_size)}but {launcher.name} "
            f"started this process as rank {info.rank} of {info.ranks}.",
            "Omit --rank and --world-size under a launcher.",
        )
    return _rank_info(_HAND, _with_options(environment, rank, world_size), place)


def _launcher_of(environment: Mapping[str, str]) -> _Launcher | None:
    """The launcher that started this process."""
    for launcher in _LAUNCHERS:
        needed = {launcher.rank, launcher.ranks}
        if "SLURM_PROCID" in environment:
            needed.add(launcher.local_rank)
        if needed <= environment.keys():
            if launcher.name == "srun" and environment[launcher.ranks] == "1":
                return None
            by_hand = launcher.rank == _HAND.rank and launcher.local_ranks not in environment
            return _HAND if by_hand else launcher
    return None


def _with_options(
    environment: Mapping[str, str], rank: int | None, world_size: int | None
) -> Mapping[str, str]:
    """The environment of a rank that is started by hand, with the options in it."""
    given = {_HAND.rank: rank, _HAND.ranks: world_size}
    known = {**environment, **{name: str(n) for name, n in given.items() if n is not None}}
    for name, flag, other in (
        (_HAND.rank, "--rank 0", "the rank"),
        (_HAND.ranks, "--world-size 2", "the number of ranks"),
    ):
        if name not in known:
            raise SettingsError(
                f"{_typed('--rank', rank)}{_typed('--world-size', world_size)}but {other} is "
                f"missing: neither an option nor {name} in the environment gives it.",
                f"Add it, such as {flag}.",
            )
    if rank is not None and (most := known[_HAND.ranks]).isdigit() and rank >= int(most):
        raise SettingsError(
            f"--rank {rank} is not less than the number of ranks, {most}.",
            f"Number the ranks from 0 to {int(most) - 1}.",
        )
    return known


def _typed(flag: str, value: int | None) -> str:
    return "" if value is None else f"{flag} {value}, "


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the ranks meet, as the options say it."""

    head: str | None = None
    port: int | None = None
    file: str = ""


def _place(rendezvous: str | None, master_addr: str | None, master_port: int | None) -> _Place:
    if rendezvous is None:
        return _Place(master_addr, master_port)
    if master_addr is not None or master_port is not None:
        flag = "--master-addr" if master_addr is not None else "--master-port"
        raise SettingsError(
            f"--rendezvous {rendezvous} and {flag} both say where the ranks meet.",
            f"Omit {flag}.",
        )
    url = urlsplit(rendezvous)
    if url.scheme == "file":
        return _Place(file=url.path)
    return _Place(url.hostname, url.port)


def _rank_info(launcher: _Launcher, environment: Mapping[str, str], place: _Place) -> RankInfo:
    rank, ranks = (_number(environment, name) for name in (launcher.rank, launcher.ranks))
    if rank >= ranks:
        raise _unfit(launcher.rank, environment, f"less than {launcher.ranks}={ranks}")
    local_ranks = _local_ranks(launcher, environment, ranks)
    local_rank = _number(environment, launcher.local_rank, rank) if local_ranks else 0
    may_be_on_one_host = local_ranks in (0, ranks)
    head = place.head or environment.get("MASTER_ADDR")
    if head is None and launcher.name == "srun":
        head = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if head is None:
        head = "127.0.0.1" if may_be_on_one_host else ""
    port = place.port or _number(environment, "MASTER_PORT", 0)
    if not port:
        job = ".".join(environment[name] for name in launcher.job if name in environment)
        port = _port_of(job, on_one_host=local_ranks == ranks)
    if place.file:
        head, port = "", 0
    of_agent = _of_agent(environment) if launcher.name == "torchrun" else {}
    return RankInfo(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        head=head,
        port=port,
        file=place.file,
        launcher=launcher.name,
        **of_agent,
    )


def _of_agent(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "shares_store": environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "attempt": _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        "restarts": _number(environment, "TORCHELASTIC_MAX_RESTARTS", 0),
        "run": environment.get("TORCHELASTIC_RUN_ID", ""),
    }


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that is a whole number. Raises SettingsError for another value."""
    if default is not None and name not in environment:
        return default
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _unfit(name, environment, "a whole number")
    return int(text)


def _unfit(name: str, environment: Mapping[str, str], what: str) -> SettingsError:
    return SettingsError(
        f"the environment has {name}={environment[name][:40]}, which is not {what}.",
        f"Start the ranks with torchrun, srun or mpirun, or unset {name}.",
    )


def _local_ranks(launcher: _Launcher, environment: Mapping[str, str], ranks: int) -> int:
    value = environment.get(launcher.local_ranks)
    if launcher.name == "srun":
        node = _number(environment, "SLURM_NODEID", 0)
        by_node = tasks_per_node(value or environment.get("SLURM_TASKS_PER_NODE", ""))
        if node < len(by_node):
            return by_node[node]
        by_option = environment.get("SLURM_NTASKS_PER_NODE", "")
        return min(ranks, int(by_option)) if by_option.isdigit() else 0
    if launcher is _HAND:
        return 0
    return _number(environment, launcher.local_ranks) if value else ranks


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's tasks per node, expanded from its short form.

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
    """A port that all processes of a job derive from its name alone; below the ports that operating
    systems assign to clients."""
    if not job and not on_one_host:
        return DEFAULT_PORT
    name = job or str(os.getppid())
    return 20_000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10_000
