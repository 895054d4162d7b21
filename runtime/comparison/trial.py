"""Settings -> the losses of one run, with all stages in this process.

The stages are run by the pipeline's executor in the order that they have in the schedule, so the
weights are those of asyncpipe-train to the last bit. Only the time is not: that is simulated.
Nothing is drained for an evaluation: each stage leaves a copy of its weights when it has made the
step in question, and when all have, these are evaluated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..activity import Activities
from ..data.order import Order
from ..launching.jobs import make_job
from ..launching.world import World
from ..loading import load_stage
from ..pipeline import Pipeline, needed_inputs
from ..schedule import Action
from ..seeding import drawing_from
from ..tensors import dtype_of
from ..training.asynchronous import delays_of
from ..training.criterion import find_criterion
from ..training.evaluation import Evaluation
from ..training.finite import LossError
from ..training.observer import Trainer
from ..training.segments import Segment, make_flushed_step, make_segment, segments
from ..training.settings import Settings
from ..training.setup import Job
from ..training.sources import Feed, open_data, prepare_data
from ..training.step_batch import StepBatch
from ..transports import LocalHub
from ..watching.gather import RankFigures


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of a run: `evaluated` of the evaluation data after so many steps, `trained` the mean
    over the steps since the last evaluation. `end` says why a run ended early, if it did."""

    steps: tuple[int, ...]
    evaluated: tuple[float, ...]
    trained: tuple[float, ...]
    end: str = ""

    @property
    def last(self) -> float:
        """The last loss of the evaluation data; infinite for a run that ended early."""
        return math.inf if self.end or not self.evaluated else self.evaluated[-1]


def train_alone(settings: Settings, folder: Path) -> Curve:
    """Trains so and evaluates after every `eval_every` steps and at the end.

    What the data needs on disk is left in `folder`. A loss that is no number ends the run, which is
    part of its curve. Raises AsyncPipeError where settings and plan do not fit.
    """
    alone = replace(settings, ranks=1) if settings.is_async else settings
    with drawing_from(settings.seed, "run"):
        return _Trial(make_job(alone, folder)).train()


