"""What a rank trains with -> trained stages: load, train in segments, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from ..activity import Activities, Activity
from ..checkpoint.checkpoints import Checkpoints, describe_resumption, resume
from ..checkpoint.contents import Rank
from ..checkpoint.resuming import how_to_go_on
from ..checkpoint.saving import Saver
from ..data.order import Order
from ..data.vocabulary import check_vocabulary
from ..exits import exits_told
from ..launching.world import World
from ..loading import load_stage, load_unused
from ..observed import ObservedTransport, observed_feed
from ..pipeline import Pipeline, needed_inputs
from ..replication.equality import Equality
from ..replication.holders import held_parameters
from ..schedule import Schedule
from ..seeding import drawing_from
from ..tensors import dtype_of
from ..watching.gather import Gather, RankFigures
from ..watching.metrics import EvalRecord, Reporter
from ..watching.out_of_memory import memory_watched
from ..watching.several import reporting
from ..watching.tracing import Tracing
from ..watching.watch import Watch
from ..watching.watchdog import Watchdog
from .agreement import Agreement
from .asynchronous import delays_of
from .board import Board
from .criterion import find_criterion
from .ending import save_weights, tell_end
from .evaluation import Evaluation
from .half import precision_of
from .observer import Trainer
from .remeasure import Remeasuring
from .segments import Segment, make_flushed_step, make_segment, segments
from .settings import Settings
from .setup import Job, Setup, find_checkpoint, set_up, write_schedule
from .shared_equality import SharedParameterError, find_difference
from .sources import Data, Feed, feed_nothing
from .step_batch import StepBatch, consumed
from .stopping import Stopped, Stopping
from .transport import make_transport


def train(
    job: Job,
    world: World,
    make_reporter: Callable[[Settings], Reporter],
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Trains this rank's stages; every rank calls it.

    What the user's code draws depends on the seed alone, and is the same on all ranks. The reporter
    is made on rank 0 only. `on_step` is told every step that this rank has made. Raises the
    AsyncPipeError that ends this rank, and Stopped when the run was told to stop.
    """
    activities, board = Activities(), Board(world)
    with (
        drawing_from(job.settings.seed, "run"),
        Watchdog(job.settings, job.folder, world, activities) as watchdog,
        memory_watched(job.plan, job.settings, world, activities),
        Stopping(board, patience_s=job.settings.patience_s) as stopping,
    ):
        found, skipped = find_checkpoint(job, world, activities)
        with reporting(job.settings, job.folder, world, make_reporter) as reporter, exits_told():
            if reporter is not None:
                watchdog.tell = reporter.on_warning
                for text in skipped:
                    reporter.on_warning(text)
            setup = set_up(job, world, reporter, found, on_step, activities, board)
            with activities.during(Activity("other", "loads its stages")):
                run = _Run(setup, stopping)
            run.train()
            run.end()


