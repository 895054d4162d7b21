"""`--freeze plasticity`: a block whose outputs hardly change from event to event is done.

At each event all blocks see the same micro-batch. The similarities of a block are, for every two of
its samples, the inner product of the block's outputs, each row divided by its length. The distance
between two events is the mean square of the differences of all similarities: the
similarity-preserving loss (Tung and Mori, ICCV 2019), by which Egeria (Wang et al., EuroSys 2023)
compares a model with an earlier copy of it. Here the similarities of the last event stand for that
copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat, takewhile
from typing import Any

Similarities = tuple[float, ...]
"""The similarities of a block's samples, row by row; empty if the block has stopped training."""

CALM = 2
"""The events in a row with a small distance after which a block is done."""


@dataclass(frozen=True)
class Evidence:
    """The measurements of each block that may freeze.

    similarities: those of the last event.
    distances: the distances between the last two events; empty before the second one, and 0 for
        blocks that have stopped training.
    largest: the largest distance so far.
    calm: the number of events in a row, up to the last one, with a small distance.
    """

    similarities: tuple[Similarities, ...] = ()
    distances: tuple[float, ...] = ()
    largest: tuple[float, ...] = ()
    calm: tuple[int, ...] = ()

    def after(self, similarities: Sequence[Similarities], tolerance: Fraction) -> Evidence:
        """The evidence after an event; a distance of at most `tolerance` of the largest one is
        small. Similarities of another number of samples are compared with later ones alone."""
        now = tuple(similarities)
        pairs = list(zip(self.similarities, now, strict=False))
        if not pairs or any(new and len(old) != len(new) for old, new in pairs):
            return Evidence(now, largest=self.largest)
        distances = tuple(distance(old, new) if new else 0.0 for old, new in pairs)
        largest = tuple(map(max, self.largest or repeat(0.0), distances))
        calm = tuple(
            before + 1 if own <= float(tolerance) * most else 0
            for before, own, most in zip(self.calm or repeat(0), distances, largest, strict=False)
        )
        return Evidence(now, distances, largest, calm)

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> Evidence:
        """The evidence that a checkpoint has as JSON."""
        return cls(**{name: _tuples(values) for name, values in (state or {}).items()})


def in_a_row(calm: Sequence[int]) -> int:
    """The number of blocks that are done, from the first one on.

    >>> in_a_row((5, 2, 1, 3))
    2
    """
    return len(list(takewhile(lambda events: events >= CALM, calm)))


def distance(before: Similarities, now: Similarities) -> float:
    """The mean square of the differences.

    >>> distance((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 1.0))
    0.5
    """
    squares = ((new - old) ** 2 for old, new in zip(before, now, strict=True))
    return sum(squares) / len(now)


def _tuples(values: Sequence[Any]) -> Any:
    return tuple(_tuples(each) if isinstance(each, list) else each for each in values)
