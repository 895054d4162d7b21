"""The options of asyncpipe-comm: of the ranks, which all subcommands share, and of each subcommand.

Imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from ..config.execution_options import TRANSPORTS, ExecutionOptions
from ..config.learning_options import LAUNCH
from ..limits import Choice, Flag, Text, Whole, bytes_of, path
from ..options import option, same_option
from .operation_facts import DTYPES, ENDPOINTS, MOST_THREADS, OPERATIONS, REDUCERS, EndpointKind
from .splits import ALL, Split, all_splits, read_splits

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


def names_in(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names in a list with commas; () unless all are known.

    >>> [names_in(text, ("sum", "max")) for text in ("max,sum", "all", "most")]
    [('max', 'sum'), ('sum', 'max'), ()]
    """
    if text == ALL:
        return tuple(known)
    names = tuple(dict.fromkeys(text.split(",")))
    return names if set(names) <= set(known) else ()


def sizes_in(text: str) -> tuple[int, ...]:
    """
    >>> sizes_in("4KiB,1MiB"), sizes_in("4KiB,much")
    ((4096, 1048576), ())
    """
    sizes = [bytes_of(part) for part in text.split(",")]
    return tuple(size for size in sizes if size is not None) if all(sizes) else ()


def _names(known: Collection[str], example: str) -> Text:
    def accepts(text: str) -> tuple[str, ...]:
        return names_in(text, known)

    return Text(f"{ALL}, or a list with commas of {', '.join(known)}", example, accepts)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The operations to time, and how."""

    op: str = option(ALL, _names(OPERATIONS, "all_reduce"), "Operations to time, with commas.")
    sizes: str = option(
        "4KiB,64KiB,1MiB",
        Text("a list with commas of sizes", "4KiB,1MiB", sizes_in),
        "Sizes of the tensors, with commas.",
    )
    dtype: str = option(
        "f32",
        _names(DTYPES, "f32"),
        f"Dtypes, with commas: {', '.join(DTYPES)}, or {ALL}.",
    )
    reduce: str = option(
        "sum",
        _names(REDUCERS, "max"),
        f"Reductions, with commas: {', '.join(REDUCERS)}, or {ALL}.",
    )
    iterations: int = option(20, Whole(1, 10**6, 20), "Timed calls of each operation.")
    warmup: int = option(5, Whole(0, 10**6, 5), "Calls before the timed ones.")
    endpoint: EndpointKind = option(
        "concurrent",
        Choice(ENDPOINTS),
        "How a rank of the ring sends and receives: concurrent, or serial, which finishes one "
        "before it begins the other.",
    )
    threads: int = option(
        2,
        Whole(2, MOST_THREADS, 4),
        "Threads of send_recv_threads, each with a process group of its own.",
    )
    check: bool = option(False, Flag(), "Compare each result with the expected one (#wrong).")
    support: bool = option(
        False,
        Flag(),
        "Time nothing; try the operations with all dtypes and reductions, and print which of them "
        "the backend supports.",
    )
    trace: str | None = option(
        None, path("trace.json"), "Write a trace for ui.perfetto.dev to this file."
    )
    events: str | None = option(
        None,
        path("events.txt"),
        "Write the events of the largest ring_all_reduce, one a line, to this file.",
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The messages to measure links with, and the files to write."""

    sizes: str = option(
        "4KiB,64KiB,1MiB,16MiB",
        Text("a list with commas of sizes", "4KiB,1MiB", sizes_in),
        "Sizes of the messages, with commas; the bandwidth is that of the largest.",
    )
    output: str | None = option(
        None,
        path("devices.toml"),
        "Write the ranks and links to this file, which asyncpipe-partition reads with --devices.",
    )
    svg: str | None = option(
        None, path("links.svg"), "Draw the bandwidths of all links into this file."
    )


_FACTORS = {"k": 1e-3, "m": 1.0, "g": 1e3}


def rate_of(text: str) -> float | None:
    """A rate in Mbit/s.

    >>> rate_of("200mbit"), rate_of("1.5gbit"), rate_of("200"), rate_of("0mbit")
    (200.0, 1500.0, None, None)
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmg])bit", text, re.IGNORECASE)
    return float(match[1]) * _FACTORS[match[2].lower()] or None if match else None


@dataclass(frozen=True, kw_only=True)
class LocalityOptions:
    """The splits to compare, and the work to time in them."""

    splits: str = option(
        "4-2-2,4-3-1",
        Text("all, or splits such as 4-2-2 with commas", "4-2-2,4-3-1", lambda text: _are(text)),
        "Ranks on each host, with commas between the splits, or all: every split of --ranks over "
        "--hosts.",
    )
    hosts: int = option(2, Whole(1, 2**10, 2), "Number of hosts of --splits all.")
    repeat: int = option(
        20, Whole(1, 10**6, 20), "Timed repeats of each split, with --model training steps."
    )
    emulate: str | None = option(
        None,
        Text("a rate such as 200mbit", "200mbit", rate_of),
        "Emulate the hosts on this machine, as network namespaces whose links have this rate in "
        "each direction; requires root. [default: the hosts of the launcher]",
    )
    endpoint: EndpointKind = option(
        "serial",
        Choice(ENDPOINTS),
        "How a rank of the ring sends and receives: concurrent, or serial, which finishes one "
        "before it begins the other.",
    )
    size: str = option(
        "4MiB", Text("a size such as 4MiB", "4MiB", bytes_of), "Size of the all-reduce."
    )
    model: str | None = option(
        None,
        path("generated_models/gpt2_4p"),
        "Generated folder whose training steps are timed instead of a ring all-reduce.",
    )
    svg: str | None = option(None, path("locality.svg"), "Write a plot of all times to this file.")

    @property
    def mbit_s(self) -> float | None:
        """The rate of the emulated links."""
        return None if self.emulate is None else rate_of(self.emulate)

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.size) or 0

    @property
    def is_serial(self) -> bool:
        return self.endpoint == "serial"

    def all_of(self, ranks: int) -> tuple[Split, ...]:
        """The splits to compare; `ranks` are those of `all`."""
        return all_splits(ranks, self.hosts) if self.splits == ALL else read_splits(self.splits)


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The program to diagnose: how its ranks communicate, and the folder that it writes to."""

    output: str | None = option(
        None,
        path("runs"),
        "Folder that the program writes to, in which a few small files are written and removed. "
        "[default: the working folder]",
    )
    endpoint: EndpointKind = option(
        "concurrent",
        Choice(ENDPOINTS),
        "How the program sends and receives: concurrent, as asyncpipe does, or serial, which "
        "finishes one before it begins the other.",
    )
    threads: int = option(
        1,
        Whole(1, MOST_THREADS, 4),
        "Threads of a rank that share one communicator in the program; 1 if none do, as in "
        "asyncpipe.",
    )


def _are(text: str) -> bool:
    return text == ALL or bool(read_splits(text))
