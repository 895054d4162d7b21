"""The times and hits of a stage's cache -> whether the stage continues to use it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ..executor.instrumented import Activities
from ..formatting import write_ms
from .arena import Arena

_LEAST_TIMED, _MOST_TIMED = 4, 24
"""The micro-batches that are timed to compare loading with computing."""
_PASSES = 2
"""The passes over the data after which some sample must have come again."""


@dataclass
class Shared:
    """The facts that the caches of a rank's stages share.

    arena: the file that the ranks of the host share
    activities: the record of the rank's activities
    is_auto: a stage gives up if loading takes longer than computing, or if no sample repeats
    samples: the samples of the data, if known
    loads: how often other weights were loaded
    """

    arena: Arena
    activities: Activities
    is_auto: bool
    samples: int | None = None
    loads: int = 0


class Use:
    """Decides whether a stage uses its cache.

    why_not: why the stage computes everything; "" as long as it uses the cache
    """

    def __init__(self, shared: Shared, samples: int) -> None:
        self.why_not = ""
        self._shared, self._samples = shared, samples
        self._missed = 0.0
        self._load_s: list[float] = []
        self._compute_s: list[float] = []

    @property
    def is_timed(self) -> bool:
        """True as long as times are needed."""
        return self._shared.is_auto and len(self._load_s) < _MOST_TIMED

    def hit(self, load_s: float) -> None:
        """A micro-batch was loaded."""
        self._missed = -math.inf
        self.time(load_s)

    def miss(self, *, is_new: bool) -> None:
        """A micro-batch is computed; `is_new` if its samples are new to the cache. Gives up if no
        sample ever repeats."""
        if not is_new:
            self._missed = -math.inf
        self._missed += self._samples
        all_samples = self._shared.samples
        if not self._shared.is_auto:
            return
        if self._missed > _PASSES * all_samples if all_samples else self._shared.arena.is_full:
            self.why_not = "no sample has come again with the same values"

    def time(self, load_s: float, compute_s: float | None = None) -> None:
        """Records times; gives up if loading takes longer than computing."""
        if not self.is_timed:
            return
        self._load_s.append(load_s)
        self._compute_s += [] if compute_s is None else [compute_s]
        if min(len(self._load_s), len(self._compute_s)) >= _LEAST_TIMED:
            load_ms, compute_ms = 1000 * median(self._load_s), 1000 * median(self._compute_s)
            if load_ms > compute_ms:
                self.why_not = (
                    f"loading takes {write_ms(load_ms)} and computing {write_ms(compute_ms)} for "
                    "a micro-batch"
                )
