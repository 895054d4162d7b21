"""The setup of a rank -> its stages with their weights, the pipeline that runs them, and their
training, segment by segment.

Runs and comparisons train with the same `StageTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from ..config.asynchronous_options import delays_of
from ..config.batch_layout import StepBatch
from ..config.mixed_precision import precision_of
from ..config.segments import RunSegment, schedule_of
from ..data.task import SampleOrder
from ..data.text import check_vocabulary
from ..executor.executor import Executor
from ..executor.instrumented import Activities, ObservedTransport, observed_feed
from ..executor.loading import load_stage
from ..executor.run import needed_inputs
from ..monitoring.gather import RankFigures
from ..schedule.schedule import Schedule
from ..tensor_files import dtype_of
from .batches import Dataset, Feed, MicroBatches, feed_nothing
from .data_consistency import Agreement
from .evaluation import Evaluator, find_criterion
from .optimizer_step import OptimizerStepper
from .setup import Setup, make_transport


class StageTrainer:
    """The stages of a rank, with what trains them.

    modules: the stages by number.
    pipeline: runs their forwards and backwards.
    stepper: makes their optimizer steps.
    batch: the layout of a step's samples.
    agreement: the data that all ranks agree on.

    Arguments:
    report: called with the metrics of a step once all stages of the rank have made it.
    after_step: called with each stage after its step.
    """

    def __init__(
        self,
        setup: Setup,
        report: Callable[[RankFigures], None],
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        job, world, data, found = setup.job, setup.world, setup.data, setup.found
        config, plan = job.config, job.plan
        self._setup, self._config, self._plan = setup, config, plan
        self._schedules: dict[RunSegment, Schedule] = {}
        self.modules = load_stages(setup)
        self.pipeline = make_pipeline(setup, self.modules, config.methods)
        self.stepper = OptimizerStepper(
            plan,
            self.modules,
            config,
            world,
            report,
            lr_scale=self.pipeline.lr_scale,
            activities=setup.activities,
            gradient_group=setup.gradient_group,
            delays=setup.schedule.delays,
            after_step=after_step,
        )
        self.pipeline.attach(self.stepper.optimizers)
        first = found.facts.samples if found else 0
        self.batch = StepBatch.of(config, first_step=setup.start, first_sample=first)
        order = data.order(config.seed) if data else None
        samples = data.train if data else None
        self._feed = self._make_feed(samples, order, self.batch, setup.activities)
        self.agreement = Agreement(
            world,
            data,
            order,
            size=config.micro_batch_size,
            batches=config.eval_batches,
            first=first,
            fields=needed_inputs(
                plan, range(len(plan.stages)), criterion=config.criterion is not None
            ),
            own_fields=setup.fields,
        )

    def _make_feed(
        self,
        samples: Dataset | None,
        order: SampleOrder | None,
        batch: StepBatch,
        activities: Activities,
    ) -> MicroBatches:
        """The micro-batches of these samples for this rank's stages."""
        data, fields = self._setup.data, self._setup.fields
        feed: MicroBatches = feed_nothing
        if data is not None and samples is not None:
            feed = Feed(samples, order, batch, fields, seed=data.seed, dims=data.dims)
        return observed_feed(feed, activities)

    def make_evaluator(self, activities: Activities) -> Evaluator:
        """Evaluates the stages' weights on the evaluation data."""
        data, batch = self._setup.data, StepBatch((self._config.micro_batch_size,))
        samples = data.evaluation if data else None
        return Evaluator(
            self._plan,
            self._setup.job.task,
            self._make_feed(samples, None, batch, activities),
            self._setup.world,
            activities,
            schedule=self._setup.schedule,
            batches=self.agreement.evaluation_batches,
        )

    def schedule_of(self, segment: RunSegment) -> Schedule:
        """The schedule of a segment; that of the last one is kept for others like it."""
        like = replace(segment, steps=range(len(segment.steps)))
        if like not in self._schedules:
            self._schedules = {like: schedule_of(self._plan, self._config, like)}
        return self._schedules[like]

    def run(
        self,
        segment: RunSegment,
        schedule: Schedule,
        may: Callable[[int], bool] | None = None,
    ) -> None:
        """Trains the steps of a segment; `may` is asked before each step of several."""
        config, world, steps = self._config, self._setup.world, segment.steps
        first = self.batch.first_of(steps.start, world.replica)
        delays = delays_of(schedule, config, first, steps.start)
        self.stepper.start_segment(steps.start + 1, first, delays, flushed=segment.synchronous)
        is_short = segment.micro_batches != config.micro_batches
        sizes = [{**self._plan.sizes, "batch": size} for size in self.batch.sizes_of(world.replica)]
        self.pipeline.run(
            schedule,
            self._feed,
            first_micro_batch=first,
            observer=self.stepper,
            sizes=None if self.batch.is_even else sizes * len(steps),
            step_samples=self.batch.samples if world.replicas > 1 or is_short else None,
            loss_scale=self.stepper.loss_scale,
            may=may if len(steps) > 1 else None,
        )


def load_stages(setup: Setup) -> dict[int, nn.Module]:
    """The stages of this rank by number, on its device, in training mode."""
    config, world = setup.job.config, setup.world
    modules = {}
    for stage in world.grid.stages_of(world.rank, setup.schedule):
        module = load_stage(
            config.folder,
            setup.job.planned,
            stage,
            weights=setup.weights,
            device=world.machine.device,
            code=setup.job.code,
        )
        modules[stage] = module.to(dtype_of(config.dtype)).train()
    return modules


def make_pipeline(setup: Setup, modules: Mapping[int, nn.Module], staleness: str) -> Executor:
    """The pipeline of this rank's stages with these staleness methods; every rank calls it."""
    job, world, schedule = setup.job, setup.world, setup.schedule
    config, plan, device = job.config, job.plan, world.machine.device
    transport = make_transport(setup.transport, world, config, plan, schedule, device)
    criterion = find_criterion(config.criterion, config.seed) if config.criterion else None
    return Executor(
        plan,
        modules,
        ObservedTransport(
            transport, setup.activities, first_rank=world.grid.first_of(world.replica)
        ),
        rank_of_stage=schedule.rank_of_stage,
        replicas=schedule.replicas,
        staleness=staleness,
        criterion=criterion,
        device=device,
        precision=precision_of(config),
        dtypes=setup.dtypes,
        seed=config.seed,
        batch_norm_per_step=config.batch_norm == "mini-batch",
    )


def check_tokens(setup: Setup, modules: Mapping[int, nn.Module]) -> None:
    """Raises DataError for a token of the data that an embedding of these stages lacks."""
    data = setup.data
    if data is None or data.largest_token is None:
        return
    plan, sample = setup.job.plan, setup.job.task.sample
    for index, module in modules.items():
        if sample in plan.stages[index].inputs:
            check_vocabulary(
                module,
                plan.stages[index],
                sample,
                data.largest_token(),
                source=data.source,
                tokenizer=data.tokenizer,
            )
