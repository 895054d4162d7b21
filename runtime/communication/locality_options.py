"""The options of asyncpipe-comm locality."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..limits import Choice, Text, Whole, bytes_of, path
from ..options import option
from .operation_facts import ENDPOINTS, EndpointKind
from .splits import ALL, Split, all_splits, read_splits

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


def _are(text: str) -> bool:
    return text == ALL or bool(read_splits(text))
