"""Job and process groups -> trained stages: load, train in segments, evaluate, save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..checkpoint.contents import FoundCheckpoint
from ..checkpoint.resuming import how_to_go_on
from ..checkpoint.saving import Saver
from ..config.freezing_options import events_of
from ..config.segments import RunSegment, segments
from ..control.callbacks import Callbacks, Patience, Request, agreed
from ..distributed.equality import Equality, SharedParameterError, find_difference, held_parameters
from ..executor.instrumented import Activity
from ..executor.loading import load_unused
from ..formatting import write_loss
from ..monitoring.gather import Gather, RankFigures
from ..monitoring.records import EvalRecord, StepRecord
from ..monitoring.trace import Tracing
from ..monitoring.trackers import CompositeReporter
from ..schedule.schedule import Schedule
from ..user_code import names_object
from .checkpointing import (
    Checkpoints,
    Progress,
    Stopped,
    Stopping,
    describe_resumption,
    resume,
    save_weights,
)
from .remeasure import Remeasuring
from .run_summary import report_end
from .sample_trainer import StageTrainer, check_tokens
from .setup import Setup, news_of_caches, write_schedule
from .stages import describe_phase
from .step_records import Watch


@dataclass(frozen=True)
class Earlier:
    """The figures of earlier phases that a phase of a run reports.

    first: the record of the first step, on rank 0.
    block_norms: the norms of each block's gradients up to the last event of freezing.
    saved: the step of the last checkpoint on disk.
    tracing: the recorded steps.
    callbacks: the user's callbacks, on rank 0.
    """

    first: StepRecord | None = None
    block_norms: tuple[float, ...] = ()
    saved: int = -1
    tracing: Tracing | None = None
    callbacks: Callbacks | None = None


class Run:
    """One rank's run, or a phase of it: its stages, data feeds, optimizer steps, checkpoints and
    reporter."""

    def __init__(self, setup: Setup, stopping: Stopping, *, earlier: Earlier | None = None) -> None:
        job, world, schedule = setup.job, setup.world, setup.schedule
        config, plan, checkpoint = job.config, job.plan, setup.checkpoint
        self._setup, self._config, self._plan, self._world = setup, config, plan, world
        self._stopping = stopping
        self._activities = setup.activities
        earlier = earlier or Earlier()
        self._tracing = earlier.tracing or Tracing(config, self._activities, schedule, setup.start)
        if earlier.tracing is not None:
            self._tracing.begin_phase(config, setup.start, describe_phase(setup))
        self._callbacks = earlier.callbacks
        if config.callbacks is not None and setup.reporter is not None:
            if self._callbacks is None:
                self._callbacks = Callbacks(config, job.folder, self._activities)
            reporter = CompositeReporter((setup.reporter, self._callbacks), {}, config.seed)
            self._setup = setup = replace(setup, reporter=reporter)
        self._reporter = setup.reporter
        self._patience = Patience()
        self._trainer = StageTrainer(setup, self._step_done, self._stage_stepped)
        stages = self._trainer.stages
        stages.block_norms = earlier.block_norms
        self._modules, self._executor, self._stepper = (
            stages.modules,
            stages.executor,
            stages.stepper,
        )
        self._unused: Mapping[str, Tensor] = {}
        if world.rank == 0:
            self._unused = load_unused(config.folder, plan, weights=setup.weights)
        self._equality = Equality(
            self._modules, config, world, held_parameters(plan, self._modules, world)
        )
        self._evaluation = self._trainer.make_evaluator(self._activities)
        self._evaluated: EvalRecord | None = None
        self._difference: str | None = None
        self._has_next = False
        self._gather = Gather(world, len(plan.stages))
        self._watch = self._make_watch(earlier.first)
        self._steps = Remeasuring(
            plan,
            config,
            world,
            schedule,
            figures=self._figures_until,
            optimizer_ms=lambda: self._watch.optimizer_ms if self._watch else (),
            tell=self._rescheduled,
            resumed=checkpoint.facts.schedule if checkpoint else None,
        )
        stages.events = events_of(config, self._trainer.batch, self._trainer.agreement.length)
        self._show_frozen()
        check_tokens(setup, self._modules)
        self._checkpoints = self._resume(earlier.saved)

    @property
    def earlier(self) -> Earlier:
        """The figures of this phase and earlier ones that the next phase reports."""
        first = next(iter(self._watch.records), None) if self._watch is not None else None
        return Earlier(
            first,
            self._trainer.stages.block_norms,
            self._checkpoints.saved,
            self._tracing,
            self._callbacks,
        )

    def _make_watch(self, first: StepRecord | None) -> Watch | None:
        """On rank 0, turns the metrics of all ranks into records."""
        if self._reporter is None:
            return None
        length = self._trainer.agreement.length
        watch = Watch(self._setup, self._reporter, self._gather, length=length)
        watch.records += [] if first is None else [first]
        return watch

    def train(self) -> FoundCheckpoint | None:
        """Runs all segments with the evaluations and checkpoints between them, and a last
        evaluation. Of an elastic run that continues with other stages, returns the state that these
        begin with. Raises Stopped when the run was asked to stop before its end."""
        config, steps_made = self._config, self._setup.start
        self._gather.start(config.steps - steps_made)
        is_over = self._is_patience_over(steps_made)
        events = self._trainer.stages.events
        event_after = events.next if events else None
        for segment in segments(config, steps_made, event_after):
            if is_over or not self._stopping.may(segment.steps.start + 1):
                break
            steps_made = self._make(segment)
            if steps_made < segment.steps.stop:
                break
            is_over = self._act(steps_made)
            if self._has_next and not is_over and steps_made < config.steps:
                return self._hand_over(steps_made)
        is_stopped = steps_made < config.steps and not is_over
        if is_stopped:
            self._save(steps_made)
        elif self._evaluated is None or self._evaluated.step != steps_made:
            self._evaluate(steps_made)
        if is_over and config.save_every:
            self._save(steps_made)
        self._close()
        if is_stopped:
            self._stop(steps_made)
        return None

    def _tell_of_cache(self) -> None:
        """Notes what the caches of all ranks have to tell."""
        for text in news_of_caches(self._setup):
            self._note("cache", text)

    def _close(self) -> None:
        self._tell_of_cache()
        with self._activities.during(Activity("meet", "the metrics of all steps")):
            self._gather.finish()
        self._trainer.stages.close()
        self._checkpoints.finish()

    def _hand_over(self, step: int) -> FoundCheckpoint:
        """Ends these stages after a step; returns their state for those of the next phase."""
        self._drain(step)
        stages = self._trainer.stages
        handed_over = self._checkpoints.hand_over(stages.as_rank(), self._progress(step))
        self._trainer.close()
        self._close()
        return handed_over

    def _act(self, step: int) -> bool:
        """Freezes blocks, evaluates and saves after a step where that is due or asked for; returns
        True if the run ends there."""
        self._freeze(step)
        config, request = self._config, self._requested(step)
        is_due = self._checkpoints.is_due(step, config.steps)
        is_evaluated = request.evaluate or (config.eval_every and step % config.eval_every == 0)
        if is_evaluated or (is_due and config.keep_best):
            self._evaluate(step)
            request |= self._requested(step)
        if is_due or request.save:
            self._save(step)
            if self._callbacks is not None:
                self._callbacks.on_checkpoint(step)
        self._checkpoints.poll()
        if request.stop:
            self._note("ended", f"by --callbacks after step {step} of {config.steps}")
        return request.stop or self._is_patience_over(step)

    def _freeze(self, step: int) -> None:
        """Freezes blocks after a step with an event, as the rule says."""
        stages = self._trainer.stages
        if (event := stages.event_at(step)) is None:
            return
        self._drain(step)
        if self._config.elastic:
            self._has_next = stages.take_note(event)
            self._show_frozen()
            return
        self._tell_of_cache()
        with self._activities.during(Activity("other", "freezes blocks")):
            has_changed = stages.freeze(event, step)
        self._show_frozen()
        if has_changed and stages.freezing is not None:
            self._steps.narrow(stages.plan)
            self._note("frozen", f"{stages.freezing.describe()}, after step {step}")

    def _show_frozen(self) -> None:
        stages = self._trainer.stages
        if self._watch is not None and stages.freezing is not None:
            self._watch.frozen = stages.frozen, len(stages.freezing.blocks)
            self._watch.block_norms = stages.block_norms
            self._watch.block_distances = stages.freezing.progress.evidence.distances

    def _requested(self, step: int) -> Request:
        """The requests of callbacks after a step, the same on all ranks; sets the learning rate."""
        if self._config.callbacks is None:
            return Request()
        self._drain(step)
        with self._activities.during(Activity("meet", "the requests of callbacks")):
            request = agreed(self._world, self._callbacks)
        if request.lr_factor is not None:
            self._set_lr_factor(request.lr_factor)
        return request

    def _set_lr_factor(self, factor: float) -> None:
        self._stepper.set_lr_factor(factor)
        if self._watch is not None:
            self._watch.lr_factor = factor

    def _is_patience_over(self, step: int) -> bool:
        limit, since = self._config.early_stop, self._patience.since
        if not limit or since < limit:
            return False
        best = write_loss(self._patience.best)
        self._note(
            "ended",
            f"after step {step} of {self._config.steps}: {since} evaluations without a loss "
            f"below {best}",
        )
        return True

    def end(self) -> None:
        """Writes the weights, exports them if requested, and reports the end of the run. Afterwards
        raises SharedParameterError if the holders of a tied parameter differ."""
        setup = self._setup
        difference = self._compare_shared()
        if self._config.has_network:
            self._save_weights()
        if setup.cache is not None:
            self._note("cache", setup.cache.describe())
        report_end(
            setup,
            self._steps.current,
            self._tracing,
            watch=self._watch,
            evaluated=self._evaluated,
        )
        if difference is not None:
            cure = "Please report the options; where hosts differ in processors, use hosts alike."
            if names_object(self._config.optimizer):
                cure = (
                    "Your optimizer may neither draw random numbers nor go by a parameter's place."
                )
            raise SharedParameterError(
                difference, f"The weights are written, but were evaluated with both values. {cure}"
            )

    def _save_weights(self) -> None:
        with self._trainer.stages.as_rank().written_states() as states:
            save_weights(
                self._plan,
                self._config,
                self._setup.job.folder,
                states,
                self._unused,
                self._world,
                self._activities,
            )

    def _compare_shared(self) -> str | None:
        """The message about tied parameters that differ between stages; warns once."""
        if not self._config.has_network:
            return None
        with self._activities.during(Activity("meet", "the checksums of shared parameters")):
            difference = find_difference(self._plan, self._modules, self._world)
        if difference is not None and self._difference is None and self._reporter is not None:
            self._reporter.on_warning(difference)
        self._difference = difference
        return difference

    def _make(self, segment: RunSegment) -> int:
        """Runs the steps of a segment, up to a stop if there is one; returns the number of steps of
        the run so far."""
        steps, batch, agreement = segment.steps, self._trainer.batch, self._trainer.agreement
        reads = Activity("data", "the first samples, which ranks compare")
        with self._activities.during(Activity("meet", "the order of the data")):
            warning = agreement.check(
                batch.position(steps.start),
                batch.position(steps.stop) - batch.position(steps.start),
                lambda: self._activities.during(reads),
            )
        if warning and self._reporter is not None:
            self._reporter.on_warning(warning)
        self._trainer.run(
            segment,
            self._schedule(segment),
            may=lambda step: self._stopping.may(steps.start + step),
        )
        last = self._stopping.last
        last_step = steps.stop if last is None else min(last, steps.stop)
        if segment.synchronous:
            self._compare_replicas(last_step)
        return last_step

    def _stage_stepped(self, stage: int) -> None:
        """Called after a stage's step. Stages that step together are compared after the segment,
        as they may step after the last of them has called this."""
        if not self._stepper.is_synchronous:
            self._compare_replicas(self._executor.versions[stage], stage)

    def _compare_replicas(self, step: int, stage: int | None = None) -> None:
        with self._activities.during(Activity("other", "compares the replicas' weights")):
            self._equality.check(step, stage)

    def _resume(self, saved: int) -> Checkpoints:
        """Restores the checkpoint if there is one; returns the writer of later checkpoints."""
        setup, config, checkpoint = self._setup, self._config, self._setup.checkpoint
        if checkpoint is not None:
            resume(self._trainer.stages.as_rank(), checkpoint, config, self._stepper)
            self._set_lr_factor(self._stepper.lr_factor)
            if (state := checkpoint.facts.trainer.get("patience")) is not None:
                self._patience = Patience.of(state)
            if checkpoint.held is None:
                saved = checkpoint.facts.step
                self._note_resumption(checkpoint)
        saver = Saver(
            setup.job.folder,
            self._plan,
            self._world,
            setup.board,
            self._activities,
            config,
            tell=lambda text: self._note("checkpoint", text),
            unused=self._unused,
        )
        return Checkpoints(
            setup.job.started or config,
            saver,
            self._activities,
            unused=self._unused,
            length=self._trainer.agreement.length,
            saved=saved,
        )

    def _note_resumption(self, checkpoint: FoundCheckpoint) -> None:
        config, length = self._setup.job.started or self._config, self._trainer.agreement.length
        for text in describe_resumption(checkpoint, config, length, self._config.steps):
            self._note("resumed", text)
        if again := self._trainer.describe_resumption():
            self._note("resumed", again)

    def _save(self, step: int) -> None:
        if not self._config.has_network:
            return
        self._drain(step)  # so that a resumed run has the records up to this step
        self._compare_shared()
        self._checkpoints.save(self._trainer.stages.as_rank(), self._progress(step))

    def _progress(self, step: int) -> Progress:
        evaluated = self._evaluated
        return Progress(
            step=step,
            samples=self._trainer.batch.position(step),
            schedule=self._steps.text_after(step),
            trainer=self._stepper.state()
            | self._trainer.state()
            | self._trainer.stages.state()
            | {"patience": self._patience.state()},
            evaluation=evaluated.loss if evaluated and evaluated.step == step else None,
            seconds=self._watch.elapsed_s if self._watch else 0.0,
        )

    def _stop(self, step: int) -> None:
        """Ends a run that was asked to stop, once all ranks have written their checkpoint."""
        reason = f"by {self._stopping.reason} after step {step} of {self._config.steps}"
        self._note("stopped", reason + how_to_go_on(self._setup.job.folder))
        with self._activities.during(Activity("meet", "the checkpoint is written")):
            self._world.meet()
        raise Stopped

    def _note(self, about: str, text: str) -> None:
        if self._reporter is not None:
            self._reporter.on_note(about, text)

    def _step_done(self, figures: RankFigures) -> None:
        """Called when this rank has completed a step."""
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
        self._tell_of_cache()
        if not self._evaluation.batch.count:
            return
        self._evaluated = self._evaluation(self._executor, step)
        self._patience = self._patience.after(self._evaluated.loss)
        if self._reporter is not None:
            self._reporter.on_eval(self._evaluated)

    def _schedule(self, segment: RunSegment) -> Schedule:
        if len(segment.steps) == 1 and segment.synchronous != self._config.is_async:
            return self._steps.of_step(segment.steps.stop)
        return self._trainer.stages.schedule_of(segment)

    def _figures_until(self, step: int) -> Sequence[Sequence[RankFigures]]:
        assert self._watch is not None
        self._watch.drain(step)
        return self._watch.steady

    def _rescheduled(self, text: str, schedule: Schedule) -> None:
        write_schedule(self._setup.job.folder, schedule)
        self._note("schedule", text)
