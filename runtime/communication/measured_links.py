"""Measured ranks and links -> tables, a heat map, and the file of devices for `--devices`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from ..errors import TransportError
from ..formatting import Column, Table, write_bytes
from ..reports.rendering import render
from ..serialization import Origin, shaped

_MOSTLY = 0.7  # share of the time of messages that is hidden where transfers overlap


@dataclass(frozen=True)
class MeasuredRank:
    """A rank.

    host: the name of its host.
    device: the device that its messages are on.
    gflop_s: its rate of matrix products while the other ranks compute too, in 10^9 operations a
        second.
    free_bytes: its share of the free memory of its device.
    """

    host: str
    device: str
    gflop_s: float
    free_bytes: int


@dataclass(frozen=True)
class MeasuredLink:
    """The messages from one rank to another.

    source, target: the ranks.
    latency_us: the time of a message of one byte.
    gb_s: bandwidth of the largest messages, in 10^9 bytes a second.
    one_way_us: (bytes, time) of messages of each size.
    """

    source: int
    target: int
    latency_us: float
    gb_s: float
    one_way_us: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class MeasuredPair:
    """Two ranks that send each other the largest messages at once.

    gb_s: bandwidth of both directions together, in 10^9 bytes a second.
    duplex: that as a multiple of the bandwidth of the slower direction alone.
    hidden: the share of their time in which the processor of the busier rank is free to compute.
    """

    first: int
    second: int
    gb_s: float
    duplex: float
    hidden: float


@dataclass(frozen=True)
class Measurement:
    """All ranks, the links of every ordered pair of ranks, and every pair at once."""

    transport: str
    ranks: tuple[MeasuredRank, ...]
    links: tuple[MeasuredLink, ...]
    pairs: tuple[MeasuredPair, ...]

    @cached_property
    def link_of(self) -> dict[tuple[int, int], MeasuredLink]:
        """The link from one rank to another."""
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def pair_of(self) -> dict[tuple[int, int], MeasuredPair]:
        """Each pair under both of its orders."""
        return {
            ranks: pair
            for pair in self.pairs
            for ranks in ((pair.first, pair.second), (pair.second, pair.first))
        }

    def speed(self, rank: int) -> float:
        """The rank's rate of matrix products as a multiple of rank 0's."""
        return self.ranks[rank].gflop_s / self.ranks[0].gflop_s

    @property
    def tables(self) -> dict[str, Table]:
        """Tables of the ranks and of the links, by their headings."""
        tables = {"ranks": self._rank_table()}
        if self.links:
            tables["latency in µs, from the rank of the row to that of the column"] = self._matrix(
                lambda source, target: f"{self.link_of[source, target].latency_us:.3g}"
            )
            tables["bandwidth in GB/s, in the same direction"] = self._matrix(
                lambda source, target: f"{self.link_of[source, target].gb_s:.3g}"
            )
            tables["both directions at once: GB/s, and as a multiple of the slower one alone"] = (
                self._matrix(
                    lambda a, b: f"{self.pair_of[a, b].gb_s:.3g} {self.pair_of[a, b].duplex:.2f}×"
                )
            )
            tables["share of that time in which both ranks are free to compute"] = self._matrix(
                lambda a, b: f"{self.pair_of[a, b].hidden:.0%}"
            )
        return tables

    def _rank_table(self) -> Table:
        columns = (
            Column("rank"),
            Column("host", "text"),
            Column("device", "text"),
            Column("GFLOP/s"),
            Column("speed"),
            Column("free memory"),
        )
        rows = (
            (
                str(rank),
                own.host,
                own.device,
                f"{own.gflop_s:.3g}",
                f"{self.speed(rank):.2f}",
                write_bytes(own.free_bytes),
            )
            for rank, own in enumerate(self.ranks)
        )
        return Table(columns, tuple(rows))

    def _matrix(self, cell: Callable[[int, int], str]) -> Table:
        numbers = range(len(self.ranks))
        return Table(
            (Column("rank"), *(Column(str(number)) for number in numbers)),
            tuple(
                (str(row), *("" if row == column else cell(row, column) for column in numbers))
                for row in numbers
            ),
        )

    def to_toml(self) -> str:
        """The file of devices: a device for each rank, a link between every two hosts, and one
        between every two ranks of the same host. Transfers overlap with computation if most of
        their time is hidden on the links between hosts, or on all links of a single host."""
        hosts = list(dict.fromkeys(rank.host for rank in self.ranks))
        lines = [
            f"# Measured by asyncpipe-comm measure over {self.transport}: {len(self.ranks)} ranks "
            f"on {len(hosts)} host{'s' * (len(hosts) > 1)}."
        ]
        if self._overlaps:
            lines.append("overlap = true")
        for number, rank in enumerate(self.ranks):
            lines += [
                "",
                "[[devices]]",
                f"name = {json.dumps(device_name(number))}",
                f"host = {json.dumps(rank.host)}",
                f"speed = {self.speed(number):.3g}",
                f"memory_gib = {rank.free_bytes / 2**30:.3g}",
            ]
        for ends, pairs in self._joined():
            lines += ["", "[[links]]", ends, *self._link_lines(pairs)]
        return "\n".join(lines) + "\n"

    @property
    def _overlaps(self) -> bool:
        host = [rank.host for rank in self.ranks]
        between = [pair for pair in self.pairs if host[pair.first] != host[pair.second]]
        pairs = between or self.pairs
        return bool(pairs) and median(pair.hidden for pair in pairs) > _MOSTLY

    def _joined(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """The two ends of each link of the file, and the pairs of ranks that it stands for."""
        between: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for first, second in combinations(range(len(self.ranks)), 2):
            hosts = self.ranks[first].host, self.ranks[second].host
            if len(set(hosts)) > 1:
                between[json.dumps(sorted(hosts))].append((first, second))
            else:
                names = [device_name(first), device_name(second)]
                yield f"devices = {json.dumps(names)}", [(first, second)]
        for ends, pairs in between.items():
            yield f"between = {ends}", pairs

    def _link_lines(self, pairs: Sequence[tuple[int, int]]) -> list[str]:
        """The median of the pairs. A plan sends a tensor one way and its gradient back, so the
        slower direction counts."""
        both_ways = [
            (self.link_of[first, second], self.link_of[second, first]) for first, second in pairs
        ]
        gb_s = median(min(link.gb_s for link in both) for both in both_ways)
        latency_us = median(max(link.latency_us for link in both) for both in both_ways)
        duplex = median(min(2.0, max(1.0, self.pair_of[pair].duplex)) for pair in pairs)
        return [
            f"bandwidth_gb_s = {gb_s:.4g}",
            f"latency_us = {latency_us:.4g}",
            f"duplex = {duplex:.3g}",
        ]


def measurement_of(answer: Any) -> Measurement:
    """The measurement from its JSON."""
    return shaped(Measurement, answer, Origin("the measured links", TransportError))


def device_name(rank: int) -> str:
    """The name of a rank's device in the file."""
    return f"rank{rank}"


