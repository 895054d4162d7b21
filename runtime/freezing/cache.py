"""A rank's stages with frozen blocks -> the same stages, which compute these once a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..executor.instrumented import CACHE_FIGURES
from ..executor.stage import Stage
from ..formatting import write_bytes, write_share
from ..plan.plan import Plan
from .blocks import Blocks
from .reads import NotCachedError, StageReads
from .stage_cache import Shared, StageCache
from .stages import Builds, is_whole


@dataclass
class Cache(Shared):
    """What a rank's frozen blocks have computed.

    totals: the figures of all ranks' caches so far, on rank 0 of a run; as in CACHE_FIGURES
    """

    totals: Counter[str] = field(default_factory=Counter)
    _caches: dict[int, StageCache] = field(default_factory=dict)
    _why_not: dict[int, str] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def attach(
        self, stages: Mapping[int, Stage], plan: Plan, blocks: Blocks, depth: int, builds: Builds
    ) -> None:
        """Lets stages use the cache from now on, with `depth` frozen blocks."""
        self._caches, self._why_not = {}, {}
        frozen = {name for parameters in blocks.parameters[:depth] for name in parameters}
        for number, stage in stages.items():
            stage.around = None
            spec, whole = plan.stages[number], is_whole(stage.module, plan.stages[number])
            if not whole and frozen.isdisjoint(spec.parameters):
                continue
            try:
                reads = StageReads(plan, spec, builds[number], blocks, depth, whole)
            except NotCachedError as error:
                self._why_not[number] = error.what
                continue
            cache = StageCache(stage.module, spec, plan, reads, self)
            self._caches[number] = stage.around = cache

    def forget(self) -> None:
        """Other weights were loaded: nothing that was kept before holds."""
        self.loads += 1

    def describe(self) -> str:
        """What the caches of all ranks were good for."""
        asked, hits, taken_bytes = (self.totals[name] for name in CACHE_FIGURES)
        return (
            f"{write_bytes(taken_bytes)}, {write_share(hits / max(1, asked))} of micro-batches hit"
        )

    def news(self) -> list[str]:
        """A sentence for each stage that computes its frozen blocks each time, and for a file that
        is full; each is returned once."""
        found = self._why_not | {n: each.why_not for n, each in self._caches.items()}
        sentences = [
            f"stage {number} computes its frozen blocks each time: {why}"
            for number, why in sorted(found.items())
            if why
        ]
        if self.arena.is_full:
            sentences.append(
                f"{write_bytes(self.arena.size)} are full, so the frozen blocks of further samples "
                "are computed each time"
            )
        new = [sentence for sentence in sentences if sentence not in self._told]
        self._told.update(new)
        return new
