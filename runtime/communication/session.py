"""A task of asyncpipe-comm -> its ranks, started on this machine or joined under a launcher.

`run_task` starts a process for each rank, or finds the ranks that torchrun, srun or mpirun started;
in each of them `run_rank(session, options)` of the task's module runs, and rank 0's answer is the
result. Options and answers are JSON values.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import count, permutations
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from ..distributed.process_groups import connect, gather_alike, leave
from ..distributed.ranks import ALONE, RankInfo, given_rank_info
from ..errors import TransportError
from ..launch.local import run_command, worker_command
from ..launch.rank import OwnRank, as_rank
from ..transports.choose import choose, find_circumstances, open_transport, whereabouts
from ..transports.nccl import Lane
from ..transports.protocol import DIRECTIONS, Transport
from .options import RankOptions

TASKS = ("measure", "bench", "locality", "diagnose")
"""The modules of this package with a `run_rank`; a process runs no others."""

_ANSWER = "answer.json"


@dataclass(frozen=True)
class Session:
    """One rank of a task.

    info: this rank among the others.
    hosts: the name of each rank's host.
    transport: the transport between the ranks: local, shm, gloo, mpi or nccl.
    device: the device that messages are on.
    timeout_s: the longest wait for another rank.
    group: a gloo group of all ranks, torch's default one; None for a lone rank.
    """

    info: RankInfo
    hosts: tuple[str, ...]
    transport: str
    device: torch.device
    timeout_s: float
    group: dist.ProcessGroup | None = None
    _calls: Iterator[int] = field(default_factory=count, repr=False, compare=False)
    """The number of the next call in which ranks wait for each other."""

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def ranks(self) -> int:
        return self.info.ranks

    def barrier(self) -> None:
        """Returns when every rank has called it. Raises TransportError, with the ranks that have
        not, on a timeout."""
        if self.group is None:
            return
        with self._waiting():
            dist.barrier(group=self.group)

    def gathered(self, value: Any) -> list[Any]:
        """The JSON value of each rank, on all ranks. Raises TransportError as `barrier` does."""
        with self._waiting():
            return _gathered(value, self.ranks, self.group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Every rank posts the number of its call, so that an error names those that are late."""
        if self.group is None:
            yield
            return
        calls = PrefixStore("asyncpipe calls", _get_default_store())
        call = next(self._calls)
        try:
            calls.set(str(self.rank), str(call))
            yield
        except RuntimeError as error:
            who = f"rank {self.rank} on {self.hosts[self.rank]}"
            if "timed out" not in str(error).lower():
                text = " ".join(str(error).split())[:200]
                raise TransportError(f"{who} lost the other ranks: {text}") from error
            late = self._behind(calls, call) or "the other ranks"
            raise TransportError(
                f"{who} waited {self.timeout_s:g} s for {late}.",
                f"See what {late} did, or allow more time with --timeout-s.",
            ) from error

    def _behind(self, calls: Store, call: int) -> str:
        """The ranks that are late for a call, in words."""
        try:
            late = [
                f"rank {rank} on {host}"
                for rank, host in enumerate(self.hosts)
                if not calls.check([str(rank)]) or int(calls.get(str(rank))) < call
            ]
        except RuntimeError:  # rank 0, which serves the store, is gone
            return ""
        return ", ".join(late)

    def open_transport(self, lanes: Iterable[Lane] | None = None) -> Transport:
        """A transport among all ranks, which all of them open.

        lanes: the pairs of ranks that communicate, as NCCL needs to know them. [default: all]
        """
        pairs = permutations(range(self.ranks), 2)
        all_pairs = [(way, *pair) for pair in pairs for way in sorted({*DIRECTIONS.values()})]
        return open_transport(
            self.transport,
            self.group,
            timeout_s=self.timeout_s,
            device=self.device,
            lanes=all_pairs if lanes is None else lanes,
        )


def run_task(task: str, options: Mapping[str, Any], where: RankOptions) -> Any:
    """Runs a task in all ranks; returns rank 0's answer, and None in another rank of a launcher.

    Raises RankError with the first cause when a rank that was started here fails.
    """
    info = given_rank_info(where)
    if info is not None:
        answer = _as_member(info, task, options, where)
        return answer if info.rank == 0 else None
    if where.ranks == 1:
        return _as_member(ALONE, task, options, where)
    with tempfile.TemporaryDirectory(prefix="asyncpipe-comm-") as name:
        folder = Path(name)
        given = json.dumps({"task": task, "options": dict(options), "where": asdict(where)})
        command = worker_command(__name__, name, given)
        run_command(command, where.ranks, folder, over_mpi=where.transport == "mpi")
        return json.loads((folder / _ANSWER).read_text(encoding="utf-8"))


def _as_member(info: RankInfo, task: str, options: Mapping[str, Any], where: RankOptions) -> Any:
    """This rank's answer, once all ranks have one."""
    run_rank = _run_rank_of(task)
    session = _open_session(info, where)
    try:
        answer = run_rank(session, options)
        session.barrier()
    finally:
        leave()
    return answer


def _run_rank_of(task: str) -> Callable[[Session, Mapping[str, Any]], Any]:
    if task not in TASKS:
        raise ValueError(f"{task!r} is not a task: {', '.join(TASKS)}")
    run_rank: Callable[[Session, Mapping[str, Any]], Any] = import_module(
        f"{__package__}.{task}"
    ).run_rank
    return run_rank


def _open_session(info: RankInfo, where: RankOptions) -> Session:
    """Connects to the other ranks and agrees with them on a transport and a device."""
    group = None
    if info.ranks > 1:
        info, group = connect(
            info,
            requested=where.interface,
            timeout_s=where.timeout_s,
            over_mpi=where.transport == "mpi",
        )
    device = _device(where.device, info, group)
    places = [whereabouts(device)]
    if group is not None:
        places = gather_alike(places[0], info.ranks, group)
    choice = choose(where.transport, find_circumstances(group, places))
    hosts = tuple(_gathered(socket.gethostname(), info.ranks, group))
    return Session(info, hosts, choice.name, device, where.timeout_s, group)


def _device(name: str, info: RankInfo, group: dist.ProcessGroup | None) -> torch.device:
    """The device of this rank; with `auto` a GPU if every rank of every host has its own."""
    has_own = torch.cuda.device_count() >= info.local_ranks
    if name == "auto":
        name = "cuda" if all(_gathered(has_own, info.ranks, group)) else "cpu"
    elif name == "cuda" and not has_own:
        raise TransportError(
            f"{socket.gethostname()} has {torch.cuda.device_count()} GPUs for {info.local_ranks} "
            "ranks.",
            "--device cpu, or fewer ranks.",
        )
    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(info.local_rank)
    return torch.device("cuda", info.local_rank)


def _gathered(value: Any, ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    content = json.dumps(value).encode()
    sizes = gather_alike(len(content).to_bytes(8, "big"), ranks, group)
    longest = max(int.from_bytes(size, "big") for size in sizes)
    return [json.loads(part) for part in gather_alike(content.ljust(longest), ranks, group)]


def run(folder: str, given: str) -> NoReturn:
    """Runs a task as one of the processes that `run_task` started."""
    raw = json.loads(given)

    def work(own: OwnRank) -> None:
        answer = _as_member(own.info, raw["task"], raw["options"], RankOptions(**raw["where"]))
        if own.info.rank == 0:
            (Path(folder) / _ANSWER).write_text(json.dumps(answer), encoding="utf-8")

    as_rank(Path(folder), work, counts_steps=False)
