"""What a planning method is given and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..cost import Costs


@dataclass(frozen=True)
class Rules:
    """Where cuts may lie: `may_cut[c]` for a cut before position c (0..n), and the share of the
    bottleneck that may be given up so that cuts fall between blocks. `must_cut` are positions at
    which a cut has to be, rising."""

    may_cut: NDArray[np.bool_]
    prefer_modules: float = 0.0
    must_cut: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The stage of every group, in the groups' order, and the smallest bottleneck that the
    method proved for cuts of that one order (None: it proved nothing)."""

    stage_of: tuple[int, ...]
    order_optimum_ms: float | None = None


class Method(Protocol):
    """Puts the groups of `costs` on `stages` stages, each with at least one group."""

    def __call__(self, costs: Costs, stages: int, rules: Rules) -> Placement: ...
