"""What is done about the optimizer steps between a micro-batch's forward and its backward."""

from __future__ import annotations

from difflib import get_close_matches

from ..errors import ScheduleError
from .none import LiveWeights
from .protocol import Passage, Staleness
from .stash import Stash

METHODS: dict[str, type[Staleness]] = {"none": LiveWeights, "stash": Stash}
"""Name of a staleness method -> its class."""


def make_staleness(name: str) -> Staleness:
    """A new object of the method, for one stage. Raises ScheduleError for an unknown name."""
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ScheduleError(
            f"{name!r} is not a staleness method.{hint}", f"There are {', '.join(METHODS)}."
        )
    return METHODS[name]()


__all__ = ["METHODS", "Passage", "Staleness", "make_staleness"]
