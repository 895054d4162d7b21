"""What a planning method is given, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..runtime.errors import PlanError
from .cost import Bools, Costs, Floats, Link, Value, seen_over
from .setting import Setting


class DoesNotFit(PlanError):
    """A method has found no plan that is within the memory of the ranks."""


@dataclass(frozen=True)
class Rules:
    """Where cuts may lie: `may_cut[c]` for a cut before position c (0..n), and the share of the
    bottleneck that may be given up so that cuts fall between blocks. `must_cut` are positions at
    which a cut has to be, rising."""

    may_cut: Bools
    prefer_modules: float = 0.0
    must_cut: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Put the groups of `costs` on the ranks of `setting`, in the order of its devices."""

    costs: Costs
    setting: Setting
    rules: Rules

    @property
    def stages(self) -> int:
        return self.setting.stages

    @cached_property
    def least_work_ms(self) -> Floats:
        """Forward and backward of every group on the rank that is fastest at it."""
        least_ms: Floats = np.minimum.reduce([seen.work_ms for seen in self.seen])
        return least_ms

    @cached_property
    def seen(self) -> tuple[Costs, ...]:
        """The costs as each position sees them; equal positions share one object."""
        distinct: dict[object, Costs] = {}
        setting = self.setting
        found = []
        for position, device in enumerate(setting.devices):
            joins = (setting.links or ())[max(position - 1, 0) : position + 1]
            key = (device.kind, device.speed, setting.replicas_at(position), joins)
            if key not in distinct:
                distinct[key] = setting.seen_at(self.costs, position)
            found.append(distinct[key])
        return tuple(found)

    @property
    def is_simple(self) -> bool:
        """Whether a stage's score depends on its device and links only, not on its place."""
        setting = self.setting
        is_load = setting.is_asynchronous or setting.by_load
        never_twice = not setting.is_limited and setting.recompute != "all"
        return is_load and never_twice and not setting.replicas

    @cached_property
    def like(self) -> tuple[int, ...]:
        """For each position, the first one at which every stage has the same score."""
        simple = self.is_simple
        first: dict[object, int] = {}
        return tuple(
            first.setdefault((id(seen), device.pays_transfers, simple or position), position)
            for position, (seen, device) in enumerate(
                zip(self.seen, self.setting.devices, strict=True)
            )
        )

    @cached_property
    def exchanges(self) -> dict[int, Value]:
        """The values that are gradients of shared parameters, by their place among all values."""
        return {index: one for index, one in enumerate(self.costs.values) if one.is_exchange}

    def seen_by(self, ranks: Sequence[int]) -> Costs:
        """The costs as ranks in a row see them that share a stage: those of the first, with what
        comes in at the first and goes out at the last."""
        first, last, links = ranks[0], ranks[-1], self.setting.links
        if first == last or not links:
            return self.seen[first]
        key = first, links[max(first - 1, 0)], links[min(last, len(links) - 1)]
        if key not in self._seen_by_several:
            self._seen_by_several[key] = seen_over(self.seen[first], *key[1:])
        return self._seen_by_several[key]

    @cached_property
    def _seen_by_several(self) -> dict[tuple[int, Link, Link], Costs]:
        return {}

    def link_among(self, ranks: Sequence[int]) -> Link:
        """The slowest link between ranks in a row."""
        links = (self.setting.links or ())[ranks[0] : ranks[-1]]
        return max(links, key=lambda link: link.transfer_ms(1e6), default=self.costs.link)


@dataclass(frozen=True, slots=True)
class Placement:
    """The stage of every group, in the groups' order, and where the stages run.

    No edge goes to an earlier stage and no stage is empty. `ranks` are those of each stage: None
    when stage j is on rank j alone; a rank may be named by several stages, and a stage with
    several ranks is replicated. `bound_ms` is a proved lower bound of the bottleneck of every plan
    with one stage a rank, `order_optimum_ms` the least of those that cut the given order (None:
    nothing proved).
    """

    stage_of: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...] | None = None
    bound_ms: float | None = None
    order_optimum_ms: float | None = None

    @property
    def stages(self) -> int:
        return max(self.stage_of) + 1

    @property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        return self.ranks or tuple((stage,) for stage in range(self.stages))

    @property
    def is_replicated(self) -> bool:
        """Whether some stage is on several ranks."""
        return any(len(ranks) > 1 for ranks in self.ranks_of_stage)
