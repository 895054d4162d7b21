"""Resolved settings on one rank -> trained stages: load, train in segments, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..activity import Activities, Activity
from ..boundary_dtypes import BoundaryDtypes
from ..data.order import Order
from ..data.task import Task
from ..data.vocabulary import check_vocabulary
from ..host_memory import keep_freed_memory
from ..launching.world import World
from ..loading import load_stage
from ..observed import ObservedTransport, observed_feed
from ..pipeline import Pipeline, needed_inputs
from ..plan import Plan
from ..replication.equality import Equality
from ..replication.holders import held_parameters
from ..schedule import Schedule
from ..schedule_text import to_text
from ..tensors import dtype_of
from ..transports.choose import Choice
from ..watching.debugger import wait_for_debugger
from ..watching.gather import Gather, RankFigures
from ..watching.metrics import EvalRecord, Reporter
from ..watching.several import reporting
from ..watching.tracing import Tracing
from ..watching.watch import Watch
from ..watching.watchdog import Watchdog
from .agreement import Agreement
from .asynchronous import delays_of
from .criterion import find_criterion
from .ending import save_weights, tell_end
from .evaluation import Evaluation
from .export import check_exportable
from .facts import announce, describe_data, forecast_run
from .half import find_boundary_dtypes, precision_of
from .observer import Trainer
from .remeasure import Remeasuring
from .resolve import sized_plan
from .segments import Segment, make_flushed_step, make_segment, segments
from .settings import Settings
from .sources import Data, Feed, feed_nothing, open_data, prepare_data
from .step_batch import StepBatch
from .transport import agree_on_transport, group_of_gradients, make_transport


@dataclass(frozen=True)
class Job:
    """All that a rank needs to begin: resolved settings, the plan as it was made, and the run's
    folder."""

    settings: Settings
    task: Task
    planned: Plan
    folder: Path

    @property
    def plan(self) -> Plan:
        """The plan at the sizes of this run."""
        return sized_plan(self.planned, self.settings)


def train(
    job: Job,
    world: World,
    make_reporter: Callable[[Settings], Reporter],
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Trains this rank's stages; every rank calls it.

    The reporter is made on rank 0 only. `on_step` is told every step that this rank has made.
    Raises the AsyncPipeError that ends this rank.
    """
    activities = Activities()
    with (
        reporting(job.settings, job.folder, world, make_reporter) as reporter,
        Watchdog(job.settings, job.folder, world, activities) as watchdog,
    ):
        _train(job, world, reporter, on_step, activities, watchdog)


def _train(
    job: Job,
    world: World,
    reporter: Reporter | None,
    on_step: Callable[[int], None],
    activities: Activities,
    watchdog: Watchdog,
) -> None:
    settings, plan = job.settings, job.plan
    machine = world.machine
    torch.set_num_threads(machine.threads)
    keep_freed_memory()
    if settings.export_hf:
        check_exportable(Path(settings.folder), settings.export_hf)
    schedule = make_segment(plan, settings, steps=1)
    dtypes = find_boundary_dtypes(settings, plan)
    forecast = forecast_run(plan, job.planned, settings, machine.cores, schedule, dtypes)
    if reporter is not None:
        write_schedule(job.folder, schedule)
        watchdog.tell = reporter.on_warning
    wait_for_debugger(settings, world, reporter)
    if world.rank == 0:
        with activities.during(Activity("other", "prepares the data")):
            prepare_data(settings, job.task, job.folder)
    with activities.during(Activity("meet", "the data are prepared")):
        world.meet()
    with activities.during(Activity("meet", "the choice of a transport")):
        transport = agree_on_transport(world, settings, world.machine.device)
        copies = group_of_gradients(world, settings, world.machine.device)
    own = world.grid.stages_of(world.rank, schedule)
    fields = needed_inputs(plan, own, criterion=settings.criterion is not None)
    data = open_data(settings, job.task, plan, job.folder) if fields or reporter else None
    if reporter is not None and data is not None:
        readers = describe_data(data, plan, schedule, settings)
        announce(
            reporter,
            plan,
            job.planned,
            settings,
            job.task,
            schedule,
            machine,
            transport=transport,
            data=readers,
            output=job.folder,
            forecast=forecast,
            dtypes=dtypes,
        )
    read = data if fields else None
    with activities.during(Activity("other", "loads its stages")):
        run = _Run(
            job,
            world,
            schedule,
            transport,
            dtypes,
            read,
            fields,
            reporter,
            on_step,
            activities,
            copies,
        )
    run.train()
    run.end(machine.cores)


