"""Staleness methods: they compensate for optimizer steps between a micro-batch's forward and
backward."""

from __future__ import annotations

from .compose import METHODS, Conditions, check, has_other_backward, make_staleness, parse
from .protocol import BackwardReads, StageContext, Staleness, Steps, VersionPair

__all__ = [
    "METHODS",
    "Conditions",
    "VersionPair",
    "BackwardReads",
    "StageContext",
    "Staleness",
    "Steps",
    "check",
    "has_other_backward",
    "make_staleness",
    "parse",
]
