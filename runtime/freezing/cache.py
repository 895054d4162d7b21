"""A rank's stages with frozen blocks -> the same stages, which compute these once a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..executor.instrumented import CACHE_FIGURES
from ..executor.stage import Stage
from ..formatting import write_bytes, write_share
from ..plan.plan import Plan, StageSpec
from .blocks import Blocks
from .reads import NotCachedError, StageReads
from .stage_cache import StageCache
from .stages import Builds, is_whole
from .use import Shared


@dataclass
class Cache(Shared):
    """The caches of a rank's stages with frozen blocks.

    totals: the figures of all ranks' caches so far, on rank 0 of a run; as in CACHE_FIGURES
    reported: the sentences of `news` that were reported
    """

    totals: Counter[str] = field(default_factory=Counter)
    reported: set[str] = field(default_factory=set)
    _caches: dict[int, StageCache] = field(default_factory=dict)
    _why_not: dict[int, str] = field(default_factory=dict)

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
                reads = _reads_of(plan, spec, builds[number], blocks, depth, whole)
            except NotCachedError as error:
                self._why_not[number] = error.what
                continue
            cache = StageCache(stage.module, spec, plan, reads, self)
            self._caches[number] = stage.around = cache

    def forget(self) -> None:
        """Other weights were loaded, so all entries are invalid."""
        self.loads += 1

    def describe(self) -> str:
        """The size and the hits of the caches of all ranks, in words."""
        asked, hits, taken_bytes = (self.totals[name] for name in CACHE_FIGURES)
        return (
            f"{write_bytes(taken_bytes)}, {write_share(hits / max(1, asked))} of micro-batches hit"
        )

    def news(self) -> list[str]:
        """A sentence for each stage that computes frozen blocks again, for all samples or for those
        without room in the file; only sentences that were not reported yet."""
        found = self._why_not | {n: each.why_not for n, each in self._caches.items()}
        sentences = [
            f"stage {number} computes its frozen blocks each time: {why}"
            for number, why in sorted(found.items())
            if why
        ]
        if self.arena.is_full:
            sentences += [self._full(number) for number in self._caches if not found[number]]
        return [sentence for sentence in sentences if sentence not in self.reported]

    def _full(self, stage: int) -> str:
        each = self._caches[stage].sample_bytes
        count = f"{self.samples:,} samples take" if self.samples else "a sample takes"
        return (
            f"{write_bytes(self.arena.size)} are full, so stage {stage} computes the frozen blocks "
            f"of other samples each time; {count} {write_bytes(each * (self.samples or 1))} there"
        )


def _reads_of(
    plan: Plan,
    spec: StageSpec,
    build: Callable[[], nn.Module],
    blocks: Blocks,
    depth: int,
    is_whole: bool,
) -> StageReads:
    """The leaves to cache in order to leave out the frozen blocks of a stage, or the whole stage if
    it is frozen and draws no random numbers after its blocks. Raises NotCachedError."""
    if is_whole:
        try:
            reads = StageReads(plan, spec, build, blocks, depth, True)
            reads.kept(reads.last)
            return reads
        except NotCachedError:
            pass
    return StageReads(plan, spec, build, blocks, depth, False)
