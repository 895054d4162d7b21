"""A heading with a number, as there are some on top of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A heading, a number and what stands behind it."""

    heading: str
    number: str
    detail: str