class _Run:
    """One rank's run: its stages, what it reads, and whom it tells."""

    def __init__(
        self,
        job: Job,
        world: World,
        schedule: Schedule,
        transport: Choice,
        dtypes: BoundaryDtypes,
        data: Data | None,
        fields: tuple[str, ...],
        reporter: Reporter | None,
        on_step: Callable[[int], None],
        activities: Activities,
        copies: dist.ProcessGroup | None,
    ) -> None:
        settings, plan = job.settings, job.plan
        self._job, self._settings, self._plan, self._world = job, settings, plan, world
        self._reporter, self._on_step, self._dtypes = reporter, on_step, dtypes
        self._activities = activities
        self._tracing = Tracing(settings, activities, len(plan.stages))
        self._modules = _load(job, schedule, world)
        device = world.machine.device
        self._pipeline = Pipeline(
            plan,
            self._modules,
            ObservedTransport(
                make_transport(transport, world, settings, plan, schedule, device),
                activities,
                first_rank=world.grid.first_of(world.replica),
            ),
            rank_of_stage=schedule.rank_of_stage,
            replicas=schedule.replicas,
            staleness=settings.staleness or "none",
            criterion=find_criterion(settings.criterion) if settings.criterion else None,
            device=device,
            precision=precision_of(settings),
            dtypes=dtypes,
            seed=settings.seed,
            batch_norm_per_step=settings.batch_norm == "mini-batch",
        )
        self._others: dict[Segment, Schedule] = {}
        self._gather = Gather(world, len(plan.stages))
        self._watch = Watch(settings, job.task, self._gather, reporter) if reporter else None
        self._steps = Remeasuring(
            plan,
            settings,
            world,
            schedule,
            figures=self._figures_until,
            optimizer_ms=lambda: self._watch.optimizer_ms if self._watch else (),
            tell=self._rescheduled,
        )
        self._trainer = Trainer(
            plan,
            self._modules,
            settings,
            world,
            self._told,
            lr_scale=self._pipeline.lr_scale,
            activities=activities,
            copies=copies,
            delays=schedule.delays,
        )
        self._pipeline.attach(self._trainer.optimizers)
        self._equality = Equality(
            self._modules, settings, world, held_parameters(plan, self._modules, world)
        )
        self._batch, size = StepBatch.of(settings), settings.micro_batch_size or 1
        order = Order(len(data.train), settings.seed) if data else None
        feed = Feed(data.train, order, self._batch, fields) if data else feed_nothing
        self._feed = observed_feed(feed, activities)
        held_out = data.evaluation if data else None
        self._agreement = Agreement(world, data, order, size=size, batches=settings.eval_batches)
        self._evaluation = Evaluation(
            plan,
            job.task,
            observed_feed(
                Feed(held_out, None, StepBatch((size,)), fields) if held_out else feed_nothing,
                activities,
            ),
            world,
            activities,
            schedule=schedule,
            batches=self._agreement.evaluation_batches,
        )
        self._evaluated: EvalRecord | None = None
        self._check_tokens(data)

    def train(self) -> None:
        """All segments, the evaluations between them, and one at the end."""
        settings = self._settings
        world, samples = self._world, self._batch.samples
        sizes = [
            {**self._plan.sizes, "batch": size} for size in self._batch.sizes_of(world.replica)
        ]
        self._gather.start(settings.steps)
        for segment in segments(settings):
            steps = segment.steps
            first = self._batch.first_of(steps.start, world.replica)
            with self._activities.during(Activity("meet", "the order of the data")):
                self._agreement.check(steps.start * samples, len(steps) * samples)
            schedule = self._schedule(segment)
            delays = delays_of(schedule, settings, first, steps.start)
            self._trainer.start_segment(steps.start + 1, first, delays, flushed=segment.synchronous)
            is_short = segment.micro_batches != settings.micro_batches
            self._pipeline.run(
                schedule,
                self._feed,
                first_micro_batch=first,
                observer=self._trainer,
                sizes=None if self._batch.is_even else sizes * len(steps),
                step_samples=samples if world.replicas > 1 or is_short else None,
                loss_scale=self._trainer.loss_scale,
            )
            with self._activities.during(Activity("other", "compares the replicas' weights")):
                self._equality.check(steps.stop)
            if settings.eval_every and steps.stop % settings.eval_every == 0:
                self._evaluate(steps.stop)
        if self._evaluated is None or self._evaluated.step != settings.steps:
            self._evaluate(settings.steps)
        with self._activities.during(Activity("meet", "the figures of all steps are told")):
            self._gather.finish()
        self._pipeline.close()

    def end(self, cores: int) -> None:
        """Writes the weights, exports them if asked to, and reports the end of the run."""
        settings, folder, world = self._settings, self._job.folder, self._world
        with self._pipeline.settled():
            save_weights(self._plan, settings, folder, self._modules, world, self._activities)
        tell_end(
            self._plan,
            self._job.planned,
            settings,
            folder,
            world=world,
            schedule=self._steps.current,
            tracing=self._tracing,
            watch=self._watch,
            reporter=self._reporter,
            evaluated=self._evaluated,
            cores=cores,
            dtypes=self._dtypes,
        )

    def _told(self, figures: RankFigures) -> None:
        """A step is over on this rank."""
        self._gather.send(figures)
        self._on_step(int(figures.step))
        self._tracing.step_is_over(int(figures.step))
        if self._watch is not None:
            self._watch.poll()

    def _evaluate(self, step: int) -> None:
        if self._watch is not None:
            with self._activities.during(Activity("meet", "the figures of the last steps")):
                self._watch.drain(step)
        if not self._evaluation.batches:
            return
        self._evaluated = self._evaluation(self._pipeline, step)
        if self._reporter is not None:
            self._reporter.on_eval(self._evaluated)

    def _schedule(self, segment: Segment) -> Schedule:
        steps, settings = len(segment.steps), self._settings
        is_whole = segment.micro_batches == settings.micro_batches
        if steps == 1 and is_whole and segment.synchronous != settings.is_async:
            return self._steps.of_step(segment.steps.stop)
        like = replace(segment, steps=range(steps))
        if like not in self._others:
            if segment.synchronous:
                made = make_flushed_step(self._plan, settings, segment.micro_batches)
            else:
                made = make_segment(self._plan, settings, steps=steps)
            self._others = {like: made}
        return self._others[like]

    def _figures_until(self, step: int) -> Sequence[Sequence[RankFigures]]:
        assert self._watch is not None
        self._watch.drain(step)
        return self._watch.steady

    def _rescheduled(self, text: str, schedule: Schedule) -> None:
        write_schedule(self._job.folder, schedule)
        if self._reporter is not None:
            self._reporter.on_note("schedule", text)

    def _check_tokens(self, data: Data | None) -> None:
        if data is None or data.largest_token is None:
            return
        sample = self._job.task.sample
        for index, module in self._modules.items():
            if sample in self._plan.stages[index].inputs:
                check_vocabulary(
                    module,
                    self._plan.stages[index],
                    sample,
                    data.largest_token(),
                    source=data.source,
                    tokenizer=data.tokenizer,
                )


def write_schedule(folder: Path, schedule: Schedule) -> None:
    """Leaves the schedule in the run's folder, as `--schedule FILE` reads it."""
    (folder / "schedule.txt").write_text(to_text(schedule.compute), encoding="utf-8")


def _load(job: Job, schedule: Schedule, world: World) -> dict[int, nn.Module]:
    settings = job.settings
    modules = {}
    for stage in world.grid.stages_of(world.rank, schedule):
        module = load_stage(
            settings.folder,
            job.planned,
            stage,
            weights=settings.weights,
            device=world.machine.device,
        )
        modules[stage] = module.to(dtype_of(settings.dtype)).train()
    return modules
