"""What is done about the optimizer steps between a micro-batch's forward and its backward."""

from __future__ import annotations

from .compose import METHODS, Conditions, check, has_other_backward, make_staleness, parse
from .protocol import Passage, Reads, Situation, Staleness, Steps

__all__ = [
    "METHODS",
    "Conditions",
    "Passage",
    "Reads",
    "Situation",
    "Staleness",
    "Steps",
    "check",
    "has_other_backward",
    "make_staleness",
    "parse",
]
