"""The one interface of all planning methods."""

from __future__ import annotations

from typing import Protocol

from ..problem import Placement, Problem


class Method(Protocol):
    """A way to place groups. Raises PlanError where it finds nothing that fits."""

    def __call__(self, problem: Problem) -> Placement: ...
