"""Splits of ranks over hosts, and a model of the endpoints that predicts which of them are slow.

A split `4-3-1` places ranks 0 to 3 on the first host, 4 to 6 on the second, and 7 alone on the
third. In a step of a ring every rank sends to the next one and receives from the one before. The
model counts how often the busiest rank uses the network in a step: once if it only sends or only
receives over it, and twice if it does both, unless it does both at the same time. A model of the
links alone sees no difference, since every host sends and receives as much in each split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, combinations, repeat

Split = tuple[int, ...]

ALL = "all"


def read_split(text: str) -> Split | None:
    """
    >>> read_split("4-3-1"), read_split("4-0"), read_split("x")
    ((4, 3, 1), None, None)
    """
    if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})*", text):
        return None
    parts = tuple(map(int, text.split("-")))
    return parts if all(parts) and sum(parts) > 1 else None


def read_splits(text: str) -> tuple[Split, ...]:
    """The splits in a list with commas; () unless all are legal.

    >>> read_splits("4-2-2,4-3-1"), read_splits("4-2-2,none")
    (((4, 2, 2), (4, 3, 1)), ())
    """
    splits = [read_split(part) for part in text.split(",")]
    return tuple(split for split in splits if split is not None) if all(splits) else ()


def all_splits(ranks: int, hosts: int) -> tuple[Split, ...]:
    """Every split of this number of ranks over this number of hosts.

    >>> all_splits(5, 2)
    ((1, 4), (2, 3), (3, 2), (4, 1))
    """
    cuts = ((0, *inner, ranks) for inner in combinations(range(1, ranks), hosts - 1))
    return tuple(tuple(b - a for a, b in zip(ends, ends[1:], strict=False)) for ends in cuts)


def written(split: Split) -> str:
    """
    >>> written((4, 3, 1))
    '4-3-1'
    """
    return "-".join(map(str, split))


def hosts_of(split: Split) -> tuple[int, ...]:
    """The host of each rank.

    >>> hosts_of((2, 1))
    (0, 0, 1)
    """
    return tuple(chain.from_iterable(map(repeat, range(len(split)), split)))


def members_of(split: Split, hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks that make a split, the first of each host; `hosts` has the host of each rank. None
    if there are too few.

    >>> members_of((2, 1), ["a", "a", "b", "b"]), members_of((1, 3), ["a", "a", "b", "b"])
    ((0, 1, 2), None)
    """
    names = list(dict.fromkeys(hosts))
    of_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    if len(split) > len(names) or any(
        len(own) < part for own, part in zip(of_host, split, strict=False)
    ):
        return None
    return tuple(chain.from_iterable(own[:part] for own, part in zip(of_host, split, strict=False)))


def lone_ranks(split: Split, *, is_ring: bool = True) -> tuple[int, ...]:
    """The ranks whose neighbors on both sides are on other hosts; the ends of a pipeline have one
    neighbor.

    >>> lone_ranks((4, 3, 1)), lone_ranks((4, 2, 2))
    ((7,), ())
    >>> lone_ranks((1, 1, 1), is_ring=False)
    (1,)
    """
    hosts = hosts_of(split)
    return tuple(rank for rank in lone_among(hosts) if is_ring or 0 < rank < len(hosts) - 1)


def lone_among(hosts: Sequence[object]) -> tuple[int, ...]:
    """The ranks of a ring whose neighbors on both sides are on other hosts; `hosts` has the host of
    each rank.

    >>> lone_among(["a", "a", "b"]), lone_among(["a"])
    ((2,), ())
    """
    return tuple(
        rank
        for rank, host in enumerate(hosts)
        if hosts[rank - 1] != host and hosts[(rank + 1) % len(hosts)] != host
    )


def uses_per_step(split: Split, *, is_serial: bool) -> int:
    """How often, one after the other, the busiest rank uses the network in a step of a ring.

    >>> [uses_per_step(read_split(text), is_serial=True) for text in ("4-2-2", "4-3-1", "3-3")]
    [1, 2, 1]
    >>> uses_per_step((4, 3, 1), is_serial=False), uses_per_step((8,), is_serial=True)
    (1, 0)
    """
    if len(split) == 1:
        return 0
    return 2 if is_serial and lone_ranks(split) else 1


def ring_seconds(split: Split, size_bytes: int, mbit_s: float, *, is_serial: bool) -> float:
    """The predicted time of a ring all-reduce in which only the network takes time."""
    ranks = sum(split)
    step_s = 8 * size_bytes / ranks / (1e6 * mbit_s)
    return 2 * (ranks - 1) * step_s * uses_per_step(split, is_serial=is_serial)