_CELL, _TOP, _MARGIN, _LETTER = 64, 56, 14, 6.6


@dataclass(frozen=True, slots=True)
class Cell:
    """One link: its place, its shade from 0 (slowest) to 1 (fastest), and its texts."""

    x: float
    y: float
    shade: float
    bandwidth: str
    latency: str
    title: str

    @property
    def is_dark(self) -> bool:
        return self.shade > 0.5


def link_map(measured: Measurement) -> str:
    """The SVG. It stands alone, and is the same text for the same measurement."""
    rates = [math.log(link.gb_s) for link in measured.links]
    low, range_of = min(rates, default=0.0), (max(rates, default=0.0) - min(rates, default=0.0))
    names = [f"{number} {rank.host}" for number, rank in enumerate(measured.ranks)]
    left = _MARGIN + _LETTER * max(map(len, names)) + 10
    cells = []
    for link in measured.links:
        shade = (math.log(link.gb_s) - low) / range_of if range_of else 1.0
        pair = measured.pair_of[link.source, link.target]
        cells.append(
            Cell(
                round(left + _CELL * link.target, 1),
                _TOP + _CELL * link.source,
                round(shade, 3),
                f"{link.gb_s:.3g}",
                f"{link.latency_us:.3g} µs",
                f"rank {names[link.source]} to rank {names[link.target]}: {link.gb_s:.3g} GB/s, "
                f"{link.latency_us:.3g} µs; both directions at once {pair.gb_s:.3g} GB/s",
            )
        )
    size = _CELL * len(names)
    return render(
        "link_map.svg.j2",
        heading=f"Bandwidth in GB/s and latency over {measured.transport}",
        names=names,
        cells=cells,
        cell=_CELL,
        left=round(left, 1),
        top=_TOP,
        width=round(max(left + size + _MARGIN, 420.0), 1),
        height=_TOP + size + _MARGIN,
    )
