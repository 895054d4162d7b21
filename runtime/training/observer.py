"""What a pipeline reports of its actions -> optimizer steps, and the figures of each step."""

from __future__ import annotations

import math
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

from ..activity import Activities, Activity
from ..errors import AsyncPipeError
from ..observed import ActionObserver
from ..plan import Plan
from .clipping import (
    clip_factor,
    counted_parameters,
    global_squared_norm,
    scale_gradients,
    squared_norm,
)
from .gather import RankFigures, figures_of
from .optimizers import StageOptimizer
from .settings import Settings
from .world import World


class LossError(AsyncPipeError):
    """A loss that is no number any more."""


class Trainer(ActionObserver):
    """Clips and steps the stages of one rank, and hands on the figures of every step.

    In a synchronous schedule the norm is that of all stages, so a rank steps none of its stages
    before it has been told of the last; in an asynchronous one each stage has its own norm and
    steps at once. `report` gets the figures of a step when all the rank's stages have made it.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, nn.Module],
        settings: Settings,
        world: World,
        report: Callable[[RankFigures], None],
        *,
        lr_scale: Callable[[int, int], float],
        activities: Activities | None = None,
    ) -> None:
        super().__init__(activities or Activities())
        self._settings = settings
        self._world = world
        self._report = report
        self._lr_scale = lr_scale
        self._stages = len(plan.stages)
        self._parameters = {index: list(module.parameters()) for index, module in modules.items()}
        self._counted = {
            index: counted_parameters(plan, index, module) for index, module in modules.items()
        }
        self._optimizers = {
            index: StageOptimizer(module, settings) for index, module in modules.items()
        }
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._losses: dict[int, list[Tensor]] = defaultdict(list)
        self._last_good: tuple[int, float] | None = None
        self._squares: dict[int, float] = {}
        self._stepped = 0
        self._optimizer_s = 0.0

    def start_segment(self, step: int = 1, first_micro_batch: int = 0) -> None:
        """Forgets the time since the last step: something else was done meanwhile. `step` is the
        first that the segment makes."""
        self.activities.step, self.activities.first_micro_batch = step, first_micro_batch
        self.activities.take()

    def on_loss(self, micro_batch: int, loss: Tensor) -> None:
        self._losses[micro_batch // (self._settings.micro_batches or 1) + 1].append(loss)

    def on_step(self, stage: int, version: int) -> None:
        if self._settings.is_async:
            self._step_alone(stage, version)
        else:
            self._step_together(stage, version)
        if self._stepped == len(self._optimizers):
            self._finish_step(version)

    def _step_alone(self, stage: int, version: int) -> None:
        factor = 1.0
        if self._norm_is_wanted(version):
            self._squares[stage] = squared_norm(self._counted[stage])
            norm = math.sqrt(squared_norm(self._parameters[stage]))
            factor = clip_factor(norm, self._settings.clip or 0.0)
        self._step(stage, version, factor)

    def _step_together(self, stage: int, version: int) -> None:
        # The pipeline drops a stage's gradients after its own step action.
        self._gradients[stage] = [parameter.grad for parameter in self._parameters[stage]]
        if len(self._gradients) < len(self._optimizers):
            return
        for index, gradients in self._gradients.items():
            for parameter, gradient in zip(self._parameters[index], gradients, strict=True):
                parameter.grad = gradient
        factor = self._factor_of_all() if self._norm_is_wanted(version) else 1.0
        for index in self._gradients:
            self._step(index, version, factor)
            for parameter in self._parameters[index]:
                parameter.grad = None
        self._gradients.clear()

    def _factor_of_all(self) -> float:
        self._squares = {stage: squared_norm(own) for stage, own in self._counted.items()}
        if not self._settings.clip:
            return 1.0
        with self.activities.during(Activity("meet", "the norm of all gradients")):
            square = global_squared_norm(self._squares, self._stages, self._world.control)
        return clip_factor(math.sqrt(square), self._settings.clip)

    def _step(self, stage: int, version: int, factor: float) -> None:
        start_s, start_cpu_s = perf_counter(), process_time()
        scale_gradients(self._parameters[stage], factor)
        self._optimizers[stage].step(self._lr_scale(stage, version))
        self._optimizer_s += min(perf_counter() - start_s, process_time() - start_cpu_s)
        self._stepped += 1

    def _norm_is_wanted(self, version: int) -> bool:
        return bool(self._settings.clip) or is_logged(version, self._settings)

    def _finish_step(self, version: int) -> None:
        spent = self.activities.take()
        with self.activities.during(Activity("other", "tells rank 0 of a step")):
            figures = figures_of(
                spent,
                self._stages,
                step=version,
                loss=self._mean_loss(version),
                squared_norm=sum(self._squares.values()) if self._squares else math.nan,
                optimizer_s=self._optimizer_s,
                mem_bytes=_peak_memory_bytes(),
            )
            self._report(figures)
        self._stepped, self._squares, self._optimizer_s = 0, {}, 0.0

    def _mean_loss(self, version: int) -> float:
        losses = self._losses.pop(version, None)
        if not losses:
            return math.nan
        mean = float(torch.stack(losses).double().mean())
        if not math.isfinite(mean):
            good = self._last_good
            last = f" (it was {good[1]:.3f} at step {good[0]})" if good else ""
            lr = self._settings.lr or 0.0
            raise LossError(
                f"the loss is {mean} at step {version}{last}. Stopped.",
                f"--lr {lr / 3:.1g} instead of {lr:.1g}, or a longer --warmup, or --clip 1.",
            )
        self._last_good = version, mean
        return mean


def is_logged(step: int, settings: Settings) -> bool:
    """Whether a line is due after this step."""
    return step % settings.log_every == 0 or step in (1, settings.steps)


def _peak_memory_bytes() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