class _Trial:
    """One run: its stages, their optimizers and its losses so far."""

    def __init__(self, job: Job) -> None:
        settings, plan, world = job.settings, job.plan, World()
        self._settings, self._plan = settings, plan
        prepare_data(settings, job.task, job.folder)
        data = open_data(settings, job.task, plan, job.folder)
        stages = range(len(plan.stages))
        self._modules: dict[int, nn.Module] = {
            j: load_stage(settings.folder, job.planned, j, weights=settings.init_from)
            .to(dtype_of(settings.dtype))
            .train()
            for j in stages
        }
        self._pipeline = self._make_pipeline(self._modules, settings.staleness or "none")
        batch = StepBatch.of(settings)
        fields = needed_inputs(plan, stages, criterion=settings.criterion is not None)
        order = Order(len(data.train), settings.seed)
        self._feed = Feed(data.train, order, batch, fields, seed=data.seed, dims=data.dims)
        self._batch = batch
        first = make_segment(plan, settings, steps=1)
        self._trainer = _Steps(
            plan,
            self._modules,
            settings,
            world,
            self._stepped,
            lr_scale=self._pipeline.lr_scale,
            delays=first.delays,
        )
        self._trainer.after_step = self._keep_weights
        self._pipeline.attach(self._trainer.optimizers)
        assert data.evaluation is not None
        size = settings.micro_batch_size or 1
        self._evaluation = Evaluation(
            plan,
            job.task,
            Feed(data.evaluation, None, StepBatch((size,)), fields, seed=data.seed, dims=data.dims),
            world,
            Activities(),
            schedule=first,
            batches=min(settings.eval_batches, len(data.evaluation) // size),
        )
        self._evaluated = {j: deepcopy(module) for j, module in self._modules.items()}
        self._evaluating = self._make_pipeline(self._evaluated, "none")
        self._losses: list[float] = []
        self._points: list[tuple[int, float, float]] = []
        self._kept: dict[int, dict[int, _State]] = defaultdict(dict)
        self._is_synchronous = False

    def train(self) -> Curve:
        """The whole run, in the segments that asyncpipe-train has without evaluations."""
        end = ""
        try:
            for segment in segments(replace(self._settings, eval_every=0)):
                self._train(segment)
        except LossError as error:
            end = error.what
        steps, evaluated, trained = zip(*self._points, strict=True) if self._points else ((),) * 3
        return Curve(steps, evaluated, trained, end)

    def _train(self, segment: Segment) -> None:
        steps, is_async = segment.steps, self._settings.is_async
        self._is_synchronous = segment.synchronous
        if segment.synchronous and is_async:
            schedule = make_flushed_step(self._plan, self._settings, segment.micro_batches)
        else:
            schedule = make_segment(self._plan, self._settings, steps=len(steps))
        first = self._batch.first_of(steps.start, 0)
        self._trainer.start_segment(
            steps.start + 1,
            first,
            delays_of(schedule, self._settings, first, steps.start),
            flushed=segment.synchronous,
        )
        is_short = segment.micro_batches != self._settings.micro_batches
        self._pipeline.run(
            schedule,
            self._feed,
            first_micro_batch=first,
            observer=self._trainer,
            sizes=None if self._batch.is_even else self._sizes * len(steps),
            step_samples=self._batch.samples if is_short else None,
            loss_scale=self._trainer.loss_scale,
        )

    @property
    def _sizes(self) -> list[dict[str, int]]:
        return [{**self._plan.sizes, "batch": size} for size in self._batch.sizes]

    def _make_pipeline(self, modules: Mapping[int, nn.Module], staleness: str) -> Pipeline:
        settings = self._settings
        return Pipeline(
            self._plan,
            modules,
            LocalHub(1).transport(0),
            rank_of_stage=(0,) * len(modules),
            staleness=staleness,
            criterion=find_criterion(settings.criterion, settings.seed)
            if settings.criterion
            else None,
            seed=settings.seed,
            batch_norm_per_step=settings.batch_norm == "mini-batch",
        )

    def _stepped(self, figures: RankFigures) -> None:
        """All stages have made a step."""
        self._losses.append(figures.loss)

    def _keep_weights(self, stage: int) -> None:
        """A stage's step is over; stages that step together have stepped when all have."""
        step, every = self._pipeline.versions[stage], self._settings.eval_every
        if step != self._settings.steps and (not every or step % every):
            return
        kept = self._kept[step]
        # Others of its micro-batches are in flight, and what they read is to seem untouched.
        with self._pipeline.weights[stage].unseen_by_autograd():
            with self._pipeline.binders[stage].settled():
                kept[stage] = _copied(_state(self._modules[stage]))
        if len(kept) < len(self._modules):
            return
        if self._is_synchronous:
            kept.update((j, _state(module)) for j, module in self._modules.items())
        self._evaluate(self._kept.pop(step), step)

    @torch.no_grad()
    def _evaluate(self, weights: Mapping[int, _State], step: int) -> None:
        for stage, state in weights.items():
            for own, kept in zip(_state(self._evaluated[stage]), state, strict=True):
                own.copy_(kept)
        since = self._losses[self._points[-1][0] if self._points else 0 : step]
        loss = self._evaluation(self._evaluating, step).loss
        self._points.append((step, loss, sum(since) / len(since)))


_State = Sequence[Tensor]
"""All parameters and buffers of a stage."""


def _state(module: nn.Module) -> _State:
    return [*module.parameters(), *module.buffers()]


def _copied(state: _State) -> _State:
    return [tensor.detach().clone() for tensor in state]


class _Steps(Trainer):
    """A trainer that says when a stage's step is over and its weights are at rest."""

    after_step: Callable[[int], None]

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        super().on_action(action, start_s, end_s)
        if action.kind == "S":
            self.after_step(action.stage)
