"""Shares of a whole -> segments of a bar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar in percent of the scale, with a letter if there is room for it."""

    kind: str
    percent: float
    letter: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: its segments, and in percent of the scale where more begins than there may be
    (`over_from` to the end of the bar)."""

    label: str
    segments: tuple[Segment, ...]
    value: str
    title: str
    is_slowest: bool = False
    over_from: float | None = None
    over_percent: float = 0.0
    limit: float | None = None


def segment(kind: str, letter: str, share: float, title: str) -> Segment:
    """A part that has such a share of the scale."""
    return Segment(kind, 100 * share, letter if share > 0.03 else "", title)
