"""The tables of asyncpipe-comm bench, with the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..errors import TransportError
from ..formatting import Column, Table
from .operation_facts import DTYPES, NOT_DEFINED, OBJECT


def time_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each `BenchRow`."""
    columns = (
        Column("op", "text"),
        Column("size (B)"),
        Column("count", leave_out=3),
        Column("type", "text"),
        Column("redop", "text"),
        Column("root", leave_out=4),
        Column("time (us)"),
        Column("min (us)", leave_out=2),
        Column("p99 (us)", leave_out=1),
        Column("algbw (GB/s)"),
        Column("busbw (GB/s)"),
        Column("#wrong"),
        Column("over", "text", leave_out=5),
    )
    return Table(columns, tuple(_cells(row) for row in rows))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = (f"{row[name]:.1f}" for name in ("median_us", "min_us", "p99_us"))
    rates = ("-" if (rate := row[name]) is None else f"{rate:.3f}" for name in _RATES)
    wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
    about = row["op"], str(row["size_bytes"]), str(row["count"]), row["dtype"]
    return (*about, row["reduce"] or "none", str(row["root"]), *times, *rates, wrong, row["over"])


_RATES = "alg_gb_s", "bus_gb_s"


def average_busbw(rows: Iterable[Mapping[str, Any]]) -> str:
    """
    >>> average_busbw([{"bus_gb_s": 0.5}, {"bus_gb_s": 1.0}, {"bus_gb_s": None}])
    'average busbw: 0.750 GB/s'
    """
    rates = [row["bus_gb_s"] for row in rows if row["bus_gb_s"] is not None]
    return f"average busbw: {fmean(rates):.3f} GB/s" if rates else "average busbw: none"


def check_results(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises TransportError when compared results were wrong."""
    for row in rows:
        if row["wrong"]:
            words = f"{row['op']} {row['reduce']}".strip()
            raise TransportError(
                f"{row['wrong']} elements of {words} of {row['size_bytes']} bytes ({row['dtype']}) "
                f"over {row['over']} differ from the expected ones.",
                "Repeat it with another --transport or --interface to find the faulty part.",
            )


def ring_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each `RingRow`."""
    columns = (
        Column("ring (B)"),
        Column("type", "text"),
        Column("redop", "text"),
        Column("scatter-reduce (us)"),
        Column("all-gather (us)"),
        Column("sent by each rank (B)", "text"),
        Column("2K(N-1)/N"),
    )
    return Table(
        columns,
        tuple(
            (
                str(row["size_bytes"]),
                row["dtype"],
                row["reduce"],
                f"{row['scatter_reduce_us']:.1f}",
                f"{row['all_gather_us']:.1f}",
                " ".join(map(str, row["sent"])),
                _exact(2 * row["size_bytes"] * (len(row["sent"]) - 1), len(row["sent"])),
            )
            for row in rows
        ),
    )


def _exact(number: int, divisor: int) -> str:
    return str(number // divisor) if number % divisor == 0 else f"{number / divisor:.1f}"


def product_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each `ProductRow`."""
    columns = (
        Column("product", "text"),
        Column("m, k, n"),
        Column("type", "text"),
        *(Column(f"{matrix} sent (B)") for matrix in "ABC"),
        Column("sum"),
        Column("formula"),
    )
    return Table(
        columns,
        tuple(
            (
                row["op"],
                str(row["side"]),
                row["dtype"],
                *(str(row["sent"][matrix]) for matrix in "ABC"),
                str(sum(row["sent"].values())),
                str(sum(row["formula"].values())),
            )
            for row in rows
        ),
    )


def support_table(attempts: Sequence[Mapping[str, str]]) -> Table:
    """A row for each operation and reduction: `yes`, `no`, or `-` where nothing is defined."""
    found = {(one["op"], one["reduce"], one["dtype"]): one["fault"] for one in attempts}
    names = dict.fromkeys((one["op"], one["reduce"]) for one in attempts)
    columns = (Column("op", "text"), *(Column(dtype, "text") for dtype in (*DTYPES, OBJECT)))

    def cell(op: str, reduce: str, dtype: str) -> str:
        fault = found.get((op, reduce, dtype), NOT_DEFINED)
        return {"": "yes", NOT_DEFINED: "-"}.get(fault, "no")

    return Table(
        columns,
        tuple(
            (f"{op} {reduce}".strip(), *(cell(op, reduce, dtype) for dtype in (*DTYPES, OBJECT)))
            for op, reduce in names
        ),
    )


def reasons(attempts: Iterable[Mapping[str, str]]) -> list[str]:
    """A line for each reason why something is not supported, with what it applies to."""
    by_reason: dict[str, list[str]] = {}
    for one in attempts:
        if one["fault"] and one["fault"] != NOT_DEFINED:
            words = f"{one['op']} {one['reduce']} {one['dtype']}"
            by_reason.setdefault(one["fault"], []).append(" ".join(words.split()))
    return [f"{reason} ({', '.join(names)})" for reason, names in by_reason.items()]
