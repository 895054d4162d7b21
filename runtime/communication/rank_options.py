"""The options that all subcommands of asyncpipe-comm share: the ranks, and how they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..config.execution_options import TRANSPORTS, ExecutionOptions
from ..config.learning_options import LAUNCH
from ..limits import Choice, Whole
from ..options import option, same_option

_own = partial(option, group=LAUNCH)
_same = partial(same_option, ExecutionOptions)


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Where the ranks of a task are, and how they communicate."""

    ranks: int = _own(
        2, Whole(1, 2**10, 4), "Ranks to start on this machine; a launcher's ranks are taken as is."
    )
    transport: str = _own(
        "auto",
        Choice(TRANSPORTS),
        "Transport of messages; auto selects the fastest that works here.",
    )
    device: str = _own(
        "auto",
        Choice(("auto", "cpu", "cuda")),
        "Memory that messages are in; auto takes the GPUs where every rank has one of its own.",
    )
    timeout_s: float = _same("timeout_s")
    interface: str | None = _same("interface")
    rank: int | None = _same("rank")
    world_size: int | None = _same("world_size")
    rendezvous: str | None = _same("rendezvous")
    master_addr: str | None = _same("master_addr")
    master_port: int | None = _same("master_port")