class _Run:
    """One rank's run: its stages, what it reads, and whom it tells."""

    def __init__(self, setup: Setup, stopping: Stopping) -> None:
        job, world, schedule = setup.job, setup.world, setup.schedule
        settings, plan, found = job.settings, job.plan, setup.found
        self._setup, self._settings, self._plan, self._world = setup, settings, plan, world
        self._stopping, self._reporter, activities = stopping, setup.reporter, setup.activities
        self._activities = activities
        self._tracing = Tracing(settings, activities, schedule, setup.start)
        self._modules = _load(setup)
        self._unused: Mapping[str, Tensor] = {}
        if world.rank == 0:
            self._unused = load_unused(settings.folder, plan, weights=setup.weights)
        device = world.machine.device
        self._pipeline = Pipeline(
            plan,
            self._modules,
            ObservedTransport(
                make_transport(setup.transport, world, settings, plan, schedule, device),
                activities,
                first_rank=world.grid.first_of(world.replica),
            ),
            rank_of_stage=schedule.rank_of_stage,
            replicas=schedule.replicas,
            staleness=settings.staleness or "none",
            criterion=find_criterion(settings.criterion, settings.seed)
            if settings.criterion
            else None,
            device=device,
            precision=precision_of(settings),
            dtypes=setup.dtypes,
            seed=settings.seed,
            batch_norm_per_step=settings.batch_norm == "mini-batch",
        )
        self._others: dict[Segment, Schedule] = {}
        self._trainer = Trainer(
            plan,
            self._modules,
            settings,
            world,
            self._told,
            lr_scale=self._pipeline.lr_scale,
            activities=activities,
            copies=setup.copies,
            delays=schedule.delays,
        )
        self._pipeline.attach(self._trainer.optimizers)
        self._equality = Equality(
            self._modules, settings, world, held_parameters(plan, self._modules, world)
        )
        data, size = setup.data, settings.micro_batch_size or 1
        first = found.facts.samples if found else 0
        self._batch = StepBatch.of(settings, first_step=setup.start, first_sample=first)
        order = Order(len(data.train), settings.seed) if data else None
        feed = (
            Feed(data.train, order, self._batch, setup.fields, seed=data.seed, dims=data.dims)
            if data
            else feed_nothing
        )
        self._feed = observed_feed(feed, activities)
        held_out = data.evaluation if data else None
        self._agreement = Agreement(
            world,
            data,
            order,
            size=size,
            batches=settings.eval_batches,
            first=first,
            fields=needed_inputs(
                plan, range(len(plan.stages)), criterion=settings.criterion is not None
            ),
            own_fields=setup.fields,
        )
        self._evaluation = Evaluation(
            plan,
            job.task,
            observed_feed(
                Feed(
                    held_out, None, StepBatch((size,)), setup.fields, seed=data.seed, dims=data.dims
                )
                if data and held_out
                else feed_nothing,
                activities,
            ),
            world,
            activities,
            schedule=schedule,
            batches=self._agreement.evaluation_batches,
        )
        self._evaluated: EvalRecord | None = None
        self._difference: str | None = None
        self._gather = Gather(world, len(plan.stages))
        self._watch: Watch | None = None
        if setup.reporter is not None:
            self._watch = Watch(
                settings,
                job.task,
                self._gather,
                setup.reporter,
                self._batch,
                length=self._agreement.length,
                seconds=found.facts.seconds if found else 0.0,
            )
        self._steps = Remeasuring(
            plan,
            settings,
            world,
            schedule,
            figures=self._figures_until,
            optimizer_ms=lambda: self._watch.optimizer_ms if self._watch else (),
            tell=self._rescheduled,
            resumed=found.facts.schedule if found else None,
        )
        self._check_tokens(data)
        self._checkpoints = self._go_on()

    def train(self) -> None:
        """All segments, the evaluations and checkpoints between them, and one at the end. Raises
        Stopped where the run was told to stop before."""
        settings, made = self._settings, self._setup.start
        self._gather.start(settings.steps - made)
        for segment in segments(settings, made):
            if not self._stopping.may(segment.steps.start + 1):
                break
            made = self._make(segment)
            if made < segment.steps.stop:
                break
            is_due = self._checkpoints.is_due(made)
            if settings.eval_every and made % settings.eval_every == 0:
                self._evaluate(made)
            elif is_due and settings.keep_best:
                self._evaluate(made)
            if is_due:
                self._save(made)
            self._checkpoints.poll()
        is_stopped = made < settings.steps
        if is_stopped:
            self._save(made)
        elif self._evaluated is None or self._evaluated.step != made:
            self._evaluate(made)
        with self._activities.during(Activity("meet", "the figures of all steps are told")):
            self._gather.finish()
        self._pipeline.close()
        self._checkpoints.finish()
        if is_stopped:
            self._stop(made)

    def end(self) -> None:
        """Writes the weights, exports them if asked to, and reports the end of the run. Raises
        SharedParameterError after that, where holders of a parameter have come apart."""
        setup, world = self._setup, self._world
        difference = self._compare_shared()
        with self._pipeline.settled():
            save_weights(
                self._plan,
                self._settings,
                setup.job.folder,
                self._modules,
                self._unused,
                world,
                self._activities,
            )
        tell_end(
            self._plan,
            setup.job.planned,
            self._settings,
            setup.job.folder,
            world=world,
            schedule=self._steps.current,
            tracing=self._tracing,
            watch=self._watch,
            reporter=self._reporter,
            evaluated=self._evaluated,
            cores=world.machine.cores,
            dtypes=setup.dtypes,
        )
        if difference is not None:
            raise SharedParameterError(
                difference,
                "The weights are written, but were evaluated with both values. Please report the "
                "options of this run; where hosts differ in their processors, use hosts alike.",
            )

    def _compare_shared(self) -> str | None:
        """What is wrong with parameters that several stages hold; warns of it once."""
        with self._activities.during(Activity("meet", "the checksums of shared parameters")):
            difference = find_difference(self._plan, self._modules, self._world)
        if difference is not None and self._difference is None and self._reporter is not None:
            self._reporter.on_warning(difference)
        self._difference = difference
        return difference

    def _make(self, segment: Segment) -> int:
        """Makes the steps of a segment, or those of them that are made before a stop; how many the
        run has by then."""
        settings, world, steps = self._settings, self._world, segment.steps
        position, samples = self._batch.position(steps.start), self._batch.samples
        reads = Activity("data", "the first samples, which ranks compare")
        with self._activities.during(Activity("meet", "the order of the data")):
            warning = self._agreement.check(
                position, len(steps) * samples, lambda: self._activities.during(reads)
            )
        if warning and self._reporter is not None:
            self._reporter.on_warning(warning)
        first = self._batch.first_of(steps.start, world.replica)
        schedule = self._schedule(segment)
        delays = delays_of(schedule, settings, first, steps.start)
        self._trainer.start_segment(steps.start + 1, first, delays, flushed=segment.synchronous)
        is_short = segment.micro_batches != settings.micro_batches
        sizes = [
            {**self._plan.sizes, "batch": size} for size in self._batch.sizes_of(world.replica)
        ]
        self._pipeline.run(
            schedule,
            self._feed,
            first_micro_batch=first,
            observer=self._trainer,
            sizes=None if self._batch.is_even else sizes * len(steps),
            step_samples=samples if world.replicas > 1 or is_short else None,
            loss_scale=self._trainer.loss_scale,
            may=(lambda step: self._stopping.may(steps.start + step)) if len(steps) > 1 else None,
        )
        last = self._stopping.last
        made = steps.stop if last is None else min(last, steps.stop)
        with self._activities.during(Activity("other", "compares the replicas' weights")):
            self._equality.check(made)
        return made

    def _go_on(self) -> Checkpoints:
        """Lets this rank go on from the checkpoint that was found, if one was; what writes those to
        come."""
        setup, settings, found = self._setup, self._settings, self._setup.found
        rank = Rank(
            self._plan,
            self._world,
            self._modules,
            self._pipeline,
            self._trainer.optimizers,
            settings.is_async,
        )
        if found is not None:
            resume(rank, found, settings, self._trainer)
            for text in describe_resumption(found, settings, self._agreement.length):
                self._note("resumed", text)
        saver = Saver(
            setup.job.folder,
            self._plan,
            self._world,
            setup.board,
            self._activities,
            last=settings.keep_last,
            best=settings.keep_best,
            save_to=settings.save_to,
            patience_s=settings.patience_s,
            tell=lambda text: self._note("checkpoint", text),
            unused=self._unused,
        )
        return Checkpoints(
            settings,
            rank,
            saver,
            self._activities,
            unused=self._unused,
            length=self._agreement.length,
            first_step=found.facts.step if found else -1,
        )

    def _save(self, step: int) -> None:
        self._drain(step)  # A run that goes on from there has the records until there.
        self._compare_shared()
        evaluated = self._evaluated
        self._checkpoints.save(
            step,
            samples=consumed(self._settings, self._batch, step),
            schedule=self._steps.text_after(step),
            trainer=self._trainer.state(),
            evaluation=evaluated.loss if evaluated and evaluated.step == step else None,
            seconds=self._watch.elapsed_s if self._watch else 0.0,
        )

    def _stop(self, step: int) -> None:
        """Ends a run that was told to stop, when all ranks have what they need for another."""
        told = f"by {self._stopping.reason} after step {step} of {self._settings.steps}"
        self._note("stopped", told + how_to_go_on(self._setup.job.folder))
        with self._activities.during(Activity("meet", "the checkpoint is written")):
            self._world.meet()
        raise Stopped

    def _note(self, about: str, text: str) -> None:
        if self._reporter is not None:
            self._reporter.on_note(about, text)

    def _told(self, figures: RankFigures) -> None:
        """A step is over on this rank."""
        self._gather.send(figures)
        self._setup.on_step(int(figures.step))
        self._tracing.step_is_over(int(figures.step))
        if self._watch is not None:
            self._watch.poll()

    def _drain(self, step: int) -> None:
        if self._watch is not None:
            with self._activities.during(Activity("meet", "the figures of the last steps")):
                self._watch.drain(step)

    def _evaluate(self, step: int) -> None:
        self._drain(step)
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
        write_schedule(self._setup.job.folder, schedule)
        self._note("schedule", text)

    def _check_tokens(self, data: Data | None) -> None:
        if data is None or data.largest_token is None:
            return
        sample = self._setup.job.task.sample
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


def _load(setup: Setup) -> dict[int, nn.Module]:
    settings, world = setup.job.settings, setup.world
    modules = {}
    for stage in world.grid.stages_of(world.rank, setup.schedule):
        module = load_stage(
            settings.folder,
            setup.job.planned,
            stage,
            weights=setup.weights,
            device=world.machine.device,
        )
        modules[stage] = module.to(dtype_of(settings.dtype)).train()
    return modules
