"""The options of asyncpipe-comm bench."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..limits import Choice, Flag, Text, Whole, bytes_of, path
from ..options import option
from .operation_facts import DTYPES, ENDPOINTS, MOST_THREADS, OPERATIONS, REDUCERS, EndpointKind

ALL = "all"


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
