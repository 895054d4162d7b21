"""A rank's stages during a run that freezes blocks.

An event of freezing happens where no micro-batch is in flight. All ranks follow the same rule, so
they have the same depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import nn

from ..executor.stage import Stage
from ..plan.plan import Plan
from .block_outputs import observed, places_of
from .blocks import FreezeError, blocks_of
from .cache import Cache
from .plasticity import Similarities
from .rules import GRADNORM, PLASTICITY, Progress, Rule
from .stages import Builds, check_modes, feeding_of, freeze_stage, plan_at


class Freezing:
    """The frozen blocks of one rank's stages.

    blocks: the blocks of the model
    progress: how far freezing is

    Arguments:
    rule: when blocks freeze
    most: the most blocks that may freeze; None for all that can
    plan: the plan
    builds: the constructors of all stages
    planned_depth: the number of blocks that were frozen when the plan was made

    Raises FreezeError for stages whose blocks cannot freeze one by one.
    """

    def __init__(
        self,
        rule: Rule,
        most: int | None,
        plan: Plan,
        builds: Builds,
        modules: Mapping[int, nn.Module],
        progress: Progress,
        planned_depth: int = 0,
    ) -> None:
        self.blocks, self.progress = blocks_of(plan), progress
        self._rule, self._plan, self._builds, self._modules = rule, plan, builds, modules
        self._planned_depth = planned_depth
        self._most = self.blocks.most if most is None else min(most, self.blocks.most)
        check_modes(modules, self.blocks, self._most)
        own = self.observed_blocks
        self._places = places_of(plan, self.blocks, own, builds) if own else {}

    @property
    def reads_gradients(self) -> bool:
        """True if the rule depends on the gradients of the blocks."""
        return self._rule.kind == GRADNORM

    def trained(self, stage: int) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """The blocks of a stage that train, by number, with their parameters there."""
        own = dict(self._modules[stage].named_parameters())
        for block in range(self.progress.depth, len(self.blocks)):
            if parameters := [own[name] for name in self.blocks.parameters[block] if name in own]:
                yield block, parameters

    @property
    def observed_blocks(self) -> range:
        """The blocks whose outputs the rule depends on."""
        is_read = self._rule.kind == PLASTICITY
        return range(self.progress.depth, self._most if is_read else 0)

    def observed(self, seed: int) -> AbstractContextManager[dict[int, Similarities]]:
        """Inside, forwards of the stages add the similarities of observed blocks by number; `seed`
        is that of the run."""
        return observed(self._modules, self.blocks, self._places, self.observed_blocks, seed)

    def see(self, of_blocks: Mapping[int, Similarities]) -> None:
        """Takes note of the similarities of all observed blocks at an event. Raises FreezeError for
        a block whose outputs are all 0: it did not run."""
        for block in self.observed_blocks:
            if not any(of_blocks[block]):
                raise FreezeError(
                    f"--freeze plasticity: {self.blocks.paths[block]} did not run for the samples "
                    "that are compared.",
                    "--freeze gradnorm:1/3, or schedule:1/3",
                )
        now = [of_blocks.get(block, ()) for block in range(self._most)]
        self.progress = self.progress.seeing(now, self._rule)

    def after(self, event: int) -> bool:
        """Takes note of an event; returns True if more blocks are frozen after it."""
        before = self.progress.depth
        self.progress = self.progress.after(self._rule, event, len(self.blocks), self._most)
        return self.progress.depth > before

    def restore(self, progress: Progress) -> None:
        """Continues from another progress. Raises FreezeError for one of fewer frozen blocks."""
        if progress.depth < self.progress.depth:
            raise FreezeError(
                f"{progress.depth} blocks are frozen in what is loaded, but "
                f"{self.progress.depth} are frozen already.",
                "Load it into a new Pipeline.",
            )
        self.progress = progress

    def describe(self) -> str:
        """The frozen blocks, as a phrase."""
        depth = self.progress.depth
        first, last = self.blocks.paths[0], self.blocks.paths[depth - 1]
        names = first if depth == 1 else f"{first} to {last}"
        return f"{depth} of {len(self.blocks)} blocks" + (f" ({names})" if depth else "")

    def attach(self, cache: Cache, stages: Mapping[int, Stage], plan: Plan) -> None:
        """Lets stages use a cache; `plan` is the one at this depth."""
        cache.attach(stages, plan, self.blocks, self.progress.depth, self._builds)

    def apply(self) -> Plan:
        """Freezes the stages as far as the progress says; returns the plan at this depth."""
        depth, plan = self.progress.depth, self._plan
        if self.blocks.feeding is None:
            found = feeding_of(plan, self.blocks, self._builds)
            self.blocks = replace(self.blocks, feeding=found)
        if depth != self._planned_depth:
            plan = plan_at(plan, self.blocks, depth, self._builds)
        for stage, module in self._modules.items():
            freeze_stage(module, plan.stages[stage], self.blocks, depth)
        return plan
