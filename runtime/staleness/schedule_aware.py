"""Predictions that know the learning rates to come (FTPipe, USENIX ATC 2021).

Without it a prediction takes all its steps at the learning rate of the coming one. That is too far
while the rate falls, and too near in a warm-up.
"""

from __future__ import annotations

from .protocol import Staleness


class ScheduleAware(Staleness):
    """`schedule-aware`: each predicted step has the learning rate that the scheduler will set."""

    needs = frozenset({"rates"})
    follows_schedule = True
